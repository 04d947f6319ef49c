// Something that runs the kernels of kernels.cu.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

struct Runner {
    virtual ~Runner() = default;
    virtual std::string name() const = 0;
    // Whether the architecture that the kernels were compiled for has a product of bf16.
    virtual bool has_bf16() const { return true; }
    // Runs a kernel of Items; `out_words` words for each of `count` items.
    virtual std::vector<uint32_t> items(const char *kernel, const std::vector<uint32_t> &in, uint64_t count, int out_words) = 0;
    // D = A B + C for every [16, 16], [16, 8], [16, 8], by a kernel of Products.
    virtual std::vector<float> products(const char *kernel, const std::vector<uint16_t> &a, const std::vector<uint16_t> &b, const std::vector<float> &c) = 0;
};

// The GPU; null if this program was built without CUDA.
Runner *gpu();
Runner *emulator();
