// Kernels are found by name, and take one parameter struct by value.
#pragma once
#include <cstddef>

#include "vector_types.h"

namespace emulator {

// The order in which the blocks of a launch, and the threads that could run, do run.
enum class Schedule : int { Forward = 0, Reverse = 1, Random = 2 };

// Bytes from one of several parameters to the next.
constexpr size_t PARAM_SLOT = 16;

struct Kernel {
    const char *name;
    void (*run)(const void *params);
    size_t params_size;
    unsigned threads;  // in each block; 0 if it takes any number
    const size_t *sizes;  // of several parameters, each in a slot of its own; null for one struct
    const Kernel *next;

    Kernel(const char *name, void (*run)(const void *), size_t params_size, unsigned threads);
    Kernel(const char *name, void (*run)(const void *), const size_t *sizes);
};

// What is launched.
struct Grid {
    const Kernel *kernel;
    unsigned blocks[3], threads[3];
    size_t shared_bytes;
    const void *params;
    Schedule schedule;
    unsigned long long seed;
    // Launched with programmatic stream serialization: every thread has to wait for the kernels before this one.
    int starts_early;
};

struct Memory {
    unsigned char *start;
    size_t size;
};

struct Early;

}  // namespace emulator

// Defines and registers a kernel; a function body follows, in which `p` is the parameter struct.
#define EMULATED_KERNEL(name, Params, threads)                                                                \
    static void name##_body(const Params &p);                                                                 \
    static void name##_run(const void *params) { name##_body(*static_cast<const Params *>(params)); }        \
    static const emulator::Kernel name##_kernel(#name, name##_run, sizeof(Params), threads);                  \
    static void name##_body([[maybe_unused]] const Params &p)

extern "C" {

const emulator::Kernel *emulator_find_kernel(const char *name);
// Of all kernels together.
size_t emulator_static_shared_bytes();
void emulator_kernel_shape(const emulator::Kernel *kernel, size_t *params_size, unsigned *threads);
// Sizes of several parameters, up to 0; null if the kernel takes one struct.
const size_t *emulator_kernel_param_sizes(const emulator::Kernel *kernel);

// Runs the first, the last, and a few other blocks of a grid up to where they wait for earlier kernels; the grid and its
// parameters have to stay where they are. Null, with a description of the fault in `message`, cut to `capacity` bytes, if
// something goes wrong or anything in `watched`, the memory that the kernel can reach, was written.
emulator::Early *emulator_start_early(const emulator::Grid *grid, const emulator::Memory *watched, size_t count,
                                      char *message, size_t capacity);
void emulator_drop_early(emulator::Early *early);

// Runs a grid, or the rest of it if some blocks started early. Returns 0, or 1 with a description of the fault.
int emulator_launch(const emulator::Grid *grid, emulator::Early *early, char *message, size_t capacity);

}
