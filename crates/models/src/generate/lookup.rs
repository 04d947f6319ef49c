//! Guesses of the next tokens from the text so far ("prompt lookup"): what followed its last few tokens where these stood
//! before. A model computes several tokens in less time than one after the other, and a guess is right if it is what is
//! drawn anyway, so that guesses change nothing but the time.

use candle_core::{Result, Tensor};

/// So many last tokens have to have stood before: fewer say little of what follows.
const SHORTEST: usize = 2;
/// More are looked for first.
const LONGEST: usize = 4;

/// What followed the last tokens of `text` where they stood before, the latest time: at most `most` tokens.
pub(super) fn guess(text: &[u32], most: usize) -> &[u32] {
    if most == 0 {
        return &[];
    }
    let followers = |len: usize| {
        let start = text.len().checked_sub(len)?;
        let last = text.get(start..)?;
        let at = (0..start).rev().find(|at| text.get(*at..at + len) == Some(last))?;
        text.get(at + len..text.len().min(at + len + most))
    };
    (SHORTEST..=LONGEST).rev().find_map(followers).unwrap_or_default()
}

/// Logits of tokens that stand in the cache, some of which are guesses.
#[derive(Default)]
pub(super) struct Ahead {
    /// Of the tokens from a position on, `[T, vocabulary]`.
    logits: Option<(usize, Tensor)>,
    /// Whether wrong guesses made the model forget all: there are no more.
    pub is_over: bool,
    /// How many tokens were guessed.
    pub guessed: usize,
    /// How many of them were right.
    pub right: usize,
}

impl Ahead {
    /// The logits of the token from `position` on and of the guesses behind it.
    pub(super) fn put(&mut self, position: usize, logits: Tensor, guessed: usize) {
        self.logits = Some((position, logits));
        self.guessed += guessed;
    }

    /// Those of the token at a position, if there are any: a guess that was right.
    pub(super) fn take(&mut self, position: usize) -> Result<Option<Tensor>> {
        let Some((first, logits)) = &self.logits else { return Ok(None) };
        match position.checked_sub(*first) {
            Some(row) if row < logits.dim(0)? => {
                self.right += 1;
                Ok(Some(logits.get(row)?))
            }
            _ => Ok(None),
        }
    }

    /// Forgets logits: a guess was wrong.
    pub(super) fn clear(&mut self) {
        self.logits = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_before_is_the_guess() {
        let text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 2, 3];
        assert_eq!(guess(&text, 10), [7, 8, 2, 3]); // the latest time
        assert_eq!(guess(&text, 2), [7, 8]);
        assert_eq!(guess(&text, 0), [0u32; 0]);
        // More tokens in common count for more than a later place.
        assert_eq!(guess(&[1, 2, 3, 4, 5, 7, 3, 4, 6, 1, 2, 3, 4], 1), [5]);
        // Overlapping places, as in a run of one token.
        assert_eq!(guess(&[5, 5, 5], 3), [5]);
        assert_eq!(guess(&[5, 5, 5, 5, 5, 5, 5], 9), [5]);
        for text in [&[] as &[u32], &[1], &[1, 2], &[1, 2, 3], &[3, 1, 3]] {
            assert!(guess(text, 5).is_empty(), "{text:?}");
        }
    }
}
