//! The work of one thread on a few rows: packing, converting, and what is lost by it.

use super::device;
use super::job::Packing;
use super::kind::Encoder;
use super::quality::Sums;
use crate::format::decode::decode_row;
use crate::format::element::{e4m3_to_f32, e8m0_to_f32, Real, E2M1_MAX, E4M3_MAX};
use crate::format::encode::{encode_affine, encode_afq, encode_mx, encode_nvfp4};
use crate::format::search::{search_affine, search_scales};
use crate::format::ScaleKind;
use crate::{Error, QuantFormat, Result};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

/// Rows in their new form: the bytes for each tensor of the output, in the order of the files.
pub(super) struct Block {
    pub bytes: Vec<Vec<u8>>,
    pub sums: Sums,
}

/// Codes and scales of rows.
pub(super) struct Encoded<T> {
    pub words: Vec<u32>,
    pub scales: Scales<T>,
}

pub(super) enum Scales<T> {
    /// Scales and biases.
    Floats([Vec<T>; 2]),
    Bytes(Vec<u8>),
}

/// Rows of `k` numbers, rounded to a dtype and packed, by `device` where it can. What is not finite is packed as zero,
/// and counted.
pub(super) fn pack(numbers: &Tensor, k: usize, packing: &Packing, device: &Device) -> Result<Block> {
    match packing.dtype {
        DType::F16 => pack_as::<f16>(numbers, k, packing, device),
        DType::BF16 => pack_as::<bf16>(numbers, k, packing, device),
        DType::F32 => pack_as::<f32>(numbers, k, packing, device),
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

fn pack_as<T: Bytes>(numbers: &Tensor, k: usize, packing: &Packing, device: &Device) -> Result<Block> {
    let Packing { format, encoder, search, .. } = *packing;
    let mut sums = Sums::default();
    let (rows, mut rounded) = rounded::<T>(numbers, &mut sums)?;
    sums.count_non_finite(&rows);
    if sums.non_finite() > 0 {
        for number in rounded.iter_mut().filter(|number| !number.to_f32().is_finite()) {
            *number = T::from_f32(0.);
        }
    }
    let mut encoded = match device::encodes(device, encoder) {
        true => device::encode(&rounded, format, device)?,
        false => encode(&rounded, k, packing)?,
    };
    if search {
        improve(&rounded, k, format, &mut encoded)?;
    }
    let Encoded { mut words, scales: stored } = encoded;
    let mut bytes = Vec::new();
    let (scales, biases);
    match stored {
        Scales::Floats(stored) => {
            bytes.extend(stored.iter().map(|numbers| T::bytes(numbers)));
            [scales, biases] = stored.map(|numbers| numbers.iter().map(|number| number.to_f32()).collect());
        }
        Scales::Bytes(stored) => {
            let value = |byte: &u8| match format.scale_kind() {
                ScaleKind::E4m3 => e4m3_to_f32(*byte),
                _ => e8m0_to_f32(*byte),
            };
            (scales, biases) = (stored.iter().map(value).collect::<Vec<f32>>(), Vec::new());
            bytes.push(stored);
        }
    }
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
    words.iter_mut().for_each(|word| *word = word.to_le());
    bytes.insert(0, bytemuck::cast_slice(&words).to_vec());
    Ok(Block { bytes, sums })
}

/// Encodes rows on the CPU.
fn encode<T: Real>(
    rounded: &[T],
    k: usize,
    &Packing { format, encoder, .. }: &Packing,
) -> Result<Encoded<T>> {
    let (words_per_row, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
    let count = rounded.len() / k.max(1);
    let mut words = vec![0u32; count * words_per_row];
    let pairs = rounded.chunks_exact(k).zip(words.chunks_exact_mut(words_per_row));
    let scales = match format {
        QuantFormat::Affine { bits, group_size } => {
            let mut stored = [vec![T::from_f32(0.); count * groups], vec![T::from_f32(0.); count * groups]];
            let [scales, biases] = &mut stored;
            let parts = scales.chunks_exact_mut(groups).zip(biases.chunks_exact_mut(groups));
            for ((row, words), (scales, biases)) in pairs.zip(parts) {
                match encoder {
                    Encoder::Mlx => encode_affine(row, bits, group_size, words, scales, biases),
                    Encoder::Afq => encode_afq(row, bits, group_size, words, scales, biases),
                }
            }
            Scales::Floats(stored)
        }
        _ => {
            let mut stored = vec![0u8; count * groups];
            for ((row, words), scales) in pairs.zip(stored.chunks_exact_mut(groups)) {
                match format {
                    QuantFormat::Nvfp4 => encode_nvfp4(row, None, words, scales),
                    _ => encode_mx(row, format, words, scales),
                }
            }
            Scales::Bytes(stored)
        }
    };
    Ok(Encoded { words, scales })
}

/// Searches codes and scales of a smaller error.
fn improve<T: Real>(rounded: &[T], k: usize, format: QuantFormat, encoded: &mut Encoded<T>) -> Result<()> {
    let (words_per_row, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
    let pairs = rounded.chunks_exact(k).zip(encoded.words.chunks_exact_mut(words_per_row));
    match (&mut encoded.scales, format) {
        (Scales::Floats([scales, biases]), QuantFormat::Affine { bits, group_size }) => {
            let parts = scales.chunks_exact_mut(groups).zip(biases.chunks_exact_mut(groups));
            for ((row, words), (scales, biases)) in pairs.zip(parts) {
                search_affine(row, bits, group_size, words, scales, biases);
            }
        }
        (Scales::Bytes(scales), _) => {
            for ((row, words), scales) in pairs.zip(scales.chunks_exact_mut(groups)) {
                search_scales(row, format, words, scales);
            }
        }
        (Scales::Floats(_), _) => {}
    }
    Ok(())
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
