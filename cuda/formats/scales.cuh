// The scale of a group, as a number.
#pragma once
#include "../device.cuh"

namespace cq {

// How the scales of a format are stored.
enum class ScaleKind { Float, E8m0, E4m3 };

// Raw bits of scale i: loaded early, converted late, so that a load is not waited for.
template <ScaleKind KIND> __device__ __forceinline__ uint32_t scale_bits(const void *scales, size_t i) {
    if constexpr (KIND == ScaleKind::Float)
        return static_cast<const uint16_t *>(scales)[i];
    else
        return static_cast<const uint8_t *>(scales)[i];
}

// The number that 16-bit or 8-bit scale bits stand for; `dtype` (F16 or BF16) matters for Float only.
template <ScaleKind KIND> __device__ __forceinline__ float scale_from_bits(uint32_t bits, uint32_t dtype) {
    if constexpr (KIND == ScaleKind::Float)
        return dtype == CQ_F16 ? half_bits_to_float(bits) : bf16_bits_to_float(bits);
    else if constexpr (KIND == ScaleKind::E8m0)
        return e8m0_to_float(bits);
    else
        return half_bits_to_float(e4m3x2_to_half2(bits));
}

}  // namespace cq
