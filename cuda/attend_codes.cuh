// Attention to a cache of codes (kv_codes.cuh), on tensor cores: as in attend_half.cuh. f16 is what is multiplied, whatever the dtype of
// queries, which are brought to the range of a half by a power of two for each head.
//
// A lane copies a quarter of each group of keys, or of values, g and g + 8, and only it reads these codes. Those of keys are multiplied
// as they are, exact; the products of a group are added up by themselves, and its scale, and its bias times the sum of the
// query's elements, are applied to that sum in f32. Those of values become numbers, rounded to halves, in a tile in shared memory, of
// which each warp has one. Scales and biases are read by all lanes. The new key and value are rotated and quantized first, and
// attended to as they will be read.
#pragma once
#include "attend_half.cuh"
#include "kv_codes.cuh"

namespace cq {

// Copies of keys, or of values: a stage has codes [half of the tile][group][lane], then scales and biases [row][group].
template <int D, int BITS> struct CodePlane {
    using Codes = KvCodes<BITS>;
    static constexpr int GROUPS = Codes::groups(D);
    static constexpr int PER_LANE = Codes::GROUP / 4, LANE_BYTES = PER_LANE * BITS / 8, EIGHTS = PER_LANE / 8;  // of a group
    static constexpr int CODE_BYTES = 2 * GROUPS * 32 * LANE_BYTES, BYTES = (CODE_BYTES + KEYS * GROUPS * 4 + 15) / 16 * 16;
    unsigned char *codes;  // the lane's first ones of row g of the cache
    half2 *groups;         // those of row 0

    __device__ __forceinline__ CodePlane(void *all_codes, void *all_groups, size_t row, int g, int t)
        : codes(static_cast<unsigned char *>(all_codes) + (row + g) * Codes::row_bytes(D) + t * LANE_BYTES),
          groups(static_cast<half2 *>(all_groups) + row * GROUPS) {}

    static __device__ __forceinline__ bool has_group(int group, int t) { return D % Codes::GROUP == 0 || group * Codes::GROUP + t * PER_LANE < D; }
    static __device__ __forceinline__ unsigned char *codes_at(unsigned char *stage, int half, int group) {
        return stage + ((half * GROUPS + group) * 32 + threadIdx.x % 32) * LANE_BYTES;
    }
    static __device__ __forceinline__ half2 *groups_at(unsigned char *stage, int row) { return reinterpret_cast<half2 *>(stage + CODE_BYTES) + row * GROUPS; }

    // Rows of a tile, which begins in a row of the cache, that are seen, but for the new one. Of others, scales and biases are
    // zeros, and so are numbers.
    __device__ __forceinline__ void copy(const AttendBlock &block, int tile, uint32_t first_row, unsigned char *stage, int g, int t) const {
        if (tile < block.end_tile) {
            auto is_seen = [&](uint32_t row) { return row >= block.first && row < block.position; };
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group)
                    if (has_group(group, t))
                        copy_bytes<LANE_BYTES, LANE_BYTES != 16>(codes_at(stage, half, group),
                                                     codes + first_row * size_t(Codes::row_bytes(D)) + half * 8 * Codes::row_bytes(D) + group * 4 * LANE_BYTES,
                                                     is_seen(tile * KEYS + half * 8 + g));
            }
            // A lane copies half of a row's, or, where that is no whole number, one after the other.
            constexpr int TOGETHER = GROUPS % 2 ? 1 : GROUPS / 2, COPIES = KEYS * GROUPS / TOGETHER;
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < COPIES; i += 32) {
                if (COPIES % 32 && i + lane >= COPIES) break;
                const uint32_t at = (i + lane) * TOGETHER, row = tile * KEYS + at / GROUPS;
                copy_bytes<4 * TOGETHER, true>(groups_at(stage, 0) + at, groups + at + first_row * size_t(GROUPS), is_seen(row));
            }
        }
        commit_copies();
    }

    // The new row into a tile, from the row that is placed, by the lanes of that row.
    static __device__ __forceinline__ void place(unsigned char *stage, int row, int t, const unsigned char *new_codes, const half2 *new_groups) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (has_group(group, t)) copy_lane(codes_at(stage, row / 8, group), new_codes + (group * 4 + t) * LANE_BYTES);
            if (group % 4 == t) groups_at(stage, row)[group] = new_groups[group];
        }
    }

    // What was placed to a row of the cache.
    __device__ __forceinline__ void append(unsigned char *stage, uint32_t row, int t) const {
        const int of_tile = row % KEYS;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (has_group(group, t))
                copy_lane(codes + (row - row % 8) * size_t(Codes::row_bytes(D)) + group * 4 * LANE_BYTES, codes_at(stage, of_tile / 8, group));
            if (group % 4 == t) groups[row * size_t(GROUPS) + group] = groups_at(stage, of_tile)[group];
        }
    }

    static __device__ __forceinline__ void copy_lane(void *to, const void *from) {
        if constexpr (LANE_BYTES == 16)
            *static_cast<uint4 *>(to) = *static_cast<const uint4 *>(from);
        else
            *static_cast<uint32_t *>(to) = *static_cast<const uint32_t *>(from);
    }
};

// What is placed behind the rings: queries as halves, what undoes their factors, their sums over groups of keys [group][head], the
// new key and value, and a row of numbers for each warp.
template <int D, int KEY_BITS, int VALUE_BITS> struct PlacedCodes {
    static constexpr int UNITS = HEADS * 2 * D;
    static constexpr int SUMS = UNITS + HEADS * 4;
    static constexpr int KEY = SUMS + KvCodes<KEY_BITS>::groups(D) * HEADS * 4, KEY_GROUPS = KEY + (KvCodes<KEY_BITS>::row_bytes(D) + 15) / 16 * 16;
    static constexpr int VALUE = KEY_GROUPS + 32, VALUE_GROUPS = VALUE + (KvCodes<VALUE_BITS>::row_bytes(D) + 15) / 16 * 16;
    static constexpr int ROWS = VALUE_GROUPS + 32, BYTES = ROWS + ATTEND_WARPS * 4 * D;
    static_assert(KvCodes<4>::groups(D) <= 8, "groups of a row take 32 bytes");
};

template <int D_, int KEY_BITS, int VALUE_BITS> struct CodeRing {
    static constexpr int D = D_;
    static constexpr bool BF16 = false;  // what is multiplied
    using Keys = CodePlane<D, KEY_BITS>;
    using Values = CodePlane<D, VALUE_BITS>;
    using Placed = PlacedCodes<D, KEY_BITS, VALUE_BITS>;
    static constexpr int CHUNKS = Keys::GROUPS * Keys::EIGHTS;  // of eight elements of queries
    static constexpr int VALUE_ROW = (D / 8 | 1) * 16;
    static constexpr int STAGE = Keys::BYTES + Values::BYTES, TILE = KEYS * VALUE_ROW;
    const CqAttend &p;
    const AttendBlock &block;
    unsigned char *memory;  // the tile of values, then stages
    unsigned char *placed;  // behind the rings of all warps
    int g, t;
    const Keys keys;
    const Values values;

    static __device__ __forceinline__ size_t warp_bytes(const CqAttend &p) { return TILE + p.stages * size_t(STAGE); }

    __device__ __forceinline__ CodeRing(const CqAttend &p, const AttendBlock &block, unsigned char *memory, unsigned char *placed, int lane)
        : p(p), block(block), memory(memory), placed(placed), g(lane / 4), t(lane % 4),
          keys(p.keys, p.key_groups, size_t(block.kv_head) * p.capacity, g, t),
          values(p.values, p.value_groups, size_t(block.kv_head) * p.capacity, g, t) {}

    __device__ __forceinline__ unsigned char *key_stage(int stage) const { return memory + TILE + stage * STAGE; }
    __device__ __forceinline__ unsigned char *value_stage(int stage) const { return key_stage(stage) + Keys::BYTES; }
    __device__ __forceinline__ bool has_chunk(int chunk) const { return Keys::has_group(chunk / Keys::EIGHTS, t); }
    __device__ __forceinline__ int element(int chunk) const { return (chunk / Keys::EIGHTS * 4 + t) * Keys::PER_LANE + chunk % Keys::EIGHTS * 8; }

    __device__ __forceinline__ void copy_keys(int tile, uint32_t row, int stage) const {
        __syncwarp();  // others may read groups of the tile before
        keys.copy(block, tile, row, key_stage(stage), g, t);
    }
    template <bool NEW> __device__ __forceinline__ void copy_values(int tile, uint32_t row, int stage) const { values.copy(block, tile, row, value_stage(stage), g, t); }
    // As of a HalfRing.
    __device__ __forceinline__ void wait_for_next() const {
        if (p.stages == 2)
            wait_for_copies<3>();
        else
            wait_for_copies<1>();
    }

    __device__ __forceinline__ void place() const {
        using Head = HeadOfLanes<D>;
        const int warp = threadIdx.x / 32;
        const PlacedHead<ANY_DTYPE, D, D> heads(p, block.position);
        const float growth = p.growth ? p.growth[block.position] : 1;
        float *row = reinterpret_cast<float *>(placed + Placed::ROWS) + warp * D;
        // Eight query heads, the key, the value.
#pragma unroll 1
        for (int which = HEADS + 1 - warp; which >= 0; which -= ATTEND_WARPS) {
            if (which < HEADS ? which >= int(block.heads) : !block.has_new_key()) continue;
            if (which > HEADS) {
                Head head = Head::of([&](int i) { return load_float(p.v, size_t(block.kv_head) * D + i, p.dtype); });
                head.template quantize<VALUE_BITS>(reinterpret_cast<uint32_t *>(placed + Placed::VALUE),
                                                   reinterpret_cast<half2 *>(placed + Placed::VALUE_GROUPS));
                continue;
            }
            const bool is_key = which == HEADS;
            const CqHeadNorm &norm = is_key ? p.k_norm : p.q_norm;
            const size_t from = is_key ? block.kv_head : size_t(block.first_head + which) << p.gated;
            const auto *numbers = static_cast<const unsigned char *>(is_key ? p.k : p.q) + from * D * (p.dtype == CQ_F32 ? 4 : 2);
            const auto loaded = heads.load(numbers, norm, is_key ? block.kv_of_sequence : block.first_sink + which);
            heads.place(loaded, norm, is_key ? 1 : growth, [&](int at, float x) { row[at] = rounded(x, p.dtype); });
            __syncwarp();
            Head head = Head::of([&](int i) { return row[i]; });
            __syncwarp();
            if (is_key) {
                head.template quantize<KEY_BITS>(reinterpret_cast<uint32_t *>(placed + Placed::KEY),
                                                 reinterpret_cast<half2 *>(placed + Placed::KEY_GROUPS));
            } else {
                if constexpr (KvCodes<KEY_BITS>::ROTATED) head.rotate();
                const float unit = head.make_halves();
                head.each([&](int i, float x) { reinterpret_cast<half *>(placed)[which * D + i] = __float2half_rn(x); });
                reinterpret_cast<float *>(placed + Placed::UNITS)[which] = unit;
#pragma unroll
                for (int group = 0; group < Keys::GROUPS; ++group) {
                    const float sum = head.template sum_of_group<KEY_BITS>(group);
                    reinterpret_cast<float *>(placed + Placed::SUMS)[group * HEADS + which] = sum;
                }
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ bool has_new_row() const { return int(block.position % 8) == g; }
    // By all lanes, behind the zeros that some have copied there.
    __device__ __forceinline__ void place_key(int stage) const {
        __syncwarp();
        if (has_new_row())
            Keys::place(key_stage(stage), block.position % KEYS, t, placed + Placed::KEY, reinterpret_cast<const half2 *>(placed + Placed::KEY_GROUPS));
    }
    __device__ __forceinline__ void place_value(int stage) const {
        __syncwarp();
        if (has_new_row())
            Values::place(value_stage(stage), block.position % KEYS, t, placed + Placed::VALUE, reinterpret_cast<const half2 *>(placed + Placed::VALUE_GROUPS));
    }
    __device__ __forceinline__ void append(int stage) const {
        if (!has_new_row()) return;
        const uint32_t row = block.rows.row_of(block.position);
        keys.append(key_stage(stage), row, t), values.append(value_stage(stage), row, t);
    }

    // As of a HalfRing.
    __device__ __forceinline__ void multiply(float (&s)[4], const uint4 (&q)[CHUNKS], int stage) const {
        __syncwarp();  // groups have been copied by others
        unsigned char *const from = key_stage(stage);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = 0;
#pragma unroll
        for (int group = 0; group < Keys::GROUPS; ++group) {
            float products[4] = {}, odd[4] = {};
#pragma unroll
            for (int eight = 0; eight < Keys::EIGHTS; ++eight) {
                uint4 low = make_uint4(0, 0, 0, 0), high = low;
                if (Keys::has_group(group, t)) {
                    low = KvCodes<KEY_BITS>::raised(Keys::codes_at(from, 0, group) + eight * KEY_BITS);
                    high = KvCodes<KEY_BITS>::raised(Keys::codes_at(from, 1, group) + eight * KEY_BITS);
                }
                multiply_eight<false>(products, odd, low, high, q[group * Keys::EIGHTS + eight]);
            }
            // Of heads 2t and 2t + 1.
            const float2 sums = reinterpret_cast<const float2 *>(placed + Placed::SUMS)[group * (HEADS / 2) + t];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 of_group = __half22float2(Keys::groups_at(from, g + half * 8)[group]);
                const float offset = __fmaf_rn(-KvCodes<KEY_BITS>::MAGIC, of_group.x, of_group.y);
#pragma unroll
                for (int head = 0; head < 2; ++head) {
                    const int i = half * 2 + head;
                    s[i] = __fmaf_rn(of_group.x, products[i] + odd[i], __fmaf_rn(offset, head ? sums.y : sums.x, s[i]));
                }
            }
        }
        const float2 units = reinterpret_cast<const float2 *>(placed + Placed::UNITS)[t];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] *= i % 2 ? units.y : units.x;
    }

    // Those of the stage, as halves.
    __device__ __forceinline__ const unsigned char *value_rows(int stage) const {
        __syncwarp();  // groups have been copied by others
        unsigned char *const from = value_stage(stage);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int group = 0; group < Values::GROUPS; ++group) {
                if (!Values::has_group(group, t)) continue;
                const half2 of_group = Values::groups_at(from, g + half * 8)[group];
                uint4 *to = reinterpret_cast<uint4 *>(memory + (half * 8 + g) * VALUE_ROW + (group * 4 + t) * (Values::PER_LANE * 2));
#pragma unroll
                for (int eight = 0; eight < Values::EIGHTS; ++eight)
                    to[eight] = KvCodes<VALUE_BITS>::numbers(Values::codes_at(from, half, group) + eight * VALUE_BITS, of_group);
            }
        return memory;
    }

    __device__ __forceinline__ void finish(const WarpResults &results) const {
        if constexpr (!KvCodes<VALUE_BITS>::ROTATED) {
            finish_to_y<4>(p, block, results, p.dtype);
        } else {
            // Behind the results.
            float *outputs = results.total + ATTEND_WARPS * HEADS;
            const auto store = [&](int head, int d, const Numbers<4> &sums) {
#pragma unroll
                for (int i = 0; i < 4; ++i) outputs[head * D + d + i] = sums.at[i];
            };
            if (!cq::finish<4>(p, block, results, store)) return;
            __syncthreads();
            for (uint32_t which = threadIdx.x / 32; which < block.heads; which += ATTEND_WARPS) {
                auto head = HeadOfLanes<D>::of([&](int i) { return outputs[which * D + i]; });
                head.rotate();
                head.each([&](int i, float x) { store_output(p, block.first_head + which, D, i, p.dtype, x); });
            }
        }
    }
};

}  // namespace cq
