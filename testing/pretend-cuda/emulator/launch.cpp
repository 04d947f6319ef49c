#include <cstdio>
#include <cstring>
#include <numeric>

#include "kernel.h"
#include "memory.h"
#include "scheduler.h"

namespace emulator {

static const Kernel *kernels = nullptr;

Kernel::Kernel(const char *name, void (*run)(const void *), size_t params_size, unsigned threads)
    : name(name), run(run), params_size(params_size), threads(threads), sizes(nullptr), next(kernels) {
    kernels = this;
}

static size_t slots(const size_t *sizes) {
    size_t bytes = 0;
    while (*sizes++) bytes += PARAM_SLOT;
    return bytes;
}

Kernel::Kernel(const char *name, void (*run)(const void *), const size_t *sizes)
    : name(name), run(run), params_size(slots(sizes)), threads(0), sizes(sizes), next(kernels) {
    kernels = this;
}

// The block that runs as number `i` of `count`.
static uint64_t block_in_turn(uint64_t i, uint64_t count, Schedule schedule, uint64_t random) {
    if (schedule == Schedule::Forward) return i;
    if (schedule == Schedule::Reverse) return count - 1 - i;
    uint64_t step = random % count | 1;
    while (std::gcd(step, count) != 1) ++step;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(i) * step + random % count) % count);
}

static std::string launch(Machine &machine, size_t shared_bytes, uint64_t random) {
    Block &block = machine.block;
    machine.prepare(block.dim.x * block.dim.y * block.dim.z, shared_bytes);
    const uint64_t count = uint64_t(block.grid.x) * block.grid.y * block.grid.z;
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t b = block_in_turn(i, count, block.schedule, random);
        block.index = {unsigned(b % block.grid.x), unsigned(b / block.grid.x % block.grid.y),
                       unsigned(b / (uint64_t(block.grid.x) * block.grid.y))};
        machine.poison_shared();
        if (!run_block(block)) return block.fault;
    }
    return {};
}

}  // namespace emulator

using namespace emulator;

const Kernel *emulator_find_kernel(const char *name) {
    const Kernel *kernel = kernels;
    while (kernel && strcmp(kernel->name, name)) kernel = kernel->next;
    return kernel;
}

void emulator_kernel_shape(const Kernel *kernel, size_t *params_size, unsigned *threads) {
    *params_size = kernel->params_size;
    *threads = kernel->threads;
}

const size_t *emulator_kernel_param_sizes(const Kernel *kernel) { return kernel->sizes; }

int emulator_launch(const Kernel *kernel, const unsigned grid[3], const unsigned dim[3], size_t shared_bytes,
                    const void *params, int schedule, unsigned long long seed, char *message, size_t capacity) {
    auto machine = take_machine();
    Block &block = machine->block;
    block.kernel = kernel;
    block.params = params;
    block.grid = {grid[0], grid[1], grid[2]};
    block.dim = {dim[0], dim[1], dim[2]};
    block.schedule = static_cast<Schedule>(schedule);
    // Neighbouring seeds must not give neighbouring orders.
    block.random = (seed + 1) * 0x9e3779b97f4a7c15u;
    const std::string fault = launch(*machine, shared_bytes, block.random >> 8);
    hand_back(std::move(machine));
    if (fault.empty()) return 0;
    snprintf(message, capacity, "%s", fault.c_str());
    return 1;
}
