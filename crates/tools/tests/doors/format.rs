//! The doors, for one format. Expected values are f64 sums over elements that `packed::reference` reads by the letter
//! of the format.

use crate::conversion::{self, Source};
use crate::packed::{bits, flat, numbers, random, reference, tensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::checkpoint::Weight;
use candle_quant::format::Element;
use candle_quant::nn::{ExpertStack, Experts, Gating};
use candle_quant::{Activation, Checkpoint, Embedding, Linear, QuantFormat, QuantTensor, VarBuilder};
use candle_quant_tools::convert::{ConvertOptions, Recipe, Spec};
use candle_quant_tools::verify::verify;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use std::path::Path;

/// Rows and columns of the weights: no multiple of what any kernel takes at a time; three whole groups of 128.
const N: usize = 41;
const K: usize = 384;

/// Columns of a weight that is only read: three of whatever cannot be cut.
fn columns(format: QuantFormat) -> usize {
    3 * format.granularity().max(K / 3)
}

/// The relative error that quantizing normal numbers may have: uniform in a step of the widest group, of which one bit
/// leaves the range or nothing; of E4M3 in a step of its three mantissa bits.
fn bound(format: QuantFormat) -> f64 {
    match (format.element(), format.bits()) {
        (Element::E4m3, _) => 0.04,
        (_, 1) => 2.,
        (_, 2) => 0.55,
        (_, 3) => 0.3,
        (_, 4) => 0.16,
        (_, 5) => 0.08,
        (_, 6) => 0.04,
        _ => 0.015,
    }
}

fn relative(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let errors = squares(&mut got.iter().zip(want).map(|(got, want)| f64::from(*got) - want));
    (errors / squares(&mut want.iter().copied())).sqrt()
}

/// `x * w^T` in f64.
fn product(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(move |w| dot(x, w))).collect()
}

/// All doors, for a format that weights can be quantized to.
pub fn passes_every_door(format: QuantFormat, device: &Device) {
    let dense = tensor(&[N, K], 7).to_device(device).unwrap();
    let weight = QuantTensor::quantize(&dense, format).unwrap();
    assert_eq!(weight.format(), format);
    let on_cpu = weight.to_device(&Device::Cpu).unwrap();
    let elements = reference(&on_cpu);
    let dense: Vec<f64> = flat(&dense).into_iter().map(f64::from).collect();
    let error = relative(&elements, &dense);
    assert!(error <= bound(format), "{format}: quantized with a relative error of {error}");
    weight_passes(&weight, &elements);

    let stack = QuantTensor::quantize(&tensor(&[4, K, K], 9).to_device(device).unwrap(), format).unwrap();
    experts_pass(&stack);
    let folder = tempfile::tempdir().unwrap();
    save(&on_cpu, folder.path());
    loaded_passes(folder.path(), &elements, device);
    converted_passes(format, device);
}

/// The doors of a format that is only read: random codes under scales in F32.
pub fn read_only_passes_every_door(format: QuantFormat, device: &Device) {
    let k = columns(format);
    let weight = random(&[N, k], format, DType::F32, 11);
    assert_eq!(weight.format(), format);
    weight_passes(&weight.to_device(device).unwrap(), &reference(&weight));
    experts_pass(&random(&[4, k, k], format, DType::F32, 9).to_device(device).unwrap());
    let refused = QuantTensor::quantize(&tensor(&[N, k], 11), format).unwrap_err().to_string();
    assert!(refused.contains(&format.to_string()), "{refused}");
}

/// Dequantize, matmul, embed, narrow.
fn weight_passes(weight: &QuantTensor, elements: &[f32]) {
    let (format, device, k) = (weight.format(), weight.device(), weight.dims()[1]);
    let same_bits = |got: &Tensor, want: &[f32], door: &str| {
        let want = want.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        assert!(bits(got) == want, "{format}: {door} has other bits than the format's definition");
    };
    same_bits(&weight.dequantize(DType::F32).unwrap(), elements, "dequantize");

    let linear = Linear::from_quant(weight.clone(), None);
    for m in [1, 2, 8, 40] {
        let x = numbers(m * k, 13 + m as u64);
        let y = linear.forward(&Tensor::from_slice(&x, (m, k), device).unwrap()).unwrap();
        let error = relative(&flat(&y), &product(&x, elements, k));
        assert!(error <= 2e-6, "{format}: matmul with M = {m} has a relative error of {error:e}");
    }

    let ids = [40u32, 0, 7, 7];
    let rows = Embedding::from_quant(weight.clone(), DType::F32).unwrap();
    let rows = rows.forward(&Tensor::new(&ids, device).unwrap()).unwrap();
    let expected: Vec<f32> = ids.iter().flat_map(|id| &elements[*id as usize * k..][..k]).copied().collect();
    same_bits(&rows, &expected, "embed");

    let third = k / 3;
    let part = weight.narrow(0, 3, 30).unwrap().narrow(1, third, 2 * third).unwrap();
    let expected: Vec<f32> =
        (3..33).flat_map(|row| &elements[row * k + third..][..2 * third]).copied().collect();
    same_bits(&part.dequantize(DType::F32).unwrap(), &expected, "narrow");
}

/// A block of experts of which each token takes two.
fn experts_pass(stack: &QuantTensor) {
    let (format, device, k) = (stack.format(), stack.device(), stack.dims()[2]);
    let matrices = reference(&stack.to_device(&Device::Cpu).unwrap());
    let matrix = |expert: usize| &matrices[expert * k * k..][..k * k];
    let projection = || ExpertStack::from_quant(stack.clone(), None).unwrap();
    let gating = Gating::Plain(Activation::Silu);
    let experts = Experts::new(projection(), projection(), projection(), gating).unwrap();
    for tokens in [1usize, 5, 40] {
        let x: Vec<f32> = numbers(tokens * k, 17).iter().map(|x| x / 16.).collect();
        let ids: Vec<u32> =
            (0..tokens as u32).flat_map(|token| [token % 4, (token + 1 + token / 4 % 3) % 4]).collect();
        let y = experts.forward(
            &Tensor::from_slice(&x, (1, tokens, k), device).unwrap(),
            &Tensor::from_slice(&ids, (1, tokens, 2), device).unwrap(),
            &Tensor::full(0.5f32, (1, tokens, 2), device).unwrap(),
        );
        let mut expected = vec![0f64; tokens * k];
        for (pair, id) in ids.iter().enumerate() {
            let (token, weights) = (pair / 2, matrix(*id as usize));
            let up = product(&x[token * k..][..k], weights, k);
            let gated: Vec<f32> = up.iter().map(|up| (up * up / (1. + (-up).exp())) as f32).collect();
            for (sum, value) in expected[token * k..][..k].iter_mut().zip(product(&gated, weights, k)) {
                *sum += value / 2.;
            }
        }
        let error = relative(&flat(&y.unwrap()), &expected);
        assert!(
            error <= 5e-6,
            "{format}: {tokens} tokens through experts have a relative error of {error:e}"
        );
    }
}

/// Writes a checkpoint of one module, `m`, as MLX lays it out, and a config that names its format.
fn save(weight: &QuantTensor, folder: &Path) {
    let bytes = |tensor: &Tensor| -> Vec<u8> {
        let flat = tensor.flatten_all().unwrap();
        match tensor.dtype() {
            DType::U32 => {
                flat.to_vec1::<u32>().unwrap().iter().flat_map(|value| value.to_le_bytes()).collect()
            }
            DType::F32 => {
                flat.to_vec1::<f32>().unwrap().iter().flat_map(|value| value.to_le_bytes()).collect()
            }
            _ => flat.to_vec1::<u8>().unwrap(),
        }
    };
    let dtype = |tensor: &Tensor| match tensor.dtype() {
        DType::U32 => Dtype::U32,
        DType::F32 => Dtype::F32,
        _ => Dtype::U8,
    };
    let parts = [
        ("m.weight", Some(weight.packed())),
        ("m.scales", Some(weight.scales())),
        ("m.biases", weight.biases()),
    ];
    let parts: Vec<_> =
        parts.into_iter().filter_map(|(name, part)| Some((name, part?, bytes(part?)))).collect();
    let views = parts.iter().map(|(name, part, bytes)| {
        (*name, TensorView::new(dtype(part), part.dims().to_vec(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    let format = weight.format();
    let quantization =
        json!({"mode": format.mode(), "bits": format.bits(), "group_size": format.group_size()});
    std::fs::write(folder.join("config.json"), json!({ "quantization": quantization }).to_string()).unwrap();
}

/// Load and verify.
fn loaded_passes(folder: &Path, elements: &[f32], device: &Device) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let report = verify(&checkpoint);
    assert!(report.passed(true), "{report}");
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, device);
    let layer = candle_quant::linear_no_bias(K, N, vb.pp("m")).unwrap();
    let x = numbers(K, 19);
    let y = layer.forward(&Tensor::from_slice(&x, (1, K), device).unwrap()).unwrap();
    let error = relative(&flat(&y), &product(&x, elements, K));
    assert!(error <= 2e-6, "saved and loaded, a matmul has a relative error of {error:e}");
}

/// What `convert` writes is what `quantize` makes.
fn converted_passes(format: QuantFormat, device: &Device) {
    let weights = numbers(N * K, 23);
    let source = Source::new().with("m.weight", &[N, K], &weights).with_config("{}").finish();
    let mut options =
        ConvertOptions::mlx(Recipe::named("uniform", format!("{format:#}").parse().unwrap()).unwrap());
    options.device = device.clone();
    let out = conversion::convert(&source.open(), &options);
    let Weight::Packed(written) = Checkpoint::open(out.path()).unwrap().weight("m", Some(K)).unwrap() else {
        panic!("{format}: the weight is not packed")
    };
    let written = written.load(&Device::Cpu).unwrap();
    assert_eq!(written.format(), format);
    let dense = Tensor::from_slice(&weights, (N, K), &Device::Cpu).unwrap();
    let quantized = QuantTensor::quantize(&dense, format).unwrap();
    let numbers = |weight: &QuantTensor| bits(&weight.dequantize(DType::F32).unwrap());
    assert!(numbers(&written) == numbers(&quantized), "{format}: convert");
    // What is packed already is copied.
    let keep = ConvertOptions::mlx(Recipe::safe(Spec::Keep));
    let copied = conversion::convert(&Checkpoint::open(out.path()).unwrap(), &keep);
    assert!(
        conversion::content(copied.path()) == conversion::content(out.path()),
        "{format}: convert what is packed"
    );
}
