// Blocks that each make a part of the same result.
#pragma once
#include "device.cuh"

namespace cq {

// Whether this block is the last of those that add up to the same sums to have written its part; it finds all parts
// with `load_again` then. The flag takes the first word of dynamic shared memory, which nobody reads any more.
__device__ __forceinline__ bool last_of_parts(uint32_t *arrivals, uint32_t parts) {
    CQ_DYNAMIC_SHARED(memory);
    uint32_t *last = reinterpret_cast<uint32_t *>(memory);
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool is_last = arrive(arrivals) == parts - 1;
        if (is_last) *arrivals = 0;
        *last = is_last;
    }
    __syncthreads();
    return *last;
}

}  // namespace cq
