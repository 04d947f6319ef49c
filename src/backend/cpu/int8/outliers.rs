//! Activations far larger than those around them.
//!
//! Fixed-point numbers that meet a group of weights share a unit, which the largest of them sets. One that is far larger
//! than the others would take their bits; and where it meets a weight of zero, nothing is left to hide that. So it is
//! multiplied by itself, in f32.
//!
//! Typical of a group is the magnitude that three eighths of its numbers stay below, zeros left out: a group in which half
//! of the numbers are large by turns is one with outliers, too, and a product of two others, as gated layers have it, is
//! not.

use super::super::fast_kernel::{Digits, NotRepresentable};
use super::super::group_params::ROWS_PER_PASS;
use super::super::isa::{avx2::Avx2, avx512::Avx512};
use super::super::matrix::PackedMatrix;
use super::super::tasks::{self, Threads};
use std::arch::x86_64::*;
use std::borrow::Cow;
use std::ops::Range;

/// How many times as large as what is typical a number may be. Three digits round by at most 2^-24 of the largest number of
/// a group, about: 1e-7 of a result that the usual numbers make. Where those just below the limit meet weights of zero, and
/// half of the group does, it is 1.5e-6 of what the rest makes, computed. Not found are small numbers that are fewer than
/// three eighths of their group, and groups that are large throughout.
const FACTOR: f32 = 32.;

/// Activations have to be below this, so that sums of products are finite before they are scaled, too.
const LIMIT: f32 = (1u128 << 96) as f32;

/// The least of what is largest in a group, unless all is zero: their units are normal numbers, whose inverses are, too.
const LEAST: f32 = 1. / (1u128 << 100) as f32;

/// So many in a row of `k` numbers, multiplied by columns, take about as much time as f32 does: the time of one is that of a few
/// dozen other numbers, more or less.
pub(super) fn most_by_columns(k: usize) -> usize {
    16 + k / 256
}

/// Rows that a thread looks through at a time.
const ROWS_AT_ONCE: usize = 16;

/// A number, its row of x and its column.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Outlier {
    k: u32,
    m: u32,
    pub(super) x: f32,
}

impl Outlier {
    pub(super) fn column(&self) -> usize {
        self.k as usize
    }

    pub(super) fn row(&self) -> usize {
        self.m as usize
    }
}

/// Outliers by rows of x, and by columns in each.
pub(super) struct Found(Vec<Outlier>);

impl Found {
    /// Those of `k` numbers in each of some rows. If there are more than so many in a row, on average, those that `digits` may lose
    /// are none.
    ///
    /// # Errors
    /// If there is a number that is no fixed-point number, or if there are more outliers, and digits may lose none.
    pub(super) fn new(
        isa: impl Magnitudes,
        (x, k): (&[f32], usize),
        group_size: usize,
        (digits, most): (Digits, usize),
        threads: Threads,
    ) -> Result<Self, NotRepresentable> {
        let find = |first_row: usize, x: &[f32]| {
            let mut found = Vec::new();
            for (m, row) in (first_row..).zip(x.chunks_exact(k)) {
                for (group, numbers) in row.chunks_exact(group_size).enumerate() {
                    let limit = isa.limit(numbers).ok_or(NotRepresentable)?;
                    if let Some(limit) = limit {
                        let all = (group * group_size..).zip(numbers).filter(|(_, x)| x.abs() > limit);
                        found.extend(all.map(|(k, x)| Outlier { k: k as u32, m: m as u32, x: *x }));
                    }
                }
            }
            Ok(found)
        };
        let all = match threads {
            Threads::This => find(0, x)?,
            Threads::All => {
                let mut parts: Vec<Result<Vec<Outlier>, NotRepresentable>> = Vec::new();
                let parts_of_x = x.chunks(ROWS_AT_ONCE * k.max(1));
                parts.resize_with(parts_of_x.len(), || Ok(Vec::new()));
                tasks::for_each(parts.iter_mut().zip(parts_of_x), |part, (found, x)| {
                    *found = find(part * ROWS_AT_ONCE, x);
                });
                parts.into_iter().collect::<Result<Vec<_>, _>>()?.concat()
            }
        };
        match all.len() > x.len() / k.max(1) * most {
            true if digits.strict => Err(NotRepresentable),
            true => Ok(Self(Vec::new())),
            false => Ok(Self(all)),
        }
    }

    /// `x`, rows of `k` numbers, without them.
    pub(super) fn taken_out_of<'a>(&self, x: &'a [f32], k: usize) -> Cow<'a, [f32]> {
        let mut x = Cow::Borrowed(x);
        if !self.0.is_empty() {
            for (row, x) in x.to_mut().chunks_exact_mut(k).enumerate() {
                self.of_row(row).take_out(0, x);
            }
        }
        x
    }

    /// Those of a row.
    pub(super) fn of_row(&self, row: usize) -> OfRow<'_> {
        let start = self.0.partition_point(|outlier| outlier.row() < row);
        let rest = self.0.get(start..).unwrap_or_default();
        let end = rest.partition_point(|outlier| outlier.row() == row);
        OfRow(rest.get(..end).unwrap_or_default())
    }

    pub(super) fn by_columns(mut self) -> Outliers {
        self.0.sort_by_key(|outlier| (outlier.k, outlier.m));
        Outliers(self.0)
    }
}

/// Outliers of a row, by columns.
#[derive(Clone, Copy)]
pub(super) struct OfRow<'a>(&'a [Outlier]);

impl OfRow<'_> {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Outlier> {
        self.0.iter()
    }

    /// Whether there are any below a column.
    #[inline(always)]
    pub(super) fn any_below(&self, k: usize) -> bool {
        self.0.first().is_some_and(|outlier| outlier.column() < k)
    }

    /// Makes those zero that lie among the numbers from column `first` on, and goes on behind these.
    pub(super) fn take_out(&mut self, first: usize, numbers: &mut [f32]) {
        while let Some((outlier, rest)) = self.0.split_first() {
            let Some(x) = outlier.column().checked_sub(first).and_then(|at| numbers.get_mut(at)) else {
                return;
            };
            *x = 0.;
            self.0 = rest;
        }
    }
}

/// What was taken out of rows of x, by columns.
#[derive(Default)]
pub(super) struct Outliers(Vec<Outlier>);

impl Outliers {
    /// Those of some columns.
    pub(super) fn in_columns(&self, columns: Range<usize>) -> &[Outlier] {
        let start = self.0.partition_point(|outlier| outlier.column() < columns.start);
        let end = self.0.partition_point(|outlier| outlier.column() < columns.end);
        self.0.get(start..end).unwrap_or_default()
    }

    /// Adds the products of all with the rows of the weight from `first_row` on that `out`, `[rows, m]`, has room for.
    ///
    /// # Panics
    /// If these are more than [`ROWS_PER_PASS`]: nothing is left out silently.
    #[inline(always)] // With the instructions that the caller may use.
    pub(super) fn add_products(&self, matrix: &PackedMatrix, first_row: usize, m: usize, out: &mut [f32]) {
        let rows = out.len() / m;
        assert!(rows <= ROWS_PER_PASS, "{rows} rows of at most {ROWS_PER_PASS}");
        // Many rows of x have theirs in the same columns.
        let (mut column, mut weights) = (None, [0f32; ROWS_PER_PASS]);
        let weights = &mut weights[..rows];
        for outlier in &self.0 {
            if column != Some(outlier.k) {
                column = Some(outlier.k);
                matrix.column(first_row, outlier.column(), weights);
            }
            let sums = out.iter_mut().skip(outlier.row()).step_by(m);
            sums.zip(&*weights).for_each(|(sum, weight)| *sum = outlier.x.mul_add(*weight, *sum));
        }
    }
}

/// What is counted of the magnitudes of a group, a multiple of sixteen numbers up to 128. A value proves that the CPU has the
/// instructions.
pub(in super::super) trait Magnitudes: Copy + Sync {
    /// The largest magnitude that is no outlier in a group; `Some(None)` if there are no outliers, `None` if the group has a
    /// number that is no fixed-point number.
    fn limit(self, group: &[f32]) -> Option<Option<f32>>;

    /// The largest; `None` if one is not below [`LIMIT`].
    ///
    /// # Safety
    /// The caller enables the features of the instruction set, here and below.
    unsafe fn largest(group: &[f32]) -> Option<f32>;

    /// How many are below `bound`, zeros left out.
    ///
    /// # Safety
    /// See [`Self::largest`].
    unsafe fn below(group: &[f32], bound: f32) -> u32;
}

/// See [`Magnitudes::limit`].
///
/// # Safety
/// The caller enables the features of the instruction set.
#[inline(always)]
unsafe fn limit<M: Magnitudes>(group: &[f32]) -> Option<Option<f32>> {
    // SAFETY: the caller has enabled the features.
    unsafe {
        let largest = M::largest(group)?;
        if largest > 0. && largest < LEAST {
            return None;
        }
        let (small, any) = (M::below(group, largest * (1. / FACTOR)), M::below(group, f32::INFINITY));
        Some((8 * small > 3 * any).then(|| FACTOR * typical::<M>(group, any * 3 / 8)))
    }
}

/// The magnitude that `below` numbers of a group stay below, zeros left out, to its four leading bits: bit after bit, the
/// largest number that no more are below.
///
/// # Safety
/// The caller enables the features of the instruction set.
#[inline(always)]
unsafe fn typical<M: Magnitudes>(group: &[f32], below: u32) -> f32 {
    let mut bits = 0;
    for bit in (20..31).rev() {
        // SAFETY: the caller has enabled the features.
        if unsafe { M::below(group, f32::from_bits(bits | 1 << bit)) } <= below {
            bits |= 1 << bit;
        }
    }
    f32::from_bits(bits)
}

impl Magnitudes for Avx512 {
    fn limit(self, group: &[f32]) -> Option<Option<f32>> {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")]
        fn with_features(group: &[f32]) -> Option<Option<f32>> {
            // SAFETY: the features are enabled.
            unsafe { limit::<Avx512>(group) }
        }
        // SAFETY: `self` proves that the CPU has the features of the function.
        unsafe { with_features(group) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")]
    unsafe fn largest(group: &[f32]) -> Option<f32> {
        let limit = _mm512_set1_ps(LIMIT);
        let mut largest = _mm512_setzero_ps();
        let mut all_below = !0;
        for x in group.chunks_exact(16) {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            let magnitudes = _mm512_abs_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) });
            largest = _mm512_max_ps(largest, magnitudes);
            all_below &= _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitudes, limit);
        }
        (all_below == !0).then(|| _mm512_reduce_max_ps(largest))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")]
    unsafe fn below(group: &[f32], bound: f32) -> u32 {
        let bound = _mm512_set1_ps(bound);
        let mut count = 0;
        for x in group.chunks_exact(16) {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            let magnitudes = _mm512_abs_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) });
            let not_zero = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(magnitudes, _mm512_setzero_ps());
            count += _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(not_zero, magnitudes, bound).count_ones();
        }
        count
    }
}

impl Magnitudes for Avx2 {
    fn limit(self, group: &[f32]) -> Option<Option<f32>> {
        #[target_feature(enable = "avx2,fma,popcnt")]
        fn with_features(group: &[f32]) -> Option<Option<f32>> {
            // SAFETY: the features are enabled.
            unsafe { limit::<Avx2>(group) }
        }
        // SAFETY: `self` proves that the CPU has the features of the function.
        unsafe { with_features(group) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,popcnt")]
    unsafe fn largest(group: &[f32]) -> Option<f32> {
        // As integers, magnitudes have the order of numbers, and NaN is above all.
        let bits = group.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
        let largest = f32::from_bits(bits);
        (largest < LIMIT).then_some(largest)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,popcnt")]
    unsafe fn below(group: &[f32], bound: f32) -> u32 {
        group.iter().map(|x| u32::from(x.abs() > 0. && x.abs() < bound)).sum()
    }
}
