// Attention on tensor cores. How a cache lies in memory, and how a warp gets tiles of it, is said by a ring: HalfRing for one
// of f16 or bf16, CodeRing (attend_codes.cuh) for codes.
//
// Products are transposed, so that the up to 8 query heads of a block are the columns of one multiplication:
//   S^T [16 keys x 8 heads] = K Q^T,  O^T [16 of d x 8 heads] += V^T W^T.
// Keys go from the row-major cache straight to A fragments: a sum may visit d in any order on which K and Q agree, so lane
// 4g + t copies chunks of 16 bytes of keys g and g + 8, which only it reads. Values are read transposed, from rows that
// are an odd number of chunks apart, so that eight of them touch all banks once.
// A weight of softmax is rounded to two halves, whose sum is off by 2^-17 of it or less: outputs are rounded once.
//
// Each warp has a ring of `stages` tiles, of which keys and values are copied, awaited and replaced each by themselves: no
// barrier of the block in the loop. Rows that were there two launches ago are copied before the wait for earlier
// kernels. The new key and value take their place in the tile that they will belong to: the value comes from v, the key from
// shared memory, where it and the queries are put behind the rings when they are normalized and turned.
#pragma once
#include "attend_place.cuh"
#include "pairs.cuh"

namespace cq {

template <int D> struct HalfTile {
    static constexpr int ROW = 2 * D;                // bytes of a row of the cache
    static constexpr int CHUNKS = (D + 31) / 32;     // of 16 bytes, for each of the four lanes that share a row
    static constexpr bool RAGGED = D % 32 != 0;      // some lanes have one chunk less
    static constexpr int KEY_BYTES = 2 * CHUNKS * 32 * 16;
    static constexpr int VALUE_ROW = (D / 8 | 1) * 16;
    static constexpr int BYTES = KEY_BYTES + KEYS * VALUE_ROW;
};

// Eight elements of each lane of keys g, `low`, and g + 8, `high`, times those of queries: two sums, which do not wait for each other.
template <bool BF16>
__device__ __forceinline__ void multiply_eight(float (&s)[4], float (&odd)[4], const uint4 &low, const uint4 &high, const uint4 &q) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    mma_m16n8k16<BF16>(s, first, q.x, q.y);
    mma_m16n8k16<BF16>(odd, second, q.z, q.w);
}

// The copies of a warp, of 16-bit numbers.
template <int D_, bool BF16_> struct HalfRing : HalfTile<D_> {
    using Tile = HalfTile<D_>;
    static constexpr int D = D_;
    static constexpr bool BF16 = BF16_;  // what is multiplied
    static constexpr uint32_t DTYPE = BF16 ? CQ_BF16 : CQ_F16;
    const CqAttend &p;
    const AttendBlock &block;
    unsigned char *memory;        // of the first stage
    unsigned char *placed;        // queries and the new key, behind the rings of all warps
    const unsigned char *keys, *values;  // chunk t of row g of the cache
    int g, t;

    __device__ __forceinline__ HalfRing(const CqAttend &p, const AttendBlock &block, unsigned char *memory, unsigned char *placed, int lane)
        : p(p), block(block), memory(memory), placed(placed), g(lane / 4), t(lane % 4) {
        const size_t head = size_t(block.kv_head) * p.capacity * Tile::ROW + g * Tile::ROW + t * 16;
        keys = static_cast<const unsigned char *>(p.keys) + head, values = static_cast<const unsigned char *>(p.values) + head;
    }

    static __device__ __forceinline__ size_t warp_bytes(const CqAttend &p) { return p.stages * size_t(Tile::BYTES); }
    __device__ __forceinline__ bool has_chunk(int chunk) const { return !Tile::RAGGED || chunk * 4 + t < D / 8; }
    // Of a head, where the eight elements of chunk `chunk` begin.
    __device__ __forceinline__ int element(int chunk) const { return (chunk * 4 + t) * 8; }
    __device__ __forceinline__ unsigned char *stage(int stage) const { return memory + stage * Tile::BYTES; }
    __device__ __forceinline__ unsigned char *key_at(int stage, int half, int chunk) const {
        return this->stage(stage) + ((half * Tile::CHUNKS + chunk) * 32 + g * 4 + t) * 16;
    }
    __device__ __forceinline__ unsigned char *value_at(int stage, int half, int chunk) const {
        return this->stage(stage) + Tile::KEY_BYTES + (half * 8 + g) * Tile::VALUE_ROW + (chunk * 4 + t) * 16;
    }

    // Row `half * 8 + g` of a tile, which begins in a row of the cache: there, if it is seen, else zeros; the new one in
    // `new_rows`, if there are any.
    template <class To>
    __device__ __forceinline__ void copy(int tile, uint32_t first_row, const unsigned char *cache, const void *new_rows, To to) const {
        if (tile < block.end_tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t row = tile * KEYS + half * 8 + g;
                const unsigned char *from = cache + first_row * size_t(Tile::ROW) + half * 8 * Tile::ROW;
                const bool is_new = new_rows && row == block.position;
                if (is_new) from = static_cast<const unsigned char *>(new_rows) + size_t(block.kv_head) * Tile::ROW + t * 16;
                const bool seen = row >= block.first && (row < block.position || is_new);
#pragma unroll
                for (int chunk = 0; chunk < Tile::CHUNKS; ++chunk) to(half, chunk, from, seen);
            }
        commit_copies();
    }
    __device__ __forceinline__ void copy_keys(int tile, uint32_t row, int stage) const {
        copy(tile, row, keys, nullptr, [&](int half, int chunk, const unsigned char *from, bool seen) {
            // Where a row has no more chunks, zeros take their place.
            const bool there = has_chunk(chunk);
            copy_bytes<16>(key_at(stage, half, chunk), there ? from + chunk * 64 : from, seen && there);
        });
    }
    template <bool NEW> __device__ __forceinline__ void copy_values(int tile, uint32_t row, int stage) const {
        copy(tile, row, values, NEW ? p.v : nullptr, [&](int half, int chunk, const unsigned char *from, bool seen) {
            if (has_chunk(chunk)) copy_bytes<16>(value_at(stage, half, chunk), from + chunk * 64, seen);
        });
    }

    // Of keys and values, copied in turn, all have arrived but the last 2 * stages - 1.
    __device__ __forceinline__ void wait_for_next() const {
        if (p.stages == 2)
            wait_for_copies<3>();
        else
            wait_for_copies<1>();
    }

    // Puts queries and the new key there, normalized and turned.
    __device__ __forceinline__ void place() const { place_heads<DTYPE, D, D>(p, block, placed); }

    // Puts the new key into the tile, each lane what only it reads. The new value is copied.
    __device__ __forceinline__ void place_key(int stage) const {
        if (int(block.position % 8) != g) return;
        const unsigned char *key = placed + HEADS * Tile::ROW;
#pragma unroll
        for (int chunk = 0; chunk < Tile::CHUNKS; ++chunk)
            if (has_chunk(chunk))
                *reinterpret_cast<uint4 *>(key_at(stage, block.position % KEYS / 8, chunk)) =
                    *reinterpret_cast<const uint4 *>(key + (chunk * 4 + t) * 16);
    }

    __device__ __forceinline__ void place_value(int) const {}

    // Products of queries with keys g and g + 8 of a tile that has arrived, for heads 2t and 2t + 1.
    __device__ __forceinline__ void multiply(float (&s)[4], const uint4 (&q)[Tile::CHUNKS], int stage) const {
        float odd[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = 0;
#pragma unroll
        for (int chunk = 0; chunk < Tile::CHUNKS; ++chunk) {
            const uint4 low = *reinterpret_cast<const uint4 *>(key_at(stage, 0, chunk));
            const uint4 high = *reinterpret_cast<const uint4 *>(key_at(stage, 1, chunk));
            multiply_eight<BF16>(s, odd, low, high, q[chunk]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] += odd[i];
    }

    // Rows of the values of a tile that has arrived.
    __device__ __forceinline__ const unsigned char *value_rows(int stage) const { return this->stage(stage) + Tile::KEY_BYTES; }

    __device__ __forceinline__ void finish(const WarpResults &results) const { finish_to_y<4>(p, block, results, DTYPE); }

    // Writes the new key and value to the cache, each lane what it has put or copied itself.
    __device__ __forceinline__ void append(int stage) const {
        const int half = block.position % KEYS / 8;
        if (int(block.position % 8) != g) return;
        const size_t row = (block.rows.row_of(block.position) - g) * size_t(Tile::ROW);
#pragma unroll
        for (int chunk = 0; chunk < Tile::CHUNKS; ++chunk) {
            if (!has_chunk(chunk)) continue;
            const size_t at = row + chunk * 64;
            *reinterpret_cast<uint4 *>(const_cast<unsigned char *>(keys) + at) = *reinterpret_cast<const uint4 *>(key_at(stage, half, chunk));
            *reinterpret_cast<uint4 *>(const_cast<unsigned char *>(values) + at) = *reinterpret_cast<const uint4 *>(value_at(stage, half, chunk));
        }
    }
};

// What a warp has found so far: of heads 2t and 2t + 1, elements g and g + 8 of each 16.
template <class Ring> struct HalfSums {
    static constexpr int D = Ring::D;
    static constexpr bool BF16 = Ring::BF16;
    uint4 q[Ring::CHUNKS];
    float sums[D / 16][4] = {};
    float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};  // `total` of this lane's keys

    // From rows of heads.
    __device__ __forceinline__ void load_queries(const AttendBlock &block, const Ring &ring) {
        const unsigned char *row = ring.placed + ring.g * (2 * D);
#pragma unroll
        for (int chunk = 0; chunk < Ring::CHUNKS; ++chunk) {
            q[chunk] = make_uint4(0, 0, 0, 0);
            if (uint32_t(ring.g) < block.heads && ring.has_chunk(chunk))
                q[chunk] = *reinterpret_cast<const uint4 *>(row + ring.element(chunk) * 2);
        }
    }

    // Logits of keys g and g + 8 for heads 2t and 2t + 1, of keys that are not seen -infinity.
    __device__ __forceinline__ void logits(float (&s)[4], const CqAttend &p, const Ring &ring, int stage, int tile) const {
        ring.multiply(s, q, stage);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t key = tile * KEYS + ring.g + i / 2 * 8;
            s[i] = key >= ring.block.first && key <= ring.block.position ? logit_of(p, s[i]) : -INFINITY;
        }
    }

    // Logits become weights, and what was found so far is brought to the new largest one. Every tile has a key that is seen.
    __device__ __forceinline__ void weigh(float (&s)[4]) {
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float most = fmaxf(s[head], s[head + 2]);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, distance));
            most = fmaxf(most, largest[head]);
            const float shrink = exp2_fast(largest[head] - most);
            largest[head] = most;
            s[head] = exp2_fast(s[head] - most), s[head + 2] = exp2_fast(s[head + 2] - most);
            total[head] = __fmaf_rn(total[head], shrink, s[head] + s[head + 2]);
#pragma unroll
            for (int i = 0; i < D / 16; ++i) sums[i][head] *= shrink, sums[i][head + 2] *= shrink;
        }
    }

    __device__ __forceinline__ void add_values(const float (&weights)[4], const unsigned char *values, int lane) {
        uint32_t rounded[2], rest[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float x = weights[2 * half], y = weights[2 * half + 1];
            const uint32_t pair = to_pair<BF16>(x, y);
            const float2 of = of_pair<BF16>(pair);
            rounded[half] = transposed(pair);
            rest[half] = transposed(to_pair<BF16>(x - of.x, y - of.y));
        }
        // Matrices of the tile: keys 0-7 with d 0-7 and d 8-15, then keys 8-15.
        const unsigned char *row = values + (lane % 8 + lane / 16 * 8) * Ring::VALUE_ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            uint32_t v[4];
            load_transposed(v, row + i * 32);
            mma_m16n8k16<BF16>(sums[i], v, rounded[0], rounded[1]);
            mma_m16n8k16<BF16>(sums[i], v, rest[0], rest[1]);
        }
    }

    __device__ __forceinline__ void store(const WarpResults &results, int warp, int g, int t) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float all = total[i];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) all += __shfl_xor_sync(FULL_WARP, all, distance);
            const int head = warp * HEADS + 2 * t + i;
            if (g == 0) results.largest[head] = largest[i], results.total[head] = all;
#pragma unroll
            for (int tile = 0; tile < D / 16; ++tile) {
                results.sums[head * results.row + tile * 16 + g] = sums[tile][i];
                results.sums[head * results.row + tile * 16 + 8 + g] = sums[tile][i + 2];
            }
        }
    }
};

template <class Ring> __device__ __forceinline__ void attend_tiles(const CqAttend &p) {
    CQ_DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const AttendBlock block(p);
    unsigned char *const placed = memory + ATTEND_WARPS * Ring::warp_bytes(p);
    const Ring ring(p, block, memory + warp * Ring::warp_bytes(p), placed, lane);
    int next = block.first_tile + warp;
    uint32_t row = block.rows.row_of(uint32_t(next) * KEYS);  // where the next tile begins
    auto go_on = [&] { next += ATTEND_WARPS, row = block.rows.behind(row, ATTEND_WARPS * KEYS); };
    uint32_t stage = 0;
    for (; stage < p.stages && uint32_t(next + 1) * KEYS <= block.settled; ++stage, go_on()) {
        ring.copy_keys(next, row, stage);
        ring.template copy_values<false>(next, row, stage);
    }
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (!block.has_keys()) return;
    for (; stage < p.stages; ++stage, go_on()) {
        ring.copy_keys(next, row, stage);
        ring.template copy_values<true>(next, row, stage);
    }
    ring.place();
    HalfSums<Ring> found;
    found.load_queries(block, ring);
    stage = 0;
    uint32_t last_stage = 0;
    bool has_new_key = false;  // the last tile
#pragma unroll 1
    for (int tile = block.first_tile + warp; tile < block.end_tile; tile += ATTEND_WARPS, go_on()) {
        float weights[4];
        has_new_key = tile == int(block.position / KEYS);
        ring.wait_for_next();
        if (has_new_key) ring.place_key(stage);
        found.logits(weights, p, ring, stage, tile);
        found.weigh(weights);
        ring.copy_keys(next, row, stage);  // none behind the tile of the new key
        ring.wait_for_next();
        if (has_new_key) ring.place_value(stage);
        const unsigned char *values = ring.value_rows(stage);
        __syncwarp();
        found.add_values(weights, values, lane);
        __syncwarp();
        ring.template copy_values<true>(next, row, stage);
        last_stage = stage;
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }
    if (block.appends && has_new_key) ring.append(last_stage);
    wait_for_copies<0>();
    __syncthreads();  // rings become results
    const WarpResults results(memory, Ring::D);
    found.store(results, warp, ring.g, ring.t);
    __syncthreads();
    ring.finish(results);
}

}  // namespace cq
