// What attention of one token and of prompts have in common.
#pragma once
#include "device.cuh"

namespace cq {

constexpr float LOG2E = 1.4426950408889634f;

// The first key that a token sees, within its window if that is not 0, or since the last multiple of it.
__device__ __forceinline__ uint32_t first_key_seen(uint32_t position, uint32_t window, uint32_t chunked) {
    if (!window) return 0;
    return chunked ? position - position % window : position - min(position, window - 1);
}

// The rows of positions in a cache: of those from the one in row 0 on, fewer than twice its capacity. Tiles do not go over the end.
struct CacheRows {
    uint32_t capacity, in_row_0;

    static __device__ __forceinline__ CacheRows of_ring(uint32_t capacity, uint32_t first) { return {capacity, first / capacity * capacity}; }
    __device__ __forceinline__ uint32_t row_of(uint32_t position) const { return behind(position - in_row_0, 0); }
    // So many rows behind one.
    __device__ __forceinline__ uint32_t behind(uint32_t row, uint32_t rows) const {
        row += rows;
        return row < capacity ? row : row - capacity;
    }
};

}  // namespace cq
