// tiles_x: x as the tile kernels take it (CqTilesX). A block for each row, 256 threads.
#include "device.cuh"

namespace {

using namespace cq;

constexpr int THREADS = CQ_THREADS, WARPS = THREADS / 32;
static_assert(CQ_NORM_SHARED_BYTES >= 2 * WARPS * sizeof(float), "a number of each warp, twice");

// Four neighbouring elements of the row; zeros behind its end.
__device__ __forceinline__ void load_four(float (&v)[4], const CqTilesX &p, size_t row, uint32_t k) {
#pragma unroll
    for (float &number : v) number = 0;
    if (k >= p.k) return;
    if (p.x_dtype == CQ_F32) {
        const float4 four = *reinterpret_cast<const float4 *>(static_cast<const float *>(p.x) + row + k);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        return;
    }
    const uint2 raw = *reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(p.x) + row + k);
    const uint32_t pairs[2] = {raw.x, raw.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (p.x_dtype == CQ_F16) {
            const float2 two = __half22float2(as_half2(pairs[i]));
            v[2 * i] = two.x, v[2 * i + 1] = two.y;
        } else {
            v[2 * i] = __uint_as_float(pairs[i] << 16), v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
    }
}

__device__ __forceinline__ void weigh(float (&v)[4], const CqTilesX &p, uint32_t k) {
    if (!p.norm || k >= p.k) return;
    const float4 w = *reinterpret_cast<const float4 *>(p.norm + k);
    v[0] *= w.x, v[1] *= w.y, v[2] *= w.z, v[3] *= w.w;
}

// The largest finite magnitude of a row, with the norm's weights, and the sum of its squares, without: for all threads.
struct RowFacts {
    float largest = 0, squares = 0;

    __device__ __forceinline__ RowFacts(const CqTilesX &p, size_t row) {
        CQ_DYNAMIC_SHARED(memory);
        float *of_warps = reinterpret_cast<float *>(memory);
        for (uint32_t k = threadIdx.x * 4; k < p.k; k += THREADS * 4) {
            float v[4];
            load_four(v, p, row, k);
#pragma unroll
            for (float number : v) squares = __fmaf_rn(number, number, squares);
            weigh(v, p, k);
#pragma unroll
            for (float number : v)
                if (fabsf(number) < INFINITY) largest = fmaxf(largest, fabsf(number));
        }
        largest = largest_of_warp(largest), squares = sum_of_warp(squares);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest, of_warps[WARPS + threadIdx.x / 32] = squares;
        __syncthreads();
        squares = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, of_warps[warp]), squares += of_warps[WARPS + warp];
    }
};

// Eight elements as pairs of halves, in the order of a lane's B fragments.
__device__ __forceinline__ uint4 pairs_in_order(const half (&of)[8], uint32_t order) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int apart = order == CQ_ORDER_SPLIT ? i : order & CQ_ORDER_SPLIT ? i / 2 * 4 + i % 2 : 2 * i;
        const int distance = order == CQ_ORDER_SPLIT ? 4 : order & CQ_ORDER_SPLIT ? 2 : 1;
        half first = of[0], second = of[0];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j == apart) first = of[j];
            if (j == apart + distance) second = of[j];
        }
        pairs[i] = as_bits(__halves2half2(first, second));
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__device__ __forceinline__ void prepare_row(const CqTilesX &p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const size_t row = size_t(blockIdx.x) * p.x_stride;
    uint32_t exponent = 127;
    float scale = 1;
    if (p.x_dtype != CQ_F16 || p.norm) {
        const RowFacts facts(p, row);
        exponent = factor_exponent(facts.largest);
        if (p.norm) scale = rsqrtf(facts.squares / float(p.k) + p.eps);
    }
    const float factor = __uint_as_float(exponent << 23), unit = __uint_as_float((254 - exponent) << 23) * scale;
    // What a first half leaves is 2^-11 of it or less.
    constexpr float REST = 2048;
    if (threadIdx.x < p.terms) p.units[size_t(blockIdx.x) * p.terms + threadIdx.x] = threadIdx.x == 0 ? unit : unit / REST;

    const bool quarters = p.order & CQ_ORDER_QUARTERS;
    const uint32_t eights = p.k_padded / 8, lanes = quarters ? 4 : p.group / 8;
    // Whole warps take part, for the sake of the shuffles.
    for (uint32_t i = threadIdx.x; i / 32 * 32 < eights; i += THREADS) {
        const uint32_t first = quarters ? i / 4 * 32 + i % 4 * 4 : i * 8, second = quarters ? first + 16 : first + 4;
        float v[8], part[4];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            load_four(part, p, row, i < eights ? (side ? second : first) : p.k);
            weigh(part, p, side ? second : first);
#pragma unroll
            for (int j = 0; j < 4; ++j) v[side * 4 + j] = part[j] * factor;
        }
        for (uint32_t term = 0; term < p.terms; ++term) {
            half of[8];
            float sums[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                of[j] = __float2half_rn(v[j]);
                const float number = __half2float(of[j]);
                sums[j / 4] += number;
                v[j] = fabsf(number) < INFINITY ? (v[j] - number) * REST : 0;
            }
            if (!quarters) sums[0] += sums[1];
            for (uint32_t distance = 1; distance < lanes; distance *= 2) {
                sums[0] += __shfl_xor_sync(FULL_WARP, sums[0], distance);
                sums[1] += __shfl_xor_sync(FULL_WARP, sums[1], distance);
            }
            if (i >= eights) continue;
            const size_t row_of_halves = size_t(blockIdx.x) * p.terms + term;
            reinterpret_cast<uint4 *>(static_cast<uint16_t *>(p.halves) + row_of_halves * p.k_padded)[i] = pairs_in_order(of, p.order);
            if (i % lanes) continue;
            float *of_row = p.sums + row_of_halves * (p.k_padded / p.group);
            if (quarters)
                of_row[i / 4 * 2] = sums[0], of_row[i / 4 * 2 + 1] = sums[1];
            else
                of_row[i / lanes] = sums[0];
        }
    }
}

}  // namespace

CQ_KERNEL(tiles_x, CqTilesX, THREADS, 2) { prepare_row(p); }
