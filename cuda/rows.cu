// norm_rows: each row of x normalized (CqNorm). elementwise: an activation, and what else becomes of outputs (CqElementwise).
//
// For what no GEMV does on the way: norms with a mean or behind a block, and matmuls in f32. 256 threads.
#include "finish.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS, WARPS = THREADS / 32;

// The sum over a block's threads, for all of them.
__device__ __forceinline__ float sum_of_block(float value, float *of_warps) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[warp];
    return sum;
}

__device__ __forceinline__ void normalize_row(const CqNorm &p) {
    CQ_DYNAMIC_SHARED(memory);
    float *sums = reinterpret_cast<float *>(memory);
    const size_t first = size_t(blockIdx.x) * p.width;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    float mean = 0;
    if (p.subtracts_mean) {
        float sum = 0;
        for (uint32_t i = threadIdx.x; i < p.width; i += THREADS) sum += load_float(p.x, first + i, p.dtype);
        mean = sum_of_block(sum, sums) / float(p.width);
    }
    float squares = 0;
    for (uint32_t i = threadIdx.x; i < p.width; i += THREADS) {
        const float x = load_float(p.x, first + i, p.dtype) - mean;
        squares = __fmaf_rn(x, x, squares);
    }
    const float scale = 1.f / sqrtf(sum_of_block(squares, sums + WARPS) / float(p.width) + p.eps);
    for (uint32_t i = threadIdx.x; i < p.width; i += THREADS) {
        float value = (load_float(p.x, first + i, p.dtype) - mean) * scale;
        if (p.weight) value *= p.weight[i];
        if (p.bias) value += p.bias[i];
        value *= p.factor;
        if (p.residual) value += load_float(p.residual, first + i, p.dtype);
        store_float(p.y, first + i, p.dtype, value);
    }
}

__device__ __forceinline__ void each_element(const CqElementwise &p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.count) return;
    float value = activated(p.finish.activation, load_float(p.x, i, p.dtype));
    if (p.up) value *= load_float(p.up, i, p.dtype);
    value = finished(p.finish, value);
    if (p.residual) value += load_float(p.residual, i, p.dtype);
    store_float(p.y, i, p.dtype, value);
}

}  // namespace

CQ_KERNEL(norm_rows, CqNorm, THREADS, 4) { normalize_row(p); }
CQ_KERNEL(elementwise, CqElementwise, THREADS, 4) { each_element(p); }
