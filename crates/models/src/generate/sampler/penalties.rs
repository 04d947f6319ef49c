//! Penalties for tokens that were there before.

use super::Sampling;
use std::collections::HashMap;

/// The tokens so far, and how often each is in the text; of the prompt alone 0 times.
#[derive(Debug, Default)]
pub struct Seen(HashMap<u32, u32>);

impl Seen {
    pub fn add_prompt(&mut self, tokens: &[u32]) {
        for token in tokens {
            self.0.entry(*token).or_insert(0);
        }
    }

    pub fn add(&mut self, token: u32) {
        *self.0.entry(token).or_insert(0) += 1;
    }

    /// In f32, which the logits are in; every token for itself, so that their order is nothing to it.
    pub fn penalize(&self, sampling: &Sampling, logits: &mut [f32]) {
        let (repetition, frequency) = (sampling.repetition_penalty as f32, sampling.frequency_penalty as f32);
        let presence = sampling.presence_penalty as f32;
        for (token, count) in &self.0 {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            *logit = if *logit < 0. { *logit * repetition } else { *logit / repetition };
            if *count > 0 {
                *logit -= frequency * *count as f32 + presence;
            }
        }
    }
}
