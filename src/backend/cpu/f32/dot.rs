//! Dot products of packed rows and a few rows of x, in f32: the kernel of the f32 GEMV.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::codec::Codec;
use super::super::group_params::{GroupParams, PADDING, ROWS_PER_PASS};
use super::super::isa::Simd;
use super::super::matrix::PackedMatrix;
use super::block::{block_bytes, load_block, prefetch_distance, Row, Tail, MAX_LANES};

/// Elements along K that are multiplied before the next rows of the weight: keeps up to eight rows of
/// x in a near cache, and makes long sums sums of sums, which loses less to rounding.
const DEPTH: usize = 1024;

/// Dot products of up to [`ROWS_PER_PASS`] consecutive packed rows and `m` rows of x.
pub(in super::super) struct DotRows<'a> {
    pub(super) matrix: &'a PackedMatrix<'a>,
    pub(super) first_row: usize,
    /// Loaded for these rows.
    pub(super) params: &'a GroupParams,
    /// One of the panel sizes of the instruction set.
    pub(super) m: usize,
    /// `[block][m]`, each a block of an interleaved row of x, zero-padded.
    pub(super) x: &'a [f32],
    /// `[rows, m]`; its length sets the number of rows, at least one.
    pub(super) out: &'a mut [f32],
}

/// A run of blocks along K.
#[derive(Clone, Copy)]
struct Span {
    first_block: usize,
    end_block: usize,
    /// log2 of the group size.
    group_shift: u32,
}

/// Room for a vector, at the start of a cache line: a load or store that crosses two lines counts twice. Narrower
/// vectors take the first lanes.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([f32; MAX_LANES]);

/// See [`DotRows`].
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Simd, C: Codec, const M: usize>(task: DotRows<'_>) {
    // SAFETY: the caller has enabled the features of `S`, which are all that the functions need.
    unsafe {
        // Known before code is generated: the other branch costs nothing.
        if const { M <= S::MAX_M_OF_PAIRS } {
            dot_pass::<S, C, M, 2>(task)
        } else {
            dot_pass::<S, C, M, 1>(task)
        }
    }
}

/// `ROWS` rows at a time. Where rows run out, the last one is computed again rather than by other code.
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
unsafe fn dot_pass<S: Simd, C: Codec, const M: usize, const ROWS: usize>(task: DotRows<'_>) {
    let DotRows { matrix, first_row, params, x, out, .. } = task;
    let count = out.len() / M;
    let full_blocks = matrix.k / S::BLOCK;
    let all_blocks = matrix.k.div_ceil(S::BLOCK);
    assert!(x.len() >= M * all_blocks * S::BLOCK && (1..=ROWS_PER_PASS).contains(&count));
    assert!(params.stride() >= matrix.groups_per_row() + PADDING);
    let group_shift = matrix.format.group_size().trailing_zeros();
    let prefetch_distance = prefetch_distance(matrix, ROWS);
    let words_of = |row: usize| matrix.row_words(first_row + row.min(count - 1));
    let mut rows: [Row; ROWS_PER_PASS] = std::array::from_fn(|row| {
        let words = words_of(row);
        let (scales, biases) = params.row(row.min(count - 1));
        assert!(words.len() * 4 >= full_blocks * block_bytes::<S, C>());
        assert!(scales.len() == params.stride() && biases.len() == params.stride());
        Row {
            codes: words.as_ptr().cast(),
            scales: scales.as_ptr(),
            biases: biases.as_ptr(),
            prefetch_distance,
        }
    });
    let mut tails = [const { Tail::EMPTY }; ROWS_PER_PASS];
    let mut sums = [[Lanes([0.0; MAX_LANES]); M]; ROWS_PER_PASS];
    let of_tail = (full_blocks < all_blocks).then_some(full_blocks);
    for first_block in (0..full_blocks).step_by(DEPTH / S::BLOCK).chain(of_tail) {
        let is_tail = first_block == full_blocks;
        let end_block = if is_tail { all_blocks } else { (first_block + DEPTH / S::BLOCK).min(full_blocks) };
        if is_tail {
            for (row, (start, tail)) in rows.iter_mut().zip(&mut tails).enumerate() {
                *tail = Tail::new::<S, C>(words_of(row), full_blocks);
                start.codes = tail.origin::<S, C>(full_blocks);
            }
        }
        let span = Span { first_block, end_block, group_shift };
        // SAFETY: the span is not empty. Its blocks lie in the words, or are the tails that `codes` now points to; scales,
        // biases and x cover all blocks, as the assertions say. The caller has enabled the features of `S`.
        unsafe { add_span::<S, C, M, ROWS>(&rows, x, span, &mut sums[..count.next_multiple_of(ROWS)]) };
    }
    for (sums, out) in sums.iter().zip(out.chunks_exact_mut(M)) {
        for (sum, out) in sums.iter().zip(out) {
            // SAFETY: `sum` has MAX_LANES numbers, the most that a vector has; the caller has enabled the features of `S`.
            *out = unsafe { S::sum(S::load(sum.0.as_ptr())) };
        }
    }
}

/// Adds [`dot_span`] of each row, `ROWS` at a time, to the sums in memory.
///
/// # Safety
/// The span is not empty; rows and `x` are valid for its blocks, and `x` for `M` of each; [`Simd`]'s conditions hold.
#[inline(always)]
unsafe fn add_span<S: Simd, C: Codec, const M: usize, const ROWS: usize>(
    rows: &[Row; ROWS_PER_PASS],
    x: &[f32],
    span: Span,
    sums: &mut [[Lanes; M]],
) {
    for (rows, sums) in rows.chunks_exact(ROWS).zip(sums.chunks_exact_mut(ROWS)) {
        // SAFETY: rows and x are valid for the span, by this function's conditions. A sum has MAX_LANES numbers, the most
        // that a vector has.
        unsafe {
            let rows = std::array::from_fn(|row| rows[row]);
            let added = if const { S::DEQUANTIZES_AHEAD && C::AHEAD } {
                dot_span_ahead::<S, C, M, ROWS>(rows, x.as_ptr(), span)
            } else {
                dot_span::<S, C, M, ROWS>(rows, x.as_ptr(), span)
            };
            for row in 0..ROWS {
                for m in 0..M {
                    let sum = sums[row][m].0.as_mut_ptr();
                    S::store(sum, S::add(S::load(sum), added[row][m]));
                }
            }
        }
    }
}

/// Dot products, over a span, of `ROWS` rows and `M` rows of x.
///
/// # Safety
/// Rows are valid for the blocks of the span, `x` for `M` of each; [`Simd`]'s conditions hold.
#[inline(always)]
unsafe fn dot_span<S: Simd, C: Codec, const M: usize, const ROWS: usize>(
    rows: [Row; ROWS],
    x: *const f32,
    span: Span,
) -> [[S::F; M]; ROWS] {
    // SAFETY: only blocks of the span are loaded, for which rows and `x` are valid by this function's conditions.
    unsafe {
        let mut sums = [[S::zero(); M]; ROWS];
        for block in span.first_block..span.end_block {
            // Loops, not `array::map`: closures lack the features of the function around them.
            let mut weights = [[S::zero(); 4]; ROWS];
            for row in 0..ROWS {
                weights[row] = load_block::<S, C>(rows[row], block, span.group_shift).weights::<C>();
            }
            for i in 0..4 {
                let mut vectors = [S::zero(); ROWS];
                for row in 0..ROWS {
                    vectors[row] = weights[row][i];
                }
                add_products::<S, M, ROWS>(&mut sums, vectors, x, (block, i));
            }
        }
        sums
    }
}

/// As [`dot_span`], but each vector of weights is dequantized while the one before it is multiplied: a CPU does not look far
/// enough ahead to begin by itself with what it needs after so many multiplications.
///
/// # Safety
/// The span is not empty; rows are valid for its blocks, `x` for `M` of each; [`Simd`]'s conditions hold.
#[inline(always)]
unsafe fn dot_span_ahead<S: Simd, C: Codec, const M: usize, const ROWS: usize>(
    rows: [Row; ROWS],
    x: *const f32,
    span: Span,
) -> [[S::F; M]; ROWS] {
    // SAFETY: only blocks of the span are loaded, for which rows and `x` are valid by this function's conditions.
    unsafe {
        let mut sums = [[S::zero(); M]; ROWS];
        let mut blocks = [load_block::<S, C>(rows[0], span.first_block, span.group_shift); ROWS];
        for row in 1..ROWS {
            blocks[row] = load_block::<S, C>(rows[row], span.first_block, span.group_shift);
        }
        let mut weights = [S::zero(); ROWS];
        for row in 0..ROWS {
            weights[row] = blocks[row].weights::<C>()[0];
        }
        for block in span.first_block..span.end_block {
            for i in 0..4 {
                let mut next = weights;
                for row in 0..ROWS {
                    if i == 3 {
                        // Behind the span there is nothing to load.
                        let block = (block + 1).min(span.end_block - 1);
                        blocks[row] = load_block::<S, C>(rows[row], block, span.group_shift);
                    }
                    next[row] = blocks[row].weights::<C>()[(i + 1) % 4];
                }
                add_products::<S, M, ROWS>(&mut sums, weights, x, (block, i));
                weights = next;
            }
        }
        sums
    }
}

/// Multiplies vector `i` of block `block`, of each row's weights, with `M` rows of x, and adds the products.
///
/// # Safety
/// `x` is valid for `M` blocks up to this one; [`Simd`]'s conditions hold.
#[inline(always)]
unsafe fn add_products<S: Simd, const M: usize, const ROWS: usize>(
    sums: &mut [[S::F; M]; ROWS],
    weights: [S::F; ROWS],
    x: *const f32,
    (block, i): (usize, usize),
) {
    for m in 0..M {
        // SAFETY: `i` is below 4 and `m` below M, so the vector lies in the blocks for which `x` is valid.
        unsafe {
            let x = S::load(x.add((block * M + m) * S::BLOCK + i * S::LANES));
            for row in 0..ROWS {
                sums[row][m] = S::mul_add(weights[row], x, sums[row][m]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::codec::{with_codec, WithCodec};
    use super::super::super::group_params::PADDING;
    use super::super::super::isa::portable::Portable;
    use super::*;
    use crate::QuantFormat;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    fn check<C: Codec, const M: usize, const ROWS: usize>() {
        const BLOCKS: usize = 17;
        let mut rng = StdRng::seed_from_u64(18);
        let mut floats = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.random_range(-1.0..1.0)).collect() };
        let x = floats(BLOCKS * M * Portable::BLOCK);
        let mut of_rows = || -> [Vec<f32>; ROWS] { std::array::from_fn(|_| floats(BLOCKS * 2 + PADDING)) };
        let (scales, biases) = (of_rows(), of_rows());
        let codes: [Vec<u8>; ROWS] = std::array::from_fn(|_| {
            (0..BLOCKS * block_bytes::<Portable, C>()).map(|_| rng.random()).collect()
        });
        let rows = std::array::from_fn(|row| Row {
            codes: codes[row].as_ptr(),
            scales: scales[row].as_ptr(),
            biases: biases[row].as_ptr(),
            prefetch_distance: 0,
        });
        for (first_block, end_block) in [(0, 1), (0, 2), (3, BLOCKS), (BLOCKS - 1, BLOCKS)] {
            let span = Span { first_block, end_block, group_shift: 4 };
            // SAFETY: rows and activations have all blocks, and two groups for each.
            let (plain, ahead) = unsafe {
                (
                    dot_span::<Portable, C, M, ROWS>(rows, x.as_ptr(), span),
                    dot_span_ahead::<Portable, C, M, ROWS>(rows, x.as_ptr(), span),
                )
            };
            assert!(plain.as_flattened().iter().flatten().all(|sum| sum.is_finite() && *sum != 0.));
            assert_eq!(plain, ahead, "{first_block}..{end_block}");
        }
    }

    struct Check<const M: usize, const ROWS: usize>;

    impl<const M: usize, const ROWS: usize> WithCodec for Check<M, ROWS> {
        fn run<C: Codec>(self) {
            if C::AHEAD {
                check::<C, M, ROWS>();
            }
        }
    }

    #[test]
    fn dequantizing_ahead_changes_no_bit() {
        for format in QuantFormat::all().into_iter().chain(QuantFormat::only_read()) {
            assert!(with_codec(format, Check::<1, 1>).is_ok());
            assert!(with_codec(format, Check::<4, 2>).is_ok());
            assert!(with_codec(format, Check::<8, 2>).is_ok());
        }
    }
}
