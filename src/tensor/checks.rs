//! What the parts of a packed weight have to be.

use super::GlobalScale;
use crate::format::{Scale, ZeroPoint};
use crate::{Error, QuantFormat, Result};
use candle_core::{DType, Tensor};

/// K of a packed tensor, after its dtype and shape were checked.
pub(super) fn check_packed(format: QuantFormat, packed: &Tensor) -> Result<usize> {
    let what = || format!("packed words of an {format} weight");
    if packed.dtype() != DType::U32 {
        return Err(Error::mismatch(what(), "dtype U32", format!("{:?}", packed.dtype())));
    }
    let dims = packed.dims();
    let [.., _, words] = dims else {
        return Err(Error::mismatch(what(), "a shape [.., N, words]", format!("{dims:?}")));
    };
    if packed.elem_count() == 0 {
        return Err(Error::mismatch(what(), "no dimension of zero", format!("{dims:?}")));
    }
    let group_bits = format.bits() * format.granularity();
    match words.checked_mul(32).filter(|bits| bits % group_bits == 0) {
        Some(bits) => Ok(bits / format.bits()),
        None => Err(Error::mismatch(
            what(),
            format!("rows of whole groups, {} words each", group_bits / 32),
            format!("{words} words in {dims:?}"),
        )),
    }
}

pub(super) fn check_groups(format: QuantFormat, name: &str, values: &Tensor, dims: &[usize]) -> Result<()> {
    let is_float = matches!(values.dtype(), DType::F16 | DType::BF16 | DType::F32);
    let (fits, expected) = match format.scale() {
        Scale::Float => (is_float, "dtype F16, BF16 or F32"),
        Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => (values.dtype() == DType::U8, "dtype U8"),
    };
    let what = format!("{name} of an {format} weight");
    if !fits {
        return Err(Error::mismatch(what, expected, format!("{:?}", values.dtype())));
    }
    if values.dims() != dims {
        return Err(Error::mismatch(what, format!("shape {dims:?}"), format!("{:?}", values.dims())));
    }
    Ok(())
}

/// Checks that there are biases if the format has them. Those that mean what a symmetric format means are written out
/// beside 16-bit scales, in which they are exact, as kernels read them; the weight then is of the affine format.
pub(super) fn check_biases(
    format: QuantFormat,
    scales: &Tensor,
    biases: Option<Tensor>,
    dims: &[usize],
) -> Result<(QuantFormat, Option<Tensor>)> {
    match (format.zero_point(), biases) {
        (ZeroPoint::Bias, Some(biases)) => {
            check_groups(format, "biases", &biases, dims)?;
            Ok((format, Some(biases)))
        }
        (ZeroPoint::Bias, None) => {
            let expected = "biases, or a symmetric format (QuantFormat::symmetric), which has none";
            Err(Error::mismatch(format!("{format} weight"), expected, "none"))
        }
        (ZeroPoint::Midpoint | ZeroPoint::None, Some(_)) => {
            Err(Error::mismatch(format!("{format} weight"), "no biases", "biases"))
        }
        (ZeroPoint::Midpoint, None) if format.scale() == Scale::Float && scales.dtype() != DType::F32 => {
            Ok((format.with_biases(), Some(symmetric_biases(format, scales)?)))
        }
        (ZeroPoint::Midpoint | ZeroPoint::None, None) => Ok((format, None)),
    }
}

fn symmetric_biases(format: QuantFormat, scales: &Tensor) -> Result<Tensor> {
    let biases = (scales.to_dtype(DType::F32)? * f64::from(-format.midpoint()))?;
    let narrow = biases.to_dtype(scales.dtype())?;
    // Multiples of large halves are beyond their range.
    let fits = narrow.to_dtype(DType::F32)?.eq(&biases)?.to_dtype(DType::U32)?.sum_all()?;
    let all = fits.to_scalar::<u32>()? as usize == biases.elem_count();
    Ok(if all { narrow } else { biases })
}

pub(super) fn check_global_scale(
    format: QuantFormat,
    packed: &Tensor,
    tensor: Tensor,
) -> Result<GlobalScale> {
    let what = || format!("global scale of an {format} weight");
    if !matches!(format.scale(), Scale::E8m0 | Scale::E4m3) {
        return Err(Error::mismatch(what(), "none (only formats with scales of a byte have one)", "one"));
    }
    if tensor.dtype() != DType::F32 {
        return Err(Error::mismatch(what(), "dtype F32", format!("{:?}", tensor.dtype())));
    }
    let stack = match packed.dims() {
        [experts, _, _] => *experts,
        _ => 1,
    };
    if tensor.rank() > 1 || (tensor.elem_count() != 1 && tensor.elem_count() != stack) {
        return Err(Error::mismatch(
            what(),
            format!("one value, or {stack}"),
            format!("shape {:?}", tensor.dims()),
        ));
    }
    let tensor = tensor.flatten_all()?.contiguous()?;
    let values: Vec<f32> = tensor.to_vec1()?;
    match values.iter().find(|value| !value.is_finite() || **value < 0.0) {
        Some(bad) => Err(Error::mismatch(what(), "finite numbers of 0 or more", bad.to_string())),
        None => Ok(GlobalScale { tensor, values: values.into() }),
    }
}
