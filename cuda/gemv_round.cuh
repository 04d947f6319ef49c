// One round of the tensor-core GEMV: a warp's share of k between two applications of scales to sums.
#pragma once
#include "gemv_lane.cuh"
#include "gemv_ring.cuh"
#include <type_traits>

namespace cq {

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
__device__ __forceinline__ void multiply_sixteen(Accumulators<Shape> &c, const uint32_t (&a)[2][8], const uint32_t (&b)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const uint32_t ai[4] = {a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]};
        mma_m16n8k16(c.of[i / 2 % Shape::CHAINS], ai, b[i], b[i + 1]);
    }
}

// The products of a round by groups: their sums are kept apart, scale and bias applied to them.
template <class Format, class Shape> struct ByGroups {
    Accumulators<Shape> c[Shape::PASSES][Shape::COLUMN_TILES] = {};

    __device__ __forceinline__ ByGroups(const RoundScales<Format, Shape> &) {}

    template <int STEP> __device__ __forceinline__ void step(const uint32_t (&words)[2][Shape::WORDS], LaneOfX<Format, Shape> &x) {
        static_for<Shape::CHUNK / 16>([&](auto part_) {
            constexpr int part = decltype(part_)::value;
            uint32_t a[2][8];
#pragma unroll
            for (int row = 0; row < 2; ++row) dequantize_sixteen<Format, part>(a[row], words[row]);
#pragma unroll
            for (int pass = 0; pass < Shape::PASSES; ++pass)
#pragma unroll
                for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile) {
                    uint32_t b[8];
                    x.template fragment<STEP, part>(b, pass, tile);
                    multiply_sixteen<Format, Shape>(c[pass][tile], a, b);
                }
        });
    }

    // The lane now holds columns 2t and 2t + 1 of rows g and g + 8, each the sum over one group.
    __device__ __forceinline__ void add_to(Sums<Shape> &sums, const RoundScales<Format, Shape> &round,
                                           const LaneOfX<Format, Shape> &x) {
        constexpr bool ONE = Shape::ROWS == 1;
#pragma unroll
        for (int pass = 0; pass < Shape::PASSES; ++pass)
#pragma unroll
            for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile) {
                c[pass][tile].add_up();
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int slot = x.slot(j);
                    if (Shape::SLOTS * Shape::ROWS < 8 && slot >= Shape::SLOTS) continue;
                    const int scale_index = ONE ? pass * 2 + j : pass;
                    const auto of_x = x.group(tile, j, pass);
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        float &sum = sums.sum[row][ONE ? 0 : tile * 2 + j];
                        float dot = c[pass][tile].of[0][row * 2 + j];
                        if constexpr (Format::HAS_OFFSETS) dot -= of_x.offset_sum;
                        if constexpr (Format::HAS_BIASES) sum = __fmaf_rn(round.bias_of(row, scale_index), of_x.sum, sum);
                        sum = __fmaf_rn(round.scale_of(row, scale_index), dot * of_x.unit, sum);
                    }
                }
            }
    }
};

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

// The products of a round with the scales folded into the weights: one sum for the whole round.
//
// Exact for NVFP4, whose products have 6 significant bits within the range of a half. Of MXFP4 and
// MXFP8, weights below 2^-24 of the largest of their row in the round are lost.
template <class Format, class Shape> struct Folded {
    uint32_t top[2] = {};
    uint32_t factor[2][Shape::STEPS];
    Accumulators<Shape> c[Shape::COLUMN_TILES] = {};

    __device__ __forceinline__ Folded(const RoundScales<Format, Shape> &round) {
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
#pragma unroll
        for (int step = 0; step < Shape::STEPS; ++step)
#pragma unroll
            for (int row = 0; row < 2; ++row) factor[row][step] = folded_scale<Format>(round.scale[row][step], top[row]);
    }

    template <int STEP> __device__ __forceinline__ void step(const uint32_t (&words)[2][Shape::WORDS], LaneOfX<Format, Shape> &x) {
        static_for<Shape::CHUNK / 16>([&](auto part_) {
            constexpr int part = decltype(part_)::value;
            uint32_t a[2][8];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                dequantize_sixteen<Format, part>(a[row], words[row]);
#pragma unroll
                for (int i = 0; i < 8; ++i) a[row][i] = as_bits(__hmul2(as_half2(a[row][i]), as_half2(factor[row][STEP])));
            }
#pragma unroll
            for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile) {
                uint32_t b[8];
                x.template fragment<STEP, part>(b, 0, tile);
                multiply_sixteen<Format, Shape>(c[tile], a, b);
            }
        });
    }

    __device__ __forceinline__ void add_to(Sums<Shape> &sums, const RoundScales<Format, Shape> &,
                                           const LaneOfX<Format, Shape> &x) {
#pragma unroll
        for (int tile = 0; tile < Shape::COLUMN_TILES; ++tile) {
            c[tile].add_up();
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float unit = x.group(tile, j, 0).unit;
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float scale = Format::SCALES == Scale::E8m0 ? e8m0_to_float(top[row]) : 1.f;
                    float &sum = sums.sum[row][tile * 2 + j];
                    sum = __fmaf_rn(scale, c[tile].of[0][row * 2 + j] * unit, sum);
                }
            }
        }
    }
};

template <class Format, class Shape>
using Products = std::conditional_t<Shape::FOLDED, Folded<Format, Shape>, ByGroups<Format, Shape>>;

// What finished sums are multiplied by.
template <class Format, class Shape> constexpr __host__ __device__ float out_scale() {
    return Shape::FOLDED ? Format::OUT_SCALE / (1 << Format::FOLDED_EXPONENT) : Format::OUT_SCALE;
}

}  // namespace cq
