//! HQQ: `W_q` with codes, `scale` and `zero` of groups, `w = (q - zero) * scale` with zeros that are floats, and settings of the
//! module as tensors: `shape`, `axis`, `group_size`, `packing`.
//!
//! As hqq 0.2.8 packs it (`core/quantize.py`, `core/bitpack.py`): the weight is reshaped to `[groups, group]` (axis 1) or
//! `[group, groups]` (axis 0), and codes of its rows that are far apart share a byte or word: as many parts of the flattened
//! weight as codes have room, the first in the highest bits. Groups of axis 1 lie along K and are affine here, with
//! `-(zero * scale)` for their bias; those of axis 0 run across rows, and are dequantized.

use super::groups::Groups;
use super::module::{scale_dtypes, Module};
use crate::checkpoint::file::{candle_dtype, StoredTensor, Warnings};
use crate::checkpoint::weight::{
    tensor_of, DenseTensor, Dequantize, Layout, MlxForm, PackedWeight, Slice, SliceInMemory, Weight,
};
use crate::format::{pack, Scale};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
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
/// Codes of 3 bits in a word.
const IN_WORD: usize = 10;
const MOST_NAME: usize = 16;

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
    warnings.once(
        "hqq of other groups".into(),
        format!(
            "{}: nothing computes in groups of HQQ that run across rows (axis 0), or of no whole 32 elements: such weights \
             (`{}`) are dequantized while loading",
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
        let bytes = match bits {
            3 => Some(rows.div_ceil(IN_WORD).saturating_mul(size_of::<u32>())),
            _ => (rows * bits % 8 == 0).then_some(rows * bits / 8),
        };
        let bytes = bytes.map(|bytes| bytes.saturating_mul(columns));
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

    /// The codes of all elements, in their order.
    fn codes(&self) -> Result<Vec<u8>> {
        let elements = self.n * self.k;
        let mut codes = Vec::with_capacity(elements);
        if self.bits == 3 {
            let words = self.stored.read::<u32>()?;
            for part in (0..IN_WORD).rev() {
                codes.extend(words.iter().map(|word| (word >> (3 * part)) as u8 & 7));
            }
        } else {
            let bytes = self.stored.read::<u8>()?;
            let mask = u8::MAX >> (8 - self.bits.min(8));
            for part in (0..8 / self.bits.max(1)).rev() {
                codes.extend(bytes.iter().map(|byte| byte >> (self.bits * part) & mask));
            }
        }
        // Rows are filled up to whole words.
        codes.truncate(elements);
        Ok(codes)
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
        let elements = (self.codes.n * self.codes.k) as u64;
        let dtype = candle_dtype(self.codes.scales.dtype()).unwrap_or(DType::F32);
        let wider = 4 - dtype.size_in_bytes() as u64;
        self.format.size_in_bytes(elements, dtype) + elements / self.format.group_size() as u64 * wider
    }

    /// Beside 16-bit scales biases are exact in F32, and so is what they are added to.
    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let Codes { n, k, .. } = self.codes;
        let of_rows = |part: &StoredTensor| -> Result<Tensor> {
            Ok(part.load(&Device::Cpu)?.reshape((n, self.groups.count(k)))?)
        };
        let (scales, zeros) = (of_rows(&self.codes.scales)?, of_rows(&self.codes.zeros)?);
        let biases = (zeros.to_dtype(DType::F32)? * scales.to_dtype(DType::F32)?)?.neg()?;
        let spread = |values: &Tensor| -> Result<Tensor> {
            Ok(self.groups.spread(values, self.format, k)?.to_device(device)?)
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

impl Dequantize for Codes {
    fn size_in_bytes(&self) -> usize {
        self.stored_bytes()
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
