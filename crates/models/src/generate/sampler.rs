//! Choosing the next token from logits: penalties here, the draw in [`candle_quant::ops::sample`].

mod penalties;
mod sampling;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Tensor};
use candle_quant::ops::SampleOptions;
use candle_quant::{ops, Result};
use penalties::Seen;
pub use sampling::Sampling;

/// Draws tokens.
///
/// What is drawn depends on the logits, the seed and how many were drawn before, and on nothing else: see
/// [`candle_quant::ops::sample`]. Logits on a CUDA device stay there, unless there are penalties.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    /// How many tokens were drawn.
    step: u64,
    /// The tokens so far, if penalties ask for them.
    seen: Seen,
}

impl Sampler {
    /// A sampler; without a seed it picks one at random.
    ///
    /// # Errors
    /// As those of [`Sampling::validate`].
    pub fn new(sampling: Sampling, seed: Option<u64>) -> Result<Self> {
        sampling.validate()?;
        let seed = seed.unwrap_or_else(rand::random);
        Ok(Self { sampling, seed, step: 0, seen: Seen::default() })
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
        let vocabulary = logits.dims1()?;
        if !self.sampling.has_penalties() {
            return self.draw(logits);
        }
        let mut penalized = logits.to_dtype(DType::F32)?.to_vec1()?;
        self.seen.penalize(&self.sampling, &mut penalized);
        let token = self.draw(&Tensor::from_vec(penalized, vocabulary, &Device::Cpu)?)?;
        self.seen.add(token);
        Ok(token)
    }

    /// The token that `draw` draws, given options, seed and step. None if it does not, or logits come first, for penalties.
    pub(super) fn elsewhere(
        &mut self,
        draw: impl FnOnce(&SampleOptions, (u64, u64)) -> Result<Option<u32>>,
    ) -> Result<Option<u32>> {
        if self.sampling.has_penalties() {
            return Ok(None);
        }
        let token = draw(&self.sampling.options(), (self.seed, self.step))?;
        self.step += u64::from(token.is_some() && self.sampling.temperature != 0.);
        Ok(token)
    }

    fn draw(&mut self, logits: &Tensor) -> Result<u32> {
        let tokens = ops::sample(logits, &self.sampling.options(), self.seed, self.step)?;
        // The largest logit is no draw.
        self.step += u64::from(self.sampling.temperature != 0.);
        Ok(tokens.first().copied().unwrap_or_default())
    }
}
