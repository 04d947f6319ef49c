//! Attention of a long prompt needs the cache, its output and a little more: no scores of all pairs of tokens.

use candle_core::{Device, Tensor};
use candle_quant::ops::{attention, AttentionOptions};
use candle_quant::{KvCache, KvCacheConfig, KvFormat};

#[path = "common/allocations.rs"]
mod allocations;
use allocations::{now, peak_of, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TOKENS: usize = 2048;
const MIB: usize = 1 << 20;

/// What an attention allocates beyond what it leaves.
fn overhead(cache: &mut KvCache, q: &Tensor, k: &Tensor) -> usize {
    let before = now();
    let options = AttentionOptions { scale: 0.125, ..Default::default() };
    let (y, peak) = peak_of(|| attention(q, k, k, cache, options).unwrap());
    let left = now() - before;
    assert!(left <= cache.size_in_bytes() + y.elem_count() * 4 + MIB, "{left}");
    peak - left
}

#[test]
fn a_long_prompt_needs_no_matrix_of_scores() {
    let random = |heads| Tensor::randn(0f32, 1., (1, TOKENS, heads, 64), &Device::Cpu).unwrap();
    let (q, k) = (random(16), random(8));
    for (keys, window) in
        [(KvFormat::F32, None), (KvFormat::F16, None), (KvFormat::F16, Some(128)), (KvFormat::Affine4, None)]
    {
        let config = KvCacheConfig { keys, values: keys, window, ..KvCacheConfig::new(8, 64) };
        let mut cache = KvCache::new(config).unwrap();
        // All scores would be 256 MiB; blocks of a window come and go 512 tokens at a time.
        let first = overhead(&mut cache, &q, &k);
        assert!(first <= 4 * MIB, "{keys} {window:?}: {first}");
        let size = cache.size_in_bytes();
        cache.clear();
        // The blocks are used again.
        assert!(overhead(&mut cache, &q, &k) <= 4 * MIB);
        assert_eq!(cache.size_in_bytes(), size);
    }
}
