//! Step plans of dense weights, as they are stored, by themselves and beside packed ones.

use crate::gpu::captures;
use crate::packed::{bits, flat, random, relative_error, tensor};
use crate::steps::kv_format;
use crate::{alike, device};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Activation, LayerNorm, RmsNorm};
use candle_quant::step::{
    AttentionBlock, FeedForwardBlock, HeadBlock, StepBuilder, StepNorm, StepPlan, StepToken,
};
use candle_quant::{DeviceKvCache, Embedding, KvCache, KvCacheConfig, KvFormat, Linear, QuantFormat};

const VOCABULARY: usize = 97;

/// What a weight is stored as; none is packed.
type Stored = Option<DType>;
const PACKED: Stored = None;
const BF16: Stored = Some(DType::BF16);
const F16: Stored = Some(DType::F16);
const F32: Stored = Some(DType::F32);

struct Kind {
    hidden: usize,
    inner: usize,
    /// Of the table; q, k, v, o; gate, up, down; the head.
    stored: [Stored; 9],
    has_gate: bool,
    has_biases: bool,
    has_means: bool,
    /// Launches in 16 bits, if they are counted.
    launches: Option<usize>,
}

impl Kind {
    const fn of(stored: Stored, hidden: usize, inner: usize) -> Self {
        let stored = [stored; 9];
        Self {
            hidden,
            inner,
            stored,
            has_gate: true,
            has_biases: false,
            has_means: false,
            // The table, five of a layer, the head.
            launches: Some(7),
        }
    }
}

fn linear((n, k): (usize, usize), seed: u64, stored: Stored, has_bias: bool, device: &Device) -> Linear {
    let bias = has_bias.then(|| tensor(&[n], seed + 50).to_device(device).unwrap());
    let Some(dtype) = stored else {
        let packed = random(&[n, k], QuantFormat::affine(4, 32).unwrap(), DType::F16, seed);
        return Linear::new(packed.to_device(device).unwrap(), bias);
    };
    let weight = (tensor(&[n, k], seed) * 0.2).unwrap().to_dtype(dtype).unwrap();
    Linear::new(weight.to_device(device).unwrap(), bias)
}

fn plan(kind: &Kind, device: &Device, dtype: DType) -> StepPlan {
    let &Kind { hidden, inner, has_biases, .. } = kind;
    let numbers = |seed| {
        let numbers = (tensor(&[hidden], seed) * 0.3).unwrap();
        (numbers + 1.).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let rms = RmsNorm::new(numbers(71), 1e-6);
    let mean = LayerNorm::new(numbers(72), (numbers(73) - 1.).unwrap(), 1e-6);
    let norm = || if kind.has_means { StepNorm::from(&mean) } else { StepNorm::from(&rms) };
    let [table, q, k, v, o, gate, up, down, head] = kind.stored;
    let of = |n, k, seed, stored| linear((n, k), seed, stored, has_biases, device);
    let table = match table {
        Some(stored) => {
            let table = tensor(&[VOCABULARY, hidden], 70).to_dtype(stored).unwrap();
            Embedding::new(table.to_device(device).unwrap(), hidden)
        }
        None => {
            let format = QuantFormat::affine(4, 32).unwrap();
            let table = random(&[VOCABULARY, hidden], format, DType::F16, 70);
            Embedding::from_quant(table.to_device(device).unwrap(), dtype).unwrap()
        }
    };
    let mut plan = StepBuilder::new(&table, 1.5).unwrap();
    let (q, k) = (of(128, hidden, 80, q), of(64, hidden, 81, k));
    let (v, o) = (of(64, hidden, 82, v), of(hidden, 128, 83, o));
    let block = AttentionBlock::new([&q, &k, &v, &o], 64);
    plan.attention(AttentionBlock { norm: Some(norm()), ..block }).unwrap();
    let (gate, up) = (of(inner, hidden, 84, gate), of(inner, hidden, 85, up));
    let down = of(hidden, inner, 86, down);
    let block = FeedForwardBlock::new(kind.has_gate.then_some(&gate), &up, &down);
    let activation = if kind.has_gate { Activation::Silu } else { Activation::GeluPytorchTanh };
    plan.feed_forward(FeedForwardBlock { norm: Some(norm()), activation, ..block }).unwrap();
    plan.head(HeadBlock::new(norm(), &of(VOCABULARY, hidden, 87, head))).unwrap()
}

#[test]
fn dense_weights_are_multiplied_as_they_are_stored() {
    let Some(device) = device() else { return };
    let _captures = captures();
    let packed_ends = |of: Kind| {
        let [_, q, k, v, o, gate, up, down, _] = of.stored;
        Kind { stored: [PACKED, q, k, v, o, gate, up, down, PACKED], ..of }
    };
    let mixed = [F16, BF16, PACKED, F32, PACKED, F16, BF16, PACKED, F32];
    let kinds = [
        // The second down projection has more columns than there is room for x of one row at once.
        Kind::of(BF16, 128, 192),
        Kind { has_biases: true, ..Kind::of(F16, 128, 4104) },
        Kind { has_biases: true, has_gate: false, ..Kind::of(F32, 1060, 96) },
        // Rows that do not begin at multiples of 16 bytes.
        Kind::of(BF16, 101, 75),
        Kind { has_means: true, launches: Some(10), ..Kind::of(F32, 67, 33) },
        packed_ends(Kind::of(BF16, 128, 192)),
        Kind { stored: mixed, launches: None, has_biases: true, ..Kind::of(F32, 128, 192) },
        Kind { stored: mixed, launches: None, has_means: true, ..Kind::of(F32, 128, 192) },
    ];
    let runs = [(DType::BF16, 1), (DType::F16, 2), (DType::F32, 3), (DType::F32, 11)];
    for (index, kind) in kinds.iter().enumerate() {
        let on_cpu = plan(kind, &Device::Cpu, DType::F32);
        for &(dtype, sequences) in alike(&runs, index) {
            let what = format!("kind {index}, {dtype:?}, {sequences} sequences");
            let there = plan(kind, &device, dtype);
            let [mut step, mut eager] = [(); 2].map(|()| there.on_device(sequences, dtype).unwrap());
            let format = kv_format(dtype);
            let config = KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(1, 64) };
            let mut cached = [DeviceKvCache::new(config).unwrap()];
            let on_cpu_caches = || [KvCache::new(KvCacheConfig::new(1, 64)).unwrap()];
            let mut cached_on_cpu: Vec<_> = (0..sequences).map(|_| on_cpu_caches()).collect();
            for position in 0..2 {
                let id = |sequence: usize| ((position * 37 + sequence * 11 + 5) % VOCABULARY) as u32;
                let ids: Vec<u32> = (0..sequences).map(id).collect();
                let ids = Tensor::new(ids, &device).unwrap();
                let logits = step.run(&ids, &mut cached).unwrap();
                if let Some(launches) =
                    kind.launches.filter(|_| dtype != DType::F32 || kind.stored[0] != PACKED)
                {
                    assert_eq!(step.launches(), Some(launches), "{what}");
                }
                let found = flat(&logits);
                for (row, (found, cached)) in found.chunks(VOCABULARY).zip(&mut cached_on_cpu).enumerate() {
                    let token = StepToken { id: id(row), sequence: 0, position };
                    let expected = flat(&on_cpu.run(&[token], cached, &[0]).unwrap());
                    let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
                    let error = relative_error(found, &expected);
                    let limit = if dtype == DType::F32 { 1e-5 } else { 5e-2 };
                    assert!(error < limit, "{what}, position {position}, row {row}: {error:.2e}");
                }
                if position == 1 {
                    assert!(step.is_captured());
                    assert!(cached[0].truncate(position));
                    let again = eager.run(&ids, &mut cached).unwrap();
                    assert!(!eager.is_captured() && bits(&again) == bits(&logits), "{what}");
                }
            }
        }
    }
}

#[test]
fn an_id_outside_of_a_dense_table_is_not_a_number() {
    let Some(device) = device() else { return };
    let there = plan(&Kind::of(BF16, 128, 192), &device, DType::F32);
    let mut step = there.on_device(2, DType::F32).unwrap();
    let config = KvCacheConfig { keys: KvFormat::F32, values: KvFormat::F32, ..KvCacheConfig::new(1, 64) };
    let mut cached = [DeviceKvCache::new(config).unwrap()];
    let ids = Tensor::new(&[VOCABULARY as u32, 3], &device).unwrap();
    let logits = flat(&step.run(&ids, &mut cached).unwrap());
    let (outside, inside) = logits.split_at(VOCABULARY);
    assert!(outside.iter().all(|logit| logit.is_nan()) && inside.iter().all(|logit| logit.is_finite()));
}

#[test]
fn weights_that_are_trained_or_elsewhere_are_refused() {
    let Some(device) = device() else { return };
    let of = |n, k, device: &Device| linear((n, k), 80, BF16, false, device);
    let table = Embedding::new(tensor(&[VOCABULARY, 128], 70).to_device(&device).unwrap(), 128);
    let (there, elsewhere) = (of(128, 128, &device), of(128, 128, &Device::Cpu));
    let trained = Var::from_tensor(&tensor(&[128, 128], 81).to_device(&device).unwrap()).unwrap();
    let trained = Linear::new(trained.as_tensor().clone(), None);
    for (weight, parts) in [(&elsewhere, ["on Cpu", "BF16"]), (&trained, ["that is trained", "step plan"])] {
        let mut plan = StepBuilder::new(&table, 1.).unwrap();
        let error = plan
            .attention(AttentionBlock::new([weight, &there, &there, &there], 64))
            .unwrap_err()
            .to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}
