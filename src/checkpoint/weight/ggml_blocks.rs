//! GGML types by their numbers, and weights of them: floats are dense elements.

use super::dense::DenseTensor;
use super::ggml::GgmlWeight;
use super::ggml_types::{block_type, Kind};
use super::stored::Weight;
use crate::checkpoint::file::StoredTensor;
use crate::Result;
use candle_core::quantized::GgmlDType;
use safetensors::Dtype;

/// The type that GGML numbers `id`, if candle has it.
pub(in crate::checkpoint) fn dtype_of(id: u32) -> Option<GgmlDType> {
    match block_type(id, false)?.kind {
        Kind::Ggml(dtype) => Some(dtype),
        Kind::Dense(Dtype::F32) => Some(GgmlDType::F32),
        Kind::Dense(Dtype::F16) => Some(GgmlDType::F16),
        Kind::Dense(Dtype::BF16) => Some(GgmlDType::BF16),
        Kind::Dense(_) | Kind::Mxfp4(_) | Kind::Nvfp4 | Kind::Packed(_) => None,
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
        _ => Ok(Some(Weight::Ggml(GgmlWeight::new(module, dtype, dims, blocks.clone())))),
    }
}
