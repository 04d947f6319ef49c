//! The keys and values of the tokens so far: blocks, formats, how much there is. Nothing is computed here: rounding,
//! quantizing and attention are the backend's.

mod block;
mod device;
mod device_rows;
mod format;
#[cfg(test)]
mod tests;
mod texts;

use crate::{Error, Result};
use block::HeadCache;
pub(crate) use block::{Layout, Plane, BLOCK};
pub use device::DeviceKvCache;
pub(crate) use device_rows::{CachePlace, DeviceRows};
pub use format::KvFormat;
use std::fmt;
use std::ops::Range;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What a [`KvCache`] is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvCacheConfig {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// How many tokens a query sees, itself included; all of them without a window. The cache keeps no more.
    pub window: Option<usize>,
    /// Whether the window does not slide: a query sees the tokens of its own chunk of so many, up to itself.
    pub is_chunked: bool,
    /// How keys are held.
    pub keys: KvFormat,
    /// How values are held.
    pub values: KvFormat,
    /// The most tokens of a sequence, those that a window has left behind included.
    pub max_tokens: usize,
}

impl KvCacheConfig {
    /// For `kv_heads` heads of `head_dim` elements: keys and values in f32, no window, as many tokens as memory allows.
    pub fn new(kv_heads: usize, head_dim: usize) -> Self {
        let format = KvFormat::F32;
        Self {
            kv_heads,
            head_dim,
            window: None,
            is_chunked: false,
            keys: format,
            values: format,
            max_tokens: usize::MAX,
        }
    }

    /// Refuses a cache without heads or with heads of no size or one beyond reason, and a window that nothing is in.
    fn check(&self) -> Result<()> {
        let check = |what: &str, expected: &str, found: usize, fits: bool| match fits {
            true => Ok(()),
            false => Err(Error::mismatch(format!("{what} of a KV cache"), expected, found.to_string())),
        };
        let Self { kv_heads, head_dim, window, .. } = *self;
        check("heads", "at least one", kv_heads, kv_heads > 0)?;
        check("elements of a head", "1 to 65536", head_dim, (1..=MAX_HEAD_DIM).contains(&head_dim))?;
        check("window", "at least one token", 0, window != Some(0))
    }

    /// The first token that the one at a position sees.
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        match self.window {
            None => 0,
            Some(window) if self.is_chunked => position - position % window.max(1),
            Some(window) => position.saturating_add(1).saturating_sub(window),
        }
    }

    /// Bytes of the blocks that hold a text of so many tokens, or with a window the most for as much of it as that sees:
    /// what [`KvCache::size_in_bytes`] says behind a prompt. While one is computed with a window, the blocks of its tokens
    /// add to that.
    ///
    /// ```
    /// use candle_quant::KvCacheConfig;
    ///
    /// // 65 tokens are two blocks of 64, each with keys and values of 8 heads, 128 elements in f32.
    /// assert_eq!(KvCacheConfig::new(8, 128).size_in_bytes(65), 2 * 64 * 2 * 8 * 128 * 4);
    /// ```
    pub fn size_in_bytes(&self, tokens: usize) -> u64 {
        let of_window = self.window.map_or(usize::MAX, |window| window.div_ceil(BLOCK).saturating_add(1));
        let blocks = tokens.div_ceil(BLOCK).min(of_window) as u64;
        // No larger head has a cache.
        let head_dim = self.head_dim.min(MAX_HEAD_DIM);
        let [keys, values] = [Layout::of_keys(self.keys, head_dim), Layout::of_values(self.values, head_dim)]
            .map(|l| l.bytes() as u64);
        blocks.saturating_mul(self.kv_heads as u64).saturating_mul(keys + values)
    }
}

/// Keys and values of one layer of a decoder on the CPU, for one or several sequences.
///
/// [`ops::attention`](crate::ops::attention) appends to it and attends to what it holds. It grows by blocks of 64 tokens,
/// when their first token comes; what is there is never copied. [`clear`](Self::clear) keeps the blocks for the next text.
/// With a window the blocks behind it become new ones: `ceil(window / 64) + 1` of them serve a text of any length.
///
/// ```
/// use candle_quant::{KvCache, KvCacheConfig, KvFormat};
///
/// let config = KvCacheConfig { keys: KvFormat::Affine8, max_tokens: 4096, ..KvCacheConfig::new(8, 128) };
/// let cache = KvCache::new(config)?;
/// assert_eq!((cache.len(0), cache.size_in_bytes()), (0, 0));
/// # Ok::<(), candle_quant::Error>(())
/// ```
pub struct KvCache {
    config: KvCacheConfig,
    keys: Layout,
    values: Layout,
    sequences: Vec<Sequence>,
}

#[derive(Default)]
struct Sequence {
    /// Tokens, those behind the window included.
    len: usize,
    /// Each by itself, so that threads append to different heads at the same time.
    heads: Vec<RwLock<HeadCache>>,
}

/// Sequences of a cache, at most: no memory is wasted on a number that is none.
const MAX_SEQUENCES: usize = 1 << 16;

/// The largest `head_dim`: far above any model's, and no product of sizes overflows.
const MAX_HEAD_DIM: usize = 1 << 16;

impl KvCache {
    /// An empty cache, which has no blocks yet.
    ///
    /// # Errors
    /// If there are no heads, a head has no elements or more than 65536, or the window is empty.
    pub fn new(config: KvCacheConfig) -> Result<Self> {
        config.check()?;
        let KvCacheConfig { head_dim, keys, values, .. } = config;
        let (keys, values) = (Layout::of_keys(keys, head_dim), Layout::of_values(values, head_dim));
        Ok(Self { config, keys, values, sequences: Vec::new() })
    }

    /// What the cache is for.
    pub fn config(&self) -> &KvCacheConfig {
        &self.config
    }

    /// Tokens of a sequence, those behind the window included: the position of the next one.
    pub fn len(&self, sequence: usize) -> usize {
        self.sequences.get(sequence).map_or(0, |sequence| sequence.len)
    }

    /// Whether no sequence has tokens.
    pub fn is_empty(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.len == 0)
    }

    /// The sequences with tokens, and those between them.
    pub fn sequences(&self) -> usize {
        self.sequences.iter().rposition(|sequence| sequence.len > 0).map_or(0, |last| last + 1)
    }

    /// Forgets all tokens; the blocks stay for the next ones.
    pub fn clear(&mut self) {
        for sequence in &mut self.sequences {
            sequence.len = 0;
            sequence.heads.iter_mut().for_each(|head| exclusive(head).clear());
        }
    }

    /// Forgets the tokens of a sequence from position `len` on; their blocks stay for the next ones. False if that is not
    /// possible, and then nothing has changed: the next token would see some that a window has left behind.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> bool {
        let first_seen = self.config.first_seen(len);
        let Some(sequence) = self.sequences.get_mut(sequence).filter(|sequence| len < sequence.len) else {
            return true;
        };
        let is_whole = |head: &mut RwLock<HeadCache>| exclusive(head).first_token() <= first_seen;
        if len > 0 && !sequence.heads.iter_mut().all(is_whole) {
            return false;
        }
        sequence.len = len;
        for head in sequence.heads.iter_mut().map(exclusive) {
            match len {
                0 => head.clear(),
                len => head.truncate(len, &self.keys, &self.values),
            }
        }
        true
    }

    /// Bytes of all blocks, those without tokens included.
    pub fn size_in_bytes(&self) -> usize {
        let heads = self.sequences.iter().flat_map(|sequence| &sequence.heads);
        let blocks: usize = heads.map(|head| read(head).allocated()).sum();
        blocks * (self.keys.bytes() + self.values.bytes())
    }

    /// How keys and values lie in a block.
    pub(crate) fn layouts(&self) -> (&Layout, &Layout) {
        (&self.keys, &self.values)
    }

    /// Where the next `tokens` tokens of each of these sequences stand.
    ///
    /// # Errors
    /// If a sequence would have more than the most tokens.
    pub(crate) fn room_for(&self, sequences: &[usize], tokens: usize) -> Result<Vec<Range<usize>>> {
        let positions = |sequence: &usize| {
            if *sequence >= MAX_SEQUENCES {
                let expected = format!("below {MAX_SEQUENCES}");
                return Err(Error::mismatch("sequence of a KV cache", expected, sequence.to_string()));
            }
            let (len, max_tokens) = (self.len(*sequence), self.config.max_tokens);
            match len.checked_add(tokens).filter(|end| *end <= max_tokens) {
                Some(end) => Ok(len..end),
                None => Err(Error::OutOfCache { needed: len.saturating_add(tokens), max_tokens }),
            }
        };
        sequences.iter().map(positions).collect()
    }

    /// Makes room for `tokens` more tokens of each of these sequences, which the caller then appends, and returns their
    /// positions. Blocks that none of these tokens sees are freed.
    ///
    /// # Errors
    /// As those of [`room_for`](Self::room_for); nothing has changed then.
    pub(crate) fn extend(&mut self, sequences: &[usize], tokens: usize) -> Result<Vec<Range<usize>>> {
        let positions = self.room_for(sequences, tokens)?;
        let count = sequences.iter().max().map_or(0, |last| last + 1).max(self.sequences.len());
        self.sequences.resize_with(count, Sequence::default);
        for (sequence, positions) in sequences.iter().zip(&positions) {
            self.free_unseen(*sequence);
            if let Some(sequence) = self.sequences.get_mut(*sequence) {
                sequence.len = positions.end;
                sequence.heads.resize_with(self.config.kv_heads, RwLock::default);
            }
        }
        Ok(positions)
    }

    /// Frees the blocks of a sequence that its next token does not see, and all but those of a full window.
    pub(crate) fn free_unseen(&mut self, sequence: usize) {
        let Some(window) = self.config.window else { return };
        let Some(sequence) = self.sequences.get_mut(sequence) else { return };
        let first_seen = self.config.first_seen(sequence.len);
        for head in sequence.heads.iter_mut().map(exclusive) {
            head.drop_before(first_seen / BLOCK);
            head.shrink_to(window.div_ceil(BLOCK) + 1);
        }
    }

    /// One head of a sequence, to read.
    pub(crate) fn head(&self, sequence: usize, kv_head: usize) -> Option<RwLockReadGuard<'_, HeadCache>> {
        self.sequences.get(sequence)?.heads.get(kv_head).map(read)
    }

    /// One head of a sequence, to append to.
    pub(crate) fn head_mut(
        &self,
        sequence: usize,
        kv_head: usize,
    ) -> Option<RwLockWriteGuard<'_, HeadCache>> {
        let head = self.sequences.get(sequence)?.heads.get(kv_head)?;
        Some(head.write().unwrap_or_else(PoisonError::into_inner))
    }
}

// A thread that panicked while it appended has left a row of numbers half written, which is no danger to others.
fn read(head: &RwLock<HeadCache>) -> RwLockReadGuard<'_, HeadCache> {
    head.read().unwrap_or_else(PoisonError::into_inner)
}

fn exclusive(head: &mut RwLock<HeadCache>) -> &mut HeadCache {
    head.get_mut().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lens: Vec<usize> = self.sequences.iter().map(|sequence| sequence.len).collect();
        f.debug_struct("KvCache").field("config", &self.config).field("lens", &lens).finish()
    }
}
