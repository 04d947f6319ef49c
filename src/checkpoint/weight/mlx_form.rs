//! What packed weights are in an MLX checkpoint.

use super::dense::DenseTensor;
use crate::checkpoint::file::{candle_dtype, StoredTensor};
use crate::{format::Bits, Result};
use candle_core::DType;

/// What a packed weight is in an MLX checkpoint, where no number of it may change.
#[derive(Debug)]
#[non_exhaustive]
pub enum MlxForm {
    /// The file has the bytes: the tensors by their names in a module.
    Stored(Vec<(&'static str, DenseTensor)>),
    /// Loading brings them into MLX's order; scales and, if MLX needs them, biases have this dtype.
    Rearranged(DType),
    /// Nothing, since biases that MLX needs would be rounded. Loading brings codes and scales into MLX's order, and the scales
    /// have this dtype.
    WithoutBiases(DType),
    /// Nothing, since a number multiplies all scales, and it is not MLX's global scale. Loading brings codes and scales into MLX's
    /// order.
    Multiplied,
    /// Nothing, for this reason, which follows the name of its format.
    Impossible(&'static str),
}

impl MlxForm {
    /// Biases would not be what they stand for.
    pub(in crate::checkpoint) const ROUNDED: Self =
        Self::Impossible(" with scales whose products with codes are rounded");

    /// The form of codes with whole numbers for zeros, where `-(zero * scale)` in F32 are the biases: beside 16-bit scales they are
    /// exact, and so are scales in F32 and all that MLX makes of them.
    pub(in crate::checkpoint) fn of_zeros(scales: &StoredTensor) -> Self {
        match candle_dtype(scales.dtype()) {
            Some(DType::F16 | DType::BF16) => Self::Rearranged(DType::F32),
            _ => Self::ROUNDED,
        }
    }

    /// The form of symmetric codes, whose biases MLX needs: `q * scale + bias` is `(q - zero) * scale` if products of
    /// codes and scales are exact. Those of 16-bit scales are, and those of F32 ones that have as many bits to spare.
    pub(in crate::checkpoint) fn of_symmetric(scales: &StoredTensor, bits: Bits) -> Result<Self> {
        let is_exact = |bytes: &[u8; 4]| multiplies_exactly(f32::from_le_bytes(*bytes), bits);
        let mut all = true;
        match candle_dtype(scales.dtype()) {
            Some(dtype @ (DType::F16 | DType::BF16)) => return Ok(Self::Rearranged(dtype)),
            Some(DType::F32) => scales.for_each_chunk(size_of::<f32>(), |chunk| {
                all = all && chunk.as_chunks().0.iter().all(is_exact);
            })?,
            _ => return Ok(Self::ROUNDED),
        }
        Ok(if all { Self::Rearranged(DType::F32) } else { Self::WithoutBiases(DType::F32) })
    }
}

/// Whether products of an F32 scale and codes of so many bits are exact: as many bits of it are to spare.
pub(super) fn multiplies_exactly(scale: f32, bits: Bits) -> bool {
    let codes = 1u32 << bits.get();
    scale.to_bits().is_multiple_of(codes) && (scale * codes as f32).is_finite()
}
