//! What is measured.

use candle_quant::{Error, Result};
use serde::Serialize;
use std::fmt;

/// What is measured, and how often. The sizes of the default are llama-bench's, and some more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchOptions {
    /// Tokens of prompts: each is computed from an empty cache.
    pub prompts: Vec<usize>,
    /// Tokens in the cache before tokens are decoded one by one.
    pub depths: Vec<usize>,
    /// Tokens that are decoded in a repetition.
    pub decode_tokens: usize,
    /// For the matmuls alone: rows of x that each kind of weight is multiplied with. None of them by default.
    pub matmul_rows: Vec<usize>,
    /// How often each is measured, after one time that does not count.
    pub repetitions: usize,
    /// Tokens of a prompt that are computed at once.
    pub prefill_chunk: usize,
    /// How much memory is read to measure its bandwidth; 0 for none.
    pub bandwidth_bytes: usize,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            prompts: vec![128, 512, 2048],
            depths: vec![0, 512, 4096, 16384],
            decode_tokens: 128,
            matmul_rows: Vec::new(),
            repetitions: 5,
            prefill_chunk: 256,
            bandwidth_bytes: 1 << 30,
        }
    }
}

impl BenchOptions {
    /// The matmuls of a model and nothing else, with 1, 8 and 512 rows of x.
    pub fn matmuls() -> Self {
        let (prompts, depths) = Default::default();
        Self { prompts, depths, matmul_rows: vec![1, 8, 512], ..Self::default() }
    }

    /// The texts, each once: prompts as they are listed, then depths from the shallowest on.
    pub(super) fn texts(&self) -> Vec<Text> {
        let mut depths = self.depths.clone();
        depths.sort_unstable();
        let prompts = self.prompts.iter().map(|&tokens| Text::Prefill { tokens });
        let decodes = depths.into_iter().map(|depth| Text::Decode { depth, tokens: self.decode_tokens });
        let mut texts = Vec::new();
        for text in prompts.chain(decodes) {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        texts
    }

    /// Refuses what can't be measured.
    ///
    /// # Errors
    /// If there are no repetitions or nothing to repeat, or a size is 0.
    pub fn validate(&self) -> Result<()> {
        let at_least_one = |what: &str, sizes: &[usize]| match sizes.contains(&0) {
            true => Err(Error::mismatch(format!("{what} of a bench"), "at least 1", "0")),
            false => Ok(()),
        };
        at_least_one("repetitions", &[self.repetitions])?;
        at_least_one("chunk of prompts", &[self.prefill_chunk])?;
        at_least_one("prompts", &self.prompts)?;
        at_least_one("rows of x", &self.matmul_rows)?;
        if !self.depths.is_empty() {
            at_least_one("decoded tokens", &[self.decode_tokens])?;
        }
        match self.prompts.is_empty() && self.depths.is_empty() && self.matmul_rows.is_empty() {
            true => Err(Error::mismatch("bench", "prompts, depths or rows of x to measure", "none of them")),
            false => Ok(()),
        }
    }
}

/// One text that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "test", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Text {
    /// A prompt of so many tokens.
    Prefill {
        /// How many.
        tokens: usize,
    },
    /// So many tokens, one by one, behind those in the cache.
    Decode {
        /// How many are in the cache.
        depth: usize,
        /// How many are decoded.
        tokens: usize,
    },
}

impl Text {
    /// Tokens that are measured.
    pub fn tokens(self) -> usize {
        match self {
            Self::Prefill { tokens } | Self::Decode { tokens, .. } => tokens,
        }
    }

    /// Tokens of the whole text.
    pub fn len(self) -> usize {
        match self {
            Self::Prefill { tokens } => tokens,
            Self::Decode { depth, tokens } => depth.saturating_add(tokens),
        }
    }

    /// Whether it has no tokens.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill { tokens } => write!(f, "prefill {tokens}"),
            Self::Decode { depth: 0, tokens } => write!(f, "decode {tokens}"),
            Self::Decode { depth, tokens } => write!(f, "decode {tokens} @ {depth}"),
        }
    }
}
