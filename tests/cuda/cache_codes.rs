//! Attention to a cache of codes: what the CPU computes in f32 from the same codes.

use crate::attention::{error_of_rounding, Case, CASE};
use crate::gpu::captures;
use crate::packed::{bits, flat, relative_error, tensor};
use crate::{device, is_about_memory, repeats, steps};
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::{attention, decode_attention, prefill_attention, AttentionOptions};
use candle_quant::step::StepToken;
use candle_quant::{DeviceKvCache, KvCache, KvCacheConfig, KvFormat};

const DTYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F32];
const FORMATS: [KvFormat; 2] = [KvFormat::Affine8, KvFormat::Affine4];

/// A text in parts, each appended at once; the last one ends at the case's position.
#[derive(Clone, Debug)]
struct Text {
    case: Case,
    keys: KvFormat,
    values: KvFormat,
    parts: Vec<usize>,
}

impl Text {
    /// Of a prompt and some tokens behind it.
    fn new(case: Case, formats: [KvFormat; 2], parts: &[usize]) -> Self {
        let case = Case { position: parts.iter().sum::<usize>() - 1, ..case };
        Self { case, keys: formats[0], values: formats[1], parts: parts.to_vec() }
    }

    fn config(&self) -> KvCacheConfig {
        KvCacheConfig { keys: self.keys, values: self.values, ..self.case.config(DType::F32) }
    }

    /// Queries, keys and values of all tokens.
    fn operands(&self, dtype: DType) -> [Tensor; 3] {
        let [_, k, v] = self.case.operands(dtype);
        let Case { sequences, heads, head_dim, position, .. } = self.case;
        let q = tensor(&[sequences, position + 1, heads, head_dim], 911);
        // A large element for each head, as real keys have.
        let channel = Tensor::arange(0u32, head_dim as u32, &Device::Cpu).unwrap();
        let grown = (channel.eq(3u32).unwrap().to_dtype(DType::F32).unwrap() * 5.).unwrap() + 1.;
        let k = k.to_dtype(DType::F32).unwrap().broadcast_mul(&grown.unwrap()).unwrap();
        [q.to_dtype(dtype).unwrap(), k.to_dtype(dtype).unwrap(), v]
    }

    /// What each part sees, by `attend`.
    fn attended(
        &self,
        [q, k, v]: &[Tensor; 3],
        device: &Device,
        mut attend: impl FnMut([&Tensor; 3], AttentionOptions) -> Tensor,
    ) -> Vec<Tensor> {
        let sinks = self.case.sinks().map(|sinks| sinks.to_device(device).unwrap());
        let mut begin = 0;
        let part = |&tokens: &usize| {
            let of_part =
                [q, k, v].map(|rows| rows.narrow(1, begin, tokens).unwrap().to_device(device).unwrap());
            begin += tokens;
            let options = AttentionOptions {
                scale: self.case.scale(),
                sinks: sinks.as_ref(),
                softcap: self.case.softcap,
                ..Default::default()
            };
            attend(of_part.each_ref(), options)
        };
        self.parts.iter().map(part).collect()
    }

    fn on_device(&self, operands: &[Tensor; 3], device: &Device) -> (Vec<Tensor>, DeviceKvCache) {
        let mut cache = DeviceKvCache::new(self.config()).unwrap();
        let y = self.attended(operands, device, |[q, k, v], options| {
            let y = match q.dim(1).unwrap() {
                1 => decode_attention(q, k, v, &mut cache, options),
                _ => prefill_attention(q, k, v, &mut cache, options),
            };
            y.unwrap().unwrap_or_else(|| panic!("no kernel for {self:?}"))
        });
        (y, cache)
    }

    /// Against what the CPU makes of the same numbers in f32: its codes are the same, and products of theirs almost exact.
    #[track_caller]
    fn check(&self, dtype: DType, device: &Device) {
        let operands = self.operands(dtype);
        let (found, cache) = self.on_device(&operands, device);
        assert_eq!(cache.lens(), vec![self.case.position + 1; self.case.sequences]);
        let mut on_cpu = KvCache::new(self.config()).unwrap();
        let numbers = operands.each_ref().map(|rows| rows.to_dtype(DType::F32).unwrap());
        let expected = self.attended(&numbers, &Device::Cpu, |[q, k, v], options| {
            attention(q, k, v, &mut on_cpu, options).unwrap()
        });
        for (part, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!((found.dims(), found.dtype()), (expected.dims(), dtype));
            let expected: Vec<f64> = flat(expected).into_iter().map(f64::from).collect();
            let error = relative_error(&flat(found), &expected);
            // What is multiplied are halves: those of values, of queries that are no halves, and of the keys of prompts.
            let rounding = error_of_rounding(&expected, if dtype == DType::F32 { DType::F16 } else { dtype });
            let most = rounding * if dtype == DType::BF16 { 1.1 } else { 3. };
            assert!(
                error <= most,
                "{self:?} {dtype:?} part {part}: relative error {error:.2e}, at most {most:.2e}"
            );
        }
        if repeats() {
            let all = |y: &[Tensor]| y.iter().flat_map(bits).collect::<Vec<_>>();
            let again = self.on_device(&operands, device).0;
            assert_eq!(all(&found), all(&again), "{self:?} {dtype:?}: not the same twice");
        }
    }
}

#[test]
fn every_format_with_heads_of_every_size() {
    let Some(device) = device() else { return };
    for (index, head_dim) in [64, 80, 96, 128, 256].into_iter().enumerate() {
        for (keys, values) in FORMATS.into_iter().flat_map(|keys| FORMATS.map(|values| (keys, values))) {
            let case = Case { head_dim, sinks: keys == values, heads: 6, ..CASE };
            let text = Text::new(case, [keys, values], &[33 + index, 1, 1, 40, 1]);
            text.check(if keys == values { DType::BF16 } else { DType::F16 }, &device);
        }
    }
}

/// Fewer stages of copies on smaller cards, which `cards` has; or an error before anything is appended.
#[test]
fn what_a_card_has_room_for() {
    let Some(device) = device() else { return };
    for (head_dim, format) in
        [64, 128, 256].into_iter().flat_map(|head_dim| FORMATS.map(|format| (head_dim, format)))
    {
        let text = Text::new(Case { head_dim, ..CASE }, [format; 2], &[70, 1, 1]);
        let operands = text.operands(DType::F16);
        let mut cache = DeviceKvCache::new(text.config()).unwrap();
        let rows = operands.each_ref().map(|rows| rows.narrow(1, 0, 70).unwrap().to_device(&device).unwrap());
        let [q, k, v] = rows.each_ref();
        match prefill_attention(q, k, v, &mut cache, AttentionOptions::default()) {
            Ok(_) => text.check(DType::F16, &device),
            Err(error) => {
                assert_eq!(head_dim, 256, "{error}");
                assert!(error.to_string().contains("shared memory") && cache.is_empty(), "{error}");
            }
        }
    }
}

/// Lengths around tiles, blocks and warps, of prompts and of what comes token by token.
#[test]
fn texts_of_any_length() {
    let Some(device) = device() else { return };
    let codes = |index: usize| [FORMATS[index % 2], FORMATS[index / 2 % 2]];
    for (index, tokens) in [2, 15, 16, 17, 63, 64, 65, 129, 200].into_iter().enumerate() {
        let text = Text::new(CASE, codes(index), &[tokens, 1, 1]);
        text.check(DTYPES[index % 3], &device);
    }
    Text::new(CASE, FORMATS, &[1; 20]).check(DType::BF16, &device);
    Text::new(CASE, codes(3), &[2, 70, 5, 64]).check(DType::F32, &device);
}

/// Query heads for each of keys, more than a block takes among them; several sequences.
#[test]
fn every_group_of_heads() {
    let Some(device) = device() else { return };
    for (group, kv_heads) in [(1, 3), (5, 1), (9, 1), (16, 2)] {
        let case = Case { heads: group * kv_heads, kv_heads, sequences: kv_heads, sinks: true, ..CASE };
        for format in FORMATS {
            Text::new(case, [format; 2], &[20, 1, 1]).check(DType::F16, &device);
        }
    }
}

#[test]
fn windows_chunks_and_caps() {
    let Some(device) = device() else { return };
    for (window, is_chunked) in [(1, false), (17, false), (64, false), (100, false), (48, true)] {
        let case = Case { window: Some(window), is_chunked, sinks: window == 17, ..CASE };
        Text::new(case, [FORMATS[0]; 2], &[70, 1, 40, 1]).check(DType::BF16, &device);
        Text::new(case, [FORMATS[1]; 2], &[130, 1]).check(DType::F16, &device);
    }
    let capped = Case { softcap: Some(3.), ..CASE };
    Text::new(capped, FORMATS, &[40, 1, 5]).check(DType::BF16, &device);
}

/// More keys than a block takes, so that blocks join what they found, and rotate it back.
#[test]
fn splits_of_many_keys() {
    let Some(device) = device() else { return };
    for (format, head_dim) in [(KvFormat::Affine8, 64), (KvFormat::Affine4, 128)] {
        let case = Case { head_dim, sinks: true, ..CASE };
        // Memory that grows keeps what was there.
        Text::new(case, [format; 2], &[600, 400, 1, 1]).check(DType::F16, &device);
    }
}

/// Queries beyond the range of halves, and keys whose rows are zeros, which have no largest element.
#[test]
fn numbers_of_any_size() {
    let Some(device) = device() else { return };
    let sizes = [(1e6, 1e-6), (1e-7, 1e3), (0., 1.), (1., 0.)];
    for ((queries, keys), format) in sizes.into_iter().flat_map(|sizes| FORMATS.map(|format| (sizes, format)))
    {
        let text = Text::new(CASE, [format; 2], &[20, 1]);
        let [q, k, v] = text.operands(DType::F32);
        let operands =
            [(q * queries).unwrap(), (k * keys).unwrap(), v].map(|x| x.to_dtype(DType::BF16).unwrap());
        let (found, _) = text.on_device(&operands, &device);
        let mut on_cpu = KvCache::new(text.config()).unwrap();
        let numbers = operands.map(|rows| rows.to_dtype(DType::F32).unwrap());
        let expected = text.attended(&numbers, &Device::Cpu, |[q, k, v], options| {
            attention(q, k, v, &mut on_cpu, options).unwrap()
        });
        for (found, expected) in found.iter().zip(&expected) {
            let expected: Vec<f64> = flat(expected).into_iter().map(f64::from).collect();
            let (error, most) =
                (relative_error(&flat(found), &expected), 1.2 * error_of_rounding(&expected, DType::BF16));
            assert!(error <= most, "{queries} {keys}: {error:.2e} > {most:.2e}");
        }
    }
}

/// A key that is no number makes its group NaN, and with it what sees it; a later text is free of it.
#[test]
fn what_is_no_number_is_forgotten_with_its_text() {
    let Some(device) = device() else { return };
    let text = Text::new(CASE, [KvFormat::Affine8; 2], &[20, 1]);
    let operands = text.operands(DType::F16);
    let [q, k, v] =
        operands.each_ref().map(|rows| rows.narrow(1, 0, 20).unwrap().to_device(&device).unwrap());
    let mut cache = DeviceKvCache::new(text.config()).unwrap();
    let options = AttentionOptions { scale: text.case.scale(), ..Default::default() };
    let nan = (&k * f64::NAN).unwrap();
    let y = prefill_attention(&q, &nan, &v, &mut cache, options).unwrap().unwrap();
    assert!(flat(&y).iter().all(|y| y.is_nan()));
    cache.clear();
    let y = prefill_attention(&q, &k, &v, &mut cache, options).unwrap().unwrap();
    assert_eq!(bits(&y), bits(&text.on_device(&operands, &device).0[0]));
}

/// What lies behind a text, or before its window, is nobody's business: scales that are NaN.
#[test]
fn a_text_behind_a_longer_one() {
    let Some(device) = device() else { return };
    for (format, window) in [(KvFormat::Affine8, None), (KvFormat::Affine4, Some(8))] {
        let text = Text::new(Case { window, ..CASE }, [format; 2], &[50, 10, 20, 1, 1]);
        let operands = text.operands(DType::F16);
        let run = |first: f64| {
            let (mut cache, mut begin) = (DeviceKvCache::new(text.config()).unwrap(), 0);
            let append = |&tokens: &usize| {
                let part = |rows: &Tensor| rows.narrow(1, begin, tokens).unwrap().to_device(&device).unwrap();
                let [q, k, v] = operands.each_ref().map(part);
                let factor = if begin == 0 { first } else { 1. };
                let [k, v] = [k, v].map(|rows| (rows * factor).unwrap());
                begin += tokens;
                let options = AttentionOptions { scale: text.case.scale(), ..Default::default() };
                let y = match tokens {
                    1 => decode_attention(&q, &k, &v, &mut cache, options),
                    _ => prefill_attention(&q, &k, &v, &mut cache, options),
                };
                if begin == 50 && window.is_none() {
                    cache.clear();
                }
                bits(&y.unwrap().unwrap())
            };
            text.parts.iter().map(append).collect::<Vec<_>>()
        };
        let (found, expected) = (run(f64::NAN), run(0.));
        // The second part of a text with a window sees some of the first.
        let later = if window.is_some() { 2.. } else { 1.. };
        assert!(found[0] != expected[0] && found[later.clone()] == expected[later], "{format}");
    }
}

/// One graph for every position, with the bits of launches that come one by one; what a plan computes in f32 on the CPU.
#[test]
fn steps_of_plans() {
    let Some(device) = device() else { return };
    let _captures = captures();
    // Where a number differs in the last bit, its code may be the next one.
    let kinds = [(KvFormat::Affine8, DType::BF16, 2e-2), (KvFormat::Affine4, DType::F32, 5e-2)];
    for (format, dtype, most) in kinds {
        let (plan, _) = steps::plan(&device, dtype);
        let config = KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(2, 64) };
        let configs = [config, KvCacheConfig { window: Some(40), ..config }];
        let mut caches = configs.map(|config| DeviceKvCache::new(config).unwrap());
        let mut on_cpu = configs.map(|config| KvCache::new(config).unwrap());
        let (plan_on_cpu, _) = steps::plan(&Device::Cpu, DType::F32);
        let mut step = plan.on_device(1, dtype).unwrap();
        let last = if is_about_memory() { 17 } else { 66 };
        for position in 0..=last {
            let id = steps::id(position, 0);
            let ids = Tensor::new(&[id], &device).unwrap();
            let logits = step.run(&ids, &mut caches).unwrap();
            assert_eq!(step.is_captured(), position > 0);
            let token = StepToken { id, sequence: 0, position };
            let expected = flat(&plan_on_cpu.run(&[token], &mut on_cpu, &[0]).unwrap());
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            let error = relative_error(&flat(&logits), &expected);
            assert!(error <= most, "{format} {dtype:?}, position {position}: {error:.2e}");
            if [0, 1, 16, 39, 40, 63, 66].contains(&position) {
                assert!(caches.iter_mut().all(|cache| cache.truncate(position)));
                let mut eager = plan.on_device(1, dtype).unwrap();
                let expected = eager.run(&ids, &mut caches).unwrap();
                assert!(
                    !eager.is_captured() && bits(&logits) == bits(&expected),
                    "{format}, position {position}"
                );
            }
        }
    }
}

#[test]
fn sizes() {
    let Some(device) = device() else { return };
    let of = |keys, values| {
        let text = Text::new(Case { head_dim: 128, ..CASE }, [keys, values], &[20]);
        let cache = text.on_device(&text.operands(DType::F16), &device).1;
        cache.size_in_bytes()
    };
    // 256 rows of two heads: codes, then scale and bias of groups of 64 and of 32.
    assert_eq!(of(KvFormat::Affine8, KvFormat::Affine8), 2 * 256 * 2 * (128 + 2 * 4));
    assert_eq!(of(KvFormat::Affine8, KvFormat::Affine4), 2 * 256 * (128 + 2 * 4 + 64 + 4 * 4));
}

#[test]
fn what_codes_are_not_for() {
    let config =
        KvCacheConfig { keys: KvFormat::Affine8, values: KvFormat::Affine4, ..KvCacheConfig::new(2, 64) };
    let told = |config| DeviceKvCache::new(config).unwrap_err().to_string();
    assert!(told(KvCacheConfig { values: KvFormat::F16, ..config }).contains("codes for both"));
    assert!(told(KvCacheConfig { head_dim: 72, ..config }).contains("64, 80, 96, 128 and 256"));
    let rows = Tensor::zeros((1, 3, 2, 64), DType::F16, &Device::Cpu).unwrap();
    let mut cache = DeviceKvCache::new(config).unwrap();
    assert!(cache.append(&rows, &rows).unwrap_err().to_string().contains("prefill_attention"));
    let options = AttentionOptions::default();
    let told = prefill_attention(&rows, &rows, &rows, &mut cache, options).unwrap_err().to_string();
    assert!(
        told.contains("8bit") && told.contains("Cpu") && told.contains("choose f32, f16 or bf16"),
        "{told}"
    );
    let one = rows.narrow(1, 0, 1).unwrap();
    let told = decode_attention(&one, &one, &one, &mut cache, options).unwrap_err().to_string();
    assert!(told.contains("4bit"), "{told}");
    assert!(cache.is_empty());
}
