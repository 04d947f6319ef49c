//! Activations far larger than those around them.
//!
//! Fixed-point numbers that meet a group of weights share a unit, which the largest of them sets. One that is far larger
//! than the others would take their bits; and where it meets a weight of zero, nothing is left to hide that. So it is
//! multiplied by itself, in f32.
//! [`magnitudes`](super::magnitudes) says which they are.

use super::super::fast_kernel::{Digits, NotRepresentable};
use super::super::group_params::ROWS_PER_PASS;
use super::super::matrix::PackedMatrix;
use super::super::tasks::{self, Threads};
use super::magnitudes::Magnitudes;
use std::borrow::Cow;
use std::ops::Range;

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
    #[cfg(target_arch = "x86_64")]
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
    /// All of them.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) fn all(&self) -> &[Outlier] {
        &self.0
    }

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
