// Formats of GGML: the K types, whose scales have super-blocks, and the IQ types, whose codes select integers. Only read.
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

    static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[4]) {
        Affine<BITS>::template octet_to_halves<ZERO_POINT>(codes, pairs);
    }

    static __device__ __forceinline__ GroupScale load_group(const CqMatrix &matrix, size_t group, float) {
        const float scale = KType::load_product(matrix.scales, matrix.scale_units, group);
        return {scale, BIASES ? KType::load_product(matrix.biases, matrix.bias_units, group) : 0.0f, ZERO_POINT};
    }
};

// Four integers as bytes, each plus 128.
static constexpr uint32_t bytes_of(int a, int b, int c, int d) {
    return uint32_t(a + 128) | uint32_t(b + 128) << 8 | uint32_t(c + 128) << 16 | uint32_t(d + 128) << 24;
}

// A code of up to four bits selects one of these integers, of which DENOMINATOR are one.
template <int BITS_, int DENOMINATOR, uint32_t FIRST, uint32_t SECOND = 0, uint32_t THIRD = 0, uint32_t FOURTH = 0> struct Iq {
    static constexpr int BITS = BITS_;
    static constexpr bool HAS_BIASES = false, HAS_OFFSETS = true;

    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
        const uint32_t bytes = look_up(codes.low, first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // A byte at the end of 2^23 is 2^23 plus the byte.
            const float integer = __fadd_rn(__uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 + i)), -(8388608.f + 128.f));
            element[i] = DENOMINATOR == 1 ? integer : __fmul_rn(integer, OUT_SCALE);
        }
    }

    // A byte at the end of 2^10 is 2^10 plus the byte, as a half. Units are whole bytes.
    static constexpr int UNIT = BITS == 4 ? 8 : 16;
    static constexpr float OUT_SCALE = 1.f / DENOMINATOR;
    static constexpr int FOLDED_EXPONENT = 0;  // never folded

    static constexpr __host__ __device__ int weight_of(int h) { return h; }
    static constexpr __host__ __device__ float offset(int) { return 1024.f + 128.f; }

    template <int U> static __device__ __forceinline__ void to_halves(const uint32_t *words, uint32_t *pairs) {
#pragma unroll
        for (int i = 0; i < UNIT; i += 4) {
            const int bit = (U * UNIT + i) * BITS, shift = bit % 32;
            const uint32_t *word = words + bit / 32;
            const uint32_t bytes = BITS == 4                 ? look_up(words[U], i)
                                   : shift + 4 * BITS <= 32 ? look_up(word[0] >> shift, 0)
                                                            : look_up(__funnelshift_r(word[0], word[1], shift), 0);
            pairs[i / 2] = __byte_perm(bytes, 0x64646464u, 0x4140), pairs[i / 2 + 1] = __byte_perm(bytes, 0x64646464u, 0x4342);
        }
    }

    static constexpr bool SPLIT = false;
    static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t bytes = look_up(codes.low, 2 * i);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32_t shifted = __byte_perm(bytes, 0x64646464u, j ? 0x4342 : 0x4140);
                pairs[i + j] = as_bits(__hsub2(as_half2(shifted), __float2half2_rn(offset(0))));
            }
        }
    }

  private:
    // The integers of four codes of a word, plus 128: from code `first` (0 or 4) on.
    static __device__ __forceinline__ uint32_t look_up(uint32_t codes, int first) {
        if constexpr (BITS == 4) {
            return SelectBytes(codes).four(first, {FIRST, SECOND, THIRD, FOURTH});
        } else {
            codes >>= first * BITS;
            // Each code at the end of a nibble.
            constexpr uint32_t CODE = (1 << BITS) - 1;
            uint32_t nibbles = codes & CODE;
#pragma unroll
            for (int i = 1; i < 4; ++i) nibbles = and_or(codes << ((4 - BITS) * i), CODE << (4 * i), nibbles);
            return select_of_eight(FIRST, SECOND, nibbles);
        }
    }
};

using Iq4 = Iq<4, 1, bytes_of(-127, -104, -83, -65), bytes_of(-49, -35, -22, -10), bytes_of(1, 13, 25, 38), bytes_of(53, 69, 89, 113)>;
// Eighths of -1, 0 and 1 plus an eighth, and of their negatives. No file has the fourth.
using Iq1Signed = Iq<3, 8, bytes_of(-7, 1, 9, 17), bytes_of(7, -1, -9, -17)>;
using Iq1 = Iq<2, 8, bytes_of(-7, 1, 9, 17)>;
using Iq2 = Iq<3, 8, bytes_of(8, 25, 43, 62), bytes_of(-8, -25, -43, -62)>;
// Halves.
using Iq3 = Iq<4, 2, bytes_of(2, 6, 10, 14), bytes_of(18, 22, 26, 31), bytes_of(-2, -6, -10, -14), bytes_of(-18, -22, -26, -31)>;
using Iq3Odd = Iq<4, 1, bytes_of(1, 3, 5, 7), bytes_of(9, 11, 13, 15), bytes_of(-1, -3, -5, -7), bytes_of(-9, -11, -13, -15)>;

struct Iq4Nl : Iq4, PlainFloatScales {
    using Iq4::HAS_BIASES;
    using Iq4::HAS_OFFSETS;
    static constexpr uint32_t GROUP = 32;
};

template <class Element, uint32_t GROUP_> struct SuperBlocksOf : Element, SuperBlockScales<GROUP_> {
    static constexpr uint32_t GROUP = GROUP_;

    static __device__ __forceinline__ GroupScale load_group(const CqMatrix &matrix, size_t group, float) {
        return {SuperBlocksOf::load_product(matrix.scales, matrix.scale_units, group), 0.0f, 0.0f};
    }
    static __device__ __forceinline__ float weight(float element, GroupScale group) { return __fmul_rn(element, group.scale); }
};

using Q2K = KType<2, 16, true>;
using Q3K = KType<3, 16, false>;
using Q4K = KType<4, 32, true>;
using Q5K = KType<5, 32, true>;
using Q6K = KType<6, 16, false>;
using Iq4Xs = SuperBlocksOf<Iq4, 32>;
using Iq1S = SuperBlocksOf<Iq1, 32>;
using Iq1M = SuperBlocksOf<Iq1Signed, 16>;
using Iq2Xxs = SuperBlocksOf<Iq2, 32>;
using Iq2Xs = SuperBlocksOf<Iq2, 16>;  // and IQ2_S
using Iq3Xxs = SuperBlocksOf<Iq3, 32>;
using Iq3S = SuperBlocksOf<Iq3Odd, 32>;

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are. GEMV kernels are listed by the most rows of x that they
// take: there are registers for so many.
#define CQ_FORMATS_GGML(X)      \
    X(q2_k, cq::Q2K)            \
    X(q3_k, cq::Q3K)            \
    X(q4_k, cq::Q4K)            \
    X(q5_k, cq::Q5K)            \
    X(q6_k, cq::Q6K)            \
    X(iq4_xs, cq::Iq4Xs)        \
    X(iq4_nl, cq::Iq4Nl)        \
    X(iq1_s, cq::Iq1S)          \
    X(iq1_m, cq::Iq1M)          \
    X(iq2_xxs, cq::Iq2Xxs)      \
    X(iq2_xs, cq::Iq2Xs)        \
    X(iq3_xxs, cq::Iq3Xxs)      \
    X(iq3_s, cq::Iq3S)
#define CQ_GEMV_K_TO_2(X) X(q3_k, cq::Q3K, 16)
#define CQ_GEMV_K_TO_4(X)       \
    X(q2_k, cq::Q2K, 16)        \
    X(q5_k, cq::Q5K, 32)        \
    X(q6_k, cq::Q6K, 16)
#define CQ_GEMV_K(X) X(q4_k, cq::Q4K, 32)
#define CQ_GEMV_IQ_TO_2(X)      \
    X(iq1_m, cq::Iq1M, 16)      \
    X(iq2_xs, cq::Iq2Xs, 16)
#define CQ_GEMV_IQ_TO_4(X) X(iq2_xxs, cq::Iq2Xxs, 32)
#define CQ_GEMV_IQ(X)           \
    X(iq1_s, cq::Iq1S, 32)      \
    X(iq3_xxs, cq::Iq3Xxs, 32)  \
    X(iq3_s, cq::Iq3S, 32)      \
    X(iq4_xs, cq::Iq4Xs, 32)    \
    X(iq4_nl, cq::Iq4Nl, 32)
#define CQ_TILES_K(X)           \
    X(q2_k, cq::Q2K, 16)        \
    X(q3_k, cq::Q3K, 16)        \
    X(q4_k, cq::Q4K, 32)        \
    X(q5_k, cq::Q5K, 32)        \
    X(q6_k, cq::Q6K, 16)
#define CQ_TILES_IQ(X) CQ_GEMV_IQ_TO_2(X) CQ_GEMV_IQ_TO_4(X) CQ_GEMV_IQ(X)
