// attend_prompt_codes_d<head dim>: attention of prompts (attend_prompt.cuh) to a cache of codes (kv_codes.cuh).
// append_codes_d<head dim>: the keys and values of prompts as codes (CqAppend).
//
// Queries, keys, values and outputs are of any dtype; f16 is what is multiplied. Codes of KEYS keys and values come through one or two
// stages of copies, and become halves in a tile that all warps read. Shared memory: the tile, which also takes queries at the
// beginning and outputs at the end, the stages, and a factor for each row.
#include "attend_prompt.cuh"
#include "kv_codes.cuh"

namespace {

using namespace cq;

// Codes of some rows of a cache, of keys or of values.
template <int D> struct CodeRows {
    using Shape = PromptShape<D>;
    const unsigned char *codes;
    const half2 *groups;
    uint32_t bits;

    __device__ __forceinline__ CodeRows(const void *codes_, const void *groups_, uint32_t bits_, size_t first)
        : codes(static_cast<const unsigned char *>(codes_) + first * (D * bits_ / 8)),
          groups(static_cast<const half2 *>(groups_) + first * groups_of_row(bits_)), bits(bits_) {}

    static __device__ __forceinline__ uint32_t groups_of_row(uint32_t bits) { return bits == 8 ? KvCodes<8>::groups(D) : KvCodes<4>::groups(D); }
    // Of a stage.
    static __device__ __forceinline__ uint32_t code_bytes(uint32_t bits) { return Shape::KEYS * D / 8 * bits; }
    static __device__ __forceinline__ uint32_t bytes(uint32_t bits) { return code_bytes(bits) + Shape::KEYS * 4 * groups_of_row(bits); }

    // Starts to copy those of the keys from `key` on. Of keys that no row sees, scales and biases are zeros, and so the numbers.
    __device__ __forceinline__ void start(const PromptRows &rows, unsigned char *stage, uint32_t key) const {
        const uint32_t of_row = groups_of_row(bits), row_bytes = D / 8 * bits;
        const size_t first = rows.cached.row_of(key);
        for (uint32_t i = threadIdx.x; i < code_bytes(bits) / 16; i += PROMPT_THREADS) {
            const bool there = key + i * 16 / row_bytes <= rows.last_key;
            copy_bytes<16>(stage + i * 16, there ? codes + first * row_bytes + i * 16 : codes, there);
        }
        for (uint32_t i = threadIdx.x; i < Shape::KEYS * of_row; i += PROMPT_THREADS) {
            const uint32_t of_key = key + i / of_row;
            const bool seen = of_key >= rows.first_key && of_key <= rows.last_key;
            copy_bytes<4>(stage + code_bytes(bits) + i * 4, seen ? groups + first * of_row + i : groups, seen);
        }
    }

    // What has been copied as rows of halves.
    __device__ __forceinline__ void widen(const unsigned char *stage, unsigned char *to, uint32_t to_row) const {
        if (bits == 8)
            widen<8>(stage, to, to_row);
        else
            widen<4>(stage, to, to_row);
    }

  private:
    template <int BITS> __device__ __forceinline__ static void widen(const unsigned char *stage, unsigned char *to, uint32_t to_row) {
        using Codes = KvCodes<BITS>;
        const half2 *groups = reinterpret_cast<const half2 *>(stage + code_bytes(BITS));
#pragma unroll 2
        for (uint32_t i = threadIdx.x; i < Shape::KEYS * D / 16; i += PROMPT_THREADS) {
            const uint32_t row = i / (D / 16), chunk = i % (D / 16);
            const half2 group = groups[row * Codes::groups(D) + chunk * 16 / Codes::GROUP];
            uint4 *eights = reinterpret_cast<uint4 *>(to + row * to_row + chunk * 32);
#pragma unroll
            for (int part = 0; part < 2; ++part) eights[part] = Codes::numbers(stage + (i * 2 + part) * BITS, group);
        }
    }
};

template <int D> __device__ __forceinline__ void attend_prompt_codes(const CqAttendPrompt &p) {
    using Shape = PromptShape<D>;
    using Rows = RowsOfLane<D, false>;
    using Head = HeadOfLanes<D>;
    constexpr int OUTPUT_ROW = D + 4;  // floats
    static_assert(Shape::ROWS * OUTPUT_ROW * 4 <= Shape::STAGE && Shape::ROWS <= Shape::KEYS, "outputs, and queries, have room in a tile");
    CQ_DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const PromptPlace place(p);
    const CodeRows<D> keys(p.keys, p.key_groups, p.key_bits, size_t(place.kv_head) * p.capacity);
    const CodeRows<D> values(p.values, p.value_groups, p.value_bits, size_t(place.kv_head) * p.capacity);
    const uint32_t of_keys = keys.bytes(p.key_bits), stage_bytes = of_keys + values.bytes(p.value_bits);
    unsigned char *const stages = memory + Shape::STAGE;
    float *const units = reinterpret_cast<float *>(stages + p.stages * stage_bytes);
    const PromptRows rows(p, place, gridDim.x - 1 - blockIdx.x, Shape::ROWS);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    auto start = [&](uint32_t key, unsigned char *stage) {
        keys.start(rows, stage, key), values.start(rows, stage + of_keys, key);
        commit_copies();
    };
    auto each_row = [&](auto act) {
#pragma unroll 1
        for (uint32_t row = rows.first + warp; row < rows.end; row += PROMPT_THREADS / 32) act(row, row - rows.first);
    };
    uint32_t next_stage = 0;
    start(rows.first_key / Shape::KEYS * Shape::KEYS, stages);
    each_row([&](uint32_t row, uint32_t index) {
        const size_t at = Rows::at(p, row) * D;
        Head head = Head::of([&](int i) { return load_float(p.q, at + i, p.dtype); });
        if (p.key_bits == 4) head.rotate();
        const float unit = head.make_halves();
        if (lane == 0) units[index] = unit;
        head.each([&](int i, float x) { reinterpret_cast<half *>(memory + index * Shape::KEY_ROW)[i] = __float2half_rn(x); });
    });
    __syncthreads();
    const int part = warp % Shape::WARPS_OF_ROW;
    const uint32_t row0 = rows.first + warp / Shape::WARPS_OF_ROW * 16 + g;
    Rows found(p, rows, row0, t, [&](uint32_t row, int eight) { return reinterpret_cast<const uint4 *>(memory + (row - rows.first) * Shape::KEY_ROW)[eight]; });
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) factors[half] = p.scale * units[min(row0 + half * 8, rows.end - 1) - rows.first];
    attend_to_keys<D, false>(
        found, p, rows, factors, part, [](uint32_t) {},
        [&](uint32_t key) {
            wait_for_copies<0>();
            __syncthreads();  // all have these codes, and have multiplied what is in the tile
            const unsigned char *stage = stages + next_stage * stage_bytes;
            next_stage = next_stage + 1 == p.stages ? 0 : next_stage + 1;
            const bool has_more = key + Shape::KEYS <= rows.last_key;
            if (has_more && p.stages > 1) start(key + Shape::KEYS, stages + next_stage * stage_bytes);
            keys.widen(stage, memory, Shape::KEY_ROW), values.widen(stage + of_keys, memory + Shape::KEYS * Shape::KEY_ROW, Shape::VALUE_ROW);
            __syncthreads();
            if (has_more && p.stages == 1) start(key + Shape::KEYS, stages);
            return memory;
        });
    __syncthreads();  // the tile becomes outputs
    float *outputs = reinterpret_cast<float *>(memory);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float factor = found.output_factor(p, row0 + half * 8, half);
        float *to = outputs + (row0 + half * 8 - rows.first) * OUTPUT_ROW + part * (Rows::EIGHTS * 8) + 2 * t;
#pragma unroll
        for (int i = 0; i < Rows::EIGHTS; ++i) to[i * 8] = found.sums[i][half * 2] * factor, to[i * 8 + 1] = found.sums[i][half * 2 + 1] * factor;
    }
    __syncthreads();
    each_row([&](uint32_t row, uint32_t index) {
        Head head = Head::of([&](int i) { return outputs[index * OUTPUT_ROW + i]; });
        if (p.value_bits == 4) head.rotate();
        const size_t at = Rows::at(p, row) * D;
        head.each([&](int i, float x) { store_float(p.y, at + i, p.dtype, x); });
    });
}

template <int D> __device__ __forceinline__ void append_codes(const CqAppend &p) {
    const uint32_t token = blockIdx.x * (PROMPT_THREADS / 32) + threadIdx.x / 32;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (token >= p.tokens) return;
    const PromptPlace place(p);
    const uint32_t given = blockIdx.y / p.kv_heads, kv_head = blockIdx.y % p.kv_heads;
    const size_t from = ((size_t(given) * p.tokens + token) * p.kv_heads + kv_head) * D;
    const size_t row = size_t(place.kv_head) * p.capacity + (place.position + token) % p.capacity;
    auto append = [&](const void *numbers, void *codes, void *groups, uint32_t bits) {
        auto head = HeadOfLanes<D>::of([&](int i) { return load_float(numbers, from + i, p.dtype); });
        uint32_t *to = static_cast<uint32_t *>(codes) + row * (D * bits / 32);
        half2 *of_row = static_cast<half2 *>(groups) + row * CodeRows<D>::groups_of_row(bits);
        if (bits == 8)
            head.template quantize<8>(to, of_row);
        else
            head.template quantize<4>(to, of_row);
    };
    append(p.k, p.keys, p.key_groups, p.key_bits);
    append(p.v, p.values, p.value_groups, p.value_bits);
}

}  // namespace

#define PROMPT_KERNELS(D)                                                                             \
    CQ_KERNEL(attend_prompt_codes_d##D, CqAttendPrompt, PROMPT_THREADS, 2) { attend_prompt_codes<D>(p); } \
    CQ_KERNEL(append_codes_d##D, CqAppend, PROMPT_THREADS, 4) { append_codes<D>(p); }
PROMPT_KERNELS(64)
PROMPT_KERNELS(80)
PROMPT_KERNELS(96)
PROMPT_KERNELS(128)
PROMPT_KERNELS(256)
