//! Which tokens of each sequence a cache on a device has.

use std::ops::Range;

/// The positions of each sequence whose rows are there.
#[derive(Debug, Default)]
pub(super) struct Texts {
    /// Where they end; none while nothing says how many sequences there are.
    lens: Vec<usize>,
    /// Where they begin: in a ring, others have taken the place of those before.
    firsts: Vec<usize>,
}

impl Texts {
    /// So many, without tokens.
    pub(super) fn new(sequences: usize) -> Self {
        Self { lens: vec![0; sequences], firsts: vec![0; sequences] }
    }

    /// Tokens of each sequence, those that are gone included.
    pub(super) fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// What is there of each sequence.
    pub(super) fn ranges(&self) -> Vec<Range<usize>> {
        self.firsts.iter().zip(&self.lens).map(|(first, end)| *first..*end).collect()
    }

    /// The first token of a sequence that is there.
    pub(super) fn first(&self, sequence: usize) -> usize {
        self.firsts.get(sequence).copied().unwrap_or_default()
    }

    /// The position of a sequence's next token.
    pub(super) fn len(&self, sequence: usize) -> usize {
        self.lens.get(sequence).copied().unwrap_or_default()
    }

    /// A sequence has got tokens up to a position, in so many rows.
    pub(super) fn extend(&mut self, sequence: usize, end: usize, capacity: usize) {
        self.overwrite(sequence, end, capacity);
        if let Some(len) = self.lens.get_mut(sequence) {
            *len = end;
        }
    }

    /// The rows of a sequence's positions up to one are no longer those of what was there a whole turn before.
    pub(super) fn overwrite(&mut self, sequence: usize, end: usize, capacity: usize) {
        if let Some(first) = self.firsts.get_mut(sequence) {
            *first = end.saturating_sub(capacity).max(*first);
        }
    }

    /// Whether a sequence may go on at a position, if its next token sees those from `first_seen` on.
    pub(super) fn may_end(&self, sequence: usize, len: usize, first_seen: usize) -> bool {
        len == 0 || len >= self.len(sequence) || self.first(sequence) <= first_seen
    }

    /// Forgets the tokens of a sequence from a position on.
    pub(super) fn truncate(&mut self, sequence: usize, len: usize) {
        for end in [&mut self.lens, &mut self.firsts].into_iter().filter_map(|ends| ends.get_mut(sequence)) {
            *end = len.min(*end);
        }
    }
}
