//! One part of an attention: online softmax over blocks of 64 keys, for all instruction sets.
//!
//! Scores of a block are products of queries and keys in base two (the queries carry the scale and `log2 e`). Before a
//! block's values are added, the sums so far are multiplied by two to the power by which the largest score has grown. Only
//! the scores of one block exist at a time.

use super::super::aligned::Aligned;
use super::super::isa::Simd;
use super::block::{add_values, scores, softmax, BlockRows, Scratch};
use super::hadamard;
use super::kernels::Kernels;
use super::operand::Operand;
use super::parts::{Attention, Part, Rows};
use super::product::Ahead;
use super::widen::Kind;
use crate::tensor::{KvFormat, KvLayout, KvPlane, KV_BLOCK};

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
struct PartialMut<'a> {
    sums: &'a mut [f32],
    largest: &'a mut [f32],
    totals: &'a mut [f32],
}

impl<'a> PartialMut<'a> {
    /// The places in the numbers of a part of `rows` rows with sums `stride` apart.
    fn new(partial: &'a mut [f32], rows: usize, stride: usize) -> Option<Self> {
        let (sums, rest) = partial.split_at_mut_checked(rows * stride)?;
        let (largest, totals) = rest.split_at_mut_checked(rows)?;
        (totals.len() == rows).then_some(Self { sums, largest, totals })
    }
}

/// The scaled queries of a part, `[rows][head_dim]`.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn scaled_queries<S: Simd>(task: &PartTask, out: &mut [f32]) {
    let PartTask { attention, part, q, .. } = task;
    let (config, group_size) = (attention.cache.config(), attention.group_size());
    let heads = part.kv_head * group_size..(part.kv_head + 1) * group_size;
    let factor = f64::from(attention.scale) * std::f64::consts::LOG2_E;
    let (first, dim) = (part.queries.first_row, config.head_dim);
    for (token, out) in out.chunks_exact_mut(group_size * dim).enumerate() {
        let q = q.get(first + token, heads.start * dim..heads.end * dim);
        // SAFETY: the caller vouches for the features.
        unsafe { scale::<S>(q, factor, out) };
    }
    if config.keys.is_rotated() {
        out.chunks_exact_mut(dim).for_each(hadamard::rotate);
    }
}

/// `out = factor * x` with little more than one rounding: the factor is the sum of two numbers.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn scale<S: Simd>(x: &[f32], factor: f64, out: &mut [f32]) {
    let (high, low) = (factor as f32, (factor - f64::from(factor as f32)) as f32);
    let (vectors, rest) = x.split_at(x.len() - x.len() % S::LANES);
    for (x, out) in vectors.chunks_exact(S::LANES).zip(out.chunks_exact_mut(S::LANES)) {
        // SAFETY: both have a whole vector; the caller vouches for the features.
        unsafe {
            let x = S::load(x.as_ptr());
            S::store(out.as_mut_ptr(), S::mul_add(x, S::splat(high), S::mul(x, S::splat(low))));
        }
    }
    let out = out.get_mut(vectors.len()..).unwrap_or_default();
    out.iter_mut().zip(rest).for_each(|(out, x)| *out = x * high + x * low);
}

impl Scratch {
    /// # Safety
    /// As [`Simd`].
    #[inline(always)]
    unsafe fn new<S: Simd>(task: &PartTask, rows: usize) -> Self {
        let (cache, stride) = (task.attention.cache, task.attention.sum_stride());
        let dim = cache.config().head_dim;
        let (keys, values) = cache.layouts();
        let reads_wide = [keys, values].into_iter().any(|layout| !is_read_directly::<S>(layout.format, rows));
        let has_codes = values.groups > 0 && is_read_directly::<S>(values.format, rows);
        let mut scratch = Self {
            q: Aligned::new(rows * dim),
            q_sums: Aligned::new(rows * keys.groups),
            scores: Aligned::new(rows * KV_BLOCK),
            factors: Aligned::new(rows.next_multiple_of(16)),
            scaled: Aligned::new(if has_codes { rows * KV_BLOCK } else { 0 }),
            biases: Aligned::new(if has_codes { rows } else { 0 }),
            wide: Aligned::new(if reads_wide { KV_BLOCK * stride } else { 0 }),
        };
        // SAFETY: the caller vouches for the features.
        unsafe { scaled_queries::<S>(task, &mut scratch.q) };
        if let Some(size) = keys.format.group_size() {
            let groups = scratch.q.chunks_exact(dim).flat_map(|q| q.chunks(size));
            scratch.q_sums.iter_mut().zip(groups).for_each(|(sum, group)| *sum = group.iter().sum());
        }
        scratch
    }
}

/// Computes a part.
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(super) unsafe fn run<S: Kernels>(mut task: PartTask<'_>) {
    let (attention, part) = (task.attention, task.part);
    let (rows, stride) = (attention.rows(part), attention.sum_stride());
    let dim = attention.cache.config().head_dim;
    // SAFETY: the caller vouches for the features.
    let mut scratch = unsafe { Scratch::new::<S>(&task, rows) };
    let Some(partial) = PartialMut::new(std::mem::take(&mut task.partial), rows, stride) else { return };
    partial.sums.fill(0.);
    partial.largest.fill(f32::MIN);
    partial.totals.fill(0.);
    let (key_layout, value_layout) = attention.cache.layouts();
    let Some(head) = attention.cache.head(part.queries.sequence, part.kv_head) else { return };
    for number in part.keys.start / KV_BLOCK..part.keys.end.div_ceil(KV_BLOCK) {
        let Some(block) = head.block(number) else { continue };
        let block_rows = BlockRows { attention, part, start: number * KV_BLOCK, rows };
        let (keys, values) = ((&block.keys, key_layout), (&block.values, value_layout));
        let ahead = |plane: Option<&KvPlane>, layout: &KvLayout| match plane {
            Some(plane) if is_read_directly::<S>(layout.format, rows) => {
                Ahead { start: plane.codes().as_ptr(), step: KV_BLOCK * layout.format.bits() / 8 }
            }
            _ => Ahead::NONE,
        };
        let next_keys = ahead(head.block(number + 1).map(|block| &block.keys), key_layout);
        let next_values = ahead(Some(&block.values), value_layout);
        // SAFETY: buffers have the rows of the part and the sizes of a block; the caller vouches for the features.
        unsafe {
            let operand = read::<S>(keys, Kind::Keys, (rows, dim), &mut scratch.wide);
            scores::<S>(&block_rows, operand, keys, (dim, next_values), &mut scratch);
            block_rows.cap_scores(&mut scratch);
            softmax::<S>(&block_rows, &mut scratch, partial.largest, partial.totals);
            let operand = read::<S>(values, Kind::Values, (rows, dim), &mut scratch.wide);
            let sums = (partial.sums.as_mut_ptr(), stride, next_keys);
            add_values::<S>(&block_rows, operand, values, &mut scratch, sums);
        }
    }
}

/// Whether products read a cache as it is. For many rows it takes less time to make f32 of it once.
fn is_read_directly<S: Simd>(format: KvFormat, rows: usize) -> bool {
    format == KvFormat::F32 || rows <= 2 * S::TILE.0
}

/// Keys or values of a block as products read them.
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
unsafe fn read<S: Kernels>(
    (plane, layout): (&KvPlane, &KvLayout),
    kind: Kind,
    (rows, dim): (usize, usize),
    wide: &mut Aligned<f32>,
) -> Operand {
    if is_read_directly::<S>(layout.format, rows) {
        let start = plane.codes().as_ptr();
        return Operand { format: layout.format, start, row_bytes: layout.row_bytes };
    }
    // SAFETY: the caller vouches for the features.
    unsafe { S::widen(plane, layout, kind, dim, wide) };
    let (_, columns) = kind.shape(dim);
    Operand { format: KvFormat::F32, start: wide.as_ptr().cast(), row_bytes: columns * size_of::<f32>() }
}
