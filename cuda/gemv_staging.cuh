// Activations in shared memory, as B fragments: halves, in the order in which formats make halves of weights.
//
// The range of bf16 does not fit a half, so each group of x is multiplied by a power of two that brings
// its largest finite magnitude to [2^14, 2^15); the factor is taken out again where scales are applied.
// Elements down to 2^-28 of that maximum stay exact, smaller ones lose at most 2^-39 of it.
#pragma once
#include "formats/scales.cuh"
#include "gemv_shape.cuh"

namespace cq {

template <int I> struct Int {
    static constexpr int value = I;
};

// Calls f(Int<0>), f(Int<1>), .. f(Int<N - 1>).
template <int N, class F, int I = 0> __device__ __forceinline__ void static_for(F &&f) {
    if constexpr (I < N) {
        f(Int<I>{});
        static_for<N, F, I + 1>(static_cast<F &&>(f));
    }
}

// What a group of one row of x contributes besides its products with codes.
template <bool OFFSETS> struct GroupOfX;
template <> struct alignas(16) GroupOfX<true> {
    float unit;        // what 1 of the staged x stands for
    float offset_sum;  // of the staged x, times the offsets that codes as halves carry
    float sum;         // of x
    float squares;     // the sum of those of x, if there is a norm, without its weight
};
template <> struct alignas(8) GroupOfX<false> {
    float unit;
    float squares;
};

// Shared memory of a block, in bytes:
//   8 RING STEP_BYTES        weights on their way
//   64 (ROWS + 1)            zeros, unless there is one row
//   2 ROWS k                 x: [64 weights: 16 of each of four lanes' chunks][half of the 16][row][lane][8 halves]
//   16 or 8 ROWS (k / X_GROUP) GroupOfX [row][group], with offsets or without
//   4 * 8 * 16 ROWS, 2 WAITING times: the sums of each warp's rows
//   4 ROWS                   the sums of squares of each row
// where k is the block's share, padded to whole rounds.
template <class Format, class Shape> struct StagedX {
    using Group = GroupOfX<Format::HAS_OFFSETS>;
    unsigned char *memory;
    int k;

    // Of one row of x, lanes of other groups load nothing: what a warp loads is what keeps the shared memory busy. For more
    // there are no registers for that. They load as many zeros as a fragment spans, so that one address selects all of it.
    static constexpr bool HAS_ZEROS = Shape::ROWS > 1;
    static constexpr int ZEROS = HAS_ZEROS ? 64 * (Shape::ROWS + 1) : 0;

    __device__ __forceinline__ int groups() const { return k / Shape::X_GROUP; }
    __device__ __forceinline__ Group *group(int row, int group) const {
        return reinterpret_cast<Group *>(memory + ZEROS + size_t(Shape::ROWS) * k * sizeof(half)) + row * groups() + group;
    }
    __device__ __forceinline__ float *after() const { return reinterpret_cast<float *>(group(Shape::ROWS, 0)); }
    __device__ __forceinline__ float *squares() const { return after() + 2 * Shape::WAITING * (Shape::THREADS / 32) * 16 * Shape::ROWS; }

    // Adds up the squares of each row, a warp for each; they are there behind the next barrier.
    __device__ __forceinline__ void add_squares() const {
        const int lane = threadIdx.x % 32;
        for (int row = threadIdx.x / 32; row < Shape::ROWS; row += Shape::THREADS / 32) {
            float sum = 0;
#pragma unroll 1
            for (int i = lane; i < groups(); i += 32) sum += group(row, i)->squares;
#pragma unroll
            for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            if (lane == 0) squares()[row] = sum;
        }
    }

    // Sixteen halves that each of four lanes needs of one row: the first eight of all lanes of all rows, then the others, so that
    // a warp's loads meet no bank twice.
    static constexpr int LANES_BYTES = 4 * sizeof(uint4), PART_BYTES = 2 * Shape::ROWS * LANES_BYTES;
};

// Sixteen consecutive elements of a row of x.
__device__ __forceinline__ void load_sixteen(float (&v)[16], const void *x, size_t first, uint32_t dtype) {
    const uint4 *from = reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(x) + first);
    const uint4 raw[2] = {from[0], from[1]};
    uint32_t pairs[8];
    memcpy(pairs, raw, sizeof pairs);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (dtype == CQ_F16) {
            const float2 two = __half22float2(as_half2(pairs[i]));
            v[2 * i] = two.x, v[2 * i + 1] = two.y;
        } else {
            v[2 * i] = __uint_as_float(pairs[i] << 16), v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
    }
}

// The m rows of x that a block multiplies; they begin at multiples of 16 bytes.
struct RowsOfX {
    const void *x;
    const float *norm;  // the weight of an RMS norm, or null
    uint32_t first, m, stride, dtype;
};

// Multiplies sixteen elements by the weight of their norm; returns the sum of their squares before.
__device__ __forceinline__ float weigh(float (&v)[16], const float *weight) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 w = reinterpret_cast<const float4 *>(weight)[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) squares = __fmaf_rn(v[4 * i + j], v[4 * i + j], squares);
        v[4 * i] *= w.x, v[4 * i + 1] *= w.y, v[4 * i + 2] *= w.z, v[4 * i + 3] *= w.w;
    }
    return squares;
}

// Stages [k_begin, k_end) of all rows of x into shared memory, by all threads of the block; a thread takes sixteen at a time.
template <class Format, class Shape>
__device__ __forceinline__ StagedX<Format, Shape> stage_x(const RowsOfX &rows, unsigned char *memory, int k_begin, int k_end) {
    constexpr int LANES = Shape::X_GROUP / 16;  // neighbouring threads that stage one group
    const StagedX<Format, Shape> x{memory, (k_end - k_begin + Shape::ROUND - 1) / Shape::ROUND * Shape::ROUND};
    for (int i = threadIdx.x; i < x.ZEROS / 4; i += Shape::THREADS) reinterpret_cast<uint32_t *>(memory)[i] = 0;

    const bool has_norm = Shape::TAKES_NORM && rows.norm;
    const int sixteens = x.k / 16, total = Shape::ROWS * sixteens;
    // Whole warps take part, for the sake of the shuffles.
    for (int i = threadIdx.x; i / 32 * 32 < total; i += Shape::THREADS) {
        const int row = i / sixteens, sixteen = i % sixteens, k = k_begin + sixteen * 16;
        float v[16] = {}, squares = 0;
        if (row < int(rows.m) && k < k_end) {
            load_sixteen(v, rows.x, size_t(rows.first + row) * rows.stride + k, rows.dtype);
            if (has_norm) squares = weigh(v, rows.norm + k);
        }

        uint32_t exponent = 127;
        if (rows.dtype == CQ_BF16 || has_norm) {
            float largest = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) largest = fmaxf(largest, fabsf(v[j]));
            if (!(largest < INFINITY)) {
                largest = 0;
#pragma unroll
                for (int j = 0; j < 16; ++j)
                    if (fabsf(v[j]) < INFINITY) largest = fmaxf(largest, fabsf(v[j]));
            }
#pragma unroll
            for (int distance = 1; distance < LANES; distance *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
            exponent = factor_exponent(largest);
        }
        const float factor = __uint_as_float(exponent << 23);

        // Of halves, where there are registers for the choice.
        const bool of_halves = has_norm || Shape::ROWS >= 8;
        float sum = 0, offset_sum = 0;
        uint32_t pairs[8];
#pragma unroll
        for (int pair = 0; pair < 8; ++pair) {
            half two[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int h = (2 * pair + side) % Format::UNIT;
                const float value = v[2 * pair / Format::UNIT * Format::UNIT + Format::weight_of(h)];
                two[side] = __float2half_rn(value * factor);
                if constexpr (Format::HAS_OFFSETS) {
                    sum += value;
                    // Only a weighted x loses digits as a half.
                    offset_sum = __fmaf_rn(Format::offset(h), of_halves ? __half2float(two[side]) : value, offset_sum);
                }
            }
            memcpy(pairs + pair, two, sizeof two);
        }
        if constexpr (Format::HAS_OFFSETS) {
            if (!of_halves) offset_sum *= factor;
#pragma unroll
            for (int distance = 1; distance < LANES; distance *= 2) {
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
                offset_sum += __shfl_xor_sync(FULL_WARP, offset_sum, distance);
            }
        }
        if (has_norm)
#pragma unroll
            for (int distance = 1; distance < LANES; distance *= 2) squares += __shfl_xor_sync(FULL_WARP, squares, distance);
        if (i >= total) continue;

        const int step = sixteen * 16 / Shape::STEP, within = sixteen * 16 % Shape::STEP;
        const int part = step * (Shape::CHUNK / 16) + within % Shape::CHUNK / 16;
        unsigned char *to = x.memory + x.ZEROS + part * x.PART_BYTES + row * x.LANES_BYTES + within / Shape::CHUNK * sizeof(uint4);
        *reinterpret_cast<uint4 *>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        *reinterpret_cast<uint4 *>(to + x.PART_BYTES / 2) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
        if (sixteen % LANES == 0) {
            const float unit = __uint_as_float((254 - exponent) << 23);
            if constexpr (Format::HAS_OFFSETS)
                *x.group(row, sixteen / LANES) = {unit, offset_sum, sum, 0};
            else
                *x.group(row, sixteen / LANES) = {unit};
            x.group(row, sixteen / LANES)->squares = squares;
        }
    }
    __syncthreads();
    return x;
}

}  // namespace cq
