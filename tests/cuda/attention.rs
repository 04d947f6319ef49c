//! Attention of one new token to a cache: what it sees, in f64; what the cache holds afterwards.

use crate::packed::{bits, flat, refused, relative_error, tensor};
use crate::steps::kv_format;
use crate::{device, is_about_memory};
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::{attention, decode_attention, AttentionOptions};
use candle_quant::{DeviceKvCache, KvCache, KvCacheConfig, KvFormat};
use half::{bf16, f16};

const DTYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

/// Sequences, heads, heads of keys, elements of a head, and the position of the new token.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub sequences: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub position: usize,
    pub window: Option<usize>,
    pub is_chunked: bool,
    pub sinks: bool,
    pub softcap: Option<f32>,
}

pub const CASE: Case = Case {
    sequences: 1,
    heads: 8,
    kv_heads: 2,
    head_dim: 64,
    position: 40,
    window: None,
    is_chunked: false,
    sinks: false,
    softcap: None,
};

impl Case {
    pub fn config(&self, dtype: DType) -> KvCacheConfig {
        let format = kv_format(dtype);
        KvCacheConfig {
            window: self.window,
            is_chunked: self.is_chunked,
            keys: format,
            values: format,
            ..KvCacheConfig::new(self.kv_heads, self.head_dim)
        }
    }

    pub fn first_seen(&self) -> usize {
        match self.window {
            None => 0,
            Some(window) if self.is_chunked => self.position / window * window,
            Some(window) => (self.position + 1).saturating_sub(window),
        }
    }

    /// So that some keys count much more than others.
    pub fn scale(&self) -> f32 {
        4. / (self.head_dim as f32).sqrt()
    }

    /// Queries of the new token, keys and values of all, `[B, T, heads, head_dim]`.
    pub fn operands(&self, dtype: DType) -> [Tensor; 3] {
        let rounded = |tokens, heads, seed| {
            let numbers = tensor(&[self.sequences, tokens, heads, self.head_dim], seed);
            numbers.to_dtype(dtype).unwrap()
        };
        let tokens = self.position + 1;
        [
            rounded(1, self.heads, 900),
            rounded(tokens, self.kv_heads, 901),
            rounded(tokens, self.kv_heads, 902),
        ]
    }

    pub fn sinks(&self) -> Option<Tensor> {
        self.sinks.then(|| tensor(&[self.heads], 903))
    }

    /// `[B, heads, head_dim]`.
    pub fn expected(&self, [q, k, v]: &[Tensor; 3]) -> Vec<f64> {
        let (q, k, v) = (flat(q), flat(k), flat(v));
        let sinks = self.sinks().as_ref().map(flat);
        let (group, size) = (self.heads / self.kv_heads, self.head_dim);
        let head = |index: usize| {
            let (sequence, head) = (index / self.heads, index % self.heads);
            let row = |all: &[f32], token: usize| -> Vec<f64> {
                let row = (sequence * (self.position + 1) + token) * self.kv_heads + head / group;
                all[row * size..][..size].iter().map(|x| f64::from(*x)).collect()
            };
            let seen = self.first_seen()..=self.position;
            let score = |token: usize| {
                let dot: f64 =
                    row(&k, token).iter().zip(&q[index * size..]).map(|(k, q)| k * f64::from(*q)).sum();
                let score = dot * f64::from(self.scale());
                self.softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
            };
            let scores: Vec<f64> = seen.clone().map(score).collect();
            let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let largest = scores.iter().fold(sink, |largest, score| largest.max(*score));
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            let total = total + (sink - largest).exp();
            let mut sums = vec![0.; size];
            for (token, score) in seen.zip(scores) {
                let weight = (score - largest).exp() / total;
                sums.iter_mut().zip(row(&v, token)).for_each(|(sum, v)| *sum += weight * v);
            }
            sums
        };
        (0..self.sequences * self.heads).flat_map(head).collect()
    }

    /// The new token after those before it, of which some cannot be seen, and others were taken back: they are NaN.
    fn decode(&self, [q, k, v]: &[Tensor; 3], device: &Device) -> (Option<Tensor>, DeviceKvCache) {
        let mut cache = DeviceKvCache::new(self.config(q.dtype())).unwrap();
        let (first, position) = (self.first_seen(), self.position);
        let shape = |tokens| (self.sequences, tokens, self.kv_heads, self.head_dim);
        let nan = |tokens| {
            Tensor::full(f32::NAN, shape(tokens), &Device::Cpu).unwrap().to_dtype(q.dtype()).unwrap()
        };
        let mut append = |rows: [&Tensor; 2]| {
            // CUDA has no empty memory.
            if rows[0].elem_count() > 0 {
                let [k, v] = rows.map(|rows| rows.to_device(device).unwrap());
                cache.append(&k, &v).unwrap();
            }
        };
        append([&nan(first), &nan(first)]);
        append([k, v].map(|all| all.narrow(1, first, position - first).unwrap()).each_ref());
        append([&nan(20), &nan(20)]);
        assert!(cache.truncate(position));
        let sinks = self.sinks().map(|sinks| sinks.to_device(device).unwrap());
        let options = AttentionOptions {
            scale: self.scale(),
            sinks: sinks.as_ref(),
            softcap: self.softcap,
            ..Default::default()
        };
        let [k, v] = [k, v].map(|all| all.narrow(1, position, 1).unwrap().to_device(device).unwrap());
        let y = decode_attention(&q.to_device(device).unwrap(), &k, &v, &mut cache, options).unwrap();
        (y, cache)
    }
}

/// The relative error that rounding makes.
pub fn error_of_rounding(numbers: &[f64], dtype: DType) -> f64 {
    let rounded = |x: &f64| match dtype {
        DType::F16 => f16::from_f64(*x).to_f32(),
        _ => bf16::from_f64(*x).to_f32(),
    };
    relative_error(&numbers.iter().map(rounded).collect::<Vec<_>>(), numbers)
}

/// Against f64: no more than a tenth above what rounding outputs once makes. Then the rows of the cache.
#[track_caller]
fn check(case: Case, dtype: DType, device: &Device) {
    let operands = case.operands(dtype);
    let (y, mut cache) = case.decode(&operands, device);
    let y = y.unwrap_or_else(|| panic!("{case:?} {dtype:?}: no kernel"));
    assert_eq!(y.dims(), [case.sequences, 1, case.heads * case.head_dim]);
    assert_eq!((y.dtype(), cache.len()), (dtype, case.position + 1));
    let expected = case.expected(&operands);
    let error = relative_error(&flat(&y), &expected);
    let most = if dtype == DType::F32 { 1e-6 } else { 1.1 * error_of_rounding(&expected, dtype) };
    assert!(error <= most, "{case:?} {dtype:?}: relative error {error:.2e}, at most {most:.2e}");

    // One more token shows the rows.
    let [_, k, v] = operands;
    let new = k.narrow(1, 0, 1).unwrap().to_device(device).unwrap();
    let rows = cache.append(&new, &new).unwrap();
    let (first, seen) = (case.first_seen(), case.position + 1 - case.first_seen());
    for (rows, expected) in rows.iter().zip([k, v]) {
        let expected = expected.narrow(1, first, seen).unwrap().transpose(1, 2).unwrap();
        assert_eq!(bits(&rows.narrow(2, first, seen).unwrap()), bits(&expected), "{case:?} {dtype:?}: rows");
    }
}

/// Lengths around tiles, blocks and warps.
#[test]
fn every_length_in_every_dtype() {
    let Some(device) = device() else { return };
    for (index, keys) in [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 257].into_iter().enumerate() {
        let case = Case { position: keys - 1, sinks: index % 2 == 1, ..CASE };
        DTYPES.iter().for_each(|dtype| check(case, *dtype, &device));
    }
}

#[test]
fn every_size_of_heads() {
    let Some(device) = device() else { return };
    for (index, head_dim) in [64, 80, 96, 128, 256].into_iter().enumerate() {
        for position in [0, 16 + index, 70 + 15 * index] {
            let case = Case { head_dim, position, heads: 6, sinks: position > 16, ..CASE };
            DTYPES.iter().for_each(|dtype| check(case, *dtype, &device));
        }
    }
    // In f32 any other, too.
    for head_dim in [8, 33, 100, 192] {
        check(Case { head_dim, ..CASE }, DType::F32, &device);
    }
}

/// Query heads for each of keys, more than a block takes among them; several sequences.
#[test]
fn every_group_of_heads() {
    let Some(device) = device() else { return };
    for (group, kv_heads) in [(1, 3), (2, 1), (4, 2), (5, 1), (8, 2), (9, 1), (16, 1), (16, 2)] {
        let case = Case { heads: group * kv_heads, kv_heads, sequences: 1 + kv_heads, position: 76, ..CASE };
        for dtype in DTYPES {
            check(Case { sinks: true, ..case }, dtype, &device);
            check(Case { head_dim: 80, ..case }, dtype, &device);
        }
    }
}

/// What lies before a window is not seen, nor is what belongs to the chunk before.
#[test]
fn windows_and_chunks() {
    let Some(device) = device() else { return };
    for (window, position) in [
        (1, 0),
        (1, 33),
        (16, 47),
        (16, 48),
        (17, 48),
        (64, 63),
        (64, 64),
        (65, 200),
        (128, 126),
        (128, 127),
        (128, 128),
        (220, 300),
    ] {
        for (is_chunked, sinks) in [(false, true), (true, false)] {
            let case = Case { window: Some(window), is_chunked, sinks, position, ..CASE };
            DTYPES.iter().for_each(|dtype| check(case, *dtype, &device));
        }
    }
}

#[test]
fn scores_that_are_capped() {
    let Some(device) = device() else { return };
    for softcap in [0.5, 3., 50.] {
        let case = Case { softcap: Some(softcap), sinks: true, position: 90, ..CASE };
        DTYPES.iter().for_each(|dtype| check(case, *dtype, &device));
    }
}

/// More keys than a block takes, so that blocks join what they found; run twice, for what a launch may leave behind.
#[test]
fn splits_of_many_keys() {
    let Some(device) = device() else { return };
    for (heads, position, head_dim) in [(8, 1400, 64), (16, 1100, 128)] {
        for dtype in DTYPES {
            let case = Case { heads, position, head_dim, sinks: true, ..CASE };
            check(case, dtype, &device);
            if !is_about_memory() {
                check(Case { position: position - 130, ..case }, dtype, &device);
            }
        }
    }
}

/// So many key heads that few splits are left, and each warp has several tiles of one.
const MANY_HEADS: Case = Case { heads: 64, kv_heads: 64, position: 560, sinks: true, ..CASE };

#[test]
fn several_tiles_for_each_warp() {
    let Some(device) = device() else { return };
    for (position, dtype) in [(560, DType::F16), (543, DType::BF16), (310, DType::F32)] {
        check(Case { position, ..MANY_HEADS }, dtype, &device);
    }
}

/// The same with long heads, for each warp of which a card may have room for one tile; run by itself, too, for other cards.
#[test]
fn heads_of_128() {
    let Some(device) = device() else { return };
    check(Case { head_dim: 128, position: 300, ..MANY_HEADS }, DType::F16, &device);
}

/// The largest logit grows from tile to tile, far above those before.
#[test]
fn logits_far_apart() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for case in [Case { kv_heads: 1, position: 130, ..CASE }, MANY_HEADS] {
            let tokens = case.position + 1;
            let [q, k, v] = case.operands(dtype);
            let growth = (0..tokens).map(|token| 8. * token as f32 / tokens as f32).collect();
            let growth = Tensor::from_vec(growth, (1, tokens, 1, 1), &Device::Cpu).unwrap();
            let k = k.broadcast_mul(&growth.to_dtype(dtype).unwrap()).unwrap();
            let operands = [q, k, v];
            let expected = case.expected(&operands);
            let y = case.decode(&operands, &device).0.unwrap();
            let error = relative_error(&flat(&y), &expected);
            let most = if dtype == DType::F32 { 5e-6 } else { 1.1 * error_of_rounding(&expected, dtype) };
            assert!(error <= most, "{case:?} {dtype:?}: relative error {error:.2e}, at most {most:.2e}");
        }
    }
}

/// Token after token from the first on, over the borders of tiles and of the cache's memory, which grows: as a cache on the
/// CPU. Nothing else is launched in between, nor copied behind the memory's growth.
#[test]
fn a_text_token_by_token() {
    let Some(device) = device() else { return };
    let (kv_heads, heads, head_dim) = (1, 2, 64);
    for dtype in [DType::F16, DType::F32] {
        let case = Case { kv_heads, heads, head_dim, window: Some(40), position: 271, ..CASE };
        let mut here = KvCache::new(case.config(dtype)).unwrap();
        let mut there = DeviceKvCache::new(case.config(dtype)).unwrap();
        let options = AttentionOptions { scale: case.scale(), ..Default::default() };
        let [q, k, v] = [(heads, 910), (kv_heads, 911), (kv_heads, 912)]
            .map(|(heads, seed)| tensor(&[272, 1, 1, heads, head_dim], seed).to_dtype(dtype).unwrap());
        let on = [&q, &k, &v].map(|all| all.to_device(&device).unwrap());
        let at = |all: [&Tensor; 3], token| all.map(|all| all.get(token).unwrap());
        let mut outputs = Vec::new();
        for token in 0..272 {
            // Another prompt, which is taken back.
            if token == 0 {
                let [_, k, v] = on
                    .each_ref()
                    .map(|all| all.narrow(0, 0, 250).unwrap().reshape((1, 250, (), head_dim)).unwrap());
                there.append(&v, &k).unwrap();
                assert!(there.truncate(0));
            }
            let [q, k, v] = at(on.each_ref(), token);
            outputs.push(decode_attention(&q, &k, &v, &mut there, options).unwrap().unwrap());
        }
        for (token, y) in outputs.iter().enumerate() {
            let [q, k, v] = at([&q, &k, &v], token);
            let expected = attention(&q, &k, &v, &mut here, options).unwrap();
            let (y, expected) = (flat(y), flat(&expected));
            let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
            let error = relative_error(&y, &expected);
            let most = if dtype == DType::F32 { 1e-6 } else { 5e-4 };
            assert!(error < most, "{dtype:?} token {token}: {error:.2e}");
        }
    }
}

#[test]
fn what_has_no_kernel_changes_nothing() {
    let Some(device) = device() else { return };
    let none = |head_dim, dtype, tokens, device: &Device| {
        let case = Case { head_dim, ..CASE };
        let mut cache = DeviceKvCache::new(case.config(dtype)).unwrap();
        let zeros = |heads| Tensor::zeros((1, tokens, heads, head_dim), dtype, device).unwrap();
        let (q, k) = (zeros(8), zeros(2));
        let y = decode_attention(&q, &k, &k, &mut cache, AttentionOptions::default()).unwrap();
        assert!(y.is_none() && cache.is_empty(), "{head_dim} {dtype:?} {tokens}");
    };
    none(72, DType::F16, 1, &device);
    none(512, DType::F32, 1, &device);
    none(64, DType::F16, 2, &device);
    none(64, DType::F16, 1, &Device::Cpu);
}

#[test]
fn wrong_operands_are_refused() {
    let Some(device) = device() else { return };
    let zeros = |shape: [usize; 4], dtype| Tensor::zeros(&shape[..], dtype, &device).unwrap();
    let config = KvCacheConfig { max_tokens: 3, ..CASE.config(DType::F16) };
    let mut cache = DeviceKvCache::new(config).unwrap();
    let (q, k) = (zeros([1, 1, 8, 64], DType::F16), zeros([1, 1, 2, 64], DType::F16));
    let options = AttentionOptions::default();
    let mut told = |q: &Tensor, k: &Tensor, options| {
        refused(decode_attention(q, k, k, &mut cache, options).map_err(candle_core::Error::from))
    };
    assert!(told(&zeros([1, 1, 7, 64], DType::F16), &k, options).contains("a multiple of 2 heads"));
    assert!(told(&q, &zeros([1, 1, 3, 64], DType::F16), options).contains("shape of keys"));
    assert!(told(&q, &zeros([1, 1, 2, 64], DType::F32), options).contains("dtype of keys"));
    let wide = [[1, 1, 8, 64], [1, 1, 2, 64]].map(|shape| zeros(shape, DType::F32));
    assert!(told(&wide[0], &wide[1], options).contains("keys for a cache"));
    assert!(told(&q, &k.to_device(&Device::Cpu).unwrap(), options).contains("device"));
    let of_one = AttentionOptions { sequences: Some(&[0]), ..options };
    assert!(told(&q, &k, of_one).contains("sequences of a DeviceKvCache"));
    let capped = AttentionOptions { softcap: Some(-1.), ..options };
    assert!(told(&q, &k, capped).contains("softcap"));
    let sinks = Tensor::zeros(7, DType::F32, &device).unwrap();
    let sunk = AttentionOptions { sinks: Some(&sinks), ..options };
    assert!(told(&q, &k, sunk).contains("attention sinks"));

    let [keys, _] =
        cache.append(&zeros([1, 2, 2, 64], DType::F16), &zeros([1, 2, 2, 64], DType::F16)).unwrap();
    let own = keys.narrow(2, 1, 1).unwrap().transpose(1, 2).unwrap();
    let told =
        refused(decode_attention(&q, &own, &own, &mut cache, options).map_err(candle_core::Error::from));
    assert!(told.contains("a part of the cache itself"), "{told}");
    // Another batch than that of the tokens in the cache.
    let of_two = [8, 2].map(|heads| zeros([2, 1, heads, 64], DType::F16));
    let told = refused(
        decode_attention(&of_two[0], &of_two[1], &of_two[1], &mut cache, options)
            .map_err(candle_core::Error::from),
    );
    assert!(told.contains("as many sequences as before"), "{told}");
    assert!(decode_attention(&q, &k, &k, &mut cache, options).unwrap().is_some());
    let full = decode_attention(&q, &k, &k, &mut cache, options).unwrap_err();
    assert!(matches!(full, candle_quant::Error::OutOfCache { needed: 4, max_tokens: 3 }), "{full}");
    assert_eq!(cache.len(), 3);
    let quantized = DeviceKvCache::new(KvCacheConfig { keys: KvFormat::Affine8, ..config });
    assert!(quantized.unwrap_err().to_string().contains("choose f32, f16 or bf16 for both"));
}
