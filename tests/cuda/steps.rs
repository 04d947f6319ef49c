//! Step plans on a device: one graph for every position, with the bits of launches that come one by one.

use crate::gpu::{between_captures, captures, device_with_own_stream, driver_calls};
use crate::packed::{bits, flat, relative_error};
use crate::{device, is_about_memory, nth_device};
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::Lora;
use candle_quant::ops::{prefill_attention, sample, AttentionOptions, SampleOptions};
use candle_quant::step::{
    AttentionBlock, DeviceStep, FeedForwardBlock, HeadBlock, StepBuilder, StepPlan, StepToken, Turn,
};
use candle_quant::{
    embedding, linear_no_bias, rms_norm, Checkpoint, DeviceKvCache, Error, KvCache, KvCacheConfig, KvFormat,
    Linear, VarBuilder,
};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

/// What the second layer sees.
const WINDOW: usize = 40;

/// Two layers of the bundled model: four heads of 64 elements, on two heads of keys. With a layer's down projection.
pub fn plan(device: &Device, dtype: DType) -> (StepPlan, Linear) {
    let checkpoint = Checkpoint::open(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny")).unwrap();
    let vb = VarBuilder::from_checkpoint(&checkpoint, dtype, device).pp("model");
    let table = embedding(640, 256, vb.pp("embed_tokens")).unwrap();
    let inverse_frequencies = (0..32).map(|pair| 10_000f32.powf(-(pair as f32) / 32.)).collect();
    let turn = Turn { inverse_frequencies, ..Turn::default() };
    let linear = |inputs, outputs, vb: VarBuilder| linear_no_bias(inputs, outputs, vb).unwrap();
    let norm = |size, vb: VarBuilder| rms_norm(size, 1e-6, vb).unwrap();
    let mut plan = StepBuilder::new(&table, 1.).unwrap();
    let mut last = None;
    for layer in 0..2 {
        let layer = vb.pp("layers").pp(layer);
        let (attn, mlp) = (layer.pp("self_attn"), layer.pp("mlp"));
        let projections = [("q_proj", 256), ("k_proj", 128), ("v_proj", 128), ("o_proj", 256)];
        let [q, k, v, o] = projections.map(|(name, rows)| linear(256, rows, attn.pp(name)));
        plan.attention(AttentionBlock {
            norm: Some((&norm(256, layer.pp("input_layernorm"))).into()),
            q_norm: Some((&norm(64, attn.pp("q_norm"))).into()),
            k_norm: Some((&norm(64, attn.pp("k_norm"))).into()),
            turn: Some(&turn),
            ..AttentionBlock::new([&q, &k, &v, &o], 64)
        })
        .unwrap();
        let (gate, up) = (linear(256, 512, mlp.pp("gate_proj")), linear(256, 512, mlp.pp("up_proj")));
        let down = linear(512, 256, mlp.pp("down_proj"));
        plan.feed_forward(FeedForwardBlock {
            norm: Some((&norm(256, layer.pp("post_attention_layernorm"))).into()),
            ..FeedForwardBlock::new(Some(&gate), &up, &down)
        })
        .unwrap();
        last = Some(down);
    }
    let (norm, head) = (norm(256, vb.pp("norm")), table.as_linear());
    (plan.head(HeadBlock::new(&norm, &head)).unwrap(), last.unwrap())
}

/// Of keys and values beside activations of a dtype.
pub fn kv_format(dtype: DType) -> KvFormat {
    match dtype {
        DType::F32 => KvFormat::F32,
        DType::F16 => KvFormat::F16,
        DType::BF16 => KvFormat::Bf16,
        other => panic!("caches have no {other:?}"),
    }
}

pub fn caches(dtype: DType, max_tokens: usize) -> Vec<DeviceKvCache> {
    let format = kv_format(dtype);
    let config = KvCacheConfig { keys: format, values: format, max_tokens, ..KvCacheConfig::new(2, 64) };
    let windowed = KvCacheConfig { window: Some(WINDOW), ..config };
    [config, windowed].map(|config| DeviceKvCache::new(config).unwrap()).into()
}

/// The same on the CPU.
pub fn on_cpu() -> (StepPlan, Vec<KvCache>) {
    let config = KvCacheConfig::new(2, 64);
    let windowed = KvCacheConfig { window: Some(WINDOW), ..config };
    let caches = [config, windowed].map(|config| KvCache::new(config).unwrap());
    (plan(&Device::Cpu, DType::F32).0, caches.into())
}

pub fn id(position: usize, sequence: usize) -> u32 {
    ((position * 37 + sequence * 101 + 5) % 640) as u32
}

fn ids(position: usize, sequences: usize, device: &Device) -> Tensor {
    let ids: Vec<u32> = (0..sequences).map(|sequence| id(position, sequence)).collect();
    Tensor::new(ids, device).unwrap()
}

#[test]
fn a_graph_serves_every_position() {
    let Some(device) = device() else { return };
    let _captures = captures();
    // Tiles of keys, shares of blocks, the window, and what the caches begin with; between these nothing but zeros is cached.
    let watched = [0, 1, 15, 16, 17, 39, 40, 41, 63, 64, 65, 127, 128, 200, 255, 256, 257];
    let steps = |last| {
        (0..=66).chain(126..=129).chain(199..=201).chain(254..=258).take_while(move |step| *step <= last)
    };
    for (dtype, sequences, last) in [(DType::BF16, 1, 258), (DType::BF16, 3, 41), (DType::F32, 1, 42)] {
        let (plan, _) = plan(&device, dtype);
        let mut caches = caches(dtype, usize::MAX);
        let mut step = plan.on_device(sequences, dtype).unwrap();
        let (on_cpu, mut caches_on_cpu) = on_cpu();
        // Of memory, one tile of keys shows what all do.
        let last = if is_about_memory() { 17 } else { last };
        for position in steps(last) {
            let skipped = position - caches[0].len();
            if skipped > 0 {
                // As a prompt: the second cache is a ring, which goes round at 128.
                let zeros = |heads| Tensor::zeros((sequences, skipped, heads, 64), dtype, &device).unwrap();
                let (q, kv, options) = (zeros(4), zeros(2), AttentionOptions::default());
                for cache in &mut caches {
                    prefill_attention(&q, &kv, &kv, cache, options).unwrap().expect("a kernel");
                }
            }
            let logits = step.run(&ids(position, sequences, &device), &mut caches).unwrap();
            assert_eq!((logits.dims(), logits.dtype()), (&[sequences, 640][..], dtype));
            // Made anew when the caches have grown.
            assert_eq!(step.is_captured(), position % 256 != 0, "position {position}");
            if dtype == DType::BF16 {
                assert_eq!(step.launches(), Some(5 * 2 + 2));
            } else {
                let token = StepToken { id: id(position, 0), sequence: 0, position };
                let expected = flat(&on_cpu.run(&[token], &mut caches_on_cpu, &[0]).unwrap());
                let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
                let error = relative_error(&flat(&logits), &expected);
                assert!(error < 1e-5, "position {position}: {error:.2e}");
            }
            if watched.contains(&position) {
                assert!(caches.iter_mut().all(|cache| cache.truncate(position)));
                let mut eager = plan.on_device(sequences, dtype).unwrap();
                let expected = eager.run(&ids(position, sequences, &device), &mut caches).unwrap();
                assert!(!eager.is_captured());
                assert!(
                    bits(&logits) == bits(&expected),
                    "{dtype:?}, {sequences} sequences, position {position}"
                );
            }
        }
    }
}

/// What a step draws in its graph is what is drawn from its logits.
#[test]
fn tokens_are_drawn_in_the_graph() {
    let Some(device) = device() else { return };
    let _captures = captures();
    let (plan, _) = plan(&device, DType::BF16);
    let greedy = SampleOptions::GREEDY;
    let warm = SampleOptions { temperature: 0.9, ..greedy };
    let choices = [
        (greedy, 1),
        (warm, 2),
        (SampleOptions { top_k: Some(7), ..warm }, 5),
        (SampleOptions { top_p: Some(0.7), ..warm }, 5),
        (SampleOptions { top_k: Some(40), top_p: Some(0.9), min_p: Some(0.02), ..warm }, 8),
    ];
    // One for all choices, between which nothing but the end of its steps changes.
    let (mut cached_there, mut there) = (caches(DType::BF16, 99), plan.on_device(2, DType::BF16).unwrap());
    for (options, launches) in choices.into_iter().chain([choices[1], choices[0]]) {
        let (mut cached_here, mut here) = (caches(DType::BF16, 99), plan.on_device(2, DType::BF16).unwrap());
        cached_there.iter_mut().for_each(DeviceKvCache::clear);
        let mut known = [[3u32, 57]; 2];
        for position in 0..4 {
            let logits = here.run(&Tensor::new(&known[0], &device).unwrap(), &mut cached_here).unwrap();
            known[0] = sample(&logits, &options, 42, position).unwrap().try_into().unwrap();
            let drawn = there.next(&known[1], &mut cached_there, &options, 42, position).unwrap();
            known[1] = drawn.try_into().unwrap();
            assert_eq!(known[0], known[1], "{options:?}, position {position}");
        }
        assert_eq!(there.launches(), Some(5 * 2 + 2 + launches), "{options:?}");
    }
}

/// Once it is captured, a token is three calls: whether somebody captures, the launch, waiting for it. Nothing is allocated.
#[test]
fn a_token_takes_few_calls_of_the_driver() {
    let Some(device) = device() else { return };
    let _captures = captures();
    let (plan, _) = plan(&device, DType::BF16);
    let (mut caches, mut step) = (caches(DType::BF16, 256), plan.on_device(1, DType::BF16).unwrap());
    let options = SampleOptions { temperature: 0.8, ..SampleOptions::GREEDY };
    let mut next =
        |id: u32, position: usize| step.next(&[id], &mut caches, &options, 1, position as u64).unwrap()[0];
    let first = next(3, 0);
    let mut token = next(first, 1);
    let names = [
        None,
        Some(c"cuGraphLaunch"),
        Some(c"cuLaunchKernelEx"),
        Some(c"cuMemAllocAsync"),
        Some(c"cuEventCreate"),
    ];
    let counts = || names.map(driver_calls);
    let before = counts();
    const TOKENS: usize = 100;
    for position in 2..2 + TOKENS {
        token = next(token, position);
    }
    let counted = [0, 1, 2, 3, 4].map(|i| Some(counts()[i]? - before[i]?));
    // On a GPU nobody counts.
    if let [Some(all), launches, kernels, allocations, events] = counted {
        assert!(all <= 3 * TOKENS, "{all} calls for {TOKENS} tokens");
        assert_eq!([launches, kernels, allocations, events], [Some(TOKENS), Some(0), Some(0), Some(0)]);
    }
}

/// A step belongs to no thread, ways of drawing may alternate, and another device may be in use in between.
#[test]
fn steps_move_between_threads_and_devices() {
    let Some(device) = device() else { return };
    // Between threads on any machine.
    let (other, _captures) = (nth_device(1), captures());
    let (plan, _) = plan(&device, DType::BF16);
    let options = [0.7, 1.3, 0.].map(|temperature| SampleOptions { temperature, ..SampleOptions::GREEDY });
    let tokens = |moves: bool| {
        let (mut caches, mut step) = (caches(DType::BF16, 99), plan.on_device(1, DType::BF16).unwrap());
        let mut tokens = vec![3u32];
        for position in 0..12 {
            let last = [*tokens.last().unwrap()];
            let options = &options[position / 2 % 3];
            let mut next = || step.next(&last, &mut caches, options, 5, position as u64).unwrap()[0];
            let token = match moves {
                false => next(),
                true => {
                    // The other device is this thread's, then.
                    if let Some(other) = &other {
                        Tensor::new(&last, other).unwrap().to_vec1::<u32>().unwrap();
                    }
                    if position % 3 != 0 {
                        next()
                    } else {
                        std::thread::scope(|scope| scope.spawn(next).join()).unwrap()
                    }
                }
            };
            tokens.push(token);
        }
        (tokens, step.is_captured())
    };
    assert_eq!(tokens(true), tokens(false));
    assert!(tokens(true).1);
}

/// Whoever waits for the device ends captures, those of a step with them: it is captured later.
#[test]
fn a_capture_that_somebody_ends() {
    let Some(device) = device() else { return };
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let (plan, _) = plan(&device, DType::BF16);
    // Whether a later step was captured, if the second one was not, for somebody waited.
    let captured = || {
        let (mut caches, mut step) = (caches(DType::BF16, 99), plan.on_device(1, DType::BF16).unwrap());
        let mut run = |position| {
            step.run(&ids(position, 1, &device), &mut caches).unwrap();
            step.is_captured()
        };
        run(0);
        let (waits, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let at_once = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    // Refused, where it ends a capture.
                    let _ = stream.context().synchronize();
                    waits.store(true, Ordering::Relaxed);
                }
            });
            while !waits.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let at_once = catch_unwind(AssertUnwindSafe(|| run(1)));
            is_over.store(true, Ordering::Relaxed);
            at_once
        });
        (!at_once.unwrap()).then(|| (2..5).any(run))
    };
    let later = between_captures(|| (0..50).find_map(|_| captured()));
    assert!(later.expect("nothing has ended a capture"), "never captured");
}

/// Steps that are captured, wait for another thread, and give their memory back, end nobody's capture.
#[test]
fn captures_of_others_go_on() {
    let (Some(device), Some(capturing)) = (device(), device_with_own_stream()) else { return };
    let (plan, _) = plan(&device, DType::BF16);
    let stream = capturing.as_cuda_device().unwrap().cuda_stream();
    let _captures = captures();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let steps = || {
        let (mut caches, mut step) = (caches(DType::BF16, 99), plan.on_device(1, DType::BF16).unwrap());
        let mut run = |position| drop(step.run(&ids(position, 1, &device), &mut caches).unwrap());
        [0, 1].into_iter().for_each(&mut run);
        std::thread::scope(|scope| scope.spawn(|| run(2)).join()).unwrap();
        assert!(step.is_captured());
    };
    std::thread::scope(|scope| scope.spawn(steps).join()).unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.end_capture(flags).unwrap();
}

/// A step takes whichever caches it is given, also when others have made them grow.
#[test]
fn a_step_serves_other_caches() {
    let Some(device) = device() else { return };
    let (plan, _) = plan(&device, DType::BF16);
    let step = || plan.on_device(1, DType::BF16).unwrap();
    let mut shared = step();
    let mut texts = [(); 2].map(|()| [(); 2].map(|()| caches(DType::BF16, 999)));
    for position in 0..4 {
        for (text, [one, other]) in texts.iter_mut().enumerate() {
            if position == 3 && text == 0 {
                let zeros = Tensor::zeros((1, 300, 2, 64), DType::BF16, &device).unwrap();
                for cache in one.iter_mut().chain(other.iter_mut()) {
                    cache.append(&zeros, &zeros).unwrap();
                }
            }
            let id = ids(position + 7 * text, 1, &device);
            let [found, expected] = [shared.run(&id, one).unwrap(), step().run(&id, other).unwrap()];
            assert!(bits(&found) == bits(&expected), "text {text}, position {position}");
        }
    }
}

#[test]
fn caches_say_whether_they_have_room() {
    let Some(device) = device() else { return };
    let (plan, _) = plan(&device, DType::BF16);
    let (mut caches, mut step) = (caches(DType::BF16, 999), plan.on_device(1, DType::BF16).unwrap());
    assert!(!caches[0].has_room(1, 1));
    step.run(&ids(0, 1, &device), &mut caches).unwrap();
    assert!(caches[0].has_room(1, 255) && !caches[0].has_room(1, 256) && !caches[0].has_room(2, 1));
}

#[test]
fn what_a_step_cannot_take_is_refused() {
    let Some(device) = device() else { return };
    let (plan, down) = plan(&device, DType::BF16);
    let told = |result: candle_quant::Result<DeviceStep>| result.unwrap_err().to_string();
    for sequences in [0, 17] {
        assert!(told(plan.on_device(sequences, DType::BF16)).contains("expected 1 to 16"));
    }
    assert!(told(plan.on_device(1, DType::F64)).contains("F32, F16 or BF16"));

    let mut step = plan.on_device(1, DType::BF16).unwrap();
    let mut two = caches(DType::BF16, 2);
    let run = |step: &mut DeviceStep, ids: &Tensor, caches: &mut [DeviceKvCache]| {
        step.run(ids, caches).unwrap_err()
    };
    let one = ids(0, 1, &device);
    for wrong in [ids(0, 2, &device), ids(0, 1, &Device::Cpu), one.to_dtype(DType::I64).unwrap()] {
        assert!(run(&mut step, &wrong, &mut two).to_string().contains("[1] of U32"));
    }
    assert!(run(&mut step, &one, &mut two[..1]).to_string().contains("2, one for each layer"));
    let mut others = caches(DType::F32, 2);
    assert!(run(&mut step, &one, &mut others).to_string().contains("BF16 for 1 sequences"));
    let greedy = SampleOptions::GREEDY;
    let outside = step.next(&[640], &mut two, &greedy, 0, 0).unwrap_err().to_string();
    assert!(outside.contains("each below 640"), "{outside}");
    let wrong = SampleOptions { top_k: Some(0), ..greedy };
    assert!(step.next(&[1], &mut two, &wrong, 0, 0).unwrap_err().to_string().contains("top-k"));
    assert!(step
        .next(&[1, 2], &mut two, &greedy, 0, 0)
        .unwrap_err()
        .to_string()
        .contains("one for each sequence"));
    assert!(two.iter().all(DeviceKvCache::is_empty));

    // A row of NaN, as embeddings on a device have it.
    let nan = step.run(&Tensor::new(&[640u32], &device).unwrap(), &mut two).unwrap();
    let nan = nan.to_dtype(DType::F32).unwrap();
    assert!(nan.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|logit| logit.is_nan()));
    two[1].clear();
    assert!(run(&mut step, &one, &mut two).to_string().contains("[1] tokens, as the first"));
    two[0].clear();
    for _ in 0..2 {
        step.run(&one, &mut two).unwrap();
    }
    let full = run(&mut step, &one, &mut two);
    assert!(matches!(full, Error::OutOfCache { needed: 3, max_tokens: 2 }), "{full}");
    assert_eq!(two[0].len(), 2);

    let zeros = |rows, columns| Tensor::zeros((rows, columns), DType::F32, &device).unwrap();
    let lora = Lora { a: zeros(2, 512), b: zeros(256, 2), scale: 1., magnitude: None };
    down.adapters().add("mine", lora).unwrap();
    two.iter_mut().for_each(DeviceKvCache::clear);
    let adapted = run(&mut step, &one, &mut two);
    assert!(adapted.to_string().contains("an adapter in a step plan"), "{adapted}");
    down.adapters().set_active("mine", false);
    step.run(&one, &mut two).unwrap();
}
