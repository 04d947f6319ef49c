// Whether a kernel runs at all: the first question of scripts/gpu.sh run.
#include "harness.cuh"

static __global__ void answer(int *out) { *out = int(threadIdx.x) + 42; }

int main() {
    int *device, host = 0;
    CHECK(cudaMalloc(&device, sizeof *device));
    answer<<<1, 1>>>(device);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost));
    if (host == 42) return 0;
    fprintf(stderr, "a kernel wrote %d instead of 42\n", host);
    return 1;
}
