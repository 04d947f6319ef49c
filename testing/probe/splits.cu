// A sum over k split among blocks: joined in a cluster's shared memory, or through memory by the last block.
//
// Blocks read the bytes of 128 rows' share of k and hold one partial sum for each of 128 x 8 products, as a
// product of 8 rows of x does.
#include <cooperative_groups.h>

#include "harness.cuh"

namespace {

constexpr int THREADS = 256, ROWS = 128, PRODUCTS = ROWS * 8;

// What a block's bytes come to, for each of its products; the same for the two ways to join.
__device__ __forceinline__ void partial_sums(const char *rows, int row_bytes, float *sums) {
    const int share = row_bytes / gridDim.y;
    const char *from = rows + size_t(blockIdx.x) * ROWS * row_bytes + blockIdx.y * share;
    uint32_t all = 0;
    // Two threads a row, eight loads in flight.
    const char *row = from + size_t(threadIdx.x / 2) * row_bytes + threadIdx.x % 2 * 16;
    for (int k = 0; k < share; k += 256) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (k + i * 32 < share) {
                asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(row + k + i * 32));
                all += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
            }
    }
    for (int i = threadIdx.x; i < PRODUCTS; i += THREADS) sums[i] = float(all >> 8) + i;
    __syncthreads();
}

__global__ void __launch_bounds__(THREADS, 2) join_in_cluster(const char *rows, int row_bytes, float *y, float *, uint32_t *) {
    __shared__ float sums[PRODUCTS];
    partial_sums(rows, row_bytes, sums);
    auto cluster = cooperative_groups::this_cluster();
    cluster.sync();
    const unsigned size = gridDim.y, rank = blockIdx.y;
    for (unsigned i = rank * THREADS + threadIdx.x; i < PRODUCTS; i += size * THREADS) {
        float sum = 0;
        for (unsigned s = 0; s < size; ++s) sum += cluster.map_shared_rank(sums, s)[i];
        y[size_t(blockIdx.x) * PRODUCTS + i] = sum;
    }
    cluster.sync();
}

__global__ void __launch_bounds__(THREADS, 2) join_in_memory(const char *rows, int row_bytes, float *y, float *partial, uint32_t *arrivals) {
    __shared__ float sums[PRODUCTS];
    __shared__ bool last;
    partial_sums(rows, row_bytes, sums);
    const size_t split = size_t(gridDim.x) * PRODUCTS, first = size_t(blockIdx.x) * PRODUCTS;
    if (gridDim.y > 1) {
        for (int i = threadIdx.x; i < PRODUCTS; i += THREADS) partial[blockIdx.y * split + first + i] = sums[i];
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(arrivals + blockIdx.x, 1u) == gridDim.y - 1;
            if (last) arrivals[blockIdx.x] = 0;
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
    }
    for (int i = threadIdx.x; i < PRODUCTS; i += THREADS) {
        float sum = gridDim.y > 1 ? 0 : sums[i];
        for (unsigned s = 0; gridDim.y > 1 && s < gridDim.y; ++s) sum += static_cast<volatile float *>(partial)[s * split + first + i];
        y[first + i] = sum;
    }
}

}  // namespace

int main() {
    float *y, *partial;
    uint32_t *arrivals;
    constexpr size_t MOST_SPLITS = 8;
    for (int n : {1024, 4096, 8192}) {
        const int row_bytes = 2048;  // 4096 weights of 4 bits
        const probe::Rotation rotation(size_t(n) * row_bytes);
        char *memory = probe::random_memory(rotation.all());
        const unsigned blocks = n / ROWS;
        CHECK(cudaMalloc(&y, blocks * PRODUCTS * sizeof *y));
        CHECK(cudaMalloc(&partial, MOST_SPLITS * blocks * PRODUCTS * sizeof *partial));
        CHECK(cudaMalloc(&arrivals, blocks * sizeof *arrivals));
        CHECK(cudaMemset(arrivals, 0, blocks * sizeof *arrivals));
        CHECK(cudaDeviceSynchronize());
        for (unsigned splits = 1; splits <= MOST_SPLITS; splits *= 2) {
            auto time = [&](auto kernel, unsigned cluster) {
                const probe::Launch launch{dim3(blocks, splits), THREADS, 0, false, int(cluster)};
                return probe::time_in_graph(rotation.launches,
                                            [&](int i) { launch(kernel, memory + rotation.offset(i), row_bytes, y, partial, arrivals); });
            };
            const double in_memory = time(join_in_memory, 1), in_cluster = splits > 1 ? time(join_in_cluster, splits) : in_memory;
            probe::record("split of k", "\"n\": %d, \"splits\": %u, \"blocks\": %u, \"us_memory\": %.3f, \"us_cluster\": %.3f", n, splits,
                          blocks * splits, in_memory, in_cluster);
        }
        for (void *one : {static_cast<void *>(memory), static_cast<void *>(y), static_cast<void *>(partial), static_cast<void *>(arrivals)})
            CHECK(cudaFree(one));
    }
}
