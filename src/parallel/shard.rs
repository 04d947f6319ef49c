//! Which parts of a model belong to which rank.

use crate::models::Config;
use crate::Error;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// How experts are split over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertSplit {
    /// Every rank has a part of each expert, as it has of a dense feed-forward block. Ranks have equal work.
    #[default]
    Inside,
    /// Every rank has whole experts and computes what tokens choose of them. Ranks have equal work if experts are
    /// chosen equally.
    Across,
}

impl fmt::Display for ExpertSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inside => "inside",
            Self::Across => "across",
        })
    }
}

impl FromStr for ExpertSplit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all = [Self::Inside, Self::Across];
        let named = all.into_iter().find(|split| split.to_string() == text);
        named.ok_or_else(|| Error::mismatch("split of experts", "`inside` or `across`", format!("`{text}`")))
    }
}

/// How a model is split over the ranks of a group.
///
/// Attention is split by heads, the feed-forward block by its inner elements, embedding and head by tokens of
/// the vocabulary. What there is too little of for all ranks is whole on each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sharding {
    pub heads: Option<Vec<Heads>>,
    inner: usize,
    vocabulary: usize,
    ranks: usize,
}

/// Heads of one rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Heads {
    pub query: Range<usize>,
    /// Key and value heads that these queries see. If there are more ranks than such heads, several have the same.
    pub key: Range<usize>,
}

/// Experts of one rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertShare {
    pub experts: Range<usize>,
    /// Which of their inner elements.
    pub inner: Range<usize>,
}

/// What each rank has of a block of `count` experts of `inner` elements, of which `unit` lie together in the down
/// projections; `None` if there are fewer of what is split than ranks.
pub(crate) fn expert_shares(
    how: ExpertSplit,
    count: usize,
    inner: usize,
    unit: usize,
    ranks: usize,
) -> Option<Vec<ExpertShare>> {
    let shares = match how {
        ExpertSplit::Inside => inner_shares(inner, unit, ranks)?,
        ExpertSplit::Across => split(count, 1, ranks)?,
    };
    let share = |own| match how {
        ExpertSplit::Inside => ExpertShare { experts: 0..count, inner: own },
        ExpertSplit::Across => ExpertShare { experts: own, inner: 0..inner },
    };
    Some(shares.into_iter().map(share).collect())
}

/// Inner elements of a feed-forward block, of which `unit` lie together in the down projection; `None` if there
/// are fewer elements than ranks. If there are fewer units, parts of a unit are loaded by several ranks.
fn inner_shares(inner: usize, unit: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    split(inner, unit, ranks).or_else(|| split(inner, 1, ranks))
}

impl Sharding {
    pub fn new(config: &Config, ranks: usize) -> Self {
        Self {
            heads: heads(config.num_attention_heads, config.num_key_value_heads, ranks),
            inner: config.intermediate_size,
            vocabulary: config.vocab_size,
            ranks,
        }
    }

    /// Inner elements of a dense feed-forward block; see [`inner_shares`].
    pub fn inner(&self, unit: usize) -> Option<Vec<Range<usize>>> {
        inner_shares(self.inner, unit, self.ranks)
    }

    /// Tokens of the vocabulary; `None` if there are fewer than ranks.
    pub fn vocabulary(&self) -> Option<Vec<Range<usize>>> {
        split(self.vocabulary, 1, self.ranks)
    }
}

/// Query and key heads of each rank: whole groups of queries with their key head, or, of more ranks than key
/// heads, parts of groups; `None` if a group has fewer queries than ranks.
fn heads(queries: usize, keys: usize, ranks: usize) -> Option<Vec<Heads>> {
    let of_key = queries.checked_div(keys)?;
    if let Some(shares) = split(keys, 1, ranks) {
        let with_queries = |key: Range<usize>| Heads { query: key.start * of_key..key.end * of_key, key };
        return Some(shares.into_iter().map(with_queries).collect());
    }
    let ranks_of_keys = split(ranks, 1, keys)?;
    let mut shares = Vec::with_capacity(ranks);
    for (key, ranks) in ranks_of_keys.into_iter().enumerate() {
        let first = key * of_key;
        let queries = split(of_key, 1, ranks.len())?;
        let share =
            |query: Range<usize>| Heads { query: first + query.start..first + query.end, key: key..key + 1 };
        shares.extend(queries.into_iter().map(share));
    }
    Some(shares)
}

/// Which entries of `len` belong to each of `ranks`, cut at multiples of `unit` only and as evenly as that
/// allows, the larger shares first; `None` if there are fewer units than ranks, or none at all.
pub(crate) fn split(len: usize, unit: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    let units = len.div_ceil(unit.max(1));
    if ranks == 0 || units < ranks {
        return None;
    }
    let (each, more) = (units / ranks, units % ranks);
    let start = |rank: usize| (rank * each + rank.min(more)).saturating_mul(unit).min(len);
    Some((0..ranks).map(|rank| start(rank)..start(rank + 1)).collect())
}

/// The smallest range of whole units of `k` elements that has all of `range`.
pub(crate) fn whole_units(range: &Range<usize>, unit: usize, k: usize) -> Range<usize> {
    let unit = unit.max(1);
    range.start / unit * unit..range.end.div_ceil(unit).saturating_mul(unit).min(k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_whole_units_and_as_even_as_they_can_be() {
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
    fn heads_go_with_their_keys() {
        let shares = |queries, keys, ranks| -> Option<Vec<_>> {
            let shares = heads(queries, keys, ranks)?;
            assert_eq!(shares.len(), ranks);
            let of_key = queries / keys;
            let mut next = 0;
            for Heads { query, key } in &shares {
                assert_eq!(query.start, next);
                next = query.end;
                // The first and the last query see the first and the last key, and all keys have as many queries.
                assert_eq!((query.start / of_key, (query.end - 1) / of_key + 1), (key.start, key.end));
                assert_eq!(query.len() % key.len(), 0);
            }
            assert_eq!(next, queries);
            Some(shares.into_iter().map(|share| (share.query.len(), share.key.len())).collect())
        };
        assert_eq!(shares(32, 8, 1), Some(vec![(32, 8)]));
        assert_eq!(shares(32, 8, 2), Some(vec![(16, 4); 2]));
        assert_eq!(shares(32, 8, 3), Some(vec![(12, 3), (12, 3), (8, 2)]));
        assert_eq!(shares(32, 8, 8), Some(vec![(4, 1); 8]));
        assert_eq!(shares(32, 8, 16), Some(vec![(2, 1); 16]));
        assert_eq!(shares(32, 8, 32), Some(vec![(1, 1); 32]));
        assert_eq!(shares(32, 8, 33), None);
        // Two keys with two queries each: one of them has two ranks.
        assert_eq!(shares(4, 2, 3), Some(vec![(1, 1), (1, 1), (2, 1)]));
        assert_eq!(shares(12, 12, 5), Some(vec![(3, 3), (3, 3), (2, 2), (2, 2), (2, 2)]));
        assert_eq!(shares(3, 3, 4), None);
    }

    #[test]
    fn experts_are_split_inside_or_across() {
        let shares = |how, ranks| expert_shares(how, 4, 192, 64, ranks);
        let lens = |how, ranks| -> Option<Vec<_>> {
            let shares = shares(how, ranks)?.into_iter();
            Some(shares.map(|share| (share.experts.len(), share.inner.len())).collect())
        };
        assert_eq!(lens(ExpertSplit::Inside, 2), Some(vec![(4, 128), (4, 64)]));
        assert_eq!(lens(ExpertSplit::Inside, 4), Some(vec![(4, 48); 4]));
        assert_eq!(lens(ExpertSplit::Inside, 193), None);
        assert_eq!(lens(ExpertSplit::Across, 3), Some(vec![(2, 192), (1, 192), (1, 192)]));
        assert_eq!(lens(ExpertSplit::Across, 5), None);
        for how in [ExpertSplit::Inside, ExpertSplit::Across] {
            assert_eq!(how.to_string().parse::<ExpertSplit>().unwrap(), how);
        }
        let told = "aside".parse::<ExpertSplit>().unwrap_err().to_string();
        assert!(told.contains("expected `inside` or `across`, found `aside`"), "{told}");
    }

    #[test]
    fn units_that_are_cut_are_taken_whole() {
        assert_eq!(whole_units(&(32..64), 64, 128), 0..64);
        assert_eq!(whole_units(&(32..96), 64, 128), 0..128);
        assert_eq!(whole_units(&(64..128), 64, 128), 64..128);
        assert_eq!(whole_units(&(90..100), 64, 100), 64..100);
        assert_eq!(whole_units(&(3..5), 1, 128), 3..5);
    }
}
