//! 8-bit floats with scales for tiles: so many rows and columns share one.
//!
//! Exponents as scales make them MXFP8, float scales FP8 with a scale for each group that lies in one tile. Where groups lie in
//! no tile, the columns of each are filled up to whole groups, and so is x. Where that took more memory than numbers do, they are
//! dequantized.

use super::filled::{filled_columns, filled_group_size, group_sizes, Filled};
use super::layout::{Dequantize, IrregularLayout, Layout};
use super::{
    tensor_of, DenseTensor, IrregularWeight, MlxForm, PackedWeight, Slice, StoredForm, StoredFp8, Weight,
};
use crate::checkpoint::file::{candle_dtype, StoredTensor};
use crate::format::{Element, Scale};
use crate::tensor::{reordered_name, LayerWeight, ReorderedTensor};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// By how much the columns of a weight may grow: beyond it, codes are no less than numbers in f32.
const MOST_FILLED: usize = 4;

/// Codes F8_E4M3 `[N, K]`, and which of the scales belongs to which.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct TiledFp8 {
    pub n: usize,
    pub k: usize,
    pub codes: StoredTensor,
    /// Floats, or exponents.
    pub scales: StoredTensor,
    pub tiles: Tiles,
}

impl TiledFp8 {
    /// The weight of a module; none if tiles below exponents have so few columns that codes took more memory than numbers.
    pub fn into_weight(self, module: &str) -> Option<Weight> {
        let (k, dims) = (self.k, vec![self.n, self.k]);
        let Tiles { columns, .. } = self.tiles;
        let in_order = group_sizes().find(|group| k % group == 0 && (columns % group == 0 || columns >= k));
        if let Some(format) = in_order.and_then(|size| self.format(size)) {
            let layout = TiledScales { format, tiled: self };
            return Some(Weight::Packed(PackedWeight::new(module, format, dims, layout)));
        }
        if filled_columns(k, columns, 0, 32) <= k.saturating_mul(MOST_FILLED) {
            if let Some(layout) = FilledTiles::of(self.clone()) {
                return Some(Weight::Irregular(IrregularWeight::new(module, dims, layout)));
            }
        }
        match self.has_exponents() {
            true => None,
            false => {
                let name = tensor_of(module, "weight");
                Some(Weight::Dense(DenseTensor::dequantized(&name, DType::F32, dims, self)))
            }
        }
    }

    fn has_exponents(&self) -> bool {
        !candle_dtype(self.scales.dtype()).is_some_and(|dtype| dtype.is_float())
    }

    /// The format with groups of `size`; exponents have one size.
    fn format(&self, size: usize) -> Option<QuantFormat> {
        match self.has_exponents() {
            true => Some(QuantFormat::MXFP8),
            false => QuantFormat::fp8_opt(size),
        }
    }

    /// Codes and scales as they lie, of a whole weight. Exponents are those of MXFP8, whose scales are another thing.
    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        let Tiles { rows, columns, before, .. } = self.tiles;
        if before != (0, 0) || self.has_exponents() {
            return None;
        }
        StoredFp8::form(module, [self.n, self.k], &self.codes, &self.scales, [rows, columns])
    }

    fn stored_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes()
    }

    fn loaded_bytes(&self, format: QuantFormat, columns: usize) -> u64 {
        let scales = candle_dtype(self.scales.dtype()).unwrap_or(DType::U8);
        format.size_in_bytes((self.n * columns) as u64, scales)
    }

    /// The weight of `words`, whose groups lie in these tiles of their row.
    fn load(
        &self,
        format: QuantFormat,
        words: Vec<u32>,
        groups: &[usize],
        device: &Device,
    ) -> Result<QuantTensor> {
        let mut index = Vec::with_capacity(self.n.saturating_mul(groups.len()));
        for row in 0..self.n {
            let first = (self.tiles.before.0 + row) / self.tiles.rows * self.tiles.per_row;
            index.extend(groups.iter().map(|tile| (first + tile) as i64));
        }
        let scales = match format.scale() {
            Scale::Float => self.scales.load(&Device::Cpu)?,
            Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => {
                let bytes = self.scales.read::<u8>()?;
                Tensor::from_vec(bytes, self.scales.size_in_bytes(), &Device::Cpu)?
            }
        };
        let index = Tensor::from_vec(index, self.n * groups.len(), &Device::Cpu)?;
        let scales = scales.flatten_all()?.index_select(&index, 0)?.reshape((self.n, groups.len()))?;
        let row = words.len() / self.n.max(1);
        let codes = Tensor::from_vec(words, (self.n, row), device)?;
        QuantTensor::new(format, codes, scales.to_device(device)?, None, None)
    }

    fn part(&self, slice: &Slice) -> Result<Self> {
        let (tiles, scales) = self.tiles.narrow(self.n, &self.scales, slice)?;
        let (n, k) = match slice.along_k() {
            true => (self.n, slice.range.len()),
            false => (slice.range.len(), self.k),
        };
        Ok(Self { n, k, codes: slice.of(&self.codes, 1, 1)?, scales, tiles })
    }
}

/// Which scale belongs to an element.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) struct Tiles {
    pub rows: usize,
    pub columns: usize,
    /// Tiles side by side.
    per_row: usize,
    /// Rows and columns of the first tile that are none of the weight's.
    before: (usize, usize),
}

impl Tiles {
    /// Tiles of so many rows and columns of a weight of K columns.
    pub fn of(rows: usize, columns: usize, k: usize) -> Self {
        Self { rows, columns, per_row: k.div_ceil(columns), before: (0, 0) }
    }

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

/// Groups that lie in one tile each.
#[derive(Debug)]
struct TiledScales {
    format: QuantFormat,
    tiled: TiledFp8,
}

impl Layout for TiledScales {
    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(match self.format {
            QuantFormat::MXFP8 => MlxForm::Rearranged(DType::U8),
            _ => MlxForm::Impossible(", which MLX does not have"),
        })
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        self.tiled.stored_form(module)
    }

    fn size_in_bytes(&self) -> usize {
        self.tiled.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        self.tiled.loaded_bytes(self.format, self.tiled.k)
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let TiledFp8 { k, tiles, codes, .. } = &self.tiled;
        let tile = |group: usize| (tiles.before.1 + group * self.format.group_size()) / tiles.columns;
        let groups: Vec<_> = (0..self.format.groups_per_row(*k)?).map(tile).collect();
        self.tiled.load(self.format, codes.read::<u32>()?, &groups, device)
    }

    fn granularity(&self) -> usize {
        self.format.group_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        Ok(Arc::new(Self { format: self.format, tiled: self.tiled.part(slice)? }))
    }
}

/// Columns of each tile, filled up to whole groups.
#[derive(Debug)]
struct FilledTiles {
    format: QuantFormat,
    tiled: TiledFp8,
}

impl FilledTiles {
    fn of(tiled: TiledFp8) -> Option<Self> {
        let size = filled_group_size(tiled.k, tiled.tiles.columns, tiled.tiles.before.1);
        Some(Self { format: tiled.format(size)?, tiled })
    }

    fn filled(&self) -> Filled {
        let Tiles { columns, before, .. } = self.tiled.tiles;
        Filled::new(self.tiled.k, columns, before.1, self.format.group_size())
    }
}

impl IrregularLayout for FilledTiles {
    fn format(&self) -> QuantFormat {
        self.format
    }

    fn format_name(&self) -> String {
        reordered_name(self.format, true)
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        self.tiled.stored_form(module)
    }

    fn size_in_bytes(&self) -> usize {
        self.tiled.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let columns = self.filled().columns.len();
        self.tiled.loaded_bytes(self.format, columns) + ((columns + self.tiled.k) * size_of::<u32>()) as u64
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let (filled, k) = (self.filled(), self.tiled.k);
        let words = filled.words(&self.tiled.codes.read::<u8>()?, k, &(0..k), self.format.bits());
        let weight = self.tiled.load(self.format, words, &filled.runs, device)?;
        Ok(ReorderedTensor::new(weight, &filled.columns, k)?.into())
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        let part = Self::of(self.tiled.part(slice)?);
        part.map_or_else(
            || Err(Error::mismatch("part of FP8", "a format", "none")),
            |part| Ok(Arc::new(part) as Arc<dyn IrregularLayout>),
        )
    }
}

impl Dequantize for TiledFp8 {
    fn size_in_bytes(&self) -> usize {
        self.stored_bytes()
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        Self::stored_form(self, module)
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
        Ok(Some(Arc::new(self.part(slice)?)))
    }
}
