// Programmatic dependent launch: a kernel that starts before the one ahead of it in the stream has finished.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernel.h"
#include "memory.h"
#include "scheduler.h"

namespace emulator {

// A block that ran up to its wait.
struct Parked {
    uint64_t number;  // of the block, in its grid
    std::unique_ptr<Machine> machine;
};

// The blocks of a grid that started early, each in a machine of its own.
struct Early {
    std::vector<Parked> blocks;

    // The machine of a block, if it started early.
    std::unique_ptr<Machine> take(uint64_t number);
    ~Early();
};

// Memory that must stay as it was, and how it was.
struct Watch {
    std::vector<Memory> memory;
    std::vector<std::vector<unsigned char>> bytes;

    Watch(const Memory *memory, size_t count);
    bool changed() const;
    void restore() const;
};

}  // namespace emulator
