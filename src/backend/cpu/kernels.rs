//! The two kernels of the CPU backend, once for every format and instruction set.

use super::matrix::PackedMatrix;
use super::recipe::Recipe;
use super::simd::Simd;
use crate::format::element::Real;

/// Columns of activations that one pass over the packed weights serves.
pub(crate) const MAX_COLUMNS: usize = 8;

/// Numbers appended to a row's scales and biases, so that the last block may read a whole vector.
const PADDING: usize = 16;

/// Rows whose parameters are decoded, and whose sums are kept, together.
const ROWS_PER_PASS: usize = 16;

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

/// How far ahead of the codes in use memory is asked for, in bytes.
const PREFETCH_AHEAD: usize = 4096;

/// Elements along K that are multiplied before the next rows take their turn: keeps up to
/// [`MAX_COLUMNS`] columns of activations in a first-level cache.
const DEPTH: usize = 1024;

/// Products of consecutive packed rows with `columns` vectors of activations.
pub(crate) struct DotRows<'a> {
    pub(crate) matrix: &'a PackedMatrix<'a>,
    pub(crate) first_row: usize,
    /// 1 to [`MAX_COLUMNS`].
    pub(crate) columns: usize,
    /// `columns` interleaved vectors, each K padded to whole blocks.
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

/// Decodes consecutive packed rows.
pub(crate) struct DecodeRows<'a> {
    pub(crate) matrix: &'a PackedMatrix<'a>,
    pub(crate) first_row: usize,
    pub(crate) order: Order,
    /// `[rows, K]`, or `[rows, padded K]` when interleaved; its length sets the number of rows.
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

/// Scales and biases of a few rows as f32, each row followed by [`PADDING`] zeros.
struct Parameters {
    stride: usize,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl Parameters {
    fn new(matrix: &PackedMatrix, rows: usize) -> Self {
        let stride = matrix.groups_per_row() + PADDING;
        Self { stride, scales: vec![0.0; rows * stride], biases: vec![0.0; rows * stride] }
    }

    #[inline(always)]
    fn load(&mut self, matrix: &PackedMatrix, first_row: usize, rows: usize) {
        let scales = self.scales.chunks_exact_mut(self.stride);
        let biases = self.biases.chunks_exact_mut(self.stride);
        for ((row, scales), biases) in
            scales.zip(biases).enumerate().map(|(i, (s, b))| ((i, s), b)).take(rows)
        {
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
}

/// A run of blocks along K.
#[derive(Clone, Copy)]
struct Span {
    first_block: usize,
    end_block: usize,
    /// log2 of the group size.
    group_shift: u32,
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
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).skip(start);
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
        S::prefetch(from.wrapping_add(PREFETCH_AHEAD));
        let codes = R::load_codes::<S>(from);
        let scale = R::spread::<S>(row.scales.add(group));
        let bias = if R::HAS_BIASES { R::spread::<S>(row.biases.add(group)) } else { S::zero() };
        R::decode::<S>(codes, scale, bias)
    }
}

/// Adds the products of `ROWS` rows and `M` columns over a span to `sums`.
///
/// # Safety
/// As [`decode_block`]; `x` must hold `M` columns, `stride` apart, that cover the span.
#[inline(always)]
unsafe fn dot_span<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(
    rows: [Row; ROWS],
    x: *const f32,
    stride: usize,
    span: Span,
    sums: &mut [[S::F; M]; ROWS],
) {
    for block in span.first_block..span.end_block {
        // SAFETY: the caller's promise.
        unsafe {
            let weights = rows.map(|row| decode_block::<S, R>(row, block, span.group_shift));
            for i in 0..4 {
                for column in 0..M {
                    let x = S::load(x.add(column * stride + block * S::BLOCK + i * S::LANES));
                    for row in 0..ROWS {
                        sums[row][column] = S::mul_add(weights[row][i], x, sums[row][column]);
                    }
                }
            }
        }
    }
}

/// See [`DotRows`].
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Simd, R: Recipe, const M: usize>(task: DotRows<'_>) {
    let DotRows { matrix, mut first_row, x, out, .. } = task;
    let mut parameters = Parameters::new(matrix, ROWS_PER_PASS);
    for out in out.chunks_mut(ROWS_PER_PASS * M) {
        let rows = out.len() / M;
        parameters.load(matrix, first_row, rows);
        // SAFETY: the caller's promise.
        unsafe {
            match S::rows_at_once(M) {
                4 => dot_pass::<S, R, M, 4>(matrix, first_row, &parameters, x, out),
                2 => dot_pass::<S, R, M, 2>(matrix, first_row, &parameters, x, out),
                _ => dot_pass::<S, R, M, 1>(matrix, first_row, &parameters, x, out),
            }
        }
        first_row += rows;
    }
}

/// Up to [`ROWS_PER_PASS`] rows, whose parameters are ready.
#[inline(always)]
unsafe fn dot_pass<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(
    matrix: &PackedMatrix,
    first_row: usize,
    parameters: &Parameters,
    x: &[f32],
    out: &mut [f32],
) {
    let rows = out.len() / M;
    let full_blocks = matrix.k / S::BLOCK;
    let has_tail = matrix.k % S::BLOCK != 0;
    let stride = (full_blocks + usize::from(has_tail)) * S::BLOCK;
    assert!(x.len() >= M * stride && parameters.scales.len() >= rows * parameters.stride);
    let group_shift = matrix.format.group_size().trailing_zeros();
    let row_at = |row: usize, codes: *const u8| Row {
        codes,
        scales: parameters.scales.as_ptr().wrapping_add(row * parameters.stride),
        biases: parameters.biases.as_ptr().wrapping_add(row * parameters.stride),
    };
    // One column needs no blocking along K: its activations fit a first-level cache as they are.
    let depth = if M == 1 { full_blocks.max(1) } else { DEPTH / S::BLOCK };
    let mut sums = [[[0f32; MAX_LANES]; MAX_COLUMNS]; ROWS_PER_PASS];
    let mut first_block = 0;
    while first_block < full_blocks {
        let span = Span { first_block, end_block: (first_block + depth).min(full_blocks), group_shift };
        let mut row = 0;
        while row < rows {
            // SAFETY: the caller's promise; `row_words` covers `full_blocks` blocks (or is empty,
            // which the assertion excludes), parameters and activations were checked above.
            unsafe {
                if row + ROWS <= rows {
                    let pointers = std::array::from_fn(|r| {
                        let words = matrix.row_words(first_row + row + r);
                        assert!(words.len() * 4 >= full_blocks * block_bytes::<S, R>());
                        row_at(row + r, words.as_ptr().cast())
                    });
                    add_span::<S, R, M, ROWS>(pointers, x, stride, span, &mut sums[row..]);
                    row += ROWS;
                } else {
                    let words = matrix.row_words(first_row + row);
                    assert!(words.len() * 4 >= full_blocks * block_bytes::<S, R>());
                    let pointer = row_at(row, words.as_ptr().cast());
                    add_span::<S, R, M, 1>([pointer], x, stride, span, &mut sums[row..]);
                    row += 1;
                }
            }
        }
        first_block = span.end_block;
    }
    for row in 0..rows {
        if has_tail {
            let tail = Tail::new::<S, R>(matrix.row_words(first_row + row), full_blocks);
            let pointer = row_at(row, tail.origin::<S, R>(full_blocks));
            let span = Span { first_block: full_blocks, end_block: full_blocks + 1, group_shift };
            // SAFETY: the tail is a whole block; parameters and activations were checked above.
            unsafe { add_span::<S, R, M, 1>([pointer], x, stride, span, &mut sums[row..]) };
        }
        for column in 0..M {
            // SAFETY: the caller's promise; a place holds MAX_LANES numbers.
            out[row * M + column] = unsafe { S::sum(S::load(sums[row][column].as_ptr())) };
        }
    }
}

/// [`dot_span`] on sums that wait in memory.
#[inline(always)]
unsafe fn add_span<S: Simd, R: Recipe, const M: usize, const ROWS: usize>(
    rows: [Row; ROWS],
    x: &[f32],
    stride: usize,
    span: Span,
    waiting: &mut [[[f32; MAX_LANES]; MAX_COLUMNS]],
) {
    // SAFETY: the caller's promise; a place holds MAX_LANES numbers.
    unsafe {
        let mut sums = [[S::zero(); M]; ROWS];
        for row in 0..ROWS {
            for column in 0..M {
                sums[row][column] = S::load(waiting[row][column].as_ptr());
            }
        }
        dot_span::<S, R, M, ROWS>(rows, x.as_ptr(), stride, span, &mut sums);
        for row in 0..ROWS {
            for column in 0..M {
                S::store(waiting[row][column].as_mut_ptr(), sums[row][column]);
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
    let DecodeRows { matrix, first_row, order, out } = task;
    let full_blocks = matrix.k / S::BLOCK;
    let group_shift = matrix.format.group_size().trailing_zeros();
    let row_len = match order {
        Order::Natural => matrix.k,
        Order::Interleaved => matrix.k.next_multiple_of(S::BLOCK),
    };
    let mut parameters = Parameters::new(matrix, 1);
    for (row, out) in out.chunks_exact_mut(row_len).enumerate() {
        parameters.load(matrix, first_row + row, 1);
        let words = matrix.row_words(first_row + row);
        assert!(words.len() * 4 >= full_blocks * block_bytes::<S, R>());
        let tail = Tail::new::<S, R>(words, full_blocks);
        for (block, out) in out.chunks_mut(S::BLOCK).enumerate() {
            let codes =
                if block < full_blocks { words.as_ptr().cast() } else { tail.origin::<S, R>(full_blocks) };
            let pointers =
                Row { codes, scales: parameters.scales.as_ptr(), biases: parameters.biases.as_ptr() };
            let mut decoded = [0f32; 4 * MAX_LANES];
            // SAFETY: the caller's promise; the block lies in the row or is the tail.
            unsafe {
                let weights = decode_block::<S, R>(pointers, block, group_shift);
                for (i, weights) in weights.into_iter().enumerate() {
                    S::store(decoded.as_mut_ptr().add(i * S::LANES), weights);
                }
            }
            match order {
                Order::Natural => deinterleave(&decoded, S::LANES, out),
                Order::Interleaved => out.copy_from_slice(&decoded[..S::BLOCK]),
            }
        }
    }
}
