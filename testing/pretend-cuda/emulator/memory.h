// Stacks and shared memory.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "scheduler.h"

namespace emulator {

constexpr size_t STACK_SIZE = 256 * 1024;

// Makes a number of it that is NaN in every format.
void fill_with_poison(unsigned char *memory, size_t bytes);

// What a launch needs and the next one can use again: a block, its threads and their stacks.
class Machine {
public:
    Block block{};

    // Threads and dynamic shared memory for a launch.
    void prepare(unsigned threads, size_t shared_bytes);
    // Fills shared memory with numbers that are NaN in every format.
    void poison_shared();
    // Aborts if a thread had more on its stack than fits.
    void check_stacks() const;

private:
    std::vector<Thread> threads;
    std::unique_ptr<void, void (*)(void *)> shared{nullptr, nullptr};
};

// How the guards around the dynamic shared memory of `block` were broken; empty if they were not.
std::string shared_overrun(const Block &block);

// A machine that no other launch uses, until it is handed back.
std::unique_ptr<Machine> take_machine();
void hand_back(std::unique_ptr<Machine> machine);

}  // namespace emulator
