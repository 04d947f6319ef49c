//! Linear attention on a device: the operation against the CPU's, and plans of it.

use crate::device;
use crate::gpu::captures;
use crate::packed::{bits, flat, random, relative_error, tensor};
use crate::steps::kv_format;
use candle_core::{DType, Device, Tensor};
use candle_nn::RmsNorm;
use candle_quant::ops::{gated_delta_net, DeltaNetInputs, DeltaNetWeights};
use candle_quant::step::{
    AttentionBlock, DeltaNetBlock, DeltaNetProjections, HeadBlock, StepBuilder, StepCaches, StepPlan,
    StepToken,
};
use candle_quant::{
    DeltaNetConfig, DeltaNetState, DeviceKvCache, Embedding, Error, KvCache, KvCacheConfig, KvFormat, Linear,
    QuantFormat,
};

/// Heads of keys and of values, their elements, and the kernel: the last two have none on a device.
const SIZES: [[usize; 5]; 7] = [
    [1, 1, 1, 1, 1],
    [2, 6, 16, 8, 4],
    [1, 3, 17, 5, 2],
    [3, 3, 33, 40, 3],
    [1, 2, 128, 128, 4],
    [1, 2, 8, 16, 6],
    [1, 1, 200, 256, 4],
];

fn config([key_heads, value_heads, key_dim, value_dim, kernel]: [usize; 5]) -> DeltaNetConfig {
    DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, kernel }
}

/// Queries, keys, values, gates, decays, betas.
fn inputs(config: DeltaNetConfig, texts: usize, tokens: usize) -> [Tensor; 6] {
    let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = config;
    let keys = [texts, tokens, key_heads, key_dim];
    let values = [texts, tokens, value_heads, value_dim];
    [
        tensor(&keys, 1),
        tensor(&keys, 2),
        tensor(&values, 3),
        tensor(&values, 4),
        tensor(&values[..3], 5),
        tensor(&values[..3], 6),
    ]
}

fn weights(config: DeltaNetConfig) -> [Tensor; 4] {
    [
        (tensor(&[config.kernel, config.channels()], 7) * 0.5).unwrap(),
        tensor(&[config.value_heads], 8).abs().unwrap().neg().unwrap(),
        tensor(&[config.value_heads], 9),
        tensor(&[config.value_dim], 10),
    ]
}

fn run(
    [q, k, v, gate, decay, beta]: &[Tensor; 6],
    [convolution, rates, gate_bias, norm]: &[Tensor; 4],
    state: &mut DeltaNetState,
) -> Tensor {
    let weights = DeltaNetWeights { convolution, rates, gate_bias, norm, eps: 1e-6 };
    gated_delta_net(DeltaNetInputs { q, k, v, gate, decay, beta }, weights, state).unwrap()
}

fn wide(x: &Tensor) -> Vec<f64> {
    flat(x).into_iter().map(f64::from).collect()
}

#[test]
fn the_operation_is_that_of_the_cpu() {
    let Some(device) = device() else { return };
    for (sizes, (dtype, limit)) in SIZES.into_iter().flat_map(|sizes| {
        [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 3e-3)].map(|dtype| (sizes, dtype))
    }) {
        let (config, weights) = (config(sizes), weights(config(sizes)));
        let on_device = weights.each_ref().map(|x| x.to_device(&device).unwrap());
        let mut there = DeltaNetState::new(config, &device).unwrap();
        let mut here = DeltaNetState::new(config, &Device::Cpu).unwrap();
        let all = inputs(config, 2, 9).map(|x| x.to_dtype(dtype).unwrap());
        // Twice: the second text begins anew, whatever the first has left.
        for _ in 0..2 {
            for (first, tokens) in [(0, 1), (1, 5), (6, 1), (7, 2)] {
                let part = all.each_ref().map(|x| x.narrow(1, first, tokens).unwrap());
                let expected =
                    run(&part.each_ref().map(|x| x.to_dtype(DType::F32).unwrap()), &weights, &mut here);
                // Views.
                let moved =
                    all.each_ref().map(|x| x.to_device(&device).unwrap().narrow(1, first, tokens).unwrap());
                let found = run(&moved, &on_device, &mut there);
                assert_eq!((found.dims(), found.dtype()), (expected.dims(), dtype));
                let error = relative_error(&flat(&found), &wide(&expected));
                assert!(error < limit, "{sizes:?} {dtype:?}, {tokens} tokens from {first} on: {error:.2e}");
            }
            assert_eq!((there.lens(), there.size_in_bytes()), (&[9, 9][..], 2 * config.size_in_bytes()));
            there.clear();
            here.clear();
        }
    }
}

/// Of one text, the first or the last, that begins while another goes on.
#[test]
fn texts_begin_by_themselves() {
    let Some(device) = device() else { return };
    let sizes = config(SIZES[1]);
    for (device, begins) in [(&device, 0), (&device, 1), (&Device::Cpu, 0), (&Device::Cpu, 1)] {
        let weights = weights(sizes).map(|x| x.to_device(device).unwrap());
        let all = inputs(sizes, 2, 4).map(|x| x.to_device(device).unwrap());
        let mut state = DeltaNetState::new(sizes, device).unwrap();
        let expected = run(&all, &weights, &mut state);
        let part = |from: usize| all.each_ref().map(|x| x.narrow(1, from, 2).unwrap().contiguous().unwrap());
        assert!(state.truncate(begins, 0) && !state.truncate(1 - begins, 2));
        let found = run(&part(0), &weights, &mut state);
        assert_eq!(state.lens()[begins..=begins], [2]);
        assert_eq!(state.lens()[1 - begins..=1 - begins], [6]);
        let [found, expected] = [found, expected.narrow(1, 0, 2).unwrap()].map(|y| y.get(begins).unwrap());
        assert!(relative_error(&flat(&found), &wide(&expected)) < 1e-6, "{begins} on {device:?}");
        // Another number of texts would be others.
        let one = all.each_ref().map(|x| x.narrow(0, 0, 1).unwrap());
        let [q, k, v, gate, decay, beta] = &one;
        let [convolution, rates, gate_bias, norm] = &weights;
        let weights = DeltaNetWeights { convolution, rates, gate_bias, norm, eps: 1e-6 };
        let inputs = DeltaNetInputs { q, k, v, gate, decay, beta };
        let error = gated_delta_net(inputs, weights, &mut state).unwrap_err().to_string();
        assert!(error.contains("2 texts, as in the state"), "{error}");
    }
}

/// Inputs are not rounded to the dtype of each other.
#[test]
fn decays_of_f32_beside_halves() {
    let Some(device) = device() else { return };
    let sizes = config(SIZES[1]);
    let mixed = inputs(sizes, 1, 9);
    let mixed = mixed.each_ref().map(|x| match x.rank() {
        4 => x.to_dtype(DType::BF16).unwrap(),
        _ => x.clone(),
    });
    let weights = weights(sizes);
    let expected = run(&mixed, &weights, &mut DeltaNetState::new(sizes, &Device::Cpu).unwrap());
    let [mixed, weights] = [mixed.to_vec(), weights.to_vec()]
        .map(|all| all.iter().map(|x| x.to_device(&device).unwrap()).collect::<Vec<_>>());
    let (mixed, weights) = (mixed.try_into().unwrap(), weights.try_into().unwrap());
    let found = run(&mixed, &weights, &mut DeltaNetState::new(sizes, &device).unwrap());
    assert_eq!(found.dtype(), DType::BF16);
    // Both are rounded once: to the same numbers, but for ties.
    let error = relative_error(&flat(&found), &wide(&expected));
    assert!(error < 5e-4, "{error:.2e}");
}

const HIDDEN: usize = 128;
const VOCABULARY: usize = 96;
const HEAD_DIM: usize = 64;

/// How the projections of linear attention are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Grouped,
    Apart,
    /// With heads for which there is a kernel of its own.
    OfLargeHeads,
    /// Six of them, as a rank has them: more than a launch takes.
    InThree,
    /// Of these, betas have 8 bits.
    OfBits,
    Dense,
}

impl Kind {
    fn sizes(self) -> DeltaNetConfig {
        match self {
            Self::OfLargeHeads => {
                DeltaNetConfig { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128, kernel: 4 }
            }
            _ => DeltaNetConfig { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, kernel: 4 },
        }
    }
}

/// Of so many bits, or dense.
fn linear(n: usize, k: usize, bits: Option<usize>, seed: u64, device: &Device) -> Linear {
    let Some(bits) = bits else {
        let weight = (tensor(&[n, k], seed) * 0.1).unwrap().to_dtype(DType::BF16).unwrap();
        return Linear::new(weight.to_device(device).unwrap(), None);
    };
    let weight = random(&[n, k], QuantFormat::affine(bits, 32).unwrap(), DType::F16, seed);
    Linear::new(weight.to_device(device).unwrap(), None)
}

/// Linear attention, attention with gates, linear attention.
fn plan(kind: Kind, device: &Device, dtype: DType) -> (StepPlan, DeltaNetConfig) {
    let sizes = kind.sizes();
    let bits = (kind != Kind::Dense).then_some(4);
    let numbers = |len: usize, seed| {
        let numbers = ((tensor(&[len], seed) * 0.3).unwrap() + 1.).unwrap();
        numbers.to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let norm = RmsNorm::new(numbers(HIDDEN, 40), 1e-6);
    let table = random(&[VOCABULARY, HIDDEN], QuantFormat::affine(4, 32).unwrap(), DType::F16, 41);
    let table = Embedding::from_quant(table.to_device(device).unwrap(), dtype).unwrap();
    let mut plan = StepBuilder::new(&table, 1.).unwrap();
    for layer in [0u64, 100] {
        let of = |n, k, bits, seed| linear(n, k, bits, layer + seed, device);
        let small = if kind == Kind::OfBits { Some(8) } else { bits };
        let (keys, values) = (sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim);
        let heads = sizes.value_heads;
        let weights = weights(sizes).map(|x| x.to_device(device).unwrap());
        let [convolution, rates, gate_bias, norm_weight] = &weights;
        let weights = DeltaNetWeights { convolution, rates, gate_bias, norm: norm_weight, eps: 1e-6 };
        let (qkvz, ba) = (of(2 * (keys + values), HIDDEN, bits, 42), of(2 * heads, HIDDEN, bits, 43));
        let (whole, parts) =
            (of(2 * keys + values, HIDDEN, bits, 44), [(keys, 45), (keys, 46), (values, 47)]);
        let parts = parts.map(|(rows, seed)| of(rows, HIDDEN, bits, seed));
        let z = of(values, HIDDEN, bits, 48);
        let (a, b) = (of(heads, HIDDEN, bits, 49), of(heads, HIDDEN, small, 50));
        let projections = match kind {
            Kind::Grouped | Kind::OfLargeHeads => DeltaNetProjections::Grouped { qkvz: &qkvz, ba: &ba },
            Kind::Apart => DeltaNetProjections::apart(&whole, [&z, &a, &b]),
            _ => DeltaNetProjections::Apart { qkv: &parts, z: &z, a: &a, b: &b },
        };
        let out = of(HIDDEN, values, bits, 51);
        let block = DeltaNetBlock::new(sizes, projections, weights, &out);
        let tiled_output = matches!(kind, Kind::Grouped | Kind::OfLargeHeads);
        plan.delta_net(DeltaNetBlock { norm: Some((&norm).into()), tiled_output, ..block }).unwrap();
        if layer == 0 {
            let heads = [(2 * 256, HIDDEN, 52), (128, HIDDEN, 53), (128, HIDDEN, 54), (HIDDEN, 256, 55)];
            let [q, k, v, o] = heads.map(|(n, k, seed)| of(n, k, bits, seed));
            let block = AttentionBlock::new([&q, &k, &v, &o], HEAD_DIM);
            let of_heads = RmsNorm::new(numbers(HEAD_DIM, 56), 1e-6);
            plan.attention(AttentionBlock {
                norm: Some((&norm).into()),
                q_norm: Some((&of_heads).into()),
                has_gate: true,
                ..block
            })
            .unwrap();
        }
    }
    (plan.head(HeadBlock::new(&norm, &linear(VOCABULARY, HIDDEN, bits, 57, device))).unwrap(), sizes)
}

fn id(position: usize, sequence: usize) -> u32 {
    ((position * 37 + sequence * 31 + 5) % VOCABULARY) as u32
}

/// Sequences of which one begins late, one pauses, goes on and begins anew; captured, one by one, and on the CPU.
#[test]
fn plans_compute_what_the_cpu_does() {
    let Some(device) = device() else { return };
    let _captures = captures();
    for (kind, dtype, launches, limit) in [
        (Kind::Grouped, DType::F32, None, 1e-5),
        (Kind::Grouped, DType::BF16, Some(3 * 3 + 2), 5e-2),
        (Kind::Apart, DType::BF16, Some(3 * 3 + 2), 5e-2),
        (Kind::Apart, DType::F16, Some(3 * 3 + 2), 1e-2),
        (Kind::OfLargeHeads, DType::BF16, Some(3 * 3 + 2), 5e-2),
        (Kind::OfLargeHeads, DType::F32, None, 1e-5),
        (Kind::InThree, DType::F16, Some(2 * 4 + 3 + 2), 1e-2),
        (Kind::Dense, DType::BF16, Some(2 * 4 + 3 + 2), 5e-2),
        // Of two weights that are not alike, each has a launch.
        (Kind::OfBits, DType::BF16, Some(2 * 5 + 3 + 2), 5e-2),
    ] {
        let (planned, sizes) = plan(kind, &device, dtype);
        let format = kv_format(dtype);
        let config = KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(2, HEAD_DIM) };
        let mut keys = DeviceKvCache::new(config).unwrap();
        let mut states = [(); 2].map(|()| DeltaNetState::new(sizes, &device).unwrap());
        let cpu = plan(kind, &Device::Cpu, DType::F32).0;
        let mut keys_on_cpu = KvCache::new(KvCacheConfig::new(2, HEAD_DIM)).unwrap();
        let mut states_on_cpu = [(); 2].map(|()| DeltaNetState::new(sizes, &Device::Cpu).unwrap());
        let [mut step, mut eager] = [(); 2].map(|()| planned.on_device(3, dtype).unwrap());
        let mut lens = [0; 3];
        for number in 0..9 {
            if number == 6 {
                assert!(keys.truncate_sequence(2, 0) && keys_on_cpu.truncate(2, 0));
                let all = states.iter_mut().chain(&mut states_on_cpu);
                assert!(all.into_iter().all(|state| state.truncate(2, 0)));
                lens[2] = 0;
            }
            let active = [true, number >= 2, !(2..4).contains(&number)];
            let ids: Vec<_> = (0..3).map(|sequence| id(number, sequence)).collect();
            let there = Tensor::new(ids.as_slice(), &device).unwrap();
            let logits = step.run_some(&there, &active, StepCaches::new([&mut keys], &mut states)).unwrap();
            let taking: Vec<_> = (0..3).filter(|sequence| active[*sequence]).collect();
            let token =
                |&sequence: &usize| StepToken { id: ids[sequence], sequence, position: lens[sequence] };
            let tokens: Vec<_> = taking.iter().map(token).collect();
            let wanted: Vec<_> = (0..tokens.len()).collect();
            let caches = StepCaches::new([&mut keys_on_cpu], &mut states_on_cpu);
            let expected = cpu.run(&tokens, caches, &wanted).unwrap();
            for (row, &sequence) in taking.iter().enumerate() {
                let found = flat(&logits.get(sequence).unwrap());
                let error = relative_error(&found, &wide(&expected.get(row).unwrap()));
                assert!(error < limit, "{kind:?} {dtype:?}, step {number}, sequence {sequence}: {error:.2e}");
                lens[sequence] += 1;
            }
            assert!(launches.is_none_or(|launches| step.launches() == Some(launches)), "{kind:?} {step:?}");
            assert!(keys.lens() == lens && states.iter().all(|state| state.lens() == lens));
        }
        assert!(step.is_captured() && !eager.is_captured());
        // The same text once more, step by step with both: the same bits.
        let [captured, one_by_one] = [&mut step, &mut eager].map(|step| {
            keys.clear();
            states.iter_mut().for_each(DeltaNetState::clear);
            let logits = (0..3).map(|position| {
                let ids: Vec<_> = (0..3).map(|sequence| id(position, sequence)).collect();
                let ids = Tensor::new(ids.as_slice(), &device).unwrap();
                bits(&step.run(&ids, StepCaches::new([&mut keys], &mut states)).unwrap())
            });
            logits.collect::<Vec<_>>()
        });
        assert!(captured == one_by_one, "{kind:?} {dtype:?}");
    }
}

/// Kernels of their own for caches of codes, and for activations of f32, have gates.
#[test]
fn caches_of_codes() {
    let Some(device) = device() else { return };
    let _captures = captures();
    let cpu = plan(Kind::Apart, &Device::Cpu, DType::F32).0;
    for (format, dtype, limit) in [
        (KvFormat::Affine8, DType::F32, 1e-3),
        (KvFormat::Affine8, DType::BF16, 5e-2),
        (KvFormat::Affine4, DType::BF16, 8e-2),
    ] {
        let (planned, sizes) = plan(Kind::Apart, &device, dtype);
        let config = KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(2, HEAD_DIM) };
        let (mut keys, mut on_cpu) = (DeviceKvCache::new(config).unwrap(), KvCache::new(config).unwrap());
        let [mut states, mut states_on_cpu] = [&device, &Device::Cpu]
            .map(|device| [(); 2].map(|()| DeltaNetState::new(sizes, device).unwrap()));
        let mut step = planned.on_device(1, dtype).unwrap();
        for position in 0..5 {
            let token = StepToken { id: id(position, 0), sequence: 0, position };
            let ids = Tensor::new(&[token.id], &device).unwrap();
            let found = step.run(&ids, StepCaches::new([&mut keys], &mut states)).unwrap();
            let caches = StepCaches::new([&mut on_cpu], &mut states_on_cpu);
            let expected = cpu.run(&[token], caches, &[0]).unwrap();
            let error = relative_error(&flat(&found), &wide(&expected));
            assert!(error < limit, "{format} {dtype:?}, position {position}: {error:.2e}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(device) = device() else { return };
    let (plan, sizes) = plan(Kind::Grouped, &device, DType::F32);
    let config = KvCacheConfig {
        keys: kv_format(DType::F32),
        values: kv_format(DType::F32),
        ..KvCacheConfig::new(2, 64)
    };
    let mut step = plan.on_device(1, DType::F32).unwrap();
    let ids = Tensor::new(&[1u32], &device).unwrap();
    let state = |sizes, device: &Device| DeltaNetState::new(sizes, device).unwrap();
    let mut refused = |mut states: Vec<DeltaNetState>, expected: &str| {
        let mut keys = DeviceKvCache::new(config).unwrap();
        let error = step.run(&ids, StepCaches::new([&mut keys], &mut states)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} has no {expected:?}");
        assert!(keys.is_empty() && states.iter().all(DeltaNetState::is_empty));
    };
    refused(vec![state(sizes, &device)], "2, one for each layer of linear attention");
    refused(vec![state(sizes, &device), state(sizes, &Device::Cpu)], "state");
    let other = DeltaNetConfig { key_dim: 16, ..sizes };
    refused(vec![state(sizes, &device), state(other, &device)], "key_dim: 32");

    // Heads for which there is no kernel.
    let sizes = config_of_large_heads();
    let weights = weights(sizes).map(|x| x.to_device(&device).unwrap());
    let [convolution, rates, gate_bias, norm] = &weights;
    let weights = DeltaNetWeights { convolution, rates, gate_bias, norm, eps: 1e-6 };
    let of = |n, k, seed| linear(n, k, Some(4), seed, &device);
    let (qkv, z, a, b) = (of(768, 128, 60), of(256, 128, 61), of(1, 128, 62), of(1, 128, 63));
    let out = of(128, 256, 64);
    let table = random(&[VOCABULARY, HIDDEN], QuantFormat::affine(4, 32).unwrap(), DType::F16, 65);
    let table = Embedding::from_quant(table.to_device(&device).unwrap(), DType::F32).unwrap();
    let mut plan = StepBuilder::new(&table, 1.).unwrap();
    plan.delta_net(DeltaNetBlock::new(sizes, DeltaNetProjections::apart(&qkv, [&z, &a, &b]), weights, &out))
        .unwrap();
    let norm = RmsNorm::new(Tensor::ones(HIDDEN, DType::F32, &device).unwrap(), 1e-6);
    let plan = plan.head(HeadBlock::new(&norm, &of(VOCABULARY, HIDDEN, 66))).unwrap();
    assert!(matches!(plan.on_device(1, DType::F32), Err(Error::Unsupported { .. })));
}

fn config_of_large_heads() -> DeltaNetConfig {
    DeltaNetConfig { key_heads: 1, value_heads: 1, key_dim: 256, value_dim: 256, kernel: 4 }
}
