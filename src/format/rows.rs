//! Rows of packed codes with the scales of their groups: quantized, improved and dequantized, for every format.
//!
//! These functions are the readable scalar reference: every other implementation in the crate is tested against them.

use super::bits::unpack;
use super::clip_search::Row;
use super::numeric::Real;
use super::{QuantFormat, ZeroPoint};
use crate::{Error, Result};

/// Whose arithmetic chooses codes, scales and biases. Only affine formats know more than MLX's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quantizer {
    /// `mx.quantize` of mlx 0.32.4 on a CPU.
    #[default]
    Mlx,
    /// AFQ of mistral.rs on a CPU.
    Afq,
    /// The middle one of the codes is zero, as in symmetric integers of compressed-tensors: biases are `-(2^(bits - 1) * scale)`.
    Midpoint,
}

/// Scales of groups, as a format stores them.
#[derive(Clone, Debug, PartialEq)]
pub enum GroupScales<T> {
    /// Of [`Scale::Float`](super::Scale::Float); `biases` is empty where the format has none.
    Float {
        /// One for each group.
        scales: Vec<T>,
        /// As many, or none.
        biases: Vec<T>,
    },
    /// Of [`Scale::E8m0`](super::Scale::E8m0) and [`Scale::E4m3`](super::Scale::E4m3), one byte for each group.
    Bytes(Vec<u8>),
}

/// Rows of a quantized weight.
///
/// ```
/// use candle_quant::format::{QuantizedRows, Quantizer};
/// use candle_quant::QuantFormat;
///
/// let format = QuantFormat::affine(4, 32)?;
/// let weights: Vec<f32> = (0..32).map(|i| i as f32 / 2.0).collect();
/// let rows = QuantizedRows::quantize(format, Quantizer::Mlx, &weights, 32, None)?;
/// let row = rows.dequantize(format, 32, 1.0)?;
/// assert_eq!((row[0], row[31]), (0.0, 15.5));
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedRows<T> {
    /// Packed codes, `K * bits / 32` words for each row.
    pub words: Vec<u32>,
    /// Scales, `K / group_size` for each row.
    pub scales: GroupScales<T>,
}

/// One row of [`QuantizedRows`].
pub(crate) struct RowMut<'a, T> {
    pub(super) words: &'a mut [u32],
    pub(super) scales: GroupScalesMut<'a, T>,
}

pub(super) enum GroupScalesMut<'a, T> {
    Float { scales: &'a mut [T], biases: &'a mut [T] },
    Bytes(&'a mut [u8]),
}

impl<T: Real> QuantizedRows<T> {
    /// So many rows of K elements, all zero.
    ///
    /// # Errors
    /// If `k` is not a positive multiple of the group size.
    pub(crate) fn zeros(format: QuantFormat, rows: usize, k: usize) -> Result<Self> {
        let (words, groups) = (rows * format.words_per_row(k)?, rows * format.groups_per_row(k)?);
        let biases = if format.has_biases() { groups } else { 0 };
        let zeros = |count| vec![T::from_f32(0.); count];
        let scales = match format.scale().is_byte() {
            true => GroupScales::Bytes(vec![0; groups]),
            false => GroupScales::Float { scales: zeros(groups), biases: zeros(biases) },
        };
        Ok(Self { words: vec![0; words], scales })
    }

    /// Quantizes rows of K finite weights, by one thread.
    ///
    /// `absmax` is MLX's global scale of an NVFP4 tensor, its largest magnitude.
    ///
    /// # Errors
    /// If `k` is not a positive multiple of the group size, `weights` are no whole rows, or nothing quantizes to the
    /// format.
    pub fn quantize(
        format: QuantFormat,
        quantizer: Quantizer,
        weights: &[T],
        k: usize,
        absmax: Option<f32>,
    ) -> Result<Self> {
        let mut rows = Self::zeros(format, weights.len() / k.max(1), k)?;
        if !weights.len().is_multiple_of(k) {
            let found = format!("{} weights", weights.len());
            return Err(Error::mismatch("weights to quantize", format!("rows of {k}"), found));
        }
        rows.rows_mut(format, k)?
            .into_iter()
            .zip(weights.chunks_exact(k))
            .try_for_each(|(row, weights)| row.quantize(format, quantizer, weights, absmax))?;
        Ok(rows)
    }

    /// Improves quantized rows by clip search: `weights` are what they were quantized from, without a global scale.
    ///
    /// # Errors
    /// If `k` is not a positive multiple of the group size, these are no rows of it, `weights` are no such rows, or nothing
    /// quantizes to the format.
    pub fn improve(&mut self, format: QuantFormat, weights: &[T], k: usize) -> Result<()> {
        self.improve_by(format, weights, k, None)
    }

    /// As [`QuantizedRows::improve`], where the squared error in each of the K columns counts as often as `columns` says,
    /// none less than zero: with the mean squares of what a layer is given, that is about the error of its outputs.
    ///
    /// # Errors
    /// As those of [`QuantizedRows::improve`]; if `columns` are not K numbers, finite and not below zero.
    pub fn improve_weighted(
        &mut self,
        format: QuantFormat,
        weights: &[T],
        k: usize,
        columns: &[f32],
    ) -> Result<()> {
        let wrong = columns.iter().find(|column| !(column.is_finite() && **column >= 0.));
        if columns.len() != k || wrong.is_some() {
            let found =
                wrong.map_or_else(|| columns.len().to_string(), |wrong| format!("{wrong} among them"));
            let expected = format!("{k} numbers, finite and not below zero");
            return Err(Error::mismatch("how much columns count", expected, found));
        }
        self.improve_by(format, weights, k, Some(columns))
    }

    fn improve_by(
        &mut self,
        format: QuantFormat,
        weights: &[T],
        k: usize,
        columns: Option<&[f32]>,
    ) -> Result<()> {
        let rows = self.rows(format, k)?;
        if weights.len() != rows * k {
            let found = format!("{} weights", weights.len());
            return Err(Error::mismatch("weights of quantized rows", format!("{rows} rows of {k}"), found));
        }
        for (row, weights) in self.rows_mut(format, k)?.into_iter().zip(weights.chunks_exact(k)) {
            row.improve(format, Row { weights, columns })?;
        }
        Ok(())
    }

    /// All elements, `[rows, K]`; scales that are bytes are multiplied by `global_scale`, which is 1 where there is none.
    /// See [`dequantize_row`].
    ///
    /// # Errors
    /// If `k` is not a positive multiple of the group size, or these are no rows of it.
    pub fn dequantize(&self, format: QuantFormat, k: usize, global_scale: f32) -> Result<Vec<f32>> {
        let rows = self.rows(format, k)?;
        let (words, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
        let wide = |numbers: &[T]| numbers.iter().map(|number| number.to_f32()).collect::<Vec<_>>();
        let (scales, biases) = match &self.scales {
            GroupScales::Float { scales, biases } => (wide(scales), wide(biases)),
            GroupScales::Bytes(bytes) => {
                let value = |byte: &u8| format.scale().value(*byte) * global_scale;
                (bytes.iter().map(value).collect(), Vec::new())
            }
        };
        let mut all = vec![0.; rows * k];
        let rows = all.chunks_exact_mut(k).zip(self.words.chunks_exact(words)).enumerate();
        for (index, (row, words)) in rows {
            let of_row = index * groups..(index + 1) * groups;
            let scales = scales.get(of_row.clone()).unwrap_or_default();
            dequantize_row(format, words, scales, biases.get(of_row).unwrap_or_default(), row);
        }
        Ok(all)
    }

    /// How many rows of K elements these are.
    fn rows(&self, format: QuantFormat, k: usize) -> Result<usize> {
        let (words, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
        let rows = self.words.len() / words;
        let (bytes, scales, biases) = match &self.scales {
            GroupScales::Float { scales, biases } => (false, scales.len(), biases.len()),
            GroupScales::Bytes(scales) => (true, scales.len(), 0),
        };
        let of_biases = if format.has_biases() { rows * groups } else { 0 };
        if bytes != format.scale().is_byte()
            || (self.words.len(), scales, biases) != (rows * words, rows * groups, of_biases)
        {
            return Err(Error::mismatch(
                "quantized rows",
                format!("rows of {k} as {format}: {words} words, {groups} scales each"),
                format!("{} words, {scales} scales, {biases} biases", self.words.len()),
            ));
        }
        Ok(rows)
    }

    /// The rows, each by itself, so that several threads can share the work.
    ///
    /// # Errors
    /// If `k` is not a positive multiple of the group size.
    pub(crate) fn rows_mut(&mut self, format: QuantFormat, k: usize) -> Result<Vec<RowMut<'_, T>>> {
        let groups = format.groups_per_row(k)?;
        let words = self.words.chunks_exact_mut(format.words_per_row(k)?);
        Ok(match &mut self.scales {
            GroupScales::Float { scales, biases } => {
                let mut biases = biases.chunks_exact_mut(groups);
                let scales = scales.chunks_exact_mut(groups).map(|scales| {
                    let biases = biases.next().unwrap_or_default();
                    GroupScalesMut::Float { scales, biases }
                });
                words.zip(scales).map(|(words, scales)| RowMut { words, scales }).collect()
            }
            GroupScales::Bytes(scales) => {
                let scales = scales.chunks_exact_mut(groups).map(GroupScalesMut::Bytes);
                words.zip(scales).map(|(words, scales)| RowMut { words, scales }).collect()
            }
        })
    }
}

/// Dequantizes one row.
///
/// `words` holds the packed row, `scales` and `biases` one f32 for each group (`biases` is empty for formats without),
/// `row` receives K numbers. A scale that is a byte comes multiplied by the global scale, if there is one.
///
/// All arithmetic is f32; `RN32` is rounding to nearest, ties to even. With biases the result is
/// `RN32(RN32(q * s) + b)`; with the midpoint as zero it is `RN32((q - midpoint) * s)`; without a zero point it is
/// `RN32(element * s)`, which is exact but for float scales and a global scale. Codes that stand for NaN, and elements
/// that the row has no codes or scales for, become NaN.
///
/// ```
/// use candle_quant::{format::dequantize_row, QuantFormat};
///
/// let mut row = [0f32; 32];
/// // 32 codes of 4 bits; the first two are 1 and 2.
/// dequantize_row(QuantFormat::affine(4, 32)?, &[0x21, 0, 0, 0], &[0.5], &[-1.0], &mut row);
/// assert_eq!(row[..3], [-0.5, 0.0, -1.0]);
/// # Ok::<(), candle_quant::Error>(())
/// ```
pub fn dequantize_row(format: QuantFormat, words: &[u32], scales: &[f32], biases: &[f32], row: &mut [f32]) {
    let (element, group_size) = (format.element(), format.group_size());
    let mut codes = vec![0; row.len()];
    let known = unpack(words, element.bits(), &mut codes);
    for (group, (values, codes)) in row.chunks_mut(group_size).zip(codes.chunks(group_size)).enumerate() {
        let of_group = |all: &[f32]| all.get(group).copied().unwrap_or(f32::NAN);
        let scale = of_group(scales);
        match format.zero_point() {
            ZeroPoint::Bias => {
                let bias = of_group(biases);
                element.map(codes, values, |value| value * scale + bias);
            }
            ZeroPoint::Midpoint => {
                // A fused sum of zero is +0, whatever the sign of the scale.
                let bias = -format.midpoint() * scale;
                element.map(codes, values, |value| value.mul_add(scale, bias));
            }
            ZeroPoint::None => element.map(codes, values, |value| value * scale),
        }
    }
    row.iter_mut().skip(known).for_each(|value| *value = f32::NAN);
}
