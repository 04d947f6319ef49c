//! The product, `[M, N]`, made by tasks of which each has some rows of the weight.

use super::kernels::ROWS_PER_PASS;
use super::tasks;
use crate::format::element::Real;

/// `task` is called for every `rows` rows of the weight (fewer at its end), by all threads, with the first of them and
/// their places in each of the `m` rows of the product.
pub(super) fn by_rows_of_weight<T: Real>(
    (m, n): (usize, usize),
    rows: usize,
    task: impl Fn(usize, Vec<&mut [T]>) + Send + Sync,
) -> Vec<T> {
    let mut product = vec![T::from_f32(0.0); m * n];
    let mut places: Vec<Vec<&mut [T]>> = Vec::new();
    places.resize_with(n.div_ceil(rows), || Vec::with_capacity(m));
    for row in product.chunks_exact_mut(n) {
        places.iter_mut().zip(row.chunks_mut(rows)).for_each(|(places, place)| places.push(place));
    }
    tasks::for_each(places, |index, places| task(index * rows, places));
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
