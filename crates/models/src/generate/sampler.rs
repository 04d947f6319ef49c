//! Choosing the next token from logits.
//!
//! Probabilities are integers here: the weight of a token is 2^31 exp((logit - largest) / temperature), rounded down, and
//! a draw compares a random number with sums of weights. Such sums are exact in any order, so that what is drawn does not
//! depend on how the work is shared out, and another implementation (on a GPU, say) draws the same tokens. The random
//! number is a function of the seed and of how many were drawn before. A token that is 2^31 times less likely than the most
//! likely one is never drawn.

mod exp;
mod penalties;
mod philox;
mod sampling;
mod select;
#[cfg(test)]
mod tests;

use candle_core::{CpuStorage, DType, Storage, Tensor};
use candle_quant::{Error, Result};
use exp::weight;
use penalties::Seen;
pub use sampling::Sampling;
use select::{keep_largest, keep_sum, nth_largest, Candidate};

/// Logits are looked at in blocks of so many: what a block holds at most says whether it can be skipped.
const BLOCK: usize = 256;

/// Draws tokens.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    /// How many tokens were drawn.
    step: u64,
    /// The tokens so far, if penalties ask for them.
    seen: Seen,
    /// Logits with penalties; this, too, is memory that is used again.
    penalized: Vec<f32>,
    /// Memory that is used again for every token.
    scratch: Scratch,
}

#[derive(Debug, Default)]
struct Scratch {
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

impl Sampler {
    /// A sampler; without a seed it picks one at random.
    ///
    /// # Errors
    /// As those of [`Sampling::validate`].
    pub fn new(sampling: Sampling, seed: Option<u64>) -> Result<Self> {
        sampling.validate()?;
        let seed = seed.unwrap_or_else(rand::random);
        let (seen, penalized, scratch) = Default::default();
        Ok(Self { sampling, seed, step: 0, seen, penalized, scratch })
    }

    /// The same sampler behind a prompt, whose tokens count for the repetition penalty.
    pub fn with_prompt(mut self, prompt: &[u32]) -> Self {
        if self.sampling.has_penalties() {
            self.seen.add_prompt(prompt);
        }
        self
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// A token for `logits` `[vocabulary]`.
    ///
    /// # Errors
    /// If `logits` is not a vector of floats, is empty, or holds NaN or infinity.
    pub fn sample(&mut self, logits: &Tensor) -> Result<u32> {
        logits.dims1()?;
        let logits = logits.to_dtype(DType::F32)?;
        // Logits that are in memory already are not copied.
        let (storage, layout) = logits.storage_and_layout();
        if let (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) =
            (&*storage, layout.contiguous_offsets())
        {
            if let Some(values) = values.get(start..end) {
                return self.sample_penalized(values);
            }
        }
        self.sample_penalized(&logits.to_vec1()?)
    }

    fn sample_penalized(&mut self, logits: &[f32]) -> Result<u32> {
        if !self.sampling.has_penalties() {
            return self.sample_slice(logits);
        }
        let mut penalized = std::mem::take(&mut self.penalized);
        penalized.clear();
        penalized.extend_from_slice(logits);
        self.seen.penalize(&self.sampling, &mut penalized);
        let token = self.sample_slice(&penalized);
        self.penalized = penalized;
        let token = token?;
        self.seen.add(token);
        Ok(token)
    }

    fn sample_slice(&mut self, logits: &[f32]) -> Result<u32> {
        let scratch = &mut self.scratch;
        let largest = find_largest(logits, &mut scratch.largest);
        // A logit of minus infinity is a forbidden token; anything else has to be finite.
        let Some(largest) = largest.filter(|largest| largest.is_finite()) else {
            return Err(Error::mismatch("logits", "finite numbers", "NaN or infinity, or none at all"));
        };
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        if temperature == 0. {
            let block = scratch.largest.iter().position(|of_block| *of_block == largest).unwrap_or(0);
            let rest = logits.iter().skip(block * BLOCK);
            return Ok((block * BLOCK + rest.take_while(|logit| **logit != largest).count()) as u32);
        }
        let random = philox::random(self.seed, self.step, 0);
        self.step += 1;
        // Neither 0 nor infinity, which would make NaN of logits that are equal to the largest.
        let temperature = (temperature as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
        let relative = |logit: f32| (logit - largest) / temperature;
        let top_p = top_p.filter(|p| *p < 1.);
        let min_p = min_p.filter(|p| *p > 0.).map(least_weight);
        match top_k.filter(|k| *k < logits.len()) {
            Some(k) => {
                let kept = top_candidates(logits, &scratch.largest, k);
                scratch.candidates.clear();
                let weights = kept.into_iter().map(|(token, logit)| (token, weight(relative(logit))));
                scratch.candidates.extend(weights);
                if let Some(p) = top_p {
                    let total = scratch.candidates.iter().map(|(_, weight)| u64::from(*weight)).sum();
                    keep_sum(&mut scratch.candidates, share(p, total));
                }
            }
            None => {
                weigh(logits, relative, scratch);
                let total = scratch.blocks.iter().map(|block| block.sum).sum();
                match top_p {
                    Some(p) => {
                        let need = share(p, total);
                        // All that weigh less than this weigh less together than what may be left out.
                        scratch.gather(((total - need) / logits.len().max(1) as u64) as u32);
                        keep_sum(&mut scratch.candidates, need);
                    }
                    None => match min_p {
                        Some(least) => scratch.gather(least),
                        None => return Ok(draw_from_blocks(scratch, below(random, total))),
                    },
                }
            }
        }
        if let Some(least) = min_p {
            scratch.candidates.retain(|(_, weight)| *weight >= least);
        }
        let total = scratch.candidates.iter().map(|(_, weight)| u64::from(*weight)).sum();
        Ok(draw(scratch.candidates.iter().copied(), below(random, total)))
    }
}

/// A number below `total` for 64 random bits.
fn below(random: u64, total: u64) -> u64 {
    ((u128::from(random) * u128::from(total)) >> 64) as u64
}

/// The part p of `total`, at least 1: p counts in units of 2^-32.
fn share(p: f64, total: u64) -> u64 {
    const UNIT: f64 = (1u64 << 32) as f64;
    let part = (u128::from(total) * (p * UNIT).round() as u128).div_ceil(1 << 32);
    (part as u64).clamp(1, total.max(1))
}

/// What a token weighs at least that is p times as likely as the most likely one, rounded up.
fn least_weight(p: f64) -> u32 {
    (p * f64::from(weight(0.))).ceil() as u32
}

/// The token in whose weight the place `at` of all weights lies.
fn draw(candidates: impl Iterator<Item = Candidate<u32>>, mut at: u64) -> u32 {
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
            None => return draw((start..).zip(weights.iter().copied()), at),
        }
        start += BLOCK as u32;
    }
    0
}

/// The largest logit, and that of each block; none if one is NaN or there are none.
fn find_largest(logits: &[f32], of_blocks: &mut Vec<f32>) -> Option<f32> {
    const LANES: usize = 16;
    let mut has_nan = false;
    of_blocks.clear();
    of_blocks.extend(logits.chunks(BLOCK).map(|block| {
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
        largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
    }));
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

/// All weights, and what those of each block come to.
fn weigh(logits: &[f32], relative: impl Fn(f32) -> f32, scratch: &mut Scratch) {
    const LANES: usize = 16;
    scratch.weights.resize(logits.len(), 0);
    scratch.blocks.clear();
    let blocks = logits.chunks(BLOCK).zip(scratch.weights.chunks_mut(BLOCK));
    scratch.blocks.extend(blocks.map(|(logits, weights)| {
        for (logit, place) in logits.iter().zip(weights.iter_mut()) {
            *place = weight(relative(*logit));
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
        Block {
            sum: of_lanes + rest.iter().map(|weight| u64::from(*weight)).sum::<u64>(),
            largest: largest.unwrap_or(0),
        }
    }));
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
