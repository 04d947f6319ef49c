//! Attention on devices: by kernels where there are some, else by candle's operations.

use super::options;
use crate::config::Window;
use candle_core::{bail, DType, Device, Result, Tensor, D};
use candle_quant::{ops, DeviceKvCache, Error, KvCacheConfig};
use std::cell::OnceCell;
use std::ops::Range;

/// Keys and values of the text, in the dtype of activations or as codes.
#[derive(Debug)]
pub(super) struct OnDevice {
    pub(super) cache: DeviceKvCache,
}

impl OnDevice {
    /// # Errors
    /// If there is no such cache, or none of codes on the device.
    pub(super) fn new(config: KvCacheConfig, device: &Device) -> Result<Self> {
        let KvCacheConfig { keys, values, .. } = config;
        if keys.is_quantized() && !device.is_cuda() {
            return Err(Error::Unsupported {
                what: format!(
                    "a KV cache with keys in {keys} and values in {values} on {:?}",
                    device.location()
                ),
                remedy: "leave the format to the dtype of activations".to_string(),
            }
            .into());
        }
        Ok(Self { cache: DeviceKvCache::new(config)? })
    }

    /// Appends `k` and `v`, `[B, T, kv_heads, head_dim]`, and returns softmax(scores) v for `q`,
    /// `[B, T, heads, head_dim]`, as `[B, T, heads * head_dim]`.
    pub(super) fn attend(
        &mut self,
        [q, k, v]: [&Tensor; 3],
        visible: Option<&Visible>,
        scores: &Scores,
    ) -> Result<Tensor> {
        let options = options(scores.scale, scores.softcap, scores.sinks);
        let y = match q.dim(1)? {
            1 => ops::decode_attention(q, k, v, &mut self.cache, options)?,
            _ => ops::prefill_attention(q, k, v, &mut self.cache, options)?,
        };
        if let Some(y) = y {
            return Ok(y);
        }
        let [k, v] = self.cache.append(k, v)?;
        let q = q.transpose(1, 2)?.contiguous()?;
        let (batch, heads, len, head_dim) = q.dims4()?;
        let kv_heads = k.dim(1)?;
        let Some(visible) = visible else {
            bail!("attention on a device: expected what its tokens see, found none")
        };
        let [k, v] = [k, v].map(|rows| rows.narrow(2, visible.first, visible.keys));
        let (k, v) = (k?, v?);

        // The query heads that share a key head become rows of one matrix: keys are never repeated.
        let rows = heads / kv_heads * len;
        let q = (q * scores.scale)?.reshape((batch, kv_heads, rows, head_dim))?;
        let weights = weights_of_keys(&q, &k, len, visible.mask()?, scores)?;
        weights
            .to_dtype(q.dtype())?
            .matmul(&v)?
            .reshape((batch, heads, len, head_dim))?
            .transpose(1, 2)?
            .flatten_from(D::Minus2)
    }
}

/// How scores are made of queries and keys.
pub(super) struct Scores<'a> {
    pub scale: f64,
    /// Where they end.
    pub softcap: Option<f64>,
    /// One more for each query head.
    pub sinks: Option<&'a Tensor>,
}

impl Scores<'_> {
    /// Products as they are before softmax.
    pub fn capped(&self, products: Tensor) -> Result<Tensor> {
        match self.softcap {
            None => Ok(products),
            Some(cap) => (products / cap)?.tanh()? * cap,
        }
    }
}

/// softmax(q k^T + mask), `[B, kv_heads, rows, keys]` in f32, for scaled `q` `[B, kv_heads, rows, head_dim]`, whose rows are `len`
/// queries of each head that uses the key head, and `k` `[B, kv_heads, keys, head_dim]`.
pub(super) fn weights_of_keys(
    q: &Tensor,
    k: &Tensor,
    len: usize,
    mask: Option<&Tensor>,
    how: &Scores,
) -> Result<Tensor> {
    let (batch, kv_heads, rows, _) = q.dims4()?;
    let (keys, shared) = (k.dim(2)?, rows / len.max(1));
    let mut scores = how.capped(q.matmul(&k.t()?)?)?;
    if let Some(mask) = mask {
        let by_query = scores.reshape((batch, kv_heads * shared, len, keys))?;
        let masked = by_query.broadcast_add(&mask.to_dtype(q.dtype())?)?;
        scores = masked.reshape((batch, kv_heads, rows, keys))?;
    }
    let scores = scores.to_dtype(DType::F32)?;
    let Some(sinks) = how.sinks else { return candle_nn::ops::softmax_last_dim(&scores) };
    // One more key, which has no value.
    let sinks = sinks.reshape((1, kv_heads, shared, 1))?;
    let sinks = sinks.broadcast_as((batch, kv_heads, shared, len))?;
    let sinks = sinks.reshape((batch, kv_heads, rows, 1))?;
    let weights = candle_nn::ops::softmax_last_dim(&Tensor::cat(&[&scores, &sinks], D::Minus1)?)?;
    weights.narrow(D::Minus1, 0, keys)?.contiguous()
}

/// Which keys of the cache a run of queries sees; the same for all layers of a kind.
pub(in super::super) struct Visible {
    /// The first key that any of the queries sees.
    pub(super) first: usize,
    /// How many there are from it on.
    pub(super) keys: usize,
    queries: Range<usize>,
    window: Option<Window>,
    device: Device,
    mask: OnceCell<Tensor>,
}

impl Visible {
    /// For `len` queries from position `offset` on. Each sees itself and the keys before it, within the window.
    pub fn new(offset: usize, len: usize, window: Option<Window>, device: &Device) -> Self {
        let first = first_seen(offset, window);
        let (queries, device) = (offset..offset + len, device.clone());
        Self { first, keys: offset + len - first, queries, window, device, mask: OnceCell::new() }
    }

    /// What is added to the scores `[.., len, keys]`; made when it is first asked for. One query sees all that is left: it needs
    /// none.
    pub(super) fn mask(&self) -> Result<Option<&Tensor>> {
        let len = self.queries.len();
        if len > 1 && self.mask.get().is_none() {
            let of_query = |query: usize| {
                let seen = first_seen(query, self.window)..query + 1;
                let keys = self.first..self.first + self.keys;
                keys.map(move |key| if seen.contains(&key) { 0f32 } else { f32::NEG_INFINITY })
            };
            let values: Vec<f32> = self.queries.clone().flat_map(of_query).collect();
            // Another thread cannot have been here meanwhile.
            let _ = self.mask.set(Tensor::from_vec(values, (len, self.keys), &self.device)?);
        }
        Ok(self.mask.get())
    }
}

/// The first key that a query at this position sees.
fn first_seen(position: usize, window: Option<Window>) -> usize {
    match window {
        None => 0,
        Some(Window { tokens, is_chunked: true }) => position - position % tokens.max(1),
        Some(Window { tokens, is_chunked: false }) => (position + 1).saturating_sub(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_see_what_is_before_them_and_in_the_window() {
        let x = f32::NEG_INFINITY;
        let visible = |offset, len, tokens: Option<usize>| {
            let window = tokens.map(|tokens| Window { tokens, is_chunked: false });
            let visible = Visible::new(offset, len, window, &Device::Cpu);
            let mask = visible.mask().unwrap().map(|mask| mask.to_vec2::<f32>().unwrap());
            (visible.first, visible.keys, mask)
        };
        assert_eq!(visible(0, 2, None), (0, 2, Some(vec![vec![0., x], vec![0., 0.]])));
        assert_eq!(visible(1, 2, None), (0, 3, Some(vec![vec![0., 0., x], vec![0., 0., 0.]])));
        assert_eq!(visible(5, 2, Some(2)), (4, 3, Some(vec![vec![0., 0., x], vec![x, 0., 0.]])));
        assert_eq!(visible(5, 1, None), (0, 6, None));
        assert_eq!(visible(5, 1, Some(2)), (4, 2, None));
        assert_eq!(visible(5, 1, Some(9)), (0, 6, None));
        // Chunks of three: the first query is the last of its own.
        let chunks = Some(Window { tokens: 3, is_chunked: true });
        let visible = Visible::new(5, 2, chunks, &Device::Cpu);
        let mask = visible.mask().unwrap().unwrap().to_vec2::<f32>().unwrap();
        assert_eq!((visible.first, visible.keys, mask), (3, 4, vec![vec![0., 0., 0., x], vec![x, x, x, 0.]]));
    }
}
