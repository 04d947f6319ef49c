//! Step plans of weights whose columns are not in the order of their inputs: x is brought into it by a launch, with the norm in it.

use crate::device;
use crate::gpu::captures;
use crate::packed::{bits, flat, random, relative_error, tensor};
use crate::steps::kv_format;
use candle_core::{DType, Device, Tensor};
use candle_nn::{LayerNorm, RmsNorm};
use candle_quant::nn::ReorderedTensor;
use candle_quant::step::{
    AttentionBlock, FeedForwardBlock, HeadBlock, StepBuilder, StepNorm, StepPlan, StepToken,
};
use candle_quant::{DeviceKvCache, Embedding, KvCache, KvCacheConfig, Linear, QuantFormat};

const HIDDEN: usize = 128;
const INNER: usize = 192;
const VOCABULARY: usize = 96;

/// The order of a layer's columns: none, or one of these numbers, with 32 columns behind that no input belongs to.
#[derive(Clone, Copy)]
enum Order {
    OfInputs,
    Own(usize),
    Filled(usize),
}
use Order::{Filled, OfInputs, Own};

fn linear(n: usize, k: usize, seed: u64, order: Order, device: &Device) -> Linear {
    let format = QuantFormat::affine(4, 32).unwrap();
    let packed = |k| random(&[n, k], format, DType::F16, seed).to_device(device).unwrap();
    let step = |number: usize| [1, 5, 7, 11][number % 4] * 2 + 3;
    let (own, more) = match order {
        OfInputs => return Linear::new(packed(k), None),
        Own(number) => (number, 0),
        Filled(number) => (number, 32),
    };
    // Steps have no factor in common with K, but for those of 3.
    let mut columns: Vec<u32> = (0..k).map(|place| (place * step(own) % k) as u32).collect();
    let mut seen = vec![false; k];
    let is_order = columns.iter().all(|column| !std::mem::replace(&mut seen[*column as usize], true));
    if !is_order {
        columns = (0..k as u32).rev().collect();
        columns.rotate_left(own);
    }
    for place in 0..more {
        columns.insert(place * 3, u32::MAX);
    }
    Linear::new(ReorderedTensor::new(packed(k + more), &columns, k).unwrap(), None)
}

/// A layer and a head; with means that are subtracted, and biases of norms, in one kind.
fn plan(orders: [Order; 8], has_means: bool, device: &Device, dtype: DType) -> StepPlan {
    let numbers = |seed| {
        let numbers = (tensor(&[HIDDEN], seed) * 0.3).unwrap();
        (numbers + 1.).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let table = random(&[VOCABULARY, HIDDEN], QuantFormat::affine(4, 32).unwrap(), DType::F16, 70);
    let table = Embedding::from_quant(table.to_device(device).unwrap(), dtype).unwrap();
    let rms = RmsNorm::new(numbers(71), 1e-6);
    let mean = LayerNorm::new(numbers(72), (numbers(73) - 1.).unwrap(), 1e-6);
    let norm = || if has_means { StepNorm::from(&mean) } else { StepNorm::from(&rms) };
    let mut plan = StepBuilder::new(&table, 1.).unwrap();
    let [q, k, v, o, gate, up, down, head] = orders;
    let of = |n, k, seed, order| linear(n, k, seed, order, device);
    let (q, k) = (of(128, HIDDEN, 80, q), of(64, HIDDEN, 81, k));
    let (v, o) = (of(64, HIDDEN, 82, v), of(HIDDEN, 128, 83, o));
    let block = AttentionBlock::new([&q, &k, &v, &o], 64);
    plan.attention(AttentionBlock { norm: Some(norm()), ..block }).unwrap();
    let (gate, up) = (of(INNER, HIDDEN, 84, gate), of(INNER, HIDDEN, 85, up));
    let down = of(HIDDEN, INNER, 86, down);
    let block = FeedForwardBlock::new(Some(&gate), &up, &down);
    plan.feed_forward(FeedForwardBlock { norm: Some(norm()), ..block }).unwrap();
    plan.head(HeadBlock::new(norm(), &of(VOCABULARY, HIDDEN, 87, head))).unwrap()
}

#[test]
fn columns_of_any_order_are_those_of_the_inputs() {
    let Some(device) = device() else { return };
    let _captures = captures();
    let kinds = [
        // Queries, keys and values share an order, as do gate and up: launches are 2, 1, 2, 2, 2, beside those of both ends.
        ([Own(0), Own(0), Own(0), Own(1), Own(2), Own(2), Own(3), OfInputs], false, Some(11)),
        (
            [Filled(0), Filled(0), Filled(0), Filled(1), Filled(2), Filled(2), Filled(3), Filled(0)],
            false,
            Some(12),
        ),
        ([Own(0), Own(1), OfInputs, Filled(1), OfInputs, Own(2), OfInputs, Own(1)], false, None),
        ([OfInputs, Filled(0), Filled(0), OfInputs, Filled(2), Own(2), Own(0), Own(1)], true, None),
    ];
    for (index, (orders, has_means, launches)) in kinds.into_iter().enumerate() {
        let on_cpu = plan(orders, has_means, &Device::Cpu, DType::F32);
        for (dtype, sequences) in [(DType::F32, 1), (DType::BF16, 1), (DType::BF16, 3), (DType::F16, 2)] {
            let what = format!("kind {index}, {dtype:?}, {sequences} sequences");
            let there = plan(orders, has_means, &device, dtype);
            let [mut step, mut eager] = [(); 2].map(|()| there.on_device(sequences, dtype).unwrap());
            let format = kv_format(dtype);
            let config = KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(1, 64) };
            let mut cached = [DeviceKvCache::new(config).unwrap()];
            let mut cached_on_cpu = [KvCache::new(KvCacheConfig::new(1, 64)).unwrap()];
            for position in 0..4 {
                let id = |sequence: usize| ((position * 37 + sequence * 11 + 5) % VOCABULARY) as u32;
                let ids: Vec<u32> = (0..sequences).map(id).collect();
                let ids = Tensor::new(ids, &device).unwrap();
                let logits = step.run(&ids, &mut cached).unwrap();
                assert!(
                    launches.is_none_or(|launches| dtype == DType::F32 || step.launches() == Some(launches)),
                    "{what}: {:?}",
                    step.launches()
                );
                let token = StepToken { id: id(0), sequence: 0, position };
                let expected = flat(&on_cpu.run(&[token], &mut cached_on_cpu, &[0]).unwrap());
                let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
                let first = logits.narrow(0, 0, 1).unwrap();
                let error = relative_error(&flat(&first), &expected);
                let limit = if dtype == DType::F32 { 1e-5 } else { 5e-2 };
                assert!(error < limit, "{what}, position {position}: {error:.2e}");
                if position == 3 {
                    assert!(step.is_captured());
                    assert!(cached[0].truncate(position));
                    let again = eager.run(&ids, &mut cached).unwrap();
                    assert!(!eager.is_captured() && bits(&again) == bits(&logits), "{what}");
                }
            }
        }
    }
}
