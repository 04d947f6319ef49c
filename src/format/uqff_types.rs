//! Types of mistral.rs that are made of whole weights, bit for bit as mistral.rs 0.9.5 makes them on a CPU, or with a smaller
//! squared error.

use super::hqq;
use super::numeric::rounded;
use super::small_floats::{e4m3_to_f32, f32_to_e4m3};
use super::QuantFormat;
use crate::{Error, Result};
use half::bf16;

/// Elements of a block of F8Q8.
const BLOCK: usize = 32;

/// The largest E4M3 number of the library that mistral.rs uses, not the 448 of the format.
const LARGEST: f32 = 416.;

/// A type of mistral.rs that a whole weight is quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UqffType {
    /// HQQ with 1-bit codes, which nothing quantizes to: mistral.rs reads it.
    Hqq1,
    /// HQQ with 2-bit codes, likewise.
    Hqq2,
    /// HQQ with 3-bit codes, likewise.
    Hqq3,
    /// HQQ, 4-bit codes with an F32 scale and an F32 zero for each 64 elements, which lie one in each of 64 parts of the weight.
    Hqq4,
    /// HQQ with 8-bit codes.
    Hqq8,
    /// E4M3 numbers and one scale for all.
    Fp8,
    /// Signed bytes and an E4M3 scale for each 32 elements, which may be of two rows.
    F8q8,
}

/// A quantized weight.
#[derive(Clone, Debug, Default)]
pub struct UqffNumbers {
    /// The codes as they are stored; those of F8Q8 are blocks, scales included.
    pub codes: Vec<u8>,
    /// The scale of each group; of FP8 the one that dequantizes, then the one that quantized.
    pub scales: Vec<f32>,
    /// The zero of each group of HQQ.
    pub zeros: Vec<f32>,
    /// What all this means.
    pub values: Vec<f32>,
}

impl UqffType {
    /// Those that something is quantized to.
    pub const ALL: [Self; 4] = [Self::Hqq4, Self::Hqq8, Self::Fp8, Self::F8q8];

    /// HQQ with so many bits; `None` if there is none.
    pub const fn hqq(bits: usize) -> Option<Self> {
        match bits {
            1 => Some(Self::Hqq1),
            2 => Some(Self::Hqq2),
            3 => Some(Self::Hqq3),
            4 => Some(Self::Hqq4),
            8 => Some(Self::Hqq8),
            _ => None,
        }
    }

    /// The name that mistral.rs has for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hqq1 => "hqq1",
            Self::Hqq2 => "hqq2",
            Self::Hqq3 => "hqq3",
            Self::Hqq4 => "hqq4",
            Self::Hqq8 => "hqq8",
            Self::Fp8 => "fp8",
            Self::F8q8 => "f8q8",
        }
    }

    /// The format of this crate that is nearest: of HQQ with groups that are no neighbours, of FP8 with a number by which all
    /// scales are multiplied.
    pub const fn format(self) -> QuantFormat {
        const ONE: QuantFormat = QuantFormat::affine_opt(1, hqq::GROUP).unwrap();
        const TWO: QuantFormat = QuantFormat::affine_opt(2, hqq::GROUP).unwrap();
        const THREE: QuantFormat = QuantFormat::affine_opt(3, hqq::GROUP).unwrap();
        const FOUR: QuantFormat = QuantFormat::affine_opt(4, hqq::GROUP).unwrap();
        const EIGHT: QuantFormat = QuantFormat::affine_opt(8, hqq::GROUP).unwrap();
        const BLOCKS: QuantFormat = QuantFormat::symmetric_opt(8, BLOCK).unwrap();
        match self {
            Self::Hqq1 => ONE,
            Self::Hqq2 => TWO,
            Self::Hqq3 => THREE,
            Self::Hqq4 => FOUR,
            Self::Hqq8 => EIGHT,
            Self::Fp8 => QuantFormat::MXFP8,
            Self::F8q8 => BLOCKS,
        }
    }

    /// Whether a matrix of so many elements can have this type.
    ///
    /// # Errors
    /// If it is no whole number of groups, or nothing quantizes to the type.
    pub fn check(self, elements: usize) -> Result<()> {
        match self {
            Self::Hqq1 | Self::Hqq2 | Self::Hqq3 => Err(self.only_read()),
            Self::Hqq4 | Self::Hqq8 if !elements.is_multiple_of(hqq::GROUP) => Err(Error::mismatch(
                format!("elements of a matrix in {}", self.name()),
                format!("a multiple of {}", hqq::GROUP),
                elements.to_string(),
            )),
            Self::Hqq4 | Self::Hqq8 | Self::Fp8 | Self::F8q8 => Ok(()),
        }
    }

    fn only_read(self) -> Error {
        Error::Unsupported {
            what: format!("quantizing to {}", self.name()),
            remedy: "quantize to hqq4 or hqq8".into(),
        }
    }

    /// Quantizes a matrix of finite weights. With `search` errors are smaller than those of mistral.rs, where there are any such
    /// numbers.
    ///
    /// # Errors
    /// That of [`check`](Self::check).
    pub fn quantize(self, weights: &[f32], search: bool) -> Result<UqffNumbers> {
        self.check(weights.len())?;
        Ok(match self {
            Self::Hqq1 | Self::Hqq2 | Self::Hqq3 => return Err(self.only_read()),
            Self::Hqq4 => hqq::quantize(weights, 4, search),
            Self::Hqq8 => hqq::quantize(weights, 8, search),
            Self::Fp8 => fp8(weights, search),
            Self::F8q8 => f8q8(weights, search),
        })
    }
}

/// Products are rounded to BF16 before they become E4M3, as in mistral.rs.
fn fp8(weights: &[f32], search: bool) -> UqffNumbers {
    let largest = weights.iter().fold(0f32, |most, weight| most.max(rounded::<bf16>(*weight).abs()));
    // Of zeros it is the largest one.
    let scale = rounded::<bf16>(LARGEST * rounded::<bf16>(1. / largest)).min(LARGEST);
    let of = |scale: f32| {
        let inverse = 1. / scale;
        let code = |weight: &f32| f32_to_e4m3(rounded::<bf16>(rounded::<bf16>(*weight) * scale));
        let codes: Vec<_> = weights.iter().map(code).collect();
        let values: Vec<_> = codes.iter().map(|code| e4m3_to_f32(*code) * inverse).collect();
        UqffNumbers { codes, scales: vec![inverse, scale], zeros: Vec::new(), values }
    };
    let mut best = of(scale);
    if search {
        // E4M3 numbers repeat with every factor of two, but for the smallest.
        for sixteenths in 1..16u8 {
            let attempt = of(rounded::<bf16>(scale * 0.5f32.powf(f32::from(sixteenths) / 16.)));
            if squared_error(weights, &attempt.values) < squared_error(weights, &best.values) {
                best = attempt;
            }
        }
    }
    best
}

fn squared_error(weights: &[f32], values: &[f32]) -> f64 {
    weights.iter().zip(values).map(|(weight, value)| f64::from(weight - value).powi(2)).sum()
}

/// Blocks go on in the next row, and the last one is filled with zeros. mistral.rs divides by the scale as it was before it became
/// E4M3; a search divides by what is stored.
fn f8q8(weights: &[f32], search: bool) -> UqffNumbers {
    let mut numbers = UqffNumbers::default();
    for weights in weights.chunks(BLOCK) {
        let scale = weights.iter().fold(0f32, |most, weight| most.max(weight.abs())) / 127.;
        let stored = f32_to_e4m3(scale * LARGEST);
        let codes = |scale: f32| {
            let inverse = if scale == 0. { 0. } else { 1. / scale };
            let codes = weights.iter().map(move |weight| (weight * inverse).round() as i8);
            codes.collect::<Vec<_>>()
        };
        let values = |stored: u8, codes: &[i8]| {
            let scale = e4m3_to_f32(stored) / LARGEST;
            codes.iter().map(|code| f32::from(*code) * scale).collect::<Vec<_>>()
        };
        let mut best = (stored, codes(scale));
        let mut of_best = values(best.0, &best.1);
        if search {
            // A larger one does not clip, a smaller one has finer steps.
            for stored in [stored.saturating_sub(1), stored, stored + 1] {
                let codes = codes(e4m3_to_f32(stored) / LARGEST);
                let values = values(stored, &codes);
                if squared_error(weights, &values) < squared_error(weights, &of_best) {
                    (best, of_best) = ((stored, codes), values);
                }
            }
        }
        numbers.codes.push(best.0);
        numbers.codes.extend(best.1.iter().map(|code| code.cast_unsigned()));
        numbers.codes.extend(std::iter::repeat_n(0, BLOCK - weights.len()));
        numbers.values.extend(of_best);
    }
    numbers
}
