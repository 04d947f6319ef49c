// NVFP4: E2M1 elements, an E4M3 scale for each 16, and a global scale.
#pragma once
#include "quantize.cuh"

namespace cq {

struct Nvfp4 : E2m1, ByteScales<Scale::E4m3> {
    static constexpr uint32_t GROUP = 16;
    // A folded scale of 1 becomes 2^7; products are exact.
    static constexpr int FOLDED_EXPONENT = 7;
    static constexpr float LARGEST = E2m1::MAX * E4m3::MAX;

    static __device__ __forceinline__ void quantize_group(const CqQuantize &p, LaneOfGroup &own, uint64_t group, bool stores) {
        const float scale_of_scales = p.absmax == 0 ? 1.0f : __fdiv_rn(LARGEST, p.absmax);
        const float largest = rounded(__fdiv_rn(absmax_of_group(own, 16), E2m1::MAX), p.dtype);
        const uint32_t scale = E4m3::nearest(__fmul_rn(largest, scale_of_scales), CQ_F32);
        const float value = rounded(__fdiv_rn(own.weight[0], E4m3::to_float(scale)), p.dtype);
        own.code[0] = E2m1::nearest(__fmul_rn(value, scale_of_scales), CQ_F32);
        if (stores) static_cast<uint8_t *>(p.scales)[group] = static_cast<uint8_t>(scale);
    }
};

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are.
#define CQ_FORMATS_NVFP4(X) X(nvfp4, cq::Nvfp4)
#define CQ_QUANTIZE_NVFP4(X) CQ_FORMATS_NVFP4(X)
#define CQ_GEMV_NVFP4(X) X(nvfp4, cq::Nvfp4, 16)
#define CQ_TILES_NVFP4(X) X(nvfp4, cq::Nvfp4, 16)
