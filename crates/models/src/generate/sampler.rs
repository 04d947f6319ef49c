//! Choosing the next token from logits.

use candle_core::{DType, Tensor};
use candle_quant::{Error, Result};
use rand::distr::weighted::WeightedIndex;
use rand::distr::Distribution;
use rand::rngs::StdRng;
use rand::SeedableRng;

/// How the next token is chosen. Temperature comes first, then top-k, then top-p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the largest one.
    pub temperature: f64,
    /// Only the k most likely tokens.
    pub top_k: Option<usize>,
    /// Only the smallest set of most likely tokens whose probabilities sum to p or more.
    pub top_p: Option<f64>,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self { temperature: 0., top_k: None, top_p: None };
}

impl Default for Sampling {
    /// Temperature 0.8, everything allowed.
    fn default() -> Self {
        Self { temperature: 0.8, ..Self::GREEDY }
    }
}

/// Draws tokens.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    rng: StdRng,
}

impl Sampler {
    /// A sampler; without a seed it picks one at random.
    ///
    /// # Errors
    /// If the temperature is negative or not finite, k is 0, or p is not in (0, 1].
    pub fn new(sampling: Sampling, seed: Option<u64>) -> Result<Self> {
        let Sampling { temperature, top_k, top_p } = sampling;
        if !(temperature.is_finite() && temperature >= 0.) {
            return Err(Error::mismatch(
                "temperature",
                "a finite number, at least 0",
                temperature.to_string(),
            ));
        }
        if top_k == Some(0) {
            return Err(Error::mismatch("top-k", "at least 1", "0"));
        }
        if let Some(p) = top_p.filter(|p| !(*p > 0. && *p <= 1.)) {
            return Err(Error::mismatch("top-p", "above 0 and at most 1", p.to_string()));
        }
        let seed = seed.unwrap_or_else(rand::random);
        Ok(Self { sampling, seed, rng: StdRng::seed_from_u64(seed) })
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
        let logits = logits.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // A logit of minus infinity is a forbidden token; anything else has to be finite.
        if !largest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            return Err(Error::mismatch("logits", "finite numbers", "NaN or infinity, or none at all"));
        }
        let Sampling { temperature, top_k, top_p } = self.sampling;
        if temperature == 0. {
            let first = logits.iter().position(|logit| *logit == largest);
            return Ok(first.unwrap_or_default() as u32);
        }
        let mut candidates: Vec<(u32, f64)> = (0..)
            .zip(&logits)
            .map(|(token, logit)| (token, (f64::from(logit - largest) / temperature).exp()))
            .collect();
        if let Some(k) = top_k {
            keep_top_k(&mut candidates, k);
        }
        if let Some(p) = top_p.filter(|p| *p < 1.) {
            keep_top_p(&mut candidates, p);
        }
        let chosen = WeightedIndex::new(candidates.iter().map(|(_, weight)| weight))
            .map_err(|error| Error::mismatch("logits", "usable weights", error.to_string()))?
            .sample(&mut self.rng);
        // The index comes from this very list.
        Ok(candidates.get(chosen).map_or(0, |(token, _)| *token))
    }
}

/// Descending by weight, ties by token, so that a seed means the same everywhere.
fn by_weight(a: &(u32, f64), b: &(u32, f64)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn keep_top_k(candidates: &mut Vec<(u32, f64)>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k, by_weight);
        candidates.truncate(k);
        candidates.sort_unstable_by(by_weight);
    }
}

fn keep_top_p(candidates: &mut Vec<(u32, f64)>, p: f64) {
    let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
    // Tokens this unlikely weigh less than 1 - p together: sorting them is not needed.
    let least = total * (1. - p) / candidates.len() as f64;
    candidates.retain(|(_, weight)| *weight >= least);
    candidates.sort_unstable_by(by_weight);
    let mut sum = 0.;
    let enough = candidates.iter().position(|(_, weight)| {
        sum += weight;
        sum >= p * total
    });
    if let Some(last) = enough {
        candidates.truncate(last + 1);
    }
}
