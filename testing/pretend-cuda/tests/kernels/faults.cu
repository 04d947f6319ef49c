// Kernels of the emulator's own tests that are wrong, each in its own way.
#include "emulator.h"

struct FaultParams {
    float *y;
    int at;  // thread that misbehaves
};

EMULATED_KERNEL(toy_divergent_shuffle, FaultParams, 64) {
    if (int(threadIdx.x) == p.at)
        __syncwarp();
    else
        p.y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, float(threadIdx.x), 1);
}

EMULATED_KERNEL(toy_lane_left, FaultParams, 64) {
    if (int(threadIdx.x) == p.at) return;
    p.y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, float(threadIdx.x), 1);
}

EMULATED_KERNEL(toy_thread_left, FaultParams, 64) {
    if (int(threadIdx.x) == p.at) return;
    __syncthreads();
}

EMULATED_KERNEL(toy_two_barriers, FaultParams, 64) {
    if (int(threadIdx.x) < p.at)
        __syncthreads();
    else
        __syncthreads();
}

// Each of three lanes waits for the next.
EMULATED_KERNEL(toy_deadlock, FaultParams, 32) {
    if (threadIdx.x < 3) __syncwarp(1u << threadIdx.x | 1u << (threadIdx.x + 1) % 3);
}

EMULATED_KERNEL(toy_wrong_source, FaultParams, 32) {
    if (threadIdx.x < 16) p.y[threadIdx.x] = __shfl_sync(0xffffu, 1.f, 20);
}

EMULATED_KERNEL(toy_not_in_mask, FaultParams, 32) { __syncwarp(1u << p.at); }

EMULATED_KERNEL(toy_shared_overrun, FaultParams, 32) {
    float *shared = reinterpret_cast<float *>(emulator::dynamic_shared());
    if (threadIdx.x == 7) shared[p.at] = 1.f;
    __syncthreads();
}

EMULATED_KERNEL(toy_global_overrun, FaultParams, 32) {
    if (threadIdx.x == 7) p.y[p.at] = 1.f;
}

EMULATED_KERNEL(toy_trap, FaultParams, 32) {
    if (int(threadIdx.x) == p.at && blockIdx.x == 1) __trap();
}

EMULATED_KERNEL(toy_misaligned_copy, FaultParams, 32) {
    emulator::copy_async(emulator::dynamic_shared() + 4, p.y, 16);
}

// Loads, or stores, where there is no memory.
EMULATED_KERNEL(toy_illegal_address, FaultParams, 32) {
    if (threadIdx.x != 7) return;
    volatile uintptr_t address = 64;
    volatile float *nowhere = reinterpret_cast<float *>(address);
    if (p.at)
        *nowhere = 1.f;
    else
        p.y[0] = *nowhere;
}
