// What went wrong, in words.
#pragma once
#include <string>

#include "scheduler.h"

namespace emulator {

const char *name(Operation operation);
std::string describe(Place place);
std::string describe(const Block &block);
std::string describe(const Thread &thread);
// Where every thread of the block is.
std::string describe_threads(const Block &block);

[[noreturn]] void fail_deadlocked(Block &block);

}  // namespace emulator
