// absmax: the largest magnitude of an array (CqAbsmax).
//
// Grid (any number of blocks), 256 threads, no dynamic shared memory.
#include "device.cuh"

namespace {
constexpr int THREADS = CQ_THREADS;
}

CQ_KERNEL(absmax, CqAbsmax, THREADS, 4) {
    cq::wait_for_earlier_kernels();
    // Magnitudes compare as their bits do, and NaN is above infinity: the order of threads does not show.
    uint32_t largest = 0;
    for (uint64_t i = uint64_t(blockIdx.x) * THREADS + threadIdx.x; i < p.count; i += uint64_t(gridDim.x) * THREADS)
        largest = max(largest, __float_as_uint(cq::load_float(p.numbers, i, p.dtype)) & 0x7fffffffu);
#pragma unroll
    for (int distance = 16; distance; distance /= 2)
        largest = max(largest, __shfl_xor_sync(cq::FULL_WARP, largest, distance));
    if (threadIdx.x % 32 == 0) atomicMax(p.bits, largest);
}
