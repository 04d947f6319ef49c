// y = x w^T for up to 16 rows of x, on tensor cores, straight from the row-major packed weights.
//
// `mma.m16n8k16` multiplies 16 rows of weights (A, registers) by 8 columns of activations (B). A sum of
// products may visit k in any order on which A and B agree, so every lane loads whole chunks of its
// rows from the checkpoint's layout, and the dequantized pairs *are* its A fragment; x is staged in shared
// memory in the matching order. The 8 columns hold 8 / ROWS neighbouring groups times ROWS rows of x:
// column c carries x only for group c / ROWS and meets zeros elsewhere. An accumulator thus keeps the
// groups apart, and scale and bias are applied once per group, in fp32, to a sum of codes times x.
//
// A block has 8 warps: TILES row tiles of 16 weights times K_WARPS shares of k. Blocks with the same
// blockIdx.x and different blockIdx.y share the k of one set of rows; the last to arrive adds their
// partial sums in the order of k. Nothing depends on the order of warps or blocks.
#pragma once
#include "finish.cuh"
#include "gemv_round.cuh"
#include "parts.cuh"

namespace cq {

// Adds up the lanes that hold different groups of one sum, and leaves the warp's 16 x ROWS sums in shared memory.
template <class Shape> __device__ __forceinline__ void store_sums(float *out, Sums<Shape> &sums, int g, int t) {
    constexpr int KEEPERS = Shape::ROWS == 1 ? 1 : Shape::ROWS / 2 < 4 ? Shape::ROWS / 2 : 4;  // lanes of four with sums of their own
#pragma unroll
    for (int distance = KEEPERS; distance < 4; distance *= 2)
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
            for (int j = 0; j < Sums<Shape>::COUNT; ++j)
                sums.sum[row][j] += __shfl_xor_sync(FULL_WARP, sums.sum[row][j], distance);
    if (t >= KEEPERS) return;
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int j = 0; j < Sums<Shape>::COUNT; ++j)
            out[(row * 8 + g) * Shape::ROWS + (Shape::ROWS == 1 ? 0 : (j / 2) * 8 + 2 * t + j % 2)] = sums.sum[row][j];
}

// Which rows of which weights a block multiplies.
struct BlockRows {
    uint32_t operand;  // of rows 0..8 of each tile, and of rows 8..16 unless SwiGLU
    uint32_t first;
    bool paired;  // SwiGLU: rows 8..16 of each tile are the same rows of the next operand

    __device__ __forceinline__ BlockRows(const CqGemv &p, uint32_t rows_per_block) : operand(0), paired(p.gated) {
        const uint32_t step = paired ? rows_per_block / 2 : rows_per_block;
        uint32_t block = blockIdx.x;
        if (!paired)
            for (; operand + 1 < p.operands; ++operand) {
                const uint32_t blocks = (p.operand[operand].matrix.rows + step - 1) / step;
                if (block < blocks) break;
                block -= blocks;
            }
        first = block * step;
    }
    __device__ __forceinline__ uint32_t operand_of(int row_in_tile) const { return paired && row_in_tile >= 8 ? operand + 1 : operand; }
    __device__ __forceinline__ uint32_t row(int tile, int row_in_tile) const {
        return paired ? first + tile * 8 + row_in_tile % 8 : first + tile * 16 + row_in_tile;
    }
};

// Turns finished sums `total(tile, row in tile, row of x)` into elements of y; `squares(row of x)` is the sum of those of x.
template <class Shape, class Total, class Squares>
__device__ __forceinline__ void store_outputs(const CqGemv &p, const BlockRows &block, float out_scale, Total total, Squares squares) {
    const int rows = block.paired ? Shape::ROWS_PER_BLOCK / 2 : Shape::ROWS_PER_BLOCK, per_tile = block.paired ? 8 : 16;
    for (int i = threadIdx.x; i < rows * Shape::ROWS; i += Shape::THREADS) {
        const uint32_t m = i / rows, tile = i % rows / per_tile, r = i % rows % per_tile, row = block.row(tile, r);
        const CqOperand &operand = p.operand[block.operand];
        if (m >= p.m || row >= operand.matrix.rows) continue;
        const float scale = Shape::TAKES_NORM && p.norm ? out_scale * rsqrtf(squares(m) / float(p.k) + p.eps) : out_scale;
        auto with_bias = [&](const CqOperand &operand, float sum) {
            const float product = sum * (scale * operand.matrix.global_scale);
            return operand.bias ? product + load_float(operand.bias, row, operand.bias_dtype) : product;
        };
        float value = with_bias(operand, total(tile, r, m));
        if (block.operand == 0) value = activated(p.finish.activation, value);
        if (block.paired) value *= with_bias(p.operand[block.operand + 1], total(tile, r + 8, m));
        value = finished(p.finish, value);
        if (p.residual && block.operand == 0) value += load_float(p.residual, size_t(m) * p.residual_stride + row, p.x_dtype);
        store_float(operand.y, size_t(m) * operand.y_stride + row, p.x_dtype, value);
    }
}

// The sums of a block over its share of k.
template <class Shape> struct BlockSums {
    const float *shares;   // in shared memory: [warp][16][ROWS]
    const float *squares;  // of x, if it has a norm: [ROWS]

    __device__ __forceinline__ float operator()(int tile, int row, int m) const {
        float sum = 0;
#pragma unroll
        for (int s = 0; s < Shape::K_WARPS; ++s) sum += shares[((tile * Shape::K_WARPS + s) * 16 + row) * Shape::ROWS + m];
        return sum;
    }
};

// Multiplies [k_begin, k_end) of the block's rows of weights with rows of x. `place(rows, half, tile, row in tile, k, t)`
// tells where lane t of four finds each of its two rows, whose scales and biases have the dtypes of `matrix`.
template <class Format, class Shape, class Place>
__device__ __forceinline__ BlockSums<Shape> multiply_block(const RowsOfX &rows_of_x, const CqMatrix &matrix, uint32_t k, int k_begin,
                                                           int k_end, Place place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int tile = warp / Shape::K_WARPS, share = warp % Shape::K_WARPS;

    int k0 = share * Shape::ROUND;  // of the block's share
    LaneRows<Format, Shape> rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) place(rows, half, tile, half * 8 + g, k_begin + k0, t);
    rows.words_left = k_end - k_begin - k0 - t * Shape::CHUNK;
    rows.groups_left = int(k / Shape::GROUP) - (k_begin + k0) / Shape::GROUP - Shape::slot(2 * t);

    Round<Format, Shape> batch[Shape::BATCH] = {};
    auto load_batch = [&] {
#pragma unroll
        for (int turn = 0; turn < Shape::BATCH; ++turn) rows.load_weights(batch[turn], turn);
        if (Shape::BATCH > 1)
#pragma unroll
            for (int turn = 0; turn < Shape::BATCH; ++turn) rows.load_scales(batch[turn], turn);
    };
    // No earlier kernel writes weights: their loads need not wait for it.
    load_batch();
    wait_for_earlier_kernels();
    const StagedX<Format, Shape> x = stage_x<Format, Shape>(rows_of_x, k_begin, k_end);
    let_next_kernel_start();
    if (Shape::TAKES_NORM && rows_of_x.norm) x.add_squares();

    Sums<Shape> sums = {};
    const int k_share = k_end - k_begin;
    while (k0 < k_share) {
        if (Shape::BATCH == 1) rows.load_scales(batch[0], 0);
#pragma unroll
        for (int turn = 0; turn < Shape::BATCH; ++turn, k0 += Shape::K_WARPS * Shape::ROUND) {
            if (Shape::BATCH > 1 && k0 >= k_share) break;
            if constexpr (Shape::FOLDED)
                multiply_folded<Format, Shape>(sums, batch[turn], x, k0, g, t);
            else
                multiply_by_groups<Format, Shape>(sums, batch[turn], matrix, x, k0, g, t);
        }
        rows.next_batch();
        load_batch();
    }

    float *shares = x.after();
    store_sums<Shape>(shares + warp * 16 * Shape::ROWS, sums, g, t);
    __syncthreads();
    return {shares, x.squares()};
}

template <class Format, class Shape> __device__ __forceinline__ void gemv(const CqGemv &p) {
    const int k_begin = blockIdx.y * p.k_per_split, k_end = min(p.k, k_begin + p.k_per_split);
    constexpr float OUT_SCALE = out_scale<Format, Shape>();
    const BlockRows block(p, Shape::ROWS_PER_BLOCK);
    const RowsOfX x{p.x, p.norm, 0, p.m, p.x_stride, p.x_dtype};
    const BlockSums<Shape> sums = multiply_block<Format, Shape>(
        x, p.operand[block.operand].matrix, p.k, k_begin, k_end, [&](LaneRows<Format, Shape> &rows, int half, int tile, int row, int k, int t) {
            const CqMatrix &matrix = p.operand[block.operand_of(half * 8)].matrix;
            // Rows past the end repeat the last one; their outputs are not stored.
            rows.place(half, matrix, min(block.row(tile, row), matrix.rows - 1), p.k, k, t);
        });
    if (gridDim.y == 1) {
        store_outputs<Shape>(p, block, OUT_SCALE, sums, [&](int m) { return sums.squares[m]; });
        return;
    }
    constexpr int SUMS = Shape::ROWS_PER_BLOCK * Shape::ROWS, COUNT = SUMS + Shape::ROWS;
    float *partial = p.partial + size_t(blockIdx.x) * COUNT;
    const size_t split = size_t(gridDim.x) * COUNT;
    for (int i = threadIdx.x; i < SUMS; i += Shape::THREADS)
        partial[blockIdx.y * split + i] = sums(i / Shape::ROWS / 16, i / Shape::ROWS % 16, i % Shape::ROWS);
    if (Shape::TAKES_NORM && p.norm && threadIdx.x < Shape::ROWS) partial[blockIdx.y * split + SUMS + threadIdx.x] = sums.squares[threadIdx.x];
    if (!last_of_parts(p.arrivals + blockIdx.x, gridDim.y)) return;
    auto all_parts = [&](int i) {
        float sum = 0;
        for (uint32_t s = 0; s < gridDim.y; ++s) sum += load_again(partial + s * split + i);
        return sum;
    };
    store_outputs<Shape>(
        p, block, OUT_SCALE, [&](int tile, int row, int m) { return all_parts((tile * 16 + row) * Shape::ROWS + m); },
        [&](int m) { return all_parts(SUMS + m); });
}

}  // namespace cq
