//! Attention of tensors to a cache.

use super::cpu::attention::{append_all, attend, Attention, Queries, Rows};
use super::{contiguous, cpu, unsupported_dtype};
use crate::format::Real;
use crate::known::without_gradient;
use crate::tensor::{KvCache, KvCacheConfig};
use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Layout, Storage, Tensor};
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::Range;

/// How [`attention`] computes.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions<'a> {
    /// By what products of queries and keys are multiplied: usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Attention sinks, `[heads]` of a float dtype: logits of one more key for each query head, which has no value.
    pub sinks: Option<&'a Tensor>,
    /// Where scores end: those before softmax are `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// The sequence of the cache that each entry of the batch continues, each at most once. Without it, entry `i` continues
    /// sequence `i`, and the batch has as many entries as the cache has sequences, unless that is empty.
    pub sequences: Option<&'a [usize]>,
}

/// Appends keys and values to a cache, and attends to all that it then holds: `softmax(scale * q * k^T) * v`, causal, and
/// within the cache's window if it has one. No matrix of scores exists, however long the text is.
///
/// * `q`: `[B, T, heads, head_dim]`, the queries of T consecutive tokens of each sequence, with their position already in
///   them (RoPE); F32, F16 or BF16, on the CPU.
/// * `k`, `v`: `[B, T, kv_heads, head_dim]` of the same dtype; `heads` is a multiple of `kv_heads`, and query head `h` uses
///   key head `h / (heads / kv_heads)`.
///
/// The result is `[B, T, heads * head_dim]` of the dtype of `q`. Sums and softmax are f32; keys and values are what the
/// cache's formats make of them, those of these tokens, too. The number of threads does not matter. There is no gradient.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::{ops, KvCache, KvCacheConfig};
///
/// let mut cache = KvCache::new(KvCacheConfig::new(2, 64))?;
/// let options = ops::AttentionOptions { scale: 0.125, ..Default::default() };
/// let random = |tokens, heads| Tensor::randn(0f32, 1., (1, tokens, heads, 64), &Device::Cpu);
///
/// // A prompt of five tokens, then one more.
/// let y = ops::attention(&random(5, 8)?, &random(5, 2)?, &random(5, 2)?, &mut cache, options)?;
/// assert_eq!(y.dims(), [1, 5, 8 * 64]);
/// let y = ops::attention(&random(1, 8)?, &random(1, 2)?, &random(1, 2)?, &mut cache, options)?;
/// assert_eq!((y.dims(), cache.len(0)), (&[1, 1, 8 * 64][..], 6));
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// If shapes, dtypes or sequences do not fit, or a sequence would exceed the cache's `max_tokens`
/// ([`Error::OutOfCache`]): the cache is then as before. If a tensor is not on the CPU, or `softcap` is not a number above zero.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &mut KvCache,
    options: AttentionOptions,
) -> Result<Tensor> {
    for tensor in [q, k, v] {
        match tensor.device() {
            Device::Cpu => {}
            other @ (Device::Cuda(_) | Device::Metal(_)) => {
                return Err(Error::Unsupported {
                    what: format!("attention to a KvCache on {:?}", other.location()),
                    remedy: "move the tensors to Device::Cpu, or use a DeviceKvCache".to_string(),
                })
            }
        }
    }
    let shape = check(q, k, v, cache.config())?;
    check_softcap(options.softcap)?;
    let sinks = options.sinks.map(|sinks| check_sinks(sinks, shape.heads)).transpose()?;
    let sinks = sinks.map(|sinks| sinks.to_vec1::<f32>()).transpose()?;
    let sequences = match options.sequences {
        Some(sequences) => check_sequences(sequences, shape.batch)?,
        None => all_sequences(cache, shape.batch)?,
    };
    #[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here computes with")]
    let output = match q.dtype() {
        DType::F32 => typed::<f32>(q, k, v, cache, sinks.as_deref(), (shape, &options), &sequences)?,
        DType::F16 => typed::<f16>(q, k, v, cache, sinks.as_deref(), (shape, &options), &sequences)?,
        DType::BF16 => typed::<bf16>(q, k, v, cache, sinks.as_deref(), (shape, &options), &sequences)?,
        other => return Err(unsupported_dtype("attention", other).into()),
    };
    Ok(without_gradient("kv-cache-attention", &[q, k, v], output)?)
}

/// Sizes of an attention.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// Checks dtypes and shapes.
pub(super) fn check(q: &Tensor, k: &Tensor, v: &Tensor, config: &KvCacheConfig) -> Result<Sizes> {
    for tensor in [q, k, v] {
        if tensor.dtype() != q.dtype() {
            let (expected, found) = (format!("{:?}, as q", q.dtype()), format!("{:?}", tensor.dtype()));
            return Err(Error::mismatch("dtype of keys and values", expected, found));
        }
    }
    let (kv_heads, head_dim) = (config.kv_heads, config.head_dim);
    let (batch, tokens, heads) = match *q.dims() {
        [batch, tokens, heads, dim] if dim == head_dim && heads > 0 && heads.is_multiple_of(kv_heads) => {
            (batch, tokens, heads)
        }
        _ => {
            let expected = format!("[B, T, a multiple of {kv_heads} heads, {head_dim}]");
            return Err(Error::mismatch("shape of queries", expected, format!("{:?}", q.dims())));
        }
    };
    for (name, tensor) in [("shape of keys", k), ("shape of values", v)] {
        let expected = [batch, tokens, kv_heads, head_dim];
        if tensor.dims() != expected {
            return Err(Error::mismatch(name, format!("{expected:?}"), format!("{:?}", tensor.dims())));
        }
    }
    Ok(Sizes { batch, tokens, heads, kv_heads, head_dim })
}

pub(super) fn check_softcap(softcap: Option<f32>) -> Result<()> {
    match softcap.filter(|cap| !(cap.is_finite() && *cap > 0.)) {
        None => Ok(()),
        Some(cap) => Err(Error::mismatch("softcap", "a finite number above zero", cap.to_string())),
    }
}

/// `[heads]` in f32.
pub(super) fn check_sinks(sinks: &Tensor, heads: usize) -> Result<Tensor> {
    if sinks.dims() != [heads] || !sinks.dtype().is_float() {
        let found = format!("{:?} {:?}", sinks.dtype(), sinks.dims());
        return Err(Error::mismatch("attention sinks", format!("floats [{heads}]"), found));
    }
    Ok(sinks.to_dtype(DType::F32)?)
}

pub(super) fn check_sequences(sequences: &[usize], batch: usize) -> Result<Cow<'_, [usize]>> {
    let mut sorted = sequences.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if sequences.len() != batch || sorted.len() != batch {
        let expected = format!("{batch} different ones");
        return Err(Error::mismatch("sequences of a batch", expected, format!("{sequences:?}")));
    }
    Ok(Cow::Borrowed(sequences))
}

fn all_sequences(cache: &KvCache, batch: usize) -> Result<Cow<'static, [usize]>> {
    if !cache.is_empty() && cache.sequences() != batch {
        let expected = format!("{}, as the cache has sequences", cache.sequences());
        return Err(Error::mismatch("batch size", expected, batch.to_string()));
    }
    Ok((0..batch).collect())
}

/// Tokens that are appended at once to a cache with a window, which holds all of them until they have attended.
const WINDOWED_TOKENS: usize = 512;

fn typed<T: Real>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &mut KvCache,
    sinks: Option<&[f32]>,
    (sizes, options): (Sizes, &AttentionOptions),
    sequences: &[usize],
) -> Result<Tensor> {
    let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    let (q, k, v) = (q.storage_and_layout(), k.storage_and_layout(), v.storage_and_layout());
    let (q, k, v) = (numbers(&q.0, q.1)?, numbers(&k.0, k.1)?, numbers(&v.0, v.1)?);
    let (width, kv_width) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
    let (k, v) = (Rows { values: &k, stride: kv_width }, Rows { values: &v, stride: kv_width });
    let mut out = vec![0f32; sizes.batch * sizes.tokens * width];
    // Before anything is appended.
    let positions = cache.room_for(sequences, sizes.tokens)?;
    let at_once = if cache.config().window.is_some() { WINDOWED_TOKENS } else { sizes.tokens };
    for first in (0..sizes.tokens).step_by(at_once.max(1)) {
        let tokens = at_once.min(sizes.tokens - first);
        cache.extend(sequences, tokens)?;
        let of_entry = |(entry, (sequence, positions)): (usize, (&usize, &Range<usize>))| Queries {
            sequence: *sequence,
            position: positions.start + first,
            tokens,
            first_row: entry * sizes.tokens + first,
        };
        let queries: Vec<Queries> = sequences.iter().zip(&positions).enumerate().map(of_entry).collect();
        append_all(cache, &queries, k, v);
        let AttentionOptions { scale, softcap, .. } = *options;
        let attention = Attention { cache, queries: &queries, heads: sizes.heads, scale, sinks, softcap };
        attend(&attention, Rows { values: &q, stride: width }, &mut out);
    }
    sequences.iter().for_each(|sequence| cache.free_unseen(*sequence));
    let shape = (sizes.batch, sizes.tokens, width);
    Ok(Tensor::from_vec(T::round_all(out), shape, &Device::Cpu)?)
}

/// The numbers of a contiguous tensor, widened if need be.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here computes with")]
fn numbers<'a>(storage: &'a Storage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    Ok(match storage {
        Storage::Cpu(CpuStorage::F32(all)) => Cow::Borrowed(contiguous(all, layout)?),
        Storage::Cpu(CpuStorage::F16(all)) => Cow::Owned(cpu::widened::<f16>(contiguous(all, layout)?)),
        Storage::Cpu(CpuStorage::BF16(all)) => Cow::Owned(cpu::widened::<bf16>(contiguous(all, layout)?)),
        _ => return Err(unsupported_dtype("attention", storage.dtype()).into()),
    })
}
