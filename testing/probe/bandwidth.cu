// Reading memory and nothing else: how fast, with how much in flight, by blocks that stay or blocks that come
// and go, and at which clock.
//
// Says how many bytes a multiprocessor must have in flight, whether 2 or 4 blocks are wanted, whether a
// persistent grid is, and what no product of the same bytes can beat.
#include <string>

#include "harness.cuh"

namespace {

constexpr int THREADS = 256;
constexpr size_t LARGE = size_t(2) << 30;

enum class Hint { Plain, NoAllocate, EvictFirst };

template <Hint HINT> __device__ __forceinline__ uint4 load(const uint4 *p) {
    uint4 v;
    if constexpr (HINT == Hint::Plain)
        asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    if constexpr (HINT == Hint::NoAllocate)
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    if constexpr (HINT == Hint::EvictFirst) {
        uint64_t policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
    }
    return v;
}

// LOADS loads in flight for each thread. A block takes one tile of THREADS * LOADS vectors after the other.
template <int LOADS, Hint HINT> __device__ __forceinline__ uint32_t read_tiles(const uint4 *from, uint64_t tiles) {
    uint32_t all = 0;
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const uint4 *p = from + tile * (THREADS * LOADS) + threadIdx.x;
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) v[i] = load<HINT>(p + i * THREADS);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) all ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    return all;
}

template <int LOADS, Hint HINT> __global__ void __launch_bounds__(THREADS) read(const uint4 *from, uint64_t tiles, uint32_t *sink) {
    probe::keep(read_tiles<LOADS, HINT>(from, tiles), sink);
}

__global__ void __launch_bounds__(THREADS) copy(const uint4 *from, uint64_t tiles, uint4 *to) {
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const uint64_t first = tile * (THREADS * 4) + threadIdx.x;
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = load<Hint::NoAllocate>(from + first + i * THREADS);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[first + i * THREADS] = v[i];
    }
}

// Cycles and nanoseconds of each block while memory is busy.
__global__ void __launch_bounds__(THREADS) clock_under_load(const uint4 *from, uint64_t tiles, int passes, long long *out, uint32_t *sink) {
    const uint64_t begin = probe::nanoseconds();
    const long long start = clock64();
    uint32_t all = 0;
    for (int i = 0; i < passes; ++i) all += read_tiles<8, Hint::NoAllocate>(from, tiles);
    if (threadIdx.x == 0) {
        out[2 * blockIdx.x] = clock64() - start;
        out[2 * blockIdx.x + 1] = (long long)(probe::nanoseconds() - begin);
    }
    probe::keep(all, sink);
}

// Enough shared memory that exactly `blocks` fit on a multiprocessor.
size_t shared_for(int blocks) {
    const size_t all = probe::device().sharedMemPerMultiprocessor;
    return (all / blocks - 1024) / 1024 * 1024;
}

const uint4 *memory;

template <int LOADS, Hint HINT> void in_flight(const char *hint) {
    for (int blocks : {1, 2, 3, 4, 8}) {
        const size_t shared = blocks == 8 ? 0 : shared_for(blocks);
        if (shared) CHECK(cudaFuncSetAttribute(read<LOADS, HINT>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
        const uint64_t tiles = LARGE / (THREADS * LOADS * 16);
        for (bool persistent : {true, false}) {
            const unsigned grid = persistent ? probe::multiprocessors() * blocks : unsigned(tiles);
            const probe::Launch launch{grid, THREADS, shared};
            const double us = probe::time_in_graph(2, [&](int) { launch(read<LOADS, HINT>, memory, tiles, nullptr); }, 7);
            probe::record("read", "\"hint\": \"%s\", \"loads\": %d, \"blocks_per_multiprocessor\": %d, \"persistent\": %s, "
                          "\"kilobytes_in_flight\": %d, \"gb_per_s\": %.0f",
                          hint, LOADS, blocks, persistent ? "true" : "false", THREADS * LOADS * 16 * blocks / 1024, LARGE / us / 1e3);
        }
    }
}

// The least time for so many cold bytes, as a node of a graph.
void of_size(double megabytes) {
    constexpr int LOADS = 4;
    const uint64_t tiles = uint64_t(megabytes * 1e6) / (THREADS * LOADS * 16);
    const probe::Rotation rotation(tiles * THREADS * LOADS * 16);
    double best = 1e9;
    for (int blocks : {2, 4, 8})
        for (bool early : {false, true}) {
            const unsigned grid = unsigned(std::min<uint64_t>(tiles, uint64_t(probe::multiprocessors()) * blocks));
            const probe::Launch launch{grid, THREADS, 0, early};
            best = std::min(best, probe::time_in_graph(rotation.launches, [&](int i) {
                launch(read<LOADS, Hint::NoAllocate>, memory + rotation.offset(i) / 16, tiles, nullptr);
            }));
        }
    probe::record("read of a size", "\"megabytes\": %.2f, \"us\": %.3f, \"gb_per_s\": %.0f", rotation.bytes / 1e6, best,
                  rotation.bytes / best / 1e3);
}

void clocks() {
    const int blocks = probe::multiprocessors() * 4;
    long long *out;
    CHECK(cudaMalloc(&out, blocks * 2 * sizeof *out));
    std::vector<long long> host(blocks * 2);
    std::vector<double> ghz;
    for (int run = 0; run < 20; ++run) {
        clock_under_load<<<blocks, THREADS>>>(memory, LARGE / (THREADS * 8 * 16), 100, out, nullptr);
        CHECK(cudaMemcpy(host.data(), out, host.size() * sizeof *out, cudaMemcpyDeviceToHost));
        std::vector<double> each;
        for (int i = 0; i < blocks; ++i) each.push_back(double(host[2 * i]) / double(host[2 * i + 1]));
        ghz.push_back(probe::median(each));
    }
    CHECK(cudaFree(out));
    probe::record("clock under load", "\"ghz\": %.3f, \"least\": %.3f, \"most\": %.3f", probe::median(ghz),
                  *std::min_element(ghz.begin(), ghz.end()), *std::max_element(ghz.begin(), ghz.end()));
}

}  // namespace

int main() {
    memory = reinterpret_cast<const uint4 *>(probe::random_memory(LARGE));
    in_flight<1, Hint::NoAllocate>("no_allocate");
    in_flight<2, Hint::NoAllocate>("no_allocate");
    in_flight<4, Hint::NoAllocate>("no_allocate");
    in_flight<8, Hint::NoAllocate>("no_allocate");
    in_flight<4, Hint::Plain>("none");
    in_flight<4, Hint::EvictFirst>("evict_first");
    for (double megabytes : {2.4, 4.7, 9.4, 18.0, 33.0, 66.0, 132.0, 264.0, 528.0}) of_size(megabytes);
    {
        char *to;
        CHECK(cudaMalloc(&to, LARGE));
        const uint64_t tiles = LARGE / (THREADS * 4 * 16);
        const probe::Launch launch{unsigned(probe::multiprocessors() * 8), THREADS};
        const double us = probe::time_in_graph(2, [&](int) { launch(copy, memory, tiles, reinterpret_cast<uint4 *>(to)); }, 7);
        probe::record("copy", "\"gb_per_s\": %.0f", 2 * LARGE / us / 1e3);
    }
    clocks();
}
