// Kernels of the driver's own tests: those that start before the one ahead of them has finished.
#include "emulator.h"

struct EarlyParams {
    const float *weight;  // [blocks * 64]
    const float *x;       // [blocks * 64]: the kernel before writes it
    float *y;             // [blocks * 64]
    int wrong;            // what a thread does wrong
};

enum { NOTHING, READS_EARLY, WRITES_EARLY, LEAVES_EARLY, TRIGGERS_EARLY, WAITS_ALONE, COPIES_EARLY };

// y = weight + x, each block of x reversed.
EMULATED_KERNEL(toy_early, EarlyParams, 64) {
    float *tile = reinterpret_cast<float *>(emulator::dynamic_shared());
    const unsigned i = blockIdx.x * 64 + threadIdx.x, last = gridDim.x * 64 - 1;
    const float weight = p.weight[i];
    tile[threadIdx.x] = p.x[i];
    if (p.wrong == COPIES_EARLY) {
        emulator::copy_async(tile + threadIdx.x, p.x + i, 4);
        emulator::commit_copies();
    }
    if (p.wrong == WRITES_EARLY && i == last) p.y[i] = 1.f;
    if (p.wrong == LEAVES_EARLY && i == last) return;
    if (p.wrong == TRIGGERS_EARLY && i == last) emulator::let_next_kernel_start();
    // One warp waits, the other at the barrier.
    if (threadIdx.x < 32) emulator::wait_for_earlier_kernels();
    if (p.wrong != WAITS_ALONE) __syncthreads();
    emulator::let_next_kernel_start();
    if (p.wrong == COPIES_EARLY)
        emulator::wait_for_copies(0);
    else if (p.wrong != READS_EARLY)
        tile[threadIdx.x] = p.x[i];
    __syncthreads();
    p.y[i] = weight + tile[63 - threadIdx.x];
}
