// attend_prompt_{f16,bf16}_d<head dim>: attention of prompts to a cache of the dtype of queries (attend_prompt.cuh).
#include "attend_prompt.cuh"

namespace {

using namespace cq;

// Starts to copy the keys and values from `key` on; those that no row sees are zeros.
template <int D> __device__ __forceinline__ void start_keys(const CqAttendPrompt &p, const PromptPlace &place, const PromptRows &rows, unsigned char *stage, uint32_t key) {
    using Shape = PromptShape<D>;
    const size_t first = (size_t(place.kv_head) * p.capacity + rows.cached.row_of(key)) * (2 * D);
    const unsigned char *keys = static_cast<const unsigned char *>(p.keys) + first, *values = static_cast<const unsigned char *>(p.values) + first;
#pragma unroll
    for (int i = 0; i < Shape::COPIES; ++i) {
        const uint32_t which = threadIdx.x + i * PROMPT_THREADS, row = which / Shape::EIGHTS, eight = which % Shape::EIGHTS;
        const bool seen = key + row >= rows.first_key && key + row <= rows.last_key;
        const size_t at = seen ? which * 16 : 0;
        copy_bytes<16>(stage + row * Shape::KEY_ROW + eight * 16, keys + at, seen);
        copy_bytes<16>(stage + Shape::KEYS * Shape::KEY_ROW + row * Shape::VALUE_ROW + eight * 16, values + at, seen);
    }
    commit_copies();
}

template <int D, bool BF16> __device__ __forceinline__ void attend_prompt(const CqAttendPrompt &p) {
    using Shape = PromptShape<D>;
    using Rows = RowsOfLane<D, BF16>;
    CQ_DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    // The longest come first.
    const PromptPlace place(p);
    const PromptRows rows(p, place, gridDim.x - 1 - blockIdx.x, Shape::ROWS);
    const int part = warp % Shape::WARPS_OF_ROW;
    const uint32_t row0 = rows.first + warp / Shape::WARPS_OF_ROW * 16 + g;
    Rows found(p, rows, row0, t, [&](uint32_t row, int eight) { return static_cast<const uint4 *>(p.q)[Rows::at(p, row) * Shape::EIGHTS + eight]; });
    const float factors[2] = {p.scale, p.scale};
    uint32_t stage = 0;
    attend_to_keys<D, BF16>(
        found, p, rows, factors, part, [&](uint32_t key) { start_keys<D>(p, place, rows, memory, key); },
        [&](uint32_t key) {
            wait_for_copies<0>();
            __syncthreads();  // all have these keys, and have multiplied those before
            const unsigned char *these = memory + stage;
            stage = Shape::STAGE - stage;
            if (key + Shape::KEYS <= rows.last_key) start_keys<D>(p, place, rows, memory + stage, key + Shape::KEYS);
            return these;
        });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t row = row0 + half * 8;
        const float factor = found.output_factor(p, row, half);
        if (row >= rows.end) continue;
        uint32_t *to = reinterpret_cast<uint32_t *>(static_cast<uint16_t *>(p.y) + Rows::at(p, row) * D) + part * (Rows::EIGHTS * 4) + t;
#pragma unroll
        for (int i = 0; i < Rows::EIGHTS; ++i) to[i * 4] = to_pair<BF16>(found.sums[i][half * 2] * factor, found.sums[i][half * 2 + 1] * factor);
    }
}

}  // namespace

#define PROMPT_KERNELS(D)                                                                                \
    CQ_KERNEL(attend_prompt_f16_d##D, CqAttendPrompt, PROMPT_THREADS, 2) { attend_prompt<D, false>(p); } \
    CQ_KERNEL(attend_prompt_bf16_d##D, CqAttendPrompt, PROMPT_THREADS, 2) { attend_prompt<D, true>(p); }
PROMPT_KERNELS(64)
PROMPT_KERNELS(80)
PROMPT_KERNELS(96)
PROMPT_KERNELS(128)
PROMPT_KERNELS(256)
