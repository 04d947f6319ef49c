//! Texts to learn from.

use crate::Model;
use candle_quant::{Error, Result};
use sha2::{Digest, Sha256};

/// A text as tokens, with those that a model is to predict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    tokens: Vec<u32>,
    counts: Vec<bool>,
}

impl Sequence {
    /// A text of which every token counts but the first, which follows nothing.
    pub fn new(tokens: impl Into<Vec<u32>>) -> Self {
        let tokens = tokens.into();
        Self { counts: vec![true; tokens.len()], tokens }
    }

    /// A prompt, which does not count, and the answer to it.
    pub fn with_prompt(prompt: &[u32], answer: &[u32]) -> Self {
        let counts = [vec![false; prompt.len()], vec![true; answer.len()]].concat();
        Self { tokens: [prompt, answer].concat(), counts }
    }

    /// Tokens with their own flags, whether each counts.
    ///
    /// # Errors
    /// If there are not as many flags as tokens.
    pub fn with_counts(tokens: Vec<u32>, counts: Vec<bool>) -> Result<Self> {
        match tokens.len() == counts.len() {
            true => Ok(Self { tokens, counts }),
            false => Err(Error::mismatch(
                "flags of a sequence",
                format!("one for each of {} tokens", tokens.len()),
                counts.len().to_string(),
            )),
        }
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether each token counts; the first never does.
    pub fn counts(&self) -> impl Iterator<Item = bool> + '_ {
        self.counts.iter().enumerate().map(|(index, counts)| *counts && index > 0)
    }

    /// How many tokens count.
    pub fn counted(&self) -> usize {
        self.counts().filter(|counts| *counts).count()
    }

    /// Pieces of which a model sees at most `context` tokens. The last token of each is the first of the next, so that all
    /// that count still do, once.
    fn pieces(&self, context: usize) -> impl Iterator<Item = Self> + '_ {
        let step = context.max(1);
        let starts = (0..self.tokens.len().saturating_sub(1)).step_by(step);
        starts.filter_map(move |start| {
            let end = (start + step + 1).min(self.tokens.len());
            let tokens = self.tokens.get(start..end)?.to_vec();
            Some(Self { tokens, counts: self.counts.get(start..end)?.to_vec() })
        })
    }
}

/// What to learn from, and what to judge by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dataset {
    /// Texts that adapters learn from.
    pub training: Vec<Sequence>,
    /// Texts that they do not see; may be empty.
    pub held_out: Vec<Sequence>,
}

/// Sequences as a model takes them: none is longer than `context`, and each has tokens that count.
///
/// # Errors
/// If there are none, or a token is outside of the vocabulary.
pub(super) fn prepared(model: &Model, sequences: &[Sequence], context: usize) -> Result<Vec<Sequence>> {
    let vocabulary = model.vocabulary();
    for (index, sequence) in sequences.iter().enumerate() {
        if let Some(token) = sequence.tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(Error::mismatch(
                format!("sequence {index}"),
                format!(
                    "tokens below {vocabulary}, the model's vocabulary: was it tokenized for another model?"
                ),
                token.to_string(),
            ));
        }
    }
    let pieces = sequences.iter().flat_map(|sequence| sequence.pieces(context));
    let pieces: Vec<_> = pieces.filter(|piece| piece.counted() > 0).collect();
    match pieces.is_empty() {
        true => Err(Error::mismatch(
            "sequences",
            "at least one of two or more tokens, of which one counts that is not the first",
            format!("{} sequences without", sequences.len()),
        )),
        false => Ok(pieces),
    }
}

/// What tells these sequences from others.
pub(super) fn digest(sequences: &[Sequence]) -> String {
    let mut hash = Sha256::new();
    for sequence in sequences {
        hash.update((sequence.tokens.len() as u64).to_le_bytes());
        for (token, counts) in sequence.tokens.iter().zip(&sequence.counts) {
            hash.update(token.to_le_bytes());
            hash.update([u8::from(*counts)]);
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_that_counts_does_so_in_one_piece() {
        let sequence = Sequence::with_counts((0..10).collect(), (0..10).map(|i| i != 4).collect()).unwrap();
        for context in 1..12 {
            let pieces: Vec<_> = sequence.pieces(context).collect();
            assert!(pieces.iter().all(|piece| piece.tokens.len() <= context + 1), "{context}");
            let counted = |piece: &Sequence| -> Vec<u32> {
                let pairs = piece.tokens.iter().zip(piece.counts());
                pairs.filter(|(_, counts)| *counts).map(|(token, _)| *token).collect()
            };
            let all: Vec<u32> = pieces.iter().flat_map(counted).collect();
            assert_eq!(all, [1, 2, 3, 5, 6, 7, 8, 9], "{context}");
        }
    }

    #[test]
    fn lone_tokens_have_nothing_to_predict() {
        assert_eq!(Sequence::new([3]).pieces(8).count(), 0);
        assert_eq!(Sequence::new([]).pieces(8).count(), 0);
        assert_eq!(Sequence::with_prompt(&[1], &[2, 3]).counted(), 2);
        assert!(Sequence::with_counts(vec![1, 2], vec![true]).is_err());
    }
}
