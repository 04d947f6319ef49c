// What the lanes of a warp do together.
#pragma once
#include <cstdint>

#include "scheduler.h"

namespace emulator {

template <class T> struct ShuffleOperand {
    T value;
    unsigned source;  // lane
};

[[noreturn]] void fail_shuffle(unsigned lane, unsigned source, Place place);

// Every lane gets the value of its source, which has to take part.
template <class T> void complete_shuffle(Warp &warp, uint32_t mask, Place place) {
    T values[WARP];
    auto operand_of = [&](unsigned lane) { return static_cast<ShuffleOperand<T> *>(warp.lane(lane).operand); };
    for (uint32_t left = mask; left; left &= left - 1) {
        const unsigned lane = __builtin_ctz(left);
        values[lane] = operand_of(lane)->value;
    }
    for (uint32_t left = mask; left; left &= left - 1) {
        const unsigned lane = __builtin_ctz(left), source = operand_of(lane)->source;
        if (!(mask >> source & 1)) fail_shuffle(lane, source, place);
        operand_of(lane)->value = values[source];
    }
}

template <class T>
inline T shuffle(Operation operation, uint32_t mask, T value, unsigned source, Place place) {
    ShuffleOperand<T> operand{value, source};
    meet(operation, mask, &operand, place, complete_shuffle<T>);
    return operand.value;
}

// Lanes of `mask` whose predicate holds.
uint32_t vote(Operation operation, uint32_t mask, bool predicate, Place place);

// The first lane of the segment of `width` lanes that this lane is in.
inline int segment(int width, Place place) {
    if (width < 1 || width > 32 || width & (width - 1)) fail("shuffle of a width that is no power of two", place);
    return static_cast<int>(current->lane) & ~(width - 1);
}

}  // namespace emulator

template <class T>
inline T __shfl_sync(uint32_t mask, T value, int lane, int width = 32,
                     emulator::Place place = emulator::Place::here()) {
    const unsigned source = emulator::segment(width, place) + (lane & (width - 1));
    return emulator::shuffle(emulator::Operation::Shfl, mask, value, source, place);
}
// Lanes whose source is outside of their segment keep their own value.
template <class T>
inline T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                        emulator::Place place = emulator::Place::here()) {
    const int self = emulator::current->lane, source = self - static_cast<int>(delta);
    return emulator::shuffle(emulator::Operation::ShflUp, mask, value,
                             source < emulator::segment(width, place) ? self : source, place);
}
template <class T>
inline T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                          emulator::Place place = emulator::Place::here()) {
    const int self = emulator::current->lane, source = self + static_cast<int>(delta);
    return emulator::shuffle(emulator::Operation::ShflDown, mask, value,
                             source >= emulator::segment(width, place) + width ? self : source, place);
}
// A source in a later segment is out of bounds, in an earlier one it is not.
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int lanes, int width = 32,
                         emulator::Place place = emulator::Place::here()) {
    const int self = emulator::current->lane, source = self ^ lanes;
    return emulator::shuffle(emulator::Operation::ShflXor, mask, value,
                             source >= emulator::segment(width, place) + width ? self : source, place);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, emulator::Place place = emulator::Place::here()) {
    return emulator::vote(emulator::Operation::Ballot, mask, predicate, place);
}
inline int __any_sync(uint32_t mask, int predicate, emulator::Place place = emulator::Place::here()) {
    return emulator::vote(emulator::Operation::Any, mask, predicate, place) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, emulator::Place place = emulator::Place::here()) {
    const uint32_t lanes = mask & emulator::current->warp->lanes;
    return emulator::vote(emulator::Operation::All, mask, predicate, place) == lanes;
}
