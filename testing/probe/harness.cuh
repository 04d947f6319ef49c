// Timing and records for the probes: small programs that answer one question about a GPU each.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#define CHECK(call) probe::check(call, #call)

namespace probe {

inline void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

inline const cudaDeviceProp &device() {
    static const cudaDeviceProp properties = [] {
        cudaDeviceProp p;
        CHECK(cudaGetDeviceProperties(&p, 0));
        return p;
    }();
    return properties;
}

inline int multiprocessors() { return device().multiProcessorCount; }

// One line of JSON: {"kind": "probe", "name": .., the rest as given}.
inline void record(const char *name, const char *format, ...) {
    printf("{\"kind\": \"probe\", \"name\": \"%s\", ", name);
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("}\n");
    fflush(stdout);
}

inline double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

inline cudaStream_t stream() {
    static const cudaStream_t stream = [] {
        cudaStream_t s;
        CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        return s;
    }();
    return stream;
}

// Launches a kernel with what the probes vary.
struct Launch {
    dim3 grid, block;
    size_t shared = 0;
    bool early = false;  // programmatic dependent launch
    int cluster = 1;     // blocks of a cluster, along y

    template <class... Parameters, class... Arguments> void operator()(void (*kernel)(Parameters...), Arguments... arguments) const {
        cudaLaunchAttribute attributes[2];
        cudaLaunchConfig_t config = {};
        config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream();
        config.attrs = attributes;
        if (early) {
            attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
        }
        if (cluster > 1) {
            attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
            attributes[config.numAttrs].val.clusterDim.x = 1;
            attributes[config.numAttrs].val.clusterDim.y = cluster;
            attributes[config.numAttrs++].val.clusterDim.z = 1;
        }
        CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
    }
};

// Microseconds of one of `launches` launches in a graph: the median of 20 replays.
template <class F> double time_in_graph(int launches, F launch, int replays = 20) {
    launch(0);
    CHECK(cudaStreamSynchronize(stream()));
    CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < launches; ++i) launch(i);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream(), &graph));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(executable, stream()));
    std::vector<cudaEvent_t> events(2 * replays);
    for (auto &event : events) CHECK(cudaEventCreate(&event));
    for (int i = 0; i < replays; ++i) {
        CHECK(cudaEventRecord(events[2 * i], stream()));
        CHECK(cudaGraphLaunch(executable, stream()));
        CHECK(cudaEventRecord(events[2 * i + 1], stream()));
    }
    CHECK(cudaStreamSynchronize(stream()));
    std::vector<double> samples;
    for (int i = 0; i < replays; ++i) {
        float ms;
        CHECK(cudaEventElapsedTime(&ms, events[2 * i], events[2 * i + 1]));
        samples.push_back(ms * 1e3 / launches);
    }
    for (auto event : events) CHECK(cudaEventDestroy(event));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    return median(samples);
}

// Random words; kernels run slower on them than on zeros.
static __global__ void fill_randomly(uint32_t *words, uint64_t count) {
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += uint64_t(gridDim.x) * blockDim.x) {
        uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        words[i] = uint32_t((z ^ (z >> 27)) >> 16);
    }
}

inline char *random_memory(size_t bytes) {
    char *memory;
    CHECK(cudaMalloc(&memory, bytes));
    fill_randomly<<<multiprocessors() * 8, 256>>>(reinterpret_cast<uint32_t *>(memory), bytes / 4);
    CHECK(cudaDeviceSynchronize());
    return memory;
}

// Copies of `bytes` that together are four times the second-level cache, and how many to launch in a graph.
struct Rotation {
    size_t bytes, stride;
    int copies, launches;
    explicit Rotation(size_t bytes) : bytes(bytes), stride((bytes + 255) / 256 * 256) {
        copies = std::max<int>(2, int((4 * size_t(device().l2CacheSize) + bytes - 1) / bytes));
        const double expected = 2 + bytes / 4e6;
        launches = std::max(copies, std::min(100, int(3000 / expected)));
    }
    size_t all() const { return stride * copies; }
    size_t offset(int launch) const { return launch % copies * stride; }
};

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Keeps what is computed from being left out; `sink` is null, which the compiler cannot know.
__device__ __forceinline__ void keep(uint32_t value, uint32_t *sink) {
    if (sink) *sink = value;
}

}  // namespace probe
