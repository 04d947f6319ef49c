//! HQQ: groups that run across rows, decoded.

use super::layer::{Layer, WeightAndWhy};
use crate::checkpoint::layout::Cut;
use crate::checkpoint::mapped::StoredTensor;
use crate::checkpoint::weight::Decode;
use crate::checkpoint::{DenseTensor, Weight};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::sync::Arc;

const WHY: &str = "groups of HQQ run across rows, which no packed format here does";

pub(super) fn weight(layer: &Layer) -> Result<WeightAndWhy> {
    let dims = layer.shape(false)?;
    let codes = layer.part("weight", &[Dtype::U8])?;
    let floats = [Dtype::F32, Dtype::F16, Dtype::BF16];
    let scales = layer.part("weight.scales", &floats)?;
    let zeros = layer.part("weight.zeros", &floats)?;
    let bits = layer.u8("weight.bits")?;
    let axis = layer.u8("weight.axis")?;
    match (bits, axis) {
        (4 | 8, 0) => {}
        (1..=4 | 8, 0 | 1) => {
            return Err(Error::Unsupported {
                what: format!(
                    "{}: `{}`: HQQ of {bits} bits along axis {axis}",
                    codes.path().display(),
                    layer.weight_name()
                ),
                remedy: "quantize to hqq4 or hqq8 with mistral.rs, which groups along axis 0".into(),
            });
        }
        (_, 0 | 1) => return Err(layer.wrong("weight.bits", "4 or 8", bits.to_string())),
        _ => return Err(layer.wrong("weight.axis", "0", axis.to_string())),
    }
    let group_size = usize::try_from(layer.u32("weight.group_size")?).ok();
    let &[bytes, groups] = codes.dims() else {
        let found = format!("{:?}", codes.dims());
        return Err(layer.wrong("weight", "codes of shape [bytes of a group, groups]", found));
    };
    let product = |a: Option<usize>, b: usize| a.and_then(|a| a.checked_mul(b));
    let elements = dims.iter().try_fold(1usize, |total, &dim| total.checked_mul(dim));
    if elements.is_none() || product(group_size, groups) != elements {
        return Err(layer.wrong(
            "weight.group_size",
            format!("as many elements in {groups} groups as in shape {dims:?}"),
            group_size.unwrap_or(usize::MAX).to_string(),
        ));
    }
    if product(group_size, bits.into()) != bytes.checked_mul(8) {
        let expected = format!("{bits}-bit codes of {} elements a group", group_size.unwrap_or(usize::MAX));
        return Err(layer.wrong("weight", expected, format!("{bytes} bytes")));
    }
    for (suffix, part) in [("weight.scales", scales), ("weight.zeros", zeros)] {
        if part.dims() != [1, groups] {
            return Err(layer.wrong(suffix, format!("shape [1, {groups}]"), format!("{:?}", part.dims())));
        }
    }
    let source = HqqGroups {
        dims: dims.clone(),
        codes: codes.clone(),
        nibbles: bits == 4,
        scales: scales.clone(),
        zeros: zeros.clone(),
    };
    Ok((Weight::Dense(DenseTensor::decoded(&layer.weight_name(), DType::F32, dims, source)), Some(WHY)))
}

/// Codes `[bytes of a group, groups]`: a column is a group. With two codes to a byte, the high ones of the whole
/// matrix are the first half of the flattened weight, the low ones the second.
#[derive(Debug)]
struct HqqGroups {
    dims: Vec<usize>,
    codes: StoredTensor,
    nibbles: bool,
    scales: StoredTensor,
    zeros: StoredTensor,
}

impl Decode for HqqGroups {
    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes() + self.zeros.size_in_bytes()
    }

    fn decode(&self, device: &Device) -> Result<Tensor> {
        let floats = |part: &StoredTensor| {
            Ok::<_, Error>(part.load(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
        };
        let (scales, zeros) = (floats(&self.scales)?, floats(&self.zeros)?);
        let codes = self.codes.read::<u8>()?;
        let shifts: &[u8] = if self.nibbles { &[4, 0] } else { &[0] };
        let mask = if self.nibbles { 15 } else { 255 };
        let mut values = Vec::with_capacity(codes.len() * shifts.len());
        for shift in shifts {
            for row in codes.chunks_exact(scales.len().max(1)) {
                let groups = row.iter().zip(&zeros).zip(&scales);
                values.extend(
                    groups.map(|((byte, zero), scale)| (f32::from(byte >> shift & mask) - zero) * scale),
                );
            }
        }
        Ok(Tensor::from_vec(values, self.dims.as_slice(), device)?)
    }

    fn unit(&self) -> usize {
        1
    }

    /// Groups run across rows.
    fn narrow(&self, _: &Cut) -> Result<Option<Arc<dyn Decode>>> {
        Ok(None)
    }
}
