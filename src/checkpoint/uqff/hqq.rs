//! HQQ: groups that run across rows, dequantized.

use super::layer::{Layer, WeightAndWhy};
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{DenseTensor, Dequantize, Slice, Weight};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::ops::Range;
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
    Ok((Weight::Dense(DenseTensor::dequantized(&layer.weight_name(), DType::F32, dims, source)), Some(WHY)))
}

/// Codes `[bytes of a group, groups]`: a column is a group. With two codes to a byte, the high ones of the whole
/// matrix are the first half of the flattened weight, the low ones the second.
#[derive(Clone, Debug)]
struct HqqGroups {
    dims: Vec<usize>,
    codes: StoredTensor,
    nibbles: bool,
    scales: StoredTensor,
    zeros: StoredTensor,
}

impl Dequantize for HqqGroups {
    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes() + self.zeros.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
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

    fn granularity(&self) -> usize {
        1
    }

    /// Groups run across rows, but codes of a row lie together if as many groups do.
    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        match (self.dims.as_slice(), self.codes.dims()) {
            (&[n, k], &[rows, groups]) if k > 0 && groups.is_multiple_of(k) => HqqRows {
                rows: 0..n,
                k,
                of_groups: groups / k,
                stored: rows.saturating_mul(groups / k),
                whole: self.clone(),
            }
            .narrow(slice),
            _ => Ok(None),
        }
    }
}

fn floats(part: &StoredTensor) -> Result<Vec<f32>> {
    Ok(part.load(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
}

/// Part of a weight whose groups are whole rows, side by side: row `i` has the scales of row `i + of_groups`.
#[derive(Clone, Debug)]
struct HqqRows {
    rows: Range<usize>,
    k: usize,
    /// Rows of scales.
    of_groups: usize,
    /// Rows of codes; with nibbles, the weight has as many more in the low ones.
    stored: usize,
    /// All rows, of these columns.
    whole: HqqGroups,
}

impl HqqRows {
    /// Rows of codes in the high nibbles, or bytes, that are wanted, and those in the low ones.
    fn wanted(&self) -> [Range<usize>; 2] {
        let (Range { start, end }, stored) = (self.rows.clone(), self.stored);
        [start.min(stored)..end.min(stored), start.saturating_sub(stored)..end.saturating_sub(stored)]
    }

    /// Ranges of rows of codes that have all that is wanted, none twice.
    fn read(&self) -> impl Iterator<Item = Range<usize>> {
        let [high, low] = self.wanted();
        let ranges = match !high.is_empty() && !low.is_empty() && high.start <= low.end {
            true => [high.start.min(low.start)..high.end.max(low.end), 0..0],
            false => [high, low],
        };
        ranges.into_iter().filter(|rows| !rows.is_empty())
    }
}

impl Dequantize for HqqRows {
    fn size_in_bytes(&self) -> usize {
        let codes: usize = self.read().map(|rows| rows.len()).sum();
        codes * self.k + self.whole.scales.size_in_bytes() + self.whole.zeros.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let (scales, zeros) = (floats(&self.whole.scales)?, floats(&self.whole.zeros)?);
        let read = |rows: Range<usize>| {
            let codes = self.whole.codes.narrow(&[self.stored, self.k], 0, &rows)?.read::<u8>()?;
            Ok((rows.start, codes))
        };
        let codes: Vec<_> = self.read().map(read).collect::<Result<_>>()?;
        let (shifts, mask) = if self.whole.nibbles { ([4, 0], 15) } else { ([0, 0], 255) };
        let mut values = Vec::with_capacity(self.rows.len() * self.k);
        let row_of = |values: &[f32], row: usize| {
            let start = row % self.of_groups.max(1) * self.k;
            values.get(start..start + self.k).unwrap_or_default().to_vec()
        };
        for (shift, wanted) in shifts.into_iter().zip(self.wanted()) {
            for row in wanted {
                let at = |(first, codes): &(usize, Vec<u8>)| {
                    let start = row.checked_sub(*first)?.checked_mul(self.k)?;
                    codes.get(start..start + self.k).map(<[u8]>::to_vec)
                };
                let groups = row_of(&zeros, row).into_iter().zip(row_of(&scales, row));
                let bytes = codes.iter().find_map(at).unwrap_or_default().into_iter().zip(groups);
                values.extend(
                    bytes.map(|(byte, (zero, scale))| (f32::from(byte >> shift & mask) - zero) * scale),
                );
            }
        }
        Ok(Tensor::from_vec(values, (self.rows.len(), self.k), device)?)
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        if !slice.along_k() {
            let rows = self.rows.start + slice.range.start..self.rows.start + slice.range.end;
            return Ok(Some(Arc::new(Self { rows, ..self.clone() })));
        }
        let columns = |part: &StoredTensor, rows: usize| {
            let bytes = part.dtype().bitsize() / 8;
            part.narrow(&[rows, self.k * bytes], 1, &(slice.range.start * bytes..slice.range.end * bytes))
        };
        let whole = HqqGroups {
            codes: columns(&self.whole.codes, self.stored)?,
            scales: columns(&self.whole.scales, self.of_groups)?,
            zeros: columns(&self.whole.zeros, self.of_groups)?,
            ..self.whole.clone()
        };
        Ok(Some(Arc::new(Self { k: slice.range.len(), whole, ..self.clone() })))
    }
}
