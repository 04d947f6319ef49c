// What experts need besides GEMV and GEMM: pairs in the order of experts, and the sums of a token's experts.
#include "experts.cuh"
#include "scan.cuh"

namespace {

using namespace cq;

constexpr uint32_t THREADS = CQ_THREADS;
constexpr uint32_t WARPS = THREADS / 32;

// The lanes of the warp that have the same bucket. Lanes without one get none.
__device__ __forceinline__ uint32_t lanes_alike(uint32_t bucket, uint32_t buckets, bool has_one) {
    uint32_t alike = __ballot_sync(FULL_WARP, has_one);
    for (uint32_t bit = 1; bit < buckets; bit *= 2) {
        const uint32_t set = __ballot_sync(FULL_WARP, (bucket & bit) != 0);
        alike &= bucket & bit ? set : ~set;
    }
    return has_one ? alike : 0;
}

// Calls visit(pair, bucket, lanes alike, lane) for the pairs of a warp's share, 32 neighbours at a time; those past
// the end have no lanes alike.
template <class Visit> __device__ __forceinline__ void visit_share(const CqSortPairs &p, Visit visit) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t share = (p.pairs + WARPS - 1) / WARPS, begin = warp * share, end = min(begin + share, p.pairs);
    for (uint32_t first = begin; first < end; first += 32) {
        const uint32_t pair = first + lane;
        const uint32_t bucket = pair < end ? min(p.ids[pair], p.experts) : 0;
        visit(pair, bucket, lanes_alike(bucket, p.experts + 1, pair < end), lane);
        __syncwarp();
    }
}

// One block. Pairs of an expert stay in their order.
//
// Shared memory: for each warp a counter for each expert, and one for those that do not exist; then the sums of a scan.
__device__ __forceinline__ void sort_pairs(const CqSortPairs &p) {
    CQ_DYNAMIC_SHARED(memory);
    uint32_t *counters = reinterpret_cast<uint32_t *>(memory);
    const uint32_t buckets = p.experts + 1;
    uint32_t *mine = counters + threadIdx.x / 32 * buckets, *sums = counters + WARPS * buckets;
    for (uint32_t i = threadIdx.x; i < WARPS * buckets; i += THREADS) counters[i] = 0;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    __syncthreads();
    visit_share(p, [&](uint32_t, uint32_t bucket, uint32_t alike, uint32_t lane) {
        if (alike && lane == uint32_t(__ffs(alike)) - 1) mine[bucket] += __popc(alike);
    });
    __syncthreads();

    // A thread takes some neighbouring buckets.
    const uint32_t each = (buckets + THREADS - 1) / THREADS;
    const uint32_t begin = min(threadIdx.x * each, buckets), end = min(begin + each, buckets);
    auto pairs_of = [&](uint32_t bucket) {
        uint32_t pairs = 0;
        for (uint32_t warp = 0; warp < WARPS; ++warp) pairs += counters[warp * buckets + bucket];
        return pairs;
    };
    uint32_t pairs = 0, tiles = 0;
    for (uint32_t i = begin; i < end; ++i) {
        const uint32_t count = pairs_of(i);
        pairs += count;
        tiles += (count + p.rows_of_tile - 1) / p.rows_of_tile;
    }
    const uint32_t tiles_before = sum_before(tiles, sums);
    uint32_t next = sum_before(pairs, sums);
    CqTile *tile = p.tiles + tiles_before;
    for (uint32_t i = begin; i < end; ++i) {
        const uint32_t count = pairs_of(i);
        for (uint32_t done = 0; done < count; done += p.rows_of_tile) *tile++ = {i, next + done, min(count - done, p.rows_of_tile)};
        // Counters become the places of the next pair of each warp.
        for (uint32_t warp = 0; warp < WARPS; ++warp) {
            uint32_t &counter = counters[warp * buckets + i];
            const uint32_t of_warp = counter;
            counter = next;
            next += of_warp;
        }
    }
    if (threadIdx.x == THREADS - 1) *p.tile_count = tiles_before + tiles;
    __syncthreads();
    visit_share(p, [&](uint32_t pair, uint32_t bucket, uint32_t alike, uint32_t lane) {
        const uint32_t before = __popc(alike & ((1u << lane) - 1));
        const uint32_t place = mine[bucket] + before;
        __syncwarp();
        if (!alike) return;
        p.order[place] = pair;
        if (before == 0) mine[bucket] += __popc(alike);
    });
}

// Grid (ceil(rows / 256), tokens).
__device__ __forceinline__ void weighted_sum(const CqWeightedSum &p) {
    wait_for_earlier_kernels();
    const uint32_t row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= p.rows) return;
    float sum = 0;
    for (uint32_t i = 0; i < p.top_k; ++i) {
        const size_t pair = size_t(blockIdx.y) * p.top_k + i;
        sum = __fmaf_rn(p.routing_weights[pair], p.z[pair * p.rows + row], sum);
    }
    const size_t at = size_t(blockIdx.y) * p.rows + row;
    store_float(p.y, at, p.y_dtype, added(p.factor, sum, p.residual, at, p.y_dtype));
}

}  // namespace

CQ_KERNEL(experts_sort, CqSortPairs, THREADS, 1) { sort_pairs(p); }
CQ_KERNEL(experts_sum, CqWeightedSum, THREADS, 4) { weighted_sum(p); }
