// What the kernels need of the machine: the only file with inline PTX.
//
// Every wrapper has a branch for the host, taken when the same sources are compiled for the CPU
// emulator (`CANDLE_QUANT_EMULATED`), and must give the same bits there.
#pragma once
#include "params.h"
#ifdef CANDLE_QUANT_EMULATED
#include "emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#endif

// Declares a kernel: one parameter struct by value, `threads` in each block, at least `blocks`
// resident blocks on each multiprocessor.
#ifdef CANDLE_QUANT_EMULATED
#define CQ_KERNEL(name, Params, threads, blocks) EMULATED_KERNEL(name, Params, threads)
#else
#define CQ_KERNEL(name, Params, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)
#endif

// Declares `name`, the block's dynamic shared memory.
#ifdef CANDLE_QUANT_EMULATED
#define CQ_DYNAMIC_SHARED(name) unsigned char *name = static_cast<unsigned char *>(emulator::dynamic_shared())
#else
#define CQ_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

namespace cq {

constexpr uint32_t FULL_WARP = 0xffffffffu;

// Over the lanes of a warp, for all of them.
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, distance));
    return value;
}

__device__ __forceinline__ half2 as_half2(uint32_t bits) {
    half2 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

__device__ __forceinline__ uint32_t as_bits(half2 value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Hides how an address came about, lest the compiler computes all that follow from it ahead of a loop, for which
// there are no registers; or a number, lest it is computed each time anew.
template <class T> __device__ __forceinline__ void forget_origin([[maybe_unused]] T &value) {
#ifndef CANDLE_QUANT_EMULATED
    if constexpr (sizeof value == 8)
        asm volatile("" : "+l"(value));
    else
        asm volatile("" : "+r"(value));
#endif
}

// (a & b) | c in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
#ifdef CANDLE_QUANT_EMULATED
    return (a & b) | c;
#else
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#endif
}

// The bytes of two words that four nibbles select, each below 8: __byte_perm, but for the instruction that makes sure of it.
__device__ __forceinline__ uint32_t select_of_eight(uint32_t low, uint32_t high, uint32_t nibbles) {
#ifdef CANDLE_QUANT_EMULATED
    return __byte_perm(low, high, nibbles);
#else
    uint32_t selected;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(selected) : "r"(low), "r"(high), "r"(nibbles));
    return selected;
#endif
}

// WORDS (1, 2 or 4) consecutive words of a weight: read once, so kept out of the first-level cache
// (unless KEEP: lanes whose chunks are not whole sectors share them).
template <int WORDS, bool KEEP> __device__ __forceinline__ void load_words(uint32_t *out, const uint32_t *p) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a load of 4, 8 or 16 bytes");
#ifdef CANDLE_QUANT_EMULATED
    if (reinterpret_cast<uintptr_t>(p) % (4 * WORDS)) emulator::fail("misaligned load of weights");
    memcpy(out, p, 4 * WORDS);
#else
    if constexpr (WORDS == 4) {
        if constexpr (KEEP)
            asm volatile("ld.global.nc.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "l"(p));
        else
            asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "l"(p));
    } else if constexpr (WORDS == 2) {
        asm volatile("ld.global.nc.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "l"(p));
    } else {
        asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(out[0]) : "l"(p));
    }
#endif
}

// A number that another block wrote, or one that is to be loaded once more rather than kept in a register; several.
template <class T> __device__ __forceinline__ T load_again(const T *p) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "one, two or four words");
    T value;
#ifdef CANDLE_QUANT_EMULATED
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) emulator::fail("misaligned load of numbers");
    value = *p;
#else
    if constexpr (sizeof(T) == 16) {
        uint32_t bits[4];
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3]) : "l"(p) : "memory");
        memcpy(&value, bits, sizeof value);
    } else if constexpr (sizeof(T) == 8) {
        uint64_t bits;
        asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(bits) : "l"(p) : "memory");
        memcpy(&value, &bits, sizeof value);
    } else {
        uint32_t bits;
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(bits) : "l"(p) : "memory");
        memcpy(&value, &bits, sizeof value);
    }
#endif
    return value;
}

// Four numbers, 16-byte aligned, at once: an assignment may become four.
__device__ __forceinline__ void store_four(float *p, const float (&numbers)[4]) {
#ifdef CANDLE_QUANT_EMULATED
    if (reinterpret_cast<uintptr_t>(p) % 16) emulator::fail("misaligned store of numbers");
    memcpy(p, numbers, sizeof numbers);
#else
    asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};"
                 ::"l"(p), "f"(numbers[0]), "f"(numbers[1]), "f"(numbers[2]), "f"(numbers[3]) : "memory");
#endif
}

// Adds one to a counter, and returns what it was. Whoever counts later finds what this thread, and those with which it met at a
// barrier, wrote before. One instruction: fences around an addition would each wait for memory once more.
__device__ __forceinline__ uint32_t arrive(uint32_t *counter) {
#ifdef CANDLE_QUANT_EMULATED
    return atomicAdd(counter, 1u);
#else
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
#endif
}

// Starts to copy 4, 8 or 16 bytes to shared memory, or zeros if they are not `there`. They stay out of the first-level cache
// if they are 16 (unless KEEP: lanes whose chunks are not whole sectors share them).
template <int BYTES, bool KEEP = false> __device__ __forceinline__ void copy_bytes(void *shared, const void *global, bool there) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what one copy takes");
    const uint32_t bytes = there ? BYTES : 0;
#ifdef CANDLE_QUANT_EMULATED
    emulator::copy_async(shared, global, BYTES, bytes);
#elif __CUDA_ARCH__ >= 800
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16 && !KEEP)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %3, %2;" ::"r"(to), "l"(global), "r"(bytes), "n"(BYTES) : "memory");
#else
    uint32_t words[BYTES / 4] = {};
    if (bytes) memcpy(words, __builtin_assume_aligned(global, BYTES), BYTES);
    memcpy(__builtin_assume_aligned(shared, BYTES), words, BYTES);
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void commit_copies() {
#ifdef CANDLE_QUANT_EMULATED
    emulator::commit_copies();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all of the thread's groups of copies have arrived but the last PENDING.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
#ifdef CANDLE_QUANT_EMULATED
    emulator::wait_for_copies(PENDING);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// d += A B for A 16x16 (rows of weights) and B 16x8 (columns of activations), f16 or bf16 inputs, f32 sums.
//
// Lane 4g + t holds A[g][2t, 2t+1], A[g+8][2t, 2t+1], A[g][2t+8, 2t+9], A[g+8][2t+8, 2t+9] in a[0..4];
// B[2t, 2t+1][g], B[2t+8, 2t+9][g] in b0, b1; D[g][2t, 2t+1], D[g+8][2t, 2t+1] in d[0..4].
// There is no bf16 before Ampere.
template <bool BF16 = false>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef CANDLE_QUANT_EMULATED
    if constexpr (BF16)
        emulator::mma_m16n8k16_bf16(d, a, b0, b1);
    else
        emulator::mma_m16n8k16_f16(d, a, b0, b1);
#elif __CUDA_ARCH__ >= 800
    if constexpr (BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // Turing: the same fragments, as two halves of k
    if (BF16) __trap();
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// Four matrices of 8x8 halves, each transposed: lane 8i + r points to row r of matrix i in shared memory, 16 bytes; lane
// 4g + t gets elements [2t, 2t+1][g] of each.
__device__ __forceinline__ void load_transposed(uint32_t (&out)[4], const void *row) {
#ifdef CANDLE_QUANT_EMULATED
    emulator::ldmatrix(out, 4, row, true);
#else
    const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(from) : "memory");
#endif
}

// A matrix of 8x8 halves, transposed: lane 4g + t gives elements [g][2t, 2t+1] and gets [2t, 2t+1][g].
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
#ifdef CANDLE_QUANT_EMULATED
    return emulator::movmatrix(pair);
#else
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
#endif
}

// 2^x, with an error of two units in the last place on a GPU.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef CANDLE_QUANT_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Waits until the kernels before this one in the stream have finished (programmatic dependent launch).
// Nothing that they write may be read before; weights may. All threads of a block call it together.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#ifdef CANDLE_QUANT_EMULATED
    // As below in blocks that start early, as on older cards in the others.
    const bool early = emulator::started_early();
    if (!early || threadIdx.x < 32) emulator::wait_for_earlier_kernels();
    if (early) __syncthreads();
#elif __CUDA_ARCH__ >= 900
    // One warp waits, the others at the barrier: where every warp waits, the assembler moves the wait above the loads
    // that come before it.
    if (threadIdx.x < 32) asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
#endif
}

// Lets the next kernel of the stream start, up to its own wait. Comes after the own wait: the next kernel may then read,
// before it waits, whatever was written two launches ago.
__device__ __forceinline__ void let_next_kernel_start() {
#ifdef CANDLE_QUANT_EMULATED
    emulator::let_next_kernel_start();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Two E4M3 numbers (bits 0..16 of `codes`) as a pair of halves; 0x7F and 0xFF are NaN.
__device__ __forceinline__ uint32_t e4m3x2_to_half2(uint32_t codes) {
#if !defined(CANDLE_QUANT_EMULATED) && __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
    return pair;
#else
    // The bits of a half, 2^-8 too small; subnormals included, every finite code is exact.
    const uint32_t spread = __byte_perm(codes, 0, 0x1404);
    const uint32_t small = (spread & 0x80008000u) | ((spread >> 1) & 0x3f803f80u);
    uint32_t pair = as_bits(__hmul2(as_half2(small), as_half2(0x5c005c00u)));
    if ((codes & 0x7fu) == 0x7fu) pair = (pair & 0xffff0000u) | 0x7fffu;
    if ((codes & 0x7f00u) == 0x7f00u) pair = (pair & 0x0000ffffu) | 0x7fff0000u;
    return pair;
#endif
}

// Four E4M3 numbers as two pairs of halves.
__device__ __forceinline__ void e4m3x4_to_half2x2(uint32_t codes, uint32_t &low, uint32_t &high) {
#if !defined(CANDLE_QUANT_EMULATED) && __CUDA_ARCH__ >= 890
    // Splitting the register lets the assembler use the conversion's upper-half form.
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high) : "r"(codes));
#else
    low = e4m3x2_to_half2(codes & 0xffffu);
    high = e4m3x2_to_half2(codes >> 16);
#endif
}

// 2^(code - 127); 0 is the subnormal 2^-127, 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(uint32_t code) {
    const uint32_t bits = code == 0 ? 0x00400000u : code << 23;
    return __uint_as_float(code == 255 ? 0x7fc00000u : bits);
}

// Exponent field of the power of two that brings numbers of this largest finite magnitude below 2^15, to the range of a half;
// 2^(254 - 127 - field) undoes it.
__device__ __forceinline__ uint32_t factor_exponent(float largest) {
    const uint32_t exponent = __float_as_uint(largest) >> 23;
    return min(268u - exponent, 253u);
}

__device__ __forceinline__ float bf16_bits_to_float(uint32_t bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float half_bits_to_float(uint32_t bits) {
    return __low2float(as_half2(bits));
}

// Element i of an array of `dtype`.
__device__ __forceinline__ float load_float(const void *array, size_t i, uint32_t dtype) {
    if (dtype == CQ_F32) return static_cast<const float *>(array)[i];
    const uint32_t bits = static_cast<const uint16_t *>(array)[i];
    return dtype == CQ_F16 ? half_bits_to_float(bits) : bf16_bits_to_float(bits);
}

// `value` rounded to `dtype`, to nearest, ties to even.
__device__ __forceinline__ float rounded(float value, uint32_t dtype) {
    if (dtype == CQ_F16) return __half2float(__float2half_rn(value));
    if (dtype == CQ_BF16) return __bfloat162float(__float2bfloat16_rn(value));
    return value;
}

// Rounds to nearest, ties to even, into element i of an array of `dtype`.
__device__ __forceinline__ void store_float(void *array, size_t i, uint32_t dtype, float value) {
    if (dtype == CQ_F32)
        static_cast<float *>(array)[i] = value;
    else if (dtype == CQ_F16)
        static_cast<half *>(array)[i] = __float2half_rn(value);
    else
        static_cast<__nv_bfloat16 *>(array)[i] = __float2bfloat16_rn(value);
}

}  // namespace cq
