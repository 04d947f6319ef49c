//! Which kernels multiply: pure arithmetic on shapes, so that cards of one kind agree bit for bit.

use super::bindings::{CQ_DENSE_NUMBERS, CQ_SCAN_SHARED_BYTES, CQ_THREADS, CQ_TILE_COLUMNS};
use super::formats::FormatKernels;
use super::gemv::GemvShape;
use crate::QuantFormat;

/// Threads of every block of every kernel.
pub(super) const THREADS: u32 = CQ_THREADS;

/// The most rows of x for which the GEMV multiplies the packed weights, up to 16 rows in each launch. With more it is
/// cheaper to dequantize them once for a dense GEMM.
///
/// Computed, not measured: a launch moves 1.3 times the packed weight, the other way the packed weight,
/// 2 bytes of each weight to memory, and half of that back.
const MOST_GEMV_ROWS: [(usize, usize); 7] =
    [(1, 128), (2, 128), (3, 112), (4, 96), (5, 80), (6, 64), (8, 48)];

/// As [`MOST_GEMV_ROWS`] for the SIMT kernel, which reads a weight again for each 8 rows of x and is
/// limited by arithmetic. Computed, not measured.
const MOST_SIMT_ROWS: usize = 64;

/// Bytes for a part of dequantized weights, of which the next one is dequantized meanwhile: most of the two stays in a
/// cache of 50 MB.
pub(super) const SCRATCH_BYTES: usize = 32 << 20;

/// How a matmul is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Tensor cores on the packed weights; SIMT if they are not aligned for it.
    Gemv,
    /// fp32 on the packed weights.
    Simt,
    /// Dequantized weights, some rows at a time, and cuBLAS.
    Dense,
}

/// The route of a format with these kernels. `half` says that x, scales and biases are all of 16 bits (or bytes):
/// what the tensor cores take.
pub(super) fn route(kernels: FormatKernels, format: QuantFormat, m: usize, k: usize, half: bool) -> Route {
    // Formats of fewer rows in a launch read the weight again for as many more.
    let of_launch = GemvShape::most_rows(format).min(8);
    let (packed, most) = match half && kernels.gemv().is_some() {
        true => (Route::Gemv, MOST_GEMV_ROWS.iter().find(|(of, _)| *of == format.bits())),
        false => (Route::Simt, None),
    };
    // With rows so long that the scratch holds but few, a dense GEMM is slower at any M.
    match m > most.map_or(MOST_SIMT_ROWS, |(_, rows)| *rows * of_launch / 8) && SCRATCH_BYTES / (k * 4) >= 16
    {
        true => Route::Dense,
        false => packed,
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

/// Rows of x that a block of the tile kernels multiplies.
pub(super) const TILE_COLUMNS: usize = CQ_TILE_COLUMNS as usize;

/// Rows of a weight, of gate and up those of both, for each block of the SIMT kernels.
pub(super) const SIMT_ROWS: usize = 32;

/// The most tiles, whatever experts tokens choose.
pub(super) fn most_tiles(pairs: usize, experts: usize) -> usize {
    pairs / TILE_COLUMNS + (experts + 1).min(pairs)
}

/// Shared memory of the tile kernels: two steps of x, and which rows these are.
pub(super) fn tile_shared_bytes(format: QuantFormat) -> usize {
    // Four lanes of whole words.
    let step = match (format.group_size(), format.bits() % 2) {
        (16, 0) => 4 * 16,
        _ => 4 * 32,
    };
    2 * TILE_COLUMNS * step * 2 + TILE_COLUMNS * size_of::<u32>()
}

/// Shared memory of a block on any card, without asking for more.
const ALWAYS_SHARED_BYTES: usize = 48 << 10;

/// The most shared memory that launches plan with for a block: half of a multiprocessor's, so that the kernel that
/// comes next has room beside this one. A card gives a block `of_block` bytes at most, a multiprocessor has
/// `of_multiprocessor`, of which the system keeps `reserved` for each block.
pub(super) fn most_shared_bytes(of_block: usize, of_multiprocessor: usize, reserved: usize) -> usize {
    let half = (of_multiprocessor / 2).saturating_sub(reserved);
    half.max(ALWAYS_SHARED_BYTES).min(of_block.max(ALWAYS_SHARED_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_of_x_are_a_dense_gemm() {
        let of = |format, m, k, half| route(FormatKernels::of(format).unwrap(), format, m, k, half);
        let route = |m, k, half| of(QuantFormat::affine(4, 64).unwrap(), m, k, half);
        assert_eq!(route(1, 4096, true), Route::Gemv);
        assert_eq!(route(96, 4096, true), Route::Gemv);
        assert_eq!(route(97, 4096, true), Route::Dense);
        assert_eq!(route(8, 4096, false), Route::Simt);
        assert_eq!(route(65, 4096, false), Route::Dense);
        assert_eq!(route(4096, 1 << 22, true), Route::Gemv);
        // Four rows in a launch.
        assert_eq!(of(QuantFormat::Q6_K, 32, 4096, true), Route::Gemv);
        assert_eq!(of(QuantFormat::Q6_K, 33, 4096, true), Route::Dense);
        for format in QuantFormat::all() {
            assert!(MOST_GEMV_ROWS.iter().any(|(bits, _)| *bits == format.bits()), "{format}");
        }
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

    #[test]
    fn a_format_without_a_gemv_takes_the_simt_kernel() {
        let format = QuantFormat::NF4;
        let nf4 = FormatKernels::of(format).unwrap();
        for m in [1, 2, 8, 40, 64] {
            assert_eq!([true, false].map(|half| route(nf4, format, m, 4096, half)), [Route::Simt; 2]);
        }
        assert_eq!(route(nf4, format, 65, 4096, true), Route::Dense);
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
            assert!(most_tiles(grouped * top_k, MOST_GROUPED_EXPERTS) <= MOST_BLOCKS, "{top_k}");
        }
    }
}
