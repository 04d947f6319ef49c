//! Low-rank adapters of single layers against their definition in f64.

use crate::packed::tensor;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Activation, Module};
use candle_quant::nn::{forward_add, forward_all, swiglu, ExpertStack, Experts, Gating, Lora, LoraConfig};
use candle_quant::{LayerWeight, Linear, QuantFormat, QuantTensor};

const N: usize = 24;
const K: usize = 64;
const RANK: usize = 3;
const SCALE: f64 = 0.75;

fn small(dims: &[usize], seed: u64) -> Tensor {
    (tensor(dims, seed) * 0.3).unwrap()
}

fn lora(seed: u64) -> Lora {
    Lora { a: small(&[RANK, K], seed), b: small(&[N, RANK], seed + 1), scale: SCALE, magnitude: None }
}

/// Lengths that are none of the weight's own.
fn dora(seed: u64) -> Lora {
    let magnitude = (small(&[N], seed + 2).abs().unwrap() + 1.).unwrap();
    Lora { magnitude: Some(magnitude), ..lora(seed) }
}

fn weights() -> Vec<(String, LayerWeight)> {
    let dense = small(&[N, K], 1);
    let packed = |format: QuantFormat| {
        let weight = QuantTensor::quantize(&dense, format).unwrap();
        (format.to_string(), LayerWeight::from(weight))
    };
    let ggml = candle_core::quantized::QTensor::quantize(&dense, candle_core::quantized::GgmlDType::Q8_0);
    vec![
        packed(QuantFormat::affine(4, 32).unwrap()),
        packed(QuantFormat::MXFP4),
        packed(QuantFormat::NVFP4),
        ("ggml".to_string(), ggml.unwrap().into()),
        ("dense".to_string(), dense.clone().into()),
        ("bf16".to_string(), dense.to_dtype(DType::BF16).unwrap().into()),
    ]
}

fn f64s(tensor: &Tensor) -> Vec<Vec<f64>> {
    let tensor = tensor.to_dtype(DType::F64).unwrap();
    tensor.reshape((tensor.elem_count() / tensor.dims().last().unwrap(), ())).unwrap().to_vec2().unwrap()
}

/// The weight that the adapters make of a frozen one, one after another, by the definition.
fn adapted(frozen: &Tensor, loras: &[&Lora]) -> Vec<Vec<f64>> {
    let frozen = f64s(frozen);
    loras.iter().fold(frozen.clone(), |mut sum, lora| {
        let (a, b) = (f64s(&lora.a), f64s(&lora.b));
        for (n, row) in sum.iter_mut().enumerate() {
            let update: Vec<f64> = (0..row.len())
                .map(|k| lora.scale * a.iter().zip(&b[n]).map(|(a, b)| a[k] * b).sum::<f64>())
                .collect();
            let length = frozen[n].iter().zip(&update).map(|(w, u)| (w + u).powi(2)).sum::<f64>().sqrt();
            let rescale = lora.magnitude.as_ref().map_or(1., |m| f64s(m)[0][n] / length);
            row.iter_mut().zip(&update).for_each(|(w, u)| *w = (*w + u) * rescale);
        }
        sum
    })
}

fn times(x: &Tensor, weight: &[Vec<f64>], bias: &Tensor) -> Vec<f64> {
    let (x, bias) = (f64s(x), f64s(bias));
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    x.iter().flat_map(|x| weight.iter().zip(&bias[0]).map(move |(w, b)| dot(x, w) + b)).collect()
}

/// The largest difference, in units of the largest number.
fn error(found: &Tensor, expected: &[f64]) -> f64 {
    let found = f64s(found).concat();
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f64, |most, value| most.max(value.abs()));
    found.iter().zip(expected).fold(0f64, |most, (a, b)| most.max((a - b).abs())) / largest
}

#[test]
fn outputs_are_those_of_the_definition() {
    let (x, bias) = (tensor(&[2, 3, K], 5), small(&[N], 6));
    for (name, weight) in weights() {
        let dense = weight.to_dense(DType::F32).unwrap();
        let (x, bias) = match name.as_str() {
            "bf16" => (x.to_dtype(DType::BF16).unwrap(), bias.to_dtype(DType::BF16).unwrap()),
            _ => (x.clone(), bias.clone()),
        };
        // candle rounds activations for blocks of GGML.
        let bound = match name.as_str() {
            "ggml" | "bf16" => 0.02,
            _ => 2e-5,
        };
        for adapters in
            [vec![lora(10)], vec![dora(20)], vec![lora(10), dora(20)], vec![dora(20), dora(30), lora(10)]]
        {
            let layer = Linear::new(weight.clone(), Some(bias.clone()));
            let alone = layer.forward(&x).unwrap();
            for (index, lora) in adapters.iter().enumerate() {
                layer.adapters().add(&index.to_string(), lora.clone()).unwrap();
            }
            let expected = times(&x, &adapted(&dense, &adapters.iter().collect::<Vec<_>>()), &bias);
            let y = layer.forward(&x).unwrap();
            assert_eq!((y.dims(), y.dtype()), (alone.dims(), x.dtype()));
            let found = error(&y, &expected);
            assert!(found <= bound, "{name}, {} adapters: {found}", adapters.len());
            assert!(error(&alone, &expected) > 10. * bound, "{name}: adapters change something");

            // Fused layers compute them as well.
            let of_all = forward_all([&layer, &layer], &x).unwrap();
            assert!(error(&of_all[1], &expected) <= bound, "{name}");
            let zeros = alone.zeros_like().unwrap();
            assert!(error(&forward_add(&layer, &x, &zeros).unwrap(), &expected) <= bound, "{name}");
            let gated: Vec<_> = expected.iter().map(|y| y * y / (1. + (-y).exp())).collect();
            assert!(error(&swiglu(&layer, &layer, &x).unwrap(), &gated) <= 2. * bound, "{name}");

            // Merged, and packed again.
            let merged = layer.merged(None).unwrap();
            assert!(!merged.adapters().is_active());
            assert!(
                error(
                    &merged.forward(&x.to_dtype(merged.weight().dense().unwrap().dtype()).unwrap()).unwrap(),
                    &expected
                ) <= bound,
                "{name}"
            );
            let packed = layer.merged(Some(QuantFormat::affine(8, 32).unwrap())).unwrap();
            let found = error(&packed.forward(&x).unwrap(), &expected);
            assert!(found <= bound + 0.02, "{name} as 8 bits: {found}");

            for index in 0..adapters.len() {
                assert!(layer.adapters().set_active(&index.to_string(), false));
            }
            assert_eq!(f64s(&layer.forward(&x).unwrap()), f64s(&alone), "{name} without them");
        }
    }
}

/// A weight of several chunks of rows, some of which have a global scale by themselves.
#[test]
fn merging_in_chunks_is_merging_at_once() {
    let (n, k) = (1100, 1024);
    let weight = small(&[n, k], 1);
    let layer = Linear::new(weight.clone(), None);
    let b = Tensor::cat(&[small(&[n - 1, 2], 3), (small(&[1, 2], 4) * 1e5).unwrap()], 0).unwrap();
    let (a, magnitude) = (small(&[2, k], 2), Some((small(&[n], 5).abs().unwrap() * 1e5).unwrap()));
    for magnitude in [None, magnitude] {
        layer.adapters().remove("one");
        let lora = Lora { a: a.clone(), b: b.clone(), scale: SCALE, magnitude };
        layer.adapters().add("one", lora.clone()).unwrap();
        let expected = adapted(&weight, &[&lora]).concat();
        let dense = layer.merged(None).unwrap();
        let dense = dense.weight().dense().unwrap();
        assert!(error(dense, &expected) <= 1e-5);
        for format in [QuantFormat::NVFP4, QuantFormat::affine(4, 64).unwrap()] {
            let packed = layer.merged(Some(format)).unwrap();
            let at_once = QuantTensor::quantize(dense, format).unwrap().dequantize(DType::F32).unwrap();
            let packed = packed.weight().to_dense(DType::F32).unwrap();
            assert_eq!(f64s(&packed), f64s(&at_once), "{format}");
        }
    }
}

#[test]
fn an_adapter_that_changes_nothing_changes_no_bit() {
    let layer = Linear::new(weights().remove(0).1, None);
    let x = tensor(&[4, K], 3);
    let alone = layer.forward(&x).unwrap();
    let zeros = Tensor::zeros((N, RANK), DType::F32, &Device::Cpu).unwrap();
    layer.adapters().add("zero", Lora { b: zeros.clone(), ..lora(1) }).unwrap();
    assert_eq!(f64s(&layer.forward(&x).unwrap()), f64s(&alone));
    // As a training with DoRA begins.
    layer.adapters().remove("zero").unwrap();
    let magnitude = Some(layer.adapters().row_norms().unwrap());
    layer.adapters().add("zero", Lora { b: zeros, magnitude, ..lora(1) }).unwrap();
    assert!(error(&layer.forward(&x).unwrap(), &f64s(&alone).concat()) <= 1e-6);
}

/// Gradients of A, B, magnitudes and x against finite differences in f64, with the lengths of rows held fast.
#[test]
fn gradients_are_those_of_finite_differences() {
    let (x, bias) = (tensor(&[5, K], 3), small(&[N], 4));
    let wanted = tensor(&[5, N], 7);
    for (name, weight) in weights() {
        if matches!(name.as_str(), "ggml" | "bf16") {
            continue; // They round too much.
        }
        for with_magnitude in [false, true] {
            let given = if with_magnitude { dora(40) } else { lora(40) };
            let var = |tensor: &Tensor| Var::from_tensor(tensor).unwrap();
            let (x_var, a, b) = (var(&x), var(&given.a), var(&given.b));
            let magnitude = given.magnitude.as_ref().map(var);
            let layer = Linear::new(weight.clone(), Some(bias.clone()));
            let trained = Lora {
                a: a.as_tensor().clone(),
                b: b.as_tensor().clone(),
                scale: SCALE,
                magnitude: magnitude.as_ref().map(|magnitude| magnitude.as_tensor().clone()),
            };
            layer.adapters().add("trained", trained).unwrap();
            let y = layer.forward(x_var.as_tensor()).unwrap();
            let gradients = (y * &wanted).unwrap().sum_all().unwrap().backward().unwrap();

            // y = x W'^T + bias with W' = (W + s B A) * m / c, and c constant.
            let frozen = f64s(&weight.to_dense(DType::F32).unwrap());
            let rescale_over_m = |lora: &Lora| -> Vec<f64> {
                let plain = adapted(
                    &weight.to_dense(DType::F32).unwrap(),
                    &[&Lora { magnitude: None, ..lora.clone() }],
                );
                plain.iter().map(|row| 1. / row.iter().map(|w| w * w).sum::<f64>().sqrt()).collect()
            };
            let lengths = rescale_over_m(&given);
            let wanted = f64s(&wanted);
            let loss = |x: &[Vec<f64>], a: &[Vec<f64>], b: &[Vec<f64>], m: Option<&[f64]>| -> f64 {
                let mut sum = 0.;
                for (x, wanted) in x.iter().zip(&wanted) {
                    for n in 0..N {
                        let w = |k: usize| {
                            frozen[n][k] + SCALE * (0..RANK).map(|r| b[n][r] * a[r][k]).sum::<f64>()
                        };
                        let y: f64 = (0..K).map(|k| x[k] * w(k)).sum();
                        sum += wanted[n] * y * m.map_or(1., |m| m[n] * lengths[n]);
                    }
                }
                sum
            };
            let (x64, a64, b64) = (f64s(&x), f64s(&given.a), f64s(&given.b));
            let m64 = given.magnitude.as_ref().map(|m| f64s(m).concat());
            // All of it is linear in each number.
            let central = |change: &dyn Fn(f64) -> f64| (change(1e-3) - change(-1e-3)) / 2e-3;
            let with = |rows: &[Vec<f64>], i: usize, j: usize, by: f64| {
                let mut rows = rows.to_vec();
                rows[i][j] += by;
                rows
            };
            let check = |what: &str, var: &Var, found: Vec<f64>, picked: &[(usize, usize)]| {
                let gradient = f64s(gradients.get(var).unwrap());
                let largest = gradient.concat().iter().fold(0f64, |most, g| most.max(g.abs()));
                for (&(i, j), expected) in picked.iter().zip(found) {
                    let distance = (gradient[i][j] - expected).abs() / largest;
                    assert!(
                        distance <= 2e-4,
                        "{name} {what}[{i}, {j}]: {distance}, {} {expected}",
                        gradient[i][j]
                    );
                }
            };
            let m = m64.as_deref();
            let picks = [(0, 0), (1, 7), (2, 33), (2, K - 1)];
            let found = picks.map(|(i, j)| central(&|by| loss(&x64, &with(&a64, i, j, by), &b64, m)));
            check("a", &a, found.to_vec(), &picks);
            let found = picks.map(|(i, j)| central(&|by| loss(&with(&x64, i, j, by), &a64, &b64, m)));
            check("x", &x_var, found.to_vec(), &picks);
            let picks = [(0, 0), (5, 1), (N - 1, 2)];
            let found = picks.map(|(i, j)| central(&|by| loss(&x64, &a64, &with(&b64, i, j, by), m)));
            check("b", &b, found.to_vec(), &picks);
            if let (Some(var), Some(m)) = (&magnitude, m) {
                let picks = [(0, 0), (0, 11), (0, N - 1)];
                let changed = |j: usize, by: f64| with(&[m.to_vec()], 0, j, by).concat();
                let found = picks.map(|(_, j)| central(&|by| loss(&x64, &a64, &b64, Some(&changed(j, by)))));
                check("magnitude", var, found.to_vec(), &picks);
            }
        }
    }
}

const EXPERTS: usize = 5;

fn stack(n: usize, k: usize, seed: u64, packed: bool) -> (ExpertStack, Tensor, Lora) {
    let weight = small(&[EXPERTS, n, k], seed);
    let scale = SCALE;
    let lora = Lora {
        a: small(&[EXPERTS, 2, k], seed + 1),
        b: small(&[EXPERTS, n, 2], seed + 2),
        scale,
        magnitude: None,
    };
    if packed {
        let weight = QuantTensor::quantize(&weight, QuantFormat::MXFP8).unwrap();
        let dense = weight.dequantize(DType::F32).unwrap();
        return (ExpertStack::from_quant(weight, None).unwrap(), dense, lora);
    }
    let each = (0..EXPERTS).map(|expert| weight.get(expert).unwrap().into()).collect();
    (ExpertStack::from_each(each, None).unwrap(), weight, lora)
}

#[test]
fn experts_are_those_with_merged_weights() {
    let gating = Gating::Plain(Activation::Silu);
    for (packed, tokens) in [(true, 1), (true, 7), (false, 1), (false, 7)] {
        let stacks = [stack(32, K, 1, packed), stack(32, K, 11, packed), stack(K, 32, 21, packed)];
        let merged = stacks.each_ref().map(|(_, dense, lora)| {
            let update = (lora.b.matmul(&lora.a).unwrap() * SCALE).unwrap();
            let sum = (dense + update).unwrap();
            let each =
                (0..EXPERTS).map(|expert| sum.get(expert).unwrap().contiguous().unwrap().into()).collect();
            ExpertStack::from_each(each, None).unwrap()
        });
        let [gate, up, down] = merged;
        let merged = Experts::new(gate, up, down, gating).unwrap();
        let vars: Vec<_> = stacks
            .iter()
            .flat_map(|(_, _, lora)| [&lora.a, &lora.b])
            .map(|t| Var::from_tensor(t).unwrap())
            .collect();
        for ((stack, _, lora), vars) in stacks.iter().zip(vars.chunks(2)) {
            let (a, b) = (vars[0].as_tensor().clone(), vars[1].as_tensor().clone());
            stack.adapters().add("mine", Lora { a, b, ..lora.clone() }).unwrap();
            let magnitude = Some(
                Tensor::ones(
                    lora.b.dims2().unwrap_or((EXPERTS, lora.b.dim(1).unwrap())),
                    DType::F32,
                    &Device::Cpu,
                )
                .unwrap(),
            );
            let error =
                stack.adapters().add("dora", Lora { magnitude, ..lora.clone() }).unwrap_err().to_string();
            assert!(error.contains("DoRA of experts"), "{error}");
        }
        let slots = stacks.each_ref().map(|(stack, ..)| stack.adapters().clone());
        let [(gate, ..), (up, ..), (down, ..)] = stacks;
        let experts = Experts::new(gate, up, down, gating).unwrap();
        let x = tensor(&[1, tokens, K], 3);
        let ids: Vec<u32> =
            (0..tokens as u32).flat_map(|token| [token * 3 % 4, (token * 3 + 1) % 4]).collect();
        let ids = Tensor::from_vec(ids, (1, tokens, 2), &Device::Cpu).unwrap();
        let routing_weights = small(&[1, tokens, 2], 4);
        let run = |experts: &Experts| experts.forward(&x, &ids, &routing_weights).unwrap();
        let (y, expected) = (run(&experts), run(&merged));
        let found = error(&y, &f64s(&expected).concat());
        assert!(found <= 2e-5, "packed {packed}, {tokens} tokens: {found}");

        let as_8_bits = experts.merged(Some(QuantFormat::affine(8, 32).unwrap())).unwrap();
        for (merged, bound) in [(experts.merged(None).unwrap(), 2e-5), (as_8_bits, 0.05)] {
            let found = error(&run(&merged), &f64s(&expected).concat());
            assert!(found <= bound, "packed {packed}, {tokens} tokens, merged: {found}");
        }

        let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        for var in &vars {
            let gradient = gradients.get(var).unwrap();
            let of_expert = |expert| {
                gradient.get(expert).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap()
            };
            assert!(
                of_expert(0) > 0. && of_expert(4) == 0.,
                "an expert that no token chooses has no gradient"
            );
        }
        slots.iter().for_each(|slot| assert!(slot.set_active("mine", false)));
        assert!(error(&run(&experts), &f64s(&expected).concat()) > 1e-3);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let layer = Linear::new(weights().remove(0).1, None);
    let slot = layer.adapters();
    let message = |lora: Lora| slot.add("new", lora).unwrap_err().to_string();
    let told = message(Lora { a: small(&[RANK, K + 1], 1), ..lora(1) });
    assert_eq!(told, "A of an adapter of rank 3: expected shape [3, 64], found [3, 65]");
    let told = message(Lora { b: small(&[N, RANK + 1], 1), ..lora(1) });
    assert_eq!(told, "B of an adapter of rank 3: expected shape [24, 3], found [24, 4]");
    let told = message(Lora { magnitude: Some(small(&[N + 1], 1)), ..lora(1) });
    assert_eq!(told, "magnitude of an adapter of rank 3: expected shape [24], found [25]");
    assert!(message(Lora { scale: f64::NAN, ..lora(1) }).contains("expected a finite number"));
    assert!(message(Lora { a: small(&[2, RANK, K], 1), ..lora(1) }).contains("found [2, 3, 64]"));

    slot.add("new", lora(1)).unwrap();
    assert_eq!(message(lora(1)), "adapter: expected a name that is not taken, found `new` again");
    assert!(!slot.set_active("old", true) && slot.remove("old").is_none() && slot.get("old").is_none());
    assert_eq!((slot.names(), slot.module()), (vec!["new".to_string()], ""));
    assert_eq!(slot.get("new").unwrap().rank(), RANK);
}

#[test]
fn scales_are_those_of_the_papers() {
    let config = LoraConfig { rank: 16, alpha: 32., rs_lora: false, dora: false };
    assert_eq!(config.scale(), 2.);
    assert_eq!(LoraConfig { rs_lora: true, ..config }.scale(), 8.);
}
