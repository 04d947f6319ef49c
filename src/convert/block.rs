//! The work of one thread on a few rows: packing, converting, and what is lost by it.

use super::quality::Sums;
use crate::backend;
use crate::format::decode::decode_row;
use crate::format::element::{e4m3_to_f32, e8m0_to_f32, E2M1_MAX, E4M3_MAX};
use crate::format::ScaleKind;
use crate::{Error, QuantFormat, Result};
use candle_core::{DType, Tensor};
use half::{bf16, f16};

/// Rows in their new form: the bytes for each tensor of the output, in the order of the files.
pub(super) struct Block {
    pub bytes: Vec<Vec<u8>>,
    pub sums: Sums,
}

/// Numbers in f32, and rounded to `dtype`: as a tensor, and in f32 again.
fn rounded(numbers: &Tensor, dtype: DType) -> Result<(Vec<f32>, Tensor, Vec<f32>)> {
    if !matches!(dtype, DType::F16 | DType::BF16 | DType::F32) {
        let remedy = "use F16, BF16 or F32".into();
        return Err(Error::Unsupported { what: format!("converting to {dtype:?}"), remedy });
    }
    let source = numbers.to_dtype(DType::F32)?;
    let rounded = source.to_dtype(dtype)?;
    let widened = rounded.to_dtype(DType::F32)?.to_vec1()?;
    Ok((source.to_vec1()?, rounded, widened))
}

/// Numbers, rounded to `dtype`.
pub(super) fn cast(numbers: &Tensor, dtype: DType) -> Result<Block> {
    let (source, rounded, stored) = rounded(numbers, dtype)?;
    let mut sums = Sums::default();
    sums.add_row(&source, &stored);
    sums.count_non_finite(&source);
    Ok(Block { bytes: vec![le_bytes(&rounded)?], sums })
}

/// Rows of `k` numbers, rounded to `dtype` and packed. What is not finite is packed as zero, and counted.
pub(super) fn pack(numbers: &Tensor, k: usize, dtype: DType, format: QuantFormat) -> Result<Block> {
    let (rows, mut rounded, mut widened) = rounded(numbers, dtype)?;
    let mut sums = Sums::default();
    // They are packed as zero, so that what is decoded does not tell of them.
    sums.count_overflowing(&rows, &widened);
    sums.count_non_finite(&rows);
    if sums.non_finite() > 0 {
        widened.iter_mut().filter(|number| !number.is_finite()).for_each(|number| *number = 0.);
        rounded = Tensor::from_vec(widened, rows.len(), numbers.device())?.to_dtype(dtype)?;
    }
    let parts = backend::quantize(&rounded.reshape(((), k))?, format, None)?;
    let stored: Vec<_> = [Some(&parts.packed), Some(&parts.scales), parts.biases.as_ref()]
        .into_iter()
        .flatten()
        .map(le_bytes)
        .collect::<Result<_>>()?;
    let words: Vec<u32> = parts.packed.to_vec1()?;
    let scales = scale_values(&parts.scales, format)?;
    let biases = parts.biases.map_or(Ok(Vec::new()), |biases| biases.to_dtype(DType::F32)?.to_vec1())?;

    let (words_per_row, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
    let mut decoded = vec![0.; k];
    let rows_of_words = rows.chunks_exact(k).zip(words.chunks_exact(words_per_row)).enumerate();
    for (index, (row, words)) in rows_of_words {
        let of_row = index * groups..(index + 1) * groups;
        let scales = scales.get(of_row.clone()).unwrap_or_default();
        let biases = biases.get(of_row).unwrap_or_default();
        decode_row(format, words, scales, biases, &mut decoded);
        sums.add_row(row, &decoded);
        sums.add_groups(scales, row.chunks_exact(format.group_size()), |group| {
            range(format, scales.get(group), biases.get(group))
        });
    }
    Ok(Block { bytes: stored, sums })
}

/// Scales as numbers.
fn scale_values(scales: &Tensor, format: QuantFormat) -> Result<Vec<f32>> {
    let of_bytes =
        |value: fn(u8) -> f32| -> Result<Vec<f32>> { Ok(scales.to_vec1()?.into_iter().map(value).collect()) };
    match format.scale_kind() {
        ScaleKind::Float => Ok(scales.to_dtype(DType::F32)?.to_vec1()?),
        ScaleKind::E8m0 => of_bytes(e8m0_to_f32),
        ScaleKind::E4m3 => of_bytes(e4m3_to_f32),
    }
}

/// What a group can hold, half a step beyond its ends included where steps are even.
fn range(format: QuantFormat, scale: Option<&f32>, bias: Option<&f32>) -> (f32, f32) {
    let scale = scale.copied().unwrap_or(f32::NAN);
    match (format, bias) {
        (QuantFormat::Affine { bits, .. }, Some(bias)) => {
            let codes = (1u32 << bits.min(8)) as f32;
            let (first, last) = (bias - scale / 2., bias + scale * (codes - 0.5));
            (first.min(last), first.max(last))
        }
        (QuantFormat::Mxfp8, _) => (-E4M3_MAX * scale, E4M3_MAX * scale),
        _ => (-E2M1_MAX * scale, E2M1_MAX * scale),
    }
}

/// The elements of a tensor as files hold them.
pub(super) fn le_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        DType::U32 => flat.to_vec1::<u32>()?.iter().flat_map(|word| word.to_le_bytes()).collect(),
        DType::F16 => flat.to_vec1::<f16>()?.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::BF16 => flat.to_vec1::<bf16>()?.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::F32 => flat.to_vec1::<f32>()?.iter().flat_map(|number| number.to_le_bytes()).collect(),
        _ => flat.to_vec1::<u8>()?,
    })
}
