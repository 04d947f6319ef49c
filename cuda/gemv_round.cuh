// One round of the tensor-core GEMV: a warp's share of k between two applications of scales to sums.
#pragma once
#include "gemv_staging.cuh"

namespace cq {

// What a lane loads for one round: of its two rows, g and g + 8 of the warp's tile, words of weights, and
// the bits of scales and biases: of the groups whose sums it will hold, or of its chunks if they are folded
// into the weights.
template <class Format, class Shape> struct Round {
    static constexpr int COLUMNS = Shape::ROWS == 1 ? 2 : 1;  // distinct groups among a lane's two columns
    static constexpr int SCALES = Shape::FOLDED ? Shape::STEPS : Shape::PASSES * COLUMNS;
    uint32_t words[2][Shape::STEPS][Shape::WORDS];
    uint32_t scale[2][SCALES];
    uint32_t bias[2][SCALES];
};

// Where a lane reads its rows. The warps that share a tile take turns at rounds, BATCH of them at a time.
template <class Format, class Shape> struct LaneRows {
    static constexpr int SCALE_BYTES = Format::SCALES == Scale::Float ? 2 : 1;
    static constexpr int TURN = Shape::K_WARPS * Shape::ROUND;  // from a round of this warp to the next
    // Where the SASS gate finds fewer instructions for it, or no spills.
    static constexpr bool FORGETS_ORIGIN =
        Shape::ROWS == 1 && (Format::BITS == 8 || Format::BITS == 5 || (Format::BITS == 2 && Shape::GROUP < 128));
    const uint32_t *packed[2];
    const char *scales[2];
    const char *biases[2];
    int words_left;   // weights from the lane's chunk to the end of the block's share of k
    int groups_left;  // groups from the lane's first one to the end of the row

    __device__ __forceinline__ void place(int row, const CqMatrix &matrix, size_t index, uint32_t k, int k0, int t) {
        const size_t group = index * (k / Shape::GROUP) + (Shape::FOLDED ? (k0 + t * Shape::CHUNK) / Shape::GROUP
                                                                         : k0 / Shape::GROUP + Shape::slot(2 * t));
        packed[row] = matrix.packed + (index * k + k0 + t * Shape::CHUNK) * Format::BITS / 32;
        scales[row] = static_cast<const char *>(matrix.scales) + group * SCALE_BYTES;
        biases[row] = static_cast<const char *>(matrix.biases) + group * SCALE_BYTES;
    }

    // The words of round `turn` of the batch. Those past the end meet zeros of x: whatever finite weights
    // were there before do.
    __device__ __forceinline__ void load_weights(Round<Format, Shape> &round, int turn) const {
        constexpr int VECTOR = Shape::WORDS % 4 == 0 ? 4 : Shape::WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
        for (int step = 0; step < Shape::STEPS; ++step) {
            const int k = turn * TURN + step * Shape::STEP;
            if (k >= words_left) continue;
#pragma unroll
            for (int row = 0; row < 2; ++row)
#pragma unroll
                for (int i = 0; i < Shape::WORDS; i += VECTOR)
                    load_words<VECTOR, Shape::WORDS != 4>(round.words[row][step] + i, packed[row] + k * Format::BITS / 32 + i);
        }
    }

    // Its scales and biases; again, those past the end meet zeros.
    __device__ __forceinline__ void load_scales(Round<Format, Shape> &round, int turn) const {
#pragma unroll
        for (int i = 0; i < Round<Format, Shape>::SCALES; ++i) {
            constexpr int COLUMNS = Round<Format, Shape>::COLUMNS;
            const int k = turn * TURN + i * Shape::STEP;
            const int group = Shape::FOLDED ? k / Shape::GROUP : turn * TURN / Shape::GROUP + i / COLUMNS * Shape::SLOTS + i % COLUMNS;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                round.scale[row][i] = round.bias[row][i] = 0;
                if (Shape::FOLDED ? k >= words_left : group >= groups_left) continue;
                round.scale[row][i] = scale_bits<Format::SCALES>(scales[row], group);
                if constexpr (Format::HAS_BIASES) round.bias[row][i] = scale_bits<Format::SCALES>(biases[row], group);
            }
        }
    }

    __device__ __forceinline__ void next_batch() {
        constexpr int WEIGHTS = Shape::BATCH * TURN;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            packed[row] += WEIGHTS * Format::BITS / 32;
            if (FORGETS_ORIGIN) forget_origin(packed[row]);
            scales[row] += WEIGHTS / Shape::GROUP * SCALE_BYTES;
            if constexpr (Format::HAS_BIASES) biases[row] += WEIGHTS / Shape::GROUP * SCALE_BYTES;
        }
        words_left -= WEIGHTS;
        groups_left -= WEIGHTS / Shape::GROUP;
    }
};

// A lane's running sums: rows g and g + 8, times the rows of x that its columns stand for (of one row
// of x all columns go to one sum).
template <class Shape> struct Sums {
    static constexpr int COUNT = Shape::ROWS == 1 ? 1 : 2 * Shape::COLUMN_TILES;
    float sum[2][COUNT];
};

// Sixteen dequantized weights of a lane's chunk, as pairs of halves.
template <class Format, int PART> __device__ __forceinline__ void dequantize_sixteen(uint32_t (&pairs)[8], const uint32_t *chunk) {
    constexpr int UNITS = 16 / Format::UNIT;
    static_for<UNITS>([&](auto unit_) {
        constexpr int unit = decltype(unit_)::value;
        Format::template to_halves<PART * UNITS + unit>(chunk, pairs + unit * Format::UNIT / 2);
    });
}

// Sums of one tile of columns: those of its accumulators are added up at the end.
template <class Shape> struct Accumulators {
    float of[Shape::CHAINS][4];

    __device__ __forceinline__ void add_up() {
#pragma unroll
        for (int distance = Shape::CHAINS / 2; distance > 0; distance /= 2)
#pragma unroll
            for (int chain = 0; chain < distance; ++chain)
#pragma unroll
                for (int i = 0; i < 4; ++i) of[chain][i] += of[chain + distance][i];
    }
};

// Adds the products of sixteen weights of rows g and g + 8 with the columns of x of one tile.
template <class Format, class Shape>
__device__ __forceinline__ void multiply_sixteen(Accumulators<Shape> &c, const uint32_t (&a)[2][8], const StagedX<Format, Shape> &x, bool mine,
                                                 int part, int row, int t) {
    uint32_t b[8];
    x.fragment(b, mine, part, row, t);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const uint32_t ai[4] = {a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]};
        mma_m16n8k16(c.of[i / 2 % Shape::CHAINS], ai, b[i], b[i + 1]);
    }
}

// Multiplies a round by groups: the sums of the groups are kept apart, scale and bias applied to them.
template <class Format, class Shape>
__device__ __forceinline__ void multiply_by_groups(Sums<Shape> &sums, const Round<Format, Shape> &round, const CqMatrix &matrix,
                                                   const StagedX<Format, Shape> &x, int k0, int g, int t) {
    Accumulators<Shape> c[Shape::PASSES][Shape::COLUMN_TILES] = {};
    static_for<Shape::STEPS>([&](auto step_) {
        static_for<Shape::CHUNK / 16>([&](auto part_) {
            constexpr int step = decltype(step_)::value, part = decltype(part_)::value;
            uint32_t a[2][8];
#pragma unroll
            for (int row = 0; row < 2; ++row) dequantize_sixteen<Format, part>(a[row], round.words[row][step]);
            const int group = (step * Shape::STEP + t * Shape::CHUNK + part * 16) / Shape::GROUP;
#pragma unroll
            for (int pass = 0; pass < Shape::PASSES; ++pass) {
                const bool mine = Shape::PASSES * Shape::SLOTS == 1 || group == pass * Shape::SLOTS + Shape::slot(g);
#pragma unroll
                for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile)
                    multiply_sixteen<Format, Shape>(c[pass][tile], a, x, mine, (k0 / Shape::STEP + step) * (Shape::CHUNK / 16) + part,
                                                    tile * 8 + g % Shape::ROWS, t);
            }
        });
    });
    // The lane now holds columns 2t and 2t + 1 of rows g and g + 8, each the sum over one group.
    constexpr bool ONE = Shape::ROWS == 1;
#pragma unroll
    for (int pass = 0; pass < Shape::PASSES; ++pass)
#pragma unroll
        for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile) {
            c[pass][tile].add_up();
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int slot = Shape::slot(2 * t + j);
                if (Shape::SLOTS * Shape::ROWS < 8 && slot >= Shape::SLOTS) continue;
                const int scale_index = ONE ? pass * 2 + j : pass;
                const auto of_x = *x.group(tile * 8 + (2 * t + j) % Shape::ROWS, k0 / Shape::GROUP + pass * Shape::SLOTS + slot);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    float &sum = sums.sum[row][ONE ? 0 : tile * 2 + j];
                    float dot = c[pass][tile].of[0][row * 2 + j];
                    if constexpr (Format::HAS_BIASES) {
                        dot -= of_x.offset_sum;
                        const float bias = scale_from_bits<Format::SCALES>(round.bias[row][scale_index], matrix.biases_dtype);
                        sum = __fmaf_rn(bias, of_x.sum, sum);
                    }
                    const float scale = scale_from_bits<Format::SCALES>(round.scale[row][scale_index], matrix.scale_dtype);
                    sum = __fmaf_rn(scale, dot * of_x.unit, sum);
                }
            }
        }
}

// A scale of one chunk as the factor of its halves, in both halves of a word; `top` is the largest
// E8M0 scale of the row in this round, which becomes 2^FOLDED_EXPONENT.
template <class Format> __device__ __forceinline__ uint32_t folded_scale(uint32_t bits, uint32_t top) {
    static_assert(Format::SCALES != Scale::Float, "only scales of one byte are folded into weights");
    uint32_t factor;
    if constexpr (Format::SCALES == Scale::E8m0) {
        const int exponent = int(bits) - int(top) + Format::FOLDED_EXPONENT + 127;
        const float value = __uint_as_float(bits == 255 ? 0x7fc00000u : uint32_t(exponent < 0 ? 0 : exponent) << 23);
        factor = as_bits(__float2half2_rn(value));
    } else {
        const uint32_t value = e4m3x2_to_half2(bits * 0x101u);
        factor = as_bits(__hmul2(as_half2(value), __float2half2_rn(1 << Format::FOLDED_EXPONENT)));
    }
    return factor;
}

// Multiplies a round with the scales folded into the weights: one sum for the whole round.
//
// Exact for NVFP4, whose products have 6 significant bits within the range of a half. Of MXFP4 and
// MXFP8, weights below 2^-24 of the largest of their row in the round are lost.
template <class Format, class Shape>
__device__ __forceinline__ void multiply_folded(Sums<Shape> &sums, const Round<Format, Shape> &round, const StagedX<Format, Shape> &x,
                                                int k0, int g, int t) {
    uint32_t top[2] = {};
#pragma unroll
    for (int step = 0; step < Shape::STEPS; ++step)
#pragma unroll
        for (int row = 0; row < 2; ++row)
            if (round.scale[row][step] != 255) top[row] = max(top[row], round.scale[row][step]);
    if constexpr (Format::SCALES == Scale::E8m0)
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
            for (int row = 0; row < 2; ++row) top[row] = max(top[row], __shfl_xor_sync(FULL_WARP, top[row], distance));

    Accumulators<Shape> c[Shape::COLUMN_TILES] = {};
    static_for<Shape::STEPS>([&](auto step_) {
        constexpr int step = decltype(step_)::value;
        const half2 factor[2] = {as_half2(folded_scale<Format>(round.scale[0][step], top[0])),
                                 as_half2(folded_scale<Format>(round.scale[1][step], top[1]))};
        static_for<Shape::CHUNK / 16>([&](auto part_) {
            constexpr int part = decltype(part_)::value;
            uint32_t a[2][8];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                dequantize_sixteen<Format, part>(a[row], round.words[row][step]);
#pragma unroll
                for (int i = 0; i < 8; ++i) a[row][i] = as_bits(__hmul2(as_half2(a[row][i]), factor[row]));
            }
#pragma unroll
            for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile)
                multiply_sixteen<Format, Shape>(c[tile], a, x, true, (k0 / Shape::STEP + step) * (Shape::CHUNK / 16) + part, tile * 8 + g, t);
        });
    });
#pragma unroll
    for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile) {
        c[tile].add_up();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float unit = x.group(tile * 8 + 2 * t + j, k0 / Shape::ROUND)->unit;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float scale = Format::SCALES == Scale::E8m0 ? e8m0_to_float(top[row]) : 1.f;
                float &sum = sums.sum[row][tile * 2 + j];
                sum = __fmaf_rn(scale, c[tile].of[0][row * 2 + j] * unit, sum);
            }
        }
    }
}

// What finished sums are multiplied by.
template <class Format, class Shape> constexpr __host__ __device__ float out_scale() {
    return Shape::FOLDED ? Format::OUT_SCALE / (1 << Format::FOLDED_EXPONENT) : Format::OUT_SCALE;
}

}  // namespace cq
