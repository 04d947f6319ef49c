//! Scales and zeros of integer codes, found by looking at the numbers.
//!
//! Files write the same weight in many ways: with zeros, with biases, or with neither where the middle code means zero. What a weight
//! can be in another file does not depend on the way, so that it is asked here, of scales and biases alone.

use super::mlx_form::multiplies_exactly;
use crate::format::Scale;
use crate::{QuantFormat, Result};
use candle_core::{DType, Device, Tensor};

/// The groups of a weight of integer codes: `w = (code - zero) * scale`.
#[derive(Clone, Debug)]
pub struct IntegerGroups {
    /// A float for each group, `[.., N, K / group size]`.
    pub scales: Tensor,
    /// For each group the code that means zero, U8 of the same shape; `None` if that is the middle code of all groups, and nothing
    /// is rounded whether it is subtracted or its product with the scale.
    pub zeros: Option<Tensor>,
}

impl IntegerGroups {
    /// What scales and biases of a format say; `None` if its codes are no integers, or if a bias is not `-(zero * scale)` of a code
    /// `zero`.
    ///
    /// # Errors
    /// If the numbers can't be read.
    pub fn of(format: QuantFormat, scales: &Tensor, biases: Option<&Tensor>) -> Result<Option<Self>> {
        let (Some(bits), Scale::Float) = (format.element().uint(), format.scale()) else { return Ok(None) };
        let Some(biases) = biases else {
            let groups = Self { scales: scales.clone(), zeros: None };
            return Ok((!format.has_biases()).then_some(groups));
        };
        let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let pairs = (numbers(scales)?, numbers(biases)?);
        let largest = (1u32 << bits.get()) - 1;
        let zero = |(scale, bias): (&f32, &f32)| zero_of(*scale, *bias, bits.midpoint(), largest);
        let zeros: Option<Vec<u8>> = pairs.0.iter().zip(&pairs.1).map(zero).collect();
        let Some(zeros) = zeros else { return Ok(None) };
        let is_exact =
            scales.dtype() != DType::F32 || pairs.0.iter().all(|scale| multiplies_exactly(*scale, bits));
        let zeros = match is_exact && zeros.iter().all(|zero| *zero == bits.midpoint()) {
            true => None,
            false => Some(Tensor::from_vec(zeros, scales.dims(), &Device::Cpu)?),
        };
        Ok(Some(Self { scales: scales.clone(), zeros }))
    }
}

/// The code of which a bias is the negative product with the scale. A group of zeros has any, so that it has the middle one.
fn zero_of(scale: f32, bias: f32, middle: u8, largest: u32) -> Option<u8> {
    if scale == 0. {
        return (bias == 0.).then_some(middle);
    }
    let zero = (-bias / scale).round();
    // What is no number is none of these, and what is not finite is no weight of any file.
    let is_code = zero >= 0. && zero <= largest as f32 && scale.is_finite();
    (is_code && -(zero * scale) == bias).then_some(zero as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(bits: usize, scales: &[f32], biases: Option<&[f32]>, dtype: DType) -> Option<Option<Vec<u8>>> {
        let format = match biases {
            Some(_) => QuantFormat::affine(bits, 32),
            None => QuantFormat::symmetric(bits, 32),
        };
        let tensor = |numbers: &[f32]| Tensor::new(numbers, &Device::Cpu).unwrap().reshape((1, ())).unwrap();
        let (scales, biases) = (tensor(scales).to_dtype(dtype).unwrap(), biases.map(tensor));
        let groups = IntegerGroups::of(format.unwrap(), &scales, biases.as_ref()).unwrap()?;
        Some(groups.zeros.map(|zeros| zeros.flatten_all().unwrap().to_vec1().unwrap()))
    }

    #[test]
    fn zeros_are_found_by_the_numbers() {
        let of = |scales: &[f32], biases: &[f32]| groups(4, scales, Some(biases), DType::F16);
        // The middle code of all, whatever the sign of a scale, and of a group of zeros.
        assert_eq!(of(&[0.5, -0.25, 0.], &[-4., 2., 0.]), Some(None));
        assert_eq!(of(&[0.5, 0.25, 0.], &[-4., -3.75, 0.]), Some(Some(vec![8, 15, 8])));
        assert_eq!(of(&[0.5], &[0.]), Some(Some(vec![0])));
        // Codes that there are not, biases between codes, and what is no number.
        for (scale, bias) in [
            (0.5, -8.),
            (0.5, 0.5),
            (0.5, -4.25),
            (0., 1.),
            (f32::NAN, 0.),
            (0.5, f32::NAN),
            (f32::INFINITY, -0.),
        ] {
            assert_eq!(of(&[scale], &[bias]), None, "{scale} {bias}");
        }
        assert_eq!(groups(8, &[0.5, 0.5], Some(&[-64., -64.]), DType::BF16), Some(None));
        assert_eq!(groups(8, &[0.5, 0.5], Some(&[-64., -127.5]), DType::BF16), Some(Some(vec![128, 255])));
        assert_eq!(groups(4, &[0.1], None, DType::F32), Some(None));
    }

    /// Products of codes and F32 scales may be rounded, before the bias is added: `(code - 8) * scale` is another number then.
    #[test]
    fn middle_codes_stay_zeros_where_products_are_rounded() {
        let of = |scale: f32| groups(4, &[scale], Some(&[-8. * scale]), DType::F32);
        assert_eq!(of(0.1), Some(Some(vec![8])));
        assert_eq!(of(0.25), Some(None));
    }
}
