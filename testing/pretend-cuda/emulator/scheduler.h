// The threads of one block, and what they wait for.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "context.h"
#include "kernel.h"
#include "vector_types.h"

namespace emulator {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;

enum class Operation : uint8_t {
    Syncthreads, Syncwarp, Shfl, ShflXor, ShflUp, ShflDown, Ballot, Any, All, Mma, Ldmatrix, Movmatrix,
};

// Where in the source an operation stands.
struct Place {
    const char *file;
    int line;
    static constexpr Place here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

struct Block;
struct Warp;

// A copy that has been started but whose bytes have not arrived.
struct AsyncCopy {
    void *to;
    const void *from;
    unsigned bytes, zeros;  // copied, then filled with zeros
    unsigned group;
    bool early = false;     // begun before the wait for earlier kernels: then what there was is copied
    unsigned char before[16] = {};
};

// Bytes that a copy brought to shared memory, and that not all threads of the block may read yet. While those run that
// may not, poison takes their place.
struct Arrived {
    unsigned char *to;
    unsigned size;
    unsigned char bytes[16];  // while they are hidden
};

struct Thread {
    StackPointer stack_pointer;
    Block *block;
    Warp *warp;
    uint3 index;
    unsigned lane;
    void *operand;  // of the warp operation it takes part in; lies on its stack
    std::vector<AsyncCopy> copies;
    unsigned copy_groups;  // committed so far
    std::vector<Arrived> arrived;  // that no other thread may read
    bool waited;                   // for earlier kernels
    char *stack;       // lowest address
    void *fake_stack;  // AddressSanitizer's
};

// A warp operation that some of its lanes have reached.
struct Meeting {
    Operation operation;
    Place place;
    uint32_t mask, arrived;
};

struct Warp {
    Thread *first;
    uint32_t lanes;  // that exist
    uint32_t ready;  // could run, but do not
    uint32_t left;   // have ended
    uint32_t at_barrier;
    uint32_t at_wait;  // for earlier kernels
    Meeting meetings[WARP];
    unsigned open;  // meetings
    std::vector<Arrived> arrived;  // that no other warp may read
    bool hidden;                   // what arrived

    Thread &lane(unsigned i) const { return first[i]; }
};

struct Watch;

// The block that runs, and the launch it belongs to.
struct Block {
    const Kernel *kernel;
    const void *params;
    dim3 grid, dim;
    Schedule schedule;
    uint64_t random;

    uint3 index;
    unsigned size;  // threads
    Thread *threads;
    Warp warps[MAX_THREADS / WARP];
    uint32_t ready_warps;  // with threads that could run
    unsigned left;         // threads that have ended
    unsigned at_barrier;
    Place barrier;
    bool any_arrived;  // copies that not all threads may read

    bool starts_early;   // the launch
    bool started_early;  // this block
    bool before_wait;    // it runs up to its wait
    bool waited;         // some thread has
    bool all_waited;     // or passed a barrier after one that had
    unsigned at_wait;    // threads
    const Watch *watch;  // memory that must not be written, looked at whenever a thread stops

    unsigned char *shared;
    size_t shared_bytes;

    StackPointer launcher;
    const void *launcher_stack;  // as AddressSanitizer wants it
    size_t launcher_stack_size;
    std::string fault;
};

// The running thread. (`__thread`: a `thread_local` declared elsewhere is read through a function.)
extern __thread Thread *current __attribute__((tls_model("initial-exec")));

// Ends the launch with a message that names kernel, block, and thread.
[[noreturn]] void fail(const std::string &reason, Place place = Place::here());
[[noreturn]] void fail(const char *reason, Place place = Place::here());

// Meets the other lanes of `mask` that exist, each with an operand. The last to arrive calls
// `complete(warp, mask, place)`, which finds the operand of each lane in `lane(i).operand` and leaves the
// result there; then all go on.
void meet(Operation operation, uint32_t mask, void *operand, Place place,
          void (*complete)(Warp &, uint32_t, Place));

// Whether this block started before the kernels before this one were complete.
inline bool started_early() { return current->block->started_early; }

// griddepcontrol.wait: the kernels before this one are complete, and what they wrote is visible. When a block starts
// early, its threads stay here until that is so.
void wait_for_earlier_kernels(Place place = Place::here());

// griddepcontrol.launch_dependents. Comes after the own wait: what the next kernel may read before its wait was written
// two launches ago.
void let_next_kernel_start(Place place = Place::here());

// Base of the dynamic shared memory of the block, aligned to 128 bytes.
inline unsigned char *dynamic_shared() { return current->block->shared; }

// Whether the kernels before this one are complete, as far as the thread can know.
inline bool has_waited(const Thread &thread) { return thread.waited || thread.block->all_waited; }

// What a thread does that writes before it has waited.
extern const char *const WRITES_EARLY;

// Runs all threads of `block`, up to where they wait for earlier kernels if it is `before_wait`; false if one of them
// failed.
bool run_block(Block &block);
// Runs the rest of a block that waits for earlier kernels.
bool resume_block(Block &block);
// A block that waits for earlier kernels will not be resumed.
void forget_block(Block &block);

}  // namespace emulator

void __syncthreads(emulator::Place place = emulator::Place::here());
void __syncwarp(uint32_t mask = 0xffffffffu, emulator::Place place = emulator::Place::here());
[[noreturn]] inline void __trap(emulator::Place place = emulator::Place::here()) { emulator::fail("__trap", place); }
// Memory of the device is seen by every thread at once.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
