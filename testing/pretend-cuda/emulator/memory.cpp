#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "sanitizer.h"

extern __thread unsigned char emulator_shared_begin[], emulator_shared_end[];

namespace emulator {

// A NaN in half, bfloat16, and float.
static const uint16_t POISON = 0x7fff;
static const size_t ALIGNMENT = 128;
// On both sides of dynamic shared memory. AddressSanitizer has its own.
static const size_t GUARD = sanitizer::ADDRESS ? 0 : 2 * ALIGNMENT;

void fill_with_poison(unsigned char *memory, size_t bytes) {
    for (size_t i = 0; i + 1 < bytes; i += 2) memcpy(memory + i, &POISON, 2);
    if (bytes % 2) memory[bytes - 1] = POISON & 0xff;
}

// A guard as it was filled.
struct Guard {
    unsigned char bytes[GUARD + 1];
    Guard() { fill_with_poison(bytes, GUARD); }
};
static const Guard intact;

// First byte of a guard that is not what it was, or GUARD.
static size_t first_change(const unsigned char *guard) {
    if (memcmp(guard, intact.bytes, GUARD) == 0) return GUARD;
    size_t i = 0;
    while (guard[i] == intact.bytes[i]) ++i;
    return i;
}

// The stacks of a warp, each below the next, below them a guard: a process can have so many mappings only.
static char *map_stacks() {
    const size_t guard = sysconf(_SC_PAGESIZE);
    void *memory = mmap(nullptr, guard + WARP * STACK_SIZE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE)) {
        perror("emulator: no memory for the stacks of CUDA threads");
        abort();
    }
    return static_cast<char *>(memory) + guard;
}

void Machine::check_stacks() const {
    for (const Thread &thread : threads) {
        // Memory that was never written is zero.
        for (size_t i = 0; i < 8; ++i) {
            if (thread.stack[i] == 0) continue;
            fputs("emulator: the stack of a CUDA thread is full\n", stderr);
            abort();
        }
    }
}

void Machine::prepare(unsigned size, size_t shared_bytes) {
    while (threads.size() < size) {
        char *stacks = map_stacks();
        for (unsigned i = 0; i < WARP; ++i) {
            threads.emplace_back();
            threads.back().stack = stacks + i * STACK_SIZE;
        }
    }
    block.threads = threads.data();
    block.size = size;

    void *memory = nullptr;
    const size_t bytes = GUARD + shared_bytes + GUARD;
    if (posix_memalign(&memory, ALIGNMENT, bytes ? bytes : 1)) abort();
    shared = {memory, free};
    block.shared = static_cast<unsigned char *>(memory) + GUARD;
    block.shared_bytes = shared_bytes;
    fill_with_poison(block.shared - GUARD, GUARD);
    fill_with_poison(block.shared + shared_bytes, GUARD);
}

void Machine::poison_shared() { fill_with_poison(block.shared, block.shared_bytes); }

std::string shared_overrun(const Block &block) {
    const size_t before = first_change(block.shared - GUARD);
    const size_t after = first_change(block.shared + block.shared_bytes);
    if (before < GUARD)
        return "shared memory was written " + std::to_string(GUARD - before) + " bytes before its start";
    if (after < GUARD)
        return "shared memory overrun: byte " + std::to_string(block.shared_bytes + after) +
               " was written, the launch has " + std::to_string(block.shared_bytes);
    return {};
}

static std::mutex machines_lock;
static std::vector<std::unique_ptr<Machine>> &idle_machines() {
    static auto *machines = new std::vector<std::unique_ptr<Machine>>;
    return *machines;
}

std::unique_ptr<Machine> take_machine() {
    const std::lock_guard<std::mutex> lock(machines_lock);
    auto &machines = idle_machines();
    if (machines.empty()) return std::make_unique<Machine>();
    auto machine = std::move(machines.back());
    machines.pop_back();
    return machine;
}

void hand_back(std::unique_ptr<Machine> machine) {
    machine->check_stacks();
    const std::lock_guard<std::mutex> lock(machines_lock);
    idle_machines().push_back(std::move(machine));
}

}  // namespace emulator

size_t emulator_static_shared_bytes() {
    const auto begin = reinterpret_cast<uintptr_t>(emulator_shared_begin) + 128;
    const auto end = reinterpret_cast<uintptr_t>(emulator_shared_end);
    if (end < begin) {
        fputs("emulator: link shared_begin.cpp before the kernels and shared_end.cpp after them\n", stderr);
        abort();
    }
    return end - begin;
}
