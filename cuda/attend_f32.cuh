// Attention to a cache of f32, on CUDA cores: a warp reads a key at a time, its lanes divide d. For one query head after the
// other, so that keys are read again for each; no copies ahead. What is normalized and turned lies behind the results.
#pragma once
#include "attend_place.cuh"

namespace cq {

constexpr int MOST_HEAD_DIM = 256;

__device__ __forceinline__ void attend_f32(const CqAttend &p) {
    constexpr int PARTS = MOST_HEAD_DIM / 32;
    CQ_DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head_dim = p.head_dim;
    const AttendBlock block(p);
    const WarpResults results(memory, head_dim);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (!block.has_keys()) return;
    float *placed = results.total + ATTEND_WARPS * HEADS;
    place_heads<CQ_F32, MOST_HEAD_DIM, 0>(p, block, placed);
    const size_t cached = size_t(block.kv_head) * p.capacity * head_dim, fresh = size_t(block.kv_head) * head_dim;
    float *keys = static_cast<float *>(p.keys) + cached, *values = static_cast<float *>(p.values) + cached;
    const float *k = placed + HEADS * head_dim, *v = static_cast<const float *>(p.v) + fresh;
    for (uint32_t head = 0; head < block.heads; ++head) {
        const float *from = placed + head * head_dim;
        float q[PARTS], sums[PARTS] = {}, largest = -INFINITY, total = 0;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) q[i] = lane + 32 * i < head_dim ? from[lane + 32 * i] : 0;
        for (int tile = block.first_tile + warp; tile < block.end_tile; tile += ATTEND_WARPS)
            for (uint32_t row = max(uint32_t(tile * KEYS), block.first); row < uint32_t((tile + 1) * KEYS) && row <= block.position; ++row) {
                const bool is_new = row == block.position;
                const float *key = is_new ? k : keys + size_t(row) * head_dim, *value = is_new ? v : values + size_t(row) * head_dim;
                float score = 0;
#pragma unroll
                for (int i = 0; i < PARTS; ++i)
                    if (lane + 32 * i < head_dim) score = __fmaf_rn(q[i], key[lane + 32 * i], score);
                const float logit = logit_of(p, sum_of_warp(score)), most = fmaxf(largest, logit);
                const float shrink = exp2_fast(largest - most), weight = exp2_fast(logit - most);
                largest = most;
                total = __fmaf_rn(total, shrink, weight);
#pragma unroll
                for (int i = 0; i < PARTS; ++i)
                    if (lane + 32 * i < head_dim) sums[i] = __fmaf_rn(sums[i], shrink, weight * value[lane + 32 * i]);
                if (is_new && block.appends && head == 0)
                    for (int i = lane; i < head_dim; i += 32)
                        keys[size_t(row) * head_dim + i] = k[i], values[size_t(row) * head_dim + i] = v[i];
            }
        const int at = warp * HEADS + head;
        if (lane == 0) results.largest[at] = largest, results.total[at] = total;
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
            if (lane + 32 * i < head_dim) results.sums[at * results.row + lane + 32 * i] = sums[i];
    }
    __syncthreads();
    finish_to_y<1>(p, block, results, CQ_F32);
}

}  // namespace cq
