//! The work of one thread on a few rows: packing, converting, and what is lost by it.

use super::quality::Sums;
use crate::convert::output::{Encoding, Packing};
use candle_core::{DType, Device, Tensor};
use candle_quant::format::{
    dequantize_row, ErrorFeedback, GroupScales, QuantizedRows, Quantizer, Real, UqffNumbers, UqffType,
};
use candle_quant::ops::quantize_rows;
use candle_quant::{Error, Result};
use half::{bf16, f16};

/// Rows in their new form: the bytes for each tensor of the output, in the order of the files.
pub(super) struct Block {
    pub bytes: Vec<Vec<u8>>,
    pub sums: Sums,
}

/// How much the columns of rows count, and how they make up for each other, if anything says so.
#[derive(Clone, Copy, Default)]
pub(super) struct Importance<'a> {
    pub columns: Option<&'a [f32]>,
    pub feedback: Option<&'a ErrorFeedback>,
}

/// Rows of `k` numbers, rounded to a dtype and packed, by `device` where it can. What is not finite is packed as zero,
/// and counted.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here writes")]
pub(super) fn pack(
    numbers: &Tensor,
    k: usize,
    packing: &Packing,
    importance: Importance,
    device: &Device,
) -> Result<Block> {
    match packing.dtype {
        DType::F16 => pack_as::<f16>(numbers, k, packing, importance, device),
        DType::BF16 => pack_as::<bf16>(numbers, k, packing, importance, device),
        DType::F32 => pack_as::<f32>(numbers, k, packing, importance, device),
        other => Err(unsupported(other)),
    }
}

/// A matrix as a whole, rounded to a dtype and packed: codes, and then what describes them all. What is not finite is packed as
/// zero, and counted.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here writes")]
pub(super) fn pack_whole(numbers: &Tensor, k: usize, kind: UqffType, packing: &Packing) -> Result<Block> {
    match packing.dtype {
        DType::F16 => pack_whole_as::<f16>(numbers, k, kind, packing.search),
        DType::BF16 => pack_whole_as::<bf16>(numbers, k, kind, packing.search),
        DType::F32 => pack_whole_as::<f32>(numbers, k, kind, packing.search),
        other => Err(unsupported(other)),
    }
}

fn pack_whole_as<T: Bytes>(numbers: &Tensor, k: usize, kind: UqffType, search: bool) -> Result<Block> {
    let mut sums = Sums::default();
    let (rows, rounded) = rounded::<T>(numbers, &mut sums)?;
    sums.count_non_finite(&rows);
    let mut numbers = vec![0.; rounded.len()];
    T::widen(&rounded, &mut numbers);
    numbers.iter_mut().filter(|number| !number.is_finite()).for_each(|number| *number = 0.);
    let UqffNumbers { codes, scales, zeros, values } = kind.quantize(&numbers, search)?;
    for (row, values) in rows.chunks(k.max(1)).zip(values.chunks(k.max(1))) {
        sums.add_row(row, values);
    }
    let mut bytes = vec![codes];
    match kind {
        // One is a copy for activations, which are quantized when they come.
        UqffType::Fp8 => {
            let scale = |index: usize| f32::bytes(scales.get(index..=index).unwrap_or_default());
            bytes.extend([scale(0), scale(0), scale(1)]);
        }
        UqffType::Hqq4 | UqffType::Hqq8 => bytes.extend([f32::bytes(&scales), f32::bytes(&zeros)]),
        UqffType::F8q8 | _ => {}
    }
    Ok(Block { bytes, sums })
}

/// Numbers, rounded to `dtype`.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here writes")]
pub(super) fn cast(numbers: &Tensor, dtype: DType) -> Result<Block> {
    let numbers = numbers.to_dtype(DType::F32)?.to_vec1()?;
    match dtype {
        DType::F16 => Ok(cast_as::<f16>(numbers)),
        DType::BF16 => Ok(cast_as::<bf16>(numbers)),
        DType::F32 => Ok(cast_as::<f32>(numbers)),
        other => Err(unsupported(other)),
    }
}

fn unsupported(dtype: DType) -> Error {
    Error::Unsupported { what: format!("converting to {dtype:?}"), remedy: "use F16, BF16 or F32".into() }
}

fn cast_as<T: Bytes>(numbers: Vec<f32>) -> Block {
    let rounded = T::round_all(numbers.clone());
    let mut stored = vec![0.; numbers.len()];
    T::widen(&rounded, &mut stored);
    let mut sums = Sums::default();
    sums.add_row(&numbers, &stored);
    sums.count_non_finite(&numbers);
    Block { bytes: vec![T::bytes(&rounded)], sums }
}

/// Numbers as they are, and rounded.
fn rounded<T: Bytes>(numbers: &Tensor, sums: &mut Sums) -> Result<(Vec<f32>, Vec<T>)> {
    let widened = |rounded: &[T]| {
        let mut widened = vec![0.; rounded.len()];
        T::widen(rounded, &mut widened);
        widened
    };
    if numbers.dtype() == T::DTYPE {
        let stored = numbers.to_vec1()?;
        return Ok((widened(&stored), stored));
    }
    let rows: Vec<f32> = numbers.to_dtype(DType::F32)?.to_vec1()?;
    let rounded = T::round_all(rows.clone());
    // They are packed as zero, so that what is dequantized does not tell of them.
    sums.count_overflowing(&rows, &widened(&rounded));
    Ok((rows, rounded))
}

fn pack_as<T: Bytes>(
    numbers: &Tensor,
    k: usize,
    packing: &Packing,
    Importance { columns, feedback }: Importance,
    device: &Device,
) -> Result<Block> {
    let Packing { format, quantizer, .. } = *packing;
    let mut sums = Sums::default();
    let (rows, mut rounded) = rounded::<T>(numbers, &mut sums)?;
    sums.count_non_finite(&rows);
    if sums.non_finite() > 0 {
        for number in rounded.iter_mut().filter(|number| !number.to_f32().is_finite()) {
            *number = T::from_f32(0.);
        }
    }
    if packing.encoding != Encoding::Parts {
        let mut of_rows = rows.chunks_exact(k);
        let bytes = by_rows(&rounded, k, packing, columns, |values| {
            let row = of_rows.next().unwrap_or_default();
            sums.add_row(row, values);
            sums.add_weighted(row, values, columns.unwrap_or_default());
        })?;
        return Ok(Block { bytes, sums });
    }
    let importance = Importance { columns, feedback };
    let QuantizedRows { mut words, scales: stored } = quantized(&rounded, k, packing, importance, device)?;
    let mut bytes = Vec::new();
    let (scales, biases);
    match stored {
        GroupScales::Float { scales: stored_scales, biases: stored_biases } => {
            let widened = |stored: &[T]| stored.iter().map(|number| number.to_f32()).collect::<Vec<f32>>();
            let rounded = widened(&stored_biases);
            scales = widened(&stored_scales);
            bytes.push(T::bytes(&stored_scales));
            biases = match (format.has_biases(), quantizer) {
                // What the scales say is not stored.
                (true, Quantizer::Midpoint) => rounded,
                (true, Quantizer::Mlx | Quantizer::Afq) => {
                    bytes.push(T::bytes(&stored_biases));
                    rounded
                }
                (false, _) => rounded,
            };
        }
        GroupScales::Bytes(stored) => {
            scales = stored.iter().map(|byte| format.scale().value(*byte)).collect();
            biases = Vec::new();
            bytes.push(stored);
        }
    }
    let (words_per_row, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
    let mut dequantized = vec![0.; k];
    let rows_of_words = rows.chunks_exact(k).zip(words.chunks_exact(words_per_row)).enumerate();
    for (index, (row, words)) in rows_of_words {
        let of_row = index * groups..(index + 1) * groups;
        let scales = scales.get(of_row.clone()).unwrap_or_default();
        let biases = biases.get(of_row).unwrap_or_default();
        dequantize_row(format, words, scales, biases, &mut dequantized);
        sums.add_row(row, &dequantized);
        sums.add_weighted(row, &dequantized, columns.unwrap_or_default());
        sums.add_groups(scales, row.chunks_exact(format.group_size()), |group| {
            let of_group = |all: &[f32], missing| all.get(group).copied().unwrap_or(missing);
            format.representable(of_group(scales, f32::NAN), of_group(biases, 0.))
        });
    }
    words.iter_mut().for_each(|word| *word = word.to_le());
    bytes.insert(0, bytemuck::cast_slice(&words).to_vec());
    Ok(Block { bytes, sums })
}

/// The bytes of rows that are quantized one by one, as types of files are; `take` gets what each means.
fn by_rows<T: Bytes>(
    rounded: &[T],
    k: usize,
    packing: &Packing,
    columns: Option<&[f32]>,
    mut take: impl FnMut(&[f32]),
) -> Result<Vec<Vec<u8>>> {
    let (mut row, mut values) = (vec![0.; k], vec![0.; k]);
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for numbers in rounded.chunks_exact(k.max(1)) {
        T::widen(numbers, &mut row);
        match (packing.encoding, columns.filter(|_| packing.search)) {
            (Encoding::Blocks(kind), Some(columns)) => {
                kind.quantize_weighted(&row, columns, &mut codes, &mut values)?;
            }
            (Encoding::Blocks(kind), None) => kind.quantize(&row, packing.search, &mut codes, &mut values)?,
            (Encoding::Signed(kind), _) => {
                kind.quantize(&row, packing.search, &mut codes, &mut scales, &mut values)?;
            }
            (Encoding::Parts | Encoding::Whole(_) | Encoding::WithZeros, _) => {
                return Err(Error::Unsupported {
                    what: format!(
                        "scaled columns for {}, whose matrices are quantized as a whole",
                        packing.format
                    ),
                    remedy: "leave out --awq, or convert to another type".into(),
                })
            }
        }
        take(&values);
    }
    Ok(match packing.encoding {
        Encoding::Signed(_) => vec![codes, f32::bytes(&scales)],
        Encoding::Parts | Encoding::Blocks(_) | Encoding::Whole(_) | Encoding::WithZeros => vec![codes],
    })
}

/// Codes and scales of rounded numbers that are finite.
fn quantized<T: Bytes>(
    rounded: &[T],
    k: usize,
    packing: &Packing,
    Importance { columns, feedback }: Importance,
    device: &Device,
) -> Result<QuantizedRows<T>> {
    let Packing { format, quantizer, search, .. } = *packing;
    let mut quantized = match feedback {
        Some(feedback) => {
            return QuantizedRows::quantize_with_feedback(format, quantizer, rounded, k, feedback, search);
        }
        None if packing.runs_on(device) => quantize_rows(rounded, k, format, device)?,
        None => QuantizedRows::quantize(format, quantizer, rounded, k, None)?,
    };
    match columns {
        _ if !search => {}
        Some(columns) => quantized.improve_weighted(format, rounded, k, columns)?,
        None => quantized.improve(format, rounded, k)?,
    }
    Ok(quantized)
}

/// What rows of `k` numbers are once they are packed, on the CPU and without feedback.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here writes")]
pub(in crate::convert) fn as_packed(
    numbers: Vec<f32>,
    k: usize,
    packing: &Packing,
    columns: Option<&[f32]>,
) -> Result<Vec<f32>> {
    match packing.dtype {
        DType::F16 => as_packed_of::<f16>(numbers, k, packing, columns),
        DType::BF16 => as_packed_of::<bf16>(numbers, k, packing, columns),
        DType::F32 => as_packed_of::<f32>(numbers, k, packing, columns),
        other => Err(unsupported(other)),
    }
}

fn as_packed_of<T: Bytes>(
    mut numbers: Vec<f32>,
    k: usize,
    packing: &Packing,
    columns: Option<&[f32]>,
) -> Result<Vec<f32>> {
    // What is not finite is packed as zero.
    numbers.iter_mut().filter(|number| !number.is_finite()).for_each(|number| *number = 0.);
    let rounded = T::round_all(numbers);
    match packing.encoding {
        Encoding::Blocks(_) | Encoding::Signed(_) | Encoding::Whole(_) | Encoding::WithZeros => {
            let mut all = Vec::with_capacity(rounded.len());
            by_rows(&rounded, k, packing, columns, |values| all.extend_from_slice(values))?;
            Ok(all)
        }
        Encoding::Parts => {
            let importance = Importance { columns, feedback: None };
            quantized(&rounded, k, packing, importance, &Device::Cpu)?.dequantize(packing.format, k, 1.)
        }
    }
}

/// Numbers as files hold them.
trait Bytes: Real {
    fn bytes(numbers: &[Self]) -> Vec<u8>;
}

macro_rules! bytes {
    ($($type:ty),*) => {$(
        impl Bytes for $type {
            fn bytes(numbers: &[Self]) -> Vec<u8> {
                numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
            }
        }
    )*};
}
bytes!(f16, bf16, f32);
