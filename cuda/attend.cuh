// What all kernels of attention have in common: which keys and heads a block has, and how warps and blocks that attended to
// different keys of the same heads join what they found.
//
// The keys of a head lie in tiles of 16, which begin at multiples of 16. Blocks take ranges of tiles, warps of a block
// every fourth tile of its range. Each keeps for each query head the largest logit (of base 2), the sum of the weights
// 2^(logit - largest), and the sums of weighted values. They are joined in the order of warps, then of blocks, by the last
// block to arrive: nothing depends on who comes first.
#pragma once
#include "parts.cuh"

namespace cq {

constexpr int ATTEND_WARPS = CQ_ATTEND_THREADS / 32, KEYS = CQ_ATTEND_KEYS, HEADS = CQ_ATTEND_HEADS;
constexpr float LOG2E = 1.4426950408889634f;

// The share of a block, and its range of tiles: of as many splits as its sequence is long enough for, whatever the grid.
struct AttendBlock {
    uint32_t kv_head;     // of all sequences
    uint32_t first_head;  // the same of query heads
    uint32_t heads;
    uint32_t first_sink;  // the first query head in its sequence
    bool appends;         // of the blocks with this key head the one that writes, if the new key is in its range
    uint32_t position, first, settled;
    int first_tile, end_tile;
    uint32_t splits;  // with something to do

    // Before the wait for earlier kernels.
    __device__ __forceinline__ explicit AttendBlock(const CqAttend &p) {
        const uint32_t group = p.heads / p.kv_heads, shares = (group + HEADS - 1) / HEADS, share = blockIdx.y % shares;
        kv_head = blockIdx.y / shares;
        first_head = kv_head * group + share * HEADS;
        heads = min(group - share * HEADS, uint32_t(HEADS));
        first_sink = kv_head % p.kv_heads * group + share * HEADS;
        appends = share == 0;

        position = p.positions ? load_again(p.positions + kv_head / p.kv_heads) : p.position;
        settled = p.positions ? position : p.settled;
        first = 0;
        if (p.window) first = p.chunked ? position - position % p.window : position - min(position, p.window - 1);
        const uint32_t tiles = position / KEYS - first / KEYS + 1;
        // Each warp has as many as the others.
        const uint32_t of_split = ((tiles + p.splits - 1) / p.splits + ATTEND_WARPS - 1) / ATTEND_WARPS * ATTEND_WARPS;
        splits = (tiles + of_split - 1) / of_split;
        if (position >= p.capacity || ((p.pairs || p.growth) && position >= p.turn_rows)) splits = settled = 0;
        first_tile = first / KEYS + blockIdx.x * of_split;
        end_tile = has_keys() ? min(first_tile + of_split, position / KEYS + 1) : first_tile;
    }

    __device__ __forceinline__ bool has_keys() const { return blockIdx.x < splits; }
    __device__ __forceinline__ bool has_new_key() const { return uint32_t(end_tile) * KEYS > position; }
};

// A score as a logit of base 2.
__device__ __forceinline__ float logit_of(const CqAttend &p, float score) {
    score *= p.scale;
    return p.cap > 0 ? p.cap * tanhf(score) : score;
}

// What warps found: sums [warp][8][head_dim], and for each warp and head the largest logit and the sum of weights. At the
// beginning of shared memory, where nothing else is then.
struct WarpResults {
    float *sums, *largest, *total;
    int head_dim;

    __device__ __forceinline__ WarpResults(void *memory, int head_dim)
        : sums(static_cast<float *>(memory)), largest(sums + ATTEND_WARPS * HEADS * head_dim),
          total(largest + ATTEND_WARPS * HEADS), head_dim(head_dim) {}

    // Hands those of all warps together to `store`, elements dealt to threads.
    template <class Store> __device__ __forceinline__ void join(uint32_t heads, Store store) const {
        for (int i = threadIdx.x; i < int(heads) * head_dim; i += CQ_ATTEND_THREADS) {
            const int head = i / head_dim, d = i % head_dim;
            float most = largest[head], sum = 0, weights = 0;
#pragma unroll
            for (int warp = 1; warp < ATTEND_WARPS; ++warp) most = fmaxf(most, largest[warp * HEADS + head]);
#pragma unroll
            for (int warp = 0; warp < ATTEND_WARPS; ++warp) {
                const float factor = exp2_fast(largest[warp * HEADS + head] - most);
                weights = __fmaf_rn(total[warp * HEADS + head], factor, weights);
                sum = __fmaf_rn(sums[(warp * HEADS + head) * head_dim + d], factor, sum);
            }
            store(head, d, most, weights, sum);
        }
    }
};

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}

// By what the sums of each of the blocks are multiplied, [split][8], so that they add up to outputs. Two for a lane.
__device__ __forceinline__ void write_factors(const CqAttend &p, const AttendBlock &block, const float *parts, int part, float *factors) {
    const int lane = threadIdx.x % 32, splits = block.splits;
    static_assert(CQ_ATTEND_SPLITS == 2 * 32, "two splits for each lane");
    for (uint32_t head = threadIdx.x / 32; head < block.heads; head += ATTEND_WARPS) {
        float largest[2] = {-INFINITY, -INFINITY}, weights[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int split = lane + 32 * i;
            if (split >= splits) continue;
            const float *stats = parts + split * part + HEADS * p.head_dim + 2 * head;
            largest[i] = load_again(stats), weights[i] = load_again(stats + 1);
        }
        float most = largest_of_warp(fmaxf(largest[0], largest[1])), sink = 0;
        if (p.sinks) {
            const float logit = p.sinks[block.first_sink + head] * LOG2E;
            most = fmaxf(most, logit);
            sink = exp2_fast(logit - most);
        }
        float total = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = exp2_fast(largest[i] - most);
            total = __fmaf_rn(weights[i], largest[i], total);
        }
        total = sum_of_warp(total) + sink;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane + 32 * i < splits) factors[(lane + 32 * i) * HEADS + head] = largest[i] / total;
    }
}

// Joins what the warps of all blocks of a share found, and stores outputs of `dtype`. All threads, behind a barrier.
__device__ __forceinline__ void finish(const CqAttend &p, const AttendBlock &block, const WarpResults &warps, uint32_t dtype) {
    CQ_DYNAMIC_SHARED(memory);
    const int head_dim = warps.head_dim, part = HEADS * (head_dim + 2), splits = block.splits;
    auto store = [&](int head, int d, float value) {
        store_float(p.y, size_t(block.first_head + head) * head_dim + d, dtype, value);
    };
    if (splits == 1) {
        warps.join(block.heads, [&](int head, int d, float largest, float total, float sum) {
            if (p.sinks) {
                const float sink = p.sinks[block.first_sink + head] * LOG2E, most = fmaxf(largest, sink);
                const float factor = exp2_fast(largest - most);
                total = __fmaf_rn(total, factor, exp2_fast(sink - most));
                sum *= factor;
            }
            store(head, d, sum / total);
        });
        return;
    }
    float *parts = p.partial + size_t(blockIdx.y) * gridDim.x * part, *mine = parts + blockIdx.x * part;
    warps.join(block.heads, [&](int head, int d, float largest, float total, float sum) {
        mine[head * head_dim + d] = sum;
        if (d == 0) mine[HEADS * head_dim + 2 * head] = largest, mine[HEADS * head_dim + 2 * head + 1] = total;
    });
    if (!last_of_parts(p.arrivals + blockIdx.y, splits)) return;
    float *factors = reinterpret_cast<float *>(memory) + 4;  // behind the flag
    write_factors(p, block, parts, part, factors);
    __syncthreads();
    for (int i = threadIdx.x; i < int(block.heads) * head_dim; i += CQ_ATTEND_THREADS) {
        const int head = i / head_dim;
        float sum = 0;
#pragma unroll 4
        for (int split = 0; split < splits; ++split)
            sum = __fmaf_rn(load_again(parts + split * part + i), factors[split * HEADS + head], sum);
        store(head, i % head_dim, sum);
    }
}

}  // namespace cq
