//! The keys and values of the tokens so far, on a device other than the CPU.

use super::device_rows::{codes, float, grown, ring_rows, token_bytes, CachePlace, DeviceRows};
use super::texts::Texts;
use super::{KvCacheConfig, KvFormat};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::fmt;

/// Keys and values of one layer of a decoder on a GPU, for a batch of sequences, each of its own length.
///
/// [`ops::decode_attention`](crate::ops::decode_attention) appends one token of each to it and attends,
/// [`ops::prefill_attention`](crate::ops::prefill_attention) several; [`append`](Self::append) adds any number, for attention by
/// other means, and [`append_to`](Self::append_to) those of one sequence. Keys and values are floats, or codes of 8 or 4 bits,
/// which the kernels of those operations alone make and read. It grows by a quarter when it is full, which copies it. With a
/// window, and if those operations have kernels for it, its memory is a ring: it has room for the window, and for 64 tokens more or
/// as many as came at once, and then new tokens take the place of those that none sees any more. A CUDA graph that was captured with
/// it holds until it grows, or is used with another batch: then its memory is another, and the step has to be captured anew.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::{DeviceKvCache, KvCacheConfig};
///
/// let mut cache = DeviceKvCache::new(KvCacheConfig::new(2, 64))?;
/// let k = Tensor::zeros((1, 5, 2, 64), DType::F32, &Device::Cpu)?;
/// let [keys, _values] = cache.append(&k, &k)?;
/// assert_eq!((cache.len(), keys.dims()), (5, &[1, 2, 5, 64][..]));
/// # Ok::<(), candle_quant::Error>(())
/// ```
pub struct DeviceKvCache {
    config: KvCacheConfig,
    rows: Option<DeviceRows>,
    texts: Texts,
    /// Rows that were there before the work that was put into the stream last: a launch may read them while that still runs.
    settled: usize,
}

impl DeviceKvCache {
    /// Elements of heads for which there are kernels on tensor cores; a cache of codes has no others.
    pub(crate) const KERNEL_HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

    /// An empty cache, which takes no memory yet. Keys and values have the dtype of the format that `config` says, or codes.
    ///
    /// # Errors
    /// If one of the formats is of floats and the other another; if they are of codes, and heads have not 64, 80, 96, 128 or 256
    /// elements; or as for [`KvCache::new`](super::KvCache::new).
    pub fn new(config: KvCacheConfig) -> Result<Self> {
        config.check()?;
        let KvCacheConfig { keys, values, head_dim, .. } = config;
        let remedy = match [keys, values].map(float) {
            [None, None] if Self::KERNEL_HEAD_DIMS.contains(&head_dim) => None,
            [None, None] => {
                Some("choose f32, f16 or bf16: there are codes for heads of 64, 80, 96, 128 and 256 elements")
            }
            _ if keys == values => None,
            _ => Some("choose f32, f16 or bf16 for both, or codes for both"),
        };
        if let Some(remedy) = remedy {
            return Err(Error::Unsupported {
                what: format!("a DeviceKvCache with keys in {keys} and values in {values}, heads of {head_dim} elements"),
                remedy: remedy.to_string(),
            });
        }
        Ok(Self { config, rows: None, texts: Texts::default(), settled: 0 })
    }

    /// As [`new`](Self::new), for so many sequences, which need not get their first tokens together. What appends to another number of
    /// sequences while there are no tokens makes it a cache of that many.
    ///
    /// # Errors
    /// As those of it.
    pub fn of_sequences(config: KvCacheConfig, sequences: usize) -> Result<Self> {
        Ok(Self { texts: Texts::new(sequences), ..Self::new(config)? })
    }

    /// What the cache is for.
    pub fn config(&self) -> &KvCacheConfig {
        &self.config
    }

    /// Tokens of the longest sequence, those that a window has left behind included.
    pub fn len(&self) -> usize {
        self.lens().iter().copied().max().unwrap_or(0)
    }

    /// Tokens of each sequence: the positions of the next ones. None before anything says how many sequences there are.
    pub fn lens(&self) -> &[usize] {
        self.texts.lens()
    }

    /// The formats of keys and of values, if they are of codes.
    pub(crate) fn codes(&self) -> Option<[KvFormat; 2]> {
        codes([self.config.keys, self.config.values])
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that the keys and values of a token take.
    ///
    /// ```
    /// use candle_quant::{DeviceKvCache, KvCacheConfig, KvFormat};
    ///
    /// // 8 heads of 128 elements, each with two pairs of scale and bias.
    /// let format = KvFormat::Affine8;
    /// let cache = DeviceKvCache::new(KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(8, 128) })?;
    /// assert_eq!(cache.token_bytes(), 2 * 8 * (128 + 2 * 4));
    /// # Ok::<(), candle_quant::Error>(())
    /// ```
    pub fn token_bytes(&self) -> u64 {
        token_bytes(&self.config) as u64
    }

    /// Bytes of what is allocated.
    pub fn size_in_bytes(&self) -> u64 {
        self.rows.as_ref().map_or(0, |rows| {
            self.token_bytes().saturating_mul(rows.sequences as u64).saturating_mul(rows.capacity as u64)
        })
    }

    /// Whether so many tokens of each of `batch` sequences fit into the memory that is there, if they come by the operations that the last
    /// ones came by: [`append`](Self::append) keeps what is behind a window, too.
    pub fn has_room(&self, batch: usize, tokens: usize) -> bool {
        self.has_room_up_to(batch, self.len().saturating_add(tokens), tokens)
    }

    /// Whether there is memory for the tokens up to a position, of which so many come at once, of each of `batch` sequences.
    pub(crate) fn has_room_up_to(&self, batch: usize, end: usize, tokens: usize) -> bool {
        self.rows.as_ref().is_some_and(|there| {
            let at_once = there.is_ring.then_some(tokens);
            there.sequences == batch && self.rows_for(end, at_once, there.capacity) == there.capacity
        })
    }

    /// The most rows of each head that are allocated for texts of so many tokens, `at_once` of which come at once, in a cache that
    /// kernels read: those of a window, if there is one. A card without such kernels keeps all tokens of floats: of bf16 one of
    /// compute capability 7.5, of f16 that one for heads of 128 elements and more.
    pub fn most_rows(config: &KvCacheConfig, tokens: usize, at_once: usize) -> usize {
        let all = DeviceRows::most(tokens);
        let is_read = Self::KERNEL_HEAD_DIMS.contains(&config.head_dim) && config.keys != KvFormat::F32;
        match config.window.filter(|_| is_read) {
            Some(window) => all.min(ring_rows(window, at_once)),
            None => all,
        }
    }

    /// Rows of a cache that had `capacity` for the tokens up to a position; those before the window of `at_once` that come at once may go,
    /// if kernels are all that reads them.
    fn rows_for(&self, end: usize, at_once: Option<usize>, capacity: usize) -> usize {
        let all = if end <= capacity { capacity } else { grown(end, capacity) };
        match self.config.window.zip(at_once) {
            Some((window, tokens)) => all.min(ring_rows(window, tokens)).max(capacity),
            None => all,
        }
    }

    /// Forgets all tokens; the memory stays for the next ones.
    pub fn clear(&mut self) {
        let _is_always_possible = self.truncate(0);
    }

    /// Forgets the tokens from position `len` on. False if that is not possible, and then nothing has changed: the next token would
    /// see some that a window has left behind. 64 tokens may always be forgotten, and more where more came at once.
    #[must_use = "if false, all tokens are still there"]
    pub fn truncate(&mut self, len: usize) -> bool {
        let mut sequences = 0..self.lens().len();
        let is_possible = sequences.clone().all(|sequence| self.may_end(sequence, len));
        is_possible && sequences.all(|sequence| self.truncate_sequence(sequence, len))
    }

    /// Forgets the tokens of a sequence from position `len` on, so that another text may begin there. False, and nothing has changed, as
    /// for [`truncate`](Self::truncate).
    #[must_use = "if false, all tokens are still there"]
    pub fn truncate_sequence(&mut self, sequence: usize, len: usize) -> bool {
        let is_possible = self.may_end(sequence, len);
        if is_possible {
            self.texts.truncate(sequence, len);
            self.settled = self.settled.min(len);
        }
        is_possible
    }

    fn may_end(&self, sequence: usize, len: usize) -> bool {
        self.texts.may_end(sequence, len, self.config.first_seen(len))
    }

    /// Appends `k` and `v`, `[B, T, kv_heads, head_dim]`, to sequences of one length, and returns the keys and values of all tokens,
    /// `[B, kv_heads, len, head_dim]`, which are those of the cache and change with it until it grows.
    ///
    /// # Errors
    /// If the cache is of codes, shapes or dtypes do not fit, sequences have not the same length, a window has left tokens behind
    /// that are gone, or there is no room for the tokens ([`Error::OutOfCache`]): the cache is then as before.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<[Tensor; 2]> {
        if self.lens().iter().any(|of_one| *of_one != self.len()) {
            let (expected, found) = ("one length, or append_to for each", format!("{:?}", self.lens()));
            return Err(Error::mismatch("sequences of a cache", expected, found));
        }
        let rows = self.put(k, v, None)?;
        parts(&rows.memory, self.len())
    }

    /// Appends `k` and `v`, `[1, T, kv_heads, head_dim]`, to one of the sequences, and returns its keys and values of all tokens,
    /// `[1, kv_heads, len, head_dim]`, as [`append`](Self::append) does.
    ///
    /// # Errors
    /// As those of it; if there is no such sequence.
    pub fn append_to(&mut self, sequence: usize, k: &Tensor, v: &Tensor) -> Result<[Tensor; 2]> {
        let rows = self.put(k, v, Some(&[sequence]))?;
        parts(&rows.memory.narrow(1, sequence, 1)?, self.texts.len(sequence))
    }

    /// Where the tokens of `k` `[B, T, kv_heads, head_dim]` belong: in so many sequences, or in these.
    ///
    /// # Errors
    /// If they do not fit the cache, or there are not all of these sequences.
    pub(crate) fn places(&self, k: &Tensor, sequences: Option<&[usize]>) -> Result<Vec<CachePlace>> {
        self.check(k)?;
        let batch = k.dim(0)?;
        let place = |sequence| CachePlace { sequence, position: self.texts.len(sequence) };
        let Some(sequences) = sequences else { return Ok((0..batch).map(place).collect()) };
        if sequences.len() != batch {
            let expected = format!("[{}, T, kv_heads, head_dim], those of {sequences:?}", sequences.len());
            return Err(Error::mismatch("keys for sequences", expected, format!("{:?}", k.dims())));
        }
        let count = self.lens().len();
        if let Some(unknown) = sequences.iter().find(|sequence| **sequence >= count) {
            let expected = format!("one below {count}, as many as of_sequences or the first tokens say");
            return Err(Error::mismatch("sequence of a cache", expected, unknown.to_string()));
        }
        Ok(sequences.iter().copied().map(place).collect())
    }

    /// Room for the tokens of `k` at the [`places`](Self::places) of these sequences. `is_ring`: kernels are all that reads the cache.
    pub(crate) fn room_at(
        &mut self,
        k: &Tensor,
        sequences: Option<&[usize]>,
        places: &[CachePlace],
        is_ring: bool,
    ) -> Result<DeviceRows> {
        let (count, tokens) = (sequences.map_or(places.len(), |_| self.lens().len()), k.dim(1)?);
        let last = places.iter().map(|place| place.position).max().unwrap_or_default();
        let (rows, _) =
            self.room_on(k.device(), count, last.saturating_add(tokens), is_ring.then_some(tokens))?;
        // Also if what comes then fails.
        for place in places {
            self.texts.overwrite(place.sequence, place.position.saturating_add(tokens), rows.capacity);
        }
        Ok(rows)
    }

    /// Appends `k` and `v` to floats.
    fn put(&mut self, k: &Tensor, v: &Tensor, sequences: Option<&[usize]>) -> Result<DeviceRows> {
        check_alike(k, v)?;
        self.check_tensors()?;
        let places = self.places(k, sequences)?;
        self.check_all_are_there(&places)?;
        let rows = self.room_at(k, sequences, &places, false)?;
        rows.put([k, v], &places)?;
        self.appended(&places, k.dim(1)?);
        Ok(rows)
    }

    /// The rows, with room for one more token of each sequence, like those of `k` `[B, T, kv_heads, head_dim]`, and how many
    /// of them are settled. `is_ring` as for [`room_at`](Self::room_at).
    pub(crate) fn room_for_one(&mut self, k: &Tensor, is_ring: bool) -> Result<(DeviceRows, usize)> {
        self.check(k)?;
        self.room_on(k.device(), k.dim(0)?, self.len().saturating_add(1), is_ring.then_some(1))
    }

    fn check(&self, k: &Tensor) -> Result<()> {
        let KvCacheConfig { kv_heads, head_dim, keys, .. } = self.config;
        let (_, _, heads, size) = k.dims4()?;
        // Codes are made of any floats.
        let is_of_dtype = match float(keys) {
            Some(dtype) => k.dtype() == dtype,
            None => matches!(k.dtype(), DType::F16 | DType::BF16 | DType::F32),
        };
        if (heads, size) != (kv_heads, head_dim) || !is_of_dtype {
            let dtype = float(keys).map_or("F32, F16 or BF16".to_string(), |dtype| format!("{dtype:?}"));
            let (expected, found) =
                (format!("{dtype} [B, T, {kv_heads}, {head_dim}]"), (k.dtype(), k.dims()));
            return Err(Error::mismatch("keys for a cache", expected, format!("{found:?}")));
        }
        Ok(())
    }

    /// Refuses to hand out codes as tensors.
    fn check_tensors(&self) -> Result<()> {
        let KvCacheConfig { keys, values, .. } = self.config;
        if self.codes().is_none() {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: format!("keys in {keys} and values in {values} as tensors"),
            remedy:
                "attend to them with ops::prefill_attention and ops::decode_attention, or choose f16 or bf16"
                    .to_string(),
        })
    }

    /// Refuses to hand out all tokens of sequences of which some are gone.
    fn check_all_are_there(&self, places: &[CachePlace]) -> Result<()> {
        match places.iter().map(|place| self.texts.first(place.sequence)).max() {
            None | Some(0) => Ok(()),
            Some(first) => Err(Error::Unsupported {
                what: format!("keys and values as tensors, of which a window has left those before token {first} behind,"),
                remedy: "attend to them with ops::prefill_attention and ops::decode_attention, or clear the cache".to_string(),
            }),
        }
    }

    /// So many tokens have been appended at each of these places.
    pub(crate) fn appended(&mut self, places: &[CachePlace], tokens: usize) {
        for place in places {
            self.extend(place.sequence, place.position + tokens);
        }
        if places.len() != self.lens().len() {
            // What others do not know of has been put into the stream.
            self.settled = 0;
        }
    }

    /// A sequence has got tokens up to a position.
    fn extend(&mut self, sequence: usize, end: usize) {
        let capacity = self.rows.as_ref().map_or(usize::MAX, |rows| rows.capacity);
        self.texts.extend(sequence, end, capacity);
    }

    /// The rows on a device for the tokens up to a position of each of `batch` sequences, and how many of them are settled. With
    /// `at_once`, kernels are all that reads them: those before the window of so many tokens that come at once may go.
    pub(crate) fn room_on(
        &mut self,
        device: &Device,
        batch: usize,
        end: usize,
        at_once: Option<usize>,
    ) -> Result<(DeviceRows, usize)> {
        let max_tokens = self.config.max_tokens;
        if end > max_tokens {
            return Err(Error::OutOfCache { needed: end, max_tokens });
        }
        let fits = |rows: &DeviceRows| rows.sequences == batch && rows.memory.device().same_device(device);
        if !self.rows.as_ref().is_some_and(fits) {
            if !self.is_empty() {
                let expected = "as many sequences as before, on the same device";
                let found = format!("{batch} on {:?}", device.location());
                return Err(Error::mismatch("sequences for a cache", expected, found));
            }
            // Before there are others.
            self.rows = None;
        }
        if self.lens().len() != batch {
            self.texts = Texts::new(batch);
        }
        let capacity = self.rows_for(end, at_once, self.rows.as_ref().map_or(0, |rows| rows.capacity));
        let mut rows = match &self.rows {
            Some(rows) if rows.capacity == capacity => rows.clone(),
            Some(rows) => {
                self.settled = 0;
                rows.grown(capacity, &self.texts.ranges())?
            }
            None => {
                self.settled = 0;
                DeviceRows::of(&self.config, batch, capacity, device)?
            }
        };
        let is_large_enough = |window| capacity >= ring_rows(window, 1);
        rows.is_ring = at_once.is_some() && self.config.window.is_some_and(is_large_enough);
        self.rows = Some(rows.clone());
        Ok((rows, self.settled))
    }

    /// Whether a tensor is a part of the cache's memory.
    pub(crate) fn owns(&self, tensor: &Tensor) -> bool {
        let Some(rows) = &self.rows else { return false };
        let ((own, _), (other, _)) = (rows.memory.storage_and_layout(), tensor.storage_and_layout());
        std::ptr::eq(&*own, &*other)
    }

    /// A launch has appended one token of each sequence that is active, and everything that was put into the stream before it
    /// will be done when another one reads.
    pub(crate) fn launched(&mut self, is_active: impl Fn(usize) -> bool) {
        self.settled = self.lens().iter().copied().min().unwrap_or(0);
        for sequence in (0..self.lens().len()).filter(|sequence| is_active(*sequence)) {
            self.extend(sequence, self.texts.len(sequence) + 1);
        }
    }
}

fn check_alike(k: &Tensor, v: &Tensor) -> Result<()> {
    if v.dims() != k.dims() || v.dtype() != k.dtype() {
        let (expected, found) = ((k.dtype(), k.dims()), (v.dtype(), v.dims()));
        let expected = format!("{expected:?}, as keys");
        return Err(Error::mismatch("values for a cache", expected, format!("{found:?}")));
    }
    Ok(())
}

/// Keys and values `[B, kv_heads, len, head_dim]` of floats `[2, B, kv_heads, capacity, head_dim]`.
fn parts(rows: &Tensor, len: usize) -> Result<[Tensor; 2]> {
    let part = |index: usize| rows.get(index)?.narrow(2, 0, len);
    Ok([part(0)?, part(1)?])
}

impl fmt::Debug for DeviceKvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceKvCache").field("config", &self.config).field("lens", &self.lens()).finish()
    }
}
