//! 8-bit floats with scales for tiles: `weight` F8_E4M3 `[N, K]` and `weight_scale_inv`, one scale for each
//! `weight_block_size`, or one for all. Despite its name the scale multiplies.
//!
//! As `FP8Linear` and `Fp8Dequantize` have it (src/transformers/integrations/finegrained_fp8.py of
//! huggingface/transformers; quantizers/quantizer_finegrained_fp8.py for the other names and for exponents in
//! U8). Exponents as scales make it MXFP8, float scales FP8 with a scale for each group that lies in one tile. Where
//! no groups of 32 do, weights are dequantized.

use super::module::Module;
use crate::checkpoint::file::{candle_dtype, StoredTensor, Warnings};
use crate::checkpoint::weight::{
    tensor_of, DenseTensor, Dequantize, Layout, MlxForm, PackedWeight, Slice, Weight,
};
use crate::format::{Element, Scale};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::ops::Range;
use std::sync::Arc;

/// The names that writers give to the scales.
pub(super) const SCALES: [&str; 4] = ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"];

/// What the config says of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) struct Blocks {
    /// Rows and columns that share a scale; `None`: all of them.
    pub size: Option<(usize, usize)>,
    /// Whether scales in U8 are exponents.
    pub exponents: bool,
}

pub(super) fn weight(module: &Module, blocks: Blocks, warnings: &Warnings) -> Result<Weight> {
    let codes = module.require("weight", "weight", &[Dtype::F8_E4M3])?;
    let ([n], k) = module.rows("weight", codes)? else {
        return Err(module.wrong("weight", codes, "a shape [N, K]", format!("{:?}", codes.dims())));
    };
    let part = SCALES.into_iter().find(|part| module.get(part).is_some()).unwrap_or(SCALES[0]);
    let floats = [Dtype::F32, Dtype::BF16, Dtype::F16];
    let dtypes = match blocks.exponents {
        true => [floats.as_slice(), &[Dtype::F8_E8M0, Dtype::U8]].concat(),
        false => [floats.as_slice(), &[Dtype::F8_E8M0]].concat(),
    };
    let scales = module.require(part, "weight", &dtypes)?;
    let single = scales.dims().is_empty() || scales.dims() == [1];
    let of_rows = scales.dims() == [*n, 1] || scales.dims() == [*n];
    let (rows, columns) = match (single, blocks.size) {
        (true, _) => (*n, k),
        (false, None) if of_rows => (1, k),
        (false, Some(size)) => size,
        (false, None) => {
            let expected = "one scale, or one for each row, as the config has no weight_block_size";
            return Err(module.wrong(part, scales, expected, format!("shape {:?}", scales.dims())));
        }
    };
    if let (false, Some(_)) = (single, blocks.size) {
        module.check_dims(part, scales, &[n.div_ceil(rows), k.div_ceil(columns)])?;
    }
    let (dims, tiles) = (vec![*n, k], Tiles { rows, columns, per_row: k.div_ceil(columns), before: (0, 0) });
    let group_fits = |group: &usize| k % group == 0 && (columns % group == 0 || columns >= k);
    let packed = match floats.contains(&scales.dtype()) {
        false => Some(QuantFormat::MXFP8).filter(|format| group_fits(&format.group_size())),
        true => [128, 64, 32].into_iter().find(group_fits).and_then(QuantFormat::fp8_opt),
    };
    if let Some(format) = packed {
        let layout = TiledScales { format, n: *n, k, codes: codes.clone(), scales: scales.clone(), tiles };
        return Ok(Weight::Packed(PackedWeight::new(module.path, format, dims, layout)));
    }
    if !floats.contains(&scales.dtype()) {
        let expected = "rows of whole groups of 32 below one exponent each";
        return Err(module.wrong("weight", codes, expected, format!("K = {k}, tiles of {rows} x {columns}")));
    }
    warnings.once(
        "fp8 of other groups".into(),
        format!(
            "{}: nothing computes in fp8 with a scale for other than whole groups of 32: such weights (`{}`) are \
             dequantized while loading",
            codes.path().display(),
            module.path
        ),
    );
    let source = TiledFloats { n: *n, k, codes: codes.clone(), scales: scales.clone(), tiles };
    let name = tensor_of(module.path, "weight");
    Ok(Weight::Dense(DenseTensor::dequantized(&name, DType::F32, dims, source)))
}

/// Rows and columns of a part.
fn part_size(n: usize, k: usize, slice: &Slice) -> (usize, usize) {
    if slice.along_k() {
        (n, slice.range.len())
    } else {
        (slice.range.len(), k)
    }
}

/// Which scale belongs to an element.
#[derive(Clone, Copy, Debug)]
struct Tiles {
    rows: usize,
    columns: usize,
    /// Tiles side by side.
    per_row: usize,
    /// Rows and columns of the first tile that are none of the weight's.
    before: (usize, usize),
}

impl Tiles {
    /// The scales of the tiles that a row crosses.
    fn of_row<T>(self, scales: &[T], row: usize) -> &[T] {
        let first = ((self.before.0 + row) / self.rows).saturating_mul(self.per_row);
        scales.get(first..).and_then(|rest| rest.get(..self.per_row)).unwrap_or_default()
    }

    /// The tiles of a part of a weight of `n` rows, and their scales.
    fn narrow(self, n: usize, scales: &StoredTensor, slice: &Slice) -> Result<(Self, StoredTensor)> {
        let bytes = scales.dtype().bitsize() / 8;
        let sizes = [(self.before.0 + n).div_ceil(self.rows), self.per_row * bytes];
        let tiles = |before: usize, size: usize| {
            let Range { start, end } = slice.range;
            let tiles = (before + start) / size..(before + end).div_ceil(size);
            (tiles, (before + start) % size)
        };
        let (tiles, dim, part) = match slice.along_k() {
            true => {
                let (tiles, before) = tiles(self.before.1, self.columns);
                let part = Self { per_row: tiles.len(), before: (self.before.0, before), ..self };
                (tiles.start * bytes..tiles.end * bytes, 1, part)
            }
            false => {
                let (tiles, before) = tiles(self.before.0, self.rows);
                (tiles, 0, Self { before: (before, self.before.1), ..self })
            }
        };
        Ok((part, scales.narrow(&sizes, dim, &tiles)?))
    }
}

/// Codes of a format with one scale for several rows and groups.
#[derive(Debug)]
struct TiledScales {
    format: QuantFormat,
    n: usize,
    k: usize,
    codes: StoredTensor,
    scales: StoredTensor,
    tiles: Tiles,
}

impl Layout for TiledScales {
    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(match self.format {
            QuantFormat::MXFP8 => MlxForm::Rearranged(DType::U8),
            _ => MlxForm::Impossible(", which MLX does not have"),
        })
    }

    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let scales = candle_dtype(self.scales.dtype()).unwrap_or(DType::U8);
        self.format.size_in_bytes((self.n * self.k) as u64, scales)
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let (words, groups) = (self.format.words_per_row(self.k)?, self.format.groups_per_row(self.k)?);
        let mut index = Vec::with_capacity(self.n.saturating_mul(groups));
        for row in 0..self.n {
            let first = (self.tiles.before.0 + row) / self.tiles.rows * self.tiles.per_row;
            let of_group = |group: usize| self.tiles.before.1 + group * self.format.group_size();
            index.extend((0..groups).map(|group| (first + of_group(group) / self.tiles.columns) as i64));
        }
        let scales = match self.format.scale() {
            Scale::Float => self.scales.load(&Device::Cpu)?,
            Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => {
                let bytes = self.scales.read::<u8>()?;
                Tensor::from_vec(bytes, self.scales.size_in_bytes(), &Device::Cpu)?
            }
        };
        let index = Tensor::from_vec(index, self.n * groups, &Device::Cpu)?;
        let scales = scales.flatten_all()?.index_select(&index, 0)?.reshape((self.n, groups))?;
        let codes = Tensor::from_vec(self.codes.read::<u32>()?, (self.n, words), device)?;
        QuantTensor::new(self.format, codes, scales.to_device(device)?, None, None)
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let (tiles, scales) = self.tiles.narrow(self.n, &self.scales, slice)?;
        let (n, k) = part_size(self.n, self.k, slice);
        Ok(Arc::new(Self { format: self.format, n, k, codes: slice.of(&self.codes, 1, 1)?, scales, tiles }))
    }
}

/// Codes with float scales.
#[derive(Debug)]
struct TiledFloats {
    n: usize,
    k: usize,
    codes: StoredTensor,
    scales: StoredTensor,
    tiles: Tiles,
}

impl Dequantize for TiledFloats {
    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let scales = self.scales.load(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let mut elements = Vec::with_capacity(self.codes.size_in_bytes());
        let mut row = 0;
        self.codes.for_each_chunk(self.k, |chunk| {
            for codes in chunk.chunks_exact(self.k.max(1)) {
                let first = self.tiles.columns.saturating_sub(self.tiles.before.1).min(codes.len());
                let (first, rest) = codes.split_at(first);
                let chunks = std::iter::once(first).chain(rest.chunks(self.tiles.columns.max(1)));
                let tiles = chunks.zip(self.tiles.of_row(&scales, row));
                elements.extend(tiles.flat_map(|(codes, scale)| {
                    codes.iter().map(move |code| Element::E4m3.value(*code) * scale)
                }));
                row += 1;
            }
        })?;
        Tensor::from_vec(elements, (self.n, self.k), device).map_err(Error::from)
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        let (tiles, scales) = self.tiles.narrow(self.n, &self.scales, slice)?;
        let (n, k) = part_size(self.n, self.k, slice);
        Ok(Some(Arc::new(Self { n, k, codes: slice.of(&self.codes, 1, 1)?, scales, tiles })))
    }
}
