// Affine codes as halves, in place: a field of `BITS` bits at bit p of a 16-bit half, with the exponent
// of 2^(10-p) put in front of it, reads 2^(10-p) + q. What that offset contributes to a sum of products
// is taken out once per group, never per weight.
#pragma once
#include "scales.cuh"

namespace cq {

// A format of the tensor-core kernel decodes UNIT consecutive weights at a time into UNIT / 2 pairs of
// halves: half h of the unit is weight `weight_of(h)` of the unit, times 1 / OUT_SCALE, plus `offset(h)`.
template <int BITS_> struct Affine {
    static constexpr int BITS = BITS_;
    static constexpr int UNIT = BITS == 4 ? 8 : BITS == 8 ? 4 : 16;
    static constexpr ScaleKind SCALES = ScaleKind::Float;
    static constexpr bool HAS_BIASES = true;
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
    template <int U> static __device__ __forceinline__ void decode(const uint32_t *words, uint32_t *pairs) {
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

  private:
    static constexpr uint32_t FIELD_MASK = 0x00010001u * ((1u << BITS) - 1);

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
