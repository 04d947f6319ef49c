//! How the next token is chosen.

use candle_quant::ops::SampleOptions;
use candle_quant::{Error, Result};

/// How the next token is chosen.
///
/// Penalties come first: of repetition, then of frequency and presence. Then come the temperature, top-k, top-p and min-p,
/// each on what the one before has left, as transformers orders them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the largest one.
    pub temperature: f64,
    /// Only the k most likely tokens; of equally likely ones the first.
    pub top_k: Option<usize>,
    /// Only the smallest set of most likely tokens whose probabilities sum to p or more; of equally likely ones the first.
    pub top_p: Option<f64>,
    /// Only tokens that are at least p times as likely as the most likely one.
    pub min_p: Option<f64>,
    /// Divides the logits of tokens that are in the prompt or the text, or multiplies them if they are negative; 1 changes
    /// nothing.
    pub repetition_penalty: f64,
    /// Is subtracted from the logits of tokens that are in the text.
    pub presence_penalty: f64,
    /// Is subtracted from the logit of a token as often as it is in the text.
    pub frequency_penalty: f64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self {
        temperature: 0.,
        top_k: None,
        top_p: None,
        min_p: None,
        repetition_penalty: 1.,
        presence_penalty: 0.,
        frequency_penalty: 0.,
    };

    /// Whether logits depend on the tokens before.
    pub(super) fn has_penalties(&self) -> bool {
        let Self { repetition_penalty, presence_penalty, frequency_penalty, .. } = *self;
        repetition_penalty != 1. || presence_penalty != 0. || frequency_penalty != 0.
    }

    /// All but the penalties.
    pub(super) fn options(&self) -> SampleOptions {
        let Self { temperature, top_k, top_p, min_p, .. } = *self;
        SampleOptions { temperature, top_k, top_p, min_p }
    }

    /// Whether the values have a meaning.
    ///
    /// # Errors
    /// As those of [`SampleOptions::validate`]; if the repetition penalty is not from 0.01 to 100, or another one not from -100
    /// to 100.
    pub fn validate(&self) -> Result<()> {
        self.options().validate()?;
        let check = |what: &str, expected: &str, value: f64, fits: bool| match fits {
            true => Ok(()),
            false => Err(Error::mismatch(what, expected, value.to_string())),
        };
        let penalty = self.repetition_penalty;
        check("repetition penalty", "from 0.01 to 100", penalty, (0.01..=100.).contains(&penalty))?;
        for (what, penalty) in
            [("presence penalty", self.presence_penalty), ("frequency penalty", self.frequency_penalty)]
        {
            check(what, "from -100 to 100", penalty, (-100. ..=100.).contains(&penalty))?;
        }
        Ok(())
    }
}

impl Default for Sampling {
    /// Temperature 0.8, everything allowed.
    fn default() -> Self {
        Self { temperature: 0.8, ..Self::GREEDY }
    }
}
