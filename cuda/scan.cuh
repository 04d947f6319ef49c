// Sums over the threads of a block.
#pragma once
#include "device.cuh"

namespace cq {

constexpr uint32_t WARPS_OF_BLOCK = CQ_THREADS / 32;
static_assert(CQ_SCAN_SHARED_BYTES == WARPS_OF_BLOCK * sizeof(uint64_t), "a sum for each warp");

// The sum of `mine` over the threads before this one. `sums` has room for one of each warp. All threads of a block call it
// together.
template <class T> __device__ __forceinline__ T sum_before(T mine, T *sums) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T through = mine;
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const T before = __shfl_up_sync(FULL_WARP, through, distance);
        if (lane >= distance) through += before;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    T before = through - mine;
#pragma unroll
    for (uint32_t w = 0; w < WARPS_OF_BLOCK; ++w)
        if (w < warp) before += sums[w];
    __syncthreads();
    return before;
}

}  // namespace cq
