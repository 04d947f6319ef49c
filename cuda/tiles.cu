// tiles_{a1,..,mxfp8}_{f16,bf16}: the products of many pairs with the experts that tokens chose (CqExperts), on
// tensor cores, of weights that are decoded to the dtype of x.
//
// Grid (blocks that cover the rows of an expert, tiles). A block multiplies 128 rows of weights by up to 64 rows of
// x, which it gathers; each of its 8 warps 16 rows of weights by all of x, so that every weight is decoded once for
// 64 rows. If gate and up are joined, a warp's rows 0..8 are of gate and its rows 8..16 the same rows of up.
//
// Lanes load weights as they lie in the checkpoint, LANE consecutive ones of a row, and decode eight of them to the A
// fragments of two multiplications. x lies in shared memory such that the lane of B that meets those eight weights
// finds its elements in one load of 16 bytes. x of the step after is on its way meanwhile.
#include "experts.cuh"
#include "formats/scalar.cuh"

namespace {

using namespace cq;
using namespace cq::scalar;

constexpr int THREADS = 256;
constexpr int COLUMNS = 64;  // rows of x
constexpr int COLUMN_TILES = COLUMNS / 8;

// How a step along k is divided among the four lanes of a row.
template <class F> struct Step {
    static constexpr int LANE = F::GROUP == 16 ? 16 : 32;  // of one group
    static constexpr int OCTETS = LANE / 8;
    static constexpr int WORDS = LANE * F::BITS / 32;
    static constexpr int K = 4 * LANE;
    static constexpr int WIDEST_LOAD = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
};

// What a lane loads of its two rows for one step.
template <class F> struct Loaded {
    uint32_t words[2][Step<F>::WORDS];
    GroupParameters group[2];
};

// Where a lane finds its rows.
template <class F> struct LaneRows {
    CqMatrix matrix[2];  // of the expert
    size_t row[2];
    bool wide;

    __device__ __forceinline__ void load(Loaded<F> &loaded, const CqExperts &p, const float (&global_scale)[2], uint32_t k) const {
        using S = Step<F>;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Zeros past the end, whatever x is there.
#pragma unroll
            for (int i = 0; i < S::WORDS; ++i) loaded.words[r][i] = 0;
            loaded.group[r] = {};
            if (k >= p.k) continue;
            const uint32_t group_size = group_size_of<F>(p.group_size);
            const uint32_t *from = matrix[r].packed + row[r] * words_of_row<F::BITS>(p.k) + k / S::LANE * S::WORDS;
            if (wide)
#pragma unroll
                for (int i = 0; i < S::WORDS; i += S::WIDEST_LOAD) load_words<S::WIDEST_LOAD, true>(loaded.words[r] + i, from + i);
            else
#pragma unroll
                for (int i = 0; i < S::WORDS; ++i) load_words<1, true>(loaded.words[r] + i, from + i);
            loaded.group[r] = load_parameters<F>(matrix[r], row[r] * (p.k / group_size) + k / group_size, global_scale[r]);
        }
    }
};

// x of two steps: [octet of a lane][row of x][lane of four][8 elements].
template <class F> struct StagedX {
    unsigned char *memory;

    __device__ __forceinline__ uint4 *eight(int stage, int octet, int column, int lane) const {
        return reinterpret_cast<uint4 *>(memory) + ((stage * Step<F>::OCTETS + octet) * COLUMNS + column) * 4 + lane;
    }

    // Starts to copy the step at k0; what is past the end of k or of the tile becomes zeros.
    __device__ __forceinline__ void start(const CqExperts &p, const uint32_t *rows, uint32_t count, int stage, uint32_t k0) const {
        using S = Step<F>;
        constexpr int EIGHTS = S::K / 8;
        for (int i = threadIdx.x; i < COLUMNS * EIGHTS; i += THREADS) {
            const int column = i / EIGHTS, eight_ = i % EIGHTS;
            const uint32_t k = k0 + eight_ * 8;
            const bool there = uint32_t(column) < count && k < p.k;
            const uint16_t *from = static_cast<const uint16_t *>(p.x) + (there ? size_t(rows[column]) * p.k + k : 0);
            copy_sixteen_bytes(eight(stage, eight_ % S::OCTETS, column, eight_ / S::OCTETS), from, there);
        }
        commit_copies();
    }
};

template <bool BF16> __device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
    if constexpr (!BF16) return as_bits(__floats2half2_rn(first, second));
    return uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(second))) << 16 | __bfloat16_as_ushort(__float2bfloat16_rn(first));
}

template <class F, bool BF16> __device__ __forceinline__ void multiply_tile(const CqExperts &p) {
    using S = Step<F>;
    CQ_DYNAMIC_SHARED(memory);
    __shared__ uint32_t rows_of_x[COLUMNS];
    const StagedX<F> x{memory};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const bool gated = p.gating != CQ_NOT_GATED;
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const Pairs pairs(p, blockIdx.y);
    const uint32_t count = pairs.tile.count;
    if (count == 0) return;
    const ChosenExpert expert(p, pairs.tile.expert);
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) rows_of_x[i] = pairs.pair(i) / p.pairs_of_x;
    __syncthreads();

    // Rows past the end repeat the last one; their products are not stored.
    const uint32_t rows_of_matrix = p.factor[0].matrix.rows;
    const uint32_t first = gated ? (blockIdx.x * 8 + warp) * 8 : (blockIdx.x * 8 + warp) * 16;
    const uint32_t row[2] = {first + g, gated ? first + g : first + g + 8};
    LaneRows<F> rows;
    float global_scale[2];
    uintptr_t addresses = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int factor = gated ? r : 0;
        rows.matrix[r] = p.factor[factor].matrix;
        rows.row[r] = expert.row(rows.matrix[r], min(row[r], rows_of_matrix - 1));
        global_scale[r] = expert.global_scale(p, factor);
        addresses |= reinterpret_cast<uintptr_t>(rows.matrix[r].packed);
    }
    rows.wide = addresses % (4 * S::WIDEST_LOAD) == 0 && words_of_row<F::BITS>(p.k) % S::WIDEST_LOAD == 0;

    float sums[COLUMN_TILES][4] = {};
    Loaded<F> now, next;
    x.start(p, rows_of_x, count, 0, 0);
    rows.load(next, p, global_scale, t * S::LANE);
    int stage = 0;
    for (uint32_t k0 = 0; k0 < p.k; k0 += S::K, stage ^= 1) {
        now = next;
        x.start(p, rows_of_x, count, stage ^ 1, k0 + S::K);
        rows.load(next, p, global_scale, k0 + S::K + t * S::LANE);
        wait_for_copies<1>();
        __syncthreads();
        const uint4 *of_lane = x.eight(stage, 0, g, t);
#pragma unroll
        for (int octet = 0; octet < S::OCTETS; ++octet) {
            uint32_t a[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int four = 0; four < 2; ++four) {
                    float weight[4];
                    decode_four<F>(octet_of<F::BITS>(now.words[r], octet), four * 4, now.group[r], weight);
                    a[r][four * 2] = rounded_pair<BF16>(weight[0], weight[1]);
                    a[r][four * 2 + 1] = rounded_pair<BF16>(weight[2], weight[3]);
                }
            const uint32_t low[4] = {a[0][0], a[1][0], a[0][1], a[1][1]}, high[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
            for (int tile = 0; tile < COLUMN_TILES; ++tile) {
                // Two by two, for branches take time as well.
                if (tile % 2 == 0 && uint32_t(tile * 8) >= count) break;
                const uint4 b = of_lane[(octet * COLUMNS + tile * 8) * 4];
                mma_m16n8k16<BF16>(sums[tile], low, b.x, b.y);
                mma_m16n8k16<BF16>(sums[tile], high, b.z, b.w);
            }
        }
        __syncthreads();
    }

    // The lane holds columns 2t and 2t + 1 of its two rows.
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint32_t column = tile * 8 + 2 * t + j;
            if (column >= count) continue;
            const size_t y = size_t(pairs.pair(column)) * rows_of_matrix;
            auto product = [&](int r) { return expert.with_bias(p, gated ? r : 0, row[r], sums[tile][r * 2 + j]); };
            auto store = [&](int r, float value) {
                store_float(p.factor[0].y, y + row[r], p.y_dtype, expert.exists ? value : not_a_number());
            };
            if (gated) {
                if (row[0] < rows_of_matrix) store(0, joined(p, product(0), product(1)));
            } else {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (row[r] < rows_of_matrix) store(r, product(r));
            }
        }
}

}  // namespace

#define TILE_KERNELS(suffix, Format)                                                                  \
    CQ_KERNEL(tiles_##suffix##_f16, CqExperts, THREADS, 2) { multiply_tile<Format, false>(p); } \
    CQ_KERNEL(tiles_##suffix##_bf16, CqExperts, THREADS, 2) { multiply_tile<Format, true>(p); }
CQ_FOR_EVERY_FORMAT(TILE_KERNELS)
