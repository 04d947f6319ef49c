//! What each family of layers makes of its entries.

use super::layer::{Layer, WeightAndWhy, FAMILIES};
use super::{afq, eight_bit, hqq};
use crate::checkpoint::weight::{ggml_blocks, tensor_of, DenseTensor, Weight};
use crate::format::UqffType;
use crate::Result;
use candle_core::DType;
use safetensors::Dtype;

/// The weight of a layer.
pub(super) fn weight(layer: &Layer) -> Result<WeightAndWhy> {
    match layer.format {
        Some(0) => ggml(layer),
        Some(1) => {
            let weight = layer.part("weight", &[Dtype::F32, Dtype::F16, Dtype::BF16])?;
            layer.check_rank("weight", weight.dims(), true)?;
            Ok((Weight::Dense(DenseTensor::new(&layer.weight_name(), weight)?), None))
        }
        Some(2) => hqq::weight(layer),
        Some(3) => eight_bit::fp8(layer),
        Some(4) => afq::afq(layer),
        Some(5) => eight_bit::f8q8(layer),
        Some(6) => afq::mxfp4(layer),
        format => {
            let found = format.map_or("none".into(), |format| format.to_string());
            Err(layer.wrong("weight.format", format!("0 to 6 ({})", FAMILIES.join(", ")), found))
        }
    }
}

/// The type of the layer's weight, if it is one that is made of a whole matrix.
pub(super) fn whole_type(layer: &Layer) -> Result<Option<UqffType>> {
    Ok(match layer.format {
        Some(2) => UqffType::hqq(layer.u8("weight.bits")?.into()),
        Some(3) => Some(UqffType::Fp8),
        Some(5) => Some(UqffType::F8q8),
        _ => None,
    })
}

/// The additive bias of the layer, whose weight has shape `dims`.
pub(super) fn bias(layer: &Layer, dims: &[usize]) -> Result<Option<DenseTensor>> {
    if layer.entry("bias").is_none() {
        return Ok(None);
    }
    let bias = layer.part("bias", &[Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E4M3])?;
    let (_, rows) = dims.split_last().unwrap_or((&0, &[]));
    if bias.dims() != rows {
        return Err(layer.wrong("bias", format!("shape {rows:?}"), format!("{:?}", bias.dims())));
    }
    let name = tensor_of(layer.key, "bias");
    if bias.dtype() == Dtype::F8_E4M3 {
        let source = eight_bit::E4m3Numbers { codes: bias.clone() };
        return Ok(Some(DenseTensor::dequantized(&name, DType::F32, rows.to_vec(), source)));
    }
    DenseTensor::new(&name, bias).map(Some)
}

fn ggml(layer: &Layer) -> Result<WeightAndWhy> {
    let id = layer.u32("weight.dtype")?;
    let dtype = ggml_blocks::dtype_of(id).ok_or_else(|| {
        layer.wrong("weight.dtype", "the number of a GGML type (0 to 3, 6 to 15, 30)", id.to_string())
    })?;
    let dims = layer.shape(true)?;
    let blocks = layer.part("weight", &[Dtype::U8])?;
    let weight = ggml_blocks::weight(layer.key, &layer.weight_name(), dtype, dims.clone(), blocks)?;
    let weight = weight.ok_or_else(|| {
        let expected = match ggml_blocks::size_in_bytes(dtype, &dims) {
            Some(size) => format!("{size} bytes for {dtype:?} {dims:?}"),
            None => format!("rows of whole blocks of {} for {dtype:?}", dtype.block_size()),
        };
        layer.wrong("weight", expected, format!("{} bytes, shape {dims:?}", blocks.size_in_bytes()))
    })?;
    Ok((weight, None))
}
