//! Encoding on a CUDA device, with the bits of the CPU: a block of rows goes there, its codes and scales come back.

use super::block::{Encoded, Scales};
use super::kind::Encoder;
use crate::backend::{self, Parts};
use crate::format::element::Real;
use crate::QuantFormat;
use candle_core::{Device, Result, Tensor};

/// Whether the device computes these codes. All else is done by the CPU.
pub(super) fn encodes(device: &Device, encoder: Encoder) -> bool {
    device.is_cuda() && encoder == Encoder::Mlx
}

/// Encodes whole rows of finite numbers.
pub(super) fn encode<T: Real>(rows: &[T], format: QuantFormat, device: &Device) -> Result<Encoded<T>> {
    let rows = Tensor::from_slice(rows, rows.len(), device)?;
    let Parts { packed, scales, biases } = backend::quantize(&rows, format, None)?;
    let scales = match biases {
        Some(biases) => Scales::Floats([scales.to_vec1()?, biases.to_vec1()?]),
        None => Scales::Bytes(scales.to_vec1()?),
    };
    Ok(Encoded { words: packed.to_vec1()?, scales })
}
