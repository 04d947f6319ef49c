// Kernels of the emulator's own tests: shared memory, barriers, several blocks.
#include "emulator.h"

static float *shared_floats() { return reinterpret_cast<float *>(emulator::dynamic_shared()); }

struct CopyParams {
    const float *x;
    float *y;
    unsigned n;
};

// Reverses each tile of 64, through shared memory.
EMULATED_KERNEL(toy_reverse, CopyParams, 64) {
    float *tile = shared_floats();
    const unsigned i = blockIdx.x * 64 + threadIdx.x;
    tile[threadIdx.x] = i < p.n ? p.x[i] : 0.f;
    __syncthreads();
    if (i < p.n) p.y[i] = tile[63 - threadIdx.x];
}

// The same without the barrier.
EMULATED_KERNEL(toy_reverse_without_barrier, CopyParams, 64) {
    float *tile = shared_floats();
    const unsigned i = blockIdx.x * 64 + threadIdx.x;
    tile[threadIdx.x] = i < p.n ? p.x[i] : 0.f;
    if (i < p.n) p.y[i] = tile[63 - threadIdx.x];
}

// Shared memory as it is before anything is written.
EMULATED_KERNEL(toy_stale_shared, CopyParams, 1) {
    float *shared = shared_floats();
    p.y[blockIdx.x] = shared[3];
    shared[3] = 1.f;
}

struct AtomicParams {
    const float *x;
    float *partial;      // [blocks]
    float *y;            // [1]
    unsigned *arrivals;  // [1], zero before and after
    float *order;        // [1]: sum of x by float atomics, in any order
};

// Sum over all blocks: the last to arrive adds up, in order.
EMULATED_KERNEL(toy_last_block, AtomicParams, 1) {
    p.partial[blockIdx.x] = p.x[blockIdx.x];
    __threadfence();
    if (p.order) atomicAdd(p.order, p.x[blockIdx.x]);
    if (atomicInc(p.arrivals, gridDim.x - 1) != gridDim.x - 1) return;
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += p.partial[i];
    *p.y = sum;
}

struct AsyncParams {
    const float *x;
    float *y;
    int wait;
};

// y = x through cp.async, read before its wait unless `wait`.
EMULATED_KERNEL(toy_async_copy, AsyncParams, 32) {
    float *tile = shared_floats();
    emulator::copy_async(tile + threadIdx.x * 4, p.x + threadIdx.x * 4, 16);
    emulator::commit_copies();
    emulator::copy_async(tile + 128 + threadIdx.x * 4, p.x + 128 + threadIdx.x * 4, 16, 8);
    emulator::commit_copies();
    emulator::wait_for_copies(1);
    if (p.wait) emulator::wait_for_copies(0);
    for (unsigned i = 0; i < 4; ++i) {
        p.y[threadIdx.x * 4 + i] = tile[threadIdx.x * 4 + i];
        p.y[128 + threadIdx.x * 4 + i] = tile[128 + threadIdx.x * 4 + i];
    }
}

struct IndexParams {
    unsigned *y;  // [blocks * threads]
};

EMULATED_KERNEL(toy_indices, IndexParams, 24) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    p.y[block * 24 + thread] = (blockIdx.x | blockIdx.y << 4 | blockIdx.z << 8 | threadIdx.x << 12 |
                                threadIdx.y << 16 | threadIdx.z << 20) + 1;
}
