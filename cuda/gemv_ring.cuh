// The weights of the tensor-core GEMV on their way: a ring of copies for each lane.
//
// Every lane copies exactly what it will read itself, so that waiting for its own copies is all there is to wait for. A place
// of the ring is copied to again as soon as its words are in registers: the same number of bytes is always on its way,
// whatever the lane computes, also from one block of rows to the next.
#pragma once
#include "gemv_staging.cuh"

namespace cq {

// Of the groups whose sums a lane will hold in a round, or of its chunks if they are folded into the weights: the bits of
// scales and biases, of its two rows, g and g + 8 of the warp's tile.
template <class Format, class Shape> struct RoundScales {
    static constexpr int COLUMNS = Shape::ROWS == 1 ? 2 : 1;  // distinct groups among a lane's two columns
    static constexpr int COUNT = Shape::FOLDED ? Shape::STEPS : Shape::PASSES * COLUMNS;
    // Super-blocks of a round: one, if it is a part of one.
    static constexpr int UNITS = Shape::ROUND > SUPER_BLOCK ? Shape::ROUND / SUPER_BLOCK : 1;
    uint32_t scale[2][COUNT];
    uint32_t bias[2][COUNT];
    uint32_t unit[2][UNITS], bias_unit[2][UNITS];  // what these count, of super-blocks
    uint32_t dtypes;                               // of scales, and 16 times that of biases

    static_assert(!Format::HAS_UNITS || (UNITS * SUPER_BLOCK % Shape::ROUND == 0 && SUPER_BLOCK % (Shape::SLOTS * Shape::GROUP) == 0),
                  "the groups of a pass are of one super-block");

    __device__ __forceinline__ float scale_of(int row, int index) const {
        const float scale = scale_from_bits<Format::SCALES>(this->scale[row][index], dtypes % 16);
        return Format::HAS_UNITS ? scale * half_bits_to_float(unit[row][unit_of(index)]) : scale;
    }
    __device__ __forceinline__ float bias_of(int row, int index) const {
        const float bias = scale_from_bits<Format::SCALES>(this->bias[row][index], dtypes / 16);
        return Format::HAS_UNITS ? bias * half_bits_to_float(bias_unit[row][unit_of(index)]) : bias;
    }

  private:
    static __device__ __forceinline__ int unit_of(int index) { return index / COLUMNS * Shape::SLOTS * Shape::GROUP / SUPER_BLOCK; }
};

// Where a lane finds the units of its two rows' scales.
template <class Format, class Shape, bool SUPER_BLOCKS = Format::HAS_UNITS> struct LaneUnits {
    __device__ __forceinline__ void place(int, const CqMatrix &, uint32_t, uint32_t, int) {}
    __device__ __forceinline__ void load(RoundScales<Format, Shape> &, int, uint32_t) const {}
    __device__ __forceinline__ void advance(int) {}
    __device__ __forceinline__ void none_left() {}
};
template <class Format, class Shape> struct LaneUnits<Format, Shape, true> {
    const uint16_t *scales[2];
    const uint16_t *biases[2];
    uint32_t k;  // of the batch, in the row

    __device__ __forceinline__ void place(int row, const CqMatrix &matrix, uint32_t index, uint32_t k_of_row, int k0) {
        const size_t first = size_t(index) * (k_of_row / SUPER_BLOCK);
        scales[row] = static_cast<const uint16_t *>(matrix.scale_units) + first;
        biases[row] = static_cast<const uint16_t *>(matrix.bias_units) + first;
        k = k0;
    }
    // Those of the round that begins so many elements behind.
    __device__ __forceinline__ void load(RoundScales<Format, Shape> &round, int behind, uint32_t k_of_row) const {
        const uint32_t first = (k + behind) / SUPER_BLOCK;
#pragma unroll
        for (int i = 0; i < RoundScales<Format, Shape>::UNITS; ++i)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                round.unit[row][i] = round.bias_unit[row][i] = 0;
                if (k + behind + i * SUPER_BLOCK >= k_of_row) continue;
                round.unit[row][i] = scales[row][first + i];
                if constexpr (Format::HAS_BIASES) round.bias_unit[row][i] = biases[row][first + i];
            }
    }
    __device__ __forceinline__ void advance(int elements) { k += elements; }
    __device__ __forceinline__ void none_left() { k = 1u << 31; }
};

// Where a lane's next batch of rounds is. The warps that share a tile take turns at rounds.
template <class Format, class Shape> struct LaneRows {
    static constexpr int SCALE_BYTES = Format::SCALES == Scale::Float ? 2 : 1;
    static constexpr int TURN = Shape::K_WARPS * Shape::ROUND;  // from a round of this warp to the next
    const char *packed[2];
    const char *scales[2];
    const char *biases[2];
    uint32_t dtypes;
    int words_left;   // weights from the lane's chunk to the end of the block's share of k
    int groups_left;  // groups from the lane's first one to the end of the row
    LaneUnits<Format, Shape> units;

    // The row `index` of all that follow each other behind the matrix's first one. It has whole words.
    __device__ __forceinline__ void place(int row, const CqMatrix &matrix, uint32_t index, uint32_t k, int k0, int t) {
        const uint32_t bytes = k / 32 * Format::BITS * 4 + k % 32 * Format::BITS / 8, groups = k / Shape::GROUP;
        const int chunk = k0 + t * Shape::CHUNK;
        const uint32_t first = Shape::FOLDED ? chunk / Shape::GROUP : k0 / Shape::GROUP + Shape::slot(2 * t);
        const size_t group = size_t(index) * (groups * SCALE_BYTES) + first * SCALE_BYTES;
        packed[row] = reinterpret_cast<const char *>(matrix.packed) + size_t(index) * bytes + chunk / 8 * Format::BITS;
        scales[row] = static_cast<const char *>(matrix.scales) + group;
        biases[row] = static_cast<const char *>(matrix.biases) + group;
        dtypes = matrix.scale_dtype + 16 * matrix.biases_dtype;  // those of both rows are the same
        units.place(row, matrix, index, k, k0);
    }

    // The scales and biases of round `turn` of the batch; those past the end meet zeros of x.
    __device__ __forceinline__ void load_scales(RoundScales<Format, Shape> &round, int turn, uint32_t k_of_row) const {
        constexpr int COLUMNS = RoundScales<Format, Shape>::COLUMNS;
        round.dtypes = dtypes;
        units.load(round, turn * TURN, k_of_row);
#pragma unroll
        for (int i = 0; i < RoundScales<Format, Shape>::COUNT; ++i) {
            const int k = turn * TURN + i * Shape::STEP;
            const int group = Shape::FOLDED ? k / Shape::GROUP : turn * TURN / Shape::GROUP + i / COLUMNS * Shape::SLOTS + i % COLUMNS;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                round.scale[row][i] = round.bias[row][i] = 0;
                if (Shape::FOLDED ? k >= words_left : is_behind(turn, i, group, k_of_row)) continue;
                round.scale[row][i] = scale_bits<Format::SCALES>(scales[row], group);
                if constexpr (Format::HAS_BIASES) round.bias[row][i] = scale_bits<Format::SCALES>(biases[row], group);
            }
        }
    }

    // Nothing is loaded from now on.
    __device__ __forceinline__ void none_left() {
        words_left = groups_left = 0;
        units.none_left();
    }

    // Whether a group is past the end of the row; those of a pass all are, if they are of one super-block.
    __device__ __forceinline__ bool is_behind(int turn, int i, int group, uint32_t k_of_row) const {
        constexpr int OF_PASS = Shape::SLOTS * Shape::GROUP;
        if constexpr (Format::HAS_UNITS)
            return units.k + turn * TURN + i / RoundScales<Format, Shape>::COLUMNS * OF_PASS >= k_of_row;
        return group >= groups_left;
    }

    __device__ __forceinline__ void next_batch() {
        constexpr int WEIGHTS = Shape::BATCH * TURN;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            packed[row] += WEIGHTS / 8 * Format::BITS;
            scales[row] += WEIGHTS / Shape::GROUP * SCALE_BYTES;
            if (Shape::SCALES_LATE) forget_origin(scales[row]);
            if constexpr (Format::HAS_BIASES) biases[row] += WEIGHTS / Shape::GROUP * SCALE_BYTES;
        }
        units.advance(WEIGHTS);
        words_left -= WEIGHTS;
        groups_left -= WEIGHTS / Shape::GROUP;
    }
};

// A lane's part of the ring.
template <class Format, class Shape> struct Ring {
    static constexpr int BYTES = Shape::RING * Shape::STEP_BYTES;  // of a warp
    static constexpr int COPY = Shape::VECTOR * 4;
    unsigned char *lane;

    __device__ __forceinline__ Ring(unsigned char *memory) : lane(memory + threadIdx.x / 32 * BYTES + threadIdx.x % 32 * COPY) {}

    // Starts to copy a step of the batch to a place, if there is any; words past its end are zeros.
    __device__ __forceinline__ void copy(int place, const LaneRows<Format, Shape> &rows, int step_of_batch, bool is_any) const {
        const int k = step_of_batch / Shape::STEPS * LaneRows<Format, Shape>::TURN + step_of_batch % Shape::STEPS * Shape::STEP;
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
            for (int i = 0; i < Shape::WORDS; i += Shape::VECTOR)
                // Of many rows of x there is no register for that: nothing is copied as zeros.
                if (Shape::ROWS >= 8 || is_any)
                    copy_bytes<COPY, Shape::WORDS != 4>(at(place, row, i), rows.packed[row] + k / 8 * Format::BITS + i * 4, k < rows.words_left);
        commit_copies();
    }

    // The words of a place, once its copies have arrived.
    __device__ __forceinline__ void read(uint32_t (&words)[2][Shape::WORDS], int place) const {
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
            for (int i = 0; i < Shape::WORDS; i += Shape::VECTOR) {
                if constexpr (Shape::VECTOR == 4) {
                    const uint4 four = *reinterpret_cast<const uint4 *>(at(place, row, i));
                    words[row][i] = four.x, words[row][i + 1] = four.y, words[row][i + 2] = four.z, words[row][i + 3] = four.w;
                } else if constexpr (Shape::VECTOR == 2) {
                    const uint2 two = *reinterpret_cast<const uint2 *>(at(place, row, i));
                    words[row][i] = two.x, words[row][i + 1] = two.y;
                } else {
                    words[row][i] = *reinterpret_cast<const uint32_t *>(at(place, row, i));
                }
            }
    }

  private:
    __device__ __forceinline__ unsigned char *at(int place, int row, int word) const {
        return lane + place * Shape::STEP_BYTES + (row * Shape::WORDS + word) / Shape::VECTOR * 32 * COPY;
    }
};

}  // namespace cq
