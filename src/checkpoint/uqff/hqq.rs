//! HQQ: groups that run across rows.

use super::layer::{Layer, WeightAndWhy};
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{
    hqq_codes, CutInMemory, DenseTensor, Dequantize, IrregularLayout, IrregularWeight, RowClasses, Slice,
    StoredGroups, Weight,
};
use crate::tensor::LayerWeight;
use crate::{Error, QuantFormat, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::ops::Range;
use std::sync::Arc;

const WHY: &str = "so few rows share groups of HQQ that scales take as much memory as numbers";

pub(super) fn weight(layer: &Layer) -> Result<WeightAndWhy> {
    let dims = layer.shape(false)?;
    let floats = [Dtype::F32, Dtype::F16, Dtype::BF16];
    let scales = layer.part("weight.scales", &floats)?;
    let zeros = layer.part("weight.zeros", &floats)?;
    let bits = layer.u8("weight.bits")?;
    let axis = layer.u8("weight.axis")?;
    match (bits, axis) {
        (1..=4 | 8, 0) => {}
        (1..=4 | 8, 1) => {
            return Err(Error::Unsupported {
                what: format!(
                    "{}: `{}`: HQQ of {bits} bits along axis {axis}",
                    layer.file_of("weight").display(),
                    layer.weight_name()
                ),
                remedy: "quantize to hqq4 or hqq8 with mistral.rs, which groups along axis 0".into(),
            });
        }
        (_, 0 | 1) => return Err(layer.wrong("weight.bits", "1, 2, 3, 4 or 8", bits.to_string())),
        _ => return Err(layer.wrong("weight.axis", "0", axis.to_string())),
    }
    let dtype = if bits == 3 { Dtype::I32 } else { Dtype::U8 };
    let codes = layer.part("weight", &[dtype])?;
    let group_size = usize::try_from(layer.u32("weight.group_size")?).ok();
    let &[rows, groups] = codes.dims() else {
        let found = format!("{:?}", codes.dims());
        return Err(layer.wrong("weight", "codes of shape [bytes of a group, groups]", found));
    };
    let bytes = rows.saturating_mul(dtype.bitsize() / 8);
    let product = |a: Option<usize>, b: usize| a.and_then(|a| a.checked_mul(b));
    let elements = dims.iter().try_fold(1usize, |total, &dim| total.checked_mul(dim));
    if elements.is_none() || product(group_size, groups) != elements {
        return Err(layer.wrong(
            "weight.group_size",
            format!("as many elements in {groups} groups as in shape {dims:?}"),
            group_size.unwrap_or(usize::MAX).to_string(),
        ));
    }
    if group_size.and_then(|size| hqq_codes::bytes_of_rows(size, bits.into())) != Some(bytes) {
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
        bits: bits.into(),
        scales: scales.clone(),
        zeros: zeros.clone(),
    };
    if let (&[n, k], Some(group)) = (dims.as_slice(), group_size) {
        if let Some(classes) = RowClasses::of(n, k, bits.into(), group) {
            let weight = match groups.is_multiple_of(k) && matches!(bits, 4 | 8) {
                true => {
                    let stored = bytes * classes.count();
                    IrregularWeight::new(layer.key, dims, HqqRows { classes, stored, whole: source })
                }
                false => IrregularWeight::new(layer.key, dims, CutInMemory { classes, stored: source }),
            };
            return Ok((Weight::Irregular(weight), None));
        }
    }
    Ok((Weight::Dense(DenseTensor::dequantized(&layer.weight_name(), DType::F32, dims, source)), Some(WHY)))
}

/// Codes `[bytes of a group, groups]`: a column is a group. With two codes to a byte, the high ones of the whole
/// matrix are the first half of the flattened weight, the low ones the second; with more, there are as many parts.
#[derive(Clone, Debug)]
struct HqqGroups {
    dims: Vec<usize>,
    codes: StoredTensor,
    bits: usize,
    scales: StoredTensor,
    zeros: StoredTensor,
}

impl HqqGroups {
    fn stored_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes() + self.zeros.size_in_bytes()
    }

    /// The codes of all elements, in their order.
    fn all_codes(&self) -> Result<Vec<u8>> {
        hqq_codes::codes(&self.codes, self.bits, self.dims.iter().product())
    }
}

impl StoredGroups for HqqGroups {
    fn codes(&self) -> Result<Vec<u8>> {
        self.all_codes()
    }

    fn parameters(&self) -> [&StoredTensor; 2] {
        [&self.scales, &self.zeros]
    }

    fn stored_bytes(&self) -> usize {
        self.stored_bytes()
    }
}

impl Dequantize for HqqGroups {
    fn size_in_bytes(&self) -> usize {
        self.stored_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let (scales, zeros) = (floats(&self.scales)?, floats(&self.zeros)?);
        let codes = self.all_codes()?;
        let mut values = Vec::with_capacity(codes.len());
        for row in codes.chunks_exact(scales.len().max(1)) {
            let groups = row.iter().zip(&zeros).zip(&scales);
            values.extend(groups.map(|((code, zero), scale)| (f32::from(*code) - zero) * scale));
        }
        Ok(Tensor::from_vec(values, self.dims.as_slice(), device)?)
    }

    fn granularity(&self) -> usize {
        1
    }

    /// Codes of a row do not lie together.
    fn narrow(&self, _: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        Ok(None)
    }
}

fn floats(part: &StoredTensor) -> Result<Vec<f32>> {
    Ok(part.load(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
}

/// A weight whose groups are whole rows, side by side: rows fall into classes of one scale and zero for each column.
#[derive(Clone, Debug)]
struct HqqRows {
    classes: RowClasses,
    /// Rows of codes; with nibbles, the weight has as many more in the low ones.
    stored: usize,
    /// All rows, of the columns of the classes.
    whole: HqqGroups,
}

impl HqqRows {
    /// Rows of codes in the high nibbles, or bytes, that are wanted, and those in the low ones.
    fn wanted(&self) -> [Range<usize>; 2] {
        let (Range { start, end }, stored) = (self.classes.rows.clone(), self.stored);
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

impl IrregularLayout for HqqRows {
    fn format(&self) -> QuantFormat {
        self.classes.format
    }

    fn format_name(&self) -> String {
        self.classes.format_name()
    }

    fn size_in_bytes(&self) -> usize {
        let codes: usize = self.read().map(|rows| rows.len()).sum();
        codes * self.classes.columns.len()
            + self.whole.scales.size_in_bytes()
            + self.whole.zeros.size_in_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        self.classes.loaded_bytes(&self.whole.scales, &self.whole.zeros)
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let k = self.classes.columns.len();
        let read = |rows: Range<usize>| {
            let codes = self.whole.codes.narrow(&[self.stored, k], 0, &rows)?.read::<u8>()?;
            Ok((rows.start, codes))
        };
        let codes: Vec<_> = self.read().map(read).collect::<Result<_>>()?;
        let read = |row: usize, to: &mut [u8]| {
            let (row, shift) = match row.checked_sub(self.stored) {
                Some(row) => (row, 0),
                None => (row, if self.whole.bits == 4 { 4 } else { 0 }),
            };
            let at = |(first, codes): &(usize, Vec<u8>)| {
                let start = row.checked_sub(*first)?.checked_mul(k)?;
                codes.get(start..start + k).map(<[u8]>::to_vec)
            };
            let mask = if self.whole.bits == 4 { 15 } else { 255 };
            let bytes = codes.iter().find_map(at).unwrap_or_default();
            to.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte >> shift & mask);
        };
        let of_classes = |part: &StoredTensor| -> Result<Tensor> {
            Ok(part.load(&Device::Cpu)?.reshape((self.classes.count(), k))?)
        };
        let parameters = (of_classes(&self.whole.scales)?, of_classes(&self.whole.zeros)?);
        Ok(self.classes.load(read, parameters, device)?.into())
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        let classes = self.classes.narrow(slice);
        if !slice.along_k() {
            return Ok(Arc::new(Self { classes, ..self.clone() }));
        }
        let columns = |part: &StoredTensor, rows: usize| {
            let bytes = part.dtype().bitsize() / 8;
            let of_row = self.classes.columns.len() * bytes;
            part.narrow(&[rows, of_row], 1, &(slice.range.start * bytes..slice.range.end * bytes))
        };
        let whole = HqqGroups {
            codes: columns(&self.whole.codes, self.stored)?,
            scales: columns(&self.whole.scales, classes.count())?,
            zeros: columns(&self.whole.zeros, classes.count())?,
            ..self.whole.clone()
        };
        Ok(Arc::new(Self { classes, whole, ..self.clone() }))
    }
}
