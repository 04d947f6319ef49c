//! Drawing tokens from logits, block by block; `cuda/sample.cu` draws the same ones.

mod exp;
mod philox;
mod select;
#[cfg(test)]
mod tests;

use super::isa::vectorized;
use crate::backend::sample::{Choice, Draw};
use exp::weight;
use select::{keep_largest, keep_sum, nth_largest, Candidate};

/// Logits are looked at in blocks of so many: what a block holds at most says whether it can be skipped.
const BLOCK: usize = 256;

/// What is drawn from.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    pub(crate) logits: &'a [f32],
    /// Which row of a draw it is.
    pub(crate) index: u64,
}

/// Memory that is used again for every token.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// The largest logit of each block.
    largest: Vec<f32>,
    weights: Vec<u32>,
    /// What the weights of each block come to.
    blocks: Vec<Block>,
    candidates: Vec<Candidate<u32>>,
}

#[derive(Debug)]
struct Block {
    sum: u64,
    largest: u32,
}

/// A token; none if the largest logit is not finite, or one is NaN.
pub(crate) fn draw_row(row: Row, choice: &Choice, draw: Draw, scratch: &mut Scratch) -> Option<u32> {
    let Row { logits, index } = row;
    // A logit of minus infinity is a forbidden token; anything else has to be finite.
    let largest = find_largest(logits, &mut scratch.largest).filter(|largest| largest.is_finite())?;
    let Choice { temperature, top_k, top_p, least_weight } = *choice;
    if temperature == 0. {
        let block = scratch.largest.iter().position(|of_block| *of_block == largest).unwrap_or(0);
        let rest = logits.iter().skip(block * BLOCK);
        return Some((block * BLOCK + rest.take_while(|logit| **logit != largest).count()) as u32);
    }
    let random = philox::random(draw.seed, draw.step, index);
    match top_k {
        Some(k) => {
            let kept = top_candidates(logits, &scratch.largest, k);
            scratch.candidates.clear();
            let weights =
                kept.into_iter().map(|(token, logit)| (token, weight((logit - largest) / temperature)));
            scratch.candidates.extend(weights);
            if let Some(p) = top_p {
                let total = scratch.candidates.iter().map(|(_, weight)| u64::from(*weight)).sum();
                keep_sum(&mut scratch.candidates, share(p, total));
            }
        }
        None => {
            weigh(logits, (largest, temperature), scratch);
            let total = scratch.blocks.iter().map(|block| block.sum).sum();
            match top_p {
                Some(p) => {
                    let need = share(p, total);
                    // All that weigh less than this weigh less together than what may be left out.
                    scratch.gather(((total - need) / logits.len().max(1) as u64) as u32);
                    keep_sum(&mut scratch.candidates, need);
                }
                None if least_weight > 1 => scratch.gather(least_weight),
                None => return Some(draw_from_blocks(scratch, below(random, total))),
            }
        }
    }
    if least_weight > 1 {
        scratch.candidates.retain(|(_, weight)| *weight >= least_weight);
    }
    let total = scratch.candidates.iter().map(|(_, weight)| u64::from(*weight)).sum();
    Some(draw_from(scratch.candidates.iter().copied(), below(random, total)))
}

/// A number below `total` for 64 random bits.
fn below(random: u64, total: u64) -> u64 {
    ((u128::from(random) * u128::from(total)) >> 64) as u64
}

/// The part p, in units of 2^-32, of `total`, rounded up, at least 1.
fn share(p: u64, total: u64) -> u64 {
    let part = (u128::from(total) * u128::from(p)).div_ceil(1 << 32);
    (part as u64).clamp(1, total.max(1))
}

/// The token in whose weight the place `at` of all weights lies.
fn draw_from(candidates: impl Iterator<Item = Candidate<u32>>, mut at: u64) -> u32 {
    let mut last = 0;
    for (token, weight) in candidates {
        last = token;
        match at.checked_sub(u64::from(weight)) {
            Some(rest) => at = rest,
            None => break,
        }
    }
    last
}

fn draw_from_blocks(scratch: &Scratch, mut at: u64) -> u32 {
    let mut start = 0;
    for (block, weights) in scratch.blocks.iter().zip(scratch.weights.chunks(BLOCK)) {
        match at.checked_sub(block.sum) {
            Some(rest) => at = rest,
            None => return draw_from((start..).zip(weights.iter().copied()), at),
        }
        start += BLOCK as u32;
    }
    0
}

/// The largest logit, and that of each block; none if one is NaN or there are none.
fn find_largest(logits: &[f32], of_blocks: &mut Vec<f32>) -> Option<f32> {
    vectorized!(find_in_blocks(logits: &[f32], of_blocks: &mut Vec<f32>) -> Option<f32>)
}

#[inline(always)]
fn find_in_blocks(logits: &[f32], of_blocks: &mut Vec<f32>) -> Option<f32> {
    const LANES: usize = 16;
    let mut has_nan = false;
    of_blocks.clear();
    for block in logits.chunks(BLOCK) {
        let (lanes, rest) = block.as_chunks::<LANES>();
        let mut largest = [f32::NEG_INFINITY; LANES];
        let mut nans = [0u32; LANES];
        for logits in lanes {
            for ((largest, nan), logit) in largest.iter_mut().zip(&mut nans).zip(logits) {
                *largest = if *logit > *largest { *logit } else { *largest };
                *nan |= u32::from(logit.is_nan());
            }
        }
        has_nan |= nans.iter().any(|nan| *nan > 0) || rest.iter().any(|logit| logit.is_nan());
        of_blocks.push(largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max));
    }
    of_blocks.iter().copied().reduce(f32::max).filter(|_| !has_nan)
}

/// The `k` largest logits with their tokens, in the order of these.
fn top_candidates(logits: &[f32], of_blocks: &[f32], k: usize) -> Vec<Candidate<f32>> {
    // Where k blocks have one that is as large as this, no smaller one is among the k largest.
    let mut candidates = Vec::new();
    let bound = nth_largest(&mut of_blocks.to_vec(), k);
    for (index, (block, largest)) in logits.chunks(BLOCK).zip(of_blocks).enumerate() {
        if *largest >= bound {
            let tokens = (index * BLOCK) as u32..;
            candidates.extend(tokens.zip(block.iter().copied()).filter(|(_, logit)| *logit >= bound));
        }
    }
    keep_largest(&mut candidates, k);
    candidates
}

/// All weights, and what those of each block come to. `relative` is the largest logit, and the temperature.
fn weigh(logits: &[f32], relative: (f32, f32), scratch: &mut Scratch) {
    vectorized!(weigh_blocks(logits: &[f32], relative: (f32, f32), scratch: &mut Scratch));
}

#[inline(always)]
fn weigh_blocks(logits: &[f32], (largest, temperature): (f32, f32), scratch: &mut Scratch) {
    const LANES: usize = 16;
    scratch.weights.resize(logits.len(), 0);
    scratch.blocks.clear();
    for (logits, weights) in logits.chunks(BLOCK).zip(scratch.weights.chunks_mut(BLOCK)) {
        for (logit, place) in logits.iter().zip(weights.iter_mut()) {
            *place = weight((logit - largest) / temperature);
        }
        // Halves of weights, so that no sum of a block leaves 32 bits.
        let (mut high, mut low, mut largest) = ([0u32; LANES], [0u32; LANES], [0i32; LANES]);
        let (lanes, rest) = weights.as_chunks::<LANES>();
        for weights in lanes {
            let sums = high.iter_mut().zip(&mut low).zip(&mut largest);
            for (((high, low), largest), weight) in sums.zip(weights) {
                *high += weight >> 16;
                *low += weight & 0xffff;
                *largest = (*largest).max(*weight as i32);
            }
        }
        let of_lanes = (high.iter().map(|sum| u64::from(*sum)).sum::<u64>() << 16)
            + low.iter().map(|sum| u64::from(*sum)).sum::<u64>();
        let largest = largest.iter().map(|weight| *weight as u32).chain(rest.iter().copied()).max();
        scratch.blocks.push(Block {
            sum: of_lanes + rest.iter().map(|weight| u64::from(*weight)).sum::<u64>(),
            largest: largest.unwrap_or(0),
        });
    }
}

impl Scratch {
    /// Takes the tokens that weigh `least` or more, and none that weigh nothing.
    fn gather(&mut self, least: u32) {
        let least = least.max(1);
        self.candidates.clear();
        for (index, (block, weights)) in self.blocks.iter().zip(self.weights.chunks(BLOCK)).enumerate() {
            if block.largest >= least {
                let tokens = (index * BLOCK) as u32..;
                let candidates = tokens.zip(weights.iter().copied());
                self.candidates.extend(candidates.filter(|(_, weight)| *weight >= least));
            }
        }
    }
}
