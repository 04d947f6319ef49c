// Affine formats: unsigned codes of 1 to 8 bits, a float scale for each group, and a bias; without biases the code
// 2^(bits - 1) stands for zero.
//
// For tensor cores codes become halves in place: a field of `BITS` bits at bit p of a 16-bit half, with the exponent
// of 2^(10-p) put in front of it, reads 2^(10-p) + q. What that offset contributes to a sum of products
// is taken out once per group, never per weight.
#pragma once
#include "quantize.cuh"

namespace cq {

template <int BITS_> struct Affine : FloatScales {
    static constexpr int BITS = BITS_;
    static constexpr uint32_t GROUP = 0;  // a launch parameter
    static constexpr int UNIT = BITS == 4 ? 8 : BITS == 8 ? 4 : 16;
    static constexpr bool HAS_BIASES = true, HAS_OFFSETS = true;
    static constexpr float OUT_SCALE = 1.f;
    static constexpr int FOLDED_EXPONENT = 0;  // never folded: the products would not be exact
    // Of 1, 2, 3, 5 and 6 bits, FIELDS codes are read from one window of 16 bits of the stream, the
    // first of them at bit LEAD; those that would reach past bit 10 of a half, all but DIRECT, from a copy
    // that is shifted right by COPY. The higher a field, the smaller the offset, and so the rounding
    // of sums that carry it: it is fields of few bits that need it.
    static constexpr int FIELDS = BITS == 1 ? 8 : BITS == 2 ? 4 : BITS == 3 ? 5 : BITS == 5 ? 3 : 2;
    static constexpr int LEAD = BITS <= 2 ? 2 : BITS == 3 ? 1 : BITS == 5 ? 0 : 4;
    static constexpr int DIRECT = BITS == 1 ? 8 : BITS == 2 ? 4 : BITS == 3 ? 3 : BITS == 5 ? 2 : 1;
    static constexpr int COPY = BITS == 5 ? 5 : 6;

    // Bit position of the fields of pair i within their halves.
    static constexpr __host__ __device__ int position(int i) {
        if (BITS == 8) return 0;
        if (BITS == 4) return i % 2 * 4;
        const int field = i % FIELDS;
        return LEAD + field * BITS - (field < DIRECT ? 0 : COPY);
    }
    static constexpr __host__ __device__ int weight_of(int h) { return h / 2 + (h % 2) * (UNIT / 2); }
    static constexpr __host__ __device__ float offset(int h) { return float(1 << (10 - position(h / 2))); }
    // The exponent of 2^(10-p) in both halves.
    static constexpr __host__ __device__ uint32_t magic(int p) { return 0x00010001u * uint32_t((25 - p) << 10); }

    // Unit U of a chunk of words.
    template <int U> static __device__ __forceinline__ void to_halves(const uint32_t *words, uint32_t *pairs) {
        if constexpr (BITS == 8) {
            pairs[0] = and_or(words[U], 0x00ff00ffu, magic(0));
            pairs[1] = __byte_perm(words[U], 0x64646464u, 0x4341);
        } else if constexpr (BITS == 4) {
            const uint32_t low = words[U], high = low >> 8;
            pairs[0] = and_or(low, 0x000f000fu, magic(0));
            pairs[1] = and_or(low, 0x00f000f0u, magic(4));
            pairs[2] = and_or(high, 0x000f000fu, magic(0));
            pairs[3] = and_or(high, 0x00f000f0u, magic(4));
        } else {
#pragma unroll
            for (int i = 0; i < 8; i += FIELDS) {
                const uint32_t direct = window<U>(words, i), copy = direct >> COPY;
#pragma unroll
                for (int f = 0; f < FIELDS && i + f < 8; ++f) {
                    const int p = position(i + f);
                    pairs[i + f] = and_or(f < DIRECT ? direct : copy, FIELD_MASK << p, magic(p));
                }
            }
        }
    }

    // An octet of codes, `ZERO` taken from each. The fields of codes i and i + 4 are in one word.
    static constexpr bool SPLIT = BITS < 8;
    template <int ZERO = 0> static __device__ __forceinline__ void octet_to_halves(Octet codes, uint32_t (&pairs)[4]) {
        fields_of_octet(codes, pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = as_bits(__hsub2(as_half2(pairs[i]), __float2half2_rn(float((1 << (10 - position_in_octet(i))) + ZERO))));
    }

    static __device__ __forceinline__ void elements(Octet codes, int first, float (&element)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) element[i] = integer(codes, first + i);
    }

    static __device__ __forceinline__ GroupScale load_group(const CqMatrix &matrix, size_t group, float) {
        const float scale = load_scale(matrix, group);
        if (!matrix.biases) return {scale, 0.0f, 1 << (BITS - 1)};  // symmetric codes
        return {scale, load_float(matrix.biases, group, matrix.biases_dtype), 0.0f};
    }

    static __device__ __forceinline__ void quantize_group(const CqQuantize &p, LaneOfGroup &own, uint64_t group, bool stores) {
        const GroupScale of_group = scale_and_bias(own);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) own.code[i] = code_of(own.weight[i], of_group);
        if (stores) {
            store_float(p.scales, group, p.dtype, of_group.scale);
            store_float(p.biases, group, p.dtype, of_group.bias);
        }
    }

    static __device__ __forceinline__ uint32_t code_of(float weight, const GroupScale &of_group) {
        const float steps = rintf(__fdiv_rn(__fsub_rn(weight, of_group.bias), of_group.scale));
        return static_cast<uint32_t>(fminf(fmaxf(steps, 0.0f), (1 << BITS) - 1));
    }

    // Scale and bias of weights from `low` to `high`, not yet rounded to their dtype.
    static __device__ __forceinline__ GroupScale of_range(float low, float high) {
        const float range = __fsub_rn(high, low);
        if (BITS == 1) return {fmaxf(range, SMALLEST_SCALE), low, 0.0f};
        const float step = fmaxf(__fdiv_rn(range, (1 << BITS) - 1), SMALLEST_SCALE);
        const bool low_is_larger = fabsf(low) > fabsf(high);
        const float scale = low_is_larger ? step : -step, edge = low_is_larger ? low : high;
        const float steps_to_edge = rintf(__fdiv_rn(edge, scale));
        if (steps_to_edge == 0) return {scale, 0.0f, 0.0f};
        // Zero is then a multiple of the scale away from the edge, hence exact.
        return {__fdiv_rn(edge, steps_to_edge), edge, 0.0f};
    }

  private:
    static constexpr uint32_t FIELD_MASK = 0x00010001u * ((1u << BITS) - 1);
    static constexpr float SMALLEST_SCALE = 1e-7f;

    // The bit of the fields of pair i of an octet within their halves.
    static constexpr __host__ __device__ int position_in_octet(int i) {
        if (BITS == 8) return 0;
        if (BITS == 4) return i % 2 * 4;
        if (BITS == 5) return i % 2 * 5;
        if (BITS == 6) return i % 2 * 2;
        return BITS == 3 && i == 3 ? 3 : i * BITS;
    }

    // The codes of an octet, each with an offset in its half.
    static __device__ __forceinline__ void fields_of_octet(Octet codes, uint32_t (&pairs)[4]) {
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = __byte_perm(i < 2 ? codes.low : codes.high, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
            return;
        }
        // The stream from code 0 on in the low half, from code 4 on in the high half.
        uint32_t window = codes.low;  // of 4 bits as it is
        if constexpr (BITS == 1) window = (codes.low & 0xfu) | (codes.low << 12 & 0xf0000u);
        if constexpr (BITS == 2) window = __byte_perm(codes.low, 0, 0x4140);
        if constexpr (BITS == 3) window = (codes.low & 0xfffu) | (codes.low << 4 & 0xfff0000u);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Of the wider codes a window has two.
            if (BITS > 4 && i % 2 == 0) {
                const int bit = i * BITS, above = (i + 4) * BITS;
                const uint32_t low = codes.low >> bit;
                const uint32_t high = above < 32 ? __funnelshift_r(codes.low, codes.high, above) : codes.high >> (above - 32);
                window = __byte_perm(low, high, 0x5410);
            }
            const int p = position_in_octet(i), field = BITS > 4 ? i % 2 * BITS : BITS == 4 ? i * 4 : i * BITS;
            pairs[i] = and_or(window >> (field - p), FIELD_MASK << p, magic(p));
        }
    }

    // Code i, known at compile time, of an octet as a number.
    //
    // Among the mantissa bits of 2^(23 - p), a code at bit p counts units: no conversion, which costs four
    // times as much. The code has to end below bit 23, which it does in the half word that it starts in.
    static __device__ __forceinline__ float integer(Octet codes, int i) {
        const int bit = i * BITS, p = bit % 16;
        const uint32_t window = bit < 16   ? codes.low
                                : bit < 32 ? __funnelshift_r(codes.low, codes.high, 16)
                                : bit < 48 ? codes.high
                                           : codes.high >> 16;
        const uint32_t magic = uint32_t(127 + 23 - p) << 23;
        return __uint_as_float(and_or(window, ((1u << BITS) - 1) << p, magic)) - __uint_as_float(magic);
    }

    // The first smallest of all lanes' values, in the order of lanes: which of two zeros is first shows in
    // the sign of a 1-bit bias.
    static __device__ __forceinline__ float first_smallest_of(float value) {
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = __shfl_xor_sync(FULL_WARP, value, distance);
            const bool other_is_first = threadIdx.x & distance;
            value = other < value || (other_is_first && other == value) ? other : value;
        }
        return value;
    }

    // Those of a group.
    static __device__ __forceinline__ GroupScale scale_and_bias(const LaneOfGroup &own) {
        float low = __uint_as_float(0x7f800000u), high = -low;
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) {
            if (i >= own.count) continue;
            low = own.weight[i] < low ? own.weight[i] : low;
            high = own.weight[i] > high ? own.weight[i] : high;
        }
        return of_range(first_smallest_of(low), -first_smallest_of(-high));
    }

    // The stream from weight i of unit U at bit LEAD of the low half, from weight i + 8 of the high half.
    template <int U> static __device__ __forceinline__ uint32_t window(const uint32_t *words, int i) {
        if constexpr (BITS == 1) return __byte_perm(words[U / 2], 0, U % 2 ? 0x4342 : 0x4140) << LEAD;
        if constexpr (BITS == 2) return i == 0 ? words[U] << LEAD : words[U] >> (i * BITS - LEAD);
        const int fields = i + FIELDS <= 8 ? FIELDS : 8 - i;
        const uint32_t low = stream(words, (U * 16 + i) * BITS - LEAD, LEAD + fields * BITS);
        const uint32_t high = stream(words, (U * 16 + i + 8) * BITS - LEAD, LEAD + fields * BITS);
        return __byte_perm(low, high, 0x5410);
    }

    // At least `count` bits of the stream from `bit` on; both are known to the compiler.
    static __device__ __forceinline__ uint32_t stream(const uint32_t *words, int bit, int count) {
        if (bit < 0) return words[0] << -bit;
        const int word = bit / 32, shift = bit % 32;
        if (shift == 0) return words[word];
        if (shift + count <= 32) return words[word] >> shift;
        return __funnelshift_r(words[word], words[word + 1], shift);
    }
};

}  // namespace cq

// The kernels of the family; formats/all.cuh says what the lists are. GEMV kernels are listed by width: they take
// long to compile.
#define CQ_FORMATS_AFFINE(X) \
    X(a1, cq::Affine<1>)     \
    X(a2, cq::Affine<2>)     \
    X(a3, cq::Affine<3>)     \
    X(a4, cq::Affine<4>)     \
    X(a5, cq::Affine<5>)     \
    X(a6, cq::Affine<6>)     \
    X(a8, cq::Affine<8>)
#define CQ_QUANTIZE_AFFINE(X) CQ_FORMATS_AFFINE(X)
#define CQ_GEMV_AFFINE(X, bits)                   \
    X(a##bits##_g32, cq::Affine<bits>, 32)        \
    X(a##bits##_g64, cq::Affine<bits>, 64)        \
    X(a##bits##_g128, cq::Affine<bits>, 128)
// Groups of 128 are multiplied as two of 64.
#define CQ_TILES_AFFINE_OF(X, bits) X(a##bits##_g32, cq::Affine<bits>, 32) X(a##bits##_g64, cq::Affine<bits>, 64)
#define CQ_TILES_AFFINE_1_TO_3(X) CQ_TILES_AFFINE_OF(X, 1) CQ_TILES_AFFINE_OF(X, 2) CQ_TILES_AFFINE_OF(X, 3)
#define CQ_TILES_AFFINE_4_TO_8(X) \
    CQ_TILES_AFFINE_OF(X, 4) CQ_TILES_AFFINE_OF(X, 5) CQ_TILES_AFFINE_OF(X, 6) CQ_TILES_AFFINE_OF(X, 8)
