// What all kernels of attention have in common: which keys and heads a block has, and how warps and blocks that attended to
// different keys of the same heads join what they found.
//
// The keys of a head lie in tiles of 16, which begin at multiples of 16. Blocks take ranges of tiles (where there are few, one
// block takes all: it would wait longer for others than for its own tiles), warps of a block every fourth tile of its range.
// Each keeps for each query head the largest logit (of base 2), the sum of the weights 2^(logit - largest), and the sums of
// weighted values. They are joined in the order of warps, then of blocks, by the last block to arrive: nothing depends on who
// comes first.
#pragma once
#include "attend_keys.cuh"
#include "parts.cuh"

namespace cq {

constexpr int ATTEND_WARPS = CQ_ATTEND_THREADS / 32, KEYS = CQ_ATTEND_KEYS, HEADS = CQ_ATTEND_HEADS;

// The share of a block, and its range of tiles: of as many splits as its sequence is long enough for, whatever the grid.
struct AttendBlock {
    uint32_t kv_head;     // of all sequences
    uint32_t kv_of_sequence;
    uint32_t first_head;  // the same of query heads
    uint32_t heads;
    uint32_t first_sink;  // the first query head in its sequence
    bool appends;         // of the blocks with this key head the one that writes, if the new key is in its range
    uint32_t position, first, settled;
    uint32_t tiles, of_split;
    int first_tile, end_tile;
    CacheRows rows;

    // Before the wait for earlier kernels. Numbers are divided only where they have to be, which takes a hundred cycles each.
    __device__ __forceinline__ explicit AttendBlock(const CqAttend &p) {
        const uint32_t shares = (p.group + HEADS - 1) / HEADS, share = shares == 1 ? 0 : blockIdx.y % shares;
        kv_head = shares == 1 ? blockIdx.y : blockIdx.y / shares;
        const uint32_t sequence = kv_head < p.kv_heads ? 0 : kv_head / p.kv_heads;
        position = p.positions ? load_again(p.positions + sequence) : p.position;
        kv_of_sequence = kv_head - sequence * p.kv_heads;
        first_head = kv_head * p.group + share * HEADS;
        heads = min(p.group - share * HEADS, uint32_t(HEADS));
        first_sink = kv_of_sequence * p.group + share * HEADS;
        appends = share == 0;

        settled = p.positions ? position : p.settled;
        first = first_key_seen(position, p.window, p.chunked);
        tiles = position / KEYS - first / KEYS + 1;
        of_split = ATTEND_WARPS;
        if (tiles <= CQ_ATTEND_UNSPLIT)
            of_split = tiles;
        else if (tiles > p.splits * ATTEND_WARPS)
            of_split = (tiles + p.splits - 1) / p.splits;
        const bool has_row = p.ring ? position != CQ_NO_POSITION : position < p.capacity;
        if (!has_row || ((p.pairs || p.growth) && position >= p.turn_rows)) tiles = settled = 0;
        rows = p.ring ? CacheRows::of_ring(p.capacity, first) : CacheRows{p.capacity, 0};
        first_tile = first / KEYS + blockIdx.x * of_split;
        end_tile = has_keys() ? min(first_tile + of_split, position / KEYS + 1) : first_tile;
    }

    __device__ __forceinline__ bool has_keys() const { return blockIdx.x * of_split < tiles; }
    // With something to do.
    __device__ __forceinline__ int splits() const { return tiles <= of_split ? 1 : (tiles + of_split - 1) / of_split; }
    __device__ __forceinline__ bool has_new_key() const { return uint32_t(end_tile) * KEYS > position; }
};

// A score as a logit of base 2.
__device__ __forceinline__ float logit_of(const CqAttend &p, float score) {
    score *= p.scale;
    return p.cap > 0 ? p.cap * tanhf(score) : score;
}

// WIDTH neighbouring numbers, which are loaded and stored at once.
template <int WIDTH> struct alignas(4 * WIDTH) Numbers {
    float at[WIDTH];

    static __device__ __forceinline__ Numbers of(const float *from) { return *reinterpret_cast<const Numbers *>(from); }
    __device__ __forceinline__ void store(float *to) const {
        if constexpr (WIDTH == 4)
            store_four(to, at);
        else
            *to = at[0];
    }
    __device__ __forceinline__ void add(const Numbers &sums, float factor) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) at[i] = __fmaf_rn(sums.at[i], factor, at[i]);
    }
};

// What warps found: sums [warp][8][head_dim], and for each warp and head the largest logit and the sum of weights. At the
// beginning of shared memory, where nothing else is then. Rows of sums are as far apart as four heads need to touch all banks.
struct WarpResults {
    float *sums, *largest, *total;
    int head_dim, row;

    __device__ __forceinline__ WarpResults(void *memory, int head_dim)
        : sums(static_cast<float *>(memory)), largest(sums + ATTEND_WARPS * HEADS * (head_dim + 4)),
          total(largest + ATTEND_WARPS * HEADS), head_dim(head_dim), row(head_dim + 4) {}

    // Hands those of all warps together to `store`, WIDTH neighbours at a time, dealt to threads.
    template <int WIDTH, class Store> __device__ __forceinline__ void join(uint32_t heads, Store store) const {
        for (int i = threadIdx.x * WIDTH; i < int(heads) * head_dim; i += CQ_ATTEND_THREADS * WIDTH) {
            const int head = i / head_dim, d = i % head_dim;
            float most = largest[head], weights = 0;
            Numbers<WIDTH> sum = {};
#pragma unroll
            for (int warp = 1; warp < ATTEND_WARPS; ++warp) most = fmaxf(most, largest[warp * HEADS + head]);
#pragma unroll
            for (int warp = 0; warp < ATTEND_WARPS; ++warp) {
                const float factor = exp2_fast(largest[warp * HEADS + head] - most);
                weights = __fmaf_rn(total[warp * HEADS + head], factor, weights);
                sum.add(Numbers<WIDTH>::of(sums + (warp * HEADS + head) * row + d), factor);
            }
            store(head, d, most, weights, sum);
        }
    }
};

// What the blocks of a share left to the last of them: of each split sums [8][head_dim], then [8] of the largest logit and the
// sum of weights.
struct Parts {
    float *first;
    int head_dim, splits;

    __device__ __forceinline__ float *sums(int split) const { return first + split * (HEADS * (head_dim + 2)); }
    __device__ __forceinline__ float2 *stats(int split, int head) const {
        return reinterpret_cast<float2 *>(sums(split) + HEADS * head_dim) + head;
    }
};

// By what the sums of each of the blocks are multiplied, [split][8], so that they add up to outputs. Two for a lane, of two
// heads: what they need is on its way at once.
__device__ __forceinline__ void write_factors(const CqAttend &p, const AttendBlock &block, const Parts &parts, float *factors) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    static_assert(CQ_ATTEND_SPLITS == 2 * 32 && HEADS == 2 * ATTEND_WARPS, "two splits for each lane, two heads for each warp");
    float2 stats[2][2];  // of a head, of a split
    float sinks[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = warp + i * ATTEND_WARPS;
        const bool has_sink = p.sinks && head < int(block.heads);
        sinks[i] = has_sink ? p.sinks[block.first_sink + head] * LOG2E : -INFINITY;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int split = lane + 32 * j;
            stats[i][j] = make_float2(-INFINITY, 0);
            if (head < int(block.heads) && split < parts.splits) stats[i][j] = load_again(parts.stats(split, head));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = warp + i * ATTEND_WARPS;
        if (head >= int(block.heads)) break;
        const float most = fmaxf(largest_of_warp(fmaxf(stats[i][0].x, stats[i][1].x)), sinks[i]);
        float factor[2], total = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            factor[j] = exp2_fast(stats[i][j].x - most);
            total = __fmaf_rn(stats[i][j].y, factor[j], total);
        }
        total = sum_of_warp(total) + exp2_fast(sinks[i] - most);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (lane + 32 * j < parts.splits) factors[(lane + 32 * j) * HEADS + head] = factor[j] / total;
    }
}

// Outputs of `dtype` from what all blocks of a share found, in the order of splits. A thread has the sums of so many splits on
// their way at once, the first of them before it is known by what they are multiplied.
template <int WIDTH, class Store>
__device__ __forceinline__ void join_parts(const CqAttend &p, const AttendBlock &block, const Parts &parts, Store store) {
    constexpr int BATCH = 20, STEP = CQ_ATTEND_THREADS * WIDTH;
    CQ_DYNAMIC_SHARED(memory);
    float *factors = reinterpret_cast<float *>(memory) + 4;  // behind the flag
    const int end = block.heads * parts.head_dim, splits = parts.splits;
    Numbers<WIDTH> found[BATCH];
    auto load = [&](int i, int first) {
#pragma unroll
        for (int n = 0; n < BATCH; ++n)
            if (first + n < splits) found[n] = load_again(reinterpret_cast<const Numbers<WIDTH> *>(parts.sums(first + n) + i));
    };
    int i = threadIdx.x * WIDTH;
    if (i < end) load(i, 0);
    write_factors(p, block, parts, factors);
    __syncthreads();
    Numbers<WIDTH> sum = {};
    for (int first = 0; i < end; load(i, first)) {
        const int head = i / parts.head_dim;
#pragma unroll
        for (int n = 0; n < BATCH; ++n)
            if (first + n < splits) sum.add(found[n], factors[(first + n) * HEADS + head]);
        first += BATCH;
        if (first < splits) continue;
        store(head, i % parts.head_dim, sum);
        sum = {}, first = 0, i += STEP;
        if (i >= end) break;
    }
}

// Joins what the warps of all blocks of a share found, and hands outputs to `store`, WIDTH neighbours at a time. All threads,
// behind a barrier. False if another block will have them. WIDTH divides head_dim.
template <int WIDTH, class Store>
__device__ __forceinline__ bool finish(const CqAttend &p, const AttendBlock &block, const WarpResults &warps, Store store) {
    using Sums = Numbers<WIDTH>;
    const int head_dim = warps.head_dim, splits = block.splits();
    if (splits == 1) {
        warps.join<WIDTH>(block.heads, [&](int head, int d, float largest, float total, const Sums &sums) {
            float factor = 1;
            if (p.sinks) {
                const float sink = p.sinks[block.first_sink + head] * LOG2E, most = fmaxf(largest, sink);
                factor = exp2_fast(largest - most);
                total = __fmaf_rn(total, factor, exp2_fast(sink - most));
            }
            Sums outputs;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) outputs.at[i] = sums.at[i] * factor / total;
            store(head, d, outputs);
        });
        return true;
    }
    const Parts parts{p.partial + size_t(blockIdx.y) * gridDim.x * (HEADS * (head_dim + 2)), head_dim, splits};
    warps.join<WIDTH>(block.heads, [&](int head, int d, float largest, float total, const Sums &sums) {
        sums.store(parts.sums(blockIdx.x) + head * head_dim + d);
        if (d == 0) *parts.stats(blockIdx.x, head) = make_float2(largest, total);
    });
    const bool is_last = last_of_parts(p.arrivals + blockIdx.y, splits);
    if (is_last) join_parts<WIDTH>(p, block, parts, store);
    return is_last;
}

// An element of a head's output, through its gate if there is one, to y, rounded to `dtype`.
__device__ __forceinline__ void store_output(const CqAttend &p, uint32_t head, int head_dim, int d, uint32_t dtype, float x) {
    if (p.gated) x /= 1.f + expf(-load_float(p.q, (size_t(head) * 2 + 1) * head_dim + d, dtype));
    store_float(p.y, size_t(head) * head_dim + d, dtype, x);
}

// The same, to y.
template <int WIDTH>
__device__ __forceinline__ void finish_to_y(const CqAttend &p, const AttendBlock &block, const WarpResults &warps, uint32_t dtype) {
    finish<WIDTH>(p, block, warps, [&](int head, int d, const Numbers<WIDTH> &sums) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            store_output(p, block.first_head + head, warps.head_dim, d + i, dtype, sums.at[i]);
    });
}

}  // namespace cq
