// NF4 and FP4 of bitsandbytes: 4-bit codes select from a table, a float scale for each 64.
#pragma once
#include "quantize.cuh"

namespace cq {

// In constant memory, for want of registers: lanes with different codes wait for each other.
__constant__ constexpr float NF4_VALUES[16] = {
    -1.0f,         -0.6961928f,   -0.52507305f, -0.3949175f,  -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f,    0.1609302f,    0.2461123f,   0.33791524f,  0.44070983f,  0.562617f,    0.72295684f,   1.0f,
};

// Twelfths, as bitsandbytes rounds them.
__constant__ constexpr float FP4_VALUES[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  6.0f / 12,  2.0f / 12,  3.0f / 12,
    0.0f,  -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12,
};

struct Nf4 : PlainFloatScales {
    static constexpr int BITS = 4;
    static constexpr uint32_t GROUP = 64;

    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = NF4_VALUES[codes.low >> (4 * (first + i)) & 15];
    }

    static __device__ __forceinline__ uint32_t nearest(float value) {
        uint32_t code = 0;
#pragma unroll
        for (int i = 0; i < 15; ++i) code += value > (NF4_VALUES[i] + NF4_VALUES[i + 1]) / 2;
        return code;
    }
    static __device__ __forceinline__ void quantize_group(const CqQuantize &p, LaneOfGroup &own, uint64_t group, bool stores) {
        const float largest = absmax_of_group(own, 32);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) own.code[i] = nearest(largest > 0 ? __fdiv_rn(own.weight[i], largest) : 0.0f);
        if (stores) store_float(p.scales, group, p.dtype, largest);
    }
};

struct Fp4 : Nf4 {
    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = FP4_VALUES[codes.low >> (4 * (first + i)) & 15];
    }
    // Codes by ascending value, without the second zero, four bits each.
    static __device__ __forceinline__ uint32_t ascending(int rank) {
        return static_cast<uint32_t>(0x3254'7610'9efc'dabULL >> (4 * rank)) & 15;
    }
    static __device__ __forceinline__ uint32_t nearest(float value) {
        int rank = 0;
#pragma unroll
        for (int i = 0; i < 14; ++i) rank += value > (FP4_VALUES[ascending(i)] + FP4_VALUES[ascending(i + 1)]) / 2;
        return ascending(rank);
    }
    static __device__ __forceinline__ void quantize_group(const CqQuantize &p, LaneOfGroup &own, uint64_t group, bool stores) {
        const float largest = absmax_of_group(own, 32);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) own.code[i] = nearest(largest > 0 ? __fdiv_rn(own.weight[i], largest) : 0.0f);
        if (stores) store_float(p.scales, group, p.dtype, largest);
    }
};

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are.
#define CQ_FORMATS_NF4(X) X(nf4, cq::Nf4) X(fp4, cq::Fp4)
#define CQ_QUANTIZE_NF4(X) CQ_FORMATS_NF4(X)
