// Packed codes: a row is one little-endian bit stream.
#pragma once
#include "scales.cuh"

namespace cq {

// The elements that share a scale: those of the format, or `parameter` if it leaves them open.
template <class F> __device__ __forceinline__ uint32_t group_size_of(uint32_t parameter) {
    return F::GROUP ? F::GROUP : parameter;
}

template <int BITS> __device__ __forceinline__ size_t words_of_row(uint32_t k) { return size_t(k) * BITS / 32; }

// Consecutive weights that a lane of the scalar kernels takes: of one group, if those are whole words.
template <class F> constexpr int LANE_WEIGHTS = F::GROUP == 16 && F::BITS % 2 == 0 ? 16 : 32;
// The groups that they are of.
template <class F> constexpr int LANE_GROUPS = F::GROUP == 16 ? LANE_WEIGHTS<F> / 16 : 1;

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

// Which of sixteen bytes each of eight codes of four bits selects.
class SelectBytes {
    uint32_t of_eight;  // of the first eight, and of the others
    uint32_t which;     // of these two

  public:
    __device__ __forceinline__ explicit SelectBytes(uint32_t codes)
        : of_eight(codes & 0x77777777u), which((codes >> 1 & 0x44444444u) | 0x32103210u) {}

    // Those of four codes, from code `first` (0 or 4) on.
    __device__ __forceinline__ uint32_t four(int first, const uint32_t (&bytes)[4]) const {
        const uint32_t own = of_eight >> (4 * first);
        return select_of_eight(select_of_eight(bytes[0], bytes[1], own), select_of_eight(bytes[2], bytes[3], own), which >> (4 * first));
    }
};

// Halves that add up to a weight of a format, for the tile kernels: elements of a table do not fit one.
template <class F> constexpr int HALVES_OF_WEIGHT = 1;

// The weights of four codes of an octet, from code `first` (0 or 4) on.
template <class F>
__device__ __forceinline__ void dequantize_four(Octet codes, int first, GroupScale group, float (&weight)[4]) {
    F::elements(codes, first, weight);
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = F::weight(weight[i], group);
}

}  // namespace cq
