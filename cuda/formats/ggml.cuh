// Formats of GGML: the K types, whose scales have super-blocks, and the two types of sixteen integers. Only read.
#pragma once
#include "affine.cuh"

namespace cq {

// Q2_K to Q6_K: affine codes; without biases the middle code stands for zero.
template <int BITS, uint32_t GROUP_, bool BIASES> struct KType : Affine<BITS>, SuperBlockScales<GROUP_> {
    using SuperBlockScales<GROUP_>::SCALES;
    using SuperBlockScales<GROUP_>::HAS_UNITS;
    static constexpr uint32_t GROUP = GROUP_;
    static constexpr bool HAS_BIASES = BIASES;
    static constexpr int ZERO_POINT = BIASES ? 0 : 1 << (BITS - 1);

    // What is taken out of sums for the place of a code takes out the zero point, too.
    static constexpr __host__ __device__ float offset(int h) { return Affine<BITS>::offset(h) + ZERO_POINT; }

    static __device__ __forceinline__ GroupScale load_group(const CqMatrix &matrix, size_t group, float) {
        const float scale = KType::load_product(matrix.scales, matrix.scale_units, group);
        return {scale, BIASES ? KType::load_product(matrix.biases, matrix.bias_units, group) : 0.0f, ZERO_POINT};
    }
};

// A code selects one of sixteen integers.
struct Iq4 {
    static constexpr int BITS = 4;
    static constexpr bool HAS_BIASES = false, HAS_OFFSETS = true;

    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
        const uint32_t bytes = look_up(first == 0 ? codes.low : codes.low >> 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)  // a byte at the end of 2^23 is 2^23 plus the byte
            element[i] = __fadd_rn(__uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 + i)), -(8388608.f + 128.f));
    }

    // A byte at the end of 2^10 is 2^10 plus the byte, as a half.
    static constexpr int UNIT = 8;
    static constexpr float OUT_SCALE = 1.f;
    static constexpr int FOLDED_EXPONENT = 0;  // never folded

    static constexpr __host__ __device__ int weight_of(int h) { return h; }
    static constexpr __host__ __device__ float offset(int) { return 1024.f + 128.f; }

    template <int U> static __device__ __forceinline__ void to_halves(const uint32_t *words, uint32_t *pairs) {
        const uint32_t low = look_up(words[U]), high = look_up(words[U] >> 16);
        pairs[0] = __byte_perm(low, 0x64646464u, 0x4140), pairs[1] = __byte_perm(low, 0x64646464u, 0x4342);
        pairs[2] = __byte_perm(high, 0x64646464u, 0x4140), pairs[3] = __byte_perm(high, 0x64646464u, 0x4342);
    }

  private:
    // The integers of the lowest four codes, plus 128.
    static __device__ __forceinline__ uint32_t look_up(uint32_t codes) {
        // Of -127, -104, -83, -65 | -49, -35, -22, -10 | 1, 13, 25, 38 | 53, 69, 89, 113.
        const uint32_t below = codes & 0x7777u;
        const uint32_t first = __byte_perm(0x3f2d1801u, 0x766a5d4fu, below), second = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, below);
        return __byte_perm(first, second, (codes >> 1 & 0x4444u) | 0x3210u);
    }
};

struct Iq4Nl : Iq4, PlainFloatScales {
    using Iq4::HAS_BIASES;
    using Iq4::HAS_OFFSETS;
    static constexpr uint32_t GROUP = 32;
};

struct Iq4Xs : Iq4, SuperBlockScales<32> {
    static constexpr uint32_t GROUP = 32;

    static __device__ __forceinline__ GroupScale load_group(const CqMatrix &matrix, size_t group, float) {
        return {load_product(matrix.scales, matrix.scale_units, group), 0.0f, 0.0f};
    }
    static __device__ __forceinline__ float weight(float element, GroupScale group) { return __fmul_rn(element, group.scale); }
};

using Q2K = KType<2, 16, true>;
using Q3K = KType<3, 16, false>;
using Q4K = KType<4, 32, true>;
using Q5K = KType<5, 32, true>;
using Q6K = KType<6, 16, false>;

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are. GEMV kernels are listed by the most rows of x that they
// take: there are registers for so many.
#define CQ_FORMATS_GGML(X)    \
    X(q2_k, cq::Q2K)          \
    X(q3_k, cq::Q3K)          \
    X(q4_k, cq::Q4K)          \
    X(q5_k, cq::Q5K)          \
    X(q6_k, cq::Q6K)          \
    X(iq4_xs, cq::Iq4Xs)      \
    X(iq4_nl, cq::Iq4Nl)
#define CQ_GEMV_GGML_TO_2(X) X(q3_k, cq::Q3K, 16)
#define CQ_GEMV_GGML_TO_4(X)  \
    X(q2_k, cq::Q2K, 16)      \
    X(q5_k, cq::Q5K, 32)      \
    X(q6_k, cq::Q6K, 16)
#define CQ_GEMV_GGML(X)       \
    X(q4_k, cq::Q4K, 32)      \
    X(iq4_xs, cq::Iq4Xs, 32)  \
    X(iq4_nl, cq::Iq4Nl, 32)
