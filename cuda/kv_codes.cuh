// Keys and values of a cache as codes (KvFormat): affine, 8 bits in groups of 64, or 4 bits in groups of 32 of numbers that a
// Hadamard matrix has rotated; each group with a scale and a bias in f16.
//
// A row is one head of one token: codes, then elsewhere a pair of halves, scale and bias, for each group. The last group is
// shorter where the head is no multiple. A word of 4-bit codes has code 2i at bit 4i and code 2i + 1 at bit 16 + 4i: a shift
// and a mask are then a pair of halves, in order.
#pragma once
#include "formats/affine.cuh"

namespace cq {

template <int BITS> struct KvCodes {
    static constexpr int GROUP = BITS == 8 ? 64 : 32;
    static constexpr bool ROTATED = BITS == 4;
    static constexpr int PER_WORD = 32 / BITS;
    static constexpr float MAGIC = 1024;  // what halves of codes are too large by

    static constexpr __host__ __device__ int row_bytes(int head_dim) { return head_dim * BITS / 8; }
    static constexpr __host__ __device__ int groups(int head_dim) { return (head_dim + GROUP - 1) / GROUP; }

    // Where a code, number `i` of its word, begins there.
    static __device__ __forceinline__ int bit(int i) { return BITS == 8 ? 8 * i : i % 2 * 16 + i / 2 * 4; }

    // Eight neighbouring codes as halves, each too large by MAGIC: exact.
    static __device__ __forceinline__ uint4 raised(const void *codes) {
        uint32_t words[BITS / 4], pairs[4];
        memcpy(words, __builtin_assume_aligned(codes, BITS), BITS);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if constexpr (BITS == 8)
                pairs[i] = __byte_perm(words[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140);
            else
                pairs[i] = and_or(words[0] >> (4 * i), 0x000f000fu, 0x64006400u);
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }

    // Eight neighbouring numbers, code * scale + bias, rounded once.
    static __device__ __forceinline__ uint4 numbers(const void *codes, half2 group) {
        const half2 scale = __low2half2(group), bias = __high2half2(group), magic = __float2half2_rn(MAGIC);
        const uint4 pairs = raised(codes);
        auto number = [&](uint32_t pair) { return as_bits(__hfma2(__hsub2(as_half2(pair), magic), scale, bias)); };
        return make_uint4(number(pairs.x), number(pairs.y), number(pairs.z), number(pairs.w));
    }
};

// A head, dealt to the lanes of a warp: each has every 32nd element.
template <int D> struct HeadOfLanes {
    static constexpr int PARTS = (D + 31) / 32;
    static constexpr int ROTATED_PART = D & -D;  // elements that are rotated together
    float x[PARTS];

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ bool is_there(int i) { return D % 32 == 0 || lane() + 32 * i < D; }

    template <class Load> static __device__ __forceinline__ HeadOfLanes of(Load load) {
        HeadOfLanes head;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) head.x[i] = is_there(i) ? load(lane() + 32 * i) : 0;
        return head;
    }
    template <class Store> __device__ __forceinline__ void each(Store store) const {
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
            if (is_there(i)) store(lane() + 32 * i, x[i]);
    }

    // Multiplies by the orthonormal Hadamard matrix, with the roundings of the CPU (src/backend/cpu/attention/hadamard.rs).
    __device__ __forceinline__ void rotate() {
#pragma unroll
        for (int half = 1; half < ROTATED_PART && half < 32; half *= 2)
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const float other = __shfl_xor_sync(FULL_WARP, x[i], half);
                x[i] = lane() & half ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
            }
#pragma unroll
        for (int half = 32; half < ROTATED_PART; half *= 2)
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                if (!(i * 32 & half)) {
                    const float low = x[i], high = x[i + half / 32];
                    x[i] = __fadd_rn(low, high), x[i + half / 32] = __fsub_rn(low, high);
                }
        const float scale = __fdiv_rn(1.f, __fsqrt_rn(float(ROTATED_PART)));
#pragma unroll
        for (int i = 0; i < PARTS; ++i) x[i] = __fmul_rn(x[i], scale);
    }

    // Makes numbers halves, multiplied by a power of two that brings the largest below 2^15, and returns what undoes it.
    __device__ __forceinline__ float make_halves() {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) largest = fmaxf(largest, fabsf(x[i]));
        const uint32_t exponent = factor_exponent(largest_of_warp(largest));
        const float factor = __uint_as_float(exponent << 23);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) x[i] = __half2float(__float2half_rn(x[i] * factor));
        return __uint_as_float((254 - exponent) << 23);
    }

    // The sum of a group of codes' elements.
    template <int BITS> __device__ __forceinline__ float sum_of_group(int group) const {
        constexpr int PER_GROUP = KvCodes<BITS>::GROUP / 32;
        float sum = 0;
#pragma unroll
        for (int i = group * PER_GROUP; i < PARTS && i < (group + 1) * PER_GROUP; ++i) sum += x[i];
        return sum_of_warp(sum);
    }

    // Codes of the numbers, with the bits that the CPU finds; the row of codes begins at a word. A group with a number that
    // is none becomes NaN: no code says so.
    template <int BITS> __device__ __forceinline__ void quantize(uint32_t *codes, half2 *groups) {
        using Codes = KvCodes<BITS>;
        if constexpr (Codes::ROTATED) rotate();
        constexpr int PER_GROUP = Codes::GROUP / 32;
#pragma unroll
        for (int group = 0; group < Codes::groups(D); ++group) {
            float low = __uint_as_float(0x7f800000u), high = -low, none = 0;
#pragma unroll
            for (int i = group * PER_GROUP; i < PARTS && i < (group + 1) * PER_GROUP; ++i) {
                if (!is_there(i)) continue;
                low = fminf(low, x[i]), high = fmaxf(high, x[i]), none += __fsub_rn(x[i], x[i]);
            }
            low = -largest_of_warp(-low), high = largest_of_warp(high);
            const bool is_finite = sum_of_warp(none) == 0;
            const GroupScale of_group = Affine<BITS>::of_range(low, high);
#pragma unroll
            for (int i = group * PER_GROUP; i < PARTS && i < (group + 1) * PER_GROUP; ++i) {
                const uint32_t code = is_there(i) && is_finite ? Affine<BITS>::code_of(x[i], of_group) : 0;
                uint32_t word = code << Codes::bit(lane() % Codes::PER_WORD);
#pragma unroll
                for (int distance = 1; distance < Codes::PER_WORD; distance *= 2) word |= __shfl_xor_sync(FULL_WARP, word, distance);
                if (is_there(i) && lane() % Codes::PER_WORD == 0) codes[(i * 32 + lane()) / Codes::PER_WORD] = word;
            }
            const float nan = __uint_as_float(0x7fc00000u);
            if (lane() == 0) groups[group] = __floats2half2_rn(is_finite ? of_group.scale : nan, is_finite ? of_group.bias : nan);
        }
    }
};

}  // namespace cq
