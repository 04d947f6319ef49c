//! What low-rank adapters make of the outputs of a projection.

use super::super::tasks;
use crate::backend::step::{Projection, Update, Updates};
use std::sync::Arc;

/// Rows that a thread takes at a time.
const ROWS: usize = 4;

/// The active adapters of a projection, with what their first halves make of x.
pub(super) struct Updated<'a> {
    updates: &'a [Arc<Update>],
    /// `scale * x A^T` of each, `[rows, rank]`.
    inner: Vec<Vec<f32>>,
}

impl<'a> Updated<'a> {
    /// None if no adapter of the projection is active. By one thread.
    pub fn new(updates: &'a Updates, projection: &Projection, x: &[f32]) -> Option<Self> {
        let updates = updates.get(projection.index).filter(|updates| !updates.is_empty())?;
        let k = projection.k;
        let inner = |update: &Arc<Update>| x.chunks_exact(k).flat_map(|x| update.inner(x, k)).collect();
        Some(Self { inner: updates.iter().map(inner).collect(), updates })
    }

    /// As [`new`](Self::new), by all threads.
    pub fn of_many(updates: &'a Updates, projection: &Projection, x: &[f32]) -> Option<Self> {
        let updates = updates.get(projection.index).filter(|updates| !updates.is_empty())?;
        let k = projection.k;
        let inner = |update: &Arc<Update>| {
            let mut inner = vec![0.; x.len() / k.max(1) * update.rank];
            let chunks = inner.chunks_mut(ROWS * update.rank).zip(x.chunks(ROWS * k));
            tasks::for_each(chunks, |_, (inner, x)| {
                for (to, x) in inner.chunks_exact_mut(update.rank).zip(x.chunks_exact(k)) {
                    to.iter_mut().zip(update.inner(x, k)).for_each(|(to, sum)| *to = sum);
                }
            });
            inner
        };
        Some(Self { inner: updates.iter().map(inner).collect(), updates })
    }

    /// An output without its bias, that of row `row` of x and row `n` of the weight, as the adapters change it.
    fn output(&self, y: f32, row: usize, n: usize) -> f32 {
        self.updates.iter().zip(&self.inner).fold(y, |y, (update, inner)| {
            let rank = update.rank;
            let inner = inner.get(row * rank..(row + 1) * rank).unwrap_or_default();
            let b = update.b.get(n * rank..(n + 1) * rank).unwrap_or_default();
            let y = y + dot(inner, b);
            match &update.rescale {
                Some(rescale) => y * rescale.get(n).copied().unwrap_or(1.),
                None => y,
            }
        })
    }

    /// Outputs `[outputs, rows]` without biases, of rows of the weight from `first` on.
    pub fn apply(&self, sums: &mut [f32], rows: usize, first: usize) {
        for (n, sums) in (first..).zip(sums.chunks_exact_mut(rows.max(1))) {
            sums.iter_mut().enumerate().for_each(|(row, y)| *y = self.output(*y, row, n));
        }
    }

    /// Outputs `[rows, outputs]` without biases, by all threads; biases are added.
    pub fn apply_many(&self, y: &mut [f32], projection: &Projection) {
        let n = projection.rows;
        tasks::for_each(y.chunks_mut(ROWS * n).enumerate(), |_, (chunk, y)| {
            for (row, y) in (chunk * ROWS..).zip(y.chunks_exact_mut(n)) {
                y.iter_mut().enumerate().for_each(|(n, y)| *y = self.output(*y, row, n));
                if let Some(bias) = &projection.bias {
                    y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
                }
            }
        });
    }
}

impl Update {
    /// `scale * x A^T` of one row.
    fn inner<'a>(&'a self, x: &'a [f32], k: usize) -> impl Iterator<Item = f32> + 'a {
        self.a.chunks_exact(k).map(|a| self.scale * dot(x, a))
    }
}

/// In several sums, which compilers keep in vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0f32; LANES];
    let (a_lanes, a_rest) = a.as_chunks::<LANES>();
    let (b_lanes, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
