//! The output of a matmul, `[M, N]`, computed by tasks that write a part each.

use super::group_params::ROWS_PER_PASS;
use super::tasks;
use crate::format::Real;

/// What a task writes: the output of some rows of the weight for some rows of x.
pub(super) struct Part<'a, T> {
    pub(super) first_row: usize,
    pub(super) first_x: usize,
    /// For each row of x, a slot for each row of the weight.
    pub(super) slots: Vec<&'a mut [T]>,
}

impl<T> Part<'_, T> {
    /// Rows of the weight.
    pub(super) fn rows(&self) -> usize {
        self.slots.first().map_or(0, |slots| slots.len())
    }
}

/// Computes an output of `m` rows of x and `n` rows of the weight. Each task, on one of all threads, writes a part of
/// `part_m` rows of x and `part_n` rows of the weight; the last ones are smaller.
pub(super) fn in_parts<T: Real>(
    (m, n): (usize, usize),
    (part_m, part_n): (usize, usize),
    task: impl Fn(Part<'_, T>) + Send + Sync,
) -> Vec<T> {
    let mut output = vec![T::from_f32(0.0); m * n];
    in_parts_of(&mut output, n, (part_m, part_n), task);
    output
}

/// The same in memory that there is.
pub(super) fn in_parts_of<T: Real>(
    output: &mut [T],
    n: usize,
    (part_m, part_n): (usize, usize),
    task: impl Fn(Part<'_, T>) + Send + Sync,
) {
    let mut parts = Vec::new();
    for (band, output) in output.chunks_mut(part_m * n).enumerate() {
        let first_part = parts.len();
        let part = |first_row| Part { first_row, first_x: band * part_m, slots: Vec::with_capacity(part_m) };
        parts.extend((0..n).step_by(part_n).map(part));
        for row in output.chunks_exact_mut(n) {
            let parts = parts.iter_mut().skip(first_part);
            parts.zip(row.chunks_mut(part_n)).for_each(|(part, slots)| part.slots.push(slots));
        }
    }
    tasks::for_each(parts, |_, part| task(part));
}

/// Rounds the sums of row `index` of x, with the bias added. `sums` are `[slots, m]`.
pub(super) fn round_row<T: Real>(
    sums: &[f32],
    (index, m): (usize, usize),
    bias: Option<&[f32]>,
    slots: &mut [T],
) {
    let mut of_row = sums.iter().skip(index).step_by(m);
    let mut bias = bias.map(<[f32]>::iter);
    for slots in slots.chunks_mut(ROWS_PER_PASS) {
        let mut values = [0f32; ROWS_PER_PASS];
        let values = &mut values[..slots.len()];
        values.iter_mut().zip(&mut of_row).for_each(|(value, sum)| *value = *sum);
        if let Some(bias) = &mut bias {
            values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
        T::round(values, slots);
    }
}

/// An output to which tasks write directly, each the slots of its own rows of the weight.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct OutputPtr {
    pub(super) first: *mut f32,
    /// The distance from one row of x to the next.
    pub(super) stride: usize,
}

// SAFETY: a pointer may be used on any thread. Who writes through it promises that tasks write different slots.
#[cfg(target_arch = "x86_64")]
unsafe impl Send for OutputPtr {}
// SAFETY: copies are all that threads share, see `Send`.
#[cfg(target_arch = "x86_64")]
unsafe impl Sync for OutputPtr {}

/// Outputs of fewer multiplications are not worth waking another thread.
const SERIAL_MULTIPLICATIONS: usize = 1 << 17;

/// Rows of a weight `[n, k]` that a task takes, for `m` rows of x.
pub(super) fn rows_per_task((m, n, k): (usize, usize, usize)) -> usize {
    if n * k * m <= SERIAL_MULTIPLICATIONS {
        return n;
    }
    (n / (8 * rayon::current_num_threads())).next_multiple_of(16).clamp(16, 512)
}
