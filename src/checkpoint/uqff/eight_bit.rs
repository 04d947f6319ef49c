//! FP8 with one scale, and F8Q8: eight-bit codes that become MXFP8 and symmetric ones, bit for bit.

use super::layer::{Layer, WeightAndWhy};
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{
    DenseTensor, Dequantize, Filled, IrregularLayout, IrregularWeight, Layout, MlxForm, PackedWeight, Slice,
    StoredForm, StoredFp8, TiledFp8, Tiles, Weight,
};
use crate::format::Element;
use crate::tensor::{reordered_name, LayerWeight, ReorderedTensor};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::ops::Range;
use std::sync::Arc;

/// The number of F8_E4M3 in mistral.rs' table of dtypes.
const F8_E4M3: u32 = 9;

/// The E8M0 code of 1.
const ONE: u8 = 127;

/// Elements of an F8Q8 block, and its bytes: an E4M3 number and as many signed codes.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 1 + BLOCK;
const HALF: usize = BLOCK / 2;

/// What the number of an F8Q8 block is divided by: the largest E4M3 of the library that mistral.rs uses, not
/// the 448 of the format.
const F8Q8_MAX: f32 = 416.0;

const F8Q8_FORMAT: QuantFormat = QuantFormat::symmetric_opt(8, BLOCK).unwrap();

pub(super) fn fp8(layer: &Layer) -> Result<WeightAndWhy> {
    let codes = layer.part("weight", &[Dtype::F8_E4M3])?;
    layer.check_rank("weight", codes.dims(), false)?;
    // What it says is said by the dtype of the weight too.
    if layer.has("weight.dtype") {
        let dtype = layer.u32("weight.dtype")?;
        if dtype != F8_E4M3 {
            return Err(layer.wrong(
                "weight.dtype",
                format!("{F8_E4M3}, which is F8_E4M3"),
                dtype.to_string(),
            ));
        }
    }
    let suffix = "weight.dequant_w_scale";
    let scale = layer.f32(suffix)?;
    if !scale.is_finite() {
        return Err(layer.wrong(suffix, "a finite scale", scale.to_string()));
    }
    let scales = layer.part(suffix, &[Dtype::F32])?.clone();
    let dims = codes.dims().to_vec();
    let k = dims.last().copied().unwrap_or(0);
    if !scale.is_sign_negative() && k.is_multiple_of(QuantFormat::MXFP8.group_size()) {
        let layout = PerTensorFp8 { codes: codes.clone(), scale, scales };
        return Ok((Weight::Packed(PackedWeight::new(layer.key, QuantFormat::MXFP8, dims, layout)), None));
    }
    // MXFP8 has no negative scales, and its rows are whole groups: one tile of all has either.
    let &[n, _] = dims.as_slice() else { return Err(layer.wrong("weight", "a matrix", format!("{dims:?}"))) };
    let tiled = TiledFp8 { n, k, codes: codes.clone(), scales, tiles: Tiles::of(n, k, k) };
    let weight = tiled.into_weight(layer.key).ok_or_else(|| layer.wrong(suffix, "a float", "exponents"))?;
    let is_dense = matches!(weight, Weight::Dense(_));
    Ok((weight, is_dense.then_some("rows of FP8 with so few elements take less memory as numbers")))
}

pub(super) fn f8q8(layer: &Layer) -> Result<WeightAndWhy> {
    let blocks = layer.part("weight", &[Dtype::U8])?;
    let dims = layer.shape(false)?;
    let count = usize::try_from(layer.u32("weight.num_blocks")?).ok();
    let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    let needed = elements.map(|elements| elements.div_ceil(BLOCK));
    let shown = |count: Option<usize>| count.map_or("too many".into(), |count| count.to_string());
    if count.is_none() || count != needed {
        let expected = format!("{} blocks for {dims:?}", shown(needed));
        return Err(layer.wrong("weight.num_blocks", expected, shown(count)));
    }
    let size = count.and_then(|count| count.checked_mul(BLOCK_BYTES));
    if size != Some(blocks.size_in_bytes()) {
        let expected = format!("{} bytes for {} blocks", shown(size), shown(count));
        return Err(layer.wrong("weight", expected, blocks.size_in_bytes().to_string()));
    }
    let layout = F8q8Blocks { blocks: blocks.clone(), dims: dims.clone() };
    if dims.last().is_some_and(|k| k.is_multiple_of(BLOCK)) {
        return Ok((Weight::Packed(PackedWeight::new(layer.key, F8Q8_FORMAT, dims, layout)), None));
    }
    if let (&[n, k], true) = (dims.as_slice(), dims.last().is_some_and(|k| k.is_multiple_of(HALF))) {
        let layout = HalfBlocks { layout, k, rows: 0..n, columns: 0..k };
        return Ok((Weight::Irregular(IrregularWeight::new(layer.key, dims, layout)), None));
    }
    let dense = DenseTensor::dequantized(&layer.weight_name(), DType::F32, dims, layout);
    let why = "blocks of F8Q8 run across rows that are no multiple of 16 elements";
    Ok((Weight::Dense(dense), Some(why)))
}

/// E4M3 codes `[N, K]` and one scale for all.
#[derive(Debug)]
struct PerTensorFp8 {
    codes: StoredTensor,
    scale: f32,
    /// The same in the file.
    scales: StoredTensor,
}

impl Layout for PerTensorFp8 {
    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(MlxForm::Multiplied)
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        let &[n, k] = self.codes.dims() else { return None };
        StoredFp8::form(module, [n, k], &self.codes, &self.scales, [n, k])
    }

    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + size_of::<f32>()
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let format = QuantFormat::MXFP8;
        let &[n, k] = self.codes.dims() else {
            return Err(crate::Error::mismatch("FP8 weight", "[N, K]", format!("{:?}", self.codes.dims())));
        };
        let words = (n, format.words_per_row(k)?);
        let groups = (n, format.groups_per_row(k)?);
        QuantTensor::new(
            format,
            Tensor::from_vec(self.codes.read::<u32>()?, words, device)?,
            Tensor::full(ONE, groups, device)?,
            None,
            Some(Tensor::new(&[self.scale], device)?),
        )
    }

    fn granularity(&self) -> usize {
        QuantFormat::MXFP8.group_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let codes = slice.of(&self.codes, 1, 1)?;
        Ok(Arc::new(Self { codes, scale: self.scale, scales: self.scales.clone() }))
    }
}

/// E4M3 numbers of any shape.
#[derive(Debug)]
pub(super) struct E4m3Numbers {
    pub codes: StoredTensor,
}

impl Dequantize for E4m3Numbers {
    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let mut values = Vec::with_capacity(self.codes.size_in_bytes());
        self.codes.for_each_chunk(1, |codes| {
            values.extend(codes.iter().map(|&code| Element::E4m3.value(code)));
        })?;
        Ok(Tensor::from_vec(values, self.codes.dims(), device)?)
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        Ok(Some(Arc::new(Self { codes: slice.of(&self.codes, 1, 1)? })))
    }
}

/// F8Q8: blocks of 32 elements of the flattened weight, the last one filled up.
#[derive(Clone, Debug)]
struct F8q8Blocks {
    blocks: StoredTensor,
    dims: Vec<usize>,
}

impl F8q8Blocks {
    /// Hands out the blocks, scale and codes.
    fn for_each(&self, mut take: impl FnMut(f32, &[u8])) -> Result<()> {
        self.blocks.for_each_chunk(BLOCK_BYTES, |blocks| {
            for (&scale, codes) in blocks.chunks_exact(BLOCK_BYTES).filter_map(<[u8]>::split_first) {
                take(Element::E4m3.value(scale) / F8Q8_MAX, codes);
            }
        })
    }

    fn count(&self) -> usize {
        self.blocks.size_in_bytes() / BLOCK_BYTES
    }
}

impl Layout for F8q8Blocks {
    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(MlxForm::ROUNDED)
    }

    fn size_in_bytes(&self) -> usize {
        self.blocks.size_in_bytes()
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let k = self.dims.last().copied().unwrap_or(0);
        let rows = self.count() / F8Q8_FORMAT.groups_per_row(k)?;
        let mut words = Vec::with_capacity(self.count() * (BLOCK / 4));
        let mut scales = Vec::with_capacity(self.count());
        self.for_each(|scale, codes| {
            scales.push(scale);
            let (quads, _) = codes.as_chunks::<4>();
            // Signed codes, counted from -128 on.
            words.extend(quads.iter().map(|quad| u32::from_le_bytes(*quad) ^ 0x8080_8080));
        })?;
        QuantTensor::new(
            F8Q8_FORMAT,
            Tensor::from_vec(words, (rows, F8Q8_FORMAT.words_per_row(k)?), device)?,
            Tensor::from_vec(scales, (rows, F8Q8_FORMAT.groups_per_row(k)?), device)?,
            None,
            None,
        )
    }

    fn granularity(&self) -> usize {
        BLOCK
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let blocks = slice.of(&self.blocks, BLOCK, BLOCK_BYTES)?;
        Ok(Arc::new(Self { blocks, dims: slice.part_dims() }))
    }
}

/// Rows of whole halves of blocks, of which the first and the last of a block may lie in two rows: each half is filled up.
#[derive(Clone, Debug)]
struct HalfBlocks {
    layout: F8q8Blocks,
    /// Elements of a row of all.
    k: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl HalfBlocks {
    fn filled(&self) -> Filled {
        Filled::new(self.columns.len(), HALF, self.columns.start % HALF, BLOCK)
    }
}

impl IrregularLayout for HalfBlocks {
    fn format(&self) -> QuantFormat {
        F8Q8_FORMAT
    }

    fn format_name(&self) -> String {
        reordered_name(F8Q8_FORMAT, true)
    }

    fn size_in_bytes(&self) -> usize {
        self.layout.blocks.size_in_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let columns = self.filled().columns.len();
        let order = (columns + self.columns.len()) * size_of::<u32>();
        F8Q8_FORMAT.size_in_bytes((self.rows.len() * columns) as u64, DType::F32) + order as u64
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let (mut scales, mut codes) = (Vec::new(), Vec::new());
        self.layout.for_each(|scale, of_block| {
            scales.push(scale);
            codes.extend_from_slice(of_block);
        })?;
        let (filled, k) = (self.filled(), self.k);
        let of_rows = codes.get(self.rows.start * k..self.rows.end * k).unwrap_or_default();
        let words = filled.words(of_rows, k, &self.columns, F8Q8_FORMAT.bits());
        let words: Vec<_> = words.into_iter().map(|quad| quad ^ 0x8080_8080).collect();
        let mut of_groups = Vec::with_capacity(self.rows.len() * filled.runs.len());
        for row in self.rows.clone() {
            let first = row * k + self.columns.start;
            let scale = |run: &usize| scales.get((first / HALF + run) * HALF / BLOCK).copied().unwrap_or(0.);
            of_groups.extend(filled.runs.iter().map(scale));
        }
        let rows = self.rows.len();
        let columns = filled.columns.len();
        let weight = QuantTensor::new(
            F8Q8_FORMAT,
            Tensor::from_vec(words, (rows, F8Q8_FORMAT.words_per_row(columns)?), device)?,
            Tensor::from_vec(of_groups, (rows, F8Q8_FORMAT.groups_per_row(columns)?), device)?,
            None,
            None,
        )?;
        Ok(ReorderedTensor::new(weight, &filled.columns, self.columns.len())?.into())
    }

    fn granularity(&self) -> usize {
        1
    }

    /// Blocks run across rows: all are read.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        let (rows, columns) = slice.within(&self.rows, &self.columns);
        Ok(Arc::new(Self { rows, columns, ..self.clone() }))
    }
}

impl Dequantize for F8q8Blocks {
    fn size_in_bytes(&self) -> usize {
        self.blocks.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let mut values = Vec::with_capacity(self.count() * BLOCK);
        self.for_each(|scale, codes| {
            values.extend(codes.iter().map(|code| f32::from(code.cast_signed()) * scale));
        })?;
        values.truncate(self.dims.iter().product());
        Ok(Tensor::from_vec(values, self.dims.as_slice(), device)?)
    }

    fn granularity(&self) -> usize {
        1
    }

    /// Blocks run across rows.
    fn narrow(&self, _: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        Ok(None)
    }
}
