//! Attention of one new token to a cache on a device, in one launch.

use super::attention::{check, check_sinks, check_softcap, AttentionOptions, Sizes};
use super::cuda;
use crate::known::without_gradient;
use crate::tensor::{DeviceKvCache, KvCacheConfig};
use crate::{Error, Result};
use candle_core::{Device, Tensor};

/// What a new token of each sequence attends with, and what it sees. Positions count from the beginning of the text.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct NewToken<'a> {
    /// `[B, 1, heads, head_dim]`.
    pub(crate) q: &'a Tensor,
    /// `[B, 1, kv_heads, head_dim]`.
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    /// `[heads]` in f32.
    pub(crate) sinks: Option<&'a Tensor>,
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    /// Of each sequence.
    pub(crate) positions: &'a [usize],
    /// What of the cache it sees.
    pub(crate) config: &'a KvCacheConfig,
    /// Rows of the cache that were there before the work that was put into the stream last.
    pub(crate) settled: usize,
}

/// Appends the key and value of one new token of each sequence to a cache, and attends to all that it then holds, as
/// [`attention`](super::attention) does on the CPU, in one launch.
///
/// * `q`: `[B, 1, heads, head_dim]`, with positions already in them (RoPE).
/// * `k`, `v`: `[B, 1, kv_heads, head_dim]`, of the same dtype.
///
/// The result is `[B, 1, heads * head_dim]`; none, and then no token is appended, of more tokens than one, or if there is no kernel
/// for it: on other devices than CUDA's, of heads of other sizes than 64, 80, 96, 128 and 256 (in F32 up to 256), or on a card with
/// too little shared memory for them; with a cache of codes, which nothing else reads, the lack of a kernel is an error. Scores and
/// softmax are f32, outputs are rounded once, and do not depend on the order of blocks, or on which of several cards of one kind it
/// is; beside codes, queries, keys and values are halves. There is no gradient.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, options name sequences, of which all have a token here, their lengths differ while the
/// device's stream is captured, or there is no room for the token ([`Error::OutOfCache`]).
pub fn decode_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &mut DeviceKvCache,
    options: AttentionOptions,
) -> Result<Option<Tensor>> {
    let (sizes, sinks) = checked([q, k, v], cache, &options)?;
    if let Some(sequences) = options.sequences {
        let expected = "none: all have a token here; prefill_attention takes those of some";
        return Err(Error::mismatch("sequences of a DeviceKvCache", expected, format!("{sequences:?}")));
    }
    if sizes.tokens != 1 || sizes.batch == 0 {
        return Ok(None);
    }
    if !matches!(q.device(), Device::Cuda(_)) {
        return without_kernel(cache, q);
    }
    let is_ring = cuda::keeps_ring(cache, (q.device(), q.dtype()), sizes.batch)?;
    let (rows, settled) = cache.room_for_one(k, is_ring)?;
    let token = NewToken {
        q,
        k,
        v,
        sinks: sinks.as_ref(),
        scale: options.scale,
        softcap: options.softcap,
        positions: cache.lens(),
        config: cache.config(),
        settled,
    };
    let Some(y) = cuda::attend(&rows, &token)? else { return without_kernel(cache, q) };
    cache.launched(|_| true);
    Ok(Some(without_gradient("kv-cache-attention", &[q, k, v], y)?))
}

/// None, after which tensors may be appended to a cache; of one of codes, which nothing but kernels reads, an error.
pub(super) fn without_kernel(cache: &DeviceKvCache, q: &Tensor) -> Result<Option<Tensor>> {
    if cache.codes().is_none() {
        return Ok(None);
    }
    let KvCacheConfig { keys, values, head_dim, .. } = cache.config();
    let (dtype, device) = (q.dtype(), q.device().location());
    Err(Error::Unsupported {
        what: format!(
            "a KV cache with keys in {keys} and values in {values} for {dtype:?} in heads of {head_dim} on {device:?}, which has no \
             kernel for it, or not enough shared memory,"
        ),
        remedy: "choose f32, f16 or bf16".to_string(),
    })
}

/// Sizes of queries, and contiguous sinks, if all fit the cache and each other.
pub(super) fn checked(
    [q, k, v]: [&Tensor; 3],
    cache: &DeviceKvCache,
    options: &AttentionOptions,
) -> Result<(Sizes, Option<Tensor>)> {
    let sizes = check(q, k, v, cache.config())?;
    check_softcap(options.softcap)?;
    let sinks = options.sinks.map(|sinks| check_sinks(sinks, sizes.heads)).transpose()?;
    for tensor in [Some(k), Some(v), sinks.as_ref()].into_iter().flatten() {
        if !tensor.device().same_device(q.device()) {
            let expected = format!("{:?}, as q", q.device().location());
            return Err(Error::mismatch("device", expected, format!("{:?}", tensor.device().location())));
        }
    }
    if [q, k, v].into_iter().any(|tensor| cache.owns(tensor)) {
        let expected = "tensors of their own";
        return Err(Error::mismatch("queries, keys and values", expected, "a part of the cache itself"));
    }
    let sinks = sinks.map(|sinks| sinks.contiguous()).transpose()?;
    Ok((sizes, sinks))
}
