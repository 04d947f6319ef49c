//! AFQ and MXFP4: the bytes of MLX's affine formats and MXFP4 under other names.

use super::layer::{Layer, WeightAndWhy};
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{PackedWeight, Parts, Weight};
use crate::{QuantFormat, Result};
use safetensors::Dtype;

/// The widths that mistral.rs has; MLX has 1 and 5 too.
const BITS: [u8; 5] = [2, 3, 4, 6, 8];

pub(super) fn afq(layer: &Layer) -> Result<WeightAndWhy> {
    let floats = [Dtype::BF16, Dtype::F16, Dtype::F32];
    let codes = layer.part("weight", &[Dtype::U32])?;
    let scales = layer.part("weight.scales", &floats)?;
    let biases = layer.part("weight.biases", &floats)?;
    let bits = layer.u8("weight.bits")?;
    if !BITS.contains(&bits) {
        return Err(layer.wrong("weight.bits", "2, 3, 4, 6 or 8", bits.to_string()));
    }
    let group_size = usize::from(layer.u8("weight.group_size")?);
    if !QuantFormat::AFFINE_GROUP_SIZES.contains(&group_size) {
        return Err(layer.wrong("weight.group_size", "32, 64 or 128", group_size.to_string()));
    }
    let format = QuantFormat::affine(bits.into(), group_size)?;
    let dims = dims(layer, format, codes, scales)?;
    if biases.dims() != scales.dims() {
        let expected = format!("shape {:?}, that of the scales", scales.dims());
        return Err(layer.wrong("weight.biases", expected, format!("{:?}", biases.dims())));
    }
    Ok(packed(layer, format, dims, codes, scales, Some(biases)))
}

pub(super) fn mxfp4(layer: &Layer) -> Result<WeightAndWhy> {
    let codes = layer.part("weight", &[Dtype::U8])?;
    let scales = layer.part("weight.scales", &[Dtype::U8])?;
    let dims = dims(layer, QuantFormat::MXFP4, codes, scales)?;
    Ok(packed(layer, QuantFormat::MXFP4, dims, codes, scales, None))
}

/// The logical shape, from codes and scales that agree about it.
fn dims(
    layer: &Layer,
    format: QuantFormat,
    codes: &StoredTensor,
    scales: &StoredTensor,
) -> Result<Vec<usize>> {
    layer.check_rank("weight", codes.dims(), true)?;
    let differ = |expected: String| {
        layer.wrong(
            "weight.scales",
            expected,
            format!("{:?} beside {:?} of codes", scales.dims(), codes.dims()),
        )
    };
    let (Some((columns, rows)), Some((groups, scale_rows))) =
        (codes.dims().split_last(), scales.dims().split_last())
    else {
        return Err(differ("scales of as many dimensions as the weight".into()));
    };
    if rows != scale_rows {
        return Err(differ(format!("the leading dimensions {rows:?} of the weight")));
    }
    let element_bits = codes.dtype().bitsize();
    let k = groups.checked_mul(format.group_size());
    let needed = k.and_then(|k| k.checked_mul(format.bits()));
    match (k, columns.checked_mul(element_bits)) {
        (Some(k), Some(bits)) if needed == Some(bits) => Ok([rows, &[k]].concat()),
        _ => Err(differ(format!(
            "one column for each {} columns of the weight ({format})",
            format.bits() * format.group_size() / element_bits
        ))),
    }
}

fn packed(
    layer: &Layer,
    format: QuantFormat,
    dims: Vec<usize>,
    codes: &StoredTensor,
    scales: &StoredTensor,
    biases: Option<&StoredTensor>,
) -> WeightAndWhy {
    let parts = Parts {
        module: layer.key.to_owned(),
        format,
        dims: dims.clone(),
        codes: codes.clone(),
        scales: scales.clone(),
        biases: biases.cloned(),
        global_scale: None,
    };
    (Weight::Packed(PackedWeight::new(layer.key, format, dims, parts)), None)
}
