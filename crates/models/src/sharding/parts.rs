//! Heads, inner elements and tokens of each rank.

use crate::Config;
use candle_quant::parallel::{split, split_or_cut_units};
use std::ops::Range;

/// How a model is split over the ranks of a group.
///
/// Attention is split by heads, linear attention by those of keys, the feed-forward block by its inner elements, embedding
/// and head by tokens of the vocabulary. What there is too little of for all ranks is whole on each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sharding {
    pub heads: Option<Vec<Heads>>,
    /// Heads of keys of linear attention; `None` also if there are fewer than ranks.
    pub linear_heads: Option<Vec<Range<usize>>>,
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

impl Sharding {
    pub fn new(config: &Config, ranks: usize) -> Self {
        Self {
            heads: heads(config.num_attention_heads, config.num_key_value_heads, ranks),
            linear_heads: config.linear.as_ref().and_then(|linear| split(linear.key_heads, 1, ranks)),
            vocabulary: config.vocab_size,
            ranks,
        }
    }

    /// Tokens of the vocabulary; `None` if there are fewer than ranks.
    pub fn vocabulary(&self) -> Option<Vec<Range<usize>>> {
        split(self.vocabulary, 1, self.ranks)
    }
}

/// Inner elements of a feed-forward block that all tokens use for each rank, of which `unit` lie together in the down
/// projection; `None` if there are fewer elements than ranks. If there are fewer units, several ranks load parts of a unit.
pub(crate) fn inner_shares(inner: usize, unit: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    split_or_cut_units(inner, unit, ranks)
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
