// route: which experts a token uses, and how much each counts (CqRoute). 256 threads.
//
// A block makes the logits of two experts, four warps each, which divide the row; every block finds the length of the row by
// itself, and writes a part of what the row becomes. One warp of the last block to arrive chooses; the others multiply what the
// shared expert has inside by how much it counts, which is one more logit.
#include "parts.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS, WARPS = THREADS / 32, WARPS_OF_EXPERT = WARPS / CQ_ROUTE_EXPERTS;
constexpr uint32_t STRIDE = WARPS_OF_EXPERT * 32;  // of the numbers of a thread
constexpr uint32_t BATCH = 8;                      // of them that are on their way at once
constexpr uint32_t TAKEN = 0, NO_EXPERT = 0xffffffffu;

__device__ __forceinline__ bool has_shared(const CqRoute &p) { return p.shared_gate; }

__device__ __forceinline__ uint32_t logits_of_token(const CqRoute &p) { return p.experts + has_shared(p); }

// The product of a thread's numbers of the row with those of its expert, and their squares.
template <uint32_t DTYPE, uint32_t WEIGHT> __device__ __forceinline__ void product(const CqRoute &p, uint32_t expert, float &sum, float &squares) {
    const bool is_shared = expert == p.experts;
    const void *const weights = is_shared ? p.shared_gate : p.weight;
    const size_t row = size_t(blockIdx.y) * p.hidden, of_expert = is_shared ? 0 : size_t(expert) * p.hidden;
#pragma unroll 1
    for (uint32_t first = threadIdx.x % STRIDE; first < p.hidden; first += BATCH * STRIDE) {
        float x[BATCH], weight[BATCH], norm[BATCH];
#pragma unroll
        for (uint32_t n = 0; n < BATCH; ++n) {
            // What lies behind the row is loaded as its last number: a branch would wait for the loads before it.
            const uint32_t i = min(first + n * STRIDE, p.hidden - 1);
            x[n] = load_float(p.x, row + i, DTYPE);
            weight[n] = load_float(weights, of_expert + i, WEIGHT);
            norm[n] = p.norm ? p.norm[i] : 1.f;
        }
#pragma unroll
        for (uint32_t n = 0; n < BATCH; ++n) {
            if (first + n * STRIDE >= p.hidden) continue;
            sum = __fmaf_rn(x[n] * norm[n], weight[n], sum);
            squares = __fmaf_rn(x[n], x[n], squares);
        }
    }
}

template <uint32_t DTYPE> __device__ __forceinline__ void product_of(const CqRoute &p, uint32_t expert, float &sum, float &squares) {
    const uint32_t dtype = expert == p.experts ? p.shared_gate_dtype : p.weight_dtype;
    if (dtype == CQ_F32)
        product<DTYPE, CQ_F32>(p, expert, sum, squares);
    else if (dtype == CQ_F16)
        product<DTYPE, CQ_F16>(p, expert, sum, squares);
    else
        product<DTYPE, CQ_BF16>(p, expert, sum, squares);
}

// A number whose order among others is that of the floats.
__device__ __forceinline__ uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.f);  // there is one zero
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
constexpr uint32_t KEY_OF_NOTHING = 0x007fffffu;  // that of minus infinity

// The first of the largest keys that are left.
__device__ __forceinline__ uint32_t largest(const uint32_t *keys, uint32_t count, uint32_t lane) {
    uint32_t best = TAKEN, index = NO_EXPERT;
    for (uint32_t i = lane; i < count; i += 32)
        if (keys[i] > best) best = keys[i], index = i;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        const uint32_t other = __shfl_xor_sync(FULL_WARP, best, distance), of_other = __shfl_xor_sync(FULL_WARP, index, distance);
        if (other > best || (other == best && of_other < index)) best = other, index = of_other;
    }
    return index;
}

// Leaves the keys of the chosen groups alone.
__device__ __forceinline__ void keep_groups(const CqRoute &p, uint32_t *keys, const float *choice, uint32_t *groups, uint32_t lane) {
    const uint32_t size = p.experts / p.groups;
    for (uint32_t group = lane; group < p.groups; group += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (uint32_t i = group * size; i < (group + 1) * size; ++i) {
            const float value = choice[i];
            if (value > first)
                second = first, first = value;
            else if (value > second)
                second = value;
        }
        groups[group] = key_of(p.summed == 1 ? first : first + second);
    }
    __syncwarp();
    for (uint32_t n = 0; n < p.chosen_groups; ++n) {
        const uint32_t group = largest(groups, p.groups, lane);
        __syncwarp();
        if (lane == 0) groups[group] = TAKEN;
        __syncwarp();
    }
    for (uint32_t i = lane; i < p.experts; i += 32)
        if (groups[i / size] != TAKEN) keys[i] = KEY_OF_NOTHING;
    __syncwarp();
}

// One warp. In shared memory, for each expert: its score; its key; by what it is chosen, and then which ones are; the keys of
// groups.
__device__ __forceinline__ void choose(const CqRoute &p, float *scores, uint32_t lane) {
    const size_t token = blockIdx.y;
    uint32_t *keys = reinterpret_cast<uint32_t *>(scores + p.experts), *chosen = keys + p.experts;
    float top = -INFINITY;
    for (uint32_t i = lane; i < p.experts; i += 32) {
        scores[i] = load_again(p.logits + token * logits_of_token(p) + i);
        top = fmaxf(top, scores[i]);
    }
    top = largest_of_warp(top);
    float sum = 0;
    for (uint32_t i = lane; i < p.experts; i += 32) {
        scores[i] = p.sigmoid ? 1.f / (1.f + expf(-scores[i])) : expf(scores[i] - top);
        sum += scores[i];
    }
    sum = p.sigmoid ? 1.f : sum_of_warp(sum);
    float *const choice = reinterpret_cast<float *>(chosen);
    __syncwarp();
    for (uint32_t i = lane; i < p.experts; i += 32) {
        const float score = scores[i] = scores[i] / sum;
        const float by = p.correction ? score + p.correction[i] : score, known = by == by ? by : INFINITY;
        keys[i] = key_of(known);
        choice[i] = known;
    }
    __syncwarp();
    if (p.groups) keep_groups(p, keys, choice, reinterpret_cast<uint32_t *>(scores + 3 * p.experts), lane);
    float total = 0;
    for (uint32_t n = 0; n < p.top_k; ++n) {
        const uint32_t expert = largest(keys, p.experts, lane);
        total += scores[expert];
        __syncwarp();
        if (lane == 0) {
            keys[expert] = TAKEN;
            chosen[n] = expert;
        }
        __syncwarp();
    }
    const float factor = p.normalize ? p.scale / total : p.scale;
    for (uint32_t n = lane; n < p.top_k; n += 32) {
        p.ids[token * p.top_k + n] = chosen[n];
        p.shares[token * p.top_k + n] = scores[chosen[n]] * factor;
    }
}

// All warps but the first.
__device__ __forceinline__ void weigh_shared(const CqRoute &p) {
    const size_t token = blockIdx.y;
    const float share = 1.f / (1.f + expf(-load_again(p.logits + token * logits_of_token(p) + p.experts)));
    for (uint32_t i = threadIdx.x - 32; i < p.shared_width; i += THREADS - 32) {
        const size_t at = token * p.shared_width + i;
        store_float(p.shared, at, p.dtype, load_float(p.shared, at, p.dtype) * share);
    }
}

__device__ __forceinline__ void route_token(const CqRoute &p) {
    CQ_DYNAMIC_SHARED(memory);
    float *shared = reinterpret_cast<float *>(memory);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t expert = blockIdx.x * CQ_ROUTE_EXPERTS + warp / WARPS_OF_EXPERT;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    float sum = 0, squares = 0;
    const uint32_t logits = logits_of_token(p), read = min(expert, logits - 1);
    if (p.dtype == CQ_F32)
        product_of<CQ_F32>(p, read, sum, squares);
    else if (p.dtype == CQ_F16)
        product_of<CQ_F16>(p, read, sum, squares);
    else
        product_of<CQ_BF16>(p, read, sum, squares);
    sum = sum_of_warp(sum), squares = sum_of_warp(squares);
    if (lane == 0) shared[warp] = sum, shared[WARPS + warp] = squares;
    __syncthreads();
    float length = 0;
#pragma unroll
    for (int w = 0; w < WARPS_OF_EXPERT; ++w) length += shared[WARPS + w];
    const float scale = p.norm ? 1.f / sqrtf(length / float(p.hidden) + p.eps) : 1.f;
    if (threadIdx.x % STRIDE == 0 && expert < logits) {
        float logit = 0;
#pragma unroll
        for (int w = 0; w < WARPS_OF_EXPERT; ++w) logit += shared[warp + w];
        const float bias = expert == p.experts ? p.shared_bias : p.bias ? p.bias[expert] : -0.f;
        p.logits[size_t(blockIdx.y) * logits + expert] = __fadd_rn(logit * scale, bias);
    }
    if (p.norm)
        for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < p.hidden; i += gridDim.x * THREADS) {
            const size_t at = size_t(blockIdx.y) * p.hidden + i;
            store_float(p.normed, at, p.dtype, load_float(p.x, at, p.dtype) * scale * p.norm[i]);
        }
    // The first word is the flag of `last_of_parts`, which not all threads may have seen yet.
    if (!last_of_parts(p.arrivals + blockIdx.y, gridDim.x)) return;
    if (warp == 0)
        choose(p, shared + 1, lane);
    else if (has_shared(p))
        weigh_shared(p);
}

}  // namespace

CQ_KERNEL(route, CqRoute, THREADS, 2) { route_token(p); }
