//! compressed-tensors: `weight_packed` with `weight_scale`, and for NVFP4 `weight_global_scale`, by which the
//! scales are divided.
//!
//! As its `NVFP4PackedCompressor`, `MXFP4PackedCompressor` and `PackedQuantizationCompressor` write them
//! (src/compressed_tensors/compressors of vllm-project/compressed-tensors). Integers are stored with 8 added,
//! eight to an I32, the first in the lowest bits.

use super::module::{scale_dtypes, Module, PartNames, REMEDY};
use crate::checkpoint::weight::{GlobalScaleMeaning, Weight};
use crate::format::Scale;
use crate::{Error, QuantFormat, Result};
use safetensors::Dtype;

const CODES: &str = "weight_packed";
const SCALES: &str = "weight_scale";
const GLOBAL_SCALE: &str = "weight_global_scale";
const SHAPE: &str = "weight_shape";

/// A weight in one of the `formats` that the config names.
pub(super) fn weight(module: &Module, formats: &[QuantFormat]) -> Result<Weight> {
    module.refuse("weight_zero_point", "only symmetric codes are read")?;
    module.refuse("weight_g_idx", "an order of columns (actorder) is not applied")?;
    let codes = module.require(CODES, CODES, &[Dtype::U8, Dtype::I32])?;
    let scales = module.require(
        SCALES,
        CODES,
        &[Dtype::F8_E4M3, Dtype::U8, Dtype::F8_E8M0, Dtype::F16, Dtype::BF16, Dtype::F32],
    )?;
    let global_scale = Some((GLOBAL_SCALE, GlobalScaleMeaning::Reciprocal));
    let (format, global_scale) = match (codes.dtype(), scales.dtype()) {
        (Dtype::I32, _) => (integers(module)?, None),
        (_, Dtype::F8_E4M3) => (QuantFormat::NVFP4, global_scale),
        _ if module.get(GLOBAL_SCALE).is_some() => (QuantFormat::NVFP4, global_scale),
        _ => (QuantFormat::MXFP4, None),
    };
    if !formats.contains(&format) {
        let named: Vec<_> = formats.iter().map(ToString::to_string).collect();
        let expected = format!("what config_groups of the config names ({})", named.join(", "));
        let found = format!(
            "{format}: {:?} {:?}, scales {:?} {:?}",
            codes.dtype(),
            codes.dims(),
            scales.dtype(),
            scales.dims()
        );
        return Err(module.wrong(CODES, codes, expected, found));
    }
    let names = PartNames { codes: CODES, scales: SCALES, global_scale };
    let weight = module.parts(format, &names, &[codes.dtype()], scale_dtypes(format.scale()))?;
    check_shape(module, weight.dims())?;
    Ok(weight)
}

/// The format of codes in I32, from the shapes.
fn integers(module: &Module) -> Result<QuantFormat> {
    let codes = module.require(CODES, CODES, &[Dtype::I32])?;
    let scales = module.require(SCALES, CODES, scale_dtypes(Scale::Float))?;
    let (_, words) = module.rows(CODES, codes)?;
    let k = words.saturating_mul(8);
    let group_size = scales.dims().last().and_then(|groups| k.checked_div(*groups)).unwrap_or(0);
    QuantFormat::symmetric(4, group_size).map_err(|_| {
        let expected = format!("scales for groups of 32, 64 or 128 of K = {k}");
        module.wrong(SCALES, scales, expected, format!("{:?}", scales.dims()))
    })
}

/// The shape is stored once more, as two numbers.
fn check_shape(module: &Module, dims: &[usize]) -> Result<()> {
    let Some(shape) = module.get(SHAPE) else {
        return Ok(());
    };
    let numbers = |dtype| shape.dims() == [dims.len()] && shape.dtype() == dtype;
    let stored = if numbers(Dtype::I64) {
        Some(shape.read::<i64>()?)
    } else if numbers(Dtype::I32) {
        Some(shape.read::<i32>()?.into_iter().map(i64::from).collect())
    } else {
        None
    };
    let expected: Vec<_> = dims.iter().map(|dim| i64::try_from(*dim).unwrap_or(i64::MAX)).collect();
    if stored.as_ref() == Some(&expected) {
        return Ok(());
    }
    let found = match stored {
        Some(stored) => format!("{stored:?}"),
        None => format!("{:?} {:?}", shape.dtype(), shape.dims()),
    };
    let expected = format!("{expected:?}, the shape of `{}`", module.name(CODES));
    Err(Error::tensor(shape.path(), module.name(SHAPE), expected, found, REMEDY))
}
