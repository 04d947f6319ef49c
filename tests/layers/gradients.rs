//! Gradients: through packed weights, against candle_nn on the dequantized weight and against finite differences in
//! f64; through quantization, against an identity.

use crate::packed::{bits, flat, numbers, packed, reference, relative_error, tensor};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{loss::mse, Activation, AdamW, Optimizer, ParamsAdamW, SGD};
use candle_quant::nn::{forward_add, forward_all, swiglu, ExpertStack, Experts, Gating};
use candle_quant::ops::rms_norm_matmul;
use candle_quant::{LayerWeight, Linear, QuantFormat, QuantTensor};

const M: [usize; 7] = [1, 2, 7, 31, 32, 33, 200];

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().copied().map(f64::from).collect()
}

/// The gradient of `variable` in the sum of all elements of `y`, each times its number in `importance`.
fn gradient(y: &Tensor, importance: &Tensor, variable: &Var) -> Tensor {
    let loss = (y * importance.to_dtype(y.dtype()).unwrap().reshape(y.dims()).unwrap()).unwrap();
    let gradients = loss.sum_all().unwrap().backward().unwrap();
    gradients.get(variable).expect("a gradient").clone()
}

/// `dy * weights` in f64.
fn product(dy: &[f64], weights: &[f64], k: usize) -> Vec<f64> {
    let mut all = Vec::new();
    for dy in dy.chunks_exact(weights.len() / k) {
        let mut sums = vec![0.; k];
        for (dy, weights) in dy.iter().zip(weights.chunks_exact(k)) {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += dy * weight);
        }
        all.extend(sums);
    }
    all
}

#[test]
fn gradients_of_x_are_those_of_candle_nn_on_the_dequantized_weight() {
    for (seed, format) in QuantFormat::all().into_iter().enumerate() {
        let (n, k) = (141 + seed, 3 * format.group_size());
        let weight = packed(&[n, k], format, seed as u64);
        let weights = wide(&reference(&weight));
        let dense = candle_nn::Linear::new(weight.dequantize(DType::F32).unwrap(), None);
        let layer = Linear::from_quant(weight, None);
        for m in M {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let of_dtype = |seed, columns| tensor(&[m, columns], seed).to_dtype(dtype).unwrap();
                let (x, importance) = (Var::from_tensor(&of_dtype(201, k)).unwrap(), of_dtype(202, n));
                let got = gradient(&layer.forward(&x).unwrap(), &importance, &x);
                assert_eq!((got.dims(), got.dtype()), (&[m, k][..], dtype));
                let exact = product(&wide(&flat(&importance)), &weights, k);
                let rounded = Tensor::new(exact.as_slice(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let bound = match dtype {
                    DType::F32 => 1e-6,
                    _ => 1.05 * relative_error(&flat(&rounded), &exact),
                };
                let error = relative_error(&flat(&got), &exact);
                assert!(error <= bound, "{format} {dtype:?} M = {m}: {error:.2e} > {bound:.2e}");
                if dtype == DType::F32 {
                    let theirs = gradient(&dense.forward(&x).unwrap(), &importance, &x);
                    let error = relative_error(&flat(&got), &wide(&flat(&theirs)));
                    assert!(error <= 1e-6, "{format} M = {m}: {error:.2e} from candle_nn");
                }
            }
        }
    }
}

/// candle's own matmul with blocks has no gradient, and does not say so.
#[test]
fn gradients_go_through_blocks_of_ggml_types() {
    // More rows than are dequantized at once.
    let (n, k) = (1300, 1024);
    let dense = tensor(&[n, k], 203);
    for blocks in [GgmlDType::Q4_0, GgmlDType::Q6K, GgmlDType::Q8_0, GgmlDType::F16] {
        let weight = QTensor::quantize(&dense, blocks).unwrap();
        let weights = wide(&flat(&weight.dequantize(&Device::Cpu).unwrap()));
        let layer = Linear::new(LayerWeight::from(weight), None);
        for dtype in [DType::F32, DType::BF16] {
            let of_dtype = |seed, columns| tensor(&[2, 3, columns], seed).to_dtype(dtype).unwrap();
            let (x, importance) = (Var::from_tensor(&of_dtype(204, k)).unwrap(), of_dtype(205, n));
            let y = layer.forward(&x).unwrap();
            assert_eq!(bits(&y), bits(&layer.forward(&x.detach()).unwrap()));
            let got = gradient(&y, &importance, &x);
            assert_eq!((got.dims(), got.dtype()), (&[2, 3, k][..], dtype));
            let error = relative_error(&flat(&got), &product(&wide(&flat(&importance)), &weights, k));
            assert!(
                error < if dtype == DType::F32 { 1e-6 } else { 3e-3 },
                "{blocks:?} {dtype:?}: {error:.2e}"
            );
        }
    }
}

#[test]
fn gradients_have_the_same_bits_on_any_number_of_threads() {
    let threads = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let pools = [1, 2, 3].map(threads);
    for format in [QuantFormat::affine(4, 64).unwrap(), QuantFormat::MXFP4, QuantFormat::NVFP4] {
        let weight = packed(&[300, 640], format, 210);
        for m in M {
            let x = Var::from_tensor(&tensor(&[m, 640], 211)).unwrap();
            let importance = tensor(&[m, 300], 212);
            let of_x = || bits(&gradient(&weight.matmul(&x, None).unwrap(), &importance, &x));
            let here = of_x();
            for pool in &pools {
                assert_eq!(pool.install(of_x), here, "{format} M = {m}");
            }
        }
    }
}

/// Gradients that lie in any order, as transposing and broadcasting leave them.
#[test]
fn gradients_of_views() {
    let weight = packed(&[12, 64], QuantFormat::MXFP4, 220);
    let weights = wide(&reference(&weight));
    let x = Var::from_tensor(&tensor(&[2, 5, 64], 221)).unwrap();
    let y = weight.matmul(&x, None).unwrap();
    let importance = tensor(&[12, 5, 2], 222);
    let got = gradient(&y.transpose(0, 2).unwrap(), &importance, &x);
    let expected = product(&wide(&flat(&importance.transpose(0, 2).unwrap())), &weights, 64);
    assert!(relative_error(&flat(&got), &expected) < 1e-6);
    let ones = y.sum_all().unwrap().backward().unwrap();
    let expected = product(&[1.; 2 * 5 * 12], &weights, 64);
    assert!(relative_error(&flat(ones.get(&x).unwrap()), &expected) < 1e-6);
}

/// A matrix and a bias, in f64.
struct Reference {
    weights: Vec<f64>,
    k: usize,
}

impl Reference {
    fn new(weight: &QuantTensor) -> Self {
        Self { weights: wide(&reference(weight)), k: weight.dims()[weight.dims().len() - 1] }
    }

    /// Matrix `index` of a stack of matrices of `n` rows.
    fn matrix(&self, index: usize, n: usize) -> Self {
        Self { weights: self.weights[index * n * self.k..][..n * self.k].to_vec(), k: self.k }
    }

    /// `x * weight^T + bias`
    fn forward(&self, x: &[f64], bias: &[f64]) -> Vec<f64> {
        let mut y = Vec::new();
        for x in x.chunks_exact(self.k) {
            for (weights, bias) in self.weights.chunks_exact(self.k).zip(bias) {
                y.push(weights.iter().zip(x).map(|(w, x)| w * x).sum::<f64>() + bias);
            }
        }
        y
    }
}

fn silu(x: f64) -> f64 {
    x / (1. + (-x).exp())
}

/// A loss in f64 of some inputs, each a list of numbers.
type Loss<'a> = &'a dyn Fn(&[Vec<f64>]) -> f64;

/// Compares gradients of `variables` in the sum of `y`, each element times its number in `importance`, with
/// central differences in f64.
#[track_caller]
fn check(what: &str, y: &Tensor, importance: &Tensor, variables: &[&Var], expected: Loss) {
    const STEP: f64 = 1e-4;
    let mut at: Vec<Vec<f64>> = variables.iter().map(|variable| wide(&flat(variable))).collect();
    let value = f64::from(flat(&(y * importance).unwrap().sum_all().unwrap())[0]);
    let size: f64 = flat(&(y * importance).unwrap()).iter().map(|part| f64::from(part.abs())).sum();
    assert!((value - expected(&at)).abs() < 1e-5 * size, "{what}: {value}, not {}", expected(&at));
    for (which, variable) in variables.iter().enumerate() {
        // Of many numbers some.
        let some = (0..at[which].len()).step_by(1 + at[which].len() / 150);
        let (mut differences, mut got) = (Vec::new(), Vec::new());
        let all = gradient(y, importance, variable);
        assert_eq!(all.dims(), variable.dims(), "{what}: {which}");
        let all = flat(&all);
        for index in some {
            let here = at[which][index];
            let [above, below] = [STEP, -STEP].map(|step| {
                at[which][index] = here + step;
                expected(&at)
            });
            at[which][index] = here;
            differences.push((above - below) / (2. * STEP));
            got.push(all[index]);
        }
        let error = relative_error(&got, &differences);
        assert!(error < 5e-6, "{what}: the gradient of variable {which} is {error:.2e} off");
    }
}

/// The sum of all numbers, each times its importance.
fn weighted(y: &[f64], importance: &Tensor) -> f64 {
    y.iter().zip(wide(&flat(importance))).map(|(y, importance)| y * importance).sum()
}

fn variable(dims: &[usize], seed: u64) -> Var {
    Var::from_tensor(&(tensor(dims, seed) * 0.5).unwrap()).unwrap()
}

#[test]
fn layers_agree_with_finite_differences() {
    for (seed, format) in QuantFormat::all().into_iter().enumerate() {
        let (m, n, k) = (3, 6, format.group_size());
        let weights = [0, 1].map(|i| {
            let dense = (tensor(&[n, k], 230 + seed as u64 + 100 * i) * 0.2).unwrap();
            QuantTensor::quantize(&dense, format).unwrap()
        });
        let dense = [0, 1].map(|i| Reference::new(&weights[i]));
        let (x, biases) = (variable(&[m, k], 231), [variable(&[n], 232), variable(&[n], 233)]);
        let residual = variable(&[m, n], 234);
        let layer = |i: usize| Linear::from_quant(weights[i].clone(), Some(biases[i].as_tensor().clone()));
        let (first, second) = (layer(0), layer(1));
        let importance = tensor(&[m, n], 235);

        let y = first.forward(&x).unwrap();
        check(&format!("Linear {format}"), &y, &importance, &[&x, &biases[0]], &|at| {
            weighted(&dense[0].forward(&at[0], &at[1]), &importance)
        });

        let y = forward_add(&first, &x, &residual).unwrap();
        check(&format!("forward_add {format}"), &y, &importance, &[&x, &biases[0], &residual], &|at| {
            let product = dense[0].forward(&at[0], &at[1]);
            let sum: Vec<f64> = product.iter().zip(&at[2]).map(|(y, residual)| y + residual).collect();
            weighted(&sum, &importance)
        });

        let y = swiglu(&first, &second, &x).unwrap();
        let variables = [&x, &biases[0], &biases[1]];
        check(&format!("swiglu {format}"), &y, &importance, &variables, &|at| {
            let (gate, up) = (dense[0].forward(&at[0], &at[1]), dense[1].forward(&at[0], &at[2]));
            let gated: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up).collect();
            weighted(&gated, &importance)
        });

        let all = forward_all([&first, &second], &x).unwrap();
        let y = (&all[0] * &all[1]).unwrap();
        check(&format!("forward_all {format}"), &y, &importance, &variables, &|at| {
            let (one, other) = (dense[0].forward(&at[0], &at[1]), dense[1].forward(&at[0], &at[2]));
            let products: Vec<f64> = one.iter().zip(other).map(|(one, other)| one * other).collect();
            weighted(&products, &importance)
        });
    }
}

#[test]
fn experts_agree_with_finite_differences() {
    const EXPERTS: usize = 3;
    const TOKENS: usize = 4;
    let ids = [[0u32, 2], [2, 1], [1, 0], [2, 0]];
    for (seed, format) in QuantFormat::all().into_iter().enumerate() {
        let (hidden, inner) = (format.group_size(), format.group_size());
        let rows = [inner, inner, hidden];
        let columns = [hidden, hidden, inner];
        let stacks = [0, 1, 2].map(|i| {
            let dense =
                (tensor(&[EXPERTS, rows[i], columns[i]], 300 + (seed + 100 * i) as u64) * 0.2).unwrap();
            QuantTensor::quantize(&dense, format).unwrap()
        });
        let dense = [0, 1, 2].map(|i| {
            let all = Reference::new(&stacks[i]);
            [0, 1, 2].map(|expert| all.matrix(expert, rows[i]))
        });
        let biases = [0, 1, 2].map(|i| variable(&[EXPERTS, rows[i]], 310 + i as u64));
        let stack = |i: usize| {
            ExpertStack::from_quant(stacks[i].clone(), Some(biases[i].as_tensor().clone())).unwrap()
        };
        let silu_gating = Gating::Plain(Activation::Silu);
        let experts = Experts::new(stack(0), stack(1), stack(2), silu_gating).unwrap();
        let x = variable(&[1, TOKENS, hidden], 320);
        let routing_weights = variable(&[1, TOKENS, 2], 321);
        let chosen = Tensor::new(&[ids], &Device::Cpu).unwrap();
        let importance = tensor(&[1, TOKENS, hidden], 322);
        let y = experts.forward(&x, &chosen, &routing_weights).unwrap();
        let variables = [&x, &routing_weights, &biases[0], &biases[1], &biases[2]];
        check(&format!("experts {format}"), &y, &importance, &variables, &|at| {
            let mut sums = vec![0.; TOKENS * hidden];
            for (token, sums) in sums.chunks_exact_mut(hidden).enumerate() {
                let x = &at[0][token * hidden..][..hidden];
                for (place, expert) in ids[token].into_iter().enumerate() {
                    let expert = expert as usize;
                    let project = |which: usize, x: &[f64]| {
                        let bias = &at[2 + which][expert * rows[which]..][..rows[which]];
                        dense[which][expert].forward(x, bias)
                    };
                    let (gate, up) = (project(0, x), project(1, x));
                    let gated: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up).collect();
                    let routing_weight = at[1][token * 2 + place];
                    let output = project(2, &gated);
                    sums.iter_mut().zip(output).for_each(|(sum, y)| *sum += routing_weight * y);
                }
            }
            weighted(&sums, &importance)
        });
    }
}

#[test]
fn fake_quantization_has_the_values_of_the_quantized_weight() {
    for format in QuantFormat::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for dims in [&[5, 2 * format.group_size()][..], &[3, 2, format.group_size()]] {
                let weight = tensor(dims, 400).to_dtype(dtype).unwrap();
                let expected = QuantTensor::quantize(&weight, format).unwrap().dequantize(dtype).unwrap();
                let weight = Var::from_tensor(&weight).unwrap();
                let got = QuantTensor::fake_quantize(&weight, format).unwrap();
                assert_eq!((got.dims(), got.dtype()), (dims, dtype));
                assert_eq!(bits(&got), bits(&expected), "{format} {dtype:?}");
                // That of an identity, whatever the loss.
                let importance = tensor(dims, 401).to_dtype(dtype).unwrap();
                let expected = gradient(&(weight.as_tensor() * 1.).unwrap(), &importance, &weight);
                assert_eq!(
                    bits(&gradient(&got, &importance, &weight)),
                    bits(&expected),
                    "{format} {dtype:?}"
                );
            }
        }
    }
    // A view of the weight, too.
    let (format, weight) = (QuantFormat::MXFP4, variable(&[64, 6], 402));
    let turned = weight.t().unwrap();
    let got = QuantTensor::fake_quantize(&turned, format).unwrap();
    let expected = QuantTensor::quantize(&turned, format).unwrap().dequantize(DType::F32).unwrap();
    assert_eq!(bits(&got), bits(&expected));
    let importance = tensor(&[6, 64], 403);
    assert_eq!(bits(&gradient(&got, &importance, &weight)), bits(&importance.t().unwrap()));
}

#[test]
fn what_cannot_be_quantized_cannot_be_quantized_for_training() {
    let format = QuantFormat::affine(4, 32).unwrap();
    let mut infinite = numbers(64, 410);
    infinite[7] = f32::INFINITY;
    for weight in [
        Tensor::from_vec(infinite, (2, 32), &Device::Cpu).unwrap(),
        tensor(&[2, 48], 411),
        tensor(&[32], 412),
        tensor(&[2, 32], 413).to_dtype(DType::F64).unwrap(),
    ] {
        let expected = QuantTensor::quantize(&weight, format).unwrap_err().to_string();
        assert_eq!(QuantTensor::fake_quantize(&weight, format).unwrap_err().to_string(), expected);
    }
}

/// A layer of few bits learns to do again what the dense layer did, and is then stored as it was trained.
#[test]
fn layers_of_few_bits_are_repaired() {
    let (n, k, m) = (24, 128, 256);
    let weight = (tensor(&[n, k], 420) * 0.1).unwrap();
    // Inputs that hang together, as those of a model do: else errors of weights cannot make up for each other.
    let x = tensor(&[m, 4], 421).matmul(&tensor(&[4, k], 422)).unwrap();
    let expected = x.matmul(&weight.t().unwrap()).unwrap();
    for (bits, adaptive) in [(2, true), (3, true), (2, false), (3, false)] {
        let format = QuantFormat::affine(bits, 64).unwrap();
        let trained = Var::from_tensor(&weight).unwrap();
        let loss = || {
            let quantized = QuantTensor::fake_quantize(&trained, format).unwrap();
            mse(&x.matmul(&quantized.t().unwrap()).unwrap(), &expected).unwrap()
        };
        let before = flat(&loss())[0];
        let variables = vec![trained.clone()];
        if adaptive {
            let params = ParamsAdamW { lr: 1e-3, weight_decay: 0., ..Default::default() };
            let mut optimizer = AdamW::new(variables, params).unwrap();
            (0..60).for_each(|_| optimizer.backward_step(&loss()).unwrap());
        } else {
            let mut optimizer = SGD::new(variables, 2e-2).unwrap();
            (0..60).for_each(|_| optimizer.backward_step(&loss()).unwrap());
        }
        let stored = Linear::from_quant(QuantTensor::quantize(&trained, format).unwrap(), None);
        let after = flat(&mse(&stored.forward(&x).unwrap(), &expected).unwrap())[0];
        assert!(after < before / 3., "{bits} bits, adaptive {adaptive}: {before} to {after}");
    }
}

/// The norm comes first on a CPU; x has the gradient that it has by the dequantized weight.
#[test]
fn a_normalized_x_has_gradients() {
    let numbers = |dims: (usize, usize)| {
        let count = dims.0 * dims.1;
        let values = (0..count).map(|i| ((i * 37 % 101) as f32 - 50.) / 40.).collect();
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    };
    let weights = [6, 3]
        .map(|n| QuantTensor::quantize(&numbers((n, 64)), QuantFormat::affine(4, 64).unwrap()).unwrap());
    let norm = candle_nn::RmsNorm::new((numbers((1, 64)).squeeze(0).unwrap() + 2.).unwrap(), 1e-5);
    let x = Var::from_tensor(&numbers((2, 64))).unwrap();
    let [found, expected] = [true, false].map(|packed| {
        let products = match packed {
            true => rms_norm_matmul(&x, &norm, weights.each_ref()).unwrap(),
            false => weights.each_ref().map(|weight| {
                let weight = weight.dequantize(DType::F32).unwrap().t().unwrap();
                norm.forward_diff(&x).unwrap().matmul(&weight).unwrap()
            }),
        };
        let loss =
            products.iter().map(|y| y.sqr().unwrap().sum_all().unwrap()).reduce(|a, b| (a + b).unwrap());
        let gradients = loss.unwrap().backward().unwrap();
        gradients.get(&x).expect("a gradient of x").flatten_all().unwrap().to_vec1::<f32>().unwrap()
    });
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-5 * largest, "{found}, not {expected}");
    }
    let wrong = rms_norm_matmul(&numbers((2, 32)), &norm, weights.each_ref()).unwrap_err().to_string();
    assert!(wrong.contains("64") || wrong.contains("32"), "{wrong}");
}
