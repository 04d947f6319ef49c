//! The entries of a layer in UQFF files, by the family that it is of.

use super::exact::Exact;
use crate::convert::output::OutputTensor;
use crate::convert::recipe::{FileType, Spec};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{module_of, tensor_of, StoredForm, StoredFp8, StoredHqq};
use candle_quant::format::UqffType;
use candle_quant::{Error, Result};
use safetensors::Dtype;

/// What `<module>.weight.format` says of blocks of GGML's types, of layers that are not packed, and of the types of mistral.rs.
const GGML: u8 = 0;
pub(super) const UNQUANT: u8 = 1;
const HQQ: u8 = 2;
const FP8: u8 = 3;
pub(super) const AFQ: u8 = 4;
const F8Q8: u8 = 5;
pub(super) const MXFP4: u8 = 6;

/// The number of F8_E4M3 in mistral.rs' table of dtypes.
const F8_E4M3: u32 = 9;

/// Elements of a group of HQQ, and how often mistral.rs moves zeros.
const HQQ_GROUP: u32 = 64;
const HQQ_STEPS: u32 = 10;
/// What is said if that is not known.
const NO_STEPS: u32 = 0;

/// What quantizes zeros in FP8.
const LARGEST_SCALE: f32 = 416.;

pub(super) fn count(dims: &[usize]) -> u64 {
    dims.iter().fold(1u64, |all, dim| all.saturating_mul(*dim as u64))
}

/// An entry of the shape of a weight.
fn shape(module: &str, dims: &[usize]) -> Result<OutputTensor> {
    let sizes = dims.iter().map(|dim| u32::try_from(*dim).map(u32::to_le_bytes));
    let Ok(sizes) = sizes.collect::<std::result::Result<Vec<_>, _>>() else {
        return Err(Error::mismatch(format!("`{module}.weight`"), "sizes of 32 bits", format!("{dims:?}")));
    };
    Ok(OutputTensor::known(tensor_of(module, "weight.shape"), Dtype::U32, vec![dims.len()], &sizes.concat()))
}

fn number(module: &str, part: &str, number: u32) -> OutputTensor {
    OutputTensor::scalar(tensor_of(module, part), Dtype::U32, &number.to_le_bytes())
}

/// The tensors of a weight in blocks of a type of GGML.
pub(super) fn of_ggml(name: &str, dims: &[usize], id: u32, bytes: u64) -> Result<Vec<OutputTensor>> {
    let module = module_of(name).unwrap_or(name);
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    Ok(vec![
        OutputTensor::new(tensor_of(module, "weight"), Dtype::U8, vec![size])?,
        number(module, "weight.dtype", id),
        shape(module, dims)?,
        family(module, GGML),
    ])
}

/// The tensors of HQQ along axis 0: codes, scales and zeros, then what is known already.
fn of_hqq(name: &str, dims: &[usize], (bits, group): (u8, u32), steps: u32) -> Result<Vec<OutputTensor>> {
    let module = module_of(name).unwrap_or(name);
    let part = |part: &str| tensor_of(module, part);
    let byte = |name: &str, byte: u8| OutputTensor::scalar(part(name), Dtype::U8, &[byte]);
    let of_group = u64::from(group) * u64::from(bits) / 8;
    let [groups, of_group] = [count(dims) / u64::from(group.max(1)), of_group]
        .map(|size| usize::try_from(size).unwrap_or(usize::MAX));
    Ok(vec![
        OutputTensor::new(part("weight"), Dtype::U8, vec![of_group, groups])?,
        OutputTensor::new(part("weight.scales"), Dtype::F32, vec![1, groups])?,
        OutputTensor::new(part("weight.zeros"), Dtype::F32, vec![1, groups])?,
        shape(module, dims)?,
        byte("weight.bits", bits),
        number(module, "weight.group_size", group),
        byte("weight.axis", 0),
        number(module, "weight.optimization_steps", steps),
        byte("weight.round_zeros", 0),
        byte("weight.channel_wise", 1),
        family(module, HQQ),
    ])
}

/// The tensors of a weight that has such codes and scales already; `None` if mistral.rs has none such.
pub(super) fn of_stored(name: &str, dims: &[usize], form: &StoredForm) -> Result<Option<Exact>> {
    match (form, dims) {
        (StoredForm::Fp8(stored), [_, _]) => fp8_of(name, dims, stored),
        (StoredForm::Hqq(stored), [_, _]) => hqq_of(name, dims, stored),
        _ => Ok(None),
    }
}

/// E4M3 codes with one scale for all.
fn fp8_of(name: &str, dims: &[usize], stored: &StoredFp8) -> Result<Option<Exact>> {
    if stored.scales.dims().iter().any(|dim| *dim != 1) {
        return Ok(None);
    }
    let scale = stored.scales.load(DType::F32, &Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
    let scale = match scale.as_slice() {
        [scale] if scale.is_finite() => *scale,
        other => {
            let expected = "a finite number, which alone UQFF files have";
            return Err(Error::mismatch(format!("the scale of `{name}`"), expected, format!("{other:?}")));
        }
    };
    // What multiplied numbers before they were rounded: of activations mistral.rs finds its own.
    let inverse = Some(scale.recip()).filter(|inverse| inverse.is_finite()).unwrap_or(LARGEST_SCALE);
    let mut outputs = of_whole(name, dims, UqffType::Fp8)?;
    for (output, number) in outputs.iter_mut().skip(1).zip([scale, scale, inverse]) {
        *output = OutputTensor::scalar(output.name.clone(), Dtype::F32, &number.to_le_bytes());
    }
    let spec = Spec::Type(FileType::Uqff(UqffType::Fp8));
    Ok(Some(Exact { spec, outputs, copied: vec![stored.codes.clone()] }))
}

/// Codes as they are, scales and zeros in F32, as mistral.rs has them. On a CPU it does not dequantize words of 3-bit codes whose
/// last are no codes.
fn hqq_of(name: &str, dims: &[usize], stored: &StoredHqq) -> Result<Option<Exact>> {
    let StoredHqq { bits, group_size, codes, scales, zeros, .. } = stored;
    let kind = UqffType::hqq(*bits).filter(|kind| *kind != UqffType::Hqq3);
    let (Some(kind), Ok(width), Ok(group)) = (kind, u8::try_from(*bits), u32::try_from(*group_size)) else {
        return Ok(None);
    };
    let outputs = of_hqq(name, dims, (width, group), NO_STEPS)?;
    let copied = vec![codes.clone(), scales.clone(), zeros.clone()];
    Ok(Some(Exact { spec: Spec::Type(FileType::Uqff(kind)), outputs, copied }))
}

/// The tensors of a type that is made of a whole matrix: those that are not known yet come first, in the order in which it is
/// quantized.
pub(super) fn of_whole(name: &str, dims: &[usize], kind: UqffType) -> Result<Vec<OutputTensor>> {
    let module = module_of(name).unwrap_or(name);
    let part = |part: &str| tensor_of(module, part);
    let elements = usize::try_from(count(dims)).unwrap_or(usize::MAX);
    match kind {
        UqffType::Hqq4 => of_hqq(name, dims, (4, HQQ_GROUP), HQQ_STEPS),
        UqffType::Hqq8 => of_hqq(name, dims, (8, HQQ_GROUP), HQQ_STEPS),
        UqffType::Fp8 => Ok(vec![
            OutputTensor::new(part("weight"), Dtype::F8_E4M3, dims.to_vec())?,
            OutputTensor::new(part("weight.dequant_w_scale"), Dtype::F32, Vec::new())?,
            OutputTensor::new(part("weight.dequant_x_scale"), Dtype::F32, Vec::new())?,
            OutputTensor::new(part("weight.quant_scale"), Dtype::F32, Vec::new())?,
            number(module, "weight.dtype", F8_E4M3),
            family(module, FP8),
        ]),
        UqffType::F8q8 => {
            let blocks = elements.div_ceil(32);
            let too_large =
                || Error::mismatch(format!("`{name}`"), "2^32 blocks at most", blocks.to_string());
            Ok(vec![
                OutputTensor::new(part("weight"), Dtype::U8, vec![blocks.saturating_mul(33)])?,
                number(module, "weight.num_blocks", u32::try_from(blocks).map_err(|_| too_large())?),
                shape(module, dims)?,
                family(module, F8Q8),
            ])
        }
        other @ (UqffType::Hqq1 | UqffType::Hqq2 | UqffType::Hqq3 | _) => {
            let expected = "a type of UQFF files that something is quantized to";
            Err(Error::mismatch(format!("`{name}`"), expected, other.name()))
        }
    }
}

pub(super) fn family(module: &str, number: u8) -> OutputTensor {
    OutputTensor::scalar(tensor_of(module, "weight.format"), Dtype::U8, &[number])
}
