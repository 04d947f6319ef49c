// Queries and keys, put where they stand: norms of heads, turns by positions, growth. A warp takes a head at a time, of
// which a lane has every 32nd pair; elements that do not turn are pairs of neighbours.
#pragma once
#include "attend.cuh"

namespace cq {

// HEAD_DIM: that of all heads, or 0 if only the launch knows it; DTYPE likewise, or ANY_DTYPE.
constexpr uint32_t ANY_DTYPE = 0xffffffffu;
template <uint32_t DTYPE, int MOST_HEAD_DIM, int HEAD_DIM> struct PlacedHead {
    static constexpr int PAIRS = (MOST_HEAD_DIM + 63) / 64;  // of a lane
    const CqAttend &p;
    float turns[PAIRS][2];  // of the position: cosines and sines

    // A lane's part of a head, and what the norm multiplies and adds.
    struct Loaded {
        float x[PAIRS][2], weight[PAIRS][2], bias[PAIRS][2];
    };

    __device__ __forceinline__ PlacedHead(const CqAttend &p, uint32_t position) : p(p) {
        const float2 *row = reinterpret_cast<const float2 *>(p.turns) + size_t(position) * p.pairs;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (pair_of(i) >= int(p.pairs)) continue;
            const float2 turn = row[pair_of(i)];
            turns[i][0] = turn.x, turns[i][1] = turn.y;
        }
    }

    static __device__ __forceinline__ int pair_of(int i) { return threadIdx.x % 32 + 32 * i; }
    __device__ __forceinline__ int head_dim() const { return HEAD_DIM ? HEAD_DIM : p.head_dim; }
    __device__ __forceinline__ uint32_t dtype() const { return DTYPE == ANY_DTYPE ? p.dtype : DTYPE; }

    // Where an element is behind the turn, and before it.
    __device__ __forceinline__ int behind(int i, int element) const {
        const int pair = pair_of(i);
        return pair < int(p.pairs) ? pair + element * p.pairs : 2 * pair + element;
    }
    __device__ __forceinline__ int before(int i, int element) const {
        return p.interleaved ? 2 * pair_of(i) + element : behind(i, element);
    }

    // Hands pair and element of what a lane has to `act`.
    template <class Act> __device__ __forceinline__ void each(Act act) const {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
#pragma unroll
            for (int element = 0; element < 2; ++element)
                if ((HEAD_DIM && HEAD_DIM % 64 == 0) || before(i, element) < head_dim()) act(i, element);
    }

    __device__ __forceinline__ void turn(float (&x)[PAIRS][2]) const {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (pair_of(i) >= int(p.pairs)) continue;
            const float cosine = turns[i][0], sine = turns[i][1], first = x[i][0], second = x[i][1];
            x[i][0] = __fmaf_rn(first, cosine, -(second * sine));
            x[i][1] = __fmaf_rn(first, sine, second * cosine);
        }
    }

    // Head number `index` of its sequence.
    __device__ __forceinline__ Loaded load(const void *head, const CqHeadNorm &norm, uint32_t index) const {
        Loaded loaded = {};
        const uint32_t numbers = index * norm.stride;
        auto load = [&](float(&to)[PAIRS][2], const float *from, float otherwise) {
            each([&](int i, int element) { to[i][element] = otherwise; });
            if (from)
                each([&](int i, int element) {
                    to[i][element] = from[numbers + (p.turns_first ? behind(i, element) : before(i, element))];
                });
        };
        each([&](int i, int element) { loaded.x[i][element] = load_float(head, before(i, element), dtype()); });
        load(loaded.weight, norm.weight, 1);
        load(loaded.bias, norm.bias, 0);
        return loaded;
    }

    __device__ __forceinline__ void normalize(Loaded &loaded, const CqHeadNorm &norm) const {
        auto &x = loaded.x;
        float mean = 0, square = 0;
        const float share = 1.f / head_dim();
        if (norm.kind == CQ_HEADS_LAYER) {
            each([&](int i, int element) { mean += x[i][element]; });
            mean = sum_of_warp(mean) * share;
        }
        each([&](int i, int element) {
            x[i][element] -= mean;
            square = __fmaf_rn(x[i][element], x[i][element], square);
        });
        const float inverse = rsqrtf(__fmaf_rn(sum_of_warp(square), share, norm.eps));
        each([&](int i, int element) {
            x[i][element] = __fmaf_rn(x[i][element] * inverse, loaded.weight[i][element], loaded.bias[i][element]);
        });
    }

    // Hands elements of what was loaded, where they stand then, to `store`; they have yet to be rounded.
    template <class Store> __device__ __forceinline__ void place(Loaded loaded, const CqHeadNorm &norm, float growth, Store store) const {
#pragma unroll 1
        for (uint32_t step = 0; step < 2; ++step) {
            if (step != p.turns_first)
                turn(loaded.x);
            else if (norm.kind != CQ_HEADS_AS_THEY_ARE)
                normalize(loaded, norm);
        }
        each([&](int i, int element) { store(behind(i, element), loaded.x[i][element] * growth); });
    }
};

// The query heads of a block, one after the other, and if its keys have the new one, that behind eight; then a barrier.
template <uint32_t DTYPE, int MOST_HEAD_DIM, int HEAD_DIM>
__device__ __forceinline__ void place_heads(const CqAttend &p, const AttendBlock &block, void *to) {
    using Placed = PlacedHead<DTYPE, MOST_HEAD_DIM, HEAD_DIM>;
    const Placed placed(p, block.position);
    const size_t row_bytes = placed.head_dim() * (DTYPE == CQ_F32 ? 4 : 2);
    auto row_of = [&](const void *rows, size_t row) { return static_cast<const unsigned char *>(rows) + row * row_bytes; };
    const float growth = p.growth ? p.growth[block.position] : 1;
    auto is_there = [&](int row) { return row == HEADS ? block.has_new_key() : row >= 0 && row < int(block.heads); };
    auto norm_of = [&](int row) -> const CqHeadNorm & { return row == HEADS ? p.k_norm : p.q_norm; };
    // The warps begin at the end, where the key is; each head is on its way while the one before is placed.
    typename Placed::Loaded next = {};
#pragma unroll 1
    for (int row = HEADS - int(threadIdx.x / 32) + ATTEND_WARPS; row >= 0; row -= ATTEND_WARPS) {
        const typename Placed::Loaded loaded = next;
        const int coming = row - ATTEND_WARPS;
        if (is_there(coming)) {
            const bool is_key = coming == HEADS;
            // With gates, queries are every second row.
            const size_t query = size_t(block.first_head + coming) << p.gated;
            const unsigned char *head = is_key ? row_of(p.k, block.kv_head) : row_of(p.q, query);
            next = placed.load(head, norm_of(coming), is_key ? block.kv_of_sequence : block.first_sink + coming);
        }
        if (!is_there(row)) continue;
        unsigned char *head = static_cast<unsigned char *>(to) + row * row_bytes;
        placed.place(loaded, norm_of(row), row == HEADS ? 1 : growth, [&](int at, float x) { store_float(head, at, DTYPE, x); });
    }
    __syncthreads();
}

}  // namespace cq
