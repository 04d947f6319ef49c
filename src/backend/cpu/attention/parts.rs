//! Attention as a list of independent parts: some tokens, one head of keys, a range of keys.

use crate::tensor::{KvCache, KvLayout, KV_BLOCK};
use std::ops::Range;

/// Attention of some tokens to the cache that holds them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention<'a> {
    pub(crate) cache: &'a KvCache,
    /// The tokens, sequence by sequence.
    pub(crate) queries: &'a [Queries],
    /// Query heads, a multiple of the cache's heads.
    pub(crate) heads: usize,
    /// By what products of queries and keys are multiplied.
    pub(crate) scale: f32,
    /// A logit for each query head, whose weight goes to no value.
    pub(crate) sinks: Option<&'a [f32]>,
    /// Where scores end: `softcap * tanh(score / softcap)`.
    pub(crate) softcap: Option<f32>,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queries {
    /// The sequence in the cache.
    pub(crate) sequence: usize,
    /// Where the first of the tokens stands in it.
    pub(crate) position: usize,
    /// How many there are.
    pub(crate) tokens: usize,
    /// The row of the first of them among the rows of q.
    pub(crate) first_row: usize,
}

/// One token's numbers after another's, `stride` apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) stride: usize,
}

impl<'a> Rows<'a> {
    /// Some numbers of a row; none if there are not so many.
    pub(super) fn get(self, row: usize, range: Range<usize>) -> &'a [f32] {
        let start = row * self.stride;
        self.values.get(start + range.start..start + range.end).unwrap_or_default()
    }
}

/// What one call of [`run_part`](super::run_part) computes: for some tokens of a sequence and all query heads of one head of
/// keys, the sum of values over a range of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) queries: Queries,
    pub(crate) kv_head: usize,
    /// Positions of the keys. Those that a token does not see are masked.
    pub(crate) keys: Range<usize>,
    /// Parts of one group are about the same tokens and heads, and are combined.
    pub(crate) group: usize,
    /// Where its numbers begin among those of all parts, and how many they are.
    pub(crate) partial: Range<usize>,
}

/// Rows of q that a part takes at most: tokens times query heads. Keys and values are widened once for all of them.
const TILE_ROWS: usize = 96;

/// Up to so many new tokens of a sequence, several threads share its keys.
const FEW_TOKENS: usize = 16;

/// Keys of a part, then: what takes much longer to read than a thread takes to find its next part.
const KEYS_OF_PART: usize = 4 * KV_BLOCK;

/// Ranges of keys of one head, at most.
const MAX_RANGES: usize = 64;

impl Attention<'_> {
    /// Query heads for each head of keys.
    pub(super) fn group_size(&self) -> usize {
        self.heads / self.cache.config().kv_heads
    }

    /// Rows of a part: all query heads of the first token, then those of the next one.
    pub(super) fn rows(&self, part: &Part) -> usize {
        part.queries.tokens * self.group_size()
    }

    /// Numbers between two rows of sums.
    pub(super) fn sum_stride(&self) -> usize {
        KvLayout::padded(self.cache.config().head_dim)
    }

    /// Positions that a token sees.
    pub(super) fn seen(&self, position: usize) -> Range<usize> {
        self.cache.config().first_seen(position)..position + 1
    }
}

/// The parts of an attention, those of one group next to each other. They depend on shapes alone, never on the number of
/// threads: neither do sums, then.
pub(crate) fn parts(attention: &Attention) -> Vec<Part> {
    let (group_size, stride) = (attention.group_size().max(1), attention.sum_stride());
    let mut parts: Vec<Part> = Vec::new();
    let (mut group, mut start) = (0, 0);
    for queries in attention.queries {
        let tile = (TILE_ROWS / group_size).max(1);
        for first in (0..queries.tokens).step_by(tile) {
            let tile = Queries {
                position: queries.position + first,
                tokens: tile.min(queries.tokens - first),
                first_row: queries.first_row + first,
                ..*queries
            };
            let keys = attention.seen(tile.position).start..tile.position + tile.tokens;
            let ranges = if queries.tokens <= FEW_TOKENS { split(keys) } else { vec![keys] };
            for kv_head in 0..attention.cache.config().kv_heads {
                for keys in &ranges {
                    let len = tile.tokens * group_size * (stride + 2);
                    let partial = start..start + len;
                    start += len;
                    parts.push(Part { queries: tile, kv_head, keys: keys.clone(), group, partial });
                }
                group += 1;
            }
        }
    }
    parts
}

/// Keys in ranges of whole blocks.
fn split(keys: Range<usize>) -> Vec<Range<usize>> {
    let first_block = keys.start / KV_BLOCK * KV_BLOCK;
    let len = KEYS_OF_PART * (keys.end - first_block).div_ceil(KEYS_OF_PART * MAX_RANGES);
    let range = |start: usize| start.max(keys.start)..(start + len).min(keys.end);
    (first_block..keys.end).step_by(len).map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::KvCacheConfig;

    #[test]
    fn ranges_cover_the_keys_and_are_few() {
        for keys in [0..1, 0..256, 0..257, 63..64, 65..700, 1000..100_000, 0..131_072] {
            let ranges = split(keys.clone());
            assert!(
                ranges.len() <= MAX_RANGES + 1 && ranges.iter().all(|range| !range.is_empty()),
                "{keys:?}"
            );
            assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (keys.start, keys.end));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].end % 64 == 0));
        }
    }

    #[test]
    fn every_token_meets_all_its_keys() {
        let config = KvCacheConfig { window: Some(100), ..KvCacheConfig::new(2, 8) };
        let cache = KvCache::new(config).unwrap();
        let queries = [(0, 0, 150, 0), (1, 700, 1, 150), (3, 64, 16, 151)];
        let queries = queries.map(|(sequence, position, tokens, first_row)| Queries {
            sequence,
            position,
            tokens,
            first_row,
        });
        let attention =
            Attention { cache: &cache, queries: &queries, heads: 6, scale: 1., sinks: None, softcap: None };
        let parts = parts(&attention);
        let mut end = 0;
        for part in &parts {
            assert_eq!(part.partial, end..end + part.queries.tokens * 3 * (16 + 2));
            end = part.partial.end;
        }
        for queries in &queries {
            for token in 0..queries.tokens {
                for kv_head in 0..2 {
                    let (row, position) = (queries.first_row + token, queries.position + token);
                    let mut next = attention.seen(position).start;
                    let has_token = |part: &&Part| {
                        let first = part.queries.first_row;
                        part.kv_head == kv_head && (first..first + part.queries.tokens).contains(&row)
                    };
                    for part in parts.iter().filter(has_token) {
                        assert_eq!(part.queries.position + row - part.queries.first_row, position);
                        assert!(part.keys.start <= next);
                        next = part.keys.end;
                    }
                    assert!(next > position);
                }
            }
        }
    }
}
