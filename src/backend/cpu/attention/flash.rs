//! One part of an attention: online softmax over blocks of 64 keys, for all instruction sets.
//!
//! Scores of a block are products of queries and keys in base two (the queries carry the scale and `log2 e`). Before a
//! block's values are added, the sums so far are multiplied by two to the power by which the largest score has grown. Only
//! the scores of one block exist at a time.

use super::super::aligned::Aligned;
use super::super::isa::Simd;
use super::exp2::exp2;
use super::hadamard;
use super::operand::{Float, Operand};
use super::parts::{Attention, Part, Rows};
use super::product::{multiply, Product};
use super::widen::{widen_keys, widen_values};
use crate::tensor::{KvLayout, KvPlane, KV_BLOCK};
use std::ops::Range;

/// What [`run`] computes.
pub(super) struct PartTask<'a> {
    pub(super) attention: &'a Attention<'a>,
    pub(super) part: &'a Part,
    /// `[tokens][heads * head_dim]` of all queries.
    pub(super) q: Rows<'a>,
    /// See [`PartialMut`].
    pub(super) partial: &'a mut [f32],
}

/// The numbers of a part for its rows: weighted sums of values, largest scores in base two, sums of weights.
pub(super) struct PartialMut<'a> {
    pub(super) sums: &'a mut [f32],
    pub(super) largest: &'a mut [f32],
    pub(super) totals: &'a mut [f32],
}

impl<'a> PartialMut<'a> {
    /// The places in the numbers of a part of `rows` rows with sums `stride` apart.
    fn new(partial: &'a mut [f32], rows: usize, stride: usize) -> Option<Self> {
        let (sums, rest) = partial.split_at_mut_checked(rows * stride)?;
        let (largest, totals) = rest.split_at_mut_checked(rows)?;
        (totals.len() == rows).then_some(Self { sums, largest, totals })
    }
}

/// Buffers of a part.
struct Scratch {
    /// `[rows][head_dim]`, scaled.
    q: Aligned<f32>,
    /// `[rows][64]`: scores, then weights.
    scores: Aligned<f32>,
    /// By how much the largest score of each row has grown, then by what its sums shrink. Whole vectors.
    factors: Aligned<f32>,
    /// Keys or values of a block in f32, where they are not read as they are.
    wide: Aligned<f32>,
}

/// The scaled queries of a part, `[rows][head_dim]`.
fn scaled_queries(task: &PartTask, out: &mut [f32]) {
    let PartTask { attention, part, q, .. } = task;
    let (config, group_size) = (attention.cache.config(), attention.group_size());
    let heads = part.kv_head * group_size..(part.kv_head + 1) * group_size;
    let factor = f64::from(attention.scale) * std::f64::consts::LOG2_E;
    let (first, dim) = (part.queries.first_row, config.head_dim);
    for (token, out) in out.chunks_exact_mut(group_size * dim).enumerate() {
        let q = q.get(first + token, heads.start * dim..heads.end * dim);
        // One rounding, that of the result.
        out.iter_mut().zip(q).for_each(|(out, q)| *out = (f64::from(*q) * factor) as f32);
    }
    if config.keys.is_rotated() {
        out.chunks_exact_mut(dim).for_each(hadamard::rotate);
    }
}

/// Computes a part.
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(task: PartTask<'_>) {
    let (attention, part) = (task.attention, task.part);
    let (rows, stride) = (attention.rows(part), attention.sum_stride());
    let dim = attention.cache.config().head_dim;
    let mut scratch = Scratch {
        q: Aligned::new(rows * dim),
        scores: Aligned::new(rows * KV_BLOCK),
        factors: Aligned::new(rows.next_multiple_of(16)),
        wide: Aligned::new(0),
    };
    scaled_queries(&task, &mut scratch.q);
    let Some(partial) = PartialMut::new(task.partial, rows, stride) else { return };
    partial.sums.fill(0.);
    partial.largest.fill(f32::MIN);
    partial.totals.fill(0.);
    let (key_layout, value_layout) = attention.cache.layouts();
    let reads_wide =
        [key_layout, value_layout].into_iter().any(|layout| !is_read_directly::<S>(layout, rows));
    if reads_wide {
        scratch.wide = Aligned::new(KV_BLOCK * stride.max(dim));
    }
    let Some(head) = attention.cache.head(part.queries.sequence, part.kv_head) else { return };
    for number in part.keys.start / KV_BLOCK..part.keys.end.div_ceil(KV_BLOCK) {
        let Some(block) = head.block(number) else { continue };
        let block_rows = BlockRows { attention, part, start: number * KV_BLOCK, rows };
        // SAFETY: buffers have the rows of the part and the sizes of a block; the caller vouches for the features.
        unsafe {
            let keys = operand::<S>(&block.keys, key_layout, (rows, dim), true, &mut scratch.wide);
            scores::<S>(&block_rows, keys, dim, &mut scratch);
            softmax::<S>(&block_rows, &mut scratch, partial.largest, partial.totals);
            let values = operand::<S>(&block.values, value_layout, (rows, dim), false, &mut scratch.wide);
            add_values::<S>(&block_rows, values, &scratch, (partial.sums.as_mut_ptr(), stride));
        }
    }
}

/// Whether products read numbers of the cache as they are. For many rows it takes less time to widen them once.
fn is_read_directly<S: Simd>(layout: &KvLayout, rows: usize) -> bool {
    match Float::of(layout.format) {
        Some(Float::F32) => true,
        Some(Float::F16 | Float::Bf16) => rows <= 2 * S::TILE.0,
        None => false,
    }
}

/// Keys or values of a block as products read them.
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
unsafe fn operand<S: Simd>(
    plane: &KvPlane,
    layout: &KvLayout,
    (rows, dim): (usize, usize),
    is_keys: bool,
    wide: &mut Aligned<f32>,
) -> Operand {
    if let Some(float) = Float::of(layout.format).filter(|_| is_read_directly::<S>(layout, rows)) {
        return Operand { float, start: plane.codes().as_ptr(), row_bytes: layout.row_bytes };
    }
    let columns = if is_keys { KV_BLOCK } else { KvLayout::padded(dim) };
    // SAFETY: the caller vouches for the features.
    unsafe {
        match is_keys {
            true => widen_keys::<S>(plane, layout, dim, wide),
            false => widen_values::<S>(plane, layout, dim, wide),
        }
    }
    Operand { float: Float::F32, start: wide.as_ptr().cast(), row_bytes: columns * size_of::<f32>() }
}

/// The rows of a part, and a block of keys that some of them see.
struct BlockRows<'a> {
    attention: &'a Attention<'a>,
    part: &'a Part,
    /// The position of the block's first key.
    start: usize,
    rows: usize,
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

    /// The keys that any of these rows sees.
    fn seen_by_any(&self, rows: &Range<usize>) -> Range<usize> {
        self.seen(rows.start).start..self.seen(rows.end - 1).end
    }

    /// Rows that are multiplied together.
    fn tiles<S: Simd>(&self) -> impl Iterator<Item = Range<usize>> {
        let rows = self.rows;
        (0..rows).step_by(S::TILE.0).map(move |first| first..(first + S::TILE.0).min(rows))
    }
}

/// Scores of the keys that a row may see; others are left as they were.
///
/// # Safety
/// As [`Simd`]. `keys` has `dim` rows of a block, the buffers have the part's rows.
#[inline(always)]
unsafe fn scores<S: Simd>(block: &BlockRows, keys: Operand, dim: usize, scratch: &mut Scratch) {
    let product = Product {
        a: scratch.q.as_ptr(),
        a_stride: dim,
        b: keys,
        out: scratch.scores.as_mut_ptr(),
        out_stride: KV_BLOCK,
        factors: std::ptr::null(),
    };
    for rows in block.tiles::<S>() {
        let seen = block.seen_by_any(&rows);
        if !seen.is_empty() {
            let columns = seen.start / S::LANES..seen.end.div_ceil(S::LANES);
            // SAFETY: the caller vouches for features, rows and keys; a block has whole vectors of keys.
            unsafe { multiply::<S>(&product, rows, 0..dim, columns) };
        }
    }
}

/// Turns scores into weights, and adds these to the totals; factors become those of the sums so far.
///
/// # Safety
/// As [`Simd`]. The buffers have the block's rows.
#[inline(always)]
unsafe fn softmax<S: Simd>(
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
        let (before, rest) = scores.split_at_mut(seen.start.min(seen.end));
        before.fill(f32::NEG_INFINITY);
        rest.get_mut(seen.len()..).unwrap_or_default().fill(f32::NEG_INFINITY);
        let mut found = f32::NEG_INFINITY;
        // SAFETY: a row of scores has `vectors` vectors; the caller vouches for the features.
        unsafe {
            let mut all = S::load(scores.as_ptr());
            for vector in 1..vectors {
                all = S::max(all, S::load(scores.as_ptr().add(vector * S::LANES)));
            }
            found = found.max(S::largest(all));
        }
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
/// rows.
#[inline(always)]
unsafe fn add_values<S: Simd>(
    block: &BlockRows,
    values: Operand,
    scratch: &Scratch,
    (sums, stride): (*mut f32, usize),
) {
    let product = Product {
        a: scratch.scores.as_ptr(),
        a_stride: KV_BLOCK,
        b: values,
        out: sums,
        out_stride: stride,
        factors: scratch.factors.as_ptr(),
    };
    // Columns of sums whose values, for all keys, stay in the nearest cache while all rows meet them.
    let vectors = stride / S::LANES;
    let strip = (KV_BLOCK / S::LANES).max(vectors.div_ceil(stride.div_ceil(KV_BLOCK)));
    for first in (0..vectors).step_by(strip) {
        for rows in block.tiles::<S>() {
            let seen = block.seen_by_any(&rows);
            if !seen.is_empty() {
                // SAFETY: the caller vouches for features, rows, values and sums.
                unsafe { multiply::<S>(&product, rows, seen, first..(first + strip).min(vectors)) };
            }
        }
    }
}
