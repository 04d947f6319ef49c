//! Several products in one launch: merged, gated, with a residual.

use crate::expected::{Expected, KINDS};
use crate::packed::{bits, flat, random, tensor};
use crate::{alike, device};
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::rms_norm_matmul;
use candle_quant::{nn, nn::LayerWeight, Linear, QuantFormat, QuantTensor};

/// A layer on the CPU and on the device.
struct Layer {
    weight: QuantTensor,
    bias: Option<Tensor>,
    there: Linear,
}

impl Layer {
    fn new(device: &Device, n: usize, k: usize, format: QuantFormat, bias: Option<DType>, seed: u64) -> Self {
        let weight = random(&[n, k], format, DType::F16, seed);
        let bias = bias.map(|dtype| tensor(&[n], seed + 1).to_dtype(dtype).unwrap());
        let bias_there = bias.as_ref().map(|bias| bias.to_device(device).unwrap());
        let there = Linear::from_quant(weight.to_device(device).unwrap(), bias_there);
        Self { weight, bias, there }
    }

    fn expected(&self, x: &Tensor) -> Expected {
        Expected::new(&self.weight, x, self.bias.as_ref())
    }
}

#[test]
fn merged_products() {
    let Some(device) = device() else { return };
    for format in KINDS {
        let k = 5 * format.granularity().max(32);
        let layers = [(130, Some(DType::F32)), (24, None), (40, Some(DType::BF16))];
        let [q, key, v] = layers.map(|(n, bias)| Layer::new(&device, n, k, format, bias, 500 + n as u64));
        for m in [1, 2, 3, 8, 13, 16, 20] {
            for &dtype in alike(&[DType::F16, DType::BF16], m) {
                let x = tensor(&[m, k], 501).to_dtype(dtype).unwrap();
                let there = x.to_device(&device).unwrap();
                let products = nn::forward_all([&q.there, &key.there, &v.there], &there).unwrap();
                for (index, (product, layer)) in products.iter().zip([&q, &key, &v]).enumerate() {
                    let what = format!("{format} {dtype:?} M={m}, layer {index}");
                    layer.expected(&x).check(product, dtype, &what);
                }
                let two = nn::forward_all([&v.there, &key.there], &there).unwrap();
                v.expected(&x).check(&two[0], dtype, "the first of two");
                key.expected(&x).check(&two[1], dtype, "the second of two");
            }
        }
    }
}

/// A merged launch that splits k.
#[test]
fn merged_products_of_long_rows() {
    let Some(device) = device() else { return };
    let layers = [40, 24, 17].map(|n| Layer::new(&device, n, 8192, KINDS[0], None, 510 + n as u64));
    for m in [1, 16] {
        let x = tensor(&[m, 8192], 511).to_dtype(DType::F16).unwrap();
        let there = x.to_device(&device).unwrap();
        let forward = || nn::forward_all(layers.each_ref().map(|layer| &layer.there), &there).unwrap();
        let products = forward();
        for (product, layer) in products.iter().zip(&layers) {
            layer.expected(&x).check(product, DType::F16, &format!("M={m}"));
        }
        assert_eq!(products.each_ref().map(bits), forward().each_ref().map(bits));
    }
}

/// Layers that one launch cannot take are computed one after another: other formats, more than three, f32.
#[test]
fn products_that_do_not_merge() {
    let Some(device) = device() else { return };
    let formats = [KINDS[0], KINDS[1], KINDS[0], KINDS[0]];
    let layers = [0, 1, 2, 3].map(|i| Layer::new(&device, 20 + i, 128, formats[i], None, 520 + i as u64));
    for dtype in [DType::F16, DType::F32] {
        let x = tensor(&[2, 128], 521).to_dtype(dtype).unwrap();
        let there = x.to_device(&device).unwrap();
        let products = nn::forward_all(layers.each_ref().map(|layer| &layer.there), &there).unwrap();
        for (product, layer) in products.iter().zip(&layers) {
            layer.expected(&x).check(product, dtype, &format!("{dtype:?}"));
        }
    }
    let told = nn::forward_all([&layers[0].there], &tensor(&[2, 64], 1).to_device(&device).unwrap());
    assert!(told.unwrap_err().to_string().contains("expected last dimension 128"));
}

/// Formats that one launch computes all of it for. MXINT8, NF4, FP4 and FP8, which have no GEMV, take a launch for each step.
fn rounded_once() -> impl Iterator<Item = QuantFormat> {
    let fp8 = [32, 64, 128].map(|group_size| QuantFormat::fp8_opt(group_size).unwrap());
    let others = [QuantFormat::MXINT8, QuantFormat::NF4, QuantFormat::FP4];
    KINDS.into_iter().filter(move |format| !fp8.contains(format) && !others.contains(format))
}

#[test]
fn gated_products() {
    let Some(device) = device() else { return };
    for format in rounded_once() {
        let k = 5 * format.granularity().max(32);
        for (n, bias) in [(1, None), (50, Some(DType::F16)), (130, None)] {
            let gate = Layer::new(&device, n, k, format, bias, 530);
            let up = Layer::new(&device, n, k, format, bias, 540);
            for m in [1, 2, 4, 7, 16, 19] {
                for &dtype in alike(&[DType::F16, DType::BF16], m) {
                    let x = tensor(&[m, k], 531).affine(0.1, 0.).unwrap().to_dtype(dtype).unwrap();
                    let product = nn::swiglu(&gate.there, &up.there, &x.to_device(&device).unwrap()).unwrap();
                    let (gates, ups) = (gate.expected(&x), up.expected(&x));
                    let silu = |g: f64| g / (1. + (-g).exp());
                    // An error of the gate is passed on times at most 1.1 |up|, and conversely.
                    let magnitude = |i: usize| {
                        let (g, u): (f64, f64) = (gates.products[i], ups.products[i]);
                        1.1 * gates.magnitudes[i] * u.abs()
                            + ups.magnitudes[i] * g.abs()
                            + silu(g).abs() * u.abs()
                    };
                    let magnitudes = (0..gates.products.len()).map(magnitude).collect();
                    let mut expected = gates_times_ups(&gates, &ups, silu);
                    expected.magnitudes = magnitudes;
                    expected.check(&product, dtype, &format!("{format} {dtype:?} N={n} M={m}"));
                }
            }
        }
    }
}

/// Scales of two dtypes, which one launch does not take.
#[test]
fn gated_products_of_weights_that_differ() {
    let Some(device) = device() else { return };
    let [gate, up] = [(DType::F16, 553), (DType::BF16, 554)].map(|(dtype, seed)| {
        let weight = random(&[50, 128], KINDS[0], dtype, seed);
        let there = Linear::from_quant(weight.to_device(&device).unwrap(), None);
        Layer { weight, bias: None, there }
    });
    for m in [1, 20] {
        let x = tensor(&[m, 128], 555).to_dtype(DType::BF16).unwrap();
        let product = nn::swiglu(&gate.there, &up.there, &x.to_device(&device).unwrap()).unwrap();
        let expected = gates_times_ups(&gate.expected(&x), &up.expected(&x), |g| g / (1. + (-g).exp()));
        let error = crate::packed::relative_error(&flat(&product), &expected.products);
        assert!(error < 1e-2, "M={m}: {error:.2e}");
    }
}

fn gates_times_ups(gates: &Expected, ups: &Expected, silu: impl Fn(f64) -> f64) -> Expected {
    gates.clone().map(|i, gate| silu(gate) * ups.products[i])
}

/// Where one launch cannot gate, candle's operations do.
#[test]
fn gated_products_of_many_rows_and_of_f32() {
    let Some(device) = device() else { return };
    let gate = Layer::new(&device, 50, 128, KINDS[0], None, 550);
    let up = Layer::new(&device, 50, 128, KINDS[0], None, 551);
    for (m, dtype) in [(2, DType::F32), (140, DType::F32)] {
        let x = tensor(&[m, 128], 552).to_dtype(dtype).unwrap();
        let product = nn::swiglu(&gate.there, &up.there, &x.to_device(&device).unwrap()).unwrap();
        let expected = gates_times_ups(&gate.expected(&x), &up.expected(&x), |g| g / (1. + (-g).exp()));
        let error = crate::packed::relative_error(&flat(&product), &expected.products);
        assert!(error < 2e-6, "M={m} {dtype:?}: {error:.2e}");
    }
}

#[test]
fn products_added_to_a_residual() {
    let Some(device) = device() else { return };
    for format in rounded_once() {
        let k = 5 * format.granularity().max(32);
        let layer = Layer::new(&device, 50, k, format, Some(DType::F32), 560);
        for m in [1, 5, 16, 19] {
            for dtype in [DType::F16, DType::BF16] {
                let x = tensor(&[m, k], 561).to_dtype(dtype).unwrap();
                let residual = tensor(&[m, 50], 562).to_dtype(dtype).unwrap();
                let (there, residual_there) =
                    (x.to_device(&device).unwrap(), residual.to_device(&device).unwrap());
                let sum = nn::forward_add(&layer.there, &there, &residual_there).unwrap();
                let residual = flat(&residual);
                let expected = layer.expected(&x).map(|i, product| product + f64::from(residual[i]));
                expected.check(&sum, dtype, &format!("{format} {dtype:?} M={m}"));
            }
        }
    }
}

fn packed(weight: &LayerWeight) -> &QuantTensor {
    let LayerWeight::Quantized(weight) = weight else { panic!("{weight:?}") };
    weight
}

/// A norm within the launch: weights of all formats, one row and several, K split, of even and of large numbers.
#[test]
fn products_of_a_normalized_x() {
    let Some(device) = device() else { return };
    // Squares of those of F16 and of BF16: found, and of halves.
    let mut errors = [[0.; 2]; 2];
    for format in rounded_once() {
        let group = format.granularity().max(32);
        for (k, n, m) in [
            (5 * group, 50, 1),
            (8192, 17, 1),
            (5 * group, 50, 3),
            (8192, 17, 8),
            (3 * group, 24, 7),
            (3 * group, 50, 40),
        ] {
            let [first, second] = [n, n + 3].map(|n| Layer::new(&device, n, k, format, None, 570 + n as u64));
            for (dtype, size) in
                [(DType::F16, 1.), (DType::BF16, 1.), (DType::F16, 1000.), (DType::BF16, 1e-3)]
            {
                let x = (tensor(&[m, k], 571) * size).unwrap().to_dtype(dtype).unwrap();
                let weight = (tensor(&[k], 572) * 2.).unwrap();
                let eps = 1e-5;
                // In f64; what is multiplied has the digits of an f32.
                let rows = flat(&x);
                let weights = flat(&weight);
                let normalized: Vec<f32> = rows
                    .chunks(k)
                    .flat_map(|row| {
                        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                        let scale = 1. / (squares / k as f64 + eps).sqrt();
                        let products = row
                            .iter()
                            .zip(&weights)
                            .map(move |(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32);
                        products.collect::<Vec<_>>()
                    })
                    .collect();
                let normalized = Tensor::from_vec(normalized, (m, k), &Device::Cpu).unwrap();
                let norm = candle_nn::RmsNorm::new(weight.to_device(&device).unwrap(), eps);
                let there = x.to_device(&device).unwrap();
                let weights = [first.there.weight(), second.there.weight()].map(packed);
                let found = rms_norm_matmul(&there, &norm, weights).unwrap();
                for (found, layer) in found.iter().zip([&first, &second]) {
                    let expected = layer.expected(&normalized);
                    // Tensor cores take x as halves.
                    let halves = layer.expected(&normalized.to_dtype(DType::F16).unwrap()).products;
                    let halves = Tensor::new(halves, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                    let error =
                        |found: &Tensor| crate::packed::relative_error(&flat(found), &expected.products);
                    let (found, halves) = (error(found), error(&halves));
                    let all = &mut errors[usize::from(dtype == DType::BF16)];
                    *all = [all[0] + found * found, all[1] + halves * halves];
                }
            }
        }
    }
    for [found, halves] in errors {
        assert!(found <= 1.05f64.powi(2) * halves, "{found:.2e}, rounded {halves:.2e}");
    }
}
