//! The product, `[M, N]`, made by tasks of which each has a part.

use super::kernels::ROWS_PER_PASS;
use super::tasks;
use crate::format::Real;

/// What a task makes: the products of some rows of the weight with some columns of activations.
pub(super) struct Part<'a, T> {
    pub(super) first_row: usize,
    pub(super) first_column: usize,
    /// For each column, a place for each row.
    pub(super) places: Vec<&'a mut [T]>,
}

impl<T> Part<'_, T> {
    /// Rows of the weight.
    pub(super) fn rows(&self) -> usize {
        self.places.first().map_or(0, |places| places.len())
    }
}

/// The product of `n` rows of a weight with `m` columns of activations. Every task, by all threads, makes a part of so
/// many rows and columns, fewer at their ends.
pub(super) fn in_parts<T: Real>(
    (m, n): (usize, usize),
    (columns, rows): (usize, usize),
    task: impl Fn(Part<'_, T>) + Send + Sync,
) -> Vec<T> {
    let mut product = vec![T::from_f32(0.0); m * n];
    let mut parts = Vec::new();
    for (band, product) in product.chunks_mut(columns * n).enumerate() {
        let first_part = parts.len();
        let part =
            |first_row| Part { first_row, first_column: band * columns, places: Vec::with_capacity(columns) };
        parts.extend((0..n).step_by(rows).map(part));
        for column in product.chunks_exact_mut(n) {
            let parts = parts.iter_mut().skip(first_part);
            parts.zip(column.chunks_mut(rows)).for_each(|(part, places)| part.places.push(places));
        }
    }
    tasks::for_each(parts, |_, part| task(part));
    product
}

/// Rounds a column of `sums`, which are `[places, columns]`, with the bias added.
pub(super) fn round_column<T: Real>(
    sums: &[f32],
    (column, columns): (usize, usize),
    bias: Option<&[f32]>,
    places: &mut [T],
) {
    let mut of_column = sums.iter().skip(column).step_by(columns);
    let mut bias = bias.map(<[f32]>::iter);
    for places in places.chunks_mut(ROWS_PER_PASS) {
        let mut numbers = [0f32; ROWS_PER_PASS];
        let numbers = &mut numbers[..places.len()];
        numbers.iter_mut().zip(&mut of_column).for_each(|(number, sum)| *number = *sum);
        if let Some(bias) = &mut bias {
            numbers.iter_mut().zip(bias).for_each(|(number, bias)| *number += bias);
        }
        T::round(numbers, places);
    }
}
