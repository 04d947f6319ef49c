//! The types of SLM1 files: signed codes with F32 scales. They are not those of GGUF files that have the same names.

use super::QuantFormat;
use crate::{Error, Result};

/// Elements of a block of Q4_0, as in the files that are published.
const BLOCK: usize = 32;

/// Scales that a search tries, in hundredths of the largest that is of use.
const ATTEMPTS: std::ops::RangeInclusive<u16> = 80..=100;

/// A type of SLM1 files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Slm1Type {
    /// Signed bytes and a scale for each row.
    Q8_0,
    /// Signed nibbles and a scale for each 32 elements.
    Q4_0,
}

impl Slm1Type {
    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::Q8_0 => 8,
            Self::Q4_0 => 4,
        }
    }

    /// Elements of a row of `k` that share a scale.
    pub const fn block(self, k: usize) -> usize {
        match self {
            Self::Q8_0 => k,
            Self::Q4_0 => BLOCK,
        }
    }

    /// The format of this crate that is nearest; a scale of Q8_0 is that of all groups of a row.
    pub const fn format(self) -> QuantFormat {
        const FOUR: QuantFormat = QuantFormat::symmetric_opt(4, BLOCK).unwrap();
        const EIGHT: QuantFormat = QuantFormat::symmetric_opt(8, BLOCK).unwrap();
        match self {
            Self::Q8_0 => EIGHT,
            Self::Q4_0 => FOUR,
        }
    }

    /// Appends the codes and scales of a row of finite numbers, and sets `values` to what they mean. A scale is the smallest with
    /// which no number is clipped, or with `search` that of the smallest squared error among some smaller ones; of zeros it is 1.
    ///
    /// # Errors
    /// If the row is no whole number of blocks, or `values` is not of its length.
    pub fn quantize(
        self,
        row: &[f32],
        search: bool,
        codes: &mut Vec<u8>,
        scales: &mut Vec<f32>,
        values: &mut [f32],
    ) -> Result<()> {
        let block = self.block(row.len()).max(1);
        if !row.len().is_multiple_of(block) || values.len() != row.len() {
            return Err(Error::mismatch(
                format!("rows in {} of SLM1", self.name()),
                format!("a multiple of {block} elements, and as many values"),
                format!("{} and {}", row.len(), values.len()),
            ));
        }
        let mut signed = Vec::with_capacity(row.len());
        for (numbers, values) in row.chunks_exact(block).zip(values.chunks_exact_mut(block)) {
            let scale = self.scale(numbers, search);
            scales.push(scale);
            for (number, value) in numbers.iter().zip(values) {
                let code = self.code(*number, scale);
                *value = f32::from(code) * scale;
                signed.push(code);
            }
        }
        match self {
            Self::Q8_0 => codes.extend(signed.iter().map(|code| code.cast_unsigned())),
            Self::Q4_0 => {
                let (pairs, _) = signed.as_chunks::<2>();
                codes.extend(
                    pairs.iter().map(|[low, high]| low.cast_unsigned() & 15 | high.cast_unsigned() << 4),
                );
            }
        }
        Ok(())
    }

    fn largest(self) -> f32 {
        match self {
            Self::Q8_0 => 127.,
            Self::Q4_0 => 7.,
        }
    }

    /// The nearest code, which is clipped if a search has found a smaller scale.
    fn code(self, number: f32, scale: f32) -> i8 {
        (number / scale).round().clamp(-self.largest() - 1., self.largest()) as i8
    }

    fn scale(self, numbers: &[f32], search: bool) -> f32 {
        let (least, most) = numbers
            .iter()
            .fold((0f32, 0f32), |(least, most), number| (least.min(*number), most.max(*number)));
        let fits = (most / self.largest()).max(-least / (self.largest() + 1.));
        // Smaller numbers than the smallest scale are zero.
        let fits = if fits < f32::MIN_POSITIVE { 1. } else { fits };
        if !search {
            return fits;
        }
        let error = |scale: f32| {
            let of = |number: &f32| f64::from(number - f32::from(self.code(*number, scale)) * scale);
            numbers.iter().map(|number| of(number).powi(2)).sum::<f64>()
        };
        let attempts = ATTEMPTS.rev().map(|hundredths| fits * (f32::from(hundredths) / 100.));
        let attempts = attempts.map(|scale| (scale, error(scale)));
        let first = (fits, f64::INFINITY);
        attempts.fold(first, |best, attempt| if attempt.1 < best.1 { attempt } else { best }).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_the_nearest_codes() {
        let row: Vec<_> = (0..64).map(|index| (index as f32 * 0.37).sin() * (1. + index as f32)).collect();
        for kind in [Slm1Type::Q8_0, Slm1Type::Q4_0] {
            let (mut codes, mut scales, mut values) = (Vec::new(), Vec::new(), vec![0.; 64]);
            kind.quantize(&row, false, &mut codes, &mut scales, &mut values).unwrap();
            assert_eq!((codes.len(), scales.len()), (64 * kind.bits() / 8, 64 / kind.block(64)));
            for (block, (numbers, values)) in
                row.chunks(kind.block(64)).zip(values.chunks(kind.block(64))).enumerate()
            {
                let largest =
                    numbers.iter().map(|number| f64::from(number / scales[block])).fold(0., f64::max);
                let least = numbers.iter().map(|number| f64::from(number / scales[block])).fold(0., f64::min);
                let limit = f64::from(kind.largest());
                assert!(
                    (largest - limit).abs() < 1e-4 || (least + limit + 1.).abs() < 1e-4,
                    "{largest} {least}"
                );
                for (number, value) in numbers.iter().zip(values) {
                    assert!((number - value).abs() <= scales[block] * 0.5001, "{number} {value}");
                }
            }
            let nibble = |index: usize| ((codes[index / 2] >> (index % 2 * 4) & 15) ^ 8) as i8 - 8;
            for (index, value) in values.iter().enumerate() {
                let code = if kind == Slm1Type::Q8_0 { codes[index].cast_signed() } else { nibble(index) };
                assert_eq!(*value, f32::from(code) * scales[index / kind.block(64)]);
            }
            let error = |values: &[f32]| row.iter().zip(values).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            let mut searched = vec![0.; 64];
            kind.quantize(&row, true, &mut Vec::new(), &mut Vec::new(), &mut searched).unwrap();
            assert!(error(&searched) <= error(&values));
            assert!(kind == Slm1Type::Q8_0 || error(&searched) < error(&values));
        }
    }

    #[test]
    fn zeros_have_a_scale_and_halves_of_blocks_are_refused() {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        Slm1Type::Q4_0.quantize(&[0.; 32], true, &mut codes, &mut scales, &mut [1.; 32]).unwrap();
        assert_eq!((codes, scales), (vec![0; 16], vec![1.]));
        let error =
            Slm1Type::Q4_0.quantize(&[0.; 48], false, &mut Vec::new(), &mut Vec::new(), &mut [0.; 48]);
        assert!(error.unwrap_err().to_string().contains("a multiple of 32"));
    }
}
