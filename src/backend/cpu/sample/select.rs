//! The largest of many, without sorting them.

/// A token and what it is chosen by.
pub(super) type Candidate<T> = (u32, T);

/// Keeps the `k` largest, of equal ones the first; the order stays. `k` is at least 1.
pub(super) fn keep_largest(candidates: &mut Vec<Candidate<f32>>, k: usize) {
    if k >= candidates.len() {
        return;
    }
    let mut values: Vec<f32> = candidates.iter().map(|(_, value)| *value).collect();
    let least = nth_largest(&mut values, k);
    let mut ties = k - candidates.iter().filter(|(_, value)| *value > least).count();
    candidates.retain(|(_, value)| *value > least || (*value == least && take(&mut ties)));
}

/// The `n`-th largest, where 1 is the largest; minus infinity if there are fewer. Changes the order.
pub(super) fn nth_largest(values: &mut [f32], n: usize) -> f32 {
    match n.checked_sub(1).filter(|index| *index < values.len()) {
        // Only comparisons that know one zero keep ties apart from what is larger.
        Some(index) => *values.select_nth_unstable_by(index, |a, b| (b + 0.).total_cmp(&(a + 0.))).1,
        None => f32::NEG_INFINITY,
    }
}

/// Keeps the largest weights whose sum is `need` or more, as few as that takes, of equal ones the first; the order
/// stays. `need` is at least 1 and at most the sum of all.
pub(super) fn keep_sum(candidates: &mut Vec<Candidate<u32>>, need: u64) {
    let (mut least, mut above) = (0, 0);
    // Eleven bits of the 31, then ten more, and the last ten: sums by these, of what agrees in those before.
    for (shift, bits) in [(20, 11), (10, 10), (0, 10)] {
        let mut sums = [0u64; 1 << 11];
        for &(_, weight) in candidates.iter().filter(|(_, weight)| weight >> shift >> bits == least) {
            if let Some(sum) = sums.get_mut((weight >> shift & ((1 << bits) - 1)) as usize) {
                *sum += u64::from(weight);
            }
        }
        let enough = (0u32..1 << bits).zip(sums).rev().find(|(_, sum)| {
            let is_enough = above + sum >= need;
            if !is_enough {
                above += sum;
            }
            is_enough
        });
        least = least << bits | enough.map_or(0, |(digit, _)| digit);
    }
    let mut ties = need.saturating_sub(above).div_ceil(u64::from(least).max(1)) as usize;
    candidates.retain(|(_, weight)| *weight > least || (*weight == least && take(&mut ties)));
}

/// Whether one is left; it is taken.
fn take(left: &mut usize) -> bool {
    let is_left = *left > 0;
    *left = left.saturating_sub(1);
    is_left
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    /// Values of a few kinds, so that many are equal; and a few that are not.
    fn values(rng: &mut StdRng) -> Vec<f32> {
        let kinds = rng.random_range(1..40);
        let value = |rng: &mut StdRng| match rng.random_range(0..10) {
            0 => f32::NEG_INFINITY,
            1 => -0.,
            2 => rng.random_range(-9.0f32..9.),
            _ => rng.random_range(0..kinds) as f32 / 4. - 3.,
        };
        (0..rng.random_range(1..300)).map(|_| value(rng)).collect()
    }

    fn tokens<T>(candidates: &[Candidate<T>]) -> Vec<u32> {
        candidates.iter().map(|(token, _)| *token).collect()
    }

    #[test]
    fn the_largest_are_those_of_sorting() {
        let mut rng = StdRng::seed_from_u64(5);
        for case in 0..10_000 {
            let mut candidates: Vec<_> = (0..).zip(values(&mut rng)).collect();
            let k = rng.random_range(1..=candidates.len() + 1);
            let mut sorted = candidates.clone();
            // A stable sort: of equal ones the first is before.
            sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap());
            sorted.truncate(k);
            sorted.sort_by_key(|(token, _)| *token);
            keep_largest(&mut candidates, k);
            assert_eq!(tokens(&candidates), tokens(&sorted), "case {case}, k = {k}");
        }
    }

    #[test]
    fn sums_are_those_of_sorting() {
        let mut rng = StdRng::seed_from_u64(6);
        for case in 0..10_000 {
            let shift = rng.random_range(0..31);
            let weight = |value: f32| (value.max(0.) * 1e8) as u32 >> shift;
            let mut candidates: Vec<_> = (0..).zip(values(&mut rng).into_iter().map(weight)).collect();
            let total: u64 = candidates.iter().map(|(_, weight)| u64::from(*weight)).sum();
            if total == 0 {
                continue;
            }
            let need = match case % 4 {
                0 => total,
                1 => 1,
                _ => rng.random_range(1..=total),
            };
            let mut sorted = candidates.clone();
            sorted.sort_by_key(|(_, weight)| std::cmp::Reverse(*weight));
            let mut sum = 0;
            let enough = sorted.iter().position(|(_, weight)| {
                sum += u64::from(*weight);
                sum >= need
            });
            sorted.truncate(enough.unwrap() + 1);
            sorted.sort_by_key(|(token, _)| *token);
            keep_sum(&mut candidates, need);
            assert_eq!(tokens(&candidates), tokens(&sorted), "case {case}, {need} of {total}");
        }
    }
}
