//! Which kernels multiply: pure arithmetic on shapes, so that cards of one kind agree bit for bit.

use super::bindings::{CQ_DENSE_NUMBERS, CQ_SCAN_SHARED_BYTES, CQ_THREADS};
use super::formats::FormatKernels;
use super::gemv::GemvShape;
use crate::QuantFormat;

/// Threads of every block of every kernel.
pub(super) const THREADS: u32 = CQ_THREADS;

/// The most rows of x that are not multiplied in tiles, whose columns come in sixteens.
const MOST_FEW_ROWS: usize = 8;

/// Rows of x for which the fp32 kernel, which reads a weight again for each 8 of them, is used where the tile kernels are not.
/// Computed, not measured.
const MOST_SIMT_ROWS: usize = 64;

/// The most rows of x of 16 bits for which tile kernels are faster than dequantized weights and cuBLAS, on cards where cuBLAS has
/// faster instructions. Computed, not measured.
const MOST_TILE_ROWS: usize = 448;

/// Bytes for a part of dequantized weights, of which the next one is dequantized meanwhile: most of the two stays in a
/// cache of 50 MB.
pub(super) const SCRATCH_BYTES: usize = 32 << 20;

/// How a matmul is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Tensor cores on the packed weights, for few rows of x; SIMT if they are not aligned for it.
    Gemv,
    /// Tensor cores on the packed weights, for more.
    Tiles,
    /// fp32 on the packed weights.
    Simt,
    /// Dequantized weights, some rows at a time, and cuBLAS.
    Dense,
}

/// What decides about a route beside shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Circumstances {
    /// Whether x has 16 bits.
    pub(super) half: bool,
    /// Whether scales and biases have 16 bits or less: what tensor cores take.
    pub(super) narrow_scales: bool,
    pub(super) fast_cublas: bool,
}

/// The route of `m` rows of x, of `k` elements.
pub(super) fn route(
    kernels: FormatKernels,
    format: QuantFormat,
    m: usize,
    k: usize,
    circumstances: Circumstances,
) -> Route {
    let Circumstances { half, narrow_scales, fast_cublas } = circumstances;
    // With rows so long that the scratch holds but few, a dense GEMM is slower at any M.
    let has_room = SCRATCH_BYTES / (k * 4) >= 16;
    if !narrow_scales {
        return if m > MOST_SIMT_ROWS && has_room { Route::Dense } else { Route::Simt };
    }
    let has_gemv = half && kernels.gemv().is_some();
    match m {
        _ if has_gemv && m <= GemvShape::most_rows(format).min(MOST_FEW_ROWS) => Route::Gemv,
        _ if !has_gemv && m <= MOST_FEW_ROWS => Route::Simt,
        _ if half && fast_cublas && m > MOST_TILE_ROWS && has_room => Route::Dense,
        _ => Route::Tiles,
    }
}

/// The largest power of two, in bytes, that divides all these addresses.
pub(super) fn common_alignment(addresses: impl IntoIterator<Item = usize>) -> usize {
    1 << addresses.into_iter().fold(0, |all, address| all | address).trailing_zeros().min(8)
}

/// Rows of dequantized weights that are multiplied at a time: 256 or a multiple, if the scratch has room, else a power
/// of two. Their outputs then begin at addresses aligned for cuBLAS's wide stores.
pub(super) fn rows_of_scratch(k: usize, bytes_of_element: usize) -> usize {
    let rows = (SCRATCH_BYTES / (k * bytes_of_element)).max(1);
    let unit = 1 << rows.ilog2().min(8);
    rows / unit * unit
}

/// The most pairs of tokens and experts that are not grouped by expert: with more, some expert was most
/// likely chosen twice.
pub(super) fn most_ungrouped_pairs(experts: usize) -> usize {
    2 * experts
}

/// Blocks along y of a grid.
pub(super) const MOST_BLOCKS: usize = 65535;

/// Tokens in one launch: ungrouped pairs have room in the workspace, tokens and tiles in a grid.
pub(super) fn tokens_of_launch(grouped: bool, top_k: usize) -> usize {
    match grouped {
        false => (MOST_UNGROUPED_PAIRS / top_k).max(1),
        true => (MOST_GROUPED_PAIRS / top_k).clamp(1, MOST_BLOCKS),
    }
}

/// Ungrouped pairs in one launch.
pub(super) const MOST_UNGROUPED_PAIRS: usize = 4096;

/// Pairs in one launch that groups them.
const MOST_GROUPED_PAIRS: usize = 1 << 20;

/// The most experts by which pairs can be grouped: the counters of a block.
pub(super) const MOST_GROUPED_EXPERTS: usize = 1023;

/// Shared memory of the kernel that sorts: for each warp a counter for each expert, and one more; then its scan.
pub(super) fn sort_shared_bytes(experts: usize) -> usize {
    THREADS as usize / 32 * (experts + 1) * size_of::<u32>() + CQ_SCAN_SHARED_BYTES as usize
}

/// Shared memory of the choice of experts: sums of warps; then what blocks tell, and four numbers for each expert.
pub(super) fn route_shared_bytes(experts: usize) -> usize {
    (4 * experts + 1).max(THREADS as usize / 16) * size_of::<u32>()
}

/// Rows of x of the dense kernels.
pub(super) const DENSE_ROWS_OF_X: [usize; 4] = [1, 2, 4, MOST_DENSE_ROWS_OF_X];
pub(super) const MOST_DENSE_ROWS_OF_X: usize = 8;

/// Pairs of rows of weights that a block of the dense kernels multiplies at a time, a warp each.
pub(super) const DENSE_PAIRS: usize = THREADS as usize / 32;

/// Blocks of a dense kernel that a multiprocessor has registers for: x is brought to each once.
pub(super) fn dense_blocks_at_once(rows_of_x: usize) -> usize {
    if rows_of_x < 4 {
        3
    } else {
        2
    }
}

/// Shared memory of a dense kernel: x, and for each warp the sum of the squares of each row.
pub(super) fn dense_shared_bytes(rows_of_x: usize) -> usize {
    let numbers = CQ_DENSE_NUMBERS as usize * if rows_of_x < 4 { 1 } else { 2 };
    (numbers + THREADS as usize / 32 * rows_of_x) * size_of::<f32>()
}

/// Rows of a weight, of gate and up those of both, for each block of the SIMT kernels.
pub(super) const SIMT_ROWS: usize = 32;

/// The most tiles of so many pairs each, whatever experts tokens choose.
pub(super) fn most_tiles(pairs: usize, experts: usize, pairs_of_tile: usize) -> usize {
    pairs / pairs_of_tile + (experts + 1).min(pairs)
}

/// Shared memory of a block on any card, without asking for more.
pub(super) const ALWAYS_SHARED_BYTES: usize = 48 << 10;

/// What a card has for a block, of a kernel with room for another one beside it and of one without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedBytes {
    pub(super) of_two: usize,
    pub(super) of_one: usize,
}

/// The most shared memory that launches plan with for a block: half of a multiprocessor's, so that the kernel that
/// comes next has room beside this one. A card gives a block `of_block` bytes at most, a multiprocessor has
/// `of_multiprocessor`, of which the system keeps `reserved` for each block.
pub(super) fn most_shared_bytes(of_block: usize, of_multiprocessor: usize, reserved: usize) -> usize {
    let half = (of_multiprocessor / 2).saturating_sub(reserved);
    half.max(ALWAYS_SHARED_BYTES).min(of_block.max(ALWAYS_SHARED_BYTES))
}

#[cfg(test)]
mod tests {
    use super::super::tiles::Tiles;
    use super::*;

    #[test]
    fn few_rows_of_x_are_a_gemv_more_are_tiles_and_many_a_dense_gemm() {
        let of = |format, m, k, (half, narrow_scales, fast_cublas)| {
            let circumstances = Circumstances { half, narrow_scales, fast_cublas };
            route(FormatKernels::of(format).unwrap(), format, m, k, circumstances)
        };
        let affine = QuantFormat::affine(4, 64).unwrap();
        let route = |m, circumstances| of(affine, m, 4096, circumstances);
        const HOPPER: (bool, bool, bool) = (true, true, true);
        let of_hopper = [1, 8, 9, 448, 449].map(|m| route(m, HOPPER));
        assert_eq!(of_hopper, [Route::Gemv, Route::Gemv, Route::Tiles, Route::Tiles, Route::Dense]);
        assert_eq!(route(4096, (true, true, false)), Route::Tiles);
        assert_eq!(
            [8, 9, 4096].map(|m| route(m, (false, true, true))),
            [Route::Simt, Route::Tiles, Route::Tiles]
        );
        assert_eq!(
            [8, 64, 65].map(|m| route(m, (true, false, true))),
            [Route::Simt, Route::Simt, Route::Dense]
        );
        assert_eq!(of(affine, 4096, 1 << 22, HOPPER), Route::Tiles);
        assert_eq!(of(affine, 4096, 1 << 22, (true, false, true)), Route::Simt);
        // Four rows in a launch of the GEMV.
        assert_eq!([4, 5].map(|m| of(QuantFormat::Q6_K, m, 4096, HOPPER)), [Route::Gemv, Route::Tiles]);
        // No GEMV.
        assert_eq!([8, 9].map(|m| of(QuantFormat::NF4, m, 4096, HOPPER)), [Route::Simt, Route::Tiles]);
    }

    #[test]
    fn parts_of_dense_weights_are_aligned() {
        for k in [2880, 4096, 7168, 14336, 28672] {
            for bytes in [2, 4] {
                let rows = rows_of_scratch(k, bytes);
                assert!(rows.is_multiple_of(256) || rows.is_power_of_two() && rows >= 128, "{k}: {rows}");
                assert!(
                    rows * k * bytes <= SCRATCH_BYTES && rows * k * bytes * 2 > SCRATCH_BYTES,
                    "{k}: {rows}"
                );
            }
        }
        assert_eq!((rows_of_scratch(14336, 2), rows_of_scratch(5120, 2)), (1024, 3072));
    }

    /// Compute capability 7.5, 8.0, 8.6 (8.9 and 12.0 alike) and 9.0 (10.0 alike), by the table "technical specifications per compute
    /// capability" of the CUDA programming guide.
    #[test]
    fn two_blocks_share_a_multiprocessor_where_it_has_room() {
        const KB: usize = 1 << 10;
        assert_eq!(most_shared_bytes(64 * KB, 64 * KB, 0), 48 * KB);
        assert_eq!(most_shared_bytes(163 * KB, 164 * KB, KB), 81 * KB);
        assert_eq!(most_shared_bytes(99 * KB, 100 * KB, KB), 49 * KB);
        assert_eq!(most_shared_bytes(227 * KB, 228 * KB, KB), 113 * KB);
        // A driver that knows no more than the default.
        assert_eq!(most_shared_bytes(0, 0, 0), 48 * KB);
    }

    #[test]
    fn launches_for_experts_fit_a_grid() {
        for top_k in [1, 2, 3, 8, 100, 5000, 1 << 17] {
            let (ungrouped, grouped) = (tokens_of_launch(false, top_k), tokens_of_launch(true, top_k));
            assert!((1..=4096).contains(&ungrouped) && (1..=MOST_BLOCKS).contains(&grouped), "{top_k}");
            // Of f32, two rows of halves for each pair.
            let (pairs, experts) = (grouped * top_k, MOST_GROUPED_EXPERTS);
            let columns = Tiles::columns_for_experts((2 * pairs).div_ceil(experts));
            assert!(most_tiles(pairs, experts, columns / 2) <= MOST_BLOCKS, "{top_k}");
        }
    }
}
