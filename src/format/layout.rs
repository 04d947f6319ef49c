//! How many words and groups a row has.

use super::{QuantFormat, Scale, ZeroPoint, SUPER_BLOCK};
use crate::{Error, Result};
use candle_core::DType;
use half::f16;

impl QuantFormat {
    /// Groups of a row of `k` elements.
    ///
    /// # Errors
    /// If `k` is zero or not a multiple of the group size, or of a super-block.
    pub fn groups_per_row(self, k: usize) -> Result<usize> {
        self.check_row(k)?;
        Ok(k / self.group_size)
    }

    /// 32-bit words of a row of `k` elements. Every whole group is a whole number of words.
    ///
    /// # Errors
    /// If `k` is zero, not a multiple of the group size, or too large to address.
    pub fn words_per_row(self, k: usize) -> Result<usize> {
        self.check_row(k)?;
        k.checked_mul(self.bits())
            .map(|bits| bits / 32)
            .ok_or_else(|| Error::mismatch("K", "a row that fits the address space", k.to_string()))
    }

    /// The shapes of codes, in 32-bit words, and of scales of a weight of shape `dims`.
    ///
    /// # Errors
    /// If K, the last dimension, is no whole number of groups.
    pub fn part_dims(self, dims: &[usize]) -> Result<(Vec<usize>, Vec<usize>)> {
        let (k, rows) = dims.split_last().unwrap_or((&0, &[]));
        let with_last = |last: usize| [rows, &[last]].concat();
        Ok((with_last(self.words_per_row(*k)?), with_last(self.groups_per_row(*k)?)))
    }

    /// Bytes of whole groups of so many elements together: of codes, scales and biases. Float scales are of dtype `scales`.
    ///
    /// ```
    /// use candle_core::DType;
    /// use candle_quant::QuantFormat;
    ///
    /// // 4 bits, and 2 x 16 for every 64 elements: 4.5 bits for each.
    /// assert_eq!(QuantFormat::affine(4, 64)?.size_in_bytes(4096, DType::BF16), 4096 * 9 / 16);
    /// assert_eq!("mxfp8".parse::<QuantFormat>()?.size_in_bytes(4096, DType::BF16), 4096 + 4096 / 32);
    /// # Ok::<(), candle_quant::Error>(())
    /// ```
    pub fn size_in_bytes(self, elements: u64, scales: DType) -> u64 {
        let scale = match self.scale() {
            Scale::Float => scales.size_in_bytes() as u64,
            Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => 1,
        };
        let each = match self.zero_point() {
            ZeroPoint::Bias => 2,
            ZeroPoint::Midpoint | ZeroPoint::None => 1,
        };
        let codes = (u128::from(elements) * self.bits() as u128).div_ceil(8);
        let groups = u128::from(elements) / self.group_size as u128;
        let super_blocks = match self.scale() {
            Scale::SuperBlock => u128::from(elements) / SUPER_BLOCK as u128 * size_of::<f16>() as u128,
            Scale::Float | Scale::E8m0 | Scale::E4m3 => 0,
        };
        let parameters = (groups * u128::from(scale) + super_blocks) * each;
        u64::try_from(codes + parameters).unwrap_or(u64::MAX)
    }

    fn check_row(self, k: usize) -> Result<()> {
        let whole = self.granularity();
        if k == 0 || !k.is_multiple_of(whole) {
            return Err(Error::mismatch(
                format!("K of {self}"),
                format!("a positive multiple of {whole}"),
                k.to_string(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_the_bit_stream_of_the_spec() {
        for format in QuantFormat::all() {
            for k in [32, 64, 96, 128, 4096, 16384] {
                if k % format.group_size() != 0 {
                    assert!(format.words_per_row(k).is_err(), "{format} K={k}");
                    continue;
                }
                assert_eq!(format.words_per_row(k).unwrap() * 32, k * format.bits());
                assert_eq!(format.groups_per_row(k).unwrap() * format.group_size(), k);
            }
        }
    }

    #[test]
    fn rows_that_end_inside_a_group_are_refused() {
        for k in [0, 31, 48] {
            assert!(QuantFormat::MXFP4.groups_per_row(k).is_err());
        }
        assert_eq!(QuantFormat::NVFP4.groups_per_row(48).unwrap(), 3);
        assert!(QuantFormat::affine(8, 64).unwrap().words_per_row(usize::MAX - 63).is_err());
    }
}
