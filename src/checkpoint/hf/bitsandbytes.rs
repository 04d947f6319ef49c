//! bitsandbytes: NF4 and FP4 in blocks, and 8-bit integers with a scale for each row.
//!
//! As bitsandbytes 0.50.2 saves its `Linear4bit` and `Linear8bitLt`. Of 4-bit weights the codes lie in a column of
//! bytes, the first of two in the high bits, and `weight.quant_state.bitsandbytes__nf4` (or `__fp4`) is JSON with shape
//! and block size. A block is so many elements of the flattened matrix, also across rows; `weight.absmax` has the
//! largest magnitude of each, as a float or as a code of `weight.nested_quant_map`, which is multiplied by that of
//! `weight.nested_absmax`, and to which an offset is added. Of 8-bit weights `SCB` has the largest magnitude of each
//! row: `w = code * SCB / 127`. Activations are not rounded, so that no outliers have to be set apart. What becomes of blocks that are
//! no whole groups in all rows says `flat_blocks.rs`.

use super::filled_rows::of_rows;
use super::flat_blocks::FlatBlocks;
use super::groups::Groups;
use super::integers::{Integers, Order};
use super::module::Module;
use crate::checkpoint::file::{StoredTensor, Warnings};
use crate::checkpoint::weight::{Layout, MlxForm, PackedWeight, Slice, StoredForm, StoredFourBits, Weight};
use crate::{format, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
use serde_json::Value;
use std::ops::Range;
use std::sync::Arc;

/// A type of 4-bit codes.
pub(super) struct Type {
    name: &'static str,
    /// The tensor that makes a weight of bytes one of this type.
    pub state: &'static str,
    format: QuantFormat,
    values: [f32; 16],
}

pub(super) const TYPES: [Type; 2] = [
    Type {
        name: "nf4",
        state: "weight.quant_state.bitsandbytes__nf4",
        format: QuantFormat::NF4,
        values: format::NF4,
    },
    Type {
        name: "fp4",
        state: "weight.quant_state.bitsandbytes__fp4",
        format: QuantFormat::FP4,
        values: format::FP4,
    },
];

/// The tensor that makes a weight of I8 a quantized one.
pub(super) const ROW_SCALES: &str = "SCB";

const CODES: &str = "weight";
const ABSMAX: &str = "weight.absmax";
const NESTED_ABSMAX: &str = "weight.nested_absmax";
const NESTED_MAP: &str = "weight.nested_quant_map";
const MAP: &str = "weight.quant_map";
const ROW_ORDER: &str = "weight_format";

/// What bitsandbytes multiplies by in place of dividing by 127.
const OF_127: f32 = 1. / 127.;

pub(super) fn weight(module: &Module, warnings: &Warnings) -> Result<Weight> {
    match TYPES.iter().find_map(|kind| Some((kind, module.get(kind.state)?))) {
        Some((kind, state)) => four_bits(module, kind, state, warnings),
        None => eight_bits(module),
    }
}

/// `weight` I8 `[N, K]` with `SCB` F32 `[N]`.
fn eight_bits(module: &Module) -> Result<Weight> {
    let codes = module.require(CODES, CODES, &[Dtype::I8])?;
    let scales = module.require(ROW_SCALES, CODES, &[Dtype::F32])?;
    let ([n], k) = module.rows(CODES, codes)? else {
        return Err(module.wrong(CODES, codes, "a shape [N, K]", format!("{:?}", codes.dims())));
    };
    module.check_dims(ROW_SCALES, scales, &[*n])?;
    if let Some(order) = module.get(ROW_ORDER) {
        let order = module.require(ROW_ORDER, ROW_ORDER, &[Dtype::U8]).map(|_| order)?;
        let found = order.read::<u8>()?;
        if found != [0] {
            return Err(module.wrong(ROW_ORDER, order, "0, for codes in rows", format!("{found:?}")));
        }
    }
    let (groups, group_size) = Groups::divide(k, 1).unwrap_or_else(|| of_rows(k));
    let format = QuantFormat::symmetric(8, group_size)?;
    let layout = Integers {
        format,
        n: *n,
        k,
        groups,
        codes: codes.clone(),
        order: Order::Signed,
        scales: scales.clone(),
        multiplier: Some(OF_127),
        zeros: None,
        narrow_biases: false,
    };
    layout.into_weight(module, None)
}

/// What the JSON of a 4-bit weight says.
struct State {
    n: usize,
    k: usize,
    block: usize,
    /// Block size and offset of magnitudes that are codes.
    nested: Option<(usize, f32)>,
}

impl State {
    fn read(module: &Module, kind: &Type, stored: &StoredTensor) -> Result<Self> {
        let name = kind.state;
        let wrong = |expected: &str, found: String| module.wrong(name, stored, expected, found);
        let bytes = module.require(name, name, &[Dtype::U8]).and_then(StoredTensor::read::<u8>)?;
        let state: Value =
            serde_json::from_slice(&bytes).map_err(|error| wrong("JSON", error.to_string()))?;
        let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok());
        let number = |key: &str| {
            let value = state.get(key).unwrap_or(&Value::Null);
            size(value)
                .filter(|size| *size > 0)
                .ok_or_else(|| wrong("positive whole numbers for sizes", format!("{key} {value}")))
        };
        let shape = state.get("shape").unwrap_or(&Value::Null);
        let sides = shape.as_array().map(|sides| sides.iter().map(size).collect::<Vec<_>>());
        let Some([Some(n), Some(k)]) = sides.as_deref() else {
            return Err(wrong("the shape [N, K] of a matrix", format!("shape {shape}")));
        };
        let quant_type = state.get("quant_type").unwrap_or(&Value::Null);
        if quant_type != kind.name {
            return Err(wrong(&format!("quant_type {}", kind.name), quant_type.to_string()));
        }
        let block = number("blocksize")?;
        let nested = match module.get(NESTED_ABSMAX) {
            None => None,
            Some(_) => {
                let offset = state.get("nested_offset").unwrap_or(&Value::Null);
                let number_of =
                    offset.as_f64().ok_or_else(|| wrong("a number for nested_offset", offset.to_string()))?;
                Some((number("nested_blocksize")?, number_of as f32))
            }
        };
        Ok(Self { n: *n, k: *k, block, nested })
    }
}

/// Codes in bytes, magnitudes of blocks of the flattened matrix.
fn four_bits(module: &Module, kind: &Type, state: &StoredTensor, warnings: &Warnings) -> Result<Weight> {
    let format = kind.format;
    let State { n, k, block, nested } = State::read(module, kind, state)?;
    let Some(elements) = n.checked_mul(k).filter(|elements| *elements > 0) else {
        let expected = "a matrix whose elements can be counted";
        return Err(module.wrong(kind.state, state, expected, format!("shape [{n}, {k}]")));
    };
    // The dtype is that of the storage, which may be any.
    let stored =
        module.get(CODES).ok_or_else(|| module.wrong(kind.state, state, "a weight beside it", "none"))?;
    let Some(codes) = stored.as_numbers(Dtype::U8, &[elements.div_ceil(2)]) else {
        let expected = format!("{} bytes for [{n}, {k}]", elements.div_ceil(2));
        return Err(module.wrong(CODES, stored, expected, format!("{} bytes", stored.size_in_bytes())));
    };
    let map = module.require(MAP, CODES, &[Dtype::F32])?;
    module.check_dims(MAP, map, &[kind.values.len()])?;
    let numbers = map.read::<f32>()?;
    let differs = |(number, value): &(&f32, &f32)| number.to_bits() != value.to_bits();
    if let Some((number, value)) = numbers.iter().zip(&kind.values).find(differs) {
        return Err(module.wrong(
            MAP,
            map,
            format!("the numbers of {}, {value}", kind.name),
            number.to_string(),
        ));
    }
    let blocks = elements.div_ceil(block);
    let nested = match nested {
        None => None,
        Some((size, offset)) => {
            let scales = module.require(NESTED_ABSMAX, CODES, &[Dtype::F32])?;
            module.check_dims(NESTED_ABSMAX, scales, &[blocks.div_ceil(size)])?;
            let values = module.require(NESTED_MAP, CODES, &[Dtype::F32])?;
            module.check_dims(NESTED_MAP, values, &[256])?;
            Some(Nested { scales: scales.clone(), size, before: 0, values: values.clone(), offset })
        }
    };
    let dtype = if nested.is_some() { Dtype::U8 } else { Dtype::F32 };
    let absmax = module.require(ABSMAX, CODES, &[dtype])?;
    module.check_dims(ABSMAX, absmax, &[blocks])?;
    let absmax = absmax.clone();
    let names = [CODES, ABSMAX, NESTED_ABSMAX, NESTED_MAP, MAP, kind.state];
    let stored = names.into_iter().filter_map(|name| Some((name, module.get(name)?.clone()))).collect();
    let (columns, size) = (0..k, block);
    let layout = Blocks { format, n, row: k, columns, codes, absmax, size, before: 0, nested, stored };
    let group_size = format.group_size();
    if !k.is_multiple_of(group_size) || !block.is_multiple_of(group_size) {
        return Ok(FlatBlocks::new(layout).into_weight(module, warnings));
    }
    Ok(Weight::Packed(PackedWeight::new(module.path, format, vec![n, k], layout)))
}

/// Codes and blocks of a flattened matrix.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    pub format: QuantFormat,
    pub n: usize,
    /// Elements of a whole row.
    pub row: usize,
    /// Those of each row that belong to the part.
    pub columns: Range<usize>,
    pub codes: StoredTensor,
    /// F32, or U8 if there is more to it.
    absmax: StoredTensor,
    /// Elements of a block.
    pub size: usize,
    /// Elements of the first block that lie before the first row.
    pub before: usize,
    nested: Option<Nested>,
    /// All tensors of the file, if this is no part of them.
    stored: Vec<(&'static str, StoredTensor)>,
}

/// What makes numbers of the codes of magnitudes.
#[derive(Clone, Debug)]
pub(super) struct Nested {
    scales: StoredTensor,
    /// Magnitudes that share a scale.
    size: usize,
    /// Magnitudes of the first scale that lie before the first.
    before: usize,
    values: StoredTensor,
    offset: f32,
}

impl Blocks {
    /// Bytes in the file.
    pub(super) fn stored_bytes(&self) -> usize {
        let nested = |nested: &Nested| nested.scales.size_in_bytes() + nested.values.size_in_bytes();
        self.codes.size_in_bytes() + self.absmax.size_in_bytes() + self.nested.as_ref().map_or(0, nested)
    }

    /// Some rows with these codes, and the magnitudes of the blocks that they touch.
    pub(super) fn of_rows(&self, rows: &Range<usize>, codes: StoredTensor) -> Result<Self> {
        let (start, end) = (self.before + rows.start * self.row, self.before + rows.end * self.row);
        let (blocks, before) = (start / self.size..end.div_ceil(self.size), start % self.size);
        let absmax = entries(&self.absmax, &blocks)?;
        let nested = self.nested.as_ref().map(|nested| nested.narrow(&blocks)).transpose()?;
        Ok(Self { n: rows.len(), codes, absmax, before, nested, stored: Vec::new(), ..self.clone() })
    }

    /// The magnitudes of all blocks, by bitsandbytes' arithmetic: a product and a sum, each rounded to f32.
    pub(super) fn magnitudes(&self) -> Result<Vec<f32>> {
        let Some(Nested { scales, size, before, values, offset }) = &self.nested else {
            return self.absmax.read();
        };
        let (codes, scales) = (self.absmax.read::<u8>()?, scales.read::<f32>()?);
        let values = values.read::<f32>()?;
        let magnitude = |(index, code): (usize, &u8)| {
            let scale = scales.get((before + index) / size)?;
            Some(values.get(usize::from(*code))? * scale + offset)
        };
        Ok(codes.iter().enumerate().map(|code| magnitude(code).unwrap_or(f32::NAN)).collect())
    }
}

impl Layout for Blocks {
    fn size_in_bytes(&self) -> usize {
        self.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        self.format.size_in_bytes((self.n * self.columns.len()) as u64, DType::F32)
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let (format, k) = (self.format, self.columns.len());
        let mut words = self.codes.read::<u32>()?;
        let other_half_first = |word: &mut u32| *word = (*word & 0x0f0f_0f0f) << 4 | *word >> 4 & 0x0f0f_0f0f;
        words.par_iter_mut().for_each(other_half_first);
        let codes = Tensor::from_vec(words, (self.n, format.words_per_row(k)?), device)?;
        let (magnitudes, groups) = (self.magnitudes()?, format.groups_per_row(k)?);
        let first = |row: usize| self.before + row * self.row + self.columns.start;
        let scale = |element: usize| magnitudes.get(element / self.size).copied().unwrap_or(f32::NAN);
        let of_row = |row| (0..groups).map(move |group| first(row) + group * format.group_size());
        let scales: Vec<f32> = (0..self.n).flat_map(of_row).map(scale).collect();
        QuantTensor::new(format, codes, Tensor::from_vec(scales, (self.n, groups), device)?, None, None)
    }

    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(MlxForm::Rearranged(DType::F32))
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        StoredFourBits::form(module, self.format, &self.stored).filter(|_| !self.stored.is_empty())
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    /// Rows take the magnitudes of their blocks along; a part of K needs those of all rows.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let codes = slice.of(&self.codes, 2, 1)?;
        if slice.along_k() {
            let columns = self.columns.start + slice.range.start..self.columns.start + slice.range.end;
            return Ok(Arc::new(Self { columns, codes, stored: Vec::new(), ..self.clone() }));
        }
        Ok(Arc::new(self.of_rows(&slice.range, codes)?))
    }
}

impl Nested {
    fn narrow(&self, magnitudes: &Range<usize>) -> Result<Self> {
        let (start, end) = (self.before + magnitudes.start, self.before + magnitudes.end);
        let scales = entries(&self.scales, &(start / self.size..end.div_ceil(self.size)))?;
        Ok(Self { scales, before: start % self.size, ..self.clone() })
    }
}

/// Some elements of a tensor of one dimension.
pub(super) fn entries(stored: &StoredTensor, range: &Range<usize>) -> Result<StoredTensor> {
    let size = stored.dtype().bitsize() / 8;
    stored.narrow(&[stored.size_in_bytes()], 0, &(range.start * size..range.end * size))
}
