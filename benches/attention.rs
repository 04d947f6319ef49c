//! Attention with a KV cache on the CPU, beside candle's own operations (matmul, mask, softmax, matmul on keys and values in
//! f32), in turns in one run. One layer like Qwen3-0.6B's: 16 query heads on 8 key heads of 128 elements.
//!
//! `cargo bench --bench attention [-- decode|prefill]`. Times are medians. Decode: one token, GB/s of keys and values read.
//! Prefill: all tokens at once, GFLOP/s of the products that causality leaves. The error is relative (L2) to f64.

use candle_core::{DType, Device, Result, Tensor, D};
use candle_quant::ops::{attention, AttentionOptions};
use candle_quant::{KvCache, KvCacheConfig, KvFormat};
use std::time::{Duration, Instant};

const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;

/// Formats of keys and values.
const FORMATS: [(KvFormat, KvFormat); 6] = [
    (KvFormat::F32, KvFormat::F32),
    (KvFormat::F16, KvFormat::F16),
    (KvFormat::Bf16, KvFormat::Bf16),
    (KvFormat::Affine8, KvFormat::Affine8),
    (KvFormat::Affine8, KvFormat::Affine4),
    (KvFormat::Affine4, KvFormat::Affine4),
];

fn scale() -> f64 {
    1. / (HEAD_DIM as f64).sqrt()
}

fn random(tokens: usize, heads: usize) -> Result<Tensor> {
    Tensor::randn(0f32, 1., (1, tokens, heads, HEAD_DIM), &Device::Cpu)
}

fn options() -> AttentionOptions<'static> {
    AttentionOptions { scale: scale() as f32, ..Default::default() }
}

/// `softmax(scale * q * k^T) * v` for q `[1, T, heads, head_dim]` and keys and values `[1, kv_heads, S, head_dim]`, as models of
/// candle compute it; query heads that share keys are rows of one matrix.
fn with_candle(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let (len, keys) = (q.dim(1)?, k.dim(2)?);
    let rows = HEADS / KV_HEADS * len;
    let q = (q.transpose(1, 2)?.contiguous()? * scale())?.reshape((1, KV_HEADS, rows, HEAD_DIM))?;
    let mut scores = q.matmul(&k.t()?)?;
    if let Some(mask) = mask {
        let by_query = scores.reshape((1, HEADS, len, keys))?;
        scores = by_query.broadcast_add(mask)?.reshape((1, KV_HEADS, rows, keys))?;
    }
    let weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
    let y = weights.matmul(v)?.reshape((1, HEADS, len, HEAD_DIM))?;
    y.transpose(1, 2)?.flatten_from(D::Minus2)
}

fn causal_mask(len: usize, dtype: DType) -> Result<Tensor> {
    let values: Vec<f32> = (0..len)
        .flat_map(|query| (0..len).map(move |key| if key > query { f32::NEG_INFINITY } else { 0. }))
        .collect();
    Tensor::from_vec(values, (len, len), &Device::Cpu)?.to_dtype(dtype)
}

/// The relative error (L2) of `got` to `want`.
fn error(got: &Tensor, want: &Tensor) -> Result<f64> {
    let got = got.to_dtype(DType::F64)?;
    let square = |x: Tensor| x.sqr()?.sum_all()?.to_scalar::<f64>();
    Ok((square((got - want)?)? / square(want.clone())?).sqrt())
}

fn time<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let start = Instant::now();
    let result = work()?;
    Ok((result, start.elapsed()))
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(0., Duration::as_secs_f64)
}

fn by_head(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.contiguous()
}

fn decode(context: usize) -> Result<()> {
    let rounds = (200_000 / context).clamp(20, 200);
    let (k, v) = (random(context, KV_HEADS)?, random(context, KV_HEADS)?);
    let q = random(context, HEADS)?;
    let mut caches = Vec::new();
    for (keys, values) in FORMATS {
        let mut cache =
            KvCache::new(KvCacheConfig { keys, values, ..KvCacheConfig::new(KV_HEADS, HEAD_DIM) })?;
        // In chunks, as prompts come.
        for first in (0..context).step_by(256) {
            let len = 256.min(context - first);
            let part = |x: &Tensor| x.narrow(1, first, len);
            attention(&part(&q)?, &part(&k)?, &part(&v)?, &mut cache, options())?;
        }
        caches.push(cache);
    }
    let (mut all_k, mut all_v) = (by_head(&k)?, by_head(&v)?);
    let mut ours = vec![Vec::new(); FORMATS.len()];
    let (mut theirs, mut errors) = (Vec::new(), vec![0.; FORMATS.len() + 1]);
    for round in 0..rounds {
        let (q, k, v) = (random(1, HEADS)?, random(1, KV_HEADS)?, random(1, KV_HEADS)?);
        let mut outputs = Vec::new();
        for (cache, times) in caches.iter_mut().zip(&mut ours) {
            let (y, spent) = time(|| Ok(attention(&q, &k, &v, cache, options())?))?;
            times.push(spent);
            outputs.push(y);
        }
        // Its cache does not grow here: a copy of it is not what is measured.
        if round == 0 {
            all_k = Tensor::cat(&[&all_k, &by_head(&k)?], 2)?;
            all_v = Tensor::cat(&[&all_v, &by_head(&v)?], 2)?;
        }
        let (y, spent) = time(|| with_candle(&q, &all_k, &all_v, None))?;
        theirs.push(spent);
        outputs.push(y);
        if round == 0 {
            let exact = |x: &Tensor| x.to_dtype(DType::F64);
            let want = with_candle(&exact(&q)?, &exact(&all_k)?, &exact(&all_v)?, None)?;
            for (error_of, y) in errors.iter_mut().zip(&outputs) {
                *error_of = error(y, &want)?;
            }
        }
    }
    let candle = median(theirs);
    for (index, (keys, values)) in FORMATS.into_iter().enumerate() {
        let seconds = median(std::mem::take(&mut ours[index]));
        let bytes = 2 * (context + rounds / 2) * KV_HEADS * HEAD_DIM;
        let bytes = bytes as f64 * caches[index].size_in_bytes() as f64 / numbers(&caches[index]);
        println!(
            "decode, context {context:5}, {keys:>4},{values:>4}: {:8.1} us, {:5.1} GB/s, {:5.2}x candle, error {:.1e}",
            seconds * 1e6,
            bytes / seconds / 1e9,
            candle / seconds,
            errors[index]
        );
    }
    println!(
        "decode, context {context:5}, candle f32: {:6.1} us, error {:.1e}",
        candle * 1e6,
        errors[FORMATS.len()]
    );
    Ok(())
}

/// The numbers that all blocks of a cache have room for.
fn numbers(cache: &KvCache) -> f64 {
    let config = cache.config();
    (2 * cache.len(0).next_multiple_of(64) * config.kv_heads * config.head_dim) as f64
}

fn prefill(tokens: usize) -> Result<()> {
    let rounds = (20_000 / tokens).clamp(5, 40);
    let (q, k, v) = (random(tokens, HEADS)?, random(tokens, KV_HEADS)?, random(tokens, KV_HEADS)?);
    let mask = causal_mask(tokens, DType::F32)?;
    let mut ours = vec![Vec::new(); FORMATS.len()];
    let mut theirs = Vec::new();
    let mut outputs = Vec::new();
    let mut caches = Vec::new();
    for (keys, values) in FORMATS {
        caches.push(KvCache::new(KvCacheConfig { keys, values, ..KvCacheConfig::new(KV_HEADS, HEAD_DIM) })?);
    }
    for _ in 0..rounds {
        outputs.clear();
        for (cache, times) in caches.iter_mut().zip(&mut ours) {
            cache.clear();
            let (y, spent) = time(|| Ok(attention(&q, &k, &v, cache, options())?))?;
            times.push(spent);
            outputs.push(y);
        }
        let (y, spent) = time(|| with_candle(&q, &by_head(&k)?, &by_head(&v)?, Some(&mask)))?;
        theirs.push(spent);
        outputs.push(y);
    }
    let exact = |x: &Tensor| x.to_dtype(DType::F64);
    let (k, v) = (exact(&by_head(&k)?)?, exact(&by_head(&v)?)?);
    let want = with_candle(&exact(&q)?, &k, &v, Some(&causal_mask(tokens, DType::F64)?))?;
    let errors = outputs.iter().map(|y| error(y, &want)).collect::<Result<Vec<_>>>()?;
    let candle = median(theirs);
    let operations = (4 * HEADS * HEAD_DIM * (tokens * (tokens + 1) / 2)) as f64;
    for (index, (keys, values)) in FORMATS.into_iter().enumerate() {
        let seconds = median(std::mem::take(&mut ours[index]));
        println!(
            "prefill of {tokens:4}, {keys:>4},{values:>4}: {:8.2} ms, {:5.1} GFLOP/s, {:5.2}x candle, error {:.1e}",
            seconds * 1e3,
            operations / seconds / 1e9,
            candle / seconds,
            errors[index]
        );
    }
    println!(
        "prefill of {tokens:4}, candle f32: {:6.2} ms, error {:.1e}",
        candle * 1e3,
        errors[FORMATS.len()]
    );
    Ok(())
}

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    if wants("decode") {
        for context in [128, 1024, 8192] {
            decode(context)?;
        }
    }
    if wants("prefill") {
        for tokens in [128, 512, 2048] {
            prefill(tokens)?;
        }
    }
    Ok(())
}
