//! Attention of several new tokens to a cache, each of which sees what it would see alone: against f64.

use crate::attention::{error_of_rounding, Case, CASE};
use crate::packed::{bits, flat, relative_error, tensor};
use crate::{device, repeats};
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::{prefill_attention, AttentionOptions};
use candle_quant::{DeviceKvCache, KvCacheConfig, KvFormat};

/// Several new tokens behind others, by what kernels there are for prompts.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    case: Case,
    /// New tokens, of which the last one is at the case's position.
    tokens: usize,
}

impl Prompt {
    fn first_position(&self) -> usize {
        self.case.position + 1 - self.tokens
    }

    /// Queries of the new tokens, keys and values of all.
    fn operands(&self, dtype: DType) -> [Tensor; 3] {
        let [_, k, v] = self.case.operands(dtype);
        let Case { sequences, heads, head_dim, .. } = self.case;
        [tensor(&[sequences, self.tokens, heads, head_dim], 910).to_dtype(dtype).unwrap(), k, v]
    }

    /// `[B, T, heads, head_dim]`: what each token sees, one by one.
    fn expected(&self, [q, k, v]: &[Tensor; 3]) -> Vec<f64> {
        let Case { sequences, heads, head_dim, .. } = self.case;
        let size = heads * head_dim;
        let mut all = vec![0.; sequences * self.tokens * size];
        for token in 0..self.tokens {
            let position = self.first_position() + token;
            let case = Case { position, ..self.case };
            let seen = |rows: &Tensor| rows.narrow(1, 0, position + 1).unwrap().contiguous().unwrap();
            let q = q.narrow(1, token, 1).unwrap().contiguous().unwrap();
            let of_token = case.expected(&[q, seen(k), seen(v)]);
            for (sequence, heads) in of_token.chunks(size).enumerate() {
                all[(sequence * self.tokens + token) * size..][..size].copy_from_slice(heads);
            }
        }
        all
    }

    /// The cache has what comes before, and rows that are NaN where nobody looks: before the first window, and behind.
    fn prefill(&self, [q, k, v]: &[Tensor; 3], device: &Device) -> (Option<Tensor>, DeviceKvCache) {
        let mut cache = DeviceKvCache::new(self.case.config(q.dtype())).unwrap();
        let there = |tensor: &Tensor| tensor.to_device(device).unwrap();
        let first = self.first_position();
        let unseen = Case { position: first, ..self.case }.first_seen();
        let nan = |tokens| {
            let shape = (self.case.sequences, tokens, self.case.kv_heads, self.case.head_dim);
            there(&Tensor::full(f32::NAN, shape, &Device::Cpu).unwrap().to_dtype(q.dtype()).unwrap())
        };
        let mut append = |rows: [Tensor; 2]| {
            if rows[0].elem_count() > 0 {
                cache.append(&rows[0], &rows[1]).unwrap();
            }
        };
        if unseen > 0 {
            append([nan(unseen), nan(unseen)]);
        }
        if first > unseen {
            append(
                [k, v].map(|rows| {
                    there(&rows.narrow(1, unseen, first - unseen).unwrap().contiguous().unwrap())
                }),
            );
        }
        append([nan(self.tokens + 20), nan(self.tokens + 20)]);
        assert!(cache.truncate(first));
        let sinks = self.case.sinks().map(|sinks| there(&sinks));
        let options = AttentionOptions {
            scale: self.case.scale(),
            sinks: sinks.as_ref(),
            softcap: self.case.softcap,
            ..Default::default()
        };
        let [k, v] = [k, v].map(|rows| there(&rows.narrow(1, first, self.tokens).unwrap()));
        (prefill_attention(&there(q), &k, &v, &mut cache, options).unwrap(), cache)
    }

    /// Compares with f64: errors are hardly larger than those of rounding.
    #[track_caller]
    fn check(&self, device: &Device) {
        for dtype in [DType::F16, DType::BF16] {
            let operands = self.operands(dtype);
            let (y, cache) = self.prefill(&operands, device);
            let y = y.unwrap_or_else(|| panic!("no kernel for {self:?} {dtype:?}"));
            let Case { sequences, heads, head_dim, position, .. } = self.case;
            assert_eq!((y.dims(), y.dtype()), (&[sequences, self.tokens, heads * head_dim][..], dtype));
            assert_eq!(cache.lens(), vec![position + 1; sequences]);
            let expected = self.expected(&operands);
            let (error, rounding) =
                (relative_error(&flat(&y), &expected), error_of_rounding(&expected, dtype));
            assert!(error <= 1.1 * rounding, "{self:?} {dtype:?}: {error:.2e} > 1.1 * {rounding:.2e}");
            if repeats() {
                assert_eq!(
                    bits(&y),
                    bits(&self.prefill(&operands, device).0.unwrap()),
                    "{self:?}: not the same twice"
                );
            }
        }
    }
}

/// Blocks of rows that end within a warp, a token's heads, a tile of keys; prompts at the beginning and behind others.
#[test]
fn prompts_of_any_length() {
    let Some(device) = device() else { return };
    for (tokens, position, heads, kv_heads) in [
        (2, 1, 8, 2),
        (5, 4, 2, 2),
        (64, 63, 1, 1),
        (65, 64, 3, 1),
        (7, 130, 8, 2),
        (33, 200, 6, 2),
        (130, 129, 16, 1),
    ] {
        Prompt { case: Case { position, heads, kv_heads, ..CASE }, tokens }.check(&device);
    }
}

#[test]
fn prompts_with_heads_of_every_size() {
    let Some(device) = device() else { return };
    for head_dim in [64, 80, 96, 128, 256] {
        let case = Case { head_dim, position: 90, sinks: head_dim == 96, ..CASE };
        Prompt { case, tokens: 40 }.check(&device);
    }
}

/// Windows that begin within a tile, end in it, are smaller than a prompt, and in chunks.
#[test]
fn prompts_within_windows() {
    let Some(device) = device() else { return };
    for (window, is_chunked) in [(1, false), (17, false), (64, false), (100, false), (48, true), (64, true)] {
        for (tokens, position) in [(70, 69), (40, 190)] {
            let case = Case { window: Some(window), is_chunked, position, sinks: window == 17, ..CASE };
            Prompt { case, tokens }.check(&device);
        }
    }
}

#[test]
fn prompts_of_several_sequences_with_sinks_and_a_cap() {
    let Some(device) = device() else { return };
    let case =
        Case { sequences: 3, heads: 6, kv_heads: 2, position: 75, sinks: true, softcap: Some(3.), ..CASE };
    Prompt { case, tokens: 20 }.check(&device);
}

/// Weights of much the same size: their rounding would be as large as that of outputs.
#[test]
fn prompts_that_see_all_keys_alike() {
    let Some(device) = device() else { return };
    let case = Case { head_dim: 96, position: 150, softcap: Some(0.3), ..CASE };
    Prompt { case, tokens: 40 }.check(&device);
}

/// Prompts of sequences that stand at positions of their own, of all and of some: the bits of each alone.
#[test]
fn prompts_of_sequences_of_different_lengths() {
    let Some(device) = device() else { return };
    let sinks = tensor(&[6], 903).to_device(&device).unwrap();
    let kinds = [
        (KvFormat::F16, KvFormat::F16, 64, Some(50), DType::F16),
        (KvFormat::Affine8, KvFormat::Affine4, 64, Some(50), DType::F32),
        (KvFormat::Affine4, KvFormat::Affine8, 256, None, DType::BF16),
    ];
    for (keys, values, head_dim, window, dtype) in kinds {
        let config = KvCacheConfig { keys, values, window, ..KvCacheConfig::new(2, head_dim) };
        let options = AttentionOptions { scale: 0.2, sinks: Some(&sinks), ..Default::default() };
        let (mut together, mut alone) = (
            DeviceKvCache::of_sequences(config, 3).unwrap(),
            [(); 3].map(|()| DeviceKvCache::new(config).unwrap()),
        );
        let parts: [(usize, Option<&[usize]>); 5] =
            [(37, Some(&[1])), (5, Some(&[2])), (20, None), (9, Some(&[2, 0])), (70, Some(&[1, 2]))];
        for (part, (tokens, sequences)) in parts.into_iter().enumerate() {
            let asked = sequences.unwrap_or(&[0, 1, 2]);
            let rows = |heads, seed| {
                let rows = tensor(&[asked.len(), tokens, heads, head_dim], seed + 10 * part as u64);
                rows.to_dtype(dtype).unwrap().to_device(&device).unwrap()
            };
            let (q, k, v) = (rows(6, 920), rows(2, 921), rows(2, 922));
            let all = AttentionOptions { sequences, ..options };
            let y = prefill_attention(&q, &k, &v, &mut together, all).unwrap().unwrap();
            for (entry, &sequence) in asked.iter().enumerate() {
                let of_entry = |rows: &Tensor| rows.narrow(0, entry, 1).unwrap().contiguous().unwrap();
                let (q, k, v) = (of_entry(&q), of_entry(&k), of_entry(&v));
                let expected = prefill_attention(&q, &k, &v, &mut alone[sequence], options).unwrap().unwrap();
                assert!(bits(&of_entry(&y)) == bits(&expected), "{keys} part {part}, sequence {sequence}");
            }
            assert_eq!(together.lens(), alone.each_ref().map(DeviceKvCache::len));
        }
        let rows = |heads| Tensor::zeros((2, 3, heads, head_dim), dtype, &device).unwrap();
        let mut told = |sequences: &[usize]| {
            let options = AttentionOptions { sequences: Some(sequences), ..options };
            prefill_attention(&rows(6), &rows(2), &rows(2), &mut together, options).unwrap_err().to_string()
        };
        assert!(told(&[1, 1]).contains("2 different ones") && told(&[1, 3]).contains("one below 3"));
        assert!(told(&[1]).contains("2 different ones"));
        assert_eq!(together.lens(), [29, 127, 104]);
    }
}

/// Nothing is appended then.
#[test]
fn prompts_without_a_kernel() {
    let Some(device) = device() else { return };
    let prompt = Prompt { case: CASE, tokens: 20 };
    let (y, cache) = prompt.prefill(&prompt.operands(DType::F32), &device);
    assert!(y.is_none() && cache.len() == prompt.first_position());
    let prompt = Prompt { case: Case { head_dim: 48, ..CASE }, tokens: 20 };
    let (y, cache) = prompt.prefill(&prompt.operands(DType::F16), &device);
    assert!(y.is_none() && cache.len() == prompt.first_position());
    let prompt = Prompt { case: CASE, tokens: 20 };
    let (y, cache) = prompt.prefill(&prompt.operands(DType::F16), &Device::Cpu);
    assert!(y.is_none() && cache.len() == prompt.first_position());
}
