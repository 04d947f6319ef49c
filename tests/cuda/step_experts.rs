//! Blocks of experts in steps on a device: against the CPU's plan, which tests of its own hold against f64.

use crate::gpu::captures;
use crate::packed::{bits, flat, random, relative_error, tensor};
use crate::{alike, device};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, RmsNorm};
use candle_quant::format::Scale;
use candle_quant::nn::{ExpertGroups, ExpertStack, Experts, Gating, GroupScore, Scores};
use candle_quant::step::{
    BlockOutput, DeviceStep, ExpertsBlock, FeedForwardBlock, HeadBlock, StepBuilder, StepNorm, StepPlan,
    StepToken,
};
use candle_quant::{DeviceKvCache, Embedding, KvCache, Linear, QuantFormat, QuantTensor};

const VOCABULARY: usize = 48;

#[derive(Clone, Copy)]
enum Gate {
    Packed,
    /// With a bias.
    Dense,
}

#[derive(Clone, Copy)]
struct Kind {
    hidden: usize,
    inner: usize,
    experts: usize,
    format: QuantFormat,
    /// Of up projections, if it is another one.
    up_format: Option<QuantFormat>,
    packed_router: bool,
    /// Whether each expert has two others of the same scores, and the first one's is that of nothing.
    alike: bool,
    bias: bool,
    gating: Gating,
    scores: Scores,
    corrected: bool,
    groups: Option<ExpertGroups>,
    top_k: usize,
    normalize: bool,
    weighs_inputs: bool,
    shared: bool,
    /// What makes the logit that says how much the shared expert counts.
    shared_gate: Option<Gate>,
    /// Norms with a mean, and one behind the block.
    layer_norms: bool,
}

fn plain() -> Kind {
    Kind {
        hidden: 192,
        inner: 64,
        // Not a multiple of those of a block.
        experts: 15,
        format: QuantFormat::affine(4, 64).unwrap(),
        up_format: None,
        packed_router: true,
        alike: false,
        bias: false,
        gating: Gating::Plain(Activation::Silu),
        scores: Scores::Softmax,
        corrected: false,
        groups: None,
        top_k: 4,
        normalize: true,
        weighs_inputs: false,
        shared: false,
        shared_gate: None,
        layer_norms: false,
    }
}

fn kinds() -> Vec<(&'static str, Kind)> {
    let groups = |by| Some(ExpertGroups { count: 5, chosen: 2, by });
    let sigmoid = Kind { scores: Scores::Sigmoid, corrected: true, packed_router: false, ..plain() };
    vec![
        ("plain", plain()),
        // More numbers than are on their way to a thread at once, twice.
        ("long rows", Kind { hidden: 2112, experts: 3, top_k: 1, ..plain() }),
        // Sums of down projections have several parts of k.
        ("long inner rows", Kind { hidden: 64, inner: 4096, experts: 3, top_k: 2, ..plain() }),
        (
            "as gpt-oss",
            Kind {
                format: QuantFormat::MXFP4,
                packed_router: false,
                bias: true,
                gating: Gating::Clamped { alpha: 1.702, limit: 0.5 },
                ..plain()
            },
        ),
        ("alike", Kind { packed_router: false, alike: true, ..plain() }),
        ("two of a group", Kind { groups: groups(GroupScore::TwoLargest), shared: true, ..sigmoid }),
        ("one of a group", Kind { groups: groups(GroupScore::Largest), layer_norms: true, ..sigmoid }),
        ("weighed inputs", Kind { weighs_inputs: true, normalize: false, bias: true, top_k: 2, ..sigmoid }),
        (
            "more experts and groups than a warp has lanes",
            Kind {
                hidden: 64,
                experts: 70,
                top_k: 34,
                groups: Some(ExpertGroups { count: 35, chosen: 20, by: GroupScore::TwoLargest }),
                ..sigmoid
            },
        ),
        (
            "super-blocks",
            Kind {
                hidden: 256,
                inner: 256,
                experts: 3,
                top_k: 2,
                format: QuantFormat::Q5_K,
                packed_router: false,
                shared: true,
                ..plain()
            },
        ),
        // The last block of the router has an expert and the gate, or the gate alone.
        ("a packed gate", Kind { shared: true, shared_gate: Some(Gate::Packed), ..plain() }),
        (
            "a dense gate",
            Kind { shared: true, shared_gate: Some(Gate::Dense), hidden: 64, experts: 6, ..plain() },
        ),
        (
            "a packed gate beside a dense router",
            Kind { shared: true, shared_gate: Some(Gate::Packed), inner: 640, experts: 10, ..sigmoid },
        ),
        (
            "all experts",
            Kind { top_k: 6, experts: 6, normalize: false, format: QuantFormat::NVFP4, ..plain() },
        ),
    ]
}

/// Two blocks of experts between an embedding and a head. They need no caches.
fn plan(kind: &Kind, device: &Device, dtype: DType) -> StepPlan {
    let &Kind { hidden, inner, experts: count, .. } = kind;
    let numbers = |dims: &[usize], seed: u64, size: f64| {
        let numbers = (tensor(dims, seed) * size).unwrap();
        numbers.to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let packed_in = |format: QuantFormat, dims: &[usize], seed| {
        if format.scale() == Scale::SuperBlock {
            return random(dims, format, DType::F16, seed).to_device(device).unwrap();
        }
        // Codes are those of f32 numbers, whatever the device.
        let numbers = (tensor(dims, seed) * (1.5 / (dims[dims.len() - 1] as f64).sqrt())).unwrap();
        let packed = QuantTensor::quantize(&numbers, format).unwrap();
        let narrow = |tensor: &Tensor| tensor.to_dtype(DType::F16).unwrap();
        let packed = match packed.biases() {
            None => packed,
            Some(biases) => {
                let (codes, biases) = (packed.packed().clone(), Some(narrow(biases)));
                QuantTensor::new(format, codes, narrow(packed.scales()), biases, None).unwrap()
            }
        };
        packed.to_device(device).unwrap()
    };
    let packed = |dims: &[usize], seed| packed_in(kind.format, dims, seed);
    let stack_in = |format, n, k, seed| {
        let bias = kind.bias.then(|| numbers(&[count, n], seed + 1, 0.3));
        ExpertStack::from_quant(packed_in(format, &[count, n, k], seed), bias).unwrap()
    };
    let stack = |n, k, seed| stack_in(kind.format, n, k, seed);
    let linear = |n, k, seed| Linear::from_quant(packed(&[n, k], seed), None);
    let table = Embedding::from_quant(packed(&[VOCABULARY, hidden], 1), dtype).unwrap();
    let mut plan = StepBuilder::new(&table, 5.).unwrap();
    for layer in 0..2 {
        let seed = 1000 * (layer + 1);
        let (weight, shift) = (numbers(&[hidden], seed, 1.), numbers(&[hidden], seed + 5, 0.3));
        let norm = match kind.layer_norms {
            false => StepNorm { weight: Some(&weight), bias: None, subtracts_mean: false, eps: 1e-6 },
            true => StepNorm { weight: Some(&weight), bias: Some(&shift), subtracts_mean: true, eps: 1e-6 },
        };
        let router = match kind.packed_router {
            true => linear(count, hidden, seed + 10),
            false => {
                let times = if kind.alike { 3 } else { 1 };
                let of_all = [(&[count / times][..], 11, 0.5), (&[count / times, hidden], 10, 0.05)];
                let [bias, weight] = of_all.map(|(dims, of, size)| {
                    let numbers = numbers(dims, seed + of, size);
                    // The first one's logit is zero.
                    let first = numbers.narrow(0, 0, 1).unwrap();
                    let first = if kind.alike { first.zeros_like().unwrap() } else { first };
                    let others = numbers.narrow(0, 1, count / times - 1).unwrap();
                    let parts: Vec<_> = (0..times).flat_map(|_| [first.clone(), others.clone()]).collect();
                    Tensor::cat(&parts, 0).unwrap()
                });
                Linear::new(weight, Some(bias))
            }
        };
        let correction = numbers(&[count], seed + 20, 0.2);
        let gate = stack(inner, hidden, seed + 30);
        let up = stack_in(kind.up_format.unwrap_or(kind.format), inner, hidden, seed + 40);
        let experts = Experts::new(gate, up, stack(hidden, inner, seed + 50), kind.gating).unwrap();
        let shared = [(inner, hidden, 60), (inner, hidden, 61), (hidden, inner, 62)];
        let [gate, up, down] = shared.map(|(n, k, of)| linear(n, k, seed + of));
        let gate_of_shared = kind.shared_gate.map(|gate| match gate {
            Gate::Packed => linear(1, hidden, seed + 70),
            Gate::Dense => {
                let bias = numbers(&[1], seed + 71, 0.5);
                Linear::new(numbers(&[1, hidden], seed + 70, 0.2), Some(bias))
            }
        });
        let behind = kind.layer_norms.then_some(norm);
        plan.experts(ExpertsBlock {
            norm: Some(norm),
            scores: kind.scores,
            correction: kind.corrected.then_some(&correction),
            groups: kind.groups,
            normalize: kind.normalize,
            scale: 1.4,
            weighs_inputs: kind.weighs_inputs,
            shared: kind.shared.then(|| FeedForwardBlock::new(Some(&gate), &up, &down)),
            shared_gate: gate_of_shared.as_ref(),
            out: BlockOutput { norm: behind, scale: 0.7, ..Default::default() },
            ..ExpertsBlock::new(&router, kind.top_k, &experts)
        })
        .unwrap();
    }
    let norm = RmsNorm::new(numbers(&[hidden], 7, 1.), 1e-6);
    plan.head(HeadBlock::new(&norm, &table.as_linear())).unwrap()
}

fn run(step: &mut DeviceStep, ids: &[u32], device: &Device) -> Tensor {
    step.run(&Tensor::new(ids, device).unwrap(), &mut [] as &mut [DeviceKvCache]).unwrap()
}

#[test]
fn experts_of_steps_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let _captures = captures();
    for (index, (name, kind)) in kinds().into_iter().enumerate() {
        let on_cpu = plan(&kind, &Device::Cpu, DType::F32);
        let dtypes = [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 4e-3)];
        // F16 takes the kernels that BF16 takes: one kind shows that.
        let dtypes = &dtypes[..if name == "plain" { 3 } else { 2 }];
        // The most sequences have BF16.
        for &(dtype, bound) in alike(dtypes, index + 1) {
            let plan = plan(&kind, &device, dtype);
            let sequences = match name {
                "plain" if dtype == DType::BF16 => StepPlan::MOST_SEQUENCES,
                "long rows" => 1,
                _ => 2,
            };
            let [mut step, mut eager] = [(); 2].map(|()| plan.on_device(sequences, dtype).unwrap());
            let (mut wrong, mut seen) = (0, 0);
            let all: Vec<u32> = (0..3 * sequences).map(|index| (7 + index * 13) as u32 % 48).collect();
            for (index, ids) in all.chunks(sequences).enumerate() {
                let logits = run(&mut step, ids, &device);
                assert_eq!(step.is_captured(), index > 0);
                if index == 2 {
                    assert!(bits(&logits) == bits(&run(&mut eager, ids, &device)), "{name} {dtype:?}");
                }
                let logits = flat(&logits);
                for (id, logits) in ids.iter().zip(logits.chunks(VOCABULARY)) {
                    let token = StepToken { id: *id, sequence: 0, position: 0 };
                    let expected = on_cpu.run(&[token], &mut [] as &mut [KvCache], &[0]).unwrap();
                    let expected: Vec<f64> = flat(&expected).into_iter().map(f64::from).collect();
                    let error = relative_error(logits, &expected);
                    assert!(error < 1., "{name} {dtype:?}, token {id}: {error:.2e}");
                    (seen, wrong) = (seen + 1, wrong + usize::from(error > bound));
                    assert!(dtype != DType::F32 || wrong == 0, "{name}, token {id}: {error:.2e}");
                }
            }
            if dtype == DType::BF16 && !kind.layer_norms {
                // Norm and router, gate and up, down; the shared expert has two of its own.
                let of_block = if kind.shared { 5 } else { 3 };
                // Of sixteen rows, the head has its norm in a launch of its own.
                let of_head = if sequences == StepPlan::MOST_SEQUENCES { 2 } else { 1 };
                assert_eq!(step.launches(), Some(1 + 2 * of_block + of_head), "{name}");
            }
            // Where two scores are nearly alike, rounded activations choose the other expert.
            assert!(wrong <= 1 + seen / 16, "{name} {dtype:?}: {wrong} of {seen} tokens");
        }
    }
}

/// What is not a number stays in its row.
#[test]
fn rows_of_nan_choose_experts_that_exist() {
    let Some(device) = device() else { return };
    let _captures = captures();
    for (name, kind) in kinds() {
        let mut step = plan(&kind, &device, DType::BF16).on_device(2, DType::BF16).unwrap();
        let beside = flat(&run(&mut step, &[3, 5], &device));
        let logits = flat(&run(&mut step, &[3, VOCABULARY as u32], &device));
        assert!(logits[..VOCABULARY] == beside[..VOCABULARY], "{name}");
        assert!(logits[VOCABULARY..].iter().all(|logit| logit.is_nan()), "{name}");
    }
}

#[test]
fn blocks_without_kernels_are_refused() {
    let Some(device) = device() else { return };
    let gelu = Kind { gating: Gating::Plain(Activation::Gelu), ..plain() };
    let differ = Kind { up_format: Some(QuantFormat::affine(8, 64).unwrap()), ..plain() };
    for (kind, expected) in [(gelu, "another activation than SiLU"), (differ, "in different formats")] {
        let told = plan(&kind, &device, DType::BF16).on_device(1, DType::BF16).unwrap_err().to_string();
        assert!(told.contains(expected) && told.contains("one by one"), "{told}");
    }
}
