//! Steps on a CUDA device against the CPU's.

use super::*;
use crate::CacheOptions;
use candle_quant::KvFormat;

/// The first CUDA device, a real one or the pretended one of `scripts/test-cuda.sh`; none with a message.
fn device() -> Option<Device> {
    nth_device(0)
}

pub(super) fn nth_device(ordinal: usize) -> Option<Device> {
    match Device::new_cuda(ordinal) {
        Ok(device) => Some(device),
        Err(error) if std::env::var("CANDLE_QUANT_REQUIRE_CUDA").as_deref() == Ok("1") => {
            panic!("CANDLE_QUANT_REQUIRE_CUDA is set, and there is no CUDA device {ordinal}: {error}")
        }
        Err(error) => {
            eprintln!("skipped, for there is no CUDA device {ordinal}: {error}");
            None
        }
    }
}

/// Single tokens behind a prompt.
const STEPS: usize = 6;

/// Of one token, and longer than the share of a block of the attention kernels.
pub(super) const PROMPTS: [usize; 2] = [1, 66];

/// The logits of single tokens behind prompts, for two texts.
pub(super) fn logits(model: &mut Model, prompts: &[usize]) -> Vec<f32> {
    let mut all = Vec::new();
    for &prompt in prompts {
        let tokens = prompt + STEPS;
        let ids: Vec<u32> = (0..2 * tokens).map(|index| (index * 7 % 96) as u32).collect();
        let ids = Tensor::from_vec(ids, (2, tokens), model.device()).unwrap();
        model.clear_kv_cache();
        model.expect_tokens(tokens);
        model.forward_last(&ids.narrow(1, 0, prompt).unwrap().contiguous().unwrap(), 0).unwrap();
        for position in prompt..tokens {
            let id = ids.narrow(1, position, 1).unwrap().contiguous().unwrap();
            let logits = model.forward_last(&id, position).unwrap().to_dtype(DType::F32).unwrap();
            all.extend(logits.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
    }
    all
}

/// Root mean square of differences, by that of the numbers.
pub(super) fn distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let differences = squares(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    (differences / squares(&mut expected.iter().copied())).sqrt()
}

#[test]
fn steps_of_a_device_compute_what_the_cpu_does() {
    let Some(device) = device() else { return };
    let mut problems = Vec::new();
    for mut kind in planned_kinds() {
        kind["head_dim"] = json!(64);
        if kind["model_type"] == "phi3" {
            // LongRoPE has a factor for each pair; the second text is a long one.
            for factors in ["short_factor", "long_factor"] {
                let first = kind["rope_scaling"][factors][0].clone();
                kind["rope_scaling"][factors] = json!(vec![first; 24]);
            }
            kind["max_position_embeddings"] = json!(128);
            kind["original_max_position_embeddings"] = json!(64);
        }
        let name = kind["model_type"].to_string();
        let dtypes = [(DType::F32, 2e-6), (DType::BF16, 2e-2), (DType::F16, 2e-3)];
        // F16 takes the kernels that BF16 takes: one kind shows that.
        let count = if kind["model_type"] == "gemma2" { 3 } else { 2 };
        let config = Config::from_json(&with_sizes(&kind)).unwrap();
        let (has_experts, has_states) = (config.moe.is_some(), config.linear.is_some());
        let prompts = if has_experts { &PROMPTS[..1] } else { &PROMPTS };
        for (dtype, bound) in dtypes.into_iter().take(count) {
            // Where two scores are nearly alike, rounded activations choose the other expert.
            let bound = if has_experts && dtype != DType::F32 { 3. * bound } else { bound };
            // What linear attention gives is normalized, however small it is.
            let bound = if has_states { 1.5 * bound } else { bound };
            // The CPU computes in f32, whatever the dtype of weights and cache.
            let expected = logits(&mut random_on(&Device::Cpu, dtype, &kind), prompts);
            let mut model = random_on(&device, dtype, &kind);
            let found = logits(&mut model, prompts);
            let Some((_, step)) = model.steps.last() else {
                problems.push(format!("{name} {dtype:?}: no plan"));
                continue;
            };
            let distance = distance(&found, &expected);
            if !(distance <= bound && step.is_captured()) {
                problems.push(format!("{name} {dtype:?}: {distance:.2e} of {bound:.2e}, {step:?}"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Prompts and steps, of plans and layer by layer, to caches of codes: those that the CPU has.
#[test]
fn caches_of_codes() {
    let Some(device) = device() else { return };
    let kinds = planned_kinds()
        .into_iter()
        .filter(|kind| kind["model_type"] == "qwen3" || kind["model_type"] == "gemma2");
    for mut kind in kinds {
        kind["head_dim"] = json!(64);
        for (keys, values) in [(KvFormat::Affine8, KvFormat::Affine8), (KvFormat::Affine8, KvFormat::Affine4)]
        {
            let cache = CacheOptions { keys: Some(keys), values: Some(values), ..Default::default() };
            let options = ModelOptions { cache, ..Default::default() };
            for (dtype, share) in [(DType::F32, 0.25), (DType::BF16, 1.)] {
                let expected = logits(&mut random_with(&Device::Cpu, dtype, &kind, options), &PROMPTS);
                let native = logits(&mut random_on(&Device::Cpu, dtype, &kind), &PROMPTS);
                // Where numbers differ in the last bit, a code may be the next one.
                let lost = distance(&expected, &native);
                let mut model = random_with(&device, dtype, &kind, options);
                assert_eq!(model.cache_formats(), (keys, values));
                let found = logits(&mut model, &PROMPTS);
                assert!(model.steps.last().is_some_and(|(_, step)| step.is_captured()));
                model.plan = None;
                let by_layer = logits(&mut model, &PROMPTS);
                let bound = share * lost + if dtype == DType::F32 { 0. } else { 2e-2 };
                for found in [found, by_layer] {
                    // What codes lose is there, too, where that is more than rounding.
                    assert!(
                        lost < 4e-2 || distance(&found, &native) > 0.5 * lost,
                        "{kind} {dtype:?} {values}: no codes"
                    );
                    let distance = distance(&found, &expected);
                    assert!(
                        distance <= bound,
                        "{kind} {dtype:?} {keys} {values}: {distance:.2e} of {bound:.2e} ({lost:.2e})"
                    );
                }
            }
        }
    }
}

/// Texts that go round rings, in prompts and steps: what the CPU computes, in the memory of windows.
#[test]
fn windows_are_rings() {
    let Some(device) = device() else { return };
    for (name, rows) in [("mistral", 2 * 128), ("gemma3_text", 128 + 512)] {
        let kind = planned_kinds().into_iter().find(|kind| kind["model_type"] == name);
        let mut kind = kind.expect("a kind with a window of 6 tokens");
        kind["head_dim"] = json!(64);
        let mut models = [&Device::Cpu, &device].map(|device| random_on(device, DType::BF16, &kind));
        let mut check = |tokens: usize, keep: usize| {
            let [found, expected] = models.each_mut().map(|model| {
                let begin = keep.min(model.cached_tokens());
                assert_eq!(model.truncate_kv_cache(keep), begin);
                let ids: Vec<u32> = (begin..begin + tokens).map(|index| (index * 7 % 96) as u32).collect();
                let ids = Tensor::from_vec(ids, (1, tokens), model.device()).unwrap();
                let logits = model.forward_last(&ids, begin).unwrap().to_dtype(DType::F32).unwrap();
                logits.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            });
            let distance = distance(&found, &expected);
            assert!(distance <= 2e-2, "{name}: {distance:.2e} behind {tokens} tokens");
        };
        for tokens in [50, 50, 26, 1, 1, 1, 1, 60, 1, 64, 1, 1, 1] {
            check(tokens, usize::MAX);
        }
        // As guesses that were wrong.
        check(3, 252);
        check(1, 254);
        assert_eq!(models[1].cache_size_in_bytes(), rows * 2 * 2 * 64 * 2);
        // What windows have left behind is gone, and with it the text.
        assert_eq!(models.each_mut().map(|model| model.truncate_kv_cache(100)), [0, 0]);
    }
}

#[test]
fn formats_that_a_device_has_no_cache_for() {
    let told = |keys, values, dtype| {
        let options = CacheOptions { keys, values, max_tokens: None };
        options.validate(false, dtype).map_err(|error| error.to_string())
    };
    let (codes, halves) = (Some(KvFormat::Affine4), Some(KvFormat::F16));
    assert_eq!(told(codes, Some(KvFormat::Affine8), DType::F32), Ok(()));
    assert_eq!(told(halves, None, DType::F16), Ok(()));
    for (keys, values, dtype) in
        [(codes, None, DType::F16), (halves, halves, DType::BF16), (halves, codes, DType::F16)]
    {
        let told = told(keys, values, dtype).unwrap_err();
        assert!(told.contains("choose 8bit or 4bit for both"), "{told}");
    }
}
