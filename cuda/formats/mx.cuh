// OCP microscaling: MXFP4, MXFP8 and MXINT8, a power of two (E8M0) for each 32 elements.
#pragma once
#include "quantize.cuh"

namespace cq {

// Smallest e with 2^e >= value, at least -127; 0 for a value of zero.
__device__ __forceinline__ int ceil_log2(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (bits == 0) return 0;
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu;
    // A subnormal above 2^-127 rounds up to 2^-126, every other to the lower limit.
    if (exponent == 0) return mantissa > 0x400000u ? -126 : -127;
    return static_cast<int>(exponent) - 127 + (mantissa != 0);
}

// Tensor-core kernels may fold scales into weights: the largest scale of a round then becomes 2^FOLDED. Products stay
// exact down to 2^-24 of the largest.
template <class Element, int FOLDED> struct Mx : Element, ByteScales<Scale::E8m0> {
    static constexpr uint32_t GROUP = 32;
    static constexpr int FOLDED_EXPONENT = FOLDED;

    static __device__ __forceinline__ void quantize_group(const CqQuantize &p, LaneOfGroup &own, uint64_t group, bool stores) {
        const float largest = __fdiv_rn(absmax_of_group(own, 32), Element::MAX);
        uint32_t scale = static_cast<uint32_t>(ceil_log2(rounded(largest, p.dtype)) + 127);
        // The largest numbers of a dtype saturate where the power of two is not one of its numbers.
        if (!(rounded(e8m0_to_float(scale), p.dtype) < INFINITY)) --scale;
        const float divisor = rounded(e8m0_to_float(scale), p.dtype);
        const float value = rounded(__fdiv_rn(own.weight[0], divisor), p.dtype);
        own.code[0] = Element::nearest(value, p.dtype);
        if (stores) static_cast<uint8_t *>(p.scales)[group] = static_cast<uint8_t>(scale);
    }
};

// Two's complement, times 2^-6.
struct Int8 {
    static constexpr int BITS = 8;
    static constexpr float MAX = 127.f / 64;

    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
        // A byte at the end of 2^23 is 2^23 plus the byte: faster than a conversion, and as exact.
        const uint32_t from_minus_128 = (first == 0 ? codes.low : codes.high) ^ 0x80808080u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float shifted = __uint_as_float(__byte_perm(from_minus_128, 0x4b000000u, 0x7440 + i));
            element[i] = __fmul_rn(__fadd_rn(shifted, -(8388608.f + 128.f)), 0x1p-6f);
        }
    }

    static constexpr float OUT_SCALE = 1.f / 64;
    static constexpr bool SPLIT = false;
    static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[4]) {
        // A byte at the end of 2^10 is 2^10 plus the byte, as a half.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t from_minus_128 = (i < 2 ? codes.low : codes.high) ^ 0x80808080u;
            const uint32_t shifted = __byte_perm(from_minus_128, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
            pairs[i] = as_bits(__hsub2(as_half2(shifted), __float2half2_rn(1024.f + 128.f)));
        }
    }

    // The value has been rounded to the dtype of the weights.
    static __device__ __forceinline__ uint32_t nearest(float value, uint32_t) {
        const float steps = rintf(__fmul_rn(value, 64.0f));
        return static_cast<uint8_t>(static_cast<int8_t>(fminf(fmaxf(steps, -127.0f), 127.0f)));
    }
};

using Mxfp4 = Mx<E2m1, 15>;
using Mxfp8 = Mx<E4m3, 7>;
using Mxint8 = Mx<Int8, 0>;

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are.
#define CQ_FORMATS_MX(X)  \
    X(mxfp4, cq::Mxfp4)   \
    X(mxfp8, cq::Mxfp8)   \
    X(mxint8, cq::Mxint8)
#define CQ_QUANTIZE_MX(X) CQ_FORMATS_MX(X)
#define CQ_GEMV_MX(X)              \
    X(mxfp4, cq::Mxfp4, 32)        \
    X(mxfp8, cq::Mxfp8, 32)
#define CQ_TILES_MX(X)             \
    X(mxfp4, cq::Mxfp4, 32)        \
    X(mxfp8, cq::Mxfp8, 32)        \
    X(mxint8, cq::Mxint8, 32)
