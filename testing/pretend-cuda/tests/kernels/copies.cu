// Kernels of the emulator's own tests: which threads may read what cp.async brought.
#include "emulator.h"

struct SharedCopyParams {
    const float *x;  // [64 threads][4]
    float *y;        // [3][64 threads][4]: of the thread itself, a lane of its warp, and one of the other warp
    int between;     // the copy and the loads: 0 nothing, 1 a shuffle, 2 mma, 3 __syncwarp, 4 __syncthreads
};

EMULATED_KERNEL(toy_copies, SharedCopyParams, 64) {
    float *tile = reinterpret_cast<float *>(emulator::dynamic_shared());
    const unsigned i = threadIdx.x;
    emulator::copy_async(tile + i * 4, p.x + i * 4, 16);
    emulator::commit_copies();
    emulator::wait_for_copies(0);
    float d[4] = {};
    const uint32_t a[4] = {};
    if (p.between == 1) __shfl_xor_sync(0xffffffffu, i, 1);
    if (p.between == 2) emulator::mma_m16n8k16_f16(d, a, 0, 0);
    if (p.between == 3) __syncwarp();
    if (p.between == 4) __syncthreads();
    const unsigned from[3] = {i, i ^ 1, i ^ 32};
    for (unsigned whose = 0; whose < 3; ++whose)
        for (unsigned j = 0; j < 4; ++j) p.y[(whose * 64 + i) * 4 + j] = tile[from[whose] * 4 + j];
}

struct RingParams {
    const float *x;  // [steps][64 threads][4]
    float *y;        // [64 threads]
    unsigned steps;
};

// Sums of each thread's own part, through two slots that no other thread reads.
EMULATED_KERNEL(toy_ring, RingParams, 64) {
    float *ring = reinterpret_cast<float *>(emulator::dynamic_shared());
    const unsigned i = threadIdx.x;
    auto slot = [&](unsigned step) { return ring + (step % 2 * 64 + i) * 4; };
    auto start = [&](unsigned step) {
        if (step < p.steps) emulator::copy_async(slot(step), p.x + (step * 64 + i) * 4, 16);
        emulator::commit_copies();
    };
    start(0);
    start(1);
    float sum = 0;
    for (unsigned step = 0; step < p.steps; ++step) {
        emulator::wait_for_copies(1);
        sum += __shfl_xor_sync(0xffffffffu, 0.f, 1);  // others run
        for (unsigned j = 0; j < 4; ++j) sum += slot(step)[j];
        start(step + 2);
    }
    p.y[i] = sum;
}

// A slot that is copied to again before its number was read.
EMULATED_KERNEL(toy_refilled_early, SharedCopyParams, 64) {
    float *tile = reinterpret_cast<float *>(emulator::dynamic_shared()) + threadIdx.x * 4;
    for (unsigned step = 0; step < 2; ++step) {
        emulator::copy_async(tile, p.x + threadIdx.x * 4, 16);
        emulator::commit_copies();
        if (step == 0) emulator::wait_for_copies(0);
    }
    p.y[threadIdx.x] = *tile;
}
