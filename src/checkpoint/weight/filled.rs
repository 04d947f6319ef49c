//! Rows that are filled up to whole groups of a format, where a scale belongs to fewer or more elements than that.

use crate::tensor::NO_COLUMN;

/// Group sizes of formats, the largest first.
const SIZES: [usize; 3] = [128, 64, 32];

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

    /// Codes of a byte each of rows of `k`, filled up with zeros, as words.
    pub fn words(&self, codes: &[u8], k: usize) -> Vec<u32> {
        let code = |row: &[u8], column: u32| row.get(column as usize).copied().unwrap_or(0);
        let (quads, _) = self.columns.as_chunks::<4>();
        let rows = codes.chunks_exact(k.max(1));
        let word = |row: &[u8], quad: &[u32; 4]| u32::from_le_bytes(quad.map(|column| code(row, column)));
        rows.flat_map(|row| quads.iter().map(move |quad| word(row, quad))).collect()
    }
}

/// The largest groups that take no more columns than the smallest do.
pub(in crate::checkpoint) fn filled_group_size(k: usize, run: usize, before: usize) -> usize {
    let least = filled_columns(k, run, before, 32);
    SIZES.into_iter().find(|size| filled_columns(k, run, before, *size) == least).unwrap_or(32)
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
        let words = filled.words(&[1, 2, 3, 4, 5, 6], 3);
        assert_eq!((words.len(), words[0], words[8], words[1]), (16, 0x0003_0201, 0x0006_0504, 0));
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
