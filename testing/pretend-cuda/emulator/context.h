// Switching between stacks.
#pragma once
#include <cstddef>

namespace emulator {

// Where a context that is not running left off: its registers lie on its own stack.
using StackPointer = void *;

// Leaves the running context in `*from` and goes on with `to`.
void switch_context(StackPointer *from, StackPointer to);

// A context that starts in `entry`, which must not return, with its stack growing down from `top`.
StackPointer make_context(char *top, void (*entry)());

}  // namespace emulator
