// The kernels on a GPU.
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "kernels.cu"
#include "runner.h"

namespace {

void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    exit(2);
}

// Device memory with a copy of `host`, rounded up to whole vectors.
template <class T> struct OnGpu {
    T *data = nullptr;
    explicit OnGpu(const std::vector<T> &host) {
        check(cudaMalloc(&data, host.size() * sizeof(T) + 16), "cudaMalloc");
        check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    }
    void download(std::vector<T> &host) const {
        check(cudaMemcpy(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
    }
    ~OnGpu() { cudaFree(data); }
    OnGpu(const OnGpu &) = delete;
};

const std::map<std::string, void (*)(Items)> KERNELS = {
    {"test_and_or", test_and_or},
    {"test_select_of_eight", test_select_of_eight},
    {"test_load_1", test_load_1},
    {"test_load_2", test_load_2},
    {"test_load_4", test_load_4},
    {"test_load_4_kept", test_load_4_kept},
    {"test_e4m3x2", test_e4m3x2},
    {"test_e4m3x4", test_e4m3x4},
    {"test_e8m0", test_e8m0},
    {"test_bf16_to_float", test_bf16_to_float},
    {"test_half_to_float", test_half_to_float},
    {"test_load_float", test_load_float},
    {"test_store_f32", test_store_f32},
    {"test_round_f16", test_round_f16},
    {"test_round_bf16", test_round_bf16},
    {"test_arithmetic", test_arithmetic},
    {"test_bits", test_bits},
    {"test_hmul2", test_hmul2},
    {"test_copy", test_copy},
    {"test_transposed", test_transposed},
    {"test_load_transposed", test_load_transposed},
    {"test_dependent_launch", test_dependent_launch},
};
const std::map<std::string, void (*)(Products)> PRODUCTS = {{"test_mma", test_mma}, {"test_mma_bf16", test_mma_bf16}};

struct Gpu : Runner {
    std::string name() const override {
        cudaDeviceProp properties;
        check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
        return properties.name;
    }

    bool has_bf16() const override {
        cudaFuncAttributes attributes;
        check(cudaFuncGetAttributes(&attributes, test_mma_bf16), "cudaFuncGetAttributes");
        return attributes.ptxVersion >= 80;
    }

    std::vector<uint32_t> items(const char *kernel, const std::vector<uint32_t> &in, uint64_t count, int out_words) override {
        std::vector<uint32_t> out(count * out_words, 0xdeadbeef);
        const OnGpu<uint32_t> device_in(in), device_out(out);
        const unsigned blocks = unsigned((count + ITEM_THREADS - 1) / ITEM_THREADS);
        KERNELS.at(kernel)<<<blocks, ITEM_THREADS>>>(Items{device_in.data, device_out.data, count});
        check(cudaGetLastError(), kernel);
        check(cudaDeviceSynchronize(), kernel);
        device_out.download(out);
        return out;
    }

    std::vector<float> products(const char *kernel, const std::vector<uint16_t> &a, const std::vector<uint16_t> &b,
                                const std::vector<float> &c) override {
        const OnGpu<uint16_t> device_a(a), device_b(b);
        const OnGpu<float> device_d(c);
        PRODUCTS.at(kernel)<<<unsigned(a.size() / 256), 32>>>(Products{device_a.data, device_b.data, device_d.data});
        check(cudaGetLastError(), kernel);
        check(cudaDeviceSynchronize(), kernel);
        std::vector<float> d(c.size());
        device_d.download(d);
        return d;
    }
};

}  // namespace

Runner *gpu() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "no GPU");
    return new Gpu;
}
