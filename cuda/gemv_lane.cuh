// What a lane multiplies its weights with: B fragments of its columns of x, zeros where a column carries another group.
#pragma once
#include "gemv_staging.cuh"

namespace cq {

template <class Format, class Shape> class LaneOfX {
    using X = StagedX<Format, Shape>;
    // Sixteen weights of a lane's chunk are a part of it.
    static constexpr int PARTS = Shape::CHUNK / 16;
    static constexpr int PARTS_OF_GROUP = Shape::GROUP < Shape::CHUNK ? Shape::GROUP / 16 : PARTS;
    static constexpr bool ALL_MINE = Shape::PASSES * Shape::SLOTS == 1;
    // How often in a round another group of a lane's chunks comes, or another chunk.
    static constexpr int TURNS = Shape::STEPS * (PARTS / PARTS_OF_GROUP);
    // Of one row of x, each turn has fragments of its own, if there are registers: where the lane's column does not carry the
    // group they are zero, and stay so for all rounds.
    static constexpr bool KEEPS_ZEROS = Shape::ROWS == 1 && Shape::PASSES == 1 && TURNS <= 4;
    // Whether there are registers for what is the same in all rounds: else it is computed for each.
    static constexpr bool KEEPS_PLACE = Shape::ROWS < 8;

    static_assert(Shape::GROUP % Shape::STEP == 0 || Shape::STEP % Shape::GROUP == 0, "no step begins within a group and ends behind it");
    static_assert(Shape::GROUP % Shape::CHUNK == 0 || Shape::CHUNK % Shape::GROUP == 0, "nor does a chunk");

    const X &x;
    // Its number among the four of a row.
    int t;
    // The slot of its column, less the first group of its chunk in the first step of a round.
    int own;
    // In bytes: where it finds the first part of all, and of the round.
    uint32_t first, of_round;
    // Elements of x ahead of the round.
    uint32_t ahead = 0;
    uint4 kept[KEEPS_ZEROS ? TURNS : 1][2] = {};

  public:
    __device__ __forceinline__ LaneOfX(const X &x, int g, int t) : x(x), t(t) {
        first = X::ZEROS + g % Shape::ROWS * X::LANES_BYTES + t * sizeof(uint4);
        own = Shape::slot(g) - t * Shape::CHUNK / Shape::GROUP;
        if constexpr (KEEPS_PLACE) {
            forget_origin(this->t);
            forget_origin(first);
            forget_origin(own);
        }
        round(0);
    }

    // The next products are those of the round behind so many elements.
    __device__ __forceinline__ void round(int elements) {
        ahead = elements;
        of_round = first + ahead * uint32_t(sizeof(half) * Shape::ROWS);
        forget_origin(of_round);
    }

    // B fragments of four multiplications with a part of the lane's chunk of a step.
    template <int STEP, int PART> __device__ __forceinline__ void fragment(uint32_t (&b)[8], int pass, int tile) {
        constexpr int TURN = KEEPS_ZEROS ? STEP * (PARTS / PARTS_OF_GROUP) + PART / PARTS_OF_GROUP : 0;
        uint4 none[2] = {};
        uint4(&two)[2] = KEEPS_ZEROS ? kept[TURN] : none;

        const bool mine = ALL_MINE || own == (STEP * Shape::STEP + PART * 16) / Shape::GROUP - pass * Shape::SLOTS;
        const unsigned char *from = x.memory + of_round + (STEP * PARTS + PART) * X::PART_BYTES + tile * 8 * X::LANES_BYTES;
        if (X::HAS_ZEROS && !mine) from = x.memory;
        if (X::HAS_ZEROS || mine) {
            two[0] = *reinterpret_cast<const uint4 *>(from);
            two[1] = *reinterpret_cast<const uint4 *>(from + X::PART_BYTES / 2);
        }
        memcpy(b, two, sizeof b);
    }

    // What there is to know of the group of column 2t + j of a tile.
    __device__ __forceinline__ typename X::Group group(int tile, int j, int pass) const {
        const int column = 2 * t + j, group = Shape::FOLDED ? 0 : pass * Shape::SLOTS + slot(j);
        return *x.group(tile * 8 + column % Shape::ROWS, ahead / Shape::X_GROUP + group);
    }
    __device__ __forceinline__ int slot(int j) const { return Shape::slot(2 * t + j); }
};

}  // namespace cq
