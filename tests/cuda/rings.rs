//! Caches whose memory is a ring: the bits of caches that keep all tokens, with which every other test of attention begins.

use crate::gpu::captures;
use crate::packed::{bits, flat, relative_error, tensor};
use crate::{device, is_about_memory, steps};
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::{attention, decode_attention, prefill_attention, AttentionOptions};
use candle_quant::{DeviceKvCache, KvCache, KvCacheConfig, KvFormat};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// Keys and values of so many elements in some format, and what activations and windows are beside it.
#[derive(Clone, Copy, Debug)]
struct Case {
    formats: [KvFormat; 2],
    dtype: DType,
    head_dim: usize,
    window: usize,
    is_chunked: bool,
}

impl Case {
    fn config(&self) -> KvCacheConfig {
        let [keys, values] = self.formats;
        let (window, is_chunked) = (Some(self.window), self.is_chunked);
        KvCacheConfig { window, is_chunked, keys, values, ..KvCacheConfig::new(KV_HEADS, self.head_dim) }
    }

    /// Queries, keys and values, `[B, T, heads, head_dim]`.
    fn operands(&self, sequences: usize, tokens: usize) -> [Tensor; 3] {
        [(HEADS, 950), (KV_HEADS, 951), (KV_HEADS, 952)].map(|(heads, seed)| {
            tensor(&[sequences, tokens, heads, self.head_dim], seed).to_dtype(self.dtype).unwrap()
        })
    }

    /// A cache that has got so much memory by a text of as many tokens that it never goes round.
    fn whole(&self, sequences: usize, tokens: usize, device: &Device) -> DeviceKvCache {
        let mut cache = DeviceKvCache::of_sequences(self.config(), sequences).unwrap();
        let [q, k, v] = self.operands(sequences, tokens).map(|all| all.to_device(device).unwrap());
        attend([&q, &k, &v], &mut cache, None);
        cache.clear();
        cache
    }
}

fn attend([q, k, v]: [&Tensor; 3], cache: &mut DeviceKvCache, sequences: Option<&[usize]>) -> Tensor {
    let options = AttentionOptions { scale: 0.2, sequences, ..Default::default() };
    let y = match (q.dim(1).unwrap(), sequences) {
        (1, None) => decode_attention(q, k, v, cache, options),
        _ => prefill_attention(q, k, v, cache, options),
    };
    y.unwrap().expect("a kernel")
}

/// Prompts that end before, at and behind the end of the ring, and go round it; tokens on both sides of it; a prompt for which a
/// ring that has gone round grows.
const PARTS: [usize; 17] = [60, 1, 64, 1, 1, 1, 1, 1, 50, 64, 11, 1, 1, 64, 130, 1, 60];

#[test]
fn a_ring_has_the_bits_of_a_cache_of_all_tokens() {
    let Some(device) = device() else { return };
    let [f16, bf16] = [KvFormat::F16, KvFormat::Bf16].map(|format| [format; 2]);
    let codes = [KvFormat::Affine8, KvFormat::Affine4];
    let swapped = [KvFormat::Affine4, KvFormat::Affine8];
    for (formats, dtype, head_dim, window, is_chunked) in [
        (f16, DType::F16, 64, 17, false),
        (bf16, DType::BF16, 80, 64, false),
        (f16, DType::F16, 256, 100, false),
        (bf16, DType::BF16, 64, 48, true),
        (codes, DType::F16, 64, 17, false),
        (swapped, DType::F32, 96, 64, false),
        (codes, DType::BF16, 256, 40, true),
    ] {
        let case = Case { formats, dtype, head_dim, window, is_chunked };
        let parts = if is_about_memory() { &PARTS[..6] } else { &PARTS[..] };
        let tokens = parts.iter().sum();
        let mut whole = case.whole(1, tokens, &device);
        let mut ring = DeviceKvCache::new(case.config()).unwrap();
        let mut on_cpu = KvCache::new(case.config()).unwrap();
        let operands = case.operands(1, tokens);
        let mut begin = 0;
        for &count in parts {
            let of_part = operands.each_ref().map(|all| all.narrow(1, begin, count).unwrap());
            begin += count;
            let [q, k, v] = of_part.each_ref().map(|all| all.to_device(&device).unwrap());
            let found = attend([&q, &k, &v], &mut ring, None);
            let expected = attend([&q, &k, &v], &mut whole, None);
            assert!(bits(&found) == bits(&expected), "{case:?}: {count} tokens up to {begin}");
            // And those are what the window sees.
            let [q, k, v] = of_part.map(|all| all.to_dtype(DType::F32).unwrap());
            let options = AttentionOptions { scale: 0.2, ..Default::default() };
            let expected = flat(&attention(&q, &k, &v, &mut on_cpu, options).unwrap());
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            let error = relative_error(&flat(&found), &expected);
            assert!(error < if dtype == DType::BF16 { 5e-3 } else { 2e-3 }, "{case:?}, {begin}: {error:.2e}");
        }
        let rows = |tokens: usize| ((window + tokens).div_ceil(64) * 64) as u64;
        let most = if is_about_memory() { 64 } else { 130 };
        assert_eq!(ring.size_in_bytes(), rows(most) * ring.token_bytes(), "{case:?}");
        assert!(whole.size_in_bytes() > ring.size_in_bytes() && whole.lens() == ring.lens());
    }
}

/// Each goes round by itself; tokens of all, and prompts of some.
#[test]
fn rings_of_sequences_of_different_lengths() {
    let Some(device) = device() else { return };
    for (formats, dtype) in
        [([KvFormat::F16; 2], DType::F16), ([KvFormat::Affine8, KvFormat::Affine4], DType::BF16)]
    {
        let case = Case { formats, dtype, head_dim: 64, window: 40, is_chunked: false };
        let mut ring = DeviceKvCache::of_sequences(case.config(), 3).unwrap();
        let mut alone = [(); 3].map(|()| case.whole(1, 400, &device));
        let parts: [(usize, Option<&[usize]>); 12] = [
            (60, Some(&[1])),
            (7, Some(&[0])),
            (62, Some(&[1, 2])),
            (1, None),
            (4, Some(&[1])),
            (1, None),
            (63, Some(&[2])),
            (1, None),
            (1, None),
            (64, Some(&[2, 0])),
            (100, Some(&[1])),
            (1, None),
        ];
        for (part, (tokens, sequences)) in parts.into_iter().enumerate() {
            let asked = sequences.unwrap_or(&[0, 1, 2]);
            let rows = |heads, seed| {
                let rows = tensor(&[asked.len(), tokens, heads, 64], seed + 10 * part as u64);
                rows.to_dtype(dtype).unwrap().to_device(&device).unwrap()
            };
            let (q, k, v) = (rows(HEADS, 960), rows(KV_HEADS, 961), rows(KV_HEADS, 962));
            let y = attend([&q, &k, &v], &mut ring, sequences);
            for (entry, &sequence) in asked.iter().enumerate() {
                let of_entry = |rows: &Tensor| rows.narrow(0, entry, 1).unwrap().contiguous().unwrap();
                let own = [&q, &k, &v].map(of_entry);
                let expected = attend(own.each_ref(), &mut alone[sequence], None);
                assert!(
                    bits(&of_entry(&y)) == bits(&expected),
                    "{formats:?} part {part}, sequence {sequence}"
                );
            }
            assert_eq!(ring.lens(), alone.each_ref().map(DeviceKvCache::len));
        }
        assert_eq!(ring.size_in_bytes(), 192 * 3 * ring.token_bytes());
    }
}

/// What is taken back comes again, as long as the window's tokens are there; else nothing changes.
#[test]
fn tokens_are_taken_back() {
    let Some(device) = device() else { return };
    let case =
        Case { formats: [KvFormat::F16; 2], dtype: DType::F16, head_dim: 64, window: 40, is_chunked: false };
    let mut ring = DeviceKvCache::new(case.config()).unwrap();
    let operands = case.operands(1, 200).map(|all| all.to_device(&device).unwrap());
    let run = |cache: &mut DeviceKvCache, tokens: usize| {
        let begin = cache.len();
        let part = operands.each_ref().map(|all| all.narrow(1, begin, tokens).unwrap());
        bits(&attend(part.each_ref(), cache, None))
    };
    for tokens in [64, 64, 60] {
        run(&mut ring, tokens);
    }
    // 128 rows: tokens 60 to 187.
    assert!(!ring.truncate(98) && ring.len() == 188);
    let first = run(&mut ring, 1);
    assert!(!ring.truncate(99) && ring.truncate(100) && ring.len() == 100);
    run(&mut ring, 60);
    run(&mut ring, 28);
    assert_eq!(run(&mut ring, 1), first);
    let told = ring.append(&operands[1], &operands[2]).unwrap_err().to_string();
    assert!(told.contains("a window has left those before token 61 behind"), "{told}");
    ring.clear();
    assert!(ring.append(&operands[1], &operands[2]).is_ok());
}

/// Nothing but rings: one graph for positions far beyond them, until the tables of turns have to grow.
#[test]
fn steps_of_rings_alone() {
    let Some(device) = device() else { return };
    let _captures = captures();
    let (plan, _) = steps::plan(&device, DType::BF16);
    let case = Case {
        formats: [KvFormat::Bf16; 2],
        dtype: DType::BF16,
        head_dim: 64,
        window: 40,
        is_chunked: false,
    };
    let caches = |sequences| [(); 2].map(|()| DeviceKvCache::of_sequences(case.config(), sequences).unwrap());
    let (mut rings, mut step) = (caches(1), plan.on_device(1, DType::BF16).unwrap());
    let mut wholes = [(); 2].map(|()| case.whole(1, 400, &device));
    let steps_of_part = if is_about_memory() { 3 } else { 10 };
    // Of 128 rows, the end of which comes at 128 and at 256, where tables have to grow, too.
    for begin in [0, 126, 252] {
        let prompt = case.operands(1, 58).map(|all| all.to_device(&device).unwrap());
        while rings[0].len() + 58 <= begin {
            rings
                .iter_mut()
                .chain(&mut wholes)
                .for_each(|cache| drop(attend(prompt.each_ref(), cache, None)));
        }
        for position in rings[0].len()..rings[0].len() + steps_of_part {
            let ids = Tensor::new(&[steps::id(position, 0)], &device).unwrap();
            // A new one has new tables.
            let mut new = plan.on_device(1, DType::BF16).unwrap();
            let [found, expected] =
                [step.run(&ids, &mut rings).unwrap(), new.run(&ids, &mut wholes).unwrap()];
            assert!(bits(&found) == bits(&expected), "position {position}");
        }
    }
    assert_eq!(rings[0].size_in_bytes(), 128 * rings[0].token_bytes());
}
