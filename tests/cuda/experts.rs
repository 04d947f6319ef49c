//! Experts that tokens choose: one by one, sorted in tiles, on tensor cores and in fp32.

use crate::expected::{formats, symmetric, KINDS};
use crate::packed::{bits, flat, random, reference, relative_error, tensor};
use crate::{alike, device, repeats};
use candle_core::{DType, Device, Tensor};
use candle_nn::Activation;
use candle_quant::format::{Scale, SUPER_BLOCK};
use candle_quant::nn::{ExpertStack, Experts, Gating};
use candle_quant::{QuantFormat, QuantTensor};

const SILU: Gating = Gating::Plain(Activation::Silu);
/// With a limit that many numbers exceed.
const CLAMPED: Gating = Gating::Clamped { alpha: 1.702, limit: 0.75 };

/// A block of experts on the CPU.
struct Block {
    gate: QuantTensor,
    up: QuantTensor,
    down: QuantTensor,
    biases: Option<[Tensor; 3]>,
    gating: Gating,
}

/// Who chose which of them.
#[derive(Clone)]
struct Choice {
    ids: Vec<u32>,
    routing_weights: Vec<f32>,
    top_k: usize,
}

impl Choice {
    /// Of each token `top_k` experts, the first ones most often.
    fn new(tokens: usize, top_k: usize, experts: usize, seed: u64) -> Self {
        let drawn = flat(&tensor(&[tokens * top_k], seed));
        let ids = drawn.iter().enumerate().map(|(pair, number)| match number.to_bits() % 8 {
            0..4 => (pair % top_k % experts) as u32,
            other => (other as usize * 7 + pair) as u32 % experts as u32,
        });
        // Of one sign, as those of a router: what they add up to does not cancel.
        let routing_weights =
            flat(&tensor(&[tokens * top_k], seed + 1)).into_iter().map(|weight| weight.abs() + 0.1);
        Self { ids: ids.collect(), routing_weights: routing_weights.collect(), top_k }
    }

    fn tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }
}

impl Block {
    /// `[experts, inner, hidden]` twice and `[experts, hidden, inner]`, of random codes.
    fn new(format: QuantFormat, [experts, inner, hidden]: [usize; 3], seed: u64) -> Self {
        let stack = |n, k, seed| random(&[experts, n, k], format, DType::F16, seed);
        Self {
            gate: stack(inner, hidden, seed),
            up: stack(inner, hidden, seed + 10),
            down: stack(hidden, inner, seed + 20),
            biases: None,
            gating: SILU,
        }
    }

    fn with_biases(self, dtypes: [DType; 3]) -> Self {
        let biases = [&self.gate, &self.up, &self.down].map(|stack| stack.dims()[..2].to_vec());
        let bias = |i: usize| tensor(&biases[i], 30 + i as u64).to_dtype(dtypes[i]).unwrap();
        Self { biases: Some([0, 1, 2].map(bias)), ..self }
    }

    fn on(&self, device: &Device) -> Experts {
        let stack = |stack: &QuantTensor, i: usize| {
            let bias = self.biases.as_ref().map(|biases| biases[i].to_device(device).unwrap());
            ExpertStack::from_quant(stack.to_device(device).unwrap(), bias).unwrap()
        };
        Experts::new(stack(&self.gate, 0), stack(&self.up, 1), stack(&self.down, 2), self.gating).unwrap()
    }

    /// For each token of `x`, in f64.
    fn expected(&self, x: &[f32], choice: &Choice) -> Vec<f64> {
        let [_, inner, hidden] = self.gate.dims()[..] else { panic!() };
        let biases: Option<Vec<Vec<f32>>> =
            self.biases.as_ref().map(|biases| biases.iter().map(flat).collect());
        let weights = [&self.gate, &self.up, &self.down].map(reference);
        let product = |i: usize, expert: usize, x: &[f64], n: usize| -> Vec<f64> {
            let bias = |row: usize| biases.as_ref().map_or(0., |all| f64::from(all[i][expert * n + row]));
            let rows = weights[i][expert * n * x.len()..][..n * x.len()].chunks(x.len());
            let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            rows.enumerate().map(|(row, weights)| dot(weights) + bias(row)).collect()
        };
        let join = |gate: f64, up: f64| match self.gating {
            Gating::Clamped { alpha, limit } => {
                let gate = gate.min(limit);
                gate / (1. + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.)
            }
            _ => gate / (1. + (-gate).exp()) * up,
        };
        let of_token = |(token, x): (usize, &[f32])| {
            let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            let mut sum = vec![0.; hidden];
            for pair in token * choice.top_k..(token + 1) * choice.top_k {
                let expert = choice.ids[pair] as usize;
                let (gate, up) = (product(0, expert, &x, inner), product(1, expert, &x, inner));
                let joined: Vec<f64> = gate.into_iter().zip(up).map(|(gate, up)| join(gate, up)).collect();
                for (sum, product) in sum.iter_mut().zip(product(2, expert, &joined, hidden)) {
                    *sum += f64::from(choice.routing_weights[pair]) * product;
                }
            }
            sum
        };
        x.chunks(hidden).enumerate().flat_map(of_token).collect()
    }
}

/// Activations that keep everything within the range of f16.
fn x(dims: &[usize], dtype: DType, seed: u64) -> Tensor {
    (tensor(dims, seed) * 0.05).unwrap().to_dtype(dtype).unwrap()
}

/// One step for each of several sequences (`[tokens, 1, hidden]`), or all tokens of one (`[1, tokens, hidden]`).
fn forward(experts: &Experts, device: &Device, x: &Tensor, choice: &Choice, steps: bool) -> Tensor {
    let lead = if steps { [choice.tokens(), 1] } else { [1, choice.tokens()] };
    let dims = [&lead[..], &[choice.top_k]].concat();
    let ids = Tensor::from_slice(&choice.ids, dims.as_slice(), device).unwrap();
    let routing_weights = Tensor::from_slice(&choice.routing_weights, dims.as_slice(), device).unwrap();
    let hidden = x.dims()[x.rank() - 1];
    let x = x.reshape((lead[0], lead[1], hidden)).unwrap().to_device(device).unwrap();
    let y = experts.forward(&x, &ids, &routing_weights).unwrap();
    assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()));
    assert!(y.device().same_device(device));
    y.reshape(((), hidden)).unwrap()
}

/// The sums of all tokens together, and each element, against f64; twice the same bits.
#[track_caller]
fn check(device: &Device, block: &Block, dtype: DType, choice: &Choice, steps: bool) {
    let hidden = block.gate.dims()[2];
    // The weights of MXFP8 go up to 3584.
    let small = if block.gate.format() == QuantFormat::MXFP8 { 1. / 64. } else { 1. };
    let x = (x(&[choice.tokens(), hidden], dtype, 700) * small).unwrap();
    let experts = block.on(device);
    let y = forward(&experts, device, &x, choice, steps);
    let what = format!("{:?}, {dtype:?}, {} tokens, steps: {steps}", block.gate, choice.tokens());
    // Joined projections are rounded to the dtype of x; in tiles, weights too.
    let bound = match (dtype, steps) {
        (DType::F32, _) => 2e-6,
        (DType::F16, true) => 6e-4,
        (DType::F16, false) => 1.2e-3,
        (_, true) => 5e-3,
        (_, false) => 1e-2,
    };
    let (actual, expected) = (flat(&y), block.expected(&flat(&x), choice));
    let error = relative_error(&actual, &expected);
    assert!(error < bound, "{what}: relative error {error:.2e}");
    let rms = (expected.iter().map(|e| e * e).sum::<f64>() / expected.len() as f64).sqrt();
    // Scales that are products of two random numbers differ more, and so do errors.
    let spread = if block.gate.format().scale() == Scale::SuperBlock { 16. } else { 8. };
    for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        let error = (f64::from(*actual) - expected).abs();
        let (token, row) = (index / hidden, index % hidden);
        let most = spread * bound * rms.max(expected.abs());
        assert!(error < most, "{what}: token {token}, row {row}: {actual}, not {expected}");
    }
    if repeats() {
        let again = forward(&experts, device, &x, choice, steps);
        assert_eq!(bits(&y), bits(&again), "{what}: not the same twice");
    }
}

/// K that are whole groups but no whole loads or steps among them.
fn dims(format: QuantFormat, index: usize) -> [usize; 2] {
    let group = format.granularity();
    match index % 3 {
        0 => [128usize.next_multiple_of(group); 2],
        // Super-blocks are whole loads and steps anyway.
        1 if group == SUPER_BLOCK => [group, 2 * group],
        1 => [3 * group, 5 * group],
        _ => [(9 * 128usize).next_multiple_of(group), 2 * group.max(32)],
    }
}

#[test]
fn every_format_step_by_step() {
    let Some(device) = device() else { return };
    for (index, format) in formats().enumerate() {
        for &(other, dtype) in alike(&[(0, DType::F16), (1, DType::BF16)], index) {
            let [inner, hidden] = dims(format, index + other);
            let block = Block::new(format, [5, inner, hidden], 710 + index as u64);
            check(&device, &block, dtype, &Choice::new(3, 2, 5, 711), true);
        }
    }
}

/// More than a tile for one expert, none for others.
#[test]
fn every_format_in_tiles() {
    let Some(device) = device() else { return };
    for (index, format) in formats().enumerate() {
        for &(other, dtype) in alike(&[(0, DType::F16), (1, DType::BF16)], index) {
            let group = format.granularity();
            let [inner, hidden] =
                if (index + other) % 2 == 0 { [group, 3 * group] } else { [3 * group, group] };
            let block = Block::new(format, [4, inner, hidden], 720 + index as u64);
            let mut choice = Choice::new(75, 2, 3, 721);
            choice.ids[0] = 3;
            check(&device, &block, dtype, &choice, false);
        }
    }
}

#[test]
fn f32_activations_and_f32_scales() {
    let Some(device) = device() else { return };
    for (index, format) in formats().enumerate() {
        let [inner, hidden] = dims(format, index).map(|k| k.min(256));
        let [inner, hidden] = [inner, hidden].map(|k| k.next_multiple_of(format.granularity()));
        let block = Block::new(format, [3, inner, hidden], 730 + index as u64);
        check(&device, &block, DType::F32, &Choice::new(3, 2, 3, 731), true);
        check(&device, &block, DType::F32, &Choice::new(13, 2, 3, 732), false);
        if format.scale() != Scale::Float {
            continue;
        }
        let stack = |n, k| random(&[3, n, k], format, DType::F32, 733);
        let block = Block { gate: stack(inner, hidden), up: stack(inner, hidden), ..block };
        check(&device, &block, DType::BF16, &Choice::new(3, 2, 3, 734), true);
        check(&device, &block, DType::F16, &Choice::new(13, 2, 3, 735), false);
    }
}

#[test]
fn biases_and_clamped_gates() {
    let Some(device) = device() else { return };
    let dtypes = [DType::F16, DType::BF16, DType::F32];
    for (index, format) in KINDS.into_iter().enumerate() {
        let [inner, hidden] = dims(format, index);
        let types = [0, 1, 2].map(|i| dtypes[(index + i) % 3]);
        let block = Block::new(format, [3, inner, hidden], 740).with_biases(types);
        let block = Block { gating: CLAMPED, ..block };
        for dtype in dtypes {
            check(&device, &block, dtype, &Choice::new(2, 2, 3, 741), true);
            check(&device, &block, dtype, &Choice::new(9, 3, 3, 742), false);
        }
    }
}

/// Few rows and long ones: K of every projection is split over blocks.
#[test]
fn k_that_is_split_over_blocks() {
    let Some(device) = device() else { return };
    for format in [KINDS[0], KINDS[3]] {
        for [inner, hidden] in
            [[24, 8192], [8192, 24]].map(|dims| dims.map(|n: usize| n.next_multiple_of(64)))
        {
            let block = Block::new(format, [2, inner, hidden], 750).with_biases([DType::F16; 3]);
            for top_k in [1, 2] {
                check(&device, &block, DType::F16, &Choice::new(2, top_k, 2, 751), true);
            }
        }
    }
}

#[test]
fn global_scales_of_experts_and_symmetric_codes() {
    let Some(device) = device() else { return };
    let scaled = |stack: QuantTensor, scales: &[f32]| {
        let scales = Tensor::new(scales, &Device::Cpu).unwrap();
        let (packed, of_groups) = (stack.packed().clone(), stack.scales().clone());
        QuantTensor::new(stack.format(), packed, of_groups, None, Some(scales)).unwrap()
    };
    for format in [QuantFormat::NVFP4, QuantFormat::MXFP4] {
        let block = Block::new(format, [3, 96, 64], 760);
        let gate = scaled(block.gate, &[0.5, 3., 0.25]);
        // One for all, and none at all.
        let up = scaled(block.up, &[0.75]);
        let block = Block { gate, up, ..block };
        for dtype in [DType::F16, DType::F32] {
            check(&device, &block, dtype, &Choice::new(3, 2, 3, 761), true);
            check(&device, &block, dtype, &Choice::new(9, 2, 3, 762), false);
        }
    }
    let block = Block::new(KINDS[0], [3, 64, 128], 763);
    let block = Block { up: symmetric(&block.up), down: symmetric(&block.down), ..block };
    for dtype in [DType::BF16, DType::F32] {
        check(&device, &block, dtype, &Choice::new(3, 2, 3, 764), true);
        check(&device, &block, dtype, &Choice::new(9, 2, 3, 765), false);
    }
}

/// More pairs than the warps that sort take at a time, and more experts than there are threads for them.
#[test]
fn long_prompts() {
    let Some(device) = device() else { return };
    for experts in [3, 40, 300] {
        let block = Block::new(QuantFormat::MXFP4, [experts, 32, 32], 775);
        check(&device, &block, DType::F16, &Choice::new(350, 3, experts, 776), false);
    }
}

/// Scales of gate and up that differ in dtype are not taken for those of one another, of few pairs and of many.
#[test]
fn gate_and_up_that_differ() {
    let Some(device) = device() else { return };
    let dims = [3, 64, 128];
    let up = random(&dims, KINDS[0], DType::BF16, 768);
    let block = Block { up, ..Block::new(KINDS[0], dims, 767) };
    for (tokens, steps) in [(2, true), (40, false)] {
        check(&device, &block, DType::F16, &Choice::new(tokens, 2, 3, 769), steps);
    }
}

/// An id of no expert makes its token NaN, and no other.
#[test]
fn ids_out_of_range() {
    let Some(device) = device() else { return };
    for format in [KINDS[0], QuantFormat::NVFP4] {
        let experts = Block::new(format, [3, 128, 64], 770).on(&device);
        for dtype in [DType::F16, DType::F32] {
            for (steps, tokens) in [(true, 4), (false, 70)] {
                let sound = Choice::new(tokens, 2, 3, 771);
                let mut choice = sound.clone();
                // One past the last, a sum that overflows, and the largest there is; of either slot.
                (choice.ids[0], choice.ids[3], choice.ids[4]) = (3, 0x8000_0001, u32::MAX);
                let x = x(&[tokens, 64], dtype, 772);
                let expected = flat(&forward(&experts, &device, &x, &sound, steps));
                let y = flat(&forward(&experts, &device, &x, &choice, steps));
                for (token, (y, expected)) in y.chunks(64).zip(expected.chunks(64)).enumerate() {
                    match token {
                        0..3 => assert!(y.iter().all(|y| y.is_nan()), "{format} token {token}: {y:?}"),
                        _ => assert_eq!(y, expected, "{format} {dtype:?} token {token}"),
                    }
                }
            }
        }
    }
}

/// In a step of a decode the bits of a token do not depend on the others, however many.
#[test]
fn a_step_is_the_same_in_any_batch() {
    let Some(device) = device() else { return };
    for (format, dtype) in [(KINDS[0], DType::BF16), (QuantFormat::NVFP4, DType::F16), (KINDS[1], DType::F32)]
    {
        // More pairs than twice the experts.
        let tokens = 9;
        let experts = Block::new(format, [2, 384, 128], 780).on(&device);
        let (choice, x) = (Choice::new(tokens, 2, 2, 781), x(&[tokens, 128], dtype, 782));
        let all = bits(&forward(&experts, &device, &x, &choice, true));
        for token in 0..tokens {
            let part = |values: &[u32]| values[token * 2..][..2].to_vec();
            let alone = Choice {
                ids: part(&choice.ids),
                routing_weights: choice.routing_weights[token * 2..][..2].to_vec(),
                top_k: 2,
            };
            let y = forward(&experts, &device, &x.narrow(0, token, 1).unwrap(), &alone, true);
            assert_eq!(bits(&y), all[token * 128..][..128], "{format} token {token}");
        }
    }
}

/// More pairs than one launch takes.
#[test]
fn a_batch_of_several_launches() {
    let Some(device) = device() else { return };
    let experts = Block::new(QuantFormat::MXFP4, [2, 32, 32], 790).on(&device);
    let choice = Choice::new(1100, 4, 2, 791);
    let x = x(&[1100, 32], DType::F16, 792);
    let y = flat(&forward(&experts, &device, &x, &choice, true));
    for &token in alike(&[1024, 0, 1023, 1099], 0) {
        let part = |range: std::ops::Range<usize>| {
            (choice.ids[range.clone()].to_vec(), choice.routing_weights[range].to_vec())
        };
        let (ids, routing_weights) = part(token * 4..token * 4 + 4);
        let alone = Choice { ids, routing_weights, top_k: 4 };
        let one = forward(&experts, &device, &x.narrow(0, token, 1).unwrap(), &alone, true);
        assert_eq!(flat(&one), y[token * 32..][..32], "token {token}");
    }
}
