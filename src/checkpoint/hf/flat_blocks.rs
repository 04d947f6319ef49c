//! Blocks of bitsandbytes' 4-bit codes that are no whole groups of the format in all rows: they are of any size, and run over the
//! flattened matrix, so that they begin elsewhere in each row where K is no multiple of them.
//!
//! Wherever blocks begin in rows, it is at multiples of the greatest common divisor of K and their size. So runs of so many columns lie
//! in one block in every row; each is filled up to whole groups. Where that took as much memory as numbers do, the weight is
//! dequantized.

use super::bitsandbytes::{entries, Blocks};
use super::module::Module;
use crate::checkpoint::file::Warnings;
use crate::checkpoint::weight::{
    filled_columns, gcd, tensor_of, DenseTensor, Dequantize, Filled, IrregularLayout, IrregularWeight, Slice,
    Weight,
};
use crate::tensor::{reordered_name, LayerWeight, ReorderedTensor};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// Bits of a scale, for each element of a group of 64, and of a code: in halves.
const HALF_BITS: usize = 2 * 4 + 1;

#[derive(Clone, Debug)]
pub(super) struct FlatBlocks {
    blocks: Blocks,
    /// Whether the first code of the first byte is the last one of the row before.
    in_byte: bool,
}

impl FlatBlocks {
    /// Those of a whole weight.
    pub(super) fn new(blocks: Blocks) -> Self {
        Self { blocks, in_byte: false }
    }

    /// The weight of a module.
    pub(super) fn into_weight(self, module: &Module, warnings: &Warnings) -> Weight {
        let Blocks { format, n, row, .. } = self.blocks;
        let filled = filled_columns(row, self.run(), 0, format.group_size());
        if filled.saturating_mul(HALF_BITS) <= row.saturating_mul(2 * 8 * size_of::<f32>()) {
            return Weight::Irregular(IrregularWeight::new(module.path, vec![n, row], self));
        }
        warnings.once(
            "bitsandbytes' blocks across rows".into(),
            format!(
                "{}: blocks of bitsandbytes that begin at almost any column of a row take less memory as numbers: such weights \
                 (`{}`) are dequantized while loading",
                self.blocks.codes.path().display(),
                module.path
            ),
        );
        let name = tensor_of(module.path, "weight");
        Weight::Dense(DenseTensor::dequantized(&name, DType::F32, vec![n, row], self))
    }

    /// Columns that lie in one block in every row.
    fn run(&self) -> usize {
        gcd(self.blocks.row, self.blocks.size)
    }

    fn filled(&self) -> Filled {
        let (Blocks { format, columns, .. }, run) = (&self.blocks, self.run());
        Filled::new(columns.len(), run, columns.start % run, format.group_size())
    }

    /// The codes of all rows, a byte each. The first of two is in the high bits.
    fn codes(&self) -> Result<Vec<u8>> {
        let bytes = self.blocks.codes.read::<u8>()?;
        let codes = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        Ok(codes.skip(usize::from(self.in_byte)).take(self.blocks.n * self.blocks.row).collect())
    }

    /// These rows, of which no other bytes are read.
    fn rows(&self, rows: &Range<usize>) -> Result<Self> {
        let element = |row: usize| usize::from(self.in_byte) + row * self.blocks.row;
        let (start, end) = (element(rows.start), element(rows.end));
        let codes = entries(&self.blocks.codes, &(start / 2..end.div_ceil(2)))?;
        Ok(Self { blocks: self.blocks.of_rows(rows, codes)?, in_byte: start % 2 == 1 })
    }
}

impl IrregularLayout for FlatBlocks {
    fn format(&self) -> QuantFormat {
        self.blocks.format
    }

    fn format_name(&self) -> String {
        reordered_name(self.blocks.format, true)
    }

    fn size_in_bytes(&self) -> usize {
        self.blocks.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let columns = self.filled().columns.len();
        let order = (columns + self.blocks.columns.len()) * size_of::<u32>();
        self.blocks.format.size_in_bytes((self.blocks.n * columns) as u64, DType::F32) + order as u64
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let Blocks { format, n, row, columns, size, before, .. } = &self.blocks;
        let (filled, run) = (self.filled(), self.run());
        let words = filled.words(&self.codes()?, *row, columns, format.bits());
        let words = Tensor::from_vec(words, (*n, format.words_per_row(filled.columns.len())?), device)?;
        let (magnitudes, first) = (self.blocks.magnitudes()?, columns.start / run);
        let element = |row_index: usize, of_row: &usize| before + row_index * row + (first + of_row) * run;
        let elements = (0..*n).flat_map(|row| filled.runs.iter().map(move |of_row| element(row, of_row)));
        let scale = |element: usize| magnitudes.get(element / size).copied().unwrap_or(f32::NAN);
        let scales: Vec<f32> = elements.map(scale).collect();
        let scales = Tensor::from_vec(scales, (*n, filled.runs.len()), device)?;
        let weight = QuantTensor::new(*format, words, scales, None, None)?;
        Ok(ReorderedTensor::new(weight, &filled.columns, columns.len())?.into())
    }

    fn granularity(&self) -> usize {
        1
    }

    /// Codes of a part of K are read with those of their rows.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        let (_, columns) = slice.within(&(0..self.blocks.n), &self.blocks.columns);
        let mut part = if slice.along_k() { self.clone() } else { self.rows(&slice.range)? };
        part.blocks.columns = columns;
        Ok(Arc::new(part))
    }
}

impl Dequantize for FlatBlocks {
    fn size_in_bytes(&self) -> usize {
        self.blocks.stored_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let Blocks { format, n, row, size, before, .. } = &self.blocks;
        let magnitudes = self.blocks.magnitudes()?;
        let number = |(index, code): (usize, &u8)| {
            let magnitude = magnitudes.get((before + index) / size).copied().unwrap_or(f32::NAN);
            format.element().value(*code) * magnitude
        };
        let numbers: Vec<f32> = self.codes()?.iter().enumerate().map(number).collect();
        Ok(Tensor::from_vec(numbers, (*n, *row), device)?)
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        if slice.along_k() {
            return Ok(None);
        }
        Ok(Some(Arc::new(self.rows(&slice.range)?)))
    }
}
