#include "scheduler.h"

#include "async_copy.h"
#include "diagnosis.h"
#include "early.h"
#include "memory.h"
#include "sanitizer.h"

namespace emulator {

__thread Thread *current;

static uint32_t bit(const Thread &thread) { return 1u << thread.lane; }

static void wake(Block &block, Warp &warp, uint32_t lanes) {
    warp.ready |= lanes;
    block.ready_warps |= 1u << (&warp - block.warps);
}

static unsigned lowest(uint32_t set) { return __builtin_ctz(set); }
static unsigned highest(uint32_t set) { return 31 - __builtin_clz(set); }

// A member of `set`, which is not empty.
static unsigned any_of(uint32_t set, uint64_t &random) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const unsigned start = random >> 59;
    const uint32_t rotated = start ? set >> start | set << (32 - start) : set;
    return (lowest(rotated) + start) % 32;
}

// Takes the thread to run next out of those that could; null if there is none.
static Thread *take_next(Block &block) {
    if (!block.ready_warps) return nullptr;
    unsigned w, l;
    switch (block.schedule) {
    case Schedule::Forward:
        w = lowest(block.ready_warps);
        l = lowest(block.warps[w].ready);
        break;
    case Schedule::Reverse:
        w = highest(block.ready_warps);
        l = highest(block.warps[w].ready);
        break;
    default:
        w = any_of(block.ready_warps, block.random);
        l = any_of(block.warps[w].ready, block.random);
    }
    Warp &warp = block.warps[w];
    warp.ready &= ~(1u << l);
    if (!warp.ready) block.ready_warps &= ~(1u << w);
    return &warp.lane(l);
}

const char *const WRITES_EARLY = "writes to memory of the device before it waits for the kernels before it";

// The running thread stops, and lets `next` (or the launcher) run.
static void stop(const Thread *next) {
    const Thread &self = *current;
    if (self.block->watch && self.block->watch->changed()) fail(WRITES_EARLY, {"before the wait", 0});
    if (self.block->any_arrived) hide_arrived(next);
}

// The running thread goes on, or begins.
static void start() {
    if (current->block->any_arrived) show_arrived();
}

// Back to the launcher, until the block is resumed.
static void suspend(Block &block) {
    Thread &self = *current;
    stop(nullptr);
    sanitizer::leaving(&self.fake_stack, block.launcher_stack, block.launcher_stack_size);
    switch_context(&self.stack_pointer, block.launcher);
    sanitizer::entered(self.fake_stack);
    start();
}

// Lets other threads run until this one is awake and its turn comes.
static void park() {
    Thread &self = *current;
    Thread *next = take_next(*self.block);
    if (next == &self) return;
    if (!next && self.block->at_wait) return suspend(*self.block);
    if (!next) fail_deadlocked(*self.block);
    stop(next);
    current = next;
    sanitizer::leaving(&self.fake_stack, next->stack, STACK_SIZE);
    switch_context(&self.stack_pointer, next->stack_pointer);
    sanitizer::entered(self.fake_stack);
    start();
}

// Goes back to the launcher for good.
[[noreturn]] static void abandon_block(Block &block) {
    sanitizer::leaving(nullptr, block.launcher_stack, block.launcher_stack_size);
    switch_context(&current->stack_pointer, block.launcher);
    __builtin_unreachable();
}

void fail(const std::string &reason, Place place) {
    Block &block = *current->block;
    block.fault = describe(*current) + ": " + reason + " (" + describe(place) + ")";
    abandon_block(block);
}

void fail(const char *reason, Place place) { fail(std::string(reason), place); }

void fail_deadlocked(Block &block) {
    block.fault = describe(block) + ": deadlock: no thread can go on: " + describe_threads(block);
    abandon_block(block);
}

static void check_shared(const Block &block, Place place) {
    const std::string overrun = shared_overrun(block);
    if (!overrun.empty()) fail(overrun, place);
}

// Announces the running thread at a warp operation; true for the last of the lanes in `mask`, which exist.
static bool arrive(Operation operation, uint32_t mask, Place place) {
    Thread &self = *current;
    Warp &warp = *self.warp;
    const uint32_t me = bit(self);
    if (!(mask & me)) fail(std::string(name(operation)) + " by a lane that is not in its mask", place);
    if (mask & warp.left)
        fail(std::string(name(operation)) + " waits for lane " + std::to_string(lowest(mask & warp.left)) +
             ", which has left the kernel", place);
    for (unsigned i = 0; i < warp.open; ++i) {
        Meeting &meeting = warp.meetings[i];
        if (meeting.mask != mask) continue;
        if (meeting.operation != operation || meeting.place.line != place.line)
            fail(std::string("divergent warp: this lane is at ") + name(operation) + ", lane " +
                 std::to_string(lowest(meeting.arrived)) + " at " + name(meeting.operation) + " (" +
                 describe(meeting.place) + ")", place);
        meeting.arrived |= me;
        if (meeting.arrived != mask) return false;
        meeting = warp.meetings[--warp.open];
        return true;
    }
    if (mask == me) return true;
    warp.meetings[warp.open++] = {operation, place, mask, me};
    return false;
}

void meet(Operation operation, uint32_t mask, void *operand, Place place,
          void (*complete)(Warp &, uint32_t, Place)) {
    Thread &self = *current;
    self.operand = operand;
    mask &= self.warp->lanes;
    if (arrive(operation, mask, place)) {
        complete(*self.warp, mask, place);
        wake(*self.block, *self.warp, mask);
    }
    park();
}

// The running thread has come to the end of the kernel. Does not return, which AddressSanitizer must not know: it would look at
// the whole stack, and at that for signals.
__attribute__((noipa)) static void leave() {
    Thread &self = *current;
    Block &block = *self.block;
    Warp &warp = *self.warp;
    const Place kernel{"end of the kernel", 0};
    check_shared(block, kernel);
    if (block.starts_early && !has_waited(self)) fail("leaves the kernel before it has waited for the kernels before it", kernel);
    if (block.at_barrier)
        fail("leaves the kernel while others wait for it at __syncthreads, " + describe(block.barrier), kernel);
    for (unsigned i = 0; i < warp.open; ++i)
        if (warp.meetings[i].mask & bit(self))
            fail(std::string("leaves the kernel while lane ") + std::to_string(lowest(warp.meetings[i].arrived)) +
                 " waits for it at " + name(warp.meetings[i].operation) + ", " + describe(warp.meetings[i].place), kernel);
    warp.left |= bit(self);
    if (++block.left == block.size) abandon_block(block);
    Thread *next = take_next(block);
    if (!next) fail_deadlocked(block);
    stop(next);
    current = next;
    sanitizer::leaving(nullptr, next->stack, STACK_SIZE);
    switch_context(&self.stack_pointer, next->stack_pointer);
}

static void thread_main() {
    Block &block = *current->block;
    sanitizer::entered(nullptr, block.launcher_stack, block.launcher_stack_size);
    start();
    block.kernel->run(block.params);
    leave();
}

// Lets the threads of `block` run until they have ended, failed, or wait for earlier kernels.
static bool run_threads(Block &block) {
    current = take_next(block);
    void *fake_stack = nullptr;
    sanitizer::leaving(&fake_stack, current->stack, STACK_SIZE);
    switch_context(&block.launcher, current->stack_pointer);
    sanitizer::entered(fake_stack);
    current = nullptr;
    if (!block.at_wait) forget_block(block);
    return block.fault.empty();
}

void forget_block(Block &block) {
    // What lies below where a thread stopped has ended.
    for (unsigned i = 0; i < block.size; ++i) {
        const Thread &thread = block.threads[i];
        auto *used = static_cast<char *>(thread.stack_pointer);
        sanitizer::forget_stack(used, thread.stack + STACK_SIZE - used);
    }
}

bool run_block(Block &block) {
    block.left = block.at_barrier = block.at_wait = 0;
    block.waited = block.all_waited = block.any_arrived = false;
    block.ready_warps = 0;
    block.launcher_stack = nullptr;
    block.fault.clear();
    for (unsigned i = 0; i < block.size; ++i) {
        Thread &thread = block.threads[i];
        Warp &warp = block.warps[i / WARP];
        thread.block = &block;
        thread.warp = &warp;
        thread.lane = i % WARP;
        thread.index = {i % block.dim.x, i / block.dim.x % block.dim.y, i / (block.dim.x * block.dim.y)};
        thread.copies.clear();
        thread.copy_groups = 0;
        thread.arrived.clear();
        thread.waited = false;
        // Stacks that all began at the same offset in a page would compete for the same lines of cache.
        thread.stack_pointer = make_context(thread.stack + STACK_SIZE - i * 832 % 4096, thread_main);
        if (thread.lane == 0) {
            warp.first = &thread;
            const unsigned lanes = block.size - i < WARP ? block.size - i : WARP;
            warp.lanes = lanes == WARP ? ~0u : (1u << lanes) - 1;
            warp.ready = warp.left = warp.at_barrier = warp.at_wait = 0;
            warp.open = 0;
            warp.arrived.clear();
            warp.hidden = false;
            wake(block, warp, warp.lanes);
        }
    }
    return run_threads(block);
}

bool resume_block(Block &block) {
    block.before_wait = false;
    block.at_wait = 0;
    for (unsigned w = 0; w * WARP < block.size; ++w) {
        Warp &warp = block.warps[w];
        if (warp.at_wait) wake(block, warp, warp.at_wait);
        warp.at_wait = 0;
    }
    return run_threads(block);
}

void wait_for_earlier_kernels(Place) {
    Thread &self = *current;
    Block &block = *self.block;
    if (block.before_wait) {
        self.warp->at_wait |= bit(self);
        ++block.at_wait;
        park();
    }
    self.waited = block.waited = true;
}

}  // namespace emulator

using namespace emulator;

void __syncthreads(Place place) {
    Thread &self = *current;
    Block &block = *self.block;
    check_shared(block, place);
    if (block.left)
        fail("__syncthreads waits for " + std::to_string(block.left) + " threads that have left the kernel: " +
             describe_threads(block), place);
    if (block.at_barrier == 0)
        block.barrier = place;
    else if (block.barrier.line != place.line)
        fail("threads of one block wait at different barriers: this one and " + describe(block.barrier), place);
    self.warp->at_barrier |= bit(self);
    if (++block.at_barrier == block.size) {
        block.at_barrier = 0;
        block.all_waited = block.waited;
        if (block.any_arrived) publish_arrived(block);
        for (unsigned w = 0; w * WARP < block.size; ++w) {
            wake(block, block.warps[w], block.warps[w].lanes);
            block.warps[w].at_barrier = 0;
        }
    }
    park();
}

void __syncwarp(uint32_t mask, Place place) {
    meet(Operation::Syncwarp, mask, nullptr, place, [](Warp &warp, uint32_t lanes, Place) {
        bool waited = false;
        for (uint32_t left = lanes; left; left &= left - 1) waited |= warp.lane(lowest(left)).waited;
        if (waited)
            for (uint32_t left = lanes; left; left &= left - 1) warp.lane(lowest(left)).waited = true;
        if (current->block->any_arrived) publish_arrived(warp, lanes);
    });
}
