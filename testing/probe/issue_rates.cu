// How many of each instruction a multiprocessor executes per clock.
//
// Decides how E2M1 is decoded (the conversion through E4M3 pays from 16 a clock on) and checks what the
// instruction budgets assume: 64 for logic, 128 for fp32 products.
#include "harness.cuh"

namespace {

enum class Op { Lop3, Prmt, Shf, Ffma, Hfma2, F2fp, F2fpAndLop3, Hmma };

constexpr int CHAINS = 8, STEPS = 8;

template <Op OP> __device__ __forceinline__ void step(uint32_t &v, uint32_t other, uint32_t constant, int position) {
    if constexpr (OP == Op::Lop3) asm volatile("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(v) : "r"(constant), "r"(other));
    if constexpr (OP == Op::Prmt) asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(v) : "r"(other), "r"(constant));
    if constexpr (OP == Op::Shf) asm volatile("shf.r.wrap.b32 %0, %0, %1, 7;" : "+r"(v) : "r"(other));
    if constexpr (OP == Op::Ffma) asm volatile("{.reg .f32 f, g; mov.b32 f, %0; mov.b32 g, %1; fma.rn.f32 f, f, g, g; mov.b32 %0, f;}" : "+r"(v) : "r"(other));
    if constexpr (OP == Op::Hfma2) asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(other), "r"(constant));
    if constexpr (OP == Op::F2fp) asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %0; cvt.rn.f16x2.e4m3x2 %0, l;}" : "+r"(v));
    if constexpr (OP == Op::F2fpAndLop3) {
        if (position % 2) step<Op::F2fp>(v, other, constant, 0);
        else step<Op::Lop3>(v, other, constant, 0);
    }
}

template <Op OP> __global__ void __launch_bounds__(1024) issue(long long *cycles, int trips, uint32_t *sink) {
    uint32_t v[CHAINS];
    const uint32_t constant = 0x3210u + trips;
    for (int i = 0; i < CHAINS; ++i) v[i] = (threadIdx.x * CHAINS + i) * 2654435761u;
    __syncthreads();
    const long long start = clock64();
    for (int trip = 0; trip < trips; ++trip)
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int i = 0; i < CHAINS; ++i) step<OP>(v[i], v[(i + 1) % CHAINS], constant, s + i);
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
    uint32_t all = 0;
    for (int i = 0; i < CHAINS; ++i) all ^= v[i];
    probe::keep(all, sink);
}

template <int ACCUMULATORS> __global__ void __launch_bounds__(1024) multiply(long long *cycles, int trips, uint32_t *sink) {
    float d[ACCUMULATORS][4] = {};
    const uint32_t a = 0x3c003c00u + threadIdx.x, b = 0x2c002c00u + threadIdx.x;
    __syncthreads();
    const long long start = clock64();
    for (int trip = 0; trip < trips; ++trip)
#pragma unroll
        for (int s = 0; s < STEPS * CHAINS; ++s) {
            float(&c)[4] = d[s % ACCUMULATORS];
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, {%0,%1,%2,%3};"
                         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a), "r"(b));
        }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
    float all = 0;
    for (auto &c : d) all += c[0] + c[1] + c[2] + c[3];
    probe::keep(__float_as_uint(all), sink);
}

void measure(const char *name, void (*kernel)(long long *, int, uint32_t *), int threads, double per_step) {
    constexpr int TRIPS = 2000;
    const int blocks = probe::multiprocessors();
    long long *cycles;
    CHECK(cudaMalloc(&cycles, blocks * sizeof *cycles));
    for (int i = 0; i < 2; ++i) kernel<<<blocks, threads>>>(cycles, TRIPS, nullptr);
    CHECK(cudaDeviceSynchronize());
    std::vector<long long> host(blocks);
    CHECK(cudaMemcpy(host.data(), cycles, blocks * sizeof *cycles, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(cycles));
    const double taken = probe::median(std::vector<double>(host.begin(), host.end()));
    probe::record("issue rate", "\"instruction\": \"%s\", \"threads\": %d, \"per_clock\": %.2f", name, threads,
                  double(TRIPS) * STEPS * CHAINS * per_step / taken);
}

}  // namespace

int main() {
    measure("LOP3", issue<Op::Lop3>, 1024, 1024);
    measure("PRMT", issue<Op::Prmt>, 1024, 1024);
    measure("SHF", issue<Op::Shf>, 1024, 1024);
    measure("FFMA", issue<Op::Ffma>, 1024, 1024);
    measure("HFMA2", issue<Op::Hfma2>, 1024, 1024);
    measure("F2FP", issue<Op::F2fp>, 1024, 1024);
    measure("F2FP and LOP3 in turn", issue<Op::F2fpAndLop3>, 1024, 1024);
    // Of a matrix product, instructions of a warp.
    measure("HMMA.16816, 8 accumulators", multiply<8>, 512, 16);
    measure("HMMA.16816, 8 accumulators", multiply<8>, 256, 8);
    measure("HMMA.16816, 2 accumulators", multiply<2>, 512, 16);
    measure("HMMA.16816, 1 accumulator", multiply<1>, 32, 1);
}
