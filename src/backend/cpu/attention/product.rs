//! Products of a few rows of f32 and a matrix of a cache, by tiles of sums that stay in registers.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::isa::Simd;
use super::operand::{Numbers, Operand};
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
    pub(super) ahead: Ahead,
}

/// What is read next, and fetched into the caches meanwhile: memory does not wait for arithmetic, nor this for memory.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Where it begins; any address may be fetched.
    pub(super) start: *const u8,
    /// Bytes for each row of `b`; none where nothing is fetched.
    pub(super) step: usize,
}

impl Ahead {
    pub(super) const NONE: Self = Self { start: std::ptr::null(), step: 0 };
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

/// Computes `ROWS` rows of the result, from `first_row` on, in the vectors `columns`; sums are over the rows `depth` of `b`,
/// that is the columns `depth` of `a`.
///
/// # Safety
/// As [`Simd`]. `a`, `out` and what `into` and `codes` name have the rows, `a` and `b` all of `depth`, `b` and `out` all of
/// `columns`; `b` has numbers `N`.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd, N: Numbers, const ROWS: usize>(
    product: &Product,
    first_row: usize,
    depth: Range<usize>,
    columns: Range<usize>,
) {
    let count = columns.len().div_ceil(strip::<S>(ROWS)).max(1);
    let mut first = columns.start;
    for index in 0..count {
        // Strips of one width, as far as possible: a narrow one has too few sums for the latency of an addition.
        let last = columns.start + columns.len() * (index + 1) / count;
        // SAFETY: the caller vouches for features, rows, depth and columns, of which these are some. No strip is wider than
        // four vectors.
        unsafe {
            match last - first {
                1 => tile::<S, N, ROWS, 1>(product, first_row, depth.clone(), first),
                2 => tile::<S, N, ROWS, 2>(product, first_row, depth.clone(), first),
                3 => tile::<S, N, ROWS, 3>(product, first_row, depth.clone(), first),
                _ => tile::<S, N, ROWS, 4>(product, first_row, depth.clone(), first),
            }
        }
        first = last;
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
            for line in (0..product.ahead.step).step_by(64) {
                S::prefetch(product.ahead.start.wrapping_add(k * product.ahead.step + line));
            }
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
