//! Which range of a dimension belongs to which rank.

use std::ops::Range;

/// More ranks than there will be, whatever they are: a larger number is a mistake.
pub const MOST_RANKS: usize = 1 << 16;

/// Which entries of `len` belong to each of `ranks`, cut at multiples of `unit` only and as evenly as that
/// allows, the larger shares first; `None` if there are fewer units than ranks, or none at all.
pub fn split(len: usize, unit: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    let unit = unit.max(1);
    let units = len.div_ceil(unit);
    if ranks == 0 || units < ranks {
        return None;
    }
    let (each, more) = (units / ranks, units % ranks);
    let start = |rank: usize| (rank * each + rank.min(more)).saturating_mul(unit).min(len);
    Some((0..ranks).map(|rank| start(rank)..start(rank + 1)).collect())
}

/// As [`split`]; if there are fewer units than ranks, cut inside units, too: several ranks need parts of one. `None` if
/// there are fewer entries than ranks.
pub fn split_or_cut_units(len: usize, unit: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    split(len, unit, ranks).or_else(|| split(len, 1, ranks))
}

/// The smallest range of whole units of `k` elements that has all of `range`.
pub fn whole_groups(range: &Range<usize>, unit: usize, k: usize) -> Range<usize> {
    let unit = unit.max(1);
    range.start / unit * unit..range.end.div_ceil(unit).saturating_mul(unit).min(k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_whole_groups_and_as_even_as_they_can_be() {
        let lens = |len, unit, ranks| -> Option<Vec<usize>> {
            let ranges = split(len, unit, ranks)?;
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((ranges[0].start, ranges[ranks - 1].end), (0, len));
            Some(ranges.iter().map(|range| range.len()).collect())
        };
        // gpt-oss: 90 groups of 32.
        assert_eq!(lens(2880, 32, 4), Some(vec![23 * 32, 23 * 32, 22 * 32, 22 * 32]));
        assert_eq!(lens(128, 64, 2), Some(vec![64, 64]));
        assert_eq!(lens(7, 1, 3), Some(vec![3, 2, 2]));
        // The last unit may be incomplete.
        assert_eq!(lens(70, 32, 3), Some(vec![32, 32, 6]));
        assert_eq!(lens(128, 64, 3), None);
        assert_eq!(split(0, 1, 1), None);
        assert_eq!(split(4, 1, 0), None);
    }

    #[test]
    fn units_that_are_cut_are_taken_whole() {
        assert_eq!(whole_groups(&(32..64), 64, 128), 0..64);
        assert_eq!(whole_groups(&(32..96), 64, 128), 0..128);
        assert_eq!(whole_groups(&(64..128), 64, 128), 64..128);
        assert_eq!(whole_groups(&(90..100), 64, 100), 64..100);
        assert_eq!(whole_groups(&(3..5), 1, 128), 3..5);
    }
}
