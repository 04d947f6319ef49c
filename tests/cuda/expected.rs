//! Of which formats weights are, and what products with them have to be.

use crate::packed::{flat, reference, scales_and_biases};
use candle_core::{DType, Device, Tensor};
use candle_quant::format::{Element, Scale};
use candle_quant::{QuantFormat, QuantTensor};

/// Of every kind of format one, and of those of GGML and FP8, whose kernels differ, all.
pub const KINDS: [QuantFormat; 25] = [
    QuantFormat::affine_opt(4, 64).unwrap(),
    QuantFormat::affine_opt(3, 32).unwrap(),
    QuantFormat::affine_opt(6, 128).unwrap(),
    QuantFormat::MXFP4,
    QuantFormat::NVFP4,
    QuantFormat::MXFP8,
    QuantFormat::MXINT8,
    QuantFormat::NF4,
    QuantFormat::FP4,
    QuantFormat::Q5_K,
    QuantFormat::Q6_K,
    QuantFormat::fp8_opt(64).unwrap(),
    QuantFormat::IQ4_NL,
    QuantFormat::IQ1_S,
    QuantFormat::IQ1_M,
    QuantFormat::IQ2_XXS,
    QuantFormat::IQ3_XXS,
    QuantFormat::Q2_K,
    QuantFormat::Q3_K,
    QuantFormat::Q4_K,
    QuantFormat::IQ2_XS,
    QuantFormat::IQ3_S,
    QuantFormat::IQ4_XS,
    QuantFormat::fp8_opt(32).unwrap(),
    QuantFormat::fp8_opt(128).unwrap(),
];

/// Every format that has kernels on a device but symmetric ones, which are made of affine weights.
pub fn formats() -> impl Iterator<Item = QuantFormat> {
    let fp8 = QuantFormat::AFFINE_GROUP_SIZES.map(|group_size| QuantFormat::fp8(group_size).unwrap());
    let of_scale =
        |format: &QuantFormat| format.scale() == Scale::SuperBlock || *format == QuantFormat::IQ4_NL;
    QuantFormat::all().into_iter().chain(fp8).chain(QuantFormat::only_read().filter(of_scale))
}

/// The same codes and scales, with codes around zero in place of biases.
pub fn symmetric(weight: &QuantTensor) -> QuantTensor {
    let (packed, scales) = (weight.packed().clone(), weight.scales().clone());
    let format = QuantFormat::symmetric(weight.format().bits(), weight.format().group_size()).unwrap();
    QuantTensor::new(format, packed, scales, None, None).unwrap()
}

/// A product in f64, and for each element the sum of magnitudes by which rounding errors are measured.
#[derive(Clone)]
pub struct Expected {
    pub products: Vec<f64>,
    pub magnitudes: Vec<f64>,
    dims: Vec<usize>,
}

impl Expected {
    /// `x * weight^T + bias` for tensors on the CPU.
    pub fn new(weight: &QuantTensor, x: &Tensor, bias: Option<&Tensor>) -> Self {
        let [n, k] = weight.dims()[..] else { panic!("{weight:?}") };
        let (weights, x_values, bias) = (reference(weight), flat(x), bias.map(flat));
        // What an affine kernel adds up are codes with an offset, not weights.
        let offsets = magnitudes_of_groups(weight);
        let group = weight.format().group_size();
        let (mut products, mut magnitudes) = (Vec::new(), Vec::new());
        for x in x_values.chunks(k) {
            let sums: Vec<f64> =
                x.chunks(group).map(|x| x.iter().map(|x| f64::from(x.abs())).sum()).collect();
            for (row, weights) in weights.chunks(k).enumerate() {
                let dot: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                let bias = bias.as_ref().map_or(0., |bias| f64::from(bias[row]));
                let offsets = &offsets[row * (k / group)..][..k / group];
                let magnitude: f64 = offsets.iter().zip(&sums).map(|(offset, sum)| offset * sum).sum();
                products.push(dot + bias);
                magnitudes.push(magnitude + bias.abs());
            }
        }
        let mut dims = x.dims().to_vec();
        *dims.last_mut().unwrap() = n;
        Self { products, magnitudes, dims }
    }

    /// Of every element something else.
    pub fn map(self, other: impl Fn(usize, f64) -> f64) -> Self {
        let products = self.products.iter().enumerate().map(|(i, product)| other(i, *product)).collect();
        Self { products, ..self }
    }

    /// Asserts shape and dtype, that every element is as near as sums in f32 allow, and that errors
    /// together are hardly larger than those of rounding the results.
    #[track_caller]
    pub fn check(&self, actual: &Tensor, dtype: DType, what: &str) {
        self.check_elements(actual, dtype, what);
        let expected = &self.products;
        let rounded = Tensor::new(expected.as_slice(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let squared = |tensor: &Tensor| -> f64 {
            flat(tensor).iter().zip(expected).map(|(a, e)| (f64::from(*a) - e).powi(2)).sum()
        };
        let norm: f64 = expected.iter().map(|e| e * e).sum();
        let bound = match dtype {
            DType::F32 => 1e-12 * norm,
            // Of a few numbers all might be rounded in their favour.
            _ if expected.len() < 100 => return,
            _ => 1.05f64.powi(2) * squared(&rounded),
        };
        let error = squared(actual);
        assert!(error <= bound, "{what}: relative error {:.2e}", (error / norm).sqrt());
    }

    /// The first two of these.
    #[track_caller]
    pub fn check_elements(&self, actual: &Tensor, dtype: DType, what: &str) {
        assert_eq!((actual.dims(), actual.dtype()), (self.dims.as_slice(), dtype), "{what}");
        let unit = match dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 2f64.powi(-24),
        };
        // Subnormal halves are spaced evenly.
        let smallest = if dtype == DType::F16 { 2f64.powi(-25) } else { 0. };
        for (i, (actual, expected)) in flat(actual).into_iter().zip(&self.products).enumerate() {
            let bound = unit * expected.abs() + 2f64.powi(-16) * self.magnitudes[i] + smallest;
            let error = (f64::from(actual) - expected).abs();
            assert!(
                error <= bound,
                "{what}: element {i}: {actual}, not {expected}: {error:.2e} > {bound:.2e}"
            );
        }
    }
}

/// For each group the largest magnitude that enters the sum, of weights or of what kernels make of codes.
fn magnitudes_of_groups(weight: &QuantTensor) -> Vec<f64> {
    let group = weight.format().group_size();
    let largest = |weights: &[f32]| weights.iter().fold(0f64, |max, w| max.max(f64::from(w.abs())));
    let of_weights = reference(weight);
    let of_weights = of_weights.chunks(group).map(largest);
    let bits = match weight.format().element() {
        Element::Uint(bits) => bits.get(),
        // Integers of a byte.
        Element::Iq4Nl => 8,
        _ => return of_weights.collect(),
    };
    let codes = 2f64.powi(bits as i32 + 1);
    let (scales, biases) = scales_and_biases(weight);
    let biases = biases.unwrap_or_else(|| vec![0.; scales.len()]);
    let groups = scales.into_iter().zip(biases);
    groups.map(|(scale, bias)| f64::from(scale.abs()) * codes + f64::from(bias.abs())).collect()
}
