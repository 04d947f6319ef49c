// The geometry of a tensor-core GEMV: how rows, groups and k are dealt out to lanes, warps and blocks.
//
// `src/backend/cuda/gemv.rs` computes the same numbers for the launch.
#pragma once
#include "params.h"

#ifndef CQ_RING_WORDS
#define CQ_RING_WORDS 16
#endif

namespace cq {

// Before Ampere copies to shared memory go through registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool NO_COPIES_BEHIND = true;
#else
constexpr bool NO_COPIES_BEHIND = false;
#endif

template <class Format, int GROUP_, int ROWS_> struct GemvShape {
    static constexpr int BITS = Format::BITS;
    static constexpr int GROUP = GROUP_;  // weights that share a scale
    static constexpr int ROWS = ROWS_;    // rows of x, padded: 1, 2, 4, 8 or 16

    static constexpr int THREADS = CQ_THREADS;
    static constexpr int TILES = ROWS < 8 ? ROWS : 8;  // row tiles of a block
    static constexpr int K_WARPS = 8 / TILES;          // warps that share a row tile
    static constexpr int ROWS_PER_BLOCK = 16 * TILES;
    static constexpr int COLUMN_TILES = ROWS == 16 ? 2 : 1;

    // Scales that a half can take in exactly are multiplied into the weights where the columns are needed
    // for rows of x; sums then run over whole rounds.
    static constexpr bool FOLDED = !Format::HAS_OFFSETS && ROWS >= 8;

    // Groups that the 8 columns keep apart; for large groups fewer, lest a round be too long to share.
    static constexpr int MOST_SLOTS = ROWS < 8 ? 8 / ROWS : 1;
    static constexpr int SLOTS = MOST_SLOTS * GROUP > 512 ? (BITS == 8 ? 256 : 512) / GROUP : MOST_SLOTS;

    // Consecutive weights that a lane loads at a time: 16 bytes, or the least multiple of that which is
    // whole words. The more rows of x, the fewer groups the columns keep apart, and the closer together
    // the four lanes of a row must stay. Units of scales take registers that wider loads would need.
    static constexpr int chunk() {
        if (BITS == 8) return 16;
        if (BITS % 2 == 1) return ROWS > 1 ? 32 : Format::HAS_UNITS ? 64 : 128;
        const int wide = BITS == 4 ? 32 : 64;
        if (FOLDED) return GROUP < 32 ? 16 : 32;
        if (ROWS < 8 && 4 * wide <= 2 * SLOTS * GROUP) return wide;
        return GROUP < 128 ? 16 : 32;
    }
    static constexpr int CHUNK = chunk();
    static constexpr int WORDS = CHUNK * BITS / 32;
    static constexpr int STEP = 4 * CHUNK;  // weights of a row that a warp consumes at a time

    // Weights of a row between two applications of scales to sums.
    static constexpr int ROUND = FOLDED ? 256 : STEP > SLOTS * GROUP ? STEP : SLOTS * GROUP;
    static constexpr int STEPS = ROUND / STEP;
    // Sets of accumulators when a step holds more groups than there are slots.
    static constexpr int PASSES = FOLDED ? 1 : ROUND / (SLOTS * GROUP);
    // Words of each row of a lane that are on their way at a time, if a step has no more.
    static constexpr int RING_WORDS = ROWS < 8 ? CQ_RING_WORDS : CQ_RING_WORDS / 2;
    // Rounds whose scales are on their way at a time.
    static constexpr int BATCH = PASSES > 1 || 2 * STEPS * WORDS > RING_WORDS ? 1 : 4 * STEPS * WORDS > RING_WORDS ? 2 : 4;
    // Steps whose weights are on their way at a time, at most those of a batch.
    static constexpr int ring() {
        int steps = 1;
        while (2 * steps * WORDS <= RING_WORDS && 2 * steps <= BATCH * STEPS) steps *= 2;
        return steps;
    }
    static constexpr int RING = ring();
    // Whether there are no registers for all words of a step: its place is taken until it has been multiplied.
    static constexpr bool LOADS_LATE = WORDS > 16 || (PASSES > 1 && ROWS >= 8) || (Format::HAS_UNITS && PASSES > 2) || (NO_COPIES_BEHIND && BITS == 6 && ROWS >= 2);
    // Steps whose words are loaded at a time.
    static constexpr int AT_ONCE = !Format::HAS_OFFSETS && RING >= 4 && STEPS % 2 == 0 && !LOADS_LATE ? 2 : 1;
    // Words of a copy.
    static constexpr int VECTOR = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
    // Whether there are no registers for the scales of a round before it is multiplied.
    static constexpr bool SCALES_LATE = (PASSES > 1 && ROWS >= 8) || (Format::HAS_UNITS && PASSES > 2) || (BITS == 6 && ROWS >= 2 && NO_COPIES_BEHIND);
    // Bytes of a step of a warp.
    static constexpr int STEP_BYTES = 2 * WORDS * 4 * 32;
    // Blocks of rows whose sums wait to be added up: a barrier and an epilogue for all of them. Of the widest ring there is no
    // room for more on small cards.
    static constexpr int WAITING = ROWS == 1 ? (WORDS > 16 ? 4 : 8) : ROWS == 2 ? 2 : 1;
    // Accumulators that take turns, as a multiplication waits for the one before it in the same: 12 of a round in a row at
    // most, but where so many sums would cost instructions or registers. Passes take turns anyway.
    static constexpr int MULTIPLICATIONS = ROUND / 16;
    static constexpr int CHAINS = MULTIPLICATIONS <= 12 || PASSES > 1 ? 1 : MULTIPLICATIONS <= 24 || (BITS == 8 && ROWS == 2) ? 2 : 4;
    // Elements of a row of x that are brought to the range of a half by one factor.
    static constexpr int X_GROUP = FOLDED ? ROUND : GROUP;

    static_assert(ROUND % STEP == 0 && (FOLDED || ROUND % (SLOTS * GROUP) == 0), "rounds are whole steps and whole groups");
    static_assert(CHUNK % 16 == 0 && GROUP % 16 == 0, "16 weights of a lane are of one group");
    static_assert(!FOLDED || GROUP >= CHUNK, "a lane's chunk is of one group");

    static_assert((BATCH * STEPS) % RING == 0 && (BATCH == 1 || RING == BATCH * STEPS), "a step has the same place in every batch");

    // Whether x can have a norm: of 16 rows there are no registers for its weights.
    static constexpr bool TAKES_NORM = ROWS < 16;

    // The group slot of a column.
    static constexpr __host__ __device__ int slot(int column) { return ROWS < 8 ? column / ROWS : 0; }
};

}  // namespace cq
