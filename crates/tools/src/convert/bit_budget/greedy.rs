//! Greedy allocation of bytes: the smallest error that fits a number of them, step by step.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// One of the formats that a weight may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost {
    pub bytes: u64,
    pub error: f64,
}

/// A step from the present format of a weight to a better one.
struct Step {
    weight: usize,
    to: usize,
    bytes: u64,
    /// The error that it saves for each of them.
    gain: f64,
}

impl Step {
    /// The step that gains most for a byte, of those that `room` allows; of equals the smallest.
    fn best(weight: usize, costs: &[Cost], from: usize, room: u64) -> Option<Self> {
        let now = costs.get(from)?;
        let step = |(to, cost): (usize, &Cost)| {
            let bytes = cost.bytes.checked_sub(now.bytes).filter(|bytes| (1..=room).contains(bytes))?;
            let gain = (now.error - cost.error) / bytes as f64;
            (gain > 0.).then_some(Self { weight, to, bytes, gain })
        };
        costs.iter().enumerate().filter_map(step).max()
    }
}

impl Ord for Step {
    fn cmp(&self, other: &Self) -> Ordering {
        let last = |step: &Self| Reverse((step.bytes, step.weight, step.to));
        self.gain.total_cmp(&other.gain).then_with(|| last(self).cmp(&last(other)))
    }
}

impl PartialOrd for Step {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Step {}

/// The smallest of the formats of a weight, the best of them if there are several.
pub(super) fn smallest(costs: &[Cost]) -> Option<usize> {
    let order = |a: &Cost, b: &Cost| a.bytes.cmp(&b.bytes).then(a.error.total_cmp(&b.error));
    first_by(costs, order)
}

/// The best of the formats of a weight, the smallest of them if there are several.
pub(super) fn best(costs: &[Cost]) -> Option<usize> {
    let order = |a: &Cost, b: &Cost| a.error.total_cmp(&b.error).then(a.bytes.cmp(&b.bytes));
    first_by(costs, order)
}

fn first_by(costs: &[Cost], order: impl Fn(&Cost, &Cost) -> Ordering) -> Option<usize> {
    costs.iter().enumerate().min_by(|(_, a), (_, b)| order(a, b)).map(|(index, _)| index)
}

/// Which of its formats each weight gets if all of them together may have `room` bytes more than the smallest: step by
/// step the one that gains most for a byte.
pub(super) fn choose(weights: &[Vec<Cost>], mut room: u64) -> Vec<Option<usize>> {
    let mut chosen: Vec<_> = weights.iter().map(|costs| smallest(costs)).collect();
    let step = |weight: usize, chosen: &[Option<usize>], room| {
        Step::best(weight, weights.get(weight)?, (*chosen.get(weight)?)?, room)
    };
    let mut steps: BinaryHeap<_> =
        (0..weights.len()).filter_map(|weight| step(weight, &chosen, room)).collect();
    while let Some(Step { weight, to, bytes, .. }) = steps.pop() {
        // There was more room when this step was looked for.
        if let (Some(rest), Some(chosen)) = (room.checked_sub(bytes), chosen.get_mut(weight)) {
            (room, *chosen) = (rest, Some(to));
        }
        steps.extend(step(weight, &chosen, room));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(costs: &[(u64, f64)]) -> Vec<Cost> {
        costs.iter().map(|&(bytes, error)| Cost { bytes, error }).collect()
    }

    #[test]
    fn the_step_that_saves_most_for_a_byte_comes_first() {
        // In no order; the last of the first weight is larger and worse than another.
        let weights = [
            costs(&[(30, 1.), (10, 16.), (20, 4.), (25, 5.)]),
            costs(&[(40, 2.), (20, 10.), (20, 12.)]),
            costs(&[(5, 1.)]),
            costs(&[]),
        ];
        let chosen = |room| choose(&weights, room);
        assert_eq!(chosen(0), [Some(1), Some(1), Some(0), None]);
        assert_eq!(chosen(9), chosen(0));
        // 12 for 10 bytes, then 8 for 20, then 3 for 10.
        assert_eq!(chosen(10), [Some(2), Some(1), Some(0), None]);
        // The second does not fit, the third does.
        assert_eq!(chosen(29), [Some(0), Some(1), Some(0), None]);
        assert_eq!(chosen(30), [Some(2), Some(0), Some(0), None]);
        assert_eq!(chosen(u64::MAX), [Some(0), Some(0), Some(0), None]);
        assert_eq!(weights.iter().map(|costs| best(costs)).collect::<Vec<_>>(), chosen(u64::MAX));
    }
}
