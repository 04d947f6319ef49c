//! Which sequences a step learns from.

use super::Sequence;
use candle_core::{Device, Tensor};
use candle_quant::Result;
use rand::rngs::ChaCha20Rng;
use rand::seq::SliceRandom;
use rand::SeedableRng;

/// Indices of sequences without end: all of them in each epoch, in an order of its own that the seed decides.
pub(super) struct Order {
    seed: u64,
    len: usize,
    /// The epoch that `order` is of.
    epoch: Option<usize>,
    order: Vec<usize>,
}

impl Order {
    /// Of `len` sequences.
    pub fn new(seed: u64, len: usize) -> Self {
        Self { seed, len, epoch: None, order: Vec::new() }
    }

    /// The `count` indices from `start` on.
    pub fn take(&mut self, start: usize, count: usize) -> Vec<usize> {
        (start..start.saturating_add(count)).filter_map(|position| self.at(position)).collect()
    }

    fn at(&mut self, position: usize) -> Option<usize> {
        let epoch = position.checked_div(self.len)?;
        if self.epoch != Some(epoch) {
            let mut random = ChaCha20Rng::seed_from_u64(self.seed);
            // Adapters begin with stream 0.
            random.set_stream(epoch as u64 + 1);
            self.order = (0..self.len).collect();
            self.order.shuffle(&mut random);
            self.epoch = Some(epoch);
        }
        self.order.get(position % self.len).copied()
    }
}

/// Sequences side by side, as a model takes them.
pub(super) struct Batch {
    /// `[B, T]`, padded at the ends.
    pub ids: Tensor,
    /// Of the tokens of `ids`, one row below the other, those behind which a token counts.
    pub rows: Vec<u32>,
    /// The tokens that count, one for each of `rows`.
    pub targets: Vec<u32>,
}

impl Batch {
    pub fn new(sequences: &[&Sequence], device: &Device) -> Result<Self> {
        // What is behind the last token of a text is not predicted.
        let len_of = |sequence: &Sequence| sequence.tokens().len().saturating_sub(1);
        let len = sequences.iter().map(|sequence| len_of(sequence)).max().unwrap_or(0);
        let (mut ids, mut rows, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in sequences {
            let first = ids.len();
            let inputs = sequence.tokens().iter().take(len_of(sequence)).copied();
            ids.extend(inputs.chain(std::iter::repeat(0)).take(len));
            let next = sequence.tokens().iter().zip(sequence.counts()).skip(1).zip(first..);
            for ((target, _), row) in next.filter(|((_, counts), _)| *counts) {
                rows.push(row as u32);
                targets.push(*target);
            }
        }
        Ok(Self { ids: Tensor::from_vec(ids, (sequences.len(), len), device)?, rows, targets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_has_all_in_an_order_of_its_own() {
        let epochs =
            |seed| Order::new(seed, 20).take(0, 60).chunks(20).map(<[_]>::to_vec).collect::<Vec<_>>();
        let first = epochs(1);
        for epoch in &first {
            let mut sorted = epoch.clone();
            sorted.sort();
            assert_eq!(sorted, (0..20).collect::<Vec<_>>());
        }
        assert!(first[0] != first[1] && first[1] != first[2]);
        assert!(first != epochs(2));
        // From any position on it is the same.
        assert_eq!(Order::new(1, 20).take(13, 30), first.concat()[13..43]);
        assert!(Order::new(1, 0).take(0, 3).is_empty());
    }

    #[test]
    fn a_batch_is_padded_and_knows_what_counts() {
        let sequences = [Sequence::with_prompt(&[1, 2], &[3]), Sequence::new([4, 5, 6, 7])];
        let batch = Batch::new(&sequences.each_ref(), &Device::Cpu).unwrap();
        assert_eq!(batch.ids.to_vec2::<u32>().unwrap(), [[1, 2, 0], [4, 5, 6]]);
        assert_eq!((batch.rows, batch.targets), (vec![1, 3, 4, 5], vec![3, 5, 6, 7]));
    }
}
