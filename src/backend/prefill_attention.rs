//! Attention of several new tokens to a cache on a device.

use super::attention::{check_sequences, AttentionOptions};
use super::cuda;
use super::decode_attention::{checked, without_kernel};
use crate::known::without_gradient;
use crate::tensor::{CachePlace, DeviceKvCache, KvCacheConfig};
use crate::Result;
use candle_core::Tensor;

/// New tokens, and what they attend with.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct NewTokens<'a> {
    /// `[B, T, heads, head_dim]`.
    pub(crate) q: &'a Tensor,
    /// `[B, T, kv_heads, head_dim]`. A cache of floats has them already.
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    /// `[heads]` in f32.
    pub(crate) sinks: Option<&'a Tensor>,
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    /// Where they belong.
    pub(crate) places: &'a [CachePlace],
    /// What of the cache they see.
    pub(crate) config: &'a KvCacheConfig,
}

/// Appends the keys and values of several new tokens of each sequence, a prompt or a part of one, to a cache, and attends to all
/// that it then holds, as [`attention`](super::attention) does on the CPU. No matrix of scores and no mask exists.
///
/// * `q`: `[B, T, heads, head_dim]`, with positions already in them (RoPE).
/// * `k`, `v`: `[B, T, kv_heads, head_dim]`, of the same dtype.
///
/// Sequences may be of different lengths; `options.sequences` names those that the entries of the batch continue, if they are not
/// all. The result is `[B, T, heads * head_dim]`; none, and then no token is appended, if there is no kernel for it: on other devices
/// than CUDA's, for other dtypes than F16 and BF16 (beside codes, F32), of heads of other sizes than 64, 80, 96, 128 and 256, on a
/// card with too little shared memory for them, or of more than 65535 heads of keys in all; with a cache of codes, which nothing
/// else reads, that is an error. Scores and softmax are f32, outputs are rounded once, and are the same on any card of one kind;
/// beside codes, queries, keys and values are halves. A single token of each sequence takes
/// [`decode_attention`](super::decode_attention), which divides its keys among more blocks. There is no gradient.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::ops::{prefill_attention, AttentionOptions};
/// use candle_quant::{DeviceKvCache, KvCacheConfig, KvFormat};
///
/// // On Device::new_cuda(0)? it is Some, and the cache has three tokens.
/// let device = Device::Cpu;
/// let rows = |heads| Tensor::ones((1, 3, heads, 64), DType::F16, &device);
/// let format = KvFormat::F16;
/// let mut cache = DeviceKvCache::new(KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(2, 64) })?;
/// let options = AttentionOptions { scale: 0.125, ..Default::default() };
/// let y = prefill_attention(&rows(8)?, &rows(2)?, &rows(2)?, &mut cache, options)?;
/// assert!(y.is_none() && cache.is_empty());
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// If shapes, dtypes or devices do not fit, there is no kernel that reads the cache's codes, options name sequences that there
/// are not or one of them twice, their lengths differ while the device's stream is captured, or there is no room for the tokens
/// ([`Error::OutOfCache`](crate::Error::OutOfCache)).
pub fn prefill_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &mut DeviceKvCache,
    options: AttentionOptions,
) -> Result<Option<Tensor>> {
    let (sizes, sinks) = checked([q, k, v], cache, &options)?;
    let (batch, tokens) = (sizes.batch, sizes.tokens);
    if let Some(sequences) = options.sequences {
        check_sequences(sequences, batch)?;
    }
    if batch == 0 || tokens == 0 {
        return Ok(None);
    }
    let (codes, places) = (cache.codes(), cache.places(k, options.sequences)?);
    if !cuda::attends_to_prompts(q, cache.config().kv_heads, codes, &places)? {
        return without_kernel(cache, q);
    }
    let is_ring = cuda::keeps_ring(cache, (q.device(), q.dtype()), batch)?;
    let rows = cache.room_at(k, options.sequences, &places, is_ring)?;
    if codes.is_none() {
        rows.put([k, v], &places)?;
    }
    let (scale, softcap, config) = (options.scale, options.softcap, cache.config());
    let new = NewTokens { q, k, v, sinks: sinks.as_ref(), scale, softcap, places: &places, config };
    let y = cuda::attend_prompt(&rows, &new)?;
    cache.appended(&places, tokens);
    Ok(Some(without_gradient("kv-cache-attention", &[q, k, v], y)?))
}
