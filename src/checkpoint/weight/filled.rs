//! Rows that are filled up to whole groups of a format, where a scale belongs to fewer or more elements than that.

use crate::format::pack;
use crate::tensor::NO_COLUMN;
use crate::QuantFormat;
use rayon::prelude::*;
use std::ops::Range;

/// Group sizes of formats, the largest first.
pub(in crate::checkpoint) fn group_sizes() -> impl Iterator<Item = usize> {
    QuantFormat::AFFINE_GROUP_SIZES.into_iter().rev()
}

/// The columns of rows in runs, each filled up to whole groups.
#[derive(Debug)]
pub(in crate::checkpoint) struct Filled {
    /// The column of each packed one, or [`NO_COLUMN`].
    pub columns: Vec<u32>,
    /// The run of each group.
    pub runs: Vec<usize>,
}

impl Filled {
    /// `k` columns in runs of `run` columns, of whose first `before` belong to others; filled up to groups of `size`.
    pub fn new(k: usize, run: usize, before: usize, size: usize) -> Self {
        let (mut columns, mut runs, mut start) = (Vec::new(), Vec::new(), 0u32);
        for (index, len) in lengths(k, run, before).enumerate() {
            let end = start.saturating_add(u32::try_from(len).unwrap_or(u32::MAX));
            columns.extend(start..end);
            columns.resize(columns.len().next_multiple_of(size), NO_COLUMN);
            runs.resize(columns.len() / size, index);
            start = end;
        }
        Self { columns, runs }
    }

    /// Codes, a byte each, of rows of `k`, of which `part` is filled up with zeros, as words of so many bits a code.
    pub fn words(&self, codes: &[u8], k: usize, part: &Range<usize>, bits: usize) -> Vec<u32> {
        let (k, of_row) = (k.max(1), self.columns.len() * bits / 32);
        let mut words = vec![0; codes.len() / k * of_row];
        words.par_chunks_exact_mut(of_row.max(1)).zip(codes.par_chunks_exact(k)).for_each_init(
            || vec![0; self.columns.len()],
            |filled, (words, codes)| {
                let codes = codes.get(part.clone()).unwrap_or_default();
                for (to, column) in filled.iter_mut().zip(&self.columns) {
                    *to = codes.get(*column as usize).copied().unwrap_or(0);
                }
                pack(filled, bits, words);
            },
        );
        words
    }
}

/// The largest groups that take no more columns than the smallest do.
pub(in crate::checkpoint) fn filled_group_size(k: usize, run: usize, before: usize) -> usize {
    let least = filled_columns(k, run, before, 32);
    group_sizes().find(|size| filled_columns(k, run, before, *size) == least).unwrap_or(32)
}

/// How many columns there are then.
pub(in crate::checkpoint) fn filled_columns(k: usize, run: usize, before: usize, size: usize) -> usize {
    lengths(k, run, before).map(|len| len.next_multiple_of(size)).fold(0, usize::saturating_add)
}

/// Columns of each run.
fn lengths(k: usize, run: usize, before: usize) -> impl Iterator<Item = usize> {
    let run = run.max(1);
    let first = run.saturating_sub(before).clamp(1, k.max(1)).min(k);
    let mut left = k - first;
    let rest = std::iter::from_fn(move || {
        let len = run.min(left);
        left -= len;
        (len > 0).then_some(len)
    });
    std::iter::once(first).chain(rest).filter(|len| *len > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_filled_up_to_groups() {
        let Filled { columns, runs } = Filled::new(100, 48, 20, 32);
        assert_eq!(runs, [0, 1, 1, 2]);
        let expected = (0..28)
            .chain([NO_COLUMN; 4])
            .chain(28..76)
            .chain([NO_COLUMN; 16])
            .chain(76..100)
            .chain([NO_COLUMN; 8]);
        assert_eq!(columns, expected.collect::<Vec<_>>());
        let filled = Filled::new(3, 3, 0, 32);
        let words = filled.words(&[1, 2, 3, 4, 5, 6], 3, &(0..3), 8);
        assert_eq!((words.len(), words[0], words[8], words[1]), (16, 0x0003_0201, 0x0006_0504, 0));
        let words = Filled::new(2, 2, 0, 32).words(&[1, 2, 3, 4, 5, 6], 3, &(1..3), 4);
        assert_eq!(words, [0x32, 0, 0, 0, 0x65, 0, 0, 0]);
    }

    #[test]
    fn groups_are_as_large_as_nothing_is_lost_by_it() {
        for (k, run, before, size, columns) in [
            (256, 128, 0, 128, 256),
            (200, 200, 0, 32, 224),
            (250, 250, 0, 128, 256),
            (120, 64, 0, 64, 128),
            (96, 48, 0, 64, 128),
            (96, 64, 32, 32, 96),
            (5, 1, 0, 32, 160),
        ] {
            assert_eq!(filled_group_size(k, run, before), size, "{k} {run} {before}");
            assert_eq!(filled_columns(k, run, before, size), columns, "{k} {run} {before}");
            assert_eq!(Filled::new(k, run, before, size).columns.len(), columns, "{k} {run} {before}");
        }
    }
}
