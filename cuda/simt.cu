// simt_{a1,a2,a3,a4,a5,a6,a8,mxfp4,nvfp4,mxfp8}: y = x w^T (+ bias) in f32 on CUDA cores (CqSimt).
//
// For what the tensor-core kernels cannot take (f32 activations, scales or biases, k or addresses that do
// not fit their loads), and an independent check of them. Weights are decoded one by one, so nothing
// cancels that does not cancel in the product itself.
//
// Grid (ceil(rows / 16), ceil(m / 8)), 256 threads, no dynamic shared memory. A block multiplies 16 rows
// of the weight (more, if there are fewer blocks), two in each warp, by eight rows of x, which its warps
// share. Lanes divide k, 32 consecutive elements (nvfp4: 16) at a time; their sums meet in a fixed order.
// packed is 4-byte aligned; x, bias and y only need the alignment of their elements.
#include "formats/scalar.cuh"

namespace {

using namespace cq;
using namespace cq::scalar;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 2;  // of the weight, in each warp
constexpr uint32_t BLOCK_ROWS = WARPS * ROWS;
constexpr uint32_t SLAB = 8;  // rows of x, in each block
constexpr uint32_t PASS = 4;  // rows of x, at a time: with eight, registers would be scarce

// How a step along k is divided among the lanes of a warp.
template <class F> struct Step {
    static constexpr int LANE = F::GROUP == 16 ? 16 : 32;
    static constexpr int WORDS = LANE * F::BITS / 32;
    static constexpr int K = 32 * LANE;
    // A lane's x in shared memory: four more than needed, so that eight lanes reading 16 bytes each, at
    // the same place of their parts, touch all banks once.
    static constexpr int STRIDE = LANE + 4;
    static constexpr int WIDEST_LOAD = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
};

// The x of a step, for all kernels.
__device__ __forceinline__ float *shared_x() {
    __shared__ __align__(16) float x[PASS * 32 * (32 + 4)];
    return x;
}

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
template <class F, int M>
__device__ __forceinline__ void stage_x(const CqSimt &p, uint32_t first_m, uint32_t m, uint32_t k0, float *shared) {
    using S = Step<F>;
    const uint32_t bytes = p.x_dtype == CQ_F32 ? 4 : 2;
    const bool wide = (reinterpret_cast<uintptr_t>(p.x) % (4 * bytes)) == 0 && p.x_stride % 4 == 0;
    for (uint32_t i = threadIdx.x * 4; i < M * S::K; i += THREADS * 4) {
        const uint32_t row = i / S::K, k = i % S::K;
        float4 part = make_float4(0, 0, 0, 0);
        if (row < m && k0 + k < p.k)
            part = load_x(p.x, size_t(first_m + row) * p.x_stride + k0 + k, p.x_dtype, wide);
        float *out = shared + (row * 32 + k / S::LANE) * S::STRIDE + k % S::LANE;
        *reinterpret_cast<float4 *>(out) = part;
    }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}

// ROWS rows of the weight in each warp by m <= M rows of x.
template <class F, int M>
__device__ __forceinline__ void multiply(const CqSimt &p, uint32_t block_row, uint32_t first_m, uint32_t m, float *shared) {
    using S = Step<F>;
    const CqMatrix &matrix = p.factor.matrix;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first_row = block_row + threadIdx.x / 32 * ROWS;
    const uint32_t group_size = group_size_of<F>(p.group_size);
    const size_t words_per_row = words_of_row<F::BITS>(p.k);
    const bool wide = reinterpret_cast<uintptr_t>(matrix.packed) % (4 * S::WIDEST_LOAD) == 0 &&
                      words_per_row % S::WIDEST_LOAD == 0;
    float sums[ROWS][M] = {};
    for (uint32_t k0 = 0; k0 < p.k; k0 += S::K) {
        const uint32_t k = k0 + lane * S::LANE;
        uint32_t words[ROWS][S::WORDS];
        GroupParameters group[ROWS];
        if (k < p.k) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const size_t row = min(first_row + r, matrix.rows - 1);
                const uint32_t *from = matrix.packed + row * words_per_row + k / S::LANE * S::WORDS;
                if (wide)
                    load_part<S::WORDS, S::WIDEST_LOAD>(words[r], from);
                else
                    load_part<S::WORDS, 1>(words[r], from);
                group[r] = load_parameters<F>(matrix, row * (p.k / group_size) + k / group_size);
            }
        }
        if (k0 == 0) wait_for_earlier_kernels();
        __syncthreads();  // the x of the step before has been read
        stage_x<F, M>(p, first_m, m, k0, shared);
        __syncthreads();
        if (k < p.k) {
            float step[ROWS][M] = {};  // a sum of its own: the fewer terms in a row, the smaller the error
#pragma unroll
            for (int part = 0; part < S::LANE; part += 4) {
                float weight[ROWS][4];
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    decode_four<F>(octet_of<F::BITS>(words[r], part / 8), part % 8, group[r], weight[r]);
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
    // Lane r * M + column stores that product.
    float product = 0;
#pragma unroll
    for (int i = 0; i < ROWS * M; ++i) {
        const float sum = warp_sum(sums[i / M][i % M]);
        product = lane == uint32_t(i) ? sum : product;
    }
    const uint32_t row = first_row + lane / M, column = lane % M;
    if (lane < ROWS * M && row < matrix.rows && column < m) {
        const CqFactor &factor = p.factor;
        if (factor.bias) product += load_float(factor.bias, row, factor.bias_dtype);
        store_float(factor.y, size_t(first_m + column) * factor.y_stride + row, p.x_dtype, product);
    }
}

template <class F> __device__ __forceinline__ void multiply_slab(const CqSimt &p, float *shared) {
    let_next_kernel_start();
    const uint32_t slab = blockIdx.y * SLAB, end = min(slab + SLAB, p.m);
    for (uint32_t row = blockIdx.x * BLOCK_ROWS; row < p.factor.matrix.rows; row += gridDim.x * BLOCK_ROWS)
        for (uint32_t first_m = slab; first_m < end; first_m += PASS) {
            const uint32_t m = min(end - first_m, PASS);
            if (m == 1)
                multiply<F, 1>(p, row, first_m, m, shared);
            else if (m == 2)
                multiply<F, 2>(p, row, first_m, m, shared);
            else
                multiply<F, 4>(p, row, first_m, m, shared);
        }
}

}  // namespace

#define SIMT_KERNEL(suffix, Format) \
    CQ_KERNEL(simt_##suffix, CqSimt, THREADS, 2) { multiply_slab<Format>(p, shared_x()); }
CQ_FOR_EVERY_FORMAT(SIMT_KERNEL)
