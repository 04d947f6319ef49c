//! HQQ: `W_q` with codes, `scale` and `zero` of groups, `w = (q - zero) * scale` with zeros that are floats, and settings of the
//! module as tensors: `shape`, `axis`, `group_size`, `packing`.
//!
//! As hqq 0.2.8 packs it (`core/quantize.py`, `core/bitpack.py`): the weight is reshaped to `[groups, group]` (axis 1) or
//! `[group, groups]` (axis 0), and codes of its rows that are far apart share a byte or word: as many parts of the flattened
//! weight as codes have room, the first in the highest bits. Groups of axis 1 lie along K and are affine here, with
//! `-(zero * scale)` for their bias; those of axis 0 run across rows, which fall into classes that share scales and zeros of columns.

use super::groups::Groups;
use super::module::{scale_dtypes, Module};
use crate::checkpoint::file::{candle_dtype, StoredTensor, Warnings};
use crate::checkpoint::weight::{
    filled_columns, filled_group_size, hqq_codes, tensor_of, CutInMemory, DenseTensor, Dequantize, Filled,
    IrregularLayout, IrregularWeight, Layout, MlxForm, PackedWeight, RowClasses, Slice, SliceInMemory,
    StoredForm, StoredGroups, StoredHqq, Weight,
};
use crate::format::{pack, Scale};
use crate::tensor::{reordered_name, LayerWeight, ReorderedTensor};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
use std::ops::Range;
use std::sync::Arc;

pub(super) const CODES: &str = "W_q";
/// What stands beside the codes.
pub(super) const PARTS: [&str; 18] = [
    "scale",
    "zero",
    "shape",
    "axis",
    "group_size",
    "packing",
    "nbits",
    "view_as_float",
    "unpack_view_dtype",
    "compute_dtype",
    "quant_scale",
    "quant_zero",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
];
const MOST_NAME: usize = 16;
/// Bits of a scale and a bias, for each element of a group of 32.
const PARAMETER_BITS: usize = 2;

pub(super) fn weight(module: &Module, warnings: &Warnings) -> Result<Weight> {
    let codes = Codes::of(module)?;
    let dims = vec![codes.n, codes.k];
    let along_k = codes.along_k && codes.k.is_multiple_of(codes.group);
    let divided = Groups::divide(codes.k, codes.k / codes.group.max(1)).filter(|_| along_k);
    if let Some((groups, size)) = divided {
        let format = QuantFormat::affine(codes.bits, size)?;
        let layout = Packed { format, groups, codes };
        return Ok(Weight::Packed(PackedWeight::new(module.path, format, dims, layout)));
    }
    if along_k {
        if let Some(filled) = FilledGroups::of(codes.clone())? {
            return Ok(Weight::Irregular(IrregularWeight::new(module.path, dims, filled)));
        }
    }
    let classes = RowClasses::of(codes.n, codes.k, codes.bits, codes.group).filter(|_| !codes.along_k);
    if let Some(classes) = classes {
        let layout = CutInMemory { classes, stored: codes };
        return Ok(Weight::Irregular(IrregularWeight::new(module.path, dims, layout)));
    }
    warnings.once(
        "hqq of other groups".into(),
        format!(
            "{}: nothing computes in groups of HQQ that do not fit rows, or whose scales take as much memory as numbers: such weights (`{}`) are dequantized while loading",
            codes.stored.path().display(),
            module.path
        ),
    );
    let name = tensor_of(module.path, "weight");
    Ok(Weight::Dense(DenseTensor::dequantized(&name, DType::F32, dims, codes)))
}

/// A weight as it lies in the file.
#[derive(Clone, Debug)]
struct Codes {
    n: usize,
    k: usize,
    bits: usize,
    group: usize,
    groups: usize,
    /// Whether elements of a group follow each other.
    along_k: bool,
    stored: StoredTensor,
    scales: StoredTensor,
    zeros: StoredTensor,
}

impl Codes {
    fn of(module: &Module) -> Result<Self> {
        // Viewed as floats they are bytes all the same.
        let stored =
            module.require(CODES, CODES, &[Dtype::U8, Dtype::I32, Dtype::F16, Dtype::BF16, Dtype::F32])?;
        let [n, k, elements] = shape(module)?;
        let along_k = match number(module, "axis")? {
            (0, _) => false,
            (1, _) => true,
            (axis, tensor) => return Err(module.wrong("axis", tensor, "0 or 1", axis.to_string())),
        };
        let bits = bits(module)?;
        let (size, tensor) = number(module, "group_size")?;
        let group = usize::try_from(size).ok().filter(|size| *size > 0 && elements.is_multiple_of(*size));
        let Some(group) = group else {
            let expected = format!("whole groups of [{n}, {k}]");
            return Err(module.wrong("group_size", tensor, expected, format!("groups of {size}")));
        };
        let groups = elements / group;
        let (rows, columns) = if along_k { (groups, group) } else { (group, groups) };
        let bytes = hqq_codes::bytes_of_rows(rows, bits).map(|bytes| bytes.saturating_mul(columns));
        if bytes != Some(stored.size_in_bytes()) {
            let bytes = bytes.map_or("whole".to_owned(), |bytes| bytes.to_string());
            let expected = format!("{bytes} bytes, {bits}-bit codes of [{n}, {k}] in groups of {group}");
            return Err(module.wrong(CODES, stored, expected, format!("{} bytes", stored.size_in_bytes())));
        }
        let of_groups = |part: &str| -> Result<StoredTensor> {
            let tensor = module.require(part, CODES, scale_dtypes(Scale::Float))?;
            let dims = if along_k { [groups, 1] } else { [1, groups] };
            module.check_dims(part, tensor, &dims)?;
            Ok(tensor.clone())
        };
        let (scales, zeros) = (of_groups("scale")?, of_groups("zero")?);
        Ok(Self { n, k, bits, group, groups, along_k, stored: stored.clone(), scales, zeros })
    }

    fn stored_bytes(&self) -> usize {
        self.stored.size_in_bytes() + self.scales.size_in_bytes() + self.zeros.size_in_bytes()
    }

    /// Bytes of so many elements in a format, with biases in F32.
    fn loaded_bytes(&self, format: QuantFormat, elements: usize) -> u64 {
        let dtype = candle_dtype(self.scales.dtype()).unwrap_or(DType::F32);
        let wider = 4 - dtype.size_in_bytes();
        format.size_in_bytes(elements as u64, dtype) + (elements / format.group_size() * wider) as u64
    }

    /// Beside 16-bit scales biases are exact in F32, and so is what they are added to.
    fn scales_and_biases(&self) -> Result<(Tensor, Tensor)> {
        let (scales, zeros) = (self.scales.load(&Device::Cpu)?, self.zeros.load(&Device::Cpu)?);
        let biases = (zeros.to_dtype(DType::F32)? * scales.to_dtype(DType::F32)?)?.neg()?;
        Ok((scales, biases))
    }

    fn codes(&self) -> Result<Vec<u8>> {
        hqq_codes::codes(&self.stored, self.bits, self.n * self.k)
    }

    /// What lies in the file where groups run across rows.
    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        let parameters = [&self.scales, &self.zeros];
        let form = || StoredHqq::form(module, (self.bits, self.group), &self.stored, parameters);
        if self.along_k {
            None
        } else {
            form()
        }
    }
}

/// N, K, and how many elements that are, of which the bits can be counted.
fn shape(module: &Module) -> Result<[usize; 3]> {
    let tensor = module.require("shape", CODES, &[Dtype::I64])?;
    module.check_dims("shape", tensor, &[2])?;
    let sizes = tensor.read::<i64>()?;
    let size =
        |index: usize| sizes.get(index).and_then(|size| usize::try_from(*size).ok()).filter(|size| *size > 0);
    let elements = |n: usize, k: usize| n.checked_mul(k).filter(|elements| *elements <= usize::MAX / 8);
    let found = size(0).zip(size(1)).and_then(|(n, k)| Some([n, k, elements(n, k)?]));
    found.ok_or_else(|| module.wrong("shape", tensor, "the shape [N, K] of a matrix", format!("{sizes:?}")))
}

fn number<'a>(module: &Module<'a>, part: &str) -> Result<(i32, &'a StoredTensor)> {
    let tensor = module.require(part, CODES, &[Dtype::I32])?;
    match tensor.read::<i32>()?.as_slice() {
        [number] => Ok((*number, tensor)),
        numbers => Err(module.wrong(part, tensor, "one number", format!("{} numbers", numbers.len()))),
    }
}

/// The width of codes. Those of 5 and 6 bits are stored with 8.
fn bits(module: &Module) -> Result<usize> {
    let tensor = module.require("packing", CODES, &[Dtype::U8])?;
    let name = match tensor.size_in_bytes() <= MOST_NAME {
        true => tensor.read::<u8>()?,
        false => Vec::new(),
    };
    match name.as_slice() {
        b"8bit_u8" => Ok(8),
        b"4bit_u8" => Ok(4),
        b"3bit_32" => Ok(3),
        b"2bit_u8" => Ok(2),
        b"1bit_u8" => Ok(1),
        other => {
            let expected = "8bit_u8, 4bit_u8, 3bit_32, 2bit_u8 or 1bit_u8";
            let found = format!("{:?}", String::from_utf8_lossy(other));
            Err(module.wrong("packing", tensor, expected, found))
        }
    }
}

/// Groups along K.
#[derive(Clone, Debug)]
struct Packed {
    format: QuantFormat,
    groups: Groups,
    codes: Codes,
}

impl Layout for Packed {
    fn size_in_bytes(&self) -> usize {
        self.codes.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        self.codes.loaded_bytes(self.format, self.codes.n * self.codes.k)
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let Codes { n, k, .. } = self.codes;
        let (scales, biases) = self.codes.scales_and_biases()?;
        let spread = |values: &Tensor| -> Result<Tensor> {
            let of_rows = values.reshape((n, self.groups.count(k)))?;
            Ok(self.groups.spread(&of_rows, self.format, k)?.to_device(device)?)
        };
        let row = self.format.words_per_row(k)?;
        let (codes, mut words) = (self.codes.codes()?, vec![0; n * row]);
        let rows = words.par_chunks_exact_mut(row.max(1)).zip(codes.par_chunks_exact(k.max(1)));
        rows.for_each(|(words, codes)| pack(codes, self.format.bits(), words));
        let words = Tensor::from_vec(words, (n, row), device)?;
        QuantTensor::new(self.format, words, spread(&scales)?, Some(spread(&biases)?), None)
    }

    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(MlxForm::ROUNDED)
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    /// Rows that are far apart share bytes.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let whole: Arc<dyn Layout> = Arc::new(self.clone());
        let (dims, dim, range) = (slice.dims.to_vec(), slice.dim, slice.range.clone());
        Ok(Arc::new(SliceInMemory { whole, dims, dim, range }))
    }
}

/// Groups along K of which each is filled up to whole groups of the format.
#[derive(Clone, Debug)]
struct FilledGroups {
    format: QuantFormat,
    codes: Codes,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl FilledGroups {
    /// None if numbers took less memory.
    fn of(codes: Codes) -> Result<Option<Self>> {
        let Codes { n, k, bits, group, .. } = codes;
        let filled = filled_columns(k, group, 0, 32).saturating_mul(bits + PARAMETER_BITS);
        if filled > k.saturating_mul(8 * size_of::<f32>()) {
            return Ok(None);
        }
        Self { format: QuantFormat::affine(bits, 32)?, codes, rows: 0..n, columns: 0..k }
            .with_format()
            .map(Some)
    }

    fn with_format(self) -> Result<Self> {
        let Range { start, end } = self.columns;
        let size = filled_group_size(end - start, self.codes.group, start % self.codes.group.max(1));
        Ok(Self { format: QuantFormat::affine(self.codes.bits, size)?, ..self })
    }

    fn filled(&self) -> Filled {
        let before = self.columns.start % self.codes.group.max(1);
        Filled::new(self.columns.len(), self.codes.group, before, self.format.group_size())
    }
}

impl IrregularLayout for FilledGroups {
    fn format(&self) -> QuantFormat {
        self.format
    }

    fn format_name(&self) -> String {
        reordered_name(self.format, true)
    }

    fn size_in_bytes(&self) -> usize {
        self.codes.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let columns = self.filled().columns.len();
        let order = (columns + self.columns.len()) * size_of::<u32>();
        self.codes.loaded_bytes(self.format, self.rows.len() * columns) + order as u64
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let (filled, k) = (self.filled(), self.codes.k);
        let of_row = k / self.codes.group.max(1);
        let first = self.columns.start / self.codes.group.max(1);
        let (rows, groups) = (self.rows.len(), filled.runs.len());
        let runs =
            self.rows.clone().flat_map(|row| filled.runs.iter().map(move |run| row * of_row + first + run));
        let index = Tensor::from_vec(runs.map(|group| group as i64).collect(), rows * groups, &Device::Cpu)?;
        let spread = |values: &Tensor| -> Result<Tensor> {
            Ok(values.flatten_all()?.index_select(&index, 0)?.reshape((rows, groups))?.to_device(device)?)
        };
        let (scales, biases) = self.codes.scales_and_biases()?;
        let codes = self.codes.codes()?;
        let of_rows = codes.get(self.rows.start * k..self.rows.end * k).unwrap_or_default();
        let words = filled.words(of_rows, k, &self.columns, self.format.bits());
        let words =
            Tensor::from_vec(words, (rows, self.format.words_per_row(filled.columns.len())?), device)?;
        let weight = QuantTensor::new(self.format, words, spread(&scales)?, Some(spread(&biases)?), None)?;
        Ok(ReorderedTensor::new(weight, &filled.columns, self.columns.len())?.into())
    }

    fn granularity(&self) -> usize {
        1
    }

    /// Rows that are far apart share bytes: all is read.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        let (rows, columns) = slice.within(&self.rows, &self.columns);
        Ok(Arc::new(Self { rows, columns, ..self.clone() }.with_format()?))
    }
}

impl StoredGroups for Codes {
    fn codes(&self) -> Result<Vec<u8>> {
        self.codes()
    }

    fn parameters(&self) -> [&StoredTensor; 2] {
        [&self.scales, &self.zeros]
    }

    fn stored_bytes(&self) -> usize {
        self.stored_bytes()
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        self.stored_form(module)
    }
}

impl Dequantize for Codes {
    fn size_in_bytes(&self) -> usize {
        self.stored_bytes()
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        self.stored_form(module)
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let floats = |part: &StoredTensor| -> Result<Vec<f32>> {
            Ok(part.load(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
        };
        let (scales, zeros) = (floats(&self.scales)?, floats(&self.zeros)?);
        let parameters: Vec<_> = scales.into_iter().zip(zeros).collect();
        // Rounded once, as the same numbers are where they are affine.
        let number = |code: &u8, (scale, zero): &(f32, f32)| {
            ((f64::from(*code) - f64::from(*zero)) * f64::from(*scale)) as f32
        };
        let codes = self.codes()?;
        let mut numbers = Vec::with_capacity(codes.len());
        match self.along_k {
            true => codes.chunks(self.group.max(1)).zip(&parameters).for_each(|(codes, of_group)| {
                numbers.extend(codes.iter().map(|code| number(code, of_group)));
            }),
            false => codes.chunks(self.groups.max(1)).for_each(|codes| {
                numbers.extend(codes.iter().zip(&parameters).map(|(code, of_group)| number(code, of_group)));
            }),
        }
        Ok(Tensor::from_vec(numbers, (self.n, self.k), device)?)
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, _: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        Ok(None)
    }
}
