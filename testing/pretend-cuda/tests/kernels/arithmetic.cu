// Kernels of the emulator's own tests: numbers.
#include "emulator.h"

struct HalfParams {
    const uint16_t *a, *b, *c;
    uint16_t *fused, *product, *sum, *quotient;
    unsigned n;
    int bfloat16;
};

template <class T> static void arithmetic(const HalfParams &p, T (*from_bits)(uint16_t), uint16_t (*to_bits)(T)) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    const T a = from_bits(p.a[i]), b = from_bits(p.b[i]), c = from_bits(p.c[i]);
    p.fused[i] = to_bits(__hfma(a, b, c));
    p.product[i] = to_bits(a * b);
    p.sum[i] = to_bits(a + b);
    p.quotient[i] = to_bits(a / b);
}

EMULATED_KERNEL(toy_half_arithmetic, HalfParams, 256) {
    if (p.bfloat16)
        arithmetic<__nv_bfloat16>(p, __ushort_as_bfloat16, __bfloat16_as_ushort);
    else
        arithmetic<__half>(p, __ushort_as_half, __half_as_ushort);
}

struct RoundParams {
    const float *x;
    uint16_t *half, *bfloat16;
    unsigned n;
};

EMULATED_KERNEL(toy_round, RoundParams, 256) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    p.half[i] = __half_as_ushort(__float2half_rn(p.x[i]));
    p.bfloat16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(p.x[i]));
}

struct BitsParams {
    uint32_t *y;
};

EMULATED_KERNEL(toy_bits, BitsParams, 1) {
    unsigned n = 0;
    auto put = [&](uint32_t value) { p.y[n++] = value; };
    put(__byte_perm(0x33221100u, 0x77665544u, 0x7531));
    put(__byte_perm(0x80, 0x7f, 0xc8));
    put(__funnelshift_r(0x12345678u, 0x9abcdef0u, 8));
    put(__funnelshift_l(0x12345678u, 0x9abcdef0u, 8));
    put(__popc(0xf0f0u));
    put(__clz(1));
    put(__clz(0));
    put(__dp4a(0x01ff0203, 0x04050607, 100));
    put(__float2int_rn(2.5f));
    put(__float2int_rd(-2.5f));
    put(min(3, 7u) + max(-1.f, 4.f));
    put(__float_as_uint(__fmaf_rn(3.f, 5.f, 0.5f)));
    put(static_cast<uint32_t>(__umul64hi(0x123456789abcdef0u, 0xfedcba9876543210u) >> 32));
}
