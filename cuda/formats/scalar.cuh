// Every format decoded code by code, as the scalar reference on the CPU does it (src/format).
#pragma once
#include "scales.cuh"

namespace cq {
namespace scalar {

// Formats: the bits of a code, how scales are stored, and the elements that share one
// (0: affine formats, whose group size is a launch parameter).
template <int WIDTH> struct Affine {
    static constexpr int BITS = WIDTH;
    static constexpr ScaleKind SCALES = ScaleKind::Float;
    static constexpr uint32_t GROUP = 0;
};
struct Mxfp4 {
    static constexpr int BITS = 4;
    static constexpr ScaleKind SCALES = ScaleKind::E8m0;
    static constexpr uint32_t GROUP = 32;
};
struct Nvfp4 {
    static constexpr int BITS = 4;
    static constexpr ScaleKind SCALES = ScaleKind::E4m3;
    static constexpr uint32_t GROUP = 16;
};
struct Mxfp8 {
    static constexpr int BITS = 8;
    static constexpr ScaleKind SCALES = ScaleKind::E8m0;
    static constexpr uint32_t GROUP = 32;
};

// Declares a kernel for every format: KERNEL(suffix of its name, format).
#define CQ_FOR_EVERY_FORMAT(KERNEL)  \
    KERNEL(a1, cq::scalar::Affine<1>) \
    KERNEL(a2, cq::scalar::Affine<2>) \
    KERNEL(a3, cq::scalar::Affine<3>) \
    KERNEL(a4, cq::scalar::Affine<4>) \
    KERNEL(a5, cq::scalar::Affine<5>) \
    KERNEL(a6, cq::scalar::Affine<6>) \
    KERNEL(a8, cq::scalar::Affine<8>) \
    KERNEL(mxfp4, cq::scalar::Mxfp4)  \
    KERNEL(nvfp4, cq::scalar::Nvfp4)  \
    KERNEL(mxfp8, cq::scalar::Mxfp8)

template <class F> __device__ __forceinline__ uint32_t group_size_of(uint32_t parameter) {
    return F::GROUP ? F::GROUP : parameter;
}

template <int BITS> __device__ __forceinline__ size_t words_of_row(uint32_t k) { return size_t(k) * BITS / 32; }

// Eight consecutive codes, the first in the lowest bits. Bits above the eighth code are arbitrary.
struct Octet {
    uint32_t low, high;
};

// Octet `index` of a row in memory. Reads no word that holds none of its codes.
template <int BITS> __device__ __forceinline__ Octet load_octet(const uint32_t *row, uint32_t index) {
    const uint32_t bit = index % 4 * (8 * BITS), shift = bit % 32;
    const uint32_t *word = row + size_t(index / 4) * BITS + bit / 32;
    const uint32_t first = word[0];
    const uint32_t second = shift + 8 * BITS > 32 ? word[1] : 0;
    return {__funnelshift_r(first, second, shift), second >> shift};
}

// Octet `index`, known at compile time, of codes in registers.
template <int BITS, int WORDS> __device__ __forceinline__ Octet octet_of(const uint32_t (&words)[WORDS], int index) {
    const int word = index * 8 * BITS / 32, shift = index * 8 * BITS % 32;
    const uint32_t second = word + 1 < WORDS ? words[word + 1 < WORDS ? word + 1 : 0] : 0;
    return {shift ? __funnelshift_r(words[word], second, shift) : words[word], second >> shift};
}

// Code i, known at compile time, of an octet as a number.
//
// Among the mantissa bits of 2^(23 - p), a code at bit p counts units: no conversion, which costs four
// times as much. The code has to end below bit 23, which it does in the half word that it starts in.
template <int BITS> __device__ __forceinline__ float integer_element(Octet codes, int i) {
    const int bit = i * BITS, p = bit % 16;
    const uint32_t window = bit < 16   ? codes.low
                            : bit < 32 ? __funnelshift_r(codes.low, codes.high, 16)
                            : bit < 48 ? codes.high
                                       : codes.high >> 16;
    const uint32_t magic = uint32_t(127 + 23 - p) << 23;
    return __uint_as_float(and_or(window, ((1u << BITS) - 1) << p, magic)) - __uint_as_float(magic);
}

// E2M1 code i, known at compile time, of an octet.
__device__ __forceinline__ float e2m1_element(Octet codes, int i) {
    // Sign, exponent and mantissa become a float's, 2^126 too small: the exponent's bias is 1, not 127,
    // and subnormals stay subnormals.
    const int32_t at_top = static_cast<int32_t>(codes.low << (28 - 4 * i));
    const uint32_t bits = static_cast<uint32_t>(at_top >> 6) & 0x81c00000u;
    return __fmul_rn(__uint_as_float(bits), 0x1p126f);
}

// The elements of four codes of an octet, from code `first` (0 or 4) on: their values before scale and bias.
template <class F> __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
    if constexpr (F::SCALES == ScaleKind::Float) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = integer_element<F::BITS>(codes, first + i);
    } else if constexpr (F::BITS == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = e2m1_element(codes, first + i);
    } else {
        uint32_t pairs[2];
        e4m3x4_to_half2x2(first == 0 ? codes.low : codes.high, pairs[0], pairs[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = half_bits_to_float(pairs[i / 2] >> (i % 2 * 16));
    }
}

// Scale and bias of a group, and the code that stands for zero; formats without leave them at 0.
struct GroupParameters {
    float scale, bias, zero;
};

template <class F>
__device__ __forceinline__ GroupParameters load_parameters(const CqMatrix &matrix, size_t group, float global_scale) {
    if constexpr (F::SCALES == ScaleKind::Float) {
        const float scale = load_float(matrix.scales, group, matrix.scale_dtype);
        if (!matrix.biases) return {scale, 0.0f, 1 << (F::BITS - 1)};  // symmetric codes
        return {scale, load_float(matrix.biases, group, matrix.biases_dtype), 0.0f};
    }
    const float scale = scale_from_bits<F::SCALES>(scale_bits<F::SCALES>(matrix.scales, group), CQ_F32);
    return {__fmul_rn(scale, global_scale), 0.0f, 0.0f};
}

// The weights of four codes of an octet: two roundings for affine formats with biases, one for the others.
template <class F>
__device__ __forceinline__ void decode_four(Octet codes, int first, GroupParameters group, float (&weight)[4]) {
    elements<F>(codes, first, weight);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (F::SCALES == ScaleKind::Float) {
            // The difference is exact. A bias of +0 makes the sum of -0 the +0 of the reference.
            weight[i] = __fadd_rn(__fmul_rn(weight[i] - group.zero, group.scale), group.bias);
        } else {
            weight[i] = __fmul_rn(weight[i], group.scale);
        }
    }
}

}  // namespace scalar
}  // namespace cq
