#include "early.h"

#include <cstring>

#include "diagnosis.h"

namespace emulator {

std::unique_ptr<Machine> Early::take(uint64_t number) {
    for (Parked &parked : blocks)
        if (parked.number == number) return std::move(parked.machine);
    return nullptr;
}

Early::~Early() {
    for (Parked &parked : blocks) {
        if (!parked.machine) continue;
        forget_block(parked.machine->block);
        hand_back(std::move(parked.machine));
    }
}

Watch::Watch(const Memory *first, size_t count) : memory(first, first + count) {
    for (const Memory &part : memory) bytes.emplace_back(part.start, part.start + part.size);
}

bool Watch::changed() const {
    for (size_t i = 0; i < memory.size(); ++i)
        if (memcmp(memory[i].start, bytes[i].data(), memory[i].size)) return true;
    return false;
}

void Watch::restore() const {
    for (size_t i = 0; i < memory.size(); ++i) memcpy(memory[i].start, bytes[i].data(), memory[i].size);
}

void let_next_kernel_start(Place place) {
    const Thread &self = *current;
    if (self.block->starts_early && !has_waited(self))
        fail("trigger before wait: lets the next kernel start before it has waited for the ones before it", place);
}

}  // namespace emulator
