// The geometry of a tile kernel: how rows, columns and k are dealt out to lanes and warps.
//
// `src/backend/cuda/tiles.rs` computes the same numbers for the launch.
#pragma once
#include "params.h"

namespace cq {

template <class Format, int GROUP_, int COLUMNS_> struct TileShape {
    static constexpr int GROUP = GROUP_;      // weights whose products are added up before a scale is applied
    static constexpr int COLUMNS = COLUMNS_;  // the most
    static constexpr int THREADS = CQ_THREADS;
    static constexpr int COLUMN_WARPS = COLUMNS > 32 ? 2 : 1;  // that have the same rows
    static constexpr int ROW_TILES = COLUMN_WARPS;             // of 16 rows, of a warp
    static constexpr int COLUMN_TILES = COLUMNS / COLUMN_WARPS / 8;
    static_assert(8 / COLUMN_WARPS * ROW_TILES * 16 == CQ_TILE_ROWS, "warps cover the rows of a tile");

    static constexpr int PASS = GROUP > 32 ? GROUP : 32;  // weights of a row between two loads of scales
    static constexpr int OCTETS = PASS / 32;              // of a lane
    static constexpr int PASSES = CQ_TILE_K / PASS;
    static constexpr int PASSES_AT_ONCE = COLUMNS > 32 ? 2 : 1;  // two blocks have no registers for more
    static constexpr int GROUPS = PASS / GROUP;           // of a pass
    static constexpr int GROUPS_OF_STEP = CQ_TILE_K / GROUP;

    // From a row to the next in shared memory, such that eight rows meet no bank twice.
    static constexpr int ROW_BYTES = CQ_TILE_K / 8 * Format::BITS + (Format::BITS == 8 ? 32 : Format::BITS % 2 ? 0 : 16);
    static constexpr int COPIES_OF_ROW = Format::BITS;  // of 16 bytes
    static constexpr int COPIES = (CQ_TILE_ROWS * COPIES_OF_ROW + THREADS - 1) / THREADS;
    static constexpr int COLUMN_BYTES = CQ_TILE_K * 2;
    static constexpr int SUM_BYTES = Format::HAS_BIASES ? COLUMNS * GROUPS_OF_STEP * 4 : 0;  // of all columns that there could be
    // From a column to the next of finished sums.
    static constexpr int COLUMN_OF_SUMS = CQ_TILE_ROWS + 4;
};

}  // namespace cq
