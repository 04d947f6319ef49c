// The tensor-core GEMV of one row of x with the experts that its token chose.
//
// Grid (blocks that cover the rows of an expert, pairs times splits of k). Gate and up share a block, as rows
// 0..8 and 8..16 of its tile. The blocks of a token's down projections add up to one sum: the last to arrive adds
// their parts, expert by expert in the order of ids. Nothing depends on the other tokens of a launch. Routing weights are
// factors in that sum; of gate and up, factors of x, which products are multiplied by: w (W x) is W (w x).
#pragma once
#include "experts.cuh"
#include "gemv.cuh"

namespace cq {

template <class Format, class Shape> __device__ __forceinline__ void gemv_of_experts(const CqExperts &p) {
    static_assert(Shape::ROWS == 1 && Shape::ROWS_PER_BLOCK == 16, "one row of x, one tile");
    constexpr float OUT_SCALE = out_scale<Format, Shape>();
    const bool gated = p.gating != CQ_NOT_GATED;
    const uint32_t pair = blockIdx.y / p.splits, split = blockIdx.y % p.splits;
    const int k_begin = split * p.k_per_split, k_end = min(p.k, k_begin + p.k_per_split);
    // An earlier kernel chose the experts.
    wait_for_earlier_kernels();

    const uint32_t first = blockIdx.x * (gated ? 8 : 16), rows_of_matrix = p.operand[0].matrix.rows;
    const RowsOfX x{p.x, nullptr, pair / p.pairs_of_x, 1, p.k, p.x_dtype};
    auto store = [&](uint32_t, uint32_t, auto sums_of) {
        const BlockSums<Shape> sums = sums_of(0);
        // Sums of one output: of a pair, or of a token's pairs.
        const uint32_t pairs = p.routing_weights && !gated ? p.top_k : 1, parts = pairs * p.splits;
        const uint32_t output = blockIdx.y / parts, block = output * gridDim.x + blockIdx.x;
        float *partial = p.partial + size_t(block) * parts * 16;
        if (parts > 1) {
            if (threadIdx.x < 16) partial[blockIdx.y % parts * 16 + threadIdx.x] = sums(0, threadIdx.x, 0);
            if (!last_of_parts(p.arrivals + block, parts)) return;
        }
        auto sum = [&](uint32_t of_output, int row) {
            if (parts == 1) return sums(0, row, 0);
            float sum = 0;
            for (uint32_t s = 0; s < p.splits; ++s) sum += load_again(partial + (of_output * p.splits + s) * 16 + row);
            return sum;
        };
        const uint32_t i = threadIdx.x, row = first + i;
        if (i >= (gated ? 8 : 16) || row >= rows_of_matrix) return;
        auto product = [&](const ChosenExpert &of, int operand, uint32_t of_output, int row_in_tile) {
            const float scaled = sum(of_output, row_in_tile) * (OUT_SCALE * of.global_scale(p, operand));
            return of.with_bias(p, operand, row, gated && p.routing_weights ? scaled * p.routing_weights[pair] : scaled);
        };
        const size_t at = size_t(output) * rows_of_matrix + row;
        float value = 0;
        if (gated) {
            // There are no registers to keep it in.
            const ChosenExpert expert(p, load_again(p.ids + pair));
            value = joined(p, product(expert, 0, 0, i), product(expert, 1, 0, i + 8));
            if (!expert.exists) value = not_a_number();
        } else {
            for (uint32_t of_token = 0; of_token < pairs; ++of_token) {
                const ChosenExpert chosen(p, p.ids[output * pairs + of_token]);
                const float weight = p.routing_weights ? p.routing_weights[output * pairs + of_token] : 1.f;
                value = chosen.exists ? __fmaf_rn(weight, product(chosen, 0, of_token, i), value) : not_a_number();
            }
            value = added(p.factor, value, p.residual, at, p.y_dtype);
        }
        store_float(p.operand[0].y, at, p.y_dtype, value);
    };
    multiply_blocks<Format, Shape>(
        x, p.k, k_begin, k_end, 1,
        [&](LaneRows<Format, Shape> &rows, uint32_t, int, int k, int g, int t) {
            const ChosenExpert expert(p, p.ids[pair]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const CqMatrix &matrix = p.operand[gated ? half : 0].matrix;
                // Rows past the end repeat the last one; their outputs are not stored.
                const uint32_t index = min(first + g + (gated ? 0 : half * 8), rows_of_matrix - 1);
                rows.place(half, matrix, uint32_t(expert.row(matrix, index)), p.k, k, t);
            }
        },
        store);
}

}  // namespace cq
