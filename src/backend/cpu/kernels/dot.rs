//! Products of packed rows and a few vectors of activations.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::matrix::PackedMatrix;
use super::super::recipe::Recipe;
use super::super::simd::Simd;
use super::{ahead, block_bytes, fetch, Parameters, Row, Tail, MAX_LANES, PADDING, ROWS_PER_PASS};

/// Elements along K that are multiplied before the next rows take their turn: keeps up to eight columns
/// of activations close, and makes long sums sums of sums, which loses less to rounding.
const DEPTH: usize = 1024;

/// Products of up to [`ROWS_PER_PASS`] consecutive packed rows with `columns` vectors of activations.
pub(crate) struct DotRows<'a> {
    pub(crate) matrix: &'a PackedMatrix<'a>,
    pub(crate) first_row: usize,
    /// Those of the rows, loaded.
    pub(crate) parameters: &'a Parameters,
    /// One of the instruction set's slab widths.
    pub(crate) columns: usize,
    /// `[block][column]`, each a block of an interleaved vector, zero-padded.
    pub(crate) x: &'a [f32],
    /// `[rows, columns]`; its length sets the number of rows, at least one.
    pub(crate) out: &'a mut [f32],
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
pub(in crate::backend::cpu) unsafe fn dot_rows<S: Simd, R: Recipe, const M: usize>(task: DotRows<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        // Known before code is generated: the other branch costs nothing.
        if const { M <= S::MAX_COLUMNS_OF_PAIRS } {
            dot_pass::<S, R, M, 2>(task)
        } else {
            dot_pass::<S, R, M, 1>(task)
        }
    }
}

/// `ROWS` rows at a time. Where rows run out, the last one is computed again rather than by other code.
///
/// # Safety
/// As [`dot_rows`].
#[inline(always)]
unsafe fn dot_pass<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(task: DotRows<'_>) {
    let DotRows { matrix, first_row, parameters, x, out, .. } = task;
    let count = out.len() / M;
    let full_blocks = matrix.k / S::BLOCK;
    let all_blocks = matrix.k.div_ceil(S::BLOCK);
    assert!(x.len() >= M * all_blocks * S::BLOCK && (1..=ROWS_PER_PASS).contains(&count));
    assert!(parameters.stride >= matrix.groups_per_row() + PADDING);
    let group_shift = matrix.format.group_size().trailing_zeros();
    let ahead = ahead(matrix, ROWS);
    let words_of = |row: usize| matrix.row_words(first_row + row.min(count - 1));
    let mut rows: [Row; ROWS_PER_PASS] = std::array::from_fn(|row| {
        let words = words_of(row);
        let (scales, biases) = parameters.row(row.min(count - 1));
        assert!(words.len() * 4 >= full_blocks * block_bytes::<S, R>());
        assert!(scales.len() == parameters.stride && biases.len() == parameters.stride);
        Row { codes: words.as_ptr().cast(), scales: scales.as_ptr(), biases: biases.as_ptr(), ahead }
    });
    let mut tails = [const { Tail::EMPTY }; ROWS_PER_PASS];
    let mut sums = [[Lanes([0.0; MAX_LANES]); M]; ROWS_PER_PASS];
    let of_tail = (full_blocks < all_blocks).then_some(full_blocks);
    for first_block in (0..full_blocks).step_by(DEPTH / S::BLOCK).chain(of_tail) {
        let is_tail = first_block == full_blocks;
        let end_block = if is_tail { all_blocks } else { (first_block + DEPTH / S::BLOCK).min(full_blocks) };
        if is_tail {
            for (row, (place, tail)) in rows.iter_mut().zip(&mut tails).enumerate() {
                *tail = Tail::new::<S, R>(words_of(row), full_blocks);
                place.codes = tail.origin::<S, R>(full_blocks);
            }
        }
        let span = Span { first_block, end_block, group_shift };
        // SAFETY: the caller's promise; the span is not empty, and words, or tails, parameters and activations cover it.
        unsafe { add_span::<S, R, M, ROWS>(&rows, x, span, &mut sums[..count.next_multiple_of(ROWS)]) };
    }
    for (sums, out) in sums.iter().zip(out.chunks_exact_mut(M)) {
        for (sum, out) in sums.iter().zip(out) {
            // SAFETY: the caller's promise; a sum waits as MAX_LANES numbers.
            *out = unsafe { S::sum(S::load(sum.0.as_ptr())) };
        }
    }
}

/// Adds [`dot_span`] to the sums of as many rows, `ROWS` at a time, that wait in memory.
///
/// # Safety
/// As [`dot_span_ahead`].
#[inline(always)]
unsafe fn add_span<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(
    rows: &[Row; ROWS_PER_PASS],
    x: &[f32],
    span: Span,
    waiting: &mut [[Lanes; M]],
) {
    for (rows, waiting) in rows.chunks_exact(ROWS).zip(waiting.chunks_exact_mut(ROWS)) {
        // SAFETY: the caller's promise; a sum waits as MAX_LANES numbers.
        unsafe {
            let rows = std::array::from_fn(|row| rows[row]);
            let sums = if const { S::DECODES_AHEAD && R::DECODES_AHEAD } {
                dot_span_ahead::<S, R, M, ROWS>(rows, x.as_ptr(), span)
            } else {
                dot_span::<S, R, M, ROWS>(rows, x.as_ptr(), span)
            };
            for row in 0..ROWS {
                for column in 0..M {
                    let place = waiting[row][column].0.as_mut_ptr();
                    S::store(place, S::add(S::load(place), sums[row][column]));
                }
            }
        }
    }
}

/// Sums, over a span, of the products of `ROWS` rows and `M` columns.
///
/// # Safety
/// As [`fetch`]; `x` must hold `M` columns that cover the span.
#[inline(always)]
unsafe fn dot_span<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(
    rows: [Row; ROWS],
    x: *const f32,
    span: Span,
) -> [[S::F; M]; ROWS] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[S::zero(); M]; ROWS];
        for block in span.first_block..span.end_block {
            // Loops, not `array::map`: closures lack the features of the function around them.
            let mut weights = [[S::zero(); 4]; ROWS];
            for row in 0..ROWS {
                weights[row] = fetch::<S, R>(rows[row], block, span.group_shift).weights::<R>();
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

/// As [`dot_span`], but each vector of weights is decoded while the one before it is multiplied: a CPU does not look far
/// enough ahead to begin by itself with what it needs after so many multiplications.
///
/// # Safety
/// As [`dot_span`], and the span is not empty.
#[inline(always)]
unsafe fn dot_span_ahead<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(
    rows: [Row; ROWS],
    x: *const f32,
    span: Span,
) -> [[S::F; M]; ROWS] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[S::zero(); M]; ROWS];
        let mut blocks = [fetch::<S, R>(rows[0], span.first_block, span.group_shift); ROWS];
        for row in 1..ROWS {
            blocks[row] = fetch::<S, R>(rows[row], span.first_block, span.group_shift);
        }
        let mut weights = [S::zero(); ROWS];
        for row in 0..ROWS {
            weights[row] = blocks[row].weights::<R>()[0];
        }
        for block in span.first_block..span.end_block {
            for i in 0..4 {
                let mut next = weights;
                for row in 0..ROWS {
                    if i == 3 {
                        // Behind the span there is nothing to fetch.
                        let block = (block + 1).min(span.end_block - 1);
                        blocks[row] = fetch::<S, R>(rows[row], block, span.group_shift);
                    }
                    next[row] = blocks[row].weights::<R>()[(i + 1) % 4];
                }
                add_products::<S, M, ROWS>(&mut sums, weights, x, (block, i));
                weights = next;
            }
        }
        sums
    }
}

/// Adds the products of a vector of each row's weights, vector `i` of block `block`, and of `M` columns.
///
/// # Safety
/// As [`dot_span`].
#[inline(always)]
unsafe fn add_products<S: Simd, const M: usize, const ROWS: usize>(
    sums: &mut [[S::F; M]; ROWS],
    weights: [S::F; ROWS],
    x: *const f32,
    (block, i): (usize, usize),
) {
    for column in 0..M {
        // SAFETY: the caller's promise.
        unsafe {
            let x = S::load(x.add((block * M + column) * S::BLOCK + i * S::LANES));
            for row in 0..ROWS {
                sums[row][column] = S::mul_add(weights[row], x, sums[row][column]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::recipe::{Affine, E2m1};
    use super::super::super::simd::portable::Portable;
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    fn check<R: Recipe, const M: usize, const ROWS: usize>() {
        const BLOCKS: usize = 17;
        let mut rng = StdRng::seed_from_u64(18);
        let mut floats = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.random_range(-1.0..1.0)).collect() };
        let x = floats(BLOCKS * M * Portable::BLOCK);
        let mut of_rows = || -> [Vec<f32>; ROWS] { std::array::from_fn(|_| floats(BLOCKS * 2 + PADDING)) };
        let (scales, biases) = (of_rows(), of_rows());
        let codes: [Vec<u8>; ROWS] = std::array::from_fn(|_| {
            (0..BLOCKS * block_bytes::<Portable, R>()).map(|_| rng.random()).collect()
        });
        let rows = std::array::from_fn(|row| Row {
            codes: codes[row].as_ptr(),
            scales: scales[row].as_ptr(),
            biases: biases[row].as_ptr(),
            ahead: 0,
        });
        for (first_block, end_block) in [(0, 1), (0, 2), (3, BLOCKS), (BLOCKS - 1, BLOCKS)] {
            let span = Span { first_block, end_block, group_shift: 4 };
            // SAFETY: rows and activations have all blocks, and two groups for each.
            let (plain, ahead) = unsafe {
                (
                    dot_span::<Portable, R, M, ROWS>(rows, x.as_ptr(), span),
                    dot_span_ahead::<Portable, R, M, ROWS>(rows, x.as_ptr(), span),
                )
            };
            assert!(plain.as_flattened().iter().flatten().all(|sum| sum.is_finite() && *sum != 0.));
            assert_eq!(plain, ahead, "{first_block}..{end_block}");
        }
    }

    #[test]
    fn decoding_ahead_changes_no_bit() {
        check::<Affine<4, 16>, 1, 1>();
        check::<Affine<4, 16>, 4, 2>();
        check::<Affine<5, 8>, 3, 2>();
        check::<Affine<8, 16>, 8, 2>();
        check::<E2m1<4>, 2, 2>();
    }
}
