// tiles_<format>_{f16,bf16}: the GEMM of many pairs with the experts that tokens chose (CqExperts), on
// tensor cores, of weights that are dequantized to the dtype of x.
//
// Grid (blocks that cover the rows of an expert, tiles). A block multiplies 128 rows of weights by up to 64 rows of
// x, which it gathers; each of its 8 warps 16 rows of weights by all of x, so that every weight is dequantized once for
// 64 rows. If gate and up are joined, a warp's rows 0..8 are of gate and its rows 8..16 the same rows of up.
//
// Lanes load weights as they lie in the checkpoint, LANE consecutive ones of a row, and dequantize eight of them to the A
// fragments of two multiplications. x lies in shared memory such that the lane of B that meets those eight weights
// finds its elements in one load of 16 bytes. x of the step after is on its way meanwhile.
#include "experts.cuh"
#include "formats/all.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS;
constexpr int COLUMNS = CQ_TILE_COLUMNS;  // rows of x
static_assert(CQ_TILE_ROWS == THREADS / 32 * 16, "a row tile for each warp");
constexpr int COLUMN_TILES = COLUMNS / 8;

// How a step along k is divided among the four lanes of a row.
template <class F> struct Step {
    static constexpr int LANE = LANE_WEIGHTS<F>;
    static constexpr int OCTETS = LANE / 8;
    static constexpr int WORDS = LANE * F::BITS / 32;
    static constexpr int K = 4 * LANE;
    static constexpr int WIDEST_LOAD = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
};

// What a lane loads of its two rows for one step.
template <class F> struct Loaded {
    uint32_t words[2][Step<F>::WORDS];
    float scale[2][LANE_GROUPS<F>], bias[2][LANE_GROUPS<F>];  // of weights as elements: that of code zero
};

// Where a lane finds its rows, from its share of the next step on.
template <class F> struct LaneRows {
    const uint32_t *words[2];
    CqMatrix matrix[2];  // scales and biases are those of the row
    float global_scale[2];
    uint32_t k, log_group_size;
    bool wide;

    __device__ __forceinline__ LaneRows(const CqExperts &p, const ChosenExpert &expert, const uint32_t (&row)[2], int lane) {
        using S = Step<F>;
        const uint32_t groups = p.k / group_size_of<F>(p.group_size);
        const bool gated = p.gating != CQ_NOT_GATED;
        uintptr_t addresses = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int operand = gated ? r : 0;
            matrix[r] = p.operand[operand].matrix;
            global_scale[r] = expert.global_scale(p, operand);
            addresses |= reinterpret_cast<uintptr_t>(matrix[r].packed);
            // Rows past the end repeat the last one; their outputs are not stored.
            const size_t at = expert.row(matrix[r], min(row[r], matrix[r].rows - 1));
            words[r] = matrix[r].packed + at * words_of_row<F::BITS>(p.k) + lane * S::WORDS;
            auto of_row = [&](const void *groups_of_all, uint32_t dtype) -> const void * {
                return groups_of_all ? static_cast<const char *>(groups_of_all) + at * groups * scale_bytes<F::SCALES>(dtype) : nullptr;
            };
            matrix[r].scales = of_row(matrix[r].scales, matrix[r].scale_dtype);
            matrix[r].biases = of_row(matrix[r].biases, matrix[r].biases_dtype);
            if constexpr (F::SCALES == Scale::SuperBlock) {
                const size_t blocks = at * (p.k / SUPER_BLOCK);
                matrix[r].scale_units = static_cast<const uint16_t *>(matrix[r].scale_units) + blocks;
                if (F::HAS_BIASES) matrix[r].bias_units = static_cast<const uint16_t *>(matrix[r].bias_units) + blocks;
            }
        }
        wide = addresses % (4 * S::WIDEST_LOAD) == 0 && words_of_row<F::BITS>(p.k) % S::WIDEST_LOAD == 0;
        log_group_size = 31 - __clz(group_size_of<F>(p.group_size));
        k = lane * S::LANE;
    }

    // Loads the lane's share of a step, zeros if it is past the end, whatever x is there.
    __device__ __forceinline__ void load(Loaded<F> &loaded, uint32_t end) {
        using S = Step<F>;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < S::WORDS; ++i) loaded.words[r][i] = 0;
#pragma unroll
            for (int i = 0; i < LANE_GROUPS<F>; ++i) loaded.scale[r][i] = loaded.bias[r][i] = 0;
            if (k >= end) continue;
            if (wide)
#pragma unroll
                for (int i = 0; i < S::WORDS; i += S::WIDEST_LOAD) load_words<S::WIDEST_LOAD, true>(loaded.words[r] + i, words[r] + i);
            else
#pragma unroll
                for (int i = 0; i < S::WORDS; ++i) load_words<1, true>(loaded.words[r] + i, words[r] + i);
#pragma unroll
            for (int i = 0; i < LANE_GROUPS<F>; ++i) {
                const GroupScale group = F::load_group(matrix[r], (k >> log_group_size) + i, global_scale[r]);
                loaded.scale[r][i] = group.scale, loaded.bias[r][i] = group.bias - group.zero_point * group.scale;
            }
            words[r] += 4 * S::WORDS;
        }
        k += S::K;
    }
};

// x of two steps: [octet of a lane][row of x][lane of four][8 elements].
template <class F> struct StagedX {
    static constexpr int EIGHTS = Step<F>::K / 8;             // of a row, in one step
    static constexpr int NEIGHBOURS = THREADS / EIGHTS;       // rows that are copied at a time
    static constexpr int COPIES = COLUMNS / NEIGHBOURS;       // of a thread
    uint4 *memory;
    const uint16_t *from;       // all of x
    uint32_t row[COPIES];       // the thread's, in it
    uint32_t there = 0;         // a bit for each row that there is
    uint32_t k;                 // where its share begins

    // Rows of x are those of the first `count` of `rows`.
    __device__ __forceinline__ StagedX(unsigned char *memory_, const CqExperts &p, const uint32_t *rows, uint32_t count)
        : memory(reinterpret_cast<uint4 *>(memory_)), from(static_cast<const uint16_t *>(p.x)), k(threadIdx.x % EIGHTS * 8) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const uint32_t column = threadIdx.x / EIGHTS + i * NEIGHBOURS;
            there |= uint32_t(column < count) << i;
            row[i] = column < count ? rows[column] : 0;
        }
    }

    __device__ __forceinline__ const uint4 *of_lane(int stage, int column, int lane) const {
        return memory + (stage * Step<F>::OCTETS * COLUMNS + column) * 4 + lane;
    }

    // Starts to copy the next step; what is past the end of k or of the tile becomes zeros.
    __device__ __forceinline__ void start(int stage, uint32_t end) {
        using S = Step<F>;
        const int eight = threadIdx.x % EIGHTS, column = threadIdx.x / EIGHTS;
        uint4 *to = memory + ((stage * S::OCTETS + eight % S::OCTETS) * COLUMNS + column) * 4 + eight / S::OCTETS;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const bool copied = k < end && (there >> i & 1);
            copy_bytes<16>(to + i * NEIGHBOURS * 4, copied ? from + size_t(row[i]) * end + k : from, copied);
        }
        commit_copies();
        k += S::K;
    }
};

template <bool BF16> __device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
    if constexpr (!BF16) return as_bits(__floats2half2_rn(first, second));
    return uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(second))) << 16 | __bfloat16_as_ushort(__float2bfloat16_rn(first));
}

template <class F, bool BF16> __device__ __forceinline__ void multiply_tile(const CqExperts &p) {
    using S = Step<F>;
    CQ_DYNAMIC_SHARED(memory);
    // Behind two steps of x.
    uint32_t *rows_of_x = reinterpret_cast<uint32_t *>(memory + 2 * S::K * COLUMNS * sizeof(half));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const bool gated = p.gating != CQ_NOT_GATED;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Pairs pairs(p, blockIdx.y);
    const uint32_t count = pairs.tile.count;
    if (count == 0) return;
    const ChosenExpert expert(p, pairs.tile.expert);
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) rows_of_x[i] = pairs.pair(i) / p.pairs_of_x;
    __syncthreads();

    const uint32_t rows_of_matrix = p.operand[0].matrix.rows;
    const uint32_t first = (blockIdx.x * 8 + warp) * (gated ? 8 : 16);
    const uint32_t row[2] = {first + g, gated ? first + g : first + g + 8};
    LaneRows<F> rows(p, expert, row, t);
    StagedX<F> x(memory, p, rows_of_x, count);

    float sums[COLUMN_TILES][4] = {};
    Loaded<F> now, next;
    x.start(0, p.k);
    rows.load(next, p.k);
    int stage = 0;
    for (uint32_t k0 = 0; k0 < p.k; k0 += S::K, stage ^= 1) {
        now = next;
        wait_for_copies<0>();
        __syncthreads();  // all have this step, and have multiplied the one before
        x.start(stage ^ 1, p.k);  // after the last step zeros
        rows.load(next, p.k);
        const uint4 *of_lane = x.of_lane(stage, g, t);
#pragma unroll
        for (int octet = 0; octet < S::OCTETS; ++octet) {
            const int group = octet * LANE_GROUPS<F> / S::OCTETS;
            uint32_t a[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int four = 0; four < 2; ++four) {
                    float weight[4];
                    F::elements(octet_of<F::BITS>(now.words[r], octet), four * 4, weight);
#pragma unroll
                    for (float &element : weight) element = __fmaf_rn(element, now.scale[r][group], now.bias[r][group]);
                    a[r][four * 2] = rounded_pair<BF16>(weight[0], weight[1]);
                    a[r][four * 2 + 1] = rounded_pair<BF16>(weight[2], weight[3]);
                }
            const uint32_t low[4] = {a[0][0], a[1][0], a[0][1], a[1][1]}, high[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
#pragma unroll
            for (int tile = 0; tile < COLUMN_TILES; tile += 2) {
                if (uint32_t(tile * 8) >= count) break;
                const uint4 first_b = of_lane[(octet * COLUMNS + tile * 8) * 4], second_b = of_lane[(octet * COLUMNS + tile * 8 + 8) * 4];
                // Neighbours do not wait for each other's sums.
                mma_m16n8k16<BF16>(sums[tile], low, first_b.x, first_b.y);
                mma_m16n8k16<BF16>(sums[tile + 1], low, second_b.x, second_b.y);
                mma_m16n8k16<BF16>(sums[tile], high, first_b.z, first_b.w);
                mma_m16n8k16<BF16>(sums[tile + 1], high, second_b.z, second_b.w);
            }
        }
    }
    wait_for_copies<0>();

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
                store_float(p.operand[0].y, y + row[r], p.y_dtype, expert.exists ? value : not_a_number());
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

#define TILE_KERNELS(name, Format)                                                                  \
    CQ_KERNEL(tiles_##name##_f16, CqExperts, THREADS, 2) { multiply_tile<Format, false>(p); } \
    CQ_KERNEL(tiles_##name##_bf16, CqExperts, THREADS, 2) { multiply_tile<Format, true>(p); }
CQ_FORMATS(TILE_KERNELS)
