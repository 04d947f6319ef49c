// dense: rows of dense weights by rows of x, in f32 (CqDense). embed: rows of a dense table (CqEmbed). 256 threads.
//
// A warp multiplies two rows of weights at a time, each lane 16 bytes of a row and then those 512 behind; blocks take turns at
// rows. x lies in shared memory in f32, as much of it as there is room for, in the order in which lanes need it. Its mean square
// is found on the way: what that divides are finished outputs. Nothing depends on how many blocks there are.
#include "finish.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS, WARPS = THREADS / 32;
constexpr int ROWS = 2;   // of weights, of a warp
constexpr int LOADS = 2;  // of 16 bytes of each row that are on their way to a lane
constexpr int BATCH = 8;  // numbers of x that are on their way to a thread

// Numbers of 16 bytes of a weight.
template <uint32_t DTYPE> constexpr int NUMBERS = DTYPE == CQ_F32 ? 4 : 8;
// Numbers of each of M rows of x in shared memory.
template <int M> constexpr uint32_t CHUNK = CQ_DENSE_NUMBERS * (M < 4 ? 1 : 2) / M;

// Where a number of x lies, so that lanes find four of theirs beside those of their neighbours.
template <uint32_t WEIGHT> __device__ __forceinline__ uint32_t place_of(uint32_t k) {
    constexpr uint32_t EACH = NUMBERS<WEIGHT>, SPAN = 32 * EACH;
    return k / SPAN * SPAN + k % EACH / 4 * 128 + k % SPAN / EACH * 4 + k % 4;
}

// A row of a weight.
struct Row {
    const void *weight;
    bool wide;  // whether it is loaded in 16 bytes
};

// Two rows of weights: one behind the other, or one of each weight if two make one output.
struct Pair {
    uint32_t operand, first, step;

    __device__ __forceinline__ Pair(const CqDense &p, uint32_t pair) : operand(0), first(pair), step(p.gated ? 0 : 1) {
        if (p.gated) return;
        for (; operand + 1 < p.operands; ++operand) {
            const uint32_t pairs = (p.rows[operand] + 1) / 2;
            if (first < pairs) break;
            first -= pairs;
        }
        first *= 2;
    }
    __device__ __forceinline__ uint32_t operand_of(const CqDense &p, int r) const { return p.gated ? r : operand; }
    __device__ __forceinline__ uint32_t row(int r) const { return first + r * step; }
};

// Words of a lane's next numbers of a row; zeros behind it.
template <uint32_t WEIGHT> __device__ __forceinline__ void load(uint32_t (&words)[LOADS][4], const Row &row, uint32_t first, uint32_t k) {
    constexpr uint32_t EACH = NUMBERS<WEIGHT>;
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
        const uint32_t at = first + (l * 32 + threadIdx.x % 32) * EACH;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[l][i] = 0;
        if (at >= k) continue;
        if (row.wide) {
            load_words<4, false>(words[l], static_cast<const uint32_t *>(row.weight) + at / EACH * 4);
            continue;
        }
#pragma unroll
        for (uint32_t i = 0; i < EACH; ++i) {
            if (at + i >= k) continue;
            if (WEIGHT == CQ_F32)
                words[l][i % 4] = static_cast<const uint32_t *>(row.weight)[at + i];
            else
                words[l][i / 2] |= uint32_t(static_cast<const uint16_t *>(row.weight)[at + i]) << i % 2 * 16;
        }
    }
}

// Four of the numbers of 16 bytes.
template <uint32_t WEIGHT> __device__ __forceinline__ void four_of(const uint32_t (&words)[4], int part, float (&four)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t word = words[WEIGHT == CQ_F32 ? i : part * 2 + i / 2];
        if (WEIGHT == CQ_F32)
            four[i] = __uint_as_float(word);
        else if (WEIGHT == CQ_F16)
            four[i] = half_bits_to_float(i % 2 ? word >> 16 : word & 0xffffu);
        else
            four[i] = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }
}

// Numbers from k0 of M rows of x, times those of the norm; adds to what each warp finds of their squares, if it is asked for them.
template <uint32_t WEIGHT, int M, uint32_t DTYPE>
__device__ __forceinline__ void stage(const CqDense &p, uint32_t first_m, uint32_t k0, float *staged, float *squares) {
    constexpr int EACH = CHUNK<M> / THREADS, OF_ROW = EACH < BATCH ? EACH : BATCH, ROWS_OF_BATCH = BATCH / OF_ROW;
#pragma unroll 1
    for (int row = 0; row < M; row += ROWS_OF_BATCH) {
        float sums[ROWS_OF_BATCH] = {};
#pragma unroll 1
        for (uint32_t first = threadIdx.x; first < CHUNK<M>; first += OF_ROW * THREADS) {
            float x[BATCH], norm[BATCH];
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                const uint32_t m = min(first_m + row + n / OF_ROW, p.m - 1), k = k0 + first + n % OF_ROW * THREADS;
                // What lies behind x is loaded as its last number: a branch would wait for the loads before it.
                const uint32_t at = min(k, p.k - 1);
                x[n] = load_float(p.x, m * p.k + at, DTYPE);
                norm[n] = p.norm ? p.norm[at] : 1.f;
                if (k != at) x[n] = 0;
            }
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                const uint32_t k = first + n % OF_ROW * THREADS;
                staged[(row + n / OF_ROW) * CHUNK<M> + place_of<WEIGHT>(k)] = x[n] * norm[n];
                sums[n / OF_ROW] = __fmaf_rn(x[n], x[n], sums[n / OF_ROW]);
            }
        }
        if (!squares) continue;
#pragma unroll
        for (int n = 0; n < ROWS_OF_BATCH; ++n) {
            const float sum = sum_of_warp(sums[n]);
            float *const of_warp = squares + threadIdx.x / 32 * M + row + n;
            if (threadIdx.x % 32 == 0) *of_warp = k0 == 0 ? sum : *of_warp + sum;
        }
    }
}

template <uint32_t WEIGHT, int M>
__device__ __forceinline__ void stage_any(const CqDense &p, uint32_t first_m, uint32_t k0, float *staged, float *squares) {
    if (p.x_dtype == CQ_F32)
        stage<WEIGHT, M, CQ_F32>(p, first_m, k0, staged, squares);
    else if (p.x_dtype == CQ_F16)
        stage<WEIGHT, M, CQ_F16>(p, first_m, k0, staged, squares);
    else
        stage<WEIGHT, M, CQ_BF16>(p, first_m, k0, staged, squares);
}

// Turns the sums of a warp into elements of y: lane r * M + m has that of row r of the two with row m of x.
template <int M> __device__ __forceinline__ void store(const CqDense &p, const Pair &pair, bool there, uint32_t first_m, float sum, const float *squares) {
    const uint32_t lane = threadIdx.x % 32, m = lane % M, r = lane / M % ROWS;
    const uint32_t operand = pair.operand_of(p, r), row = pair.row(r);
    if (p.norm) {
        float length = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) length += squares[warp * M + m];
        sum *= 1.f / sqrtf(length / float(p.k) + p.eps);
    }
    there = there && lane < ROWS * M && first_m + m < p.m && row < p.rows[operand];
    if (there && p.bias[operand]) sum += p.bias[operand][row];
    const float up = __shfl_down_sync(FULL_WARP, sum, M);
    if (!there || (p.gated && r > 0)) return;
    if (operand == 0) sum = activated(p.finish.activation, sum);
    if (p.gated) sum *= up;
    sum = finished(p.finish, sum);
    const size_t at = size_t(first_m + m) * p.rows[operand] + row;
    if (p.residual && operand == 0) sum += load_float(p.residual, at, p.x_dtype);
    store_float(p.y[operand], at, p.x_dtype, sum);
}

template <uint32_t WEIGHT, int M> __device__ __forceinline__ void multiply(const CqDense &p) {
    CQ_DYNAMIC_SHARED(memory);
    constexpr uint32_t EACH = NUMBERS<WEIGHT>, STEP = LOADS * 32 * EACH;
    static_assert(CHUNK<M> % STEP == 0, "whole steps");
    float *const staged = reinterpret_cast<float *>(memory), *const squares = staged + M * CHUNK<M>;
    const uint32_t first_m = blockIdx.y * M, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool is_first = true;
    for (uint32_t first = blockIdx.x * WARPS; first < p.pairs; first += gridDim.x * WARPS, is_first = false) {
        // Rows past the end repeat the last ones; their outputs are not stored.
        const Pair pair(p, min(first + warp, p.pairs - 1));
        Row rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t operand = pair.operand_of(p, r), row = min(pair.row(r), p.rows[operand] - 1);
            constexpr size_t SIZE = WEIGHT == CQ_F32 ? 4 : 2;
            rows[r].weight = static_cast<const uint8_t *>(p.weight[operand]) + size_t(row) * p.k * SIZE;
            rows[r].wide = p.k % EACH == 0 && reinterpret_cast<uintptr_t>(p.weight[operand]) % 16 == 0;
        }
        float sums[ROWS][M] = {};
#pragma unroll 1
        for (uint32_t k0 = 0; k0 < p.k; k0 += STEP) {
            // No earlier kernel writes weights: their loads need not wait for it.
            uint32_t words[ROWS][LOADS][4];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) load<WEIGHT>(words[r], rows[r], k0, p.k);
            if (is_first && k0 == 0) {
                wait_for_earlier_kernels();
                let_next_kernel_start();
            }
            if (k0 % CHUNK<M> == 0 && (is_first || p.k > CHUNK<M>)) {
                __syncthreads();  // the x of before has been read
                stage_any<WEIGHT, M>(p, first_m, k0, staged, is_first && p.norm ? squares : nullptr);
                __syncthreads();
            }
            const float *const x = staged + k0 % CHUNK<M> + lane * 4;
            float step[ROWS][M] = {};  // a sum of its own: the fewer terms in a row, the smaller the error
#pragma unroll
            for (int part = 0; part < LOADS * int(EACH) / 4; ++part) {
                float weight[ROWS][4];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) four_of<WEIGHT>(words[r][part / (EACH / 4)], part % (EACH / 4), weight[r]);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const float4 of_x = *reinterpret_cast<const float4 *>(x + m * CHUNK<M> + part * 128);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        float sum = step[r][m];
                        sum = __fmaf_rn(weight[r][0], of_x.x, sum);
                        sum = __fmaf_rn(weight[r][1], of_x.y, sum);
                        sum = __fmaf_rn(weight[r][2], of_x.z, sum);
                        step[r][m] = __fmaf_rn(weight[r][3], of_x.w, sum);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS * M; ++i) sums[i / M][i % M] += step[i / M][i % M];
        }
        float mine = 0;
#pragma unroll
        for (int i = 0; i < ROWS * M; ++i) {
            const float sum = sum_of_warp(sums[i / M][i % M]);
            mine = lane == uint32_t(i) ? sum : mine;
        }
        store<M>(p, pair, first + warp < p.pairs, first_m, mine, squares);
    }
}

template <int M> __device__ __forceinline__ void multiply_any(const CqDense &p) {
    if (p.weight_dtype == CQ_F32)
        multiply<CQ_F32, M>(p);
    else if (p.weight_dtype == CQ_F16)
        multiply<CQ_F16, M>(p);
    else
        multiply<CQ_BF16, M>(p);
}

__device__ __forceinline__ void embed_token(const CqEmbed &p) {
    const uint32_t i = blockIdx.y * THREADS + threadIdx.x;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (i >= p.k) return;
    const uint32_t id = p.ids[blockIdx.x], row = id - p.first_row;
    float number = id < p.vocabulary ? 0.f : __uint_as_float(0x7fc00000u);
    if (row < p.rows) number = load_float(p.table, size_t(row) * p.k + i, p.table_dtype) * p.factor;
    store_float(p.y, size_t(blockIdx.x) * p.k + i, p.y_dtype, number);
}

}  // namespace

CQ_KERNEL(dense_m1, CqDense, THREADS, 3) { multiply_any<1>(p); }
CQ_KERNEL(dense_m2, CqDense, THREADS, 3) { multiply_any<2>(p); }
CQ_KERNEL(dense_m4, CqDense, THREADS, 2) { multiply_any<4>(p); }
CQ_KERNEL(dense_m8, CqDense, THREADS, 2) { multiply_any<8>(p); }
CQ_KERNEL(embed, CqEmbed, THREADS, 4) { embed_token(p); }
