// Kernels of the emulator's own tests: what the lanes of a warp do together.
#include "emulator.h"

struct SumParams {
    const float *x;
    float *y;
    unsigned rows, columns;
};

// y[row] = sum of x[row, ..]: a warp for each row.
EMULATED_KERNEL(toy_row_sum, SumParams, 128) {
    const unsigned row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0;
    if (row < p.rows)
        for (unsigned i = lane; i < p.columns; i += 32) sum += p.x[size_t(row) * p.columns + i];
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane == 0 && row < p.rows) p.y[row] = sum;
}

struct ShuffleParams {
    int *y;  // [6][32]
};

EMULATED_KERNEL(toy_shuffles, ShuffleParams, 32) {
    const int lane = threadIdx.x, value = 100 + lane;
    p.y[lane] = __shfl_sync(0xffffffffu, value, lane * 7);
    p.y[32 + lane] = __shfl_up_sync(0xffffffffu, value, 3u, 8);
    p.y[64 + lane] = __shfl_down_sync(0xffffffffu, value, 3u, 16);
    p.y[96 + lane] = __shfl_xor_sync(0xffffffffu, value, 12, 8);
    p.y[128 + lane] = __ballot_sync(0xffffffffu, lane % 3 == 0);
    // The two halves of the warp, apart.
    if (lane < 16)
        p.y[160 + lane] = __shfl_xor_sync(0x0000ffffu, value, 1) + 10 * __any_sync(0x0000ffffu, lane == 3);
    else
        p.y[160 + lane] = __shfl_xor_sync(0xffff0000u, value, 2) + 10 * __all_sync(0xffff0000u, lane == 16);
}

struct MmaParams {
    const uint16_t *a, *b;  // [16, 16], [16, 8]
    float *d;               // [16, 8]
    int bfloat16;
};

EMULATED_KERNEL(toy_mma, MmaParams, 32) {
    const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
    auto a = [&](unsigned row, unsigned k) { return p.a[row * 16 + k] | uint32_t(p.a[row * 16 + k + 1]) << 16; };
    auto b = [&](unsigned k, unsigned n) { return p.b[k * 8 + n] | uint32_t(p.b[(k + 1) * 8 + n]) << 16; };
    const uint32_t fragment[4] = {a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8)};
    float d[4];
    for (unsigned i = 0; i < 4; ++i) d[i] = p.d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    if (p.bfloat16)
        emulator::mma_m16n8k16_bf16(d, fragment, b(2 * t, g), b(2 * t + 8, g));
    else
        emulator::mma_m16n8k16_f16(d, fragment, b(2 * t, g), b(2 * t + 8, g));
    for (unsigned i = 0; i < 4; ++i) p.d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

struct LdmatrixParams {
    const uint16_t *x;  // [32, 8]
    uint32_t *y;        // [2][32][4]
};

EMULATED_KERNEL(toy_ldmatrix, LdmatrixParams, 32) {
    for (unsigned transpose = 0; transpose < 2; ++transpose)
        emulator::ldmatrix(p.y + (transpose * 32 + threadIdx.x) * 4, 4, p.x + threadIdx.x * 8, transpose);
}

// y = x transposed, for 8x8 elements.
EMULATED_KERNEL(toy_movmatrix, LdmatrixParams, 32) {
    p.y[threadIdx.x] = emulator::movmatrix(p.x[threadIdx.x * 2] | uint32_t(p.x[threadIdx.x * 2 + 1]) << 16);
}
