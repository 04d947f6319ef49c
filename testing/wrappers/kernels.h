// Parameters of the kernels of kernels.cu.
#pragma once
#include <stdint.h>

constexpr int ITEM_THREADS = 128;

struct Items {
    const uint32_t *in;
    uint32_t *out;
    uint64_t count;
};

struct Products {
    const uint16_t *a;  // [16, 16] f16 or bf16
    const uint16_t *b;  // [16, 8] of the same
    float *d;           // [16, 8], added to
};
