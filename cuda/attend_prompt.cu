// attend_prompt_{f16,bf16}_d<head dim>: attention of several new tokens of each sequence to a cache that has them already
// (CqAttendPrompt), on tensor cores.
//
// Grid (blocks of rows, key heads of all sequences). A row is a query: those of one token by all heads that share the key head,
// then those of the next token. A block has 64 rows, a warp 16 (of heads of 256 elements 32, two warps the same 16, of which each
// has half of the sums: for all there are no registers), and goes through the keys that any of them sees, KEYS at a time,
// which come through two stages of copies. Scores and softmax are f32: each row keeps its largest logit (of base 2) so far, the
// sum of weights, and the sums of weighted values. Which keys a row sees is known from its position; there is no mask in memory,
// and what no row of the block sees is skipped.
//
//   S [16 rows x 8 keys] = Q K^T: both lie row by row, and a sum may visit elements in any order on which both agree, so a lane
//   takes 16 neighbouring bytes of a query and of a key, which are fragments of two multiplications.
//   O [16 rows x 8 elements] += W V: two tiles of S are an A fragment; V is read transposed. A weight is rounded to two halves,
//   whose sum is off by 2^-17 of it or less: outputs are rounded once.
#include "attend_keys.cuh"
#include "pairs.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_ATTEND_THREADS;
static_assert(CQ_PROMPT_ROWS == THREADS / 32 * 16, "sixteen rows for each warp");

// `src/backend/cuda/attend.rs` computes the same numbers for the launch.
template <int D> struct PromptShape {
    static constexpr int KEYS = D > 128 ? 32 : 64;
    static constexpr int CHUNKS = (D + 31) / 32;  // of 16 bytes, for each of four lanes
    static constexpr int EIGHTS = D / 8;          // of a row
    // From a row to the next in shared memory: odd numbers of 64 bytes, and of 16, so that reads meet no bank twice.
    static constexpr int KEY_ROW = ((2 * D + 63) / 64 | 1) * 64;
    static constexpr int VALUE_ROW = (D / 8 | 1) * 16;
    static constexpr int STAGE = KEYS * (KEY_ROW + VALUE_ROW);
    static constexpr int COPIES = KEYS * EIGHTS / THREADS;  // of a thread, for keys and for values
    static_assert(KEYS * EIGHTS % THREADS == 0, "threads copy alike");
    static constexpr int WARPS_OF_ROW = D > 128 ? 2 : 1;  // that share its sums
    static constexpr int ROWS = THREADS / 32 / WARPS_OF_ROW * 16;
};

// What the rows of a block see.
struct PromptRows {
    uint32_t first, end;        // rows of the block
    uint32_t first_position;    // of the first row
    uint32_t first_key, last_key;

    static __device__ __forceinline__ uint32_t first_seen(const CqAttendPrompt &p, uint32_t position) {
        return first_key_seen(position, p.window, p.chunked);
    }
    __device__ __forceinline__ PromptRows(const CqAttendPrompt &p, uint32_t block, uint32_t rows) {
        first = block * rows, end = min(first + rows, p.tokens * p.group);
        first_position = p.position + first / p.group;
        first_key = first_seen(p, first_position), last_key = p.position + (end - 1) / p.group;
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

    __device__ __forceinline__ RowsOfLane(const CqAttendPrompt &p, const PromptRows &rows, uint32_t row0, int t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Rows past the end repeat the last one; their outputs are not stored.
            const uint32_t row = min(row0 + half * 8, rows.end - 1);
            last_key[half] = p.position + row / p.group;
            const uint4 *from = static_cast<const uint4 *>(p.q) + at(p, row) * Shape::EIGHTS + t;
#pragma unroll
            for (int chunk = 0; chunk < Shape::CHUNKS; ++chunk) {
                q[half][chunk] = make_uint4(0, 0, 0, 0);
                if (has_chunk(chunk, t)) q[half][chunk] = from[chunk * 4];
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

    // Scores become weights, and what was found so far is brought to the new largest logit. Of the keys from `key` on a row may
    // see none, if `masked`.
    __device__ __forceinline__ void weigh(float (&s)[Shape::KEYS / 8][4], const CqAttendPrompt &p, uint32_t key, bool masked, int t) {
        auto each = [&](auto act) {
#pragma unroll
            for (int tile = 0; tile < Shape::KEYS / 8; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) act(s[tile][i], tile * 8 + i % 2, i / 2);
        };
        each([&](float &logit, int, int) { logit *= p.scale; });
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

    __device__ __forceinline__ void store(const CqAttendPrompt &p, const PromptRows &rows, uint32_t row0, int part, int t) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float all = total[half];
            all += __shfl_xor_sync(FULL_WARP, all, 1);
            all += __shfl_xor_sync(FULL_WARP, all, 2);
            const uint32_t row = row0 + half * 8;
            if (row >= rows.end) continue;
            float factor = 1;
            if (p.sinks) {
                const float sink = p.sinks[blockIdx.y % p.kv_heads * p.group + row % p.group] * LOG2E, most = fmaxf(largest[half], sink);
                factor = exp2_fast(largest[half] - most);
                all = __fmaf_rn(all, factor, exp2_fast(sink - most));
            }
            factor = factor / all;
            uint32_t *to = reinterpret_cast<uint32_t *>(static_cast<uint16_t *>(p.y) + at(p, row) * D) + part * (EIGHTS * 4) + t;
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) to[i * 4] = to_pair<BF16>(sums[i][half * 2] * factor, sums[i][half * 2 + 1] * factor);
        }
    }
};

// Starts to copy the keys and values from `key` on; those that no row sees are zeros.
template <int D> __device__ __forceinline__ void start_keys(const CqAttendPrompt &p, const PromptRows &rows, unsigned char *stage, uint32_t key) {
    using Shape = PromptShape<D>;
    const size_t first = (size_t(blockIdx.y) * p.capacity + key) * (2 * D);
    const unsigned char *keys = static_cast<const unsigned char *>(p.keys) + first, *values = static_cast<const unsigned char *>(p.values) + first;
#pragma unroll
    for (int i = 0; i < Shape::COPIES; ++i) {
        const uint32_t which = threadIdx.x + i * THREADS, row = which / Shape::EIGHTS, eight = which % Shape::EIGHTS;
        const bool seen = key + row >= rows.first_key && key + row <= rows.last_key;
        const size_t at = seen ? which * 16 : 0;
        copy_bytes<16>(stage + row * Shape::KEY_ROW + eight * 16, keys + at, seen);
        copy_bytes<16>(stage + Shape::KEYS * Shape::KEY_ROW + row * Shape::VALUE_ROW + eight * 16, values + at, seen);
    }
    commit_copies();
}

template <int D, bool BF16> __device__ __forceinline__ void attend_prompt(const CqAttendPrompt &p) {
    using Shape = PromptShape<D>;
    CQ_DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    // The longest come first.
    const PromptRows rows(p, gridDim.x - 1 - blockIdx.x, Shape::ROWS);
    const int part = warp % Shape::WARPS_OF_ROW;
    const uint32_t row0 = rows.first + warp / Shape::WARPS_OF_ROW * 16 + g;
    RowsOfLane<D, BF16> found(p, rows, row0, t);
    uint32_t key = rows.first_key / Shape::KEYS * Shape::KEYS;
    uint32_t stage = 0;
    start_keys<D>(p, rows, memory, key);
#pragma unroll 1
    for (; key <= rows.last_key; key += Shape::KEYS) {
        wait_for_copies<0>();
        __syncthreads();  // all have these keys, and have multiplied those before
        if (key + Shape::KEYS <= rows.last_key) start_keys<D>(p, rows, memory + (Shape::STAGE - stage), key + Shape::KEYS);
        float s[Shape::KEYS / 8][4];
        found.multiply(s, memory + stage, g, t);
        // All rows see what lies between what the last one sees first and the first one sees last.
        const bool masked = key + Shape::KEYS - 1 > rows.first_position || key < PromptRows::first_seen(p, rows.last_key);
        found.weigh(s, p, key, masked, t);
        found.add_values(s, memory + stage + Shape::KEYS * Shape::KEY_ROW, lane, part);
        stage = Shape::STAGE - stage;
    }
    found.store(p, rows, row0, part, t);
}

}  // namespace

#define PROMPT_KERNELS(D)                                                                         \
    CQ_KERNEL(attend_prompt_f16_d##D, CqAttendPrompt, THREADS, 2) { attend_prompt<D, false>(p); } \
    CQ_KERNEL(attend_prompt_bf16_d##D, CqAttendPrompt, THREADS, 2) { attend_prompt<D, true>(p); }
PROMPT_KERNELS(64)
PROMPT_KERNELS(80)
PROMPT_KERNELS(96)
PROMPT_KERNELS(128)
PROMPT_KERNELS(256)
