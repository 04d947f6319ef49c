//! Products of a few rows of f32 and a matrix of a cache, by tiles of sums that stay in registers.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::isa::Simd;
use super::operand::{Bf16, Codes4, Codes8, Numbers, Operand, F16, F32};
use crate::tensor::KvFormat;
use std::ops::Range;

/// A product `a * b`, and what becomes of it.
#[derive(Clone, Copy)]
pub(super) struct Product {
    /// The first of the rows of `a`, `a_stride` numbers apart.
    pub(super) a: *const f32,
    pub(super) a_stride: usize,
    pub(super) b: Operand,
    /// The first of the rows of the result, `out_stride` numbers apart.
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    pub(super) into: Into,
    pub(super) codes: Codes,
}

/// What is done with what `out` holds.
#[derive(Clone, Copy)]
pub(super) enum Into {
    /// The product replaces it.
    Replace,
    /// The product is added to it.
    Add,
    /// The product is added to each row times a factor.
    Scale(*const f32),
}

/// What makes numbers of sums of codes.
#[derive(Clone, Copy)]
pub(super) enum Codes {
    /// The operand has numbers, not codes.
    None,
    /// Each column has a scale and a bias in f16; `sums` are the sums of the rows of `a`, `stride` apart.
    OfColumns { scales: *const u16, biases: *const u16, sums: *const f32, stride: usize },
    /// Scales are in `a`; each row adds the same to all columns.
    OfRows { biases: *const f32 },
}

/// Vectors of columns that a pass over some rows takes. Where rows are few, more vectors keep the adders busy.
const fn strip<S: Simd>(rows: usize) -> usize {
    let (_, vectors) = S::TILE;
    if rows <= 2 && vectors < 4 {
        4
    } else {
        vectors
    }
}

/// An instruction set with its own code for products with each kind of numbers. In one function with what calls it, that code
/// would take minutes to compile.
pub(super) trait Multiplies: Simd {
    /// [`strips`], compiled with the features of the instruction set.
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn strips<N: Numbers>(
        product: &Product,
        rows: Range<usize>,
        depth: Range<usize>,
        columns: Range<usize>,
    );
}

/// Computes `rows` of the result, at most [`Simd::TILE`]`.0`, in the vectors `columns`; sums are over the rows `depth` of
/// `b`, that is the columns `depth` of `a`.
///
/// # Safety
/// As [`Simd`]. `a`, `out` and what `into` and `codes` name have the rows, `a` and `b` all of `depth`, `b` and `out` all of `columns`.
#[inline(always)]
pub(super) unsafe fn multiply<S: Multiplies>(
    product: &Product,
    rows: Range<usize>,
    depth: Range<usize>,
    columns: Range<usize>,
) {
    // SAFETY: the caller vouches for features, rows, depth and columns.
    unsafe {
        match product.b.format {
            KvFormat::F32 => S::strips::<F32>(product, rows, depth, columns),
            KvFormat::F16 => S::strips::<F16>(product, rows, depth, columns),
            KvFormat::Bf16 => S::strips::<Bf16>(product, rows, depth, columns),
            KvFormat::Affine8 => S::strips::<Codes8>(product, rows, depth, columns),
            KvFormat::Affine4 => S::strips::<Codes4>(product, rows, depth, columns),
        }
    }
}

/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(super) unsafe fn strips<S: Simd, N: Numbers>(
    product: &Product,
    rows: Range<usize>,
    depth: Range<usize>,
    columns: Range<usize>,
) {
    let count = columns.len().div_ceil(strip::<S>(rows.len())).max(1);
    let mut first = columns.start;
    for index in 0..count {
        // Strips of one width, as far as possible: a narrow one has too few sums for the latency of an addition.
        let last = columns.start + columns.len() * (index + 1) / count;
        // SAFETY: the caller vouches for features, rows, depth and columns, of which these are some.
        unsafe { tiles::<S, N>(product, rows.clone(), depth.clone(), (first, last - first)) };
        first = last;
    }
}

/// One tile of sums, whose numbers of rows and vectors become constants.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn tiles<S: Simd, N: Numbers>(
    product: &Product,
    rows: Range<usize>,
    depth: Range<usize>,
    (first, vectors): (usize, usize),
) {
    macro_rules! for_vectors {
        ($rows:literal) => {
            match vectors {
                1 => tile::<S, N, $rows, 1>(product, rows.start, depth, first),
                3 if const { strip::<S>($rows) >= 3 } => {
                    tile::<S, N, $rows, 3>(product, rows.start, depth, first)
                }
                4 if const { strip::<S>($rows) >= 4 } => {
                    tile::<S, N, $rows, 4>(product, rows.start, depth, first)
                }
                _ => tile::<S, N, $rows, 2>(product, rows.start, depth, first),
            }
        };
    }
    debug_assert!(rows.len() <= S::TILE.0 && vectors <= strip::<S>(rows.len()));
    // SAFETY: the caller vouches for features, rows, depth and columns. What an instruction set has no tile for is known
    // before code is generated.
    unsafe {
        match rows.len() {
            1 => for_vectors!(1),
            3 if const { S::TILE.0 >= 3 } => for_vectors!(3),
            4 if const { S::TILE.0 >= 4 } => for_vectors!(4),
            5 if const { S::TILE.0 >= 5 } => for_vectors!(5),
            6 if const { S::TILE.0 >= 6 } => for_vectors!(6),
            _ => for_vectors!(2),
        }
    }
}

/// # Safety
/// As [`multiply`], for `ROWS` rows and `VECTORS` vectors.
#[inline(always)]
unsafe fn tile<S: Simd, N: Numbers, const ROWS: usize, const VECTORS: usize>(
    product: &Product,
    first_row: usize,
    depth: Range<usize>,
    first_vector: usize,
) {
    // SAFETY: the caller vouches for features, rows, depth and columns.
    unsafe {
        let mut sums = [[S::zero(); VECTORS]; ROWS];
        let a = product.a.add(first_row * product.a_stride);
        for k in depth {
            let row = product.b.start.add(k * product.b.row_bytes);
            let mut numbers = [S::zero(); VECTORS];
            for vector in 0..VECTORS {
                numbers[vector] = N::load::<S>(row, (first_vector + vector) * S::LANES);
            }
            for row in 0..ROWS {
                let factor = S::splat(*a.add(row * product.a_stride + k));
                for vector in 0..VECTORS {
                    sums[row][vector] = S::mul_add(factor, numbers[vector], sums[row][vector]);
                }
            }
        }
        for row in 0..ROWS {
            let column = first_vector * S::LANES;
            sums[row] = numbers_of::<S, VECTORS>(&product.codes, sums[row], first_row + row, column);
            let out = product.out.add((first_row + row) * product.out_stride + column);
            for vector in 0..VECTORS {
                let out = out.add(vector * S::LANES);
                let sum = match product.into {
                    Into::Replace => sums[row][vector],
                    Into::Add => S::add(S::load(out), sums[row][vector]),
                    Into::Scale(factors) => {
                        S::mul_add(S::load(out), S::splat(*factors.add(first_row + row)), sums[row][vector])
                    }
                };
                S::store(out, sum);
            }
        }
    }
}

/// What sums of codes are as numbers.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn numbers_of<S: Simd, const VECTORS: usize>(
    codes: &Codes,
    mut sums: [S::F; VECTORS],
    row: usize,
    column: usize,
) -> [S::F; VECTORS] {
    // SAFETY: the caller vouches for features, rows and columns.
    unsafe {
        match *codes {
            Codes::None => {}
            Codes::OfColumns { scales, biases, sums: of_rows, stride } => {
                let of_row = S::splat(*of_rows.add(row * stride));
                for vector in 0..VECTORS {
                    let column = column + vector * S::LANES;
                    let bias = S::mul(of_row, S::load_f16(biases.add(column)));
                    sums[vector] = S::mul_add(sums[vector], S::load_f16(scales.add(column)), bias);
                }
            }
            Codes::OfRows { biases } => {
                for vector in 0..VECTORS {
                    sums[vector] = S::add(sums[vector], S::splat(*biases.add(row)));
                }
            }
        }
        sums
    }
}
