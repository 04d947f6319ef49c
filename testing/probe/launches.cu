// What a launch costs in a graph, and what programmatic dependent launch takes off it, with and without loads
// that are issued before the wait for the kernel before.
#include <chrono>

#include "harness.cuh"

namespace {

constexpr int THREADS = 256, LOADS = 4;

__global__ void __launch_bounds__(THREADS) empty() {}
__global__ void __launch_bounds__(THREADS) empty_dependent() {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

enum class Order { NoWait, WaitFirst, LoadFirst };

// Reads tiles as a product reads weights: the first tile of a block before or after the wait.
template <Order ORDER> __global__ void __launch_bounds__(THREADS, 2) stream_tiles(const uint4 *from, int tiles, uint32_t *sink) {
    uint4 v[LOADS];
    uint32_t all = 0;
    auto load = [&](int tile) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const uint4 *p = from + size_t(tile) * (THREADS * LOADS) + i * THREADS + threadIdx.x;
            asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(p));
        }
    };
    if (ORDER == Order::WaitFirst) asm volatile("griddepcontrol.wait;" ::: "memory");
    int tile = blockIdx.x;
    if (tile < tiles) load(tile);
    if (ORDER == Order::LoadFirst) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (ORDER != Order::NoWait) asm volatile("griddepcontrol.launch_dependents;");
    for (; tile < tiles; tile += gridDim.x) {
        uint4 now[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) now[i] = v[i];
        if (tile + int(gridDim.x) < tiles) load(tile + gridDim.x);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) all ^= now[i].x ^ now[i].y ^ now[i].z ^ now[i].w;
    }
    probe::keep(all, sink);
}

void empty_launches() {
    for (int blocks : {1, 132, 264, 528, 1056}) {
        const probe::Launch plain{unsigned(blocks), THREADS}, early{unsigned(blocks), THREADS, 0, true};
        const double in_graph = probe::time_in_graph(200, [&](int) { plain(empty); });
        const double dependent = probe::time_in_graph(200, [&](int) { early(empty_dependent); });
        probe::record("empty launch", "\"blocks\": %d, \"us_in_graph\": %.3f, \"us_in_graph_dependent\": %.3f", blocks, in_graph, dependent);
    }
    // One kernel in a graph of its own, between events; and launches that the host issues one by one.
    const probe::Launch launch{264, THREADS};
    const double alone = probe::time_in_graph(1, [&](int) { launch(empty); }, 50);
    CHECK(cudaStreamSynchronize(probe::stream()));
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) launch(empty);
    CHECK(cudaStreamSynchronize(probe::stream()));
    const double eager = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / 1000;
    probe::record("single launch", "\"us_graph_of_one_between_events\": %.2f, \"us_eager\": %.2f", alone, eager);
}

void dependent_streams() {
    for (double megabytes : {2.4, 9.4, 33.0, 132.0}) {
        const int tiles = int(megabytes * 1e6 / (THREADS * LOADS * 16));
        const probe::Rotation rotation(size_t(tiles) * THREADS * LOADS * 16);
        char *memory = probe::random_memory(rotation.all());
        const unsigned blocks = std::min(tiles, probe::multiprocessors() * 4);
        auto time = [&](auto kernel, bool early) {
            const probe::Launch launch{blocks, THREADS, 0, early};
            return probe::time_in_graph(rotation.launches, [&](int i) {
                launch(kernel, reinterpret_cast<const uint4 *>(memory + rotation.offset(i)), tiles, nullptr);
            });
        };
        const double plain = time(stream_tiles<Order::NoWait>, false);
        const double wait_first = time(stream_tiles<Order::WaitFirst>, true), load_first = time(stream_tiles<Order::LoadFirst>, true);
        probe::record("dependent launch", "\"megabytes\": %.1f, \"us_plain\": %.3f, \"us_wait_first\": %.3f, \"us_load_first\": %.3f",
                      rotation.bytes / 1e6, plain, wait_first, load_first);
        CHECK(cudaFree(memory));
    }
}

}  // namespace

int main() {
    empty_launches();
    dependent_streams();
}
