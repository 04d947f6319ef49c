// Queries and keys, put where they stand: norms of heads, turns by positions, growth. A warp takes a head at a time, of
// which a lane has every 32nd pair; elements that do not turn are pairs of neighbours.
#pragma once
#include "attend.cuh"

namespace cq {

template <uint32_t DTYPE, int MOST_HEAD_DIM> struct PlacedHead {
    static constexpr int PAIRS = (MOST_HEAD_DIM + 63) / 64;  // of a lane
    const CqAttend &p;
    float turns[PAIRS][2];  // of the position: cosines and sines
    float x[PAIRS][2];

    __device__ __forceinline__ PlacedHead(const CqAttend &p, uint32_t position) : p(p) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint32_t pair = threadIdx.x % 32 + 32 * i;
            if (pair >= p.pairs) continue;
            const float *turn = p.turns + 2 * (size_t(position) * p.pairs + pair);
            turns[i][0] = turn[0], turns[i][1] = turn[1];
        }
    }

    // Where elements of a pair are before the turn, or behind it.
    __device__ __forceinline__ int at(int i, int element, bool behind) const {
        const int pair = threadIdx.x % 32 + 32 * i;
        return pair < int(p.pairs) && (behind || !p.interleaved) ? pair + element * p.pairs : 2 * pair + element;
    }

    // What is there is handed to `act`: number of its pair, element, and place.
    template <class Act> __device__ __forceinline__ void each(bool behind, Act act) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
#pragma unroll
            for (int element = 0; element < 2; ++element) {
                const int place = at(i, element, behind);
                if (place < int(p.head_dim)) act(i, element, place);
            }
    }

    __device__ __forceinline__ void turn() {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (threadIdx.x % 32 + 32 * i >= p.pairs) continue;
            const float cosine = turns[i][0], sine = turns[i][1], first = x[i][0], second = x[i][1];
            x[i][0] = __fmaf_rn(first, cosine, -(second * sine));
            x[i][1] = __fmaf_rn(first, sine, second * cosine);
        }
    }

    __device__ __forceinline__ void normalize(const CqHeadNorm &norm, uint32_t head) {
        const size_t numbers = size_t(head) * norm.stride;
        float weight[PAIRS][2], bias[PAIRS][2], mean = 0, square = 0;
        each(p.turns_first, [&](int i, int element, int place) {
            weight[i][element] = norm.weight ? norm.weight[numbers + place] : 1;
            bias[i][element] = norm.bias ? norm.bias[numbers + place] : 0;
        });
        if (norm.kind == CQ_HEADS_LAYER) {
            each(p.turns_first, [&](int i, int element, int) { mean += x[i][element]; });
            mean = sum_of_warp(mean) / p.head_dim;
        }
        each(p.turns_first, [&](int i, int element, int) {
            x[i][element] -= mean;
            square = __fmaf_rn(x[i][element], x[i][element], square);
        });
        const float inverse = 1 / sqrtf(sum_of_warp(square) / p.head_dim + norm.eps);
        each(p.turns_first, [&](int i, int element, int) {
            x[i][element] = __fmaf_rn(x[i][element] * inverse, weight[i][element], bias[i][element]);
        });
    }

    // From row `from` of heads, number `head` of its sequence, to `to`, rounded.
    __device__ __forceinline__ void place(const void *from, size_t row, const CqHeadNorm &norm, uint32_t head, float growth,
                                          void *to, int to_row) {
        each(false, [&](int i, int element, int place) { x[i][element] = load_float(from, row * p.head_dim + place, DTYPE); });
#pragma unroll 1
        for (uint32_t step = 0; step < 2; ++step) {
            if (step == p.turns_first) {
                if (norm.kind != CQ_HEADS_AS_THEY_ARE) normalize(norm, head);
            } else {
                turn();
            }
        }
        each(true, [&](int i, int element, int place) {
            store_float(to, to_row * p.head_dim + place, DTYPE, x[i][element] * growth);
        });
    }
};

// The query heads of a block, one after the other, and if its keys have the new one, that behind eight; then a barrier.
template <uint32_t DTYPE, int MOST_HEAD_DIM>
__device__ __forceinline__ void place_heads(const CqAttend &p, const AttendBlock &block, void *to) {
    PlacedHead<DTYPE, MOST_HEAD_DIM> placed(p, block.position);
    const float growth = p.growth ? p.growth[block.position] : 1;
    // The warps begin at the end, where the key is.
#pragma unroll 1
    for (int row = HEADS - int(threadIdx.x / 32); row >= 0; row -= ATTEND_WARPS) {
        const bool is_key = row == HEADS;
        if (is_key ? !block.has_new_key() : uint32_t(row) >= block.heads) continue;
        const CqHeadNorm norm = is_key ? p.k_norm : p.q_norm;
        placed.place(is_key ? p.k : p.q, is_key ? block.kv_head : block.first_head + row, norm,
                     is_key ? block.kv_head % p.kv_heads : block.first_sink + row, is_key ? 1 : growth, to, row);
    }
    __syncthreads();
}

}  // namespace cq
