// y = x w^T for more rows of x than the GEMV takes, on tensor cores, straight from the row-major packed weights; also of the
// pairs with the experts that tokens chose, those of one expert together (CqTiles).
//
// A block multiplies 128 rows of weights by some rows of x, its columns, a step of 128 elements of k at a time. Weights, x and
// its sums over groups come through a ring of copies in shared memory, several steps ahead. Each warp has its rows of weights
// and its columns. Lanes read eight codes of a row at a time, an octet, and make halves of them, which *are* A fragments; x has
// been brought into the order that B fragments then need (tiles_x.cu). Codes become halves exactly. The products of a group
// are added up by themselves; its scale, and its bias times the sum of x, are applied to that sum in f32.
//
// All steps of all tiles are one list, of which each block has an equal part (stream-K): of as many blocks on every card, so
// that sums are rounded alike. Of a tile that several blocks have parts of, the last one to arrive adds them up in the order
// of k.
#pragma once
#include "experts.cuh"
#include "finish.cuh"
#include "formats/all.cuh"
#include "parts.cuh"
#include "tiles_shape.cuh"

namespace cq {

// The rows of weights of a block, each of which has a place among 128. Places 0..8 of each 16 are of the first operand, the
// others of the second: of gate and up that are joined these are the same rows, else the operands are the same.
struct TileRows {
    uint32_t first;
    bool joined;

    static __device__ __forceinline__ uint32_t operand(uint32_t place) { return place / 8 % 2; }

    static __device__ __forceinline__ uint32_t of_block(const CqTiles &p) { return p.gating != CQ_NOT_GATED ? CQ_TILE_ROWS / 2 : CQ_TILE_ROWS; }
    __device__ __forceinline__ TileRows(const CqTiles &p, uint32_t block) : first(block * of_block(p)), joined(p.gating != CQ_NOT_GATED) {}
    __device__ __forceinline__ uint32_t row(uint32_t place) const { return first + (joined ? place / 16 * 8 + place % 8 : place); }
    // Rows past the end repeat the last one; their outputs are not stored.
    __device__ __forceinline__ uint32_t there(const CqTiles &p, uint32_t place) const { return min(row(place), p.operand[0].matrix.rows - 1); }
};

// Copies of weights: what a thread brings of a step.
template <class Format, class Shape> struct RowCopies {
    uint32_t row[Shape::COPIES];  // the first word of each row, in the stack of all experts

    // Copy i is of this one, in this place.
    static __device__ __forceinline__ uint32_t index(int i) { return threadIdx.x + i * Shape::THREADS; }
    static __device__ __forceinline__ uint32_t place(uint32_t index) { return index / Shape::COPIES_OF_ROW; }

    __device__ __forceinline__ RowCopies(const CqTiles &p, const ChosenExpert &expert, const TileRows &rows) {
#pragma unroll
        for (int i = 0; i < Shape::COPIES; ++i) {
            const uint32_t there = rows.there(p, min(place(index(i)), CQ_TILE_ROWS - 1u));
            row[i] = uint32_t(expert.row(p.operand[0].matrix, there)) * p.words_of_row;
        }
    }

    __device__ __forceinline__ void start(const CqTiles &p, unsigned char *to, uint32_t step) const {
#pragma unroll
        for (int i = 0; i < Shape::COPIES; ++i) {
            const uint32_t which = index(i);
            if (CQ_TILE_ROWS * Shape::COPIES_OF_ROW % Shape::THREADS && which >= CQ_TILE_ROWS * Shape::COPIES_OF_ROW) continue;
            const uint32_t of_row = step * (CQ_TILE_K / 32 * Format::BITS) + which % Shape::COPIES_OF_ROW * 4;
            unsigned char *const there = to + place(which) * Shape::ROW_BYTES + which % Shape::COPIES_OF_ROW * 16;
            const uint32_t *packed = TileRows::operand(place(which)) ? p.operand[1].matrix.packed : p.operand[0].matrix.packed;
            // Words past the end of a row are zeros.
            if (p.whole_copies) {
                copy_bytes<16>(there, packed + (of_row < p.words_of_row ? row[i] + of_row : row[i]), of_row < p.words_of_row);
            } else {
#pragma unroll 1
                for (uint32_t word = 0; word < 4; ++word) {
                    const bool is_any = of_row + word < p.words_of_row;
                    copy_bytes<4>(there + word * 4, packed + (is_any ? row[i] + of_row + word : row[i]), is_any);
                }
            }
        }
    }
};

// Where the parts of the ring are.
template <class Format, class Shape> struct TileMemory {
    unsigned char *memory;
    uint32_t columns, stages;

    __device__ __forceinline__ TileMemory(unsigned char *memory_, const CqTiles &p) : memory(memory_), columns(p.columns), stages(p.stages) {}
    __device__ __forceinline__ uint32_t stage_bytes() const {
        return CQ_TILE_ROWS * Shape::ROW_BYTES + columns * Shape::COLUMN_BYTES + Shape::SUM_BYTES;
    }
    __device__ __forceinline__ unsigned char *weights(uint32_t stage) const { return memory + stage * stage_bytes(); }
    // [column][32 elements of k][lane of four][8 halves], of odd columns every two times 32 elements swapped: the fragments
    // of two columns then meet no bank twice.
    __device__ __forceinline__ uint4 *x(uint32_t stage) const { return reinterpret_cast<uint4 *>(weights(stage) + CQ_TILE_ROWS * Shape::ROW_BYTES); }
    static __device__ __forceinline__ uint32_t eight(uint32_t column, uint32_t octet, uint32_t lane) {
        return column * (CQ_TILE_K / 8) + (octet ^ (column & 1)) * 4 + lane;
    }
    // [group][column]
    __device__ __forceinline__ float *sums_of_x(uint32_t stage) const {
        return reinterpret_cast<float *>(weights(stage) + CQ_TILE_ROWS * Shape::ROW_BYTES + columns * Shape::COLUMN_BYTES);
    }
    // Finished sums take the place of the ring.
    __device__ __forceinline__ float *sums() const { return reinterpret_cast<float *>(memory); }
    __device__ __forceinline__ uint32_t *rows_of_x() const {
        return reinterpret_cast<uint32_t *>(memory + max(stages * stage_bytes(), uint32_t(columns * Shape::COLUMN_OF_SUMS * 4)));
    }
};

// Starts to copy x, and its sums, of a step.
template <class Format, class Shape>
__device__ __forceinline__ void start_x(const CqTiles &p, const TileMemory<Format, Shape> &memory, uint32_t stage, uint32_t step) {
    constexpr uint32_t EIGHTS = CQ_TILE_K / 8, NEIGHBOURS = Shape::THREADS / EIGHTS;
    const uint32_t *rows = memory.rows_of_x();
    const uint32_t eight = threadIdx.x % EIGHTS, first = threadIdx.x / EIGHTS;
    const uint16_t *from = static_cast<const uint16_t *>(p.halves) + step * CQ_TILE_K + eight * 8;
    uint4 *to = memory.x(stage) + memory.eight(first, eight / 4, eight % 4);
#pragma unroll
    for (uint32_t column = 0; column < Shape::COLUMNS; column += NEIGHBOURS) {
        if (column >= memory.columns) break;
        copy_bytes<16>(to + column * EIGHTS, from + size_t(rows[first + column]) * p.k_padded, true);
    }
    if constexpr (Format::HAS_BIASES) {
        constexpr uint32_t COUNT = Shape::COLUMNS * Shape::GROUPS_OF_STEP;
        float *sums = memory.sums_of_x(stage);
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i += Shape::THREADS) {
            const uint32_t group = (i + threadIdx.x) / Shape::COLUMNS, column = threadIdx.x % Shape::COLUMNS;
            if (i + threadIdx.x >= COUNT || column >= memory.columns) break;
            const float *of_row = p.sums + size_t(rows[column]) * (p.k_padded / Shape::GROUP);
            copy_bytes<4>(sums + i + threadIdx.x, of_row + step * Shape::GROUPS_OF_STEP + group, true);
        }
    }
}

// Bits of the scales of a pass: loaded one pass ahead.
template <class Shape> struct PassScales {
    uint32_t scale[Shape::ROW_TILES][2][Shape::GROUPS], bias[Shape::ROW_TILES][2][Shape::GROUPS];
    uint32_t unit[Shape::ROW_TILES][2], bias_unit[Shape::ROW_TILES][2];
};

// Where a lane finds the scales of its rows, g of each tile in the first operand and g + 8 in the second.
template <class Format, class Shape> struct LaneScales {
    static constexpr uint32_t GROUPS_OF_BLOCK = SUPER_BLOCK / Shape::GROUP;
    const CqTiles &p;
    uint32_t group[Shape::ROW_TILES][2];  // the first of each row, in the stack of all experts

    __device__ __forceinline__ LaneScales(const CqTiles &p_, const ChosenExpert &expert, const TileRows &rows, uint32_t first_place) : p(p_) {
#pragma unroll
        for (int tile = 0; tile < Shape::ROW_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t there = rows.there(p, first_place + tile * 16 + half * 8);
                group[tile][half] = uint32_t(expert.row(p.operand[0].matrix, there)) * (p.k >> p.log_group_size);
            }
    }

    // Those of the pass from element k on. Those past the end, of zeros in x, are those of the last group.
    __device__ __forceinline__ void load(PassScales<Shape> &pass, uint32_t k) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const CqMatrix &matrix = p.operand[half].matrix;
#pragma unroll
            for (int tile = 0; tile < Shape::ROW_TILES; ++tile) {
#pragma unroll
                for (int i = 0; i < Shape::GROUPS; ++i) {
                    const uint32_t at = group[tile][half] + (min(k + i * Shape::GROUP, p.k - 1) >> p.log_group_size);
                    pass.scale[tile][half][i] = scale_bits<Format::SCALES>(matrix.scales, at);
                    if constexpr (Format::HAS_BIASES) pass.bias[tile][half][i] = scale_bits<Format::SCALES>(matrix.biases, at);
                }
                if constexpr (Format::HAS_UNITS) {
                    const uint32_t at = group[tile][half] / GROUPS_OF_BLOCK + min(k, p.k - 1) / SUPER_BLOCK;
                    pass.unit[tile][half] = static_cast<const uint16_t *>(matrix.scale_units)[at];
                    if constexpr (Format::HAS_BIASES) pass.bias_unit[tile][half] = static_cast<const uint16_t *>(matrix.bias_units)[at];
                }
            }
        }
    }

    // Scales of both operands are of one dtype, as are biases.
    __device__ __forceinline__ float scale(const PassScales<Shape> &pass, int tile, int half, int i) const {
        const float scale = scale_from_bits<Format::SCALES>(pass.scale[tile][half][i], p.operand[0].matrix.scale_dtype);
        return Format::HAS_UNITS ? scale * half_bits_to_float(pass.unit[tile][half]) : scale;
    }
    __device__ __forceinline__ float bias(const PassScales<Shape> &pass, int tile, int half, int i) const {
        const float bias = scale_from_bits<Format::SCALES>(pass.bias[tile][half][i], p.operand[0].matrix.biases_dtype);
        return Format::HAS_UNITS ? bias * half_bits_to_float(pass.bias_unit[tile][half]) : bias;
    }
};

// So many bits of a row, 32 at most, from bit `bit` on; reads no word that holds none of them.
__device__ __forceinline__ uint32_t bits_of_row(const uint32_t *row, uint32_t bit, int count) {
    const uint32_t *word = row + bit / 32;
    const uint32_t shift = bit % 32;
    return __funnelshift_r(word[0], shift + count > 32 ? word[1] : 0, shift);
}

// The codes that a lane has of 32 elements of a row: eight neighbours; of groups of 16, four neighbours of each, in such an
// order that the first two pairs of halves are of the first group.
template <class Format, class Shape> __device__ __forceinline__ Octet octet_of_lane(const uint32_t *row, int t) {
    constexpr int BITS = Format::BITS;
    if constexpr (Shape::GROUP == 16) {
        constexpr uint64_t TWO = (1u << (2 * BITS)) - 1;
        const uint64_t first = bits_of_row(row, 4 * t * BITS, 4 * BITS), second = bits_of_row(row, (16 + 4 * t) * BITS, 4 * BITS);
        uint64_t octet;
        if constexpr (Format::SPLIT)
            octet = (first & TWO) | (second & TWO) << (2 * BITS) | (first >> (2 * BITS) & TWO) << (4 * BITS) | (second >> (2 * BITS) & TWO) << (6 * BITS);
        else
            octet = (first & ((1u << (4 * BITS)) - 1)) | second << (4 * BITS);
        return {uint32_t(octet), uint32_t(octet >> 32)};
    } else if constexpr (BITS == 8) {
        const uint2 two = reinterpret_cast<const uint2 *>(row)[t];
        return {two.x, two.y};
    } else if constexpr (BITS == 4) {
        return {row[t], 0};
    } else {
        const uint32_t bit = 8 * t * BITS, shift = bit % 32;
        const uint32_t first = row[bit / 32], second = shift + 8 * BITS > 32 ? row[bit / 32 + 1] : 0;
        return {__funnelshift_r(first, second, shift), second >> shift};
    }
}

// A warp's sums: of lane 4g + t those of rows g and g + 8 of each tile, columns 2t and 2t + 1.
template <class Shape> struct TileSums {
    float of[Shape::ROW_TILES][Shape::COLUMN_TILES][4] = {};
};

// Adds the products of one pass. `weights` begins at the lane's first row, `x`, of each 32 elements, at its column of the warp's first
// tile, and `sums_of_x` at its columns there, all at the pass.
template <class Format, class Shape>
__device__ __forceinline__ void multiply_pass(TileSums<Shape> &sums, const LaneScales<Format, Shape> &lane, const PassScales<Shape> &pass,
                                              const unsigned char *weights, const uint4 *const (&x)[Shape::OCTETS],
                                              const float *sums_of_x, uint32_t tiles_of_warp, int t) {
    constexpr int HALVES = HALVES_OF_WEIGHT<Format>;
    float scale[Shape::ROW_TILES][2][Shape::GROUPS], bias[Shape::ROW_TILES][2][Shape::GROUPS];
    uint32_t a[Shape::OCTETS][2][HALVES][Shape::ROW_TILES][4];
#pragma unroll
    for (int tile = 0; tile < Shape::ROW_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < Shape::GROUPS; ++i) {
                scale[tile][half][i] = lane.scale(pass, tile, half, i);
                if constexpr (Format::HAS_BIASES) bias[tile][half][i] = lane.bias(pass, tile, half, i);
            }
#pragma unroll
            for (int octet = 0; octet < Shape::OCTETS; ++octet) {
                const unsigned char *row = weights + (tile * 16 + half * 8) * Shape::ROW_BYTES + octet * 4 * Format::BITS;
                const Octet codes = octet_of_lane<Format, Shape>(reinterpret_cast<const uint32_t *>(row), t);
                uint32_t pairs[HALVES][4];
                if constexpr (HALVES == 1)
                    Format::octet_to_halves(codes, pairs[0]);
                else
                    Format::octet_to_halves(codes, pairs);
#pragma unroll
                for (int part = 0; part < HALVES; ++part)
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[octet][i / 2][part][tile][i % 2 * 2 + half] = pairs[part][i];
            }
        }
    // Two at a time, which do not wait for each other's sums.
    constexpr int TOGETHER = 2;
#pragma unroll
    for (int first = 0; first < Shape::COLUMN_TILES; first += TOGETHER) {
        if (uint32_t(first) >= tiles_of_warp) break;
        uint32_t b[TOGETHER][Shape::OCTETS][4];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
            for (int octet = 0; octet < Shape::OCTETS; ++octet) {
                const uint4 four = x[octet][(first + j) * 8 * (CQ_TILE_K / 8)];
                b[j][octet][0] = four.x, b[j][octet][1] = four.y, b[j][octet][2] = four.z, b[j][octet][3] = four.w;
            }
#pragma unroll
        for (int group = 0; group < Shape::GROUPS; ++group) {
            float c[TOGETHER][Shape::ROW_TILES][4] = {};
#pragma unroll
            for (int sixteen = 0; sixteen < 2 * Shape::OCTETS / Shape::GROUPS; ++sixteen) {
                const int octet = (group + sixteen) / 2, part_of_octet = (group + sixteen) % 2;
#pragma unroll
                for (int part = 0; part < HALVES; ++part)
#pragma unroll
                    for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                        for (int tile = 0; tile < Shape::ROW_TILES; ++tile)
                            mma_m16n8k16(c[j][tile], a[octet][part_of_octet][part][tile], b[j][octet][part_of_octet * 2], b[j][octet][part_of_octet * 2 + 1]);
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                float2 of_x = make_float2(0, 0);
                if constexpr (Format::HAS_BIASES) of_x = *reinterpret_cast<const float2 *>(sums_of_x + group * Shape::COLUMNS + (first + j) * 8);
#pragma unroll
                for (int tile = 0; tile < Shape::ROW_TILES; ++tile)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float &sum = sums.of[tile][first + j][i];
                        if constexpr (Format::HAS_BIASES) sum = __fmaf_rn(bias[tile][i / 2][group], i % 2 ? of_x.y : of_x.x, sum);
                        sum = __fmaf_rn(scale[tile][i / 2][group], c[j][tile][i], sum);
                    }
            }
        }
    }
}

// Some steps of one tile: its sums, in shared memory, [column][place of a row].
template <class Format, class Shape>
__device__ __forceinline__ void multiply_steps(const CqTiles &p, const TileMemory<Format, Shape> &memory, const ChosenExpert &expert, const TileRows &rows,
                                               uint32_t begin, uint32_t end) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t first_place = warp / Shape::COLUMN_WARPS * (Shape::ROW_TILES * 16) + g;
    const uint32_t columns_of_warp = memory.columns / Shape::COLUMN_WARPS, first_column = warp % Shape::COLUMN_WARPS * columns_of_warp;
    const RowCopies<Format, Shape> copies(p, expert, rows);
    const LaneScales<Format, Shape> lane_scales(p, expert, rows, first_place);
    uint32_t next_step = begin, next_stage = 0;
    auto start_next = [&] {
        if (next_step < end) {
            copies.start(p, memory.weights(next_stage), next_step);
            start_x(p, memory, next_stage, next_step);
        }
        commit_copies();
        ++next_step;
        next_stage = next_stage + 1 == memory.stages ? 0 : next_stage + 1;
    };
    for (uint32_t i = 1; i < memory.stages; ++i) start_next();

    TileSums<Shape> sums;
    PassScales<Shape> pass, next_pass;
    lane_scales.load(next_pass, begin * CQ_TILE_K);
    uint32_t stage = 0;
    for (uint32_t step = begin; step < end; ++step) {
        if (memory.stages == 2)
            wait_for_copies<0>();
        else if (memory.stages == 3)
            wait_for_copies<1>();
        else
            wait_for_copies<2>();
        __syncthreads();  // all have this step, and have multiplied the one before
        start_next();
        const unsigned char *weights = memory.weights(stage) + first_place * Shape::ROW_BYTES;
        const uint4 *x = memory.x(stage);
        const float *sums_of_x = memory.sums_of_x(stage) + first_column + 2 * t;
#pragma unroll(Shape::PASSES_AT_ONCE)
        for (int i = 0; i < Shape::PASSES; ++i) {
            pass = next_pass;
            lane_scales.load(next_pass, step * CQ_TILE_K + (i + 1) * Shape::PASS);
            const uint4 *of_pass[Shape::OCTETS];
#pragma unroll
            for (int octet = 0; octet < Shape::OCTETS; ++octet) of_pass[octet] = x + memory.eight(first_column + g, i * Shape::OCTETS + octet, t);
            multiply_pass<Format, Shape>(sums, lane_scales, pass, weights + i * (Shape::PASS / 8 * Format::BITS), of_pass,
                                         sums_of_x + i * Shape::GROUPS * Shape::COLUMNS, columns_of_warp / 8, t);
        }
        stage = stage + 1 == memory.stages ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < Shape::ROW_TILES; ++tile)
#pragma unroll
        for (int column = 0; column < Shape::COLUMN_TILES; ++column) {
            if (uint32_t(column) * 8 >= columns_of_warp) break;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                memory.sums()[(first_column + column * 8 + 2 * t + i % 2) * Shape::COLUMN_OF_SUMS + first_place + tile * 16 + i / 2 * 8] =
                    sums.of[tile][column][i];
        }
    __syncthreads();
}

// The rows of x of a tile, and what these are in y.
struct TileOfX {
    uint32_t expert, first, count;  // rows of y, or pairs
    const uint32_t *order;

    __device__ __forceinline__ TileOfX(const CqTiles &p, uint32_t index) : order(p.order) {
        const uint32_t most = p.columns / p.terms;
        if (order) {
            const CqTile tile = p.tiles[index];
            expert = tile.expert, first = tile.first, count = tile.count;
        } else {
            expert = 0, first = index * most, count = min(most, p.m - first);
        }
    }
    __device__ __forceinline__ uint32_t row_of_y(uint32_t i) const { return order ? order[first + i] : first + i; }
};

// Turns the sums of a tile, `total(column, place)`, into elements of y, by all threads of the block: each has one row of weights.
template <class Format, class Total>
__device__ __forceinline__ void store_tile(const CqTiles &p, const ChosenExpert &expert, const TileRows &rows, const TileOfX &tile,
                                           const uint32_t *rows_of_x, Total total) {
    const uint32_t outputs = TileRows::of_block(p), output = threadIdx.x & (outputs - 1);
    const uint32_t place = rows.joined ? output / 8 * 16 + output % 8 : output, row = rows.row(place), all = p.operand[0].matrix.rows;
    if (row >= all) return;
    const float scale[2] = {Format::OUT_SCALE * expert.global_scale(p, 0), Format::OUT_SCALE * expert.global_scale(p, 1)};
    // A bias of -0 changes nothing, not even the sign of a zero.
    const float bias[2] = {expert.with_bias(p, 0, row, -0.f), expert.with_bias(p, 1, row, -0.f)};
    for (uint32_t i = threadIdx.x / outputs; i < tile.count; i += CQ_THREADS / outputs) {
        auto product = [&](int operand) {
            float sum = 0;
            for (uint32_t column = i * p.terms; column < (i + 1) * p.terms; ++column)
                sum = __fmaf_rn(total(column, place + operand * 8), p.units[rows_of_x[column]], sum);
            return __fadd_rn(sum * scale[operand], bias[operand]);
        };
        float value = product(0);
        if (p.gating == CQ_CLAMPED) {
            value = joined(p, value, product(1));
        } else {
            value = activated(p.finish.activation, value);
            if (rows.joined) value *= product(1);
        }
        value = finished(p.finish, value);
        const CqOperand &operand = p.operand[0];
        const uint32_t row_of_y = tile.row_of_y(i);
        if (p.residual) value += load_float(p.residual, size_t(row_of_y) * all + row, p.y_dtype);
        store_float(operand.y, size_t(row_of_y) * operand.y_stride + row, p.y_dtype, expert.exists ? value : not_a_number());
    }
}

template <class Format, class Shape> __device__ __forceinline__ void multiply_tiles(const CqTiles &p) {
    CQ_DYNAMIC_SHARED(dynamic);
    const TileMemory<Format, Shape> memory(dynamic, p);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const uint32_t blocks_of_rows = (p.operand[0].matrix.rows + TileRows::of_block(p) - 1) / TileRows::of_block(p);
    const uint32_t most = p.columns / p.terms, tiles_of_x = p.order ? *p.tile_count : (p.m + most - 1) / most;
    const uint32_t steps = p.k_padded / CQ_TILE_K;
    // Steps are numbered tile by tile; neighbours have the same rows of weights.
    const uint64_t total = uint64_t(blocks_of_rows) * tiles_of_x * steps, blocks = min(uint64_t(gridDim.x), total);
    if (blockIdx.x >= blocks) return;
    auto begin_of = [&](uint64_t block) { return total * block / blocks; };
    auto block_of = [&](uint64_t step) { return uint32_t(((step + 1) * blocks - 1) / total); };

    const uint64_t begin = begin_of(blockIdx.x);
    uint32_t left = uint32_t(begin_of(blockIdx.x + 1) - begin);
    uint32_t number = uint32_t(begin / steps), first = uint32_t(begin % steps);
    while (left > 0) {
        const uint32_t last = min(steps, first + left);
        const TileRows rows(p, number / tiles_of_x);
        const TileOfX tile(p, number % tiles_of_x);
        const ChosenExpert expert(p, tile.expert);
        __syncthreads();  // the tile before has been stored
        for (uint32_t column = threadIdx.x; column < p.columns; column += CQ_THREADS) {
            // Columns past the end repeat the first one.
            const uint32_t i = column / p.terms < tile.count ? column / p.terms : 0;
            memory.rows_of_x()[column] = tile.row_of_y(i) / p.pairs_of_x * p.terms + column % p.terms;
        }
        __syncthreads();
        multiply_steps<Format, Shape>(p, memory, expert, rows, first, last);
        const float *sums = memory.sums();
        auto store = [&](auto total) { store_tile<Format>(p, expert, rows, tile, memory.rows_of_x(), total); };
        if (first == 0 && last == steps) {
            store([&](uint32_t column, uint32_t place) { return sums[column * Shape::COLUMN_OF_SUMS + place]; });
        } else {
            const uint32_t size = p.columns * CQ_TILE_ROWS;
            const uint64_t first_step = uint64_t(number) * steps;
            const uint32_t first_block = block_of(first_step), more_blocks = block_of(first_step + steps - 1) - first_block;
            // A block has two parts of tiles at most: where its share begins, and behind, where it ends. It begins in the midst of
            // this tile, but for the first one.
            float *const of_first = p.partial + (size_t(first_block) * 2 + (begin_of(first_block) < first_step)) * size;
            float *const of_others = p.partial + size_t(first_block) * 2 * size;
            float *mine = blockIdx.x == first_block ? of_first : of_others + size_t(blockIdx.x - first_block) * 2 * size;
            for (uint32_t i = threadIdx.x; i < size; i += CQ_THREADS) mine[i] = sums[i / CQ_TILE_ROWS * Shape::COLUMN_OF_SUMS + i % CQ_TILE_ROWS];
            if (last_of_parts(p.arrivals + first_block, more_blocks + 1))
                store([&](uint32_t column, uint32_t place) {
                    const uint32_t at = column * CQ_TILE_ROWS + place;
                    float sum = load_again(of_first + at);
#pragma unroll 4
                    for (uint32_t block = 1; block <= more_blocks; ++block) sum += load_again(of_others + size_t(block) * 2 * size + at);
                    return sum;
                });
        }
        left -= last - first;
        ++number, first = 0;
    }
}

}  // namespace cq

// Two blocks of few columns have room on a multiprocessor; before Ampere there are no registers for that.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define CQ_TILES_BLOCKS 1
#else
#define CQ_TILES_BLOCKS 2
#endif
#define CQ_TILES_OF(name, Format, group, columns, blocks) \
    CQ_KERNEL(tiles_##name##_c##columns, CqTiles, CQ_THREADS, blocks) { cq::multiply_tiles<Format, cq::TileShape<Format, group, columns>>(p); }
#define CQ_TILES_KERNELS(name, Format, group)  \
    CQ_TILES_OF(name, Format, group, 32, CQ_TILES_BLOCKS)    \
    CQ_TILES_OF(name, Format, group, 128, 1)
