// Every wrapper of device.cuh as a kernel, so that it can run on a GPU and on the emulator alike.
//
// Each thread takes the items i, i + threads of the grid, ... of `count`.
#include "../../cuda/device.cuh"
#include "kernels.h"

namespace {

__device__ __forceinline__ uint64_t first_item() { return uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint64_t step() { return uint64_t(gridDim.x) * blockDim.x; }

// 65536 consecutive floats, rounded and folded into one number that any change of any result changes.
template <uint32_t DTYPE> __device__ __forceinline__ uint32_t rounded_range(uint32_t range) {
    uint32_t hash = 2166136261u;
    for (uint32_t low = 0; low < 65536; ++low) {
        uint16_t rounded;
        cq::store_float(&rounded, 0, DTYPE, __uint_as_float(range << 16 | low));
        // The bits of a NaN are the machine's choice.
        const uint32_t exponent = DTYPE == CQ_F16 ? 0x7c00u : 0x7f80u;
        const uint32_t value = (rounded & 0x7fffu) > exponent ? 0xffffu : rounded;
        hash = (hash ^ value) * 16777619u;
    }
    return hash;
}

}  // namespace

#define ITEMS(name) CQ_KERNEL(name, Items, ITEM_THREADS, 1)
#define FOR_EACH_ITEM for (uint64_t i = first_item(); i < p.count; i += step())

ITEMS(test_and_or) {
    FOR_EACH_ITEM p.out[i] = cq::and_or(p.in[3 * i], p.in[3 * i + 1], p.in[3 * i + 2]);
}
ITEMS(test_select_of_eight) {
    FOR_EACH_ITEM p.out[i] = cq::select_of_eight(p.in[3 * i], p.in[3 * i + 1], p.in[3 * i + 2]);
}
ITEMS(test_load_1) {
    FOR_EACH_ITEM cq::load_words<1, true>(p.out + i, p.in + i);
}
ITEMS(test_load_2) {
    FOR_EACH_ITEM cq::load_words<2, true>(p.out + 2 * i, p.in + 2 * i);
}
ITEMS(test_load_4) {
    FOR_EACH_ITEM cq::load_words<4, false>(p.out + 4 * i, p.in + 4 * i);
}
ITEMS(test_load_4_kept) {
    FOR_EACH_ITEM cq::load_words<4, true>(p.out + 4 * i, p.in + 4 * i);
}
ITEMS(test_e4m3x2) {
    FOR_EACH_ITEM p.out[i] = cq::e4m3x2_to_half2(p.in[i]);
}
ITEMS(test_e4m3x4) {
    FOR_EACH_ITEM cq::e4m3x4_to_half2x2(p.in[i], p.out[2 * i], p.out[2 * i + 1]);
}
ITEMS(test_e8m0) {
    FOR_EACH_ITEM p.out[i] = __float_as_uint(cq::e8m0_to_float(p.in[i]));
}
ITEMS(test_bf16_to_float) {
    FOR_EACH_ITEM p.out[i] = __float_as_uint(cq::bf16_bits_to_float(p.in[i]));
}
ITEMS(test_half_to_float) {
    FOR_EACH_ITEM p.out[i] = __float_as_uint(cq::half_bits_to_float(p.in[i]));
}
// Of 16 bits, the second number of each word: which items a runner gives to a launch changes nothing.
ITEMS(test_load_float) {
    FOR_EACH_ITEM for (uint32_t dtype = 0; dtype < 3; ++dtype)
        p.out[3 * i + dtype] = __float_as_uint(cq::load_float(p.in + i, dtype != CQ_F32, dtype));
}
ITEMS(test_store_f32) {
    FOR_EACH_ITEM cq::store_float(p.out, i, CQ_F32, __uint_as_float(p.in[i]));
}
ITEMS(test_round_f16) {
    FOR_EACH_ITEM p.out[i] = rounded_range<CQ_F16>(p.in[i]);
}
ITEMS(test_round_bf16) {
    FOR_EACH_ITEM p.out[i] = rounded_range<CQ_BF16>(p.in[i]);
}
// What the kernels use besides the wrappers, on any bits, subnormals included.
ITEMS(test_arithmetic) {
    FOR_EACH_ITEM {
        const uint32_t a = p.in[3 * i], b = p.in[3 * i + 1], c = p.in[3 * i + 2];
        const float x = __uint_as_float(a), y = __uint_as_float(b), z = __uint_as_float(c);
        const float results[] = {__fadd_rn(x, y), __fsub_rn(x, y), __fmul_rn(x, y), __fdiv_rn(x, y), __fmaf_rn(x, y, z), rintf(x)};
        for (int j = 0; j < 6; ++j) p.out[6 * i + j] = __float_as_uint(results[j]);
    }
}
ITEMS(test_bits) {
    FOR_EACH_ITEM {
        const uint32_t a = p.in[3 * i], b = p.in[3 * i + 1], c = p.in[3 * i + 2];
        p.out[2 * i] = __byte_perm(a, b, c & 0x7777u);
        p.out[2 * i + 1] = __funnelshift_r(a, b, c & 31u);
    }
}
// A half of the low bits, times every 61st half.
ITEMS(test_hmul2) {
    FOR_EACH_ITEM {
        uint32_t hash = 2166136261u;
        for (uint32_t other = 0; other < 65536; other += 61) {
            const uint32_t product = cq::as_bits(__hmul2(cq::as_half2(p.in[i] | other << 16), cq::as_half2(other | p.in[i] << 16)));
            const uint32_t low = (product & 0x7fffu) > 0x7c00u ? 0x7fffu : product & 0xffffu;
            const uint32_t high = ((product >> 16) & 0x7fffu) > 0x7c00u ? 0x7fffu : product >> 16;
            hash = ((hash ^ low) * 16777619u ^ high) * 16777619u;
        }
        p.out[i] = hash;
    }
}
// Copied to shared memory and back; every other one is zeros.
ITEMS(test_copy) {
    __shared__ __align__(16) uint32_t copies[ITEM_THREADS][4];
    FOR_EACH_ITEM {
        cq::copy_bytes<16>(copies[threadIdx.x], p.in + 4 * i, i % 2 == 0);
        cq::commit_copies();
        cq::wait_for_copies<0>();
        for (int j = 0; j < 4; ++j) p.out[4 * i + j] = copies[threadIdx.x][j];
    }
}
// A matrix of a warp, of which each lane has two elements; there are items for whole warps.
ITEMS(test_transposed) {
    FOR_EACH_ITEM p.out[i] = cq::transposed(p.in[i]);
}
// Four matrices of a warp, by way of shared memory.
ITEMS(test_load_transposed) {
    __shared__ __align__(16) uint32_t rows[ITEM_THREADS][4];
    FOR_EACH_ITEM {
        for (int j = 0; j < 4; ++j) rows[threadIdx.x][j] = p.in[4 * i + j];
        __syncwarp();
        uint32_t out[4];
        cq::load_transposed(out, rows[threadIdx.x]);
        for (int j = 0; j < 4; ++j) p.out[4 * i + j] = out[j];
        __syncwarp();
    }
}
// The two that order kernels must at least not disturb one.
ITEMS(test_dependent_launch) {
    cq::wait_for_earlier_kernels();
    cq::let_next_kernel_start();
    FOR_EACH_ITEM p.out[i] = ~p.in[i];
}

namespace {

// One problem for each block of one warp: D = A B + C, all row-major.
template <bool BF16> __device__ __forceinline__ void multiply(const Products &p) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const uint16_t *a = p.a + blockIdx.x * 256, *b = p.b + blockIdx.x * 128;
    float *d = p.d + blockIdx.x * 128;
    auto pair = [](uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; };
    uint32_t fragment[4];
    for (int i = 0; i < 4; ++i) {
        const uint16_t *at = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
        fragment[i] = pair(at[0], at[1]);
    }
    const uint32_t b0 = pair(b[2 * t * 8 + g], b[(2 * t + 1) * 8 + g]);
    const uint32_t b1 = pair(b[(2 * t + 8) * 8 + g], b[(2 * t + 9) * 8 + g]);
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    cq::mma_m16n8k16<BF16>(sums, fragment, b0, b1);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

}  // namespace

CQ_KERNEL(test_mma, Products, 32, 1) { multiply<false>(p); }
CQ_KERNEL(test_mma_bf16, Products, 32, 1) { multiply<true>(p); }
