// Lanes that read chunks of 48 or 80 bytes: may their loads stay in the first-level cache?
//
// A lane of a 3-, 5- or 6-bit product reads its chunk as 16-byte loads whose neighbours belong to the same
// sectors; a lane of a 4-bit product reads 16 bytes, four lanes 64. Rows g and g + 8 as in the product.
#include "harness.cuh"

namespace {

constexpr int WARPS = 8;

template <bool KEEP> __device__ __forceinline__ uint4 load(const char *p) {
    uint4 v;
    if constexpr (KEEP)
        asm volatile("ld.global.nc.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    else
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// A block reads 16 rows of `row_bytes`, its warps a step (four chunks of CHUNK bytes) each in turn.
template <int CHUNK, bool KEEP> __global__ void __launch_bounds__(WARPS * 32, 2) read(const char *rows, int row_bytes, uint32_t *sink) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const char *base = rows + size_t(blockIdx.x) * 16 * row_bytes + t * CHUNK;
    uint32_t all = 0;
    for (int k = warp * 4 * CHUNK; k < row_bytes; k += WARPS * 4 * CHUNK) {
        uint4 v[2][CHUNK / 16];
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) v[row][i] = load<KEEP>(base + size_t(g + 8 * row) * row_bytes + k + i * 16);
#pragma unroll
        for (auto &of_row : v)
            for (auto &one : of_row) all ^= one.x ^ one.y ^ one.z ^ one.w;
    }
    probe::keep(all, sink);
}

char *memory;
constexpr size_t MEMORY = size_t(1) << 30;

template <int CHUNK> void measure(const char *formats, int weights, double bits) {
    for (int rows : {4096, 28672}) {
        const int row_bytes = int(weights * bits / 8) / (4 * CHUNK) * (4 * CHUNK);
        const probe::Rotation rotation(size_t(rows) * row_bytes);
        if (rotation.all() > MEMORY) continue;
        const probe::Launch launch{unsigned(rows / 16), WARPS * 32};
        auto time = [&](auto kernel) {
            return probe::time_in_graph(rotation.launches, [&](int i) { launch(kernel, memory + rotation.offset(i), row_bytes, nullptr); });
        };
        const double streamed = time(read<CHUNK, false>), kept = time(read<CHUNK, true>);
        probe::record("chunks", "\"formats\": \"%s\", \"chunk_bytes\": %d, \"rows\": %d, \"megabytes\": %.1f, "
                      "\"us_no_allocate\": %.2f, \"us_kept\": %.2f, \"gb_per_s_no_allocate\": %.0f, \"gb_per_s_kept\": %.0f",
                      formats, CHUNK, rows, rotation.bytes / 1e6, streamed, kept, rotation.bytes / streamed / 1e3, rotation.bytes / kept / 1e3);
    }
}

}  // namespace

int main() {
    memory = probe::random_memory(MEMORY);
    measure<16>("4-bit, 2-bit, 8-bit, fp4", 8192, 4);
    measure<32>("8-bit, two loads", 8192, 8);
    measure<48>("3-bit, 6-bit", 8192, 3);
    measure<80>("5-bit", 8192, 5);
}
