// norm_rows: each row of x normalized (CqNorm). order_rows: in another order, too, or only in that. elementwise: an activation,
// and what else becomes of outputs (CqElementwise).
//
// For what no GEMV does on the way: norms with a mean or behind a block, and matmuls in f32. 256 threads.
#include "finish.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS, WARPS = THREADS / 32;

// The sum over a block's threads, for all of them.
__device__ __forceinline__ float sum_of_block(float value, float *of_warps) {
    value = sum_of_warp(value);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[warp];
    return sum;
}

// Numbers of a row that are on their way to a thread at once.
constexpr int BATCH = 8;

// Calls act(i, load(i)) for every number of a row that is this thread's. What lies behind the row is loaded as its last number:
// a branch would wait for the loads before it.
template <class Load, class Act> __device__ __forceinline__ void each_of_row(uint32_t width, Load load, Act act) {
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < width; first += BATCH * THREADS) {
        decltype(load(0u)) loaded[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n)
            loaded[n] = load(min(first + n * THREADS, width - 1));
#pragma unroll
        for (int n = 0; n < BATCH; ++n)
            if (first + n * THREADS < width) act(first + n * THREADS, loaded[n]);
    }
}

// What is subtracted from the numbers of a row that is normalized, and what they are then multiplied by.
struct Center {
    float mean, scale;
};

template <class Number> __device__ __forceinline__ Center center_of_row(const CqNorm &p, Number number) {
    CQ_DYNAMIC_SHARED(memory);
    float *sums = reinterpret_cast<float *>(memory);
    float mean = 0;
    if (p.subtracts_mean) {
        float sum = 0;
        each_of_row(p.width, number, [&](uint32_t, float x) { sum += x; });
        mean = sum_of_block(sum, sums) / float(p.width);
    }
    float squares = 0;
    each_of_row(p.width, number, [&](uint32_t, float x) { squares = __fmaf_rn(x - mean, x - mean, squares); });
    return {mean, 1.f / sqrtf(sum_of_block(squares, sums + WARPS) / float(p.width) + p.eps)};
}

template <uint32_t DTYPE> __device__ __forceinline__ void normalize_row(const CqNorm &p) {
    const size_t row = size_t(blockIdx.x) * p.width;
    auto number = [&](uint32_t i) { return load_float(p.x, row + i, DTYPE); };
    const Center center = center_of_row(p, number);
    struct Operands {
        float x, weight, bias, residual;
    };
    auto operands = [&](uint32_t i) {
        // Without them nothing changes, not even the sign of a zero.
        Operands all = {number(i), 1.f, -0.f, -0.f};
        if (p.weight) all.weight = p.weight[i];
        if (p.bias) all.bias = p.bias[i];
        if (p.residual) all.residual = load_float(p.residual, row + i, DTYPE);
        return all;
    };
    each_of_row(p.width, operands, [&](uint32_t i, const Operands &of) {
        const float normalized = __fadd_rn(__fmul_rn(of.x - center.mean, center.scale) * of.weight, of.bias);
        store_float(p.y, row + i, DTYPE, __fadd_rn(__fmul_rn(normalized, p.factor), of.residual));
    });
}

template <uint32_t DTYPE> __device__ __forceinline__ void order_row(const CqNorm &p) {
    const size_t row = size_t(blockIdx.x) * p.width, y_row = size_t(blockIdx.x) * p.y_width;
    auto number = [&](uint32_t i) { return load_float(p.x, row + i, DTYPE); };
    const Center center = p.normalizes ? center_of_row(p, number) : Center{0, 1};
    struct Operands {
        float x, weight, bias;
    };
    auto operands = [&](uint32_t i) {
        const uint32_t column = p.columns[i];
        // What has no column is loaded, too, and becomes zero behind that.
        const uint32_t known = min(column, p.width - 1);
        Operands all = {number(known), 1.f, -0.f};
        if (p.weight) all.weight = p.weight[known];
        if (p.bias) all.bias = p.bias[known];
        if (column != known) all = {center.mean, 0.f, 0.f};
        return all;
    };
    each_of_row(p.y_width, operands, [&](uint32_t i, const Operands &of) {
        const float normalized = __fadd_rn(__fmul_rn(of.x - center.mean, center.scale) * of.weight, of.bias);
        store_float(p.y, y_row + i, DTYPE, __fmul_rn(normalized, p.factor));
    });
}

template <uint32_t DTYPE> __device__ __forceinline__ void each_element(const CqElementwise &p) {
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.count) return;
    const float x = load_float(p.x, i, DTYPE);
    const float up = p.up ? load_float(p.up, i, DTYPE) : 1.f, residual = p.residual ? load_float(p.residual, i, DTYPE) : -0.f;
    store_float(p.y, i, DTYPE, __fadd_rn(finished(p.finish, activated(p.finish.activation, x) * up), residual));
}

// `work` for the dtype: loads behind a branch of their own would wait for each other.
#define FOR_DTYPE(work)                \
    wait_for_earlier_kernels();        \
    let_next_kernel_start();           \
    if (p.dtype == CQ_F32)             \
        work<CQ_F32>(p);               \
    else if (p.dtype == CQ_F16)        \
        work<CQ_F16>(p);               \
    else                               \
        work<CQ_BF16>(p);

}  // namespace

CQ_KERNEL(norm_rows, CqNorm, THREADS, 4) { FOR_DTYPE(normalize_row) }
CQ_KERNEL(order_rows, CqNorm, THREADS, 4) { FOR_DTYPE(order_row) }
CQ_KERNEL(elementwise, CqElementwise, THREADS, 4) { FOR_DTYPE(each_element) }
