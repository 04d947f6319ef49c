//! The work of one thread on a few rows: packing, converting, and what is lost by it.

use super::job::Packing;
use super::kind::Encoder;
use super::quality::Sums;
use crate::format::decode::decode_row;
use crate::format::element::{e4m3_to_f32, e8m0_to_f32, Real, E2M1_MAX, E4M3_MAX};
use crate::format::encode::{encode_affine, encode_afq, encode_mx, encode_nvfp4};
use crate::format::search::{search_affine, search_scales};
use crate::format::ScaleKind;
use crate::{Error, QuantFormat, Result};
use candle_core::{DType, Tensor};
use half::{bf16, f16};

/// Rows in their new form: the bytes for each tensor of the output, in the order of the files.
pub(super) struct Block {
    pub bytes: Vec<Vec<u8>>,
    pub sums: Sums,
}

/// Rows of `k` numbers, rounded to a dtype and packed. What is not finite is packed as zero, and counted.
pub(super) fn pack(numbers: &Tensor, k: usize, packing: &Packing) -> Result<Block> {
    match packing.dtype {
        DType::F16 => pack_as::<f16>(numbers, k, packing),
        DType::BF16 => pack_as::<bf16>(numbers, k, packing),
        DType::F32 => pack_as::<f32>(numbers, k, packing),
        other => Err(unsupported(other)),
    }
}

/// Numbers, rounded to `dtype`.
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
    // They are packed as zero, so that what is decoded does not tell of them.
    sums.count_overflowing(&rows, &widened(&rounded));
    Ok((rows, rounded))
}

fn pack_as<T: Bytes>(numbers: &Tensor, k: usize, packing: &Packing) -> Result<Block> {
    let Packing { format, encoder, search, .. } = *packing;
    let mut sums = Sums::default();
    let (rows, mut rounded) = rounded::<T>(numbers, &mut sums)?;
    sums.count_non_finite(&rows);
    if sums.non_finite() > 0 {
        for number in rounded.iter_mut().filter(|number| !number.to_f32().is_finite()) {
            *number = T::from_f32(0.);
        }
    }
    let (words_per_row, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
    let count = rows.len() / k.max(1);
    let mut words = vec![0u32; count * words_per_row];
    let pairs = rounded.chunks_exact(k).zip(words.chunks_exact_mut(words_per_row));
    let mut bytes = Vec::new();
    let (scales, biases);
    match format {
        QuantFormat::Affine { bits, group_size } => {
            let mut stored = [vec![T::from_f32(0.); count * groups], vec![T::from_f32(0.); count * groups]];
            let [stored_scales, stored_biases] = &mut stored;
            let parts = stored_scales.chunks_exact_mut(groups).zip(stored_biases.chunks_exact_mut(groups));
            for ((row, words), (scales, biases)) in pairs.zip(parts) {
                match encoder {
                    Encoder::Mlx => encode_affine(row, bits, group_size, words, scales, biases),
                    Encoder::Afq => encode_afq(row, bits, group_size, words, scales, biases),
                }
                if search {
                    search_affine(row, bits, group_size, words, scales, biases);
                }
            }
            bytes.extend(stored.iter().map(|numbers| T::bytes(numbers)));
            [scales, biases] = stored.map(|numbers| numbers.iter().map(|number| number.to_f32()).collect());
        }
        _ => {
            let mut stored = vec![0u8; count * groups];
            for ((row, words), scales) in pairs.zip(stored.chunks_exact_mut(groups)) {
                match format {
                    QuantFormat::Nvfp4 => encode_nvfp4(row, None, words, scales),
                    _ => encode_mx(row, format, words, scales),
                }
                if search {
                    search_scales(row, format, words, scales);
                }
            }
            let value = |byte: &u8| match format.scale_kind() {
                ScaleKind::E4m3 => e4m3_to_f32(*byte),
                _ => e8m0_to_f32(*byte),
            };
            (scales, biases) = (stored.iter().map(value).collect::<Vec<f32>>(), Vec::new());
            bytes.push(stored);
        }
    }
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
    words.iter_mut().for_each(|word| *word = word.to_le());
    bytes.insert(0, bytemuck::cast_slice(&words).to_vec());
    Ok(Block { bytes, sums })
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
