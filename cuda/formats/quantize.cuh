// What the quantizations of all families have in common: a warp quantizes one group (nvfp4: two), each lane
// consecutive elements of it.
//
// A family's `quantize_group(p, own, group, stores)` fills the codes of a lane and stores the scale (and bias) at index
// `group`, with the operations and roundings of the scalar reference (src/format): the same bits.
#pragma once
#include "elements.cuh"

namespace cq {

constexpr int LARGEST_GROUP = 128;
constexpr int MAX_PER_LANE = LARGEST_GROUP / 32;

// Elements of a group in one lane, and their codes.
struct LaneOfGroup {
    float weight[MAX_PER_LANE];
    uint32_t code[MAX_PER_LANE];
    int count;
};

// Of all lanes' values (of a group's `lanes` lanes), the largest.
__device__ __forceinline__ float largest_of(float value, int lanes) {
    for (int distance = lanes / 2; distance; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

__device__ __forceinline__ float absmax_of_group(const LaneOfGroup &own, int lanes) {
    float largest = 0;
    for (int i = 0; i < MAX_PER_LANE; ++i)
        if (i < own.count) largest = fmaxf(largest, fabsf(own.weight[i]));
    return largest_of(largest, lanes);
}

}  // namespace cq
