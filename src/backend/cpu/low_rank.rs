//! Low-rank adapters of a layer: few numbers for each output, of which none are packed.

use super::tasks;
use crate::backend::low_rank::Update;
use std::sync::Arc;

/// Rows of x that a thread takes at a time.
const ROWS: usize = 4;

/// The adapters of a layer, with what their first halves make of x.
pub(in crate::backend) struct LowRank<'a> {
    updates: &'a [Arc<Update>],
    expert: usize,
    /// `scale * x A^T` of each, `[rows, rank]`.
    inner: Vec<Vec<f32>>,
}

impl<'a> LowRank<'a> {
    /// Of x `[rows, K]`, by the calling thread.
    pub fn new(updates: &'a [Arc<Update>], expert: usize, x: &[f32]) -> Self {
        let inner = |update: &Arc<Update>| {
            let mut inner = vec![0.; x.len() / update.k.max(1) * update.rank];
            update.inner(expert, x, &mut inner);
            inner
        };
        Self { inner: updates.iter().map(inner).collect(), updates, expert }
    }

    /// As [`new`](Self::new), by all threads.
    pub fn of_many(updates: &'a [Arc<Update>], x: &[f32]) -> Self {
        let inner = |update: &Arc<Update>| {
            let Update { rank, k, .. } = **update;
            let mut inner = vec![0.; x.len() / k.max(1) * rank];
            let chunks = inner.chunks_mut(ROWS * rank.max(1)).zip(x.chunks(ROWS * k.max(1)));
            tasks::for_each(chunks, |_, (inner, x)| update.inner(0, x, inner));
            inner
        };
        Self { inner: updates.iter().map(inner).collect(), updates, expert: 0 }
    }

    /// Output `n` of row `row` of x, which was `y` without bias and adapters.
    fn output(&self, y: f32, row: usize, n: usize) -> f32 {
        self.updates.iter().zip(&self.inner).fold(y, |y, (update, inner)| {
            let rank = update.rank;
            let inner = inner.get(row * rank..(row + 1) * rank).unwrap_or_default();
            let at = (self.expert * update.n + n) * rank;
            let y = y + dot(inner, update.b.get(at..at + rank).unwrap_or_default());
            match &update.rescale {
                Some(rescale) => y * rescale.get(n).copied().unwrap_or(1.),
                None => y,
            }
        })
    }

    /// Changes outputs `[outputs, rows]` without bias, of which `first` is the first output.
    pub fn apply_to_columns(&self, sums: &mut [f32], rows: usize, first: usize) {
        for (n, sums) in (first..).zip(sums.chunks_exact_mut(rows.max(1))) {
            sums.iter_mut().enumerate().for_each(|(row, y)| *y = self.output(*y, row, n));
        }
    }

    /// Changes outputs `[rows, n]` without bias, and adds it, by all threads.
    pub fn apply_to_rows(&self, y: &mut [f32], n: usize, bias: Option<&[f32]>) {
        tasks::for_each(y.chunks_mut(ROWS * n.max(1)), |chunk, y| {
            for (row, y) in (chunk * ROWS..).zip(y.chunks_exact_mut(n.max(1))) {
                y.iter_mut().enumerate().for_each(|(n, y)| *y = self.output(*y, row, n));
                if let Some(bias) = bias {
                    y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
                }
            }
        });
    }

    /// Changes outputs `[rows, N]` that have the bias, by the calling thread.
    pub fn add_to(&self, y: &mut [f32], bias: Option<&[f32]>) {
        let n = self.updates.first().map_or(1, |update| update.n.max(1));
        let bias = bias.filter(|_| self.updates.iter().any(|update| update.rescale.is_some()));
        let bias = |n: usize| bias.and_then(|bias| bias.get(n)).copied().unwrap_or(0.);
        for (row, y) in y.chunks_exact_mut(n).enumerate() {
            y.iter_mut().enumerate().for_each(|(n, y)| *y = self.output(*y - bias(n), row, n) + bias(n));
        }
    }
}

impl Update {
    /// `scale * x A^T`, for rows of x.
    fn inner(&self, expert: usize, x: &[f32], inner: &mut [f32]) {
        let len = self.rank * self.k;
        let a = self.a.get(expert * len..(expert + 1) * len).unwrap_or_default();
        for (inner, x) in inner.chunks_exact_mut(self.rank.max(1)).zip(x.chunks_exact(self.k.max(1))) {
            let rows = a.chunks_exact(self.k.max(1));
            inner.iter_mut().zip(rows).for_each(|(sum, a)| *sum = self.scale * dot(x, a));
        }
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
