// y = x w^T for up to 16 rows of x, on tensor cores, straight from the row-major packed weights.
//
// `mma.m16n8k16` multiplies 16 rows of weights (A, registers) by 8 columns of activations (B). A sum of
// products may visit k in any order on which A and B agree, so every lane loads whole chunks of its
// rows from the checkpoint's layout, and the dequantized pairs *are* its A fragment; x is staged in shared
// memory in the matching order. The 8 columns hold 8 / ROWS neighbouring groups times ROWS rows of x:
// column c carries x only for group c / ROWS and meets zeros elsewhere. An accumulator thus keeps the
// groups apart, and scale and bias are applied once per group, in fp32, to a sum of codes times x.
//
// A block has 8 warps: TILES row tiles of 16 weights times K_WARPS shares of k. It stays for as many blocks of rows as there
// are for it: x is staged once, and weights are on their way all the time (gemv_ring.cuh). Blocks with the same
// blockIdx.x and different blockIdx.y share the k of one set of rows; the last to arrive adds their
// partial sums in the order of k. Nothing depends on the order of warps or blocks, nor on how many blocks there are.
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

// Which rows of which weights a block multiplies at a time.
struct BlockRows {
    uint32_t operand;  // of rows 0..8 of each tile, and of rows 8..16 unless SwiGLU
    uint32_t first;
    bool paired;  // SwiGLU: rows 8..16 of each tile are the same rows of the next operand

    // Those of the given number, of all that the launch has.
    __device__ __forceinline__ BlockRows(const CqGemv &p, uint32_t rows_per_block, uint32_t block) : operand(0), paired(p.gated) {
        const uint32_t step = paired ? rows_per_block / 2 : rows_per_block;
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

// Turns a finished sum `total(tile, row in tile, row of x)` of the i-th output into an element of y; `squares(row of x)` is the
// sum of those of x.
template <class Shape, class Total, class Squares>
__device__ __forceinline__ void store_output(const CqGemv &p, const BlockRows &block, int i, float out_scale, Total total, Squares squares) {
    const int rows = block.paired ? Shape::ROWS_PER_BLOCK / 2 : Shape::ROWS_PER_BLOCK, per_tile = block.paired ? 8 : 16;
    const uint32_t m = i / rows, tile = i % rows / per_tile, r = i % rows % per_tile, row = block.row(tile, r);
    const CqOperand &operand = p.operand[block.operand];
    if (m >= p.m || row >= operand.matrix.rows) return;
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

// The sums of a block of rows over the block's share of k.
template <class Shape> struct BlockSums {
    static constexpr int SIZE = Shape::THREADS / 32 * 16 * Shape::ROWS;
    const float *shares;   // in shared memory: [tile][share of k][16][ROWS]
    const float *squares;  // of x, if it has a norm: [ROWS]

    __device__ __forceinline__ float operator()(int tile, int row, int m) const {
        float sum = 0;
#pragma unroll
        for (int s = 0; s < Shape::K_WARPS; ++s) sum += shares[((tile * Shape::K_WARPS + s) * 16 + row) * Shape::ROWS + m];
        return sum;
    }
};

// Multiplies [k_begin, k_end) of `count` blocks of rows of weights with rows of x, one after the other.
// `place(rows, number of the block of rows, tile, k, g, t)` tells where a lane finds its two rows, g and g + 8 of the tile.
// `store(first, how many, sums of each)` is called by all threads.
template <class Format, class Shape, class Place, class Store>
__device__ __forceinline__ void multiply_blocks(const RowsOfX &rows_of_x, uint32_t k, int k_begin, int k_end, uint32_t count, Place place,
                                                Store store) {
    CQ_DYNAMIC_SHARED(memory);
    constexpr int TURN = LaneRows<Format, Shape>::TURN, STEPS_OF_BATCH = Shape::BATCH * Shape::STEPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int tile = warp / Shape::K_WARPS, k_share = k_end - k_begin;
    // The rounds of one block of rows follow on those of the one before it: no warp has many more of them than another. Which of
    // the shares of k a warp has, each of them every K_WARPS-th round, is another one for the next rows, then.
    const int shift = (k_share + Shape::ROUND - 1) / Shape::ROUND % Shape::K_WARPS;
    auto share_behind = [&](int share) { return (share + Shape::K_WARPS - shift) % Shape::K_WARPS; };
    // Batches of a share.
    auto batches_of = [&](int share) { return (k_share - share * Shape::ROUND + Shape::BATCH * TURN - 1) / (Shape::BATCH * TURN); };

    LaneRows<Format, Shape> rows;
    uint32_t next_rows = 0;
    bool is_any = true;                         // whether there are weights left to be copied
    int batches_left = 0;                       // of the rows that are on their way
    int next_share = warp % Shape::K_WARPS;     // of the rows behind them
    auto next_batch = [&] {
        if (--batches_left > 0) {
            rows.next_batch();
            return;
        }
        rows.none_left();
        is_any = false;
        for (; next_rows < count; ++next_rows, next_share = share_behind(next_share)) {
            batches_left = batches_of(next_share);
            if (batches_left <= 0) continue;
            const int k0 = k_begin + next_share * Shape::ROUND;
            place(rows, next_rows, tile, k0, g, t);
            rows.words_left = k_end - k0 - t * Shape::CHUNK;
            rows.groups_left = int(k / Shape::GROUP) - k0 / Shape::GROUP - Shape::slot(2 * t);
            ++next_rows, next_share = share_behind(next_share);
            is_any = true;
            return;
        }
    };

    // No earlier kernel writes weights: their copies need not wait for it.
    const Ring<Format, Shape> ring(memory);
    RoundScales<Format, Shape> scales[Shape::BATCH];
    next_batch();
#pragma unroll
    for (int step = 0; step < Shape::RING; ++step) ring.copy(step, rows, step, is_any);
#pragma unroll
    for (int turn = 0; turn < Shape::BATCH && !Shape::SCALES_LATE; ++turn) rows.load_scales(scales[turn], turn, k);
    wait_for_earlier_kernels();
    const StagedX<Format, Shape> x = stage_x<Format, Shape>(rows_of_x, memory + Shape::THREADS / 32 * Ring<Format, Shape>::BYTES, k_begin, k_end);
    let_next_kernel_start();
    if (Shape::TAKES_NORM && rows_of_x.norm) x.add_squares();

    // [two sets, so that one is added up while the next ones come][block of rows]
    float *const shares = x.after();
    int share = warp % Shape::K_WARPS;
    LaneOfX<Format, Shape> lane_of_x(x, g, t);
    if (count == 0) return;
    for (uint32_t number = 0;; ++number) {
        const bool is_last = number + 1 == count;
        Sums<Shape> sums = {};
        int k0 = share * Shape::ROUND;
#pragma unroll 1
        for (int batch = batches_of(share); batch > 0; --batch)
            static_for<Shape::BATCH>([&](auto turn_) {
                constexpr int turn = decltype(turn_)::value;
                const bool there = k0 < k_share;
                // Where registers are few, the compiler needs to see that nothing else uses it.
                if (there || !NO_COPIES_BEHIND) lane_of_x.round(k0);
                if (Shape::SCALES_LATE) rows.load_scales(scales[turn], turn, k);
                Products<Format, Shape> products(scales[turn]);
                static_for<Shape::STEPS / Shape::AT_ONCE>([&](auto some_) {
                    uint32_t words[Shape::AT_ONCE][2][Shape::WORDS];
                    constexpr int first_step = decltype(some_)::value * Shape::AT_ONCE, first_of_batch = turn * Shape::STEPS + first_step;
                    if constexpr (first_of_batch + Shape::RING == STEPS_OF_BATCH) next_batch();
                    wait_for_copies<Shape::RING - Shape::AT_ONCE>();
#pragma unroll
                    for (int i = 0; i < Shape::AT_ONCE; ++i) ring.read(words[i], (first_of_batch + i) % Shape::RING);
                    static_for<Shape::AT_ONCE>([&](auto one_) {
                        constexpr int one = decltype(one_)::value, step = first_step + one, of_batch = first_of_batch + one;
                        constexpr int place = of_batch % Shape::RING, ahead = (of_batch + Shape::RING) % STEPS_OF_BATCH;
                        if (!Shape::LOADS_LATE) ring.copy(place, rows, ahead, is_any);
                        if (there) products.template step<step>(words[one], lane_of_x);
                        if (Shape::LOADS_LATE) ring.copy(place, rows, ahead, is_any);
                    });
                });
                if (there) products.add_to(sums, scales[turn], lane_of_x);
                if (!Shape::SCALES_LATE) rows.load_scales(scales[turn], turn, k);
                k0 += TURN;
            });
        const uint32_t waiting = number % Shape::WAITING, set = number / Shape::WAITING % 2;
        float *const of_set = shares + set * Shape::WAITING * BlockSums<Shape>::SIZE;
        store_sums<Shape>(of_set + waiting * BlockSums<Shape>::SIZE + (tile * Shape::K_WARPS + share) * 16 * Shape::ROWS, sums, g, t);
        share = share_behind(share);
        if (waiting + 1 < Shape::WAITING && !is_last) continue;
        if (is_last) wait_for_copies<0>();  // of nothing, to where others may write from now on
        __syncthreads();
        store(number - waiting, waiting + 1, [&](uint32_t which) { return BlockSums<Shape>{of_set + which * BlockSums<Shape>::SIZE, x.squares()}; });
        if (is_last) return;
    }
}

template <class Format, class Shape> __device__ __forceinline__ void gemv(const CqGemv &p) {
    const int k_begin = blockIdx.y * p.k_per_split, k_end = min(p.k, k_begin + p.k_per_split);
    constexpr float OUT_SCALE = out_scale<Format, Shape>();
    // Blocks take turns at blocks of rows.
    const uint32_t count = (p.blocks - blockIdx.x + gridDim.x - 1) / gridDim.x;
    auto rows_of = [&](uint32_t number) { return BlockRows(p, Shape::ROWS_PER_BLOCK, blockIdx.x + number * gridDim.x); };
    const RowsOfX x{p.x, p.norm, 0, p.m, p.x_stride, p.x_dtype};
    constexpr int SUMS = Shape::ROWS_PER_BLOCK * Shape::ROWS, COUNT = SUMS + Shape::ROWS;
    auto store = [&](uint32_t first, uint32_t number, auto sums_of) {
        if (gridDim.y == 1) {
            const uint32_t outputs = p.gated ? SUMS / 2 : SUMS;
            for (uint32_t i = threadIdx.x; i < number * outputs; i += Shape::THREADS) {
                const BlockSums<Shape> sums = sums_of(i / outputs);
                store_output<Shape>(p, rows_of(first + i / outputs), i % outputs, OUT_SCALE, sums, [&](int m) { return sums.squares[m]; });
            }
            return;
        }
        // A block whose k is split has one block of rows.
        const BlockSums<Shape> sums = sums_of(0);
        float *partial = p.partial + size_t(blockIdx.x) * COUNT;
        const size_t split = size_t(gridDim.x) * COUNT;
        for (int i = threadIdx.x; i < SUMS; i += Shape::THREADS)
            partial[blockIdx.y * split + i] = sums(i / Shape::ROWS / 16, i / Shape::ROWS % 16, i % Shape::ROWS);
        if (Shape::TAKES_NORM && p.norm && threadIdx.x < Shape::ROWS) partial[blockIdx.y * split + SUMS + threadIdx.x] = sums.squares[threadIdx.x];
        if (!last_of_parts(p.arrivals + blockIdx.x, gridDim.y)) return;
        auto all_parts = [&](int i) {
            float sum = 0;
#pragma unroll 4
            for (uint32_t s = 0; s < gridDim.y; ++s) sum += load_again(partial + s * split + i);
            return sum;
        };
        for (int i = threadIdx.x; i < (p.gated ? SUMS / 2 : SUMS); i += Shape::THREADS)
            store_output<Shape>(
                p, rows_of(0), i, OUT_SCALE, [&](int tile, int row, int m) { return all_parts((tile * 16 + row) * Shape::ROWS + m); },
                [&](int m) { return all_parts(SUMS + m); });
    };
    multiply_blocks<Format, Shape>(
        x, p.k, k_begin, k_end, count,
        [&](LaneRows<Format, Shape> &rows, uint32_t number, int tile, int k, int g, int t) {
            const BlockRows block = rows_of(number);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const CqMatrix &matrix = p.operand[block.operand_of(half * 8)].matrix;
                // Rows past the end repeat the last one; their outputs are not stored.
                rows.place(half, matrix, min(block.row(tile, half * 8 + g), matrix.rows - 1), p.k, k, t);
            }
        },
        store);
}

}  // namespace cq
