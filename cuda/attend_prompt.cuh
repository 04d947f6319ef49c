// Attention of several new tokens of each sequence to a cache that has them already (CqAttendPrompt), on tensor cores.
//
// Grid (blocks of rows, key heads of all sequences). A row is a query: those of one token by all heads that share the key head,
// then those of the next token. A block has 64 rows, a warp 16 (of heads of 256 elements 32, two warps the same 16, of which each
// has half of the sums: for all there are no registers), and goes through the keys that any of them sees, KEYS at a time,
// which come through stages of copies. Scores and softmax are f32: each row keeps its largest logit (of base 2) so far, the
// sum of weights, and the sums of weighted values. Which keys a row sees is known from its position; there is no mask in memory,
// and what no row of the block sees is skipped.
//
//   S [16 rows x 8 keys] = Q K^T: both lie row by row, and a sum may visit elements in any order on which both agree, so a lane
//   takes 16 neighbouring bytes of a query and of a key, which are fragments of two multiplications.
//   O [16 rows x 8 elements] += W V: two tiles of S are an A fragment; V is read transposed. A weight is rounded to two halves,
//   whose sum is off by 2^-17 of it or less: outputs are rounded once.
#pragma once
#include "attend_keys.cuh"
#include "pairs.cuh"

namespace cq {

constexpr int PROMPT_THREADS = CQ_ATTEND_THREADS;
static_assert(CQ_PROMPT_ROWS == PROMPT_THREADS / 32 * 16, "sixteen rows for each warp");

// `src/backend/cuda/attend.rs` computes the same numbers for the launch.
template <int D> struct PromptShape {
    static constexpr int KEYS = D > 128 ? 32 : 64;
    static constexpr int CHUNKS = (D + 31) / 32;  // of 16 bytes, for each of four lanes
    static constexpr int EIGHTS = D / 8;          // of a row
    // From a row to the next in shared memory: odd numbers of 64 bytes, and of 16, so that reads meet no bank twice.
    static constexpr int KEY_ROW = ((2 * D + 63) / 64 | 1) * 64;
    static constexpr int VALUE_ROW = (D / 8 | 1) * 16;
    static constexpr int STAGE = KEYS * (KEY_ROW + VALUE_ROW);
    static constexpr int COPIES = KEYS * EIGHTS / PROMPT_THREADS;  // of a thread, for keys and for values
    static_assert(KEYS * EIGHTS % PROMPT_THREADS == 0, "threads copy alike");
    static constexpr int WARPS_OF_ROW = D > 128 ? 2 : 1;  // that share its sums
    static constexpr int ROWS = PROMPT_THREADS / 32 / WARPS_OF_ROW * 16;
};

// A block's key head in the cache, and where the tokens of its sequence begin.
struct PromptPlace {
    uint32_t kv_head, position;

    template <class Params> __device__ __forceinline__ explicit PromptPlace(const Params &p) {
        const uint32_t given = blockIdx.y / p.kv_heads, sequence = p.places ? load_again(p.places + 2 * given) : given;
        kv_head = sequence * p.kv_heads + blockIdx.y % p.kv_heads;
        position = p.places ? load_again(p.places + 2 * given + 1) : p.position;
    }
};

// What the rows of a block see.
struct PromptRows {
    uint32_t position;          // of the first token
    uint32_t first, end;        // rows of the block
    uint32_t first_position;    // of the first row
    uint32_t first_key, last_key;
    CacheRows cached;

    static __device__ __forceinline__ uint32_t first_seen(const CqAttendPrompt &p, uint32_t position) {
        return first_key_seen(position, p.window, p.chunked);
    }
    __device__ __forceinline__ PromptRows(const CqAttendPrompt &p, const PromptPlace &place, uint32_t block, uint32_t rows) : position(place.position) {
        first = block * rows, end = min(first + rows, p.tokens * p.group);
        first_position = position + first / p.group;
        first_key = first_seen(p, first_position), last_key = position + (end - 1) / p.group;
        cached = CacheRows::of_ring(p.capacity, first_key);
    }
};

// A lane's two rows, g and g + 8 of its warp.
template <int D, bool BF16> struct RowsOfLane {
    using Shape = PromptShape<D>;
    static constexpr int EIGHTS = Shape::EIGHTS / Shape::WARPS_OF_ROW;  // of the sums of this warp
    uint32_t last_key[2];  // that they see: those of their positions
    uint4 q[2][Shape::CHUNKS];
    float sums[EIGHTS][4] = {};  // elements 2t and 2t + 1 of each eight, of row g, then of row g + 8
    float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};  // `total` of this lane's keys

    // `load(row, eight)`: 16 bytes of a row's query.
    template <class Load>
    __device__ __forceinline__ RowsOfLane(const CqAttendPrompt &p, const PromptRows &rows, uint32_t row0, int t, Load load) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Rows past the end repeat the last one; their outputs are not stored.
            const uint32_t row = min(row0 + half * 8, rows.end - 1);
            last_key[half] = rows.position + row / p.group;
#pragma unroll
            for (int chunk = 0; chunk < Shape::CHUNKS; ++chunk) {
                q[half][chunk] = make_uint4(0, 0, 0, 0);
                if (has_chunk(chunk, t)) q[half][chunk] = load(row, chunk * 4 + t);
            }
        }
    }

    // The head and token of a row, among all of them, in queries and outputs.
    static __device__ __forceinline__ size_t at(const CqAttendPrompt &p, uint32_t row) {
        const uint32_t sequence = blockIdx.y / p.kv_heads, kv_head = blockIdx.y % p.kv_heads;
        const uint32_t token = row / p.group, head = kv_head * p.group + row % p.group;
        return (size_t(sequence) * p.tokens + token) * (p.kv_heads * p.group) + head;
    }

    static __device__ __forceinline__ bool has_chunk(int chunk, int t) { return D % 32 == 0 || chunk * 4 + t < Shape::EIGHTS; }

    // Scores of eight keys for each of the tiles, as they are multiplied.
    __device__ __forceinline__ void multiply(float (&s)[Shape::KEYS / 8][4], const unsigned char *keys, int g, int t) const {
#pragma unroll
        for (int tile = 0; tile < Shape::KEYS / 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[tile][i] = 0;
#pragma unroll
        for (int chunk = 0; chunk < Shape::CHUNKS; ++chunk) {
            const uint4 low = q[0][chunk], high = q[1][chunk];
            const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
            // Tiles do not wait for each other.
#pragma unroll
            for (int tile = 0; tile < Shape::KEYS / 8; ++tile) {
                uint4 k = make_uint4(0, 0, 0, 0);
                if (has_chunk(chunk, t)) k = *reinterpret_cast<const uint4 *>(keys + (tile * 8 + g) * Shape::KEY_ROW + (chunk * 4 + t) * 16);
                mma_m16n8k16<BF16>(s[tile], first, k.x, k.y);
                mma_m16n8k16<BF16>(s[tile], second, k.z, k.w);
            }
        }
    }

    // Scores, times the factors of rows, become weights, and what was found so far is brought to the new largest logit. Of the
    // keys from `key` on a row may see none, if `masked`.
    __device__ __forceinline__ void weigh(float (&s)[Shape::KEYS / 8][4], const CqAttendPrompt &p, const float (&factors)[2], uint32_t key, bool masked, int t) {
        auto each = [&](auto act) {
#pragma unroll
            for (int tile = 0; tile < Shape::KEYS / 8; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) act(s[tile][i], tile * 8 + i % 2, i / 2);
        };
        each([&](float &logit, int, int half) { logit *= factors[half]; });
        if (p.cap > 0) each([&](float &logit, int, int) { logit = p.cap * tanhf(logit); });
        if (masked) {
            const uint32_t first_key[2] = {PromptRows::first_seen(p, last_key[0]), PromptRows::first_seen(p, last_key[1])};
            each([&](float &logit, int of_tile, int half) {
                const uint32_t of = key + 2 * t + of_tile;
                if (of < first_key[half] || of > last_key[half]) logit = -INFINITY;
            });
        }
        float most[2] = {largest[0], largest[1]};
        each([&](float &logit, int, int half) { most[half] = fmaxf(most[half], logit); });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            most[half] = fmaxf(most[half], __shfl_xor_sync(FULL_WARP, most[half], 1));
            most[half] = fmaxf(most[half], __shfl_xor_sync(FULL_WARP, most[half], 2));
            // A row that has seen nothing yet.
            const float base = most[half] == -INFINITY ? 0 : most[half];
            const float shrink = exp2_fast(largest[half] - base);
            largest[half] = most[half], total[half] *= shrink;
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) sums[i][half * 2] *= shrink, sums[i][half * 2 + 1] *= shrink;
            each([&](float &weight, int, int of) {
                if (of != half) return;
                weight = exp2_fast(weight - base);
                total[half] += weight;
            });
        }
    }

    __device__ __forceinline__ void add_values(const float (&weights)[Shape::KEYS / 8][4], const unsigned char *values, int lane, int part) {
        // Matrices: keys 0-7 and 8-15 with elements 0-7, then with elements 8-15.
        const unsigned char *row = values + (lane % 8 + lane / 8 % 2 * 8) * Shape::VALUE_ROW + (part * EIGHTS + lane / 16) * 16;
#pragma unroll
        for (int sixteen = 0; sixteen < Shape::KEYS / 16; ++sixteen) {
            uint32_t rounded[4], rest[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = weights[sixteen * 2 + i / 2][i % 2 * 2], y = weights[sixteen * 2 + i / 2][i % 2 * 2 + 1];
                rounded[i] = to_pair<BF16>(x, y);
                const float2 of = of_pair<BF16>(rounded[i]);
                rest[i] = to_pair<BF16>(x - of.x, y - of.y);
            }
#pragma unroll
            for (int i = 0; i < EIGHTS / 2; ++i) {
                uint32_t v[4];
                load_transposed(v, row + sixteen * 16 * Shape::VALUE_ROW + i * 32);
                mma_m16n8k16<BF16>(sums[2 * i], rounded, v[0], v[1]);
                mma_m16n8k16<BF16>(sums[2 * i + 1], rounded, v[2], v[3]);
                mma_m16n8k16<BF16>(sums[2 * i], rest, v[0], v[1]);
                mma_m16n8k16<BF16>(sums[2 * i + 1], rest, v[2], v[3]);
            }
        }
    }

    // By what sums become outputs of row g, or g + 8.
    __device__ __forceinline__ float output_factor(const CqAttendPrompt &p, uint32_t row, int half) const {
        float all = total[half], factor = 1;
        all += __shfl_xor_sync(FULL_WARP, all, 1);
        all += __shfl_xor_sync(FULL_WARP, all, 2);
        if (p.sinks) {
            const float sink = p.sinks[blockIdx.y % p.kv_heads * p.group + row % p.group] * LOG2E, most = fmaxf(largest[half], sink);
            factor = exp2_fast(largest[half] - most);
            all = __fmaf_rn(all, factor, exp2_fast(sink - most));
        }
        return factor / all;
    }
};

// The keys that rows see, KEYS at a time: `begin(key)` starts to copy the first ones, `next(key)` waits for some and starts to copy
// those behind, and returns where these are, keys and values.
template <int D, bool BF16, class Begin, class Next>
__device__ __forceinline__ void attend_to_keys(RowsOfLane<D, BF16> &found, const CqAttendPrompt &p, const PromptRows &rows, const float (&factors)[2],
                                               int part, Begin begin, Next next) {
    using Shape = PromptShape<D>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t key = rows.first_key / Shape::KEYS * Shape::KEYS;
    begin(key);
#pragma unroll 1
    for (; key <= rows.last_key; key += Shape::KEYS) {
        const unsigned char *keys = next(key);
        float s[Shape::KEYS / 8][4];
        found.multiply(s, keys, g, t);
        // All rows see what lies between what the last one sees first and the first one sees last.
        const bool masked = key + Shape::KEYS - 1 > rows.first_position || key < PromptRows::first_seen(p, rows.last_key);
        found.weigh(s, p, factors, key, masked, t);
        found.add_values(s, keys + Shape::KEYS * Shape::KEY_ROW, lane, part);
    }
}

}  // namespace cq
