// Elements that several families have in common: E2M1 and E4M3.
//
// An element knows its codes in three ways: one by one as f32 (`elements`: the bits of the scalar reference),
// UNIT consecutive ones as UNIT / 2 pairs of halves for tensor cores (`to_halves`), and from a number (`nearest`).
// Half h of a unit is weight `weight_of(h)` of it, times 1 / OUT_SCALE, plus `offset(h)`. The tile kernels take them from
// `octet_to_halves`, without an offset: pair i has codes i and i + 4 of an octet if it is SPLIT, else codes 2i and 2i + 1.
#pragma once
#include "codes.cuh"

namespace cq {

struct E2m1 {
    static constexpr int BITS = 4;
    static constexpr float MAX = 6;

    // Code i, known at compile time, of an octet.
    static __device__ __forceinline__ float element(Octet codes, int i) {
        // Sign, exponent and mantissa become a float's, 2^126 too small: the exponent's bias is 1, not 127,
        // and subnormals stay subnormals.
        const int32_t at_top = static_cast<int32_t>(codes.low << (28 - 4 * i));
        const uint32_t bits = static_cast<uint32_t>(at_top >> 6) & 0x81c00000u;
        return __fmul_rn(__uint_as_float(bits), 0x1p126f);
    }
    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element_)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element_[i] = element(codes, first + i);
    }

    // The first code whose distance from `value`, rounded to `dtype`, is smallest. Distances that are not
    // numbers lose, which leaves code 0.
    static __device__ __forceinline__ uint32_t nearest(float value, uint32_t dtype) {
        uint32_t nearest = 0;
        float smallest = fabsf(rounded(value, dtype));
#pragma unroll
        for (uint32_t code = 1; code < 16; ++code) {
            const float distance = fabsf(rounded(__fsub_rn(value, element({code, 0}, 0)), dtype));
            nearest = distance < smallest ? code : nearest;
            smallest = distance < smallest ? distance : smallest;
        }
        return nearest;
    }

    // The bits of a number, moved to the sign and the low exponent bits of a half, read as it times 2^-14.
    static constexpr int UNIT = 8;
    static constexpr float OUT_SCALE = 16384.f;

    static constexpr __host__ __device__ int weight_of(int h) { return h / 2 + (h % 2) * 4; }
    static constexpr __host__ __device__ float offset(int) { return 0.f; }

    template <int U> static __device__ __forceinline__ void to_halves(const uint32_t *words, uint32_t *pairs) {
        const uint32_t even = words[U] & EVERY_OTHER, odd = words[U] >> 4 & EVERY_OTHER;
        pairs[0] = to_top(even, 1 << 8);
        pairs[1] = to_top(odd, 1 << 8);
        pairs[2] = to_top(even, 1);
        pairs[3] = to_top(odd, 1);
    }

    static constexpr bool SPLIT = true;
    static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[4]) { to_halves<0>(&codes.low, pairs); }

  private:
    static constexpr uint32_t EVERY_OTHER = 0x0f0f0f0fu, BITS_OF_HALVES = 0x8e008e00u;

    // Of codes in the low half of each byte, two as halves: those of bytes 1 and 3, shifted there by `factor`.
    //
    // A code times 2^4 has its sign where a half has it, at the top of a byte; times 2, its other bits where they belong. The sum of
    // both is one product, on another pipe than logic, which is the bottleneck. Only 15 times 2^4 + 2 is beyond a byte and would lose
    // its sign, but is not with 2^4 less. Negative codes stay so, 0 becomes -0, which adds nothing either. What is carried to the next
    // byte, where all is even, changes its lowest bit alone, which is not taken.
    static __device__ __forceinline__ uint32_t to_top(uint32_t codes, uint32_t factor) {
        return (codes * (((1 << 4) + (1 << 1)) * factor) + 0xf000f000u) & BITS_OF_HALVES;
    }
};

struct E4m3 {
    static constexpr int BITS = 8;
    static constexpr float MAX = 448;

    static __device__ __forceinline__ float to_float(uint32_t code) { return half_bits_to_float(e4m3x2_to_half2(code)); }

    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
        uint32_t pairs[2];
        e4m3x4_to_half2x2(first == 0 ? codes.low : codes.high, pairs[0], pairs[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = half_bits_to_float(pairs[i / 2] >> (i % 2 * 16));
    }

    // The nearest code, ties to even; saturates. The value has been rounded to the dtype of the weights.
    static __device__ __forceinline__ uint32_t nearest(float value, uint32_t) {
        const uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
        const float magnitude = fabsf(value);
        uint32_t code = 0x7e;
        if (magnitude < 0x1p-6f)  // subnormals count steps of 2^-9
            code = static_cast<uint32_t>(rintf(__fmul_rn(magnitude, 512.0f)));
        else if (magnitude < 464.0f)
            code = (((bits & 0x7fffffffu) + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120 << 3);
        return sign | min(code, 0x7eu);
    }

    // By the hardware's conversion, exact.
    static constexpr int UNIT = 4;
    static constexpr float OUT_SCALE = 1.f;

    static constexpr __host__ __device__ int weight_of(int h) { return h; }
    static constexpr __host__ __device__ float offset(int) { return 0.f; }

    template <int U> static __device__ __forceinline__ void to_halves(const uint32_t *words, uint32_t *pairs) {
        e4m3x4_to_half2x2(words[U], pairs[0], pairs[1]);
    }

    static constexpr bool SPLIT = false;
    static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[4]) {
        e4m3x4_to_half2x2(codes.low, pairs[0], pairs[1]);
        e4m3x4_to_half2x2(codes.high, pairs[2], pairs[3]);
    }
};

}  // namespace cq
