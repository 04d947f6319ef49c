// fill_bias: every row of y becomes the bias (CqFillBias).
//
// Grid (ceil(rows / 256), ceil(m / 32)), 256 threads, no dynamic shared memory.
#include "device.cuh"

namespace {
constexpr uint32_t THREADS = CQ_THREADS, ROWS_OF_Y = 32;
}

CQ_KERNEL(fill_bias, CqFillBias, THREADS, 4) {
    cq::wait_for_earlier_kernels();
    const uint32_t column = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * ROWS_OF_Y;
    if (column >= p.rows) return;
    const float value = cq::load_float(p.bias, column, p.bias_dtype);
    for (uint32_t m = first; m < min(first + ROWS_OF_Y, p.m); ++m)
        cq::store_float(p.y, size_t(m) * p.rows + column, p.y_dtype, value);
}
