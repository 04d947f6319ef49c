// The kernels on the emulator, which runs the branches of device.cuh that are for the host.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "runner.h"

// Of the emulator's library (kernel.h), whose headers would clash with CUDA's.
struct Grid {
    const void *kernel;
    unsigned blocks[3], threads[3];
    size_t shared_bytes;
    const void *params;
    int schedule;
    unsigned long long seed;
    int starts_early;
};
extern "C" const void *emulator_find_kernel(const char *name);
extern "C" int emulator_launch(const Grid *grid, void *early, char *message, size_t capacity);

namespace {

struct Emulator : Runner {
    std::string name() const override { return "emulator"; }

    void run(const char *kernel, unsigned blocks, unsigned threads, const void *params) const {
        char message[1024] = "";
        const void *found = emulator_find_kernel(kernel);
        const Grid grid = {found, {blocks, 1, 1}, {threads, 1, 1}, 0, params, 0, 0, 0};
        if (found && emulator_launch(&grid, nullptr, message, sizeof message) == 0) return;
        fprintf(stderr, "%s: %s\n", kernel, found ? message : "no such kernel");
        exit(2);
    }

    std::vector<uint32_t> items(const char *kernel, const std::vector<uint32_t> &in, uint64_t count, int out_words) override {
        std::vector<uint32_t> out(count * out_words, 0xdeadbeef);
        const size_t in_words = in.size() / count;
        const uint64_t threads = std::min<uint64_t>(std::thread::hardware_concurrency(), count);
        std::vector<std::thread> workers;
        for (uint64_t worker = 0; worker < threads; ++worker) {
            // Whole blocks, so that warps have the items that they have on a GPU.
            auto share = [=](uint64_t worker) { return count * worker / threads / ITEM_THREADS * ITEM_THREADS; };
            const uint64_t begin = share(worker), end = worker + 1 == threads ? count : share(worker + 1);
            workers.emplace_back([=, &in, &out] {
                const Items items{in.data() + begin * in_words, out.data() + begin * out_words, end - begin};
                run(kernel, unsigned((items.count + ITEM_THREADS - 1) / ITEM_THREADS), ITEM_THREADS, &items);
            });
        }
        for (auto &worker : workers) worker.join();
        return out;
    }

    std::vector<float> products(const char *kernel, const std::vector<uint16_t> &a, const std::vector<uint16_t> &b,
                                const std::vector<float> &c) override {
        std::vector<float> d = c;
        const Products products{a.data(), b.data(), d.data()};
        run(kernel, unsigned(a.size() / 256), 32, &products);
        return d;
    }
};

}  // namespace

Runner *emulator() { return new Emulator; }
