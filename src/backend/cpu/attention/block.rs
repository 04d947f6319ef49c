//! Scores, weights and values of one block of keys, for the rows of a part.

use super::super::aligned::Aligned;
use super::super::isa::Simd;
use super::exp2::exp2;
use super::kernels::Kernels;
use super::operand::Operand;
use super::parts::{Attention, Part};
use super::product::{Ahead, Codes, Into, Product};
use crate::tensor::{KvLayout, KvPlane, KV_BLOCK};
use std::ops::Range;

/// Buffers of a part.
pub(super) struct Scratch {
    /// `[rows][head_dim]`, scaled.
    pub(super) q: Aligned<f32>,
    /// Sums of the queries over the groups of keys, `[rows][groups]`.
    pub(super) q_sums: Aligned<f32>,
    /// `[rows][64]`: scores, then weights.
    pub(super) scores: Aligned<f32>,
    /// By how much the largest score of each row has grown, then by what its sums shrink. Whole vectors.
    pub(super) factors: Aligned<f32>,
    /// `[rows][64]`: weights times the scales of one group of values.
    pub(super) scaled: Aligned<f32>,
    /// `[rows]`: sums of weights times the biases of one group of values.
    pub(super) biases: Aligned<f32>,
    /// Keys or values of a block in f32, where they are not read as they are.
    pub(super) wide: Aligned<f32>,
}

/// The rows of a part, and a block of keys that some of them see.
pub(super) struct BlockRows<'a> {
    pub(super) attention: &'a Attention<'a>,
    pub(super) part: &'a Part,
    /// The position of the block's first key.
    pub(super) start: usize,
    pub(super) rows: usize,
}

impl BlockRows<'_> {
    /// The keys of the block that a row sees; they begin and end later from row to row.
    fn seen(&self, row: usize) -> Range<usize> {
        let token = row / self.attention.group_size();
        let seen = self.attention.seen(self.part.queries.position + token);
        let within = |position: usize| position.saturating_sub(self.start).min(KV_BLOCK);
        let keys = &self.part.keys;
        within(seen.start.max(keys.start))..within(seen.end.min(keys.end))
    }

    /// Ends scores, which are in base two, at the attention's softcap, if it has one.
    pub(super) fn cap_scores(&self, scratch: &mut Scratch) {
        let Some(cap) = self.attention.softcap else { return };
        let cap = cap * std::f32::consts::LOG2_E;
        for (row, scores) in scratch.scores.chunks_exact_mut(KV_BLOCK).enumerate() {
            let seen = scores.get_mut(self.seen(row)).unwrap_or_default();
            seen.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
    }

    /// Rows that are multiplied together, with the keys that any of them sees; those that see none are left out.
    fn tiles<S: Simd>(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<'_, S> {
        let tiles = (0..self.rows).step_by(S::TILE.0).map(|first| {
            let last = (first + S::TILE.0).min(self.rows);
            (first..last, self.seen(first).start..self.seen(last - 1).end)
        });
        tiles.filter(|(_, seen)| !seen.is_empty())
    }
}

/// Scores of the keys that a row may see; others are left as they were.
///
/// # Safety
/// As [`Simd`]. `keys` has `dim` rows of a block, the buffers have the part's rows; `plane` is of `layout`.
#[inline(always)]
pub(super) unsafe fn scores<S: Kernels>(
    block: &BlockRows,
    keys: Operand,
    (plane, layout): (&KvPlane, &KvLayout),
    (dim, ahead): (usize, Ahead),
    scratch: &mut Scratch,
) {
    let mut product = Product {
        a: scratch.q.as_ptr(),
        a_stride: dim,
        b: keys,
        out: scratch.scores.as_mut_ptr(),
        out_stride: KV_BLOCK,
        into: Into::Replace,
        codes: Codes::None,
        ahead,
    };
    let (scales, biases) = plane.groups(layout);
    let (scales, biases): (*const u16, *const u16) = (scales.as_ptr().cast(), biases.as_ptr().cast());
    let group_size = keys.format.group_size().unwrap_or(dim);
    for (rows, seen) in block.tiles::<S>() {
        let columns = seen.start / S::LANES..seen.end.div_ceil(S::LANES);
        for (group, first) in (0..dim).step_by(group_size).enumerate() {
            if keys.format.group_size().is_some() {
                product.into = if group == 0 { Into::Replace } else { Into::Add };
                product.codes = Codes::OfColumns {
                    scales: scales.wrapping_add(group * KV_BLOCK),
                    biases: biases.wrapping_add(group * KV_BLOCK),
                    sums: scratch.q_sums.as_ptr().wrapping_add(group),
                    stride: layout.groups,
                };
            }
            let depth = first..(first + group_size).min(dim);
            // SAFETY: the caller vouches for features, rows and keys; a block has whole vectors of keys, and every group a
            // scale and a bias for each.
            unsafe { S::multiply(&product, rows.clone(), depth, columns.clone()) };
        }
        product.ahead = Ahead::NONE;
    }
}

/// Turns scores into weights, and adds these to the totals; factors become those of the sums so far.
///
/// # Safety
/// As [`Simd`]. The buffers have the block's rows.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(
    block: &BlockRows,
    scratch: &mut Scratch,
    largest: &mut [f32],
    totals: &mut [f32],
) {
    let vectors = KV_BLOCK / S::LANES;
    let rows = scratch.scores.chunks_exact_mut(KV_BLOCK);
    for (row, (scores, (factor, largest))) in
        rows.zip(scratch.factors.iter_mut().zip(&mut *largest)).enumerate()
    {
        let seen = block.seen(row);
        if seen.len() < KV_BLOCK {
            let (before, rest) = scores.split_at_mut(seen.start.min(seen.end));
            before.fill(f32::NEG_INFINITY);
            rest.get_mut(seen.len()..).unwrap_or_default().fill(f32::NEG_INFINITY);
        }
        // SAFETY: a row of scores has `vectors` vectors; the caller vouches for the features.
        let found = unsafe {
            let mut all = S::load(scores.as_ptr());
            for vector in 1..vectors {
                all = S::max(all, S::load(scores.as_ptr().add(vector * S::LANES)));
            }
            S::largest(all)
        };
        let before = *largest;
        *largest = largest.max(found);
        *factor = before - *largest;
    }
    let factors = scratch.factors.as_mut_ptr();
    for vector in 0..scratch.factors.len() / S::LANES {
        // SAFETY: there are whole vectors of factors; the caller vouches for the features.
        unsafe {
            let factors = factors.add(vector * S::LANES);
            S::store(factors, exp2::<S>(S::load(factors)));
        }
    }
    let rows = scratch.scores.chunks_exact_mut(KV_BLOCK).zip(scratch.factors.iter());
    for ((scores, factor), (largest, total)) in rows.zip(largest.iter().zip(totals)) {
        // SAFETY: a row of scores has `vectors` vectors; the caller vouches for the features.
        unsafe {
            let mut sum = S::zero();
            for vector in 0..vectors {
                let scores = scores.as_mut_ptr().add(vector * S::LANES);
                let weights = exp2::<S>(S::sub(S::load(scores), S::splat(*largest)));
                S::store(scores, weights);
                sum = S::add(sum, weights);
            }
            *total = *total * factor + S::sum(sum);
        }
    }
}

/// Multiplies the sums by their factors and adds the weighted values of a block.
///
/// # Safety
/// As [`Simd`]. `values` has the rows of a block, each as long as the sums' stride; `sums` and the buffers have the part's
/// rows; `plane` is of `layout`.
#[inline(always)]
pub(super) unsafe fn add_values<S: Kernels>(
    block: &BlockRows,
    values: Operand,
    (plane, layout): (&KvPlane, &KvLayout),
    scratch: &mut Scratch,
    (sums, stride, ahead): (*mut f32, usize, Ahead),
) {
    let mut product = Product {
        a: scratch.scores.as_ptr(),
        a_stride: KV_BLOCK,
        b: values,
        out: sums,
        out_stride: stride,
        into: Into::Scale(scratch.factors.as_ptr()),
        codes: Codes::None,
        ahead,
    };
    let (scales, biases) = plane.groups(layout);
    // Columns of sums whose values, for all keys, stay in the nearest cache while all rows meet them; or those of a group.
    let strip = values.format.group_size().unwrap_or(KV_BLOCK);
    for (group, first) in (0..stride).step_by(strip).enumerate() {
        if values.format.group_size().is_some() {
            let of_group = group * KV_BLOCK..(group + 1) * KV_BLOCK;
            // SAFETY: scales and biases of a group are those of all keys; the caller vouches for features and rows.
            unsafe {
                let (scales, biases) = (scales[of_group.clone()].as_ptr(), biases[of_group].as_ptr());
                scale_weights::<S>(block.rows, (scales.cast(), biases.cast()), scratch);
            }
            product.a = scratch.scaled.as_ptr();
            product.codes = Codes::OfRows { biases: scratch.biases.as_ptr() };
        }
        let columns = first / S::LANES..(first + strip).min(stride) / S::LANES;
        // Each strip fetches its share.
        let step = ahead.step * strip / KV_BLOCK;
        product.ahead = Ahead { start: ahead.start.wrapping_add(group * KV_BLOCK * step), step };
        for (rows, seen) in block.tiles::<S>() {
            // SAFETY: the caller vouches for features, rows, values and sums.
            unsafe { S::multiply(&product, rows, seen, columns.clone()) };
            product.ahead = Ahead::NONE;
        }
    }
}

/// Weights times the scales of a group of values, and their sums times its biases.
///
/// # Safety
/// As [`Simd`]. The buffers have `rows` rows; there is a scale and a bias for each of 64 keys.
#[inline(always)]
unsafe fn scale_weights<S: Simd>(
    rows: usize,
    (scales, biases): (*const u16, *const u16),
    scratch: &mut Scratch,
) {
    for row in 0..rows {
        // SAFETY: the caller vouches for rows, scales, biases and features.
        unsafe {
            let weights = scratch.scores.as_ptr().add(row * KV_BLOCK);
            let scaled = scratch.scaled.as_mut_ptr().add(row * KV_BLOCK);
            let mut sum = S::zero();
            for first in (0..KV_BLOCK).step_by(S::LANES) {
                let weights = S::load(weights.add(first));
                S::store(scaled.add(first), S::mul(weights, S::load_f16(scales.add(first))));
                sum = S::mul_add(weights, S::load_f16(biases.add(first)), sum);
            }
            *scratch.biases.as_mut_ptr().add(row) = S::sum(sum);
        }
    }
}
