// The scale of a group: how it is stored, and as a number.
#pragma once
#include "../device.cuh"

namespace cq {

// How the scales of a format are stored.
//
// Those of a super-block are integers: they count units that 256 elements share.
enum class Scale { Float, E8m0, E4m3, SuperBlock };
constexpr int SUPER_BLOCK = 256;

// Raw bits of scale i: loaded early, converted late, so that nothing waits for the load.
template <Scale KIND> __device__ __forceinline__ uint32_t scale_bits(const void *scales, size_t i) {
    if constexpr (KIND == Scale::Float)
        return static_cast<const uint16_t *>(scales)[i];
    else
        return static_cast<const uint8_t *>(scales)[i];
}

// The number that 16-bit or 8-bit scale bits stand for, of super-blocks without its unit; `dtype` (F16 or BF16) matters for Float only.
template <Scale KIND> __device__ __forceinline__ float scale_from_bits(uint32_t bits, uint32_t dtype) {
    if constexpr (KIND == Scale::Float)
        return dtype == CQ_F16 ? half_bits_to_float(bits) : bf16_bits_to_float(bits);
    else if constexpr (KIND == Scale::E8m0)
        return e8m0_to_float(bits);
    else if constexpr (KIND == Scale::SuperBlock)
        return static_cast<float>(static_cast<int8_t>(bits));
    else
        return half_bits_to_float(e4m3x2_to_half2(bits));
}

// Bytes of one scale, for Float of `dtype`.
template <Scale KIND> __device__ __forceinline__ size_t scale_bytes(uint32_t dtype) {
    return KIND != Scale::Float ? 1 : dtype == CQ_F32 ? 4 : 2;
}

// Scale and bias of a group, and the code that stands for zero; formats without them leave them at 0.
struct GroupScale {
    float scale, bias, zero_point;
};

// Formats whose scales are bytes: a weight is element * (scale * global scale), rounded once each.
template <Scale KIND> struct ByteScales {
    static_assert(KIND == Scale::E8m0 || KIND == Scale::E4m3, "one byte");
    static constexpr Scale SCALES = KIND;
    static constexpr bool HAS_BIASES = false, HAS_OFFSETS = false, HAS_UNITS = false;

    static __device__ __forceinline__ GroupScale load_group(const CqMatrix &matrix, size_t group, float global_scale) {
        const float scale = scale_from_bits<KIND>(scale_bits<KIND>(matrix.scales, group), CQ_F32);
        return {__fmul_rn(scale, global_scale), 0.0f, 0.0f};
    }
    static __device__ __forceinline__ float weight(float element, GroupScale group) { return __fmul_rn(element, group.scale); }
};

// Formats whose scales are f16, bf16 or f32: a weight is (element - zero point) * scale + bias.
struct FloatScales {
    static constexpr Scale SCALES = Scale::Float;
    static constexpr bool HAS_UNITS = false;

    static __device__ __forceinline__ float load_scale(const CqMatrix &matrix, size_t group) {
        return load_float(matrix.scales, group, matrix.scale_dtype);
    }
    static __device__ __forceinline__ float weight(float element, GroupScale group) {
        // The difference is exact. A bias of +0 makes the sum of -0 the +0 of the reference.
        return __fadd_rn(__fmul_rn(element - group.zero_point, group.scale), group.bias);
    }
};

// Formats with float scales and nothing else, so that a zero keeps its sign.
struct PlainFloatScales : FloatScales {
    static constexpr bool HAS_BIASES = false, HAS_OFFSETS = false;

    static __device__ __forceinline__ GroupScale load_group(const CqMatrix &matrix, size_t group, float) {
        return {load_scale(matrix, group), 0.0f, 0.0f};
    }
    static __device__ __forceinline__ float weight(float element, GroupScale group) { return __fmul_rn(element, group.scale); }
};

// Formats with super-blocks: the product of an integer and its unit is exact.
template <uint32_t GROUP> struct SuperBlockScales {
    static constexpr Scale SCALES = Scale::SuperBlock;
    static constexpr bool HAS_UNITS = true;

    static __device__ __forceinline__ float load_product(const void *integers, const void *units, size_t group) {
        const uint32_t unit = static_cast<const uint16_t *>(units)[group / (SUPER_BLOCK / GROUP)];
        return scale_from_bits<SCALES>(scale_bits<SCALES>(integers, group), CQ_F32) * half_bits_to_float(unit);
    }
};

}  // namespace cq
