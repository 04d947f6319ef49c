#include "warp.h"

#include <string>

namespace emulator {

void fail_shuffle(unsigned lane, unsigned source, Place place) {
    fail("lane " + std::to_string(lane) + " reads from lane " + std::to_string(source) +
         ", which does not take part in the shuffle", place);
}

static void complete_vote(Warp &warp, uint32_t mask, Place) {
    uint32_t votes = 0;
    auto operand_of = [&](unsigned lane) { return static_cast<uint32_t *>(warp.lane(lane).operand); };
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) votes |= *operand_of(lane) << lane;
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) *operand_of(lane) = votes;
}

uint32_t vote(Operation operation, uint32_t mask, bool predicate, Place place) {
    uint32_t operand = predicate;
    meet(operation, mask, &operand, place, complete_vote);
    return operand;
}

}  // namespace emulator
