//! Quantizing on a CUDA device, with the bits of the CPU: a block of rows goes there, its codes and scales come back.

use crate::backend::{self, Parts};
use crate::format::{GroupScales, QuantizedRows, Real};
use crate::QuantFormat;
use candle_core::{Device, Result, Tensor};

/// Quantizes whole rows of finite numbers.
pub(super) fn quantize<T: Real>(
    rows: &[T],
    format: QuantFormat,
    device: &Device,
) -> Result<QuantizedRows<T>> {
    let rows = Tensor::from_slice(rows, rows.len(), device)?;
    let Parts { packed, scales, biases } = backend::quantize(&rows, format, None)?;
    let scales = match format.scale().is_byte() {
        true => GroupScales::Bytes(scales.to_vec1()?),
        false => {
            let biases = biases.map(|biases| biases.to_vec1()).transpose()?.unwrap_or_default();
            GroupScales::Float { scales: scales.to_vec1()?, biases }
        }
    };
    Ok(QuantizedRows { words: packed.to_vec1()?, scales })
}
