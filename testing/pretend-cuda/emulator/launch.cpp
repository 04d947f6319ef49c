#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "early.h"
#include "illegal_address.h"
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

static Machine &make_ready(Machine &machine, const Grid &grid) {
    diagnose_illegal_addresses();
    Block &block = machine.block;
    block.kernel = grid.kernel;
    block.params = grid.params;
    block.grid = {grid.blocks[0], grid.blocks[1], grid.blocks[2]};
    block.dim = {grid.threads[0], grid.threads[1], grid.threads[2]};
    block.schedule = grid.schedule;
    // Neighbouring seeds must not give neighbouring orders.
    block.random = (grid.seed + 1) * 0x9e3779b97f4a7c15u;
    block.starts_early = grid.starts_early;
    block.before_wait = block.started_early = false;
    block.watch = nullptr;
    machine.prepare(block.dim.x * block.dim.y * block.dim.z, grid.shared_bytes);
    return machine;
}

static uint64_t blocks_of(const Grid &grid) { return uint64_t(grid.blocks[0]) * grid.blocks[1] * grid.blocks[2]; }

static bool run_block(Machine &machine, uint64_t number) {
    Block &block = machine.block;
    const dim3 grid = block.grid;
    block.index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / (uint64_t(grid.x) * grid.y))};
    machine.poison_shared();
    return run_block(block);
}

static std::string launch(Machine &machine, const Grid &grid, Early *early) {
    const uint64_t count = blocks_of(grid), random = machine.block.random >> 8;
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t number = block_in_turn(i, count, grid.schedule, random);
        if (auto parked = early ? early->take(number) : nullptr) {
            const std::string fault = resume_block(parked->block) ? std::string() : parked->block.fault;
            hand_back(std::move(parked));
            if (!fault.empty()) return fault;
        } else if (!run_block(machine, number)) {
            return machine.block.fault;
        }
    }
    return {};
}

// Numbers of the blocks that start early: the first, the last, and up to six others.
static std::vector<uint64_t> sample(uint64_t count, uint64_t random) {
    std::vector<uint64_t> numbers = {0, count - 1};
    for (int i = 0; i < 6; ++i) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        numbers.push_back((random >> 16) % count);
    }
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    return numbers;
}

static std::string start_early(const Grid &grid, uint64_t number, const Watch *watch, Early &early) {
    auto machine = take_machine();
    Block &block = make_ready(*machine, grid).block;
    block.before_wait = block.started_early = true;
    block.watch = watch;
    const std::string fault = run_block(*machine, number) ? std::string() : block.fault;
    early.blocks.push_back({number, std::move(machine)});
    return fault;
}

static std::string start_early(const Grid &grid, const Watch &watch, Early &early) {
    const auto numbers = sample(blocks_of(grid), grid.seed);
    for (uint64_t number : numbers) {
        const std::string fault = start_early(grid, number, nullptr, early);
        if (!fault.empty()) return fault;
    }
    if (!watch.changed()) return {};
    // Once more, to see who did it.
    for (uint64_t number : numbers) {
        watch.restore();
        Early again;
        const std::string fault = start_early(grid, number, &watch, again);
        if (!fault.empty()) return fault;
    }
    return std::string("kernel `") + grid.kernel->name + "`: " + WRITES_EARLY;
}

static int report(const std::string &fault, char *message, size_t capacity) {
    if (fault.empty()) return 0;
    snprintf(message, capacity, "%s", fault.c_str());
    return 1;
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

Early *emulator_start_early(const Grid *grid, const Memory *watched, size_t count, char *message, size_t capacity) {
    auto early = std::make_unique<Early>();
    const Watch watch(watched, count);
    if (report(start_early(*grid, watch, *early), message, capacity)) return nullptr;
    return early.release();
}

void emulator_drop_early(Early *early) { delete early; }

int emulator_launch(const Grid *grid, Early *early, char *message, size_t capacity) {
    auto machine = take_machine();
    const std::string fault = launch(make_ready(*machine, *grid), *grid, early);
    hand_back(std::move(machine));
    return report(fault, message, capacity);
}
