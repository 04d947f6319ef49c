//! The two kernels of the CPU backend, once for every format and instruction set.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::matrix::PackedMatrix;
use super::recipe::Recipe;
use super::simd::Simd;
use crate::format::element::Real;
use std::ops::Range;

/// Numbers appended to a row's scales and biases, so that the last block may read a whole vector.
const PADDING: usize = 16;

/// The most rows that a kernel takes at a time: their parameters and sums are kept together.
pub(crate) const ROWS_PER_PASS: usize = 16;

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

/// How far ahead of the codes in use memory is asked for at least, in bytes.
const PREFETCH_AHEAD: usize = 4096;

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
    /// `[rows, columns]`; its length sets the number of rows.
    pub(crate) out: &'a mut [f32],
}

/// The order of decoded rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Element `k` at place `k`.
    Natural,
    /// As [`interleave`] orders activations, padded with zeros to whole blocks.
    Interleaved,
}

/// Decodes up to [`ROWS_PER_PASS`] consecutive packed rows.
pub(crate) struct DecodeRows<'a> {
    pub(crate) matrix: &'a PackedMatrix<'a>,
    pub(crate) first_row: usize,
    /// Those of the rows, loaded.
    pub(crate) parameters: &'a Parameters,
    /// Elements of each row, from the beginning of a block to the end of one or of the row.
    pub(crate) elements: Range<usize>,
    pub(crate) order: Order,
    /// `[rows, elements]`, interleaved padded to whole blocks; its length sets the number of rows.
    pub(crate) out: &'a mut [f32],
}

/// Brings a row of activations into the order in which blocks of weights are decoded: place
/// `i * lanes + l` of a block of `4 * lanes` elements holds element `4 * l + i`. Zero-pads the last.
pub(crate) fn interleave<T: Real>(row: &[T], lanes: usize, out: &mut [f32]) {
    let mut natural = [0f32; 64];
    let block = (4 * lanes).min(natural.len());
    for (elements, places) in row.chunks(block).zip(out.chunks_mut(block)) {
        if let Some((head, tail)) = natural[..block].split_at_mut_checked(elements.len()) {
            T::widen(elements, head);
            tail.fill(0.0);
        }
        for (i, places) in places.chunks_exact_mut(lanes).enumerate() {
            for (place, four) in places.iter_mut().zip(natural.chunks_exact(4)) {
                *place = four[i & 3];
            }
        }
    }
}

/// The undoing of [`interleave`] for one block.
fn deinterleave(block: &[f32], lanes: usize, out: &mut [f32]) {
    for (index, value) in out.iter_mut().enumerate() {
        *value = block.get(index % 4 * lanes + index / 4).copied().unwrap_or(0.0);
    }
}

/// Scales and biases of up to [`ROWS_PER_PASS`] rows as f32, each row followed by [`PADDING`] zeros.
pub(crate) struct Parameters {
    stride: usize,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl Parameters {
    pub(crate) fn new(matrix: &PackedMatrix) -> Self {
        let stride = matrix.groups_per_row() + PADDING;
        let len = ROWS_PER_PASS * stride;
        Self { stride, scales: vec![0.0; len], biases: vec![0.0; len] }
    }

    /// Padded scales and biases of a row.
    pub(super) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let places = row * self.stride..(row + 1) * self.stride;
        let of_row = |all| <[f32]>::get(all, places.clone()).unwrap_or_default();
        (of_row(&self.scales), of_row(&self.biases))
    }

    /// Those of the first row, and how far those of the next one are.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn pointers(&self) -> (*const f32, *const f32, usize) {
        (self.scales.as_ptr(), self.biases.as_ptr(), self.stride)
    }

    /// Makes the biases those of codes less `centre`: `q * s + b = (q - centre) * s + (b + centre * s)`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn centre(&mut self, centre: f32) {
        for (bias, scale) in self.biases.iter_mut().zip(&self.scales) {
            *bias = scale.mul_add(centre, *bias);
        }
    }

    /// Fetches those of `rows` rows from `first_row` on. Inlined where vector instructions are enabled.
    #[inline(always)]
    pub(super) fn load(&mut self, matrix: &PackedMatrix, first_row: usize, rows: usize) {
        let scales = self.scales.chunks_exact_mut(self.stride);
        let biases = self.biases.chunks_exact_mut(self.stride);
        for (row, (scales, biases)) in scales.zip(biases).take(rows).enumerate() {
            matrix.row_parameters(first_row + row, scales, biases);
        }
    }
}

/// Where the codes, scales and biases of a row start.
#[derive(Clone, Copy)]
struct Row {
    codes: *const u8,
    scales: *const f32,
    biases: *const f32,
    /// Where the codes are that come after them, from here, in bytes.
    ahead: usize,
}

/// A run of blocks along K.
#[derive(Clone, Copy)]
struct Span {
    first_block: usize,
    end_block: usize,
    /// log2 of the group size.
    group_shift: u32,
}

/// How far it is to the same place of the rows that come next, when so many go together.
fn ahead(matrix: &PackedMatrix, together: usize) -> usize {
    let bytes = together * (matrix.k * matrix.format.bits() / 8).max(1);
    bytes * PREFETCH_AHEAD.div_ceil(bytes)
}

/// Bytes of the codes of a block.
const fn block_bytes<S: Simd, R: Recipe>() -> usize {
    R::BITS * S::LANES / 2
}

/// A row's last, incomplete block with zeros behind it, so that no load leaves the row.
struct Tail([u8; 64]);

impl Tail {
    fn new<S: Simd, R: Recipe>(words: &[u32], full_blocks: usize) -> Self {
        let start = full_blocks * block_bytes::<S, R>();
        let words = words.get(start / 4..).unwrap_or_default();
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).skip(start % 4);
        let mut tail = [0; 64];
        tail.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        Self(tail)
    }

    /// The address from which block `full_blocks` is found in the tail.
    fn origin<S: Simd, R: Recipe>(&self, full_blocks: usize) -> *const u8 {
        self.0.as_ptr().wrapping_sub(full_blocks * block_bytes::<S, R>())
    }
}

/// Decodes block `block` of a row.
///
/// # Safety
/// The row's pointers must cover the block; [`Simd`]'s conditions hold.
#[inline(always)]
unsafe fn decode_block<S: Simd, R: Recipe>(row: Row, block: usize, group_shift: u32) -> [S::F; 4] {
    let group = (block * S::BLOCK) >> group_shift;
    // SAFETY: the caller's promise; parameters are padded to a whole vector.
    unsafe {
        let from = row.codes.wrapping_add(block * block_bytes::<S, R>());
        S::prefetch(from.wrapping_add(row.ahead));
        let codes = R::load_codes::<S>(from);
        let scale = R::spread::<S>(row.scales.add(group));
        let bias = if R::HAS_BIASES { R::spread::<S>(row.biases.add(group)) } else { S::zero() };
        R::decode::<S>(codes, scale, bias)
    }
}

/// Sums, over a span, of the products of `ROWS` rows and `M` columns.
///
/// # Safety
/// As [`decode_block`]; `x` must hold `M` columns that cover the span.
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
                weights[row] = decode_block::<S, R>(rows[row], block, span.group_shift);
            }
            for i in 0..4 {
                for column in 0..M {
                    let x = S::load(x.add((block * M + column) * S::BLOCK + i * S::LANES));
                    for row in 0..ROWS {
                        sums[row][column] = S::mul_add(weights[row][i], x, sums[row][column]);
                    }
                }
            }
        }
        sums
    }
}

/// See [`DotRows`].
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Simd, R: Recipe, const M: usize>(task: DotRows<'_>) {
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
    let rows = out.len() / M;
    let full_blocks = matrix.k / S::BLOCK;
    let all_blocks = matrix.k.div_ceil(S::BLOCK);
    assert!(x.len() >= M * all_blocks * S::BLOCK && rows <= ROWS_PER_PASS);
    assert!(parameters.stride >= matrix.groups_per_row() + PADDING);
    let group_shift = matrix.format.group_size().trailing_zeros();
    let ahead = ahead(matrix, ROWS);
    let mut sums = [[[0f32; MAX_LANES]; M]; ROWS_PER_PASS];
    let mut first_block = 0;
    while first_block < all_blocks {
        let is_tail = first_block == full_blocks;
        let end_block = if is_tail { all_blocks } else { (first_block + DEPTH / S::BLOCK).min(full_blocks) };
        for row in (0..rows).step_by(ROWS) {
            let row_of = |r: usize| (row + r).min(rows - 1);
            let words: [&[u32]; ROWS] = std::array::from_fn(|r| matrix.row_words(first_row + row_of(r)));
            let tails =
                words
                    .map(|words| if is_tail { Tail::new::<S, R>(words, full_blocks) } else { Tail([0; 64]) });
            let pointers = std::array::from_fn(|r| {
                assert!(words[r].len() * 4 >= full_blocks * block_bytes::<S, R>());
                let (scales, biases) = parameters.row(row_of(r));
                Row {
                    codes: if is_tail {
                        tails[r].origin::<S, R>(full_blocks)
                    } else {
                        words[r].as_ptr().cast()
                    },
                    scales: scales.as_ptr(),
                    biases: biases.as_ptr(),
                    ahead,
                }
            });
            let span = Span { first_block, end_block, group_shift };
            let waiting = std::array::from_fn(row_of);
            // SAFETY: the caller's promise; words, parameters and activations cover the span, as checked.
            unsafe { add_span::<S, R, M, ROWS>(pointers, x, span, &mut sums, waiting) };
        }
        first_block = end_block;
    }
    for (sums, out) in sums.iter().zip(out.chunks_exact_mut(M)) {
        for (sum, out) in sums.iter().zip(out) {
            // SAFETY: the caller's promise; a sum waits as MAX_LANES numbers.
            *out = unsafe { S::sum(S::load(sum.as_ptr())) };
        }
    }
}

/// Adds [`dot_span`] to sums that wait in memory, that of row `r` at `places[r]`.
///
/// # Safety
/// As [`dot_span`].
#[inline(always)]
unsafe fn add_span<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(
    rows: [Row; ROWS],
    x: &[f32],
    span: Span,
    waiting: &mut [[[f32; MAX_LANES]; M]; ROWS_PER_PASS],
    places: [usize; ROWS],
) {
    // SAFETY: the caller's promise; a sum waits as MAX_LANES numbers.
    unsafe {
        let sums = dot_span::<S, R, M, ROWS>(rows, x.as_ptr(), span);
        for row in 0..ROWS {
            if row > 0 && places[row] == places[row - 1] {
                continue; // the last row once more
            }
            for column in 0..M {
                let place = waiting[places[row]][column].as_mut_ptr();
                S::store(place, S::add(S::load(place), sums[row][column]));
            }
        }
    }
}

/// See [`DecodeRows`].
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(super) unsafe fn decode_rows<S: Simd, R: Recipe>(task: DecodeRows<'_>) {
    let DecodeRows { matrix, first_row, parameters, elements, order, out } = task;
    let full_blocks = matrix.k / S::BLOCK;
    let first_block = elements.start / S::BLOCK;
    let group_shift = matrix.format.group_size().trailing_zeros();
    let ahead = ahead(matrix, 1);
    let row_len = match order {
        Order::Natural => elements.len(),
        Order::Interleaved => elements.len().next_multiple_of(S::BLOCK),
    };
    assert!(elements.start % S::BLOCK == 0 && elements.end <= matrix.k);
    assert!(elements.end % S::BLOCK == 0 || elements.end == matrix.k);
    assert!(parameters.stride >= matrix.groups_per_row() + PADDING);
    for (row, out) in out.chunks_exact_mut(row_len).take(ROWS_PER_PASS).enumerate() {
        let words = matrix.row_words(first_row + row);
        assert!(words.len() * 4 >= full_blocks * block_bytes::<S, R>());
        let tail = Tail::new::<S, R>(words, full_blocks);
        let (scales, biases) = parameters.row(row);
        for (block, out) in (first_block..).zip(out.chunks_mut(S::BLOCK)) {
            let in_row = block < full_blocks;
            let pointers = Row {
                codes: if in_row { words.as_ptr().cast() } else { tail.origin::<S, R>(full_blocks) },
                scales: scales.as_ptr(),
                biases: biases.as_ptr(),
                ahead,
            };
            let mut decoded = [0f32; 4 * MAX_LANES];
            let to = match order {
                Order::Natural => decoded.as_mut_ptr(),
                Order::Interleaved => {
                    assert!(out.len() == S::BLOCK);
                    out.as_mut_ptr()
                }
            };
            // SAFETY: the caller's promise; the block lies in the row or is the tail, and there are places for it.
            unsafe {
                let weights = decode_block::<S, R>(pointers, block, group_shift);
                for (i, weights) in weights.into_iter().enumerate() {
                    S::store(to.add(i * S::LANES), weights);
                }
            }
            if order == Order::Natural {
                deinterleave(&decoded, S::LANES, out);
            }
        }
    }
}
