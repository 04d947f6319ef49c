// simt_<format>: y = x w^T (+ bias) in f32 on CUDA cores (CqSimt).
//
// For what the tensor-core kernels cannot take (f32 activations, scales or biases, k or addresses that do
// not fit their loads), and an independent check of them. Weights are dequantized one by one, so nothing
// cancels that does not cancel in the exact sum.
//
// simt_<format>_experts: the same for the experts that tokens chose (CqExperts). A warp's two rows are the same row of
// gate and of up, if those are joined.
//
// Grid (ceil(rows / 16), ceil(m / 8)), or, of experts, (ceil(rows / 16), tiles), for gate and up twice as many
// blocks; 256 threads; shared memory for x of one step. A block multiplies 16 rows of the weight (more, if there are
// fewer blocks), two in each warp, by eight rows of x (all of a tile), which its warps share. Lanes divide k, 32
// consecutive elements (of groups of 16 as many) at a time; their sums meet in a fixed order.
// packed is 4-byte aligned; x, bias and y only need the alignment of their elements.
#include "experts.cuh"
#include "formats/all.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 2;  // of the weight, in each warp
constexpr uint32_t BLOCK_ROWS = WARPS * ROWS;
constexpr uint32_t BLOCK_ROWS_OF_X = 8;  // rows of x, in each block
constexpr uint32_t PASS = 4;  // rows of x, at a time: with eight, registers would be scarce

// How a step along k is divided among the lanes of a warp.
template <class F> struct Step {
    static constexpr int LANE = LANE_WEIGHTS<F>;
    static constexpr int WORDS = LANE * F::BITS / 32;
    static constexpr int K = 32 * LANE;
    // A lane's x in shared memory: four more than needed, so that eight lanes reading 16 bytes each, at
    // the same place of their parts, touch all banks once.
    static constexpr int STRIDE = LANE + 4;
    static_assert(PASS * 32 * STRIDE * sizeof(float) <= CQ_SIMT_SHARED_BYTES, "x of a step");
    static constexpr int WIDEST_LOAD = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
};

template <int WORDS, int LOAD>
__device__ __forceinline__ void load_part(uint32_t (&words)[WORDS], const uint32_t *from) {
#pragma unroll
    for (int i = 0; i < WORDS; i += LOAD) load_words<LOAD, WORDS != LOAD>(words + i, from + i);
}

// Four elements of x from index i on; `wide` if they are aligned to their size.
__device__ __forceinline__ float4 load_x(const void *x, size_t i, uint32_t dtype, bool wide) {
    if (!wide)
        return make_float4(load_float(x, i, dtype), load_float(x, i + 1, dtype), load_float(x, i + 2, dtype),
                           load_float(x, i + 3, dtype));
    if (dtype == CQ_F32) return *reinterpret_cast<const float4 *>(static_cast<const float *>(x) + i);
    const uint2 pairs = *reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(x) + i);
    if (dtype == CQ_F16)
        return make_float4(half_bits_to_float(pairs.x), half_bits_to_float(pairs.x >> 16),
                           half_bits_to_float(pairs.y), half_bits_to_float(pairs.y >> 16));
    return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
                       __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u));
}

// Writes k0 .. k0 + Step::K of M rows of x to shared memory.
template <class F, int M, class Job>
__device__ __forceinline__ void stage_x(const Job &job, uint32_t first_m, uint32_t m, uint32_t k0, float *shared) {
    using S = Step<F>;
    const auto &p = job.p;
    const uint32_t bytes = p.x_dtype == CQ_F32 ? 4 : 2;
    const bool wide = (reinterpret_cast<uintptr_t>(p.x) % (4 * bytes)) == 0 && job.x_stride() % 4 == 0;
    for (uint32_t i = threadIdx.x * 4; i < M * S::K; i += THREADS * 4) {
        const uint32_t row = i / S::K, k = i % S::K;
        float4 part = make_float4(0, 0, 0, 0);
        if (row < m && k0 + k < p.k)
            part = load_x(p.x, job.row_of_x(first_m + row) * job.x_stride() + k0 + k, p.x_dtype, wide);
        float *out = shared + (row * 32 + k / S::LANE) * S::STRIDE + k % S::LANE;
        *reinterpret_cast<float4 *>(out) = part;
    }
}

// A matmul with one weight.
struct Matmul {
    const CqSimt &p;

    __device__ __forceinline__ size_t x_stride() const { return p.x_stride; }
    __device__ __forceinline__ size_t row_of_x(uint32_t m) const { return m; }

    // Row r of the two of a warp whose first one is `first`: of which operand, where in its matrix.
    __device__ __forceinline__ const CqOperand &operand(int) const { return p.operand; }
    __device__ __forceinline__ uint32_t row(uint32_t first, int r) const { return first + r; }
    __device__ __forceinline__ size_t row_of_matrix(uint32_t row) const { return row; }
    __device__ __forceinline__ float global_scale(int) const { return p.operand.matrix.global_scale; }

    // A lane stores the output of row r of the warp with row m of x; all lanes take part.
    template <int M> __device__ __forceinline__ void store(uint32_t first, int r, uint32_t m, bool mine, float product) const {
        const uint32_t row = first + r;
        if (!mine || row >= p.operand.matrix.rows) return;
        if (p.operand.bias) product += load_float(p.operand.bias, row, p.operand.bias_dtype);
        store_float(p.operand.y, size_t(m) * p.operand.y_stride + row, p.x_dtype, product);
    }
};

// The matmul of a tile of pairs with their expert.
struct ExpertMatmul {
    const CqExperts &p;
    Pairs pairs;
    ChosenExpert expert;
    bool gated;

    __device__ __forceinline__ ExpertMatmul(const CqExperts &p)
        : p(p), pairs(p, blockIdx.y), expert(p, pairs.tile.expert), gated(p.gating != CQ_NOT_GATED) {}

    __device__ __forceinline__ size_t x_stride() const { return p.k; }
    __device__ __forceinline__ size_t row_of_x(uint32_t m) const { return pairs.pair(m) / p.pairs_of_x; }

    __device__ __forceinline__ const CqOperand &operand(int r) const { return p.operand[gated ? r : 0]; }
    __device__ __forceinline__ uint32_t row(uint32_t first, int r) const { return gated ? first / ROWS : first + r; }
    __device__ __forceinline__ size_t row_of_matrix(uint32_t row) const { return expert.row(p.operand[0].matrix, row); }
    __device__ __forceinline__ float global_scale(int r) const { return expert.global_scale(p, gated ? r : 0); }

    template <int M> __device__ __forceinline__ void store(uint32_t first, int r, uint32_t m, bool mine, float product) const {
        const uint32_t row_ = row(first, r), rows = p.operand[0].matrix.rows;
        if (gated && p.routing_weights && m < pairs.tile.count) product *= p.routing_weights[pairs.pair(m)];
        if (row_ < rows && r < ROWS) product = expert.with_bias(p, gated ? r : 0, row_, product);
        if (gated) {
            const float up = __shfl_down_sync(FULL_WARP, product, M);
            product = joined(p, product, up);
            mine = mine && r == 0;
        }
        if (!mine || row_ >= rows) return;
        store_float(p.operand[0].y, size_t(pairs.pair(m)) * rows + row_, p.y_dtype, expert.exists ? product : not_a_number());
    }
};

// ROWS rows of the weight in each warp by m <= M rows of x.
template <class F, int M, class Job>
__device__ __forceinline__ void multiply(const Job &job, uint32_t block_row, uint32_t first_m, uint32_t m) {
    using S = Step<F>;
    CQ_DYNAMIC_SHARED(memory);
    float *shared = reinterpret_cast<float *>(memory);
    const auto &p = job.p;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first_row = block_row + threadIdx.x / 32 * ROWS;
    const uint32_t group_size = group_size_of<F>(p.group_size);
    const size_t words_per_row = words_of_row<F::BITS>(p.k);
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(job.operand(0).matrix.packed) |
                                reinterpret_cast<uintptr_t>(job.operand(1).matrix.packed);
    const bool wide = addresses % (4 * S::WIDEST_LOAD) == 0 && words_per_row % S::WIDEST_LOAD == 0;
    float sums[ROWS][M] = {};
    for (uint32_t k0 = 0; k0 < p.k; k0 += S::K) {
        const uint32_t k = k0 + lane * S::LANE;
        uint32_t words[ROWS][S::WORDS];
        GroupScale group[ROWS][LANE_GROUPS<F>];
        if (k < p.k) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const CqMatrix &matrix = job.operand(r).matrix;
                const size_t row = job.row_of_matrix(min(job.row(first_row, r), matrix.rows - 1));
                const uint32_t *from = matrix.packed + row * words_per_row + k / S::LANE * S::WORDS;
                if (wide)
                    load_part<S::WORDS, S::WIDEST_LOAD>(words[r], from);
                else
                    load_part<S::WORDS, 1>(words[r], from);
#pragma unroll
                for (int i = 0; i < LANE_GROUPS<F>; ++i)
                    group[r][i] = F::load_group(matrix, row * (p.k / group_size) + k / group_size + i, job.global_scale(r));
            }
        }
        if (k0 == 0) {
            wait_for_earlier_kernels();
            let_next_kernel_start();
        }
        __syncthreads();  // the x of the step before has been read
        stage_x<F, M>(job, first_m, m, k0, shared);
        __syncthreads();
        if (k < p.k) {
            float step[ROWS][M] = {};  // a sum of its own: the fewer terms in a row, the smaller the error
#pragma unroll
            for (int part = 0; part < S::LANE; part += 4) {
                float weight[ROWS][4];
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    dequantize_four<F>(octet_of<F::BITS>(words[r], part / 8), part % 8, group[r][part * LANE_GROUPS<F> / S::LANE], weight[r]);
#pragma unroll
                for (int column = 0; column < M; ++column) {
                    const float *from = shared + (column * 32 + lane) * S::STRIDE + part;
                    const float4 x = *reinterpret_cast<const float4 *>(from);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        float sum = step[r][column];
                        sum = __fmaf_rn(weight[r][0], x.x, sum);
                        sum = __fmaf_rn(weight[r][1], x.y, sum);
                        sum = __fmaf_rn(weight[r][2], x.z, sum);
                        step[r][column] = __fmaf_rn(weight[r][3], x.w, sum);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS * M; ++i) sums[i / M][i % M] += step[i / M][i % M];
        }
    }
    // Lane r * M + column stores that output.
    float product = 0;
#pragma unroll
    for (int i = 0; i < ROWS * M; ++i) {
        const float sum = sum_of_warp(sums[i / M][i % M]);
        product = lane == uint32_t(i) ? sum : product;
    }
    const uint32_t column = lane % M;
    job.template store<M>(first_row, lane / M, first_m + column, lane < ROWS * M && column < m, product);
}

// Rows first_m .. end of x, by all rows of the weight that are this block's.
template <class F, class Job>
__device__ __forceinline__ void multiply_rows(const Job &job, uint32_t rows, uint32_t first, uint32_t end) {
    for (uint32_t row = blockIdx.x * BLOCK_ROWS; row < rows; row += gridDim.x * BLOCK_ROWS)
        for (uint32_t first_m = first; first_m < end; first_m += PASS) {
            const uint32_t m = min(end - first_m, PASS);
            if (m == 1)
                multiply<F, 1>(job, row, first_m, m);
            else if (m == 2)
                multiply<F, 2>(job, row, first_m, m);
            else
                multiply<F, 4>(job, row, first_m, m);
        }
}

template <class F> __device__ __forceinline__ void multiply_block(const CqSimt &p) {
    const uint32_t first = blockIdx.y * BLOCK_ROWS_OF_X;
    multiply_rows<F>(Matmul{p}, p.operand.matrix.rows, first, min(first + BLOCK_ROWS_OF_X, p.m));
}

template <class F> __device__ __forceinline__ void multiply_experts(const CqExperts &p) {
    // Earlier kernels chose the experts.
    wait_for_earlier_kernels();
    const ExpertMatmul job(p);
    multiply_rows<F>(job, p.operand[0].matrix.rows * (job.gated ? ROWS : 1), 0, job.pairs.tile.count);
}

}  // namespace

#define SIMT_KERNEL(name, Format)                                                        \
    CQ_KERNEL(simt_##name, CqSimt, THREADS, 2) { multiply_block<Format>(p); } \
    CQ_KERNEL(simt_##name##_experts, CqExperts, THREADS, 2) { multiply_experts<Format>(p); }
CQ_FORMATS(SIMT_KERNEL)
