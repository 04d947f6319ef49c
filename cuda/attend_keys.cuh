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

}  // namespace cq
