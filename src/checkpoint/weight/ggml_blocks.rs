//! GGML types by their numbers, and weights of them: candle computes with most, floats are dense elements, and Q8_1 and
//! Q8_K, for which candle has a matmul on the CPU only, are dequantized.

use super::dense::DenseTensor;
use super::ggml::GgmlWeight;
use super::ggml_types::{block_type, Kind};
use super::layout::Dequantize;
use super::slice::Slice;
use super::stored::Weight;
use crate::checkpoint::file::StoredTensor;
use crate::Result;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use half::f16;
use safetensors::Dtype;
use std::sync::Arc;

/// Said of weights that [`weight`] leaves to be dequantized.
pub(in crate::checkpoint) const DEQUANTIZED: &str =
    "candle has no matmul for the GGML types Q8_1 and Q8_K on a GPU";

/// The type that GGML numbers `id`, if candle has it.
pub(in crate::checkpoint) fn dtype_of(id: u32) -> Option<GgmlDType> {
    match block_type(id, false)?.kind {
        Kind::Ggml(dtype) => Some(dtype),
        Kind::Dense(Dtype::F32) => Some(GgmlDType::F32),
        Kind::Dense(Dtype::F16) => Some(GgmlDType::F16),
        Kind::Dense(Dtype::BF16) => Some(GgmlDType::BF16),
        Kind::Dense(_) | Kind::Mxfp4(_) | Kind::Nvfp4 | Kind::Unsupported => None,
    }
}

/// Bytes of a weight of shape `dims`; `None` if its rows are not whole blocks, or they overflow.
pub(in crate::checkpoint) fn size_in_bytes(dtype: GgmlDType, dims: &[usize]) -> Option<usize> {
    let (k, rows) = dims.split_last()?;
    let row = k.is_multiple_of(dtype.block_size()).then_some(k / dtype.block_size())?;
    rows.iter().try_fold(row, |product, &dim| product.checked_mul(dim))?.checked_mul(dtype.type_size())
}

/// The weight `module` of shape `dims`, whose `blocks` have the size that [`size_in_bytes`] returns; `None` if not.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle computes with all other types")]
pub(in crate::checkpoint) fn weight(
    module: &str,
    name: &str,
    dtype: GgmlDType,
    dims: Vec<usize>,
    blocks: &StoredTensor,
) -> Result<Option<Weight>> {
    if size_in_bytes(dtype, &dims) != Some(blocks.size_in_bytes()) {
        return Ok(None);
    }
    let numbers = |dtype| match blocks.as_numbers(dtype, &dims) {
        Some(numbers) => DenseTensor::new(name, &numbers).map(|dense| Some(Weight::Dense(dense))),
        None => Ok(None),
    };
    match dtype {
        GgmlDType::F32 => numbers(Dtype::F32),
        GgmlDType::F16 => numbers(Dtype::F16),
        GgmlDType::BF16 => numbers(Dtype::BF16),
        GgmlDType::Q8_1 | GgmlDType::Q8K => {
            let source = Q8Blocks { dtype, dims: dims.clone(), blocks: blocks.clone() };
            Ok(Some(Weight::Dense(DenseTensor::dequantized(name, DType::F32, dims, source))))
        }
        _ => Ok(Some(Weight::Ggml(GgmlWeight::new(module, dtype, dims, blocks.clone())))),
    }
}

/// Blocks of Q8_1 (an F16 scale, an F16 sum, 32 signed bytes) or Q8_K (an F32 scale, 256 signed bytes, sums).
#[derive(Debug)]
struct Q8Blocks {
    dtype: GgmlDType,
    dims: Vec<usize>,
    blocks: StoredTensor,
}

impl Dequantize for Q8Blocks {
    fn size_in_bytes(&self) -> usize {
        self.blocks.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let (size, elements) = (self.dtype.type_size(), self.dtype.block_size());
        let mut values = Vec::with_capacity(self.blocks.size_in_bytes() / size * elements);
        self.blocks.for_each_chunk(size, |blocks| {
            for block in blocks.chunks_exact(size) {
                let Some((head, codes)) = block.split_first_chunk::<4>() else { continue };
                let [low, high, ..] = *head;
                let scale = match self.dtype == GgmlDType::Q8_1 {
                    true => f16::from_le_bytes([low, high]).to_f32(),
                    false => f32::from_le_bytes(*head),
                };
                let codes = codes.iter().take(elements);
                values.extend(codes.map(|code| scale * f32::from(code.cast_signed())));
            }
        })?;
        Ok(Tensor::from_vec(values, self.dims.as_slice(), device)?)
    }

    fn granularity(&self) -> usize {
        self.dtype.block_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        if slice.cuts(self.granularity()) {
            return Ok(None);
        }
        let blocks = slice.of(&self.blocks, self.granularity(), self.dtype.type_size())?;
        Ok(Some(Arc::new(Self { dtype: self.dtype, dims: slice.part_dims(), blocks })))
    }
}
