//! Rows of 8-bit integers with a scale each that are no whole groups of a format: they are filled up with zeros while they are
//! loaded, and so is x before it is multiplied.

use super::groups::Groups;
use super::integers::{Integers, Order};
use crate::checkpoint::weight::{filled_group_size, Filled, IrregularLayout, Slice};
use crate::tensor::{reordered_name, LayerWeight, ReorderedTensor};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// The groups of rows that are one each, and the size of a format's groups when they are filled up.
pub(super) fn of_rows(k: usize) -> (Groups, usize) {
    (Groups::of(k), filled_group_size(k, k, 0))
}

/// Codes of 8 bits in rows, of which each is a group.
#[derive(Clone, Debug)]
pub(super) struct FilledRows(Integers);

impl FilledRows {
    /// `integers` with the format of their rows.
    pub(super) fn new(integers: Integers) -> Result<Self> {
        let (groups, size) = of_rows(integers.k);
        let format = match integers.format.has_biases() {
            true => QuantFormat::affine(integers.format.bits(), size),
            false => QuantFormat::symmetric(integers.format.bits(), size),
        }?;
        Ok(Self(Integers { format, groups, ..integers }))
    }

    fn filled(&self) -> Filled {
        Filled::new(self.0.k, self.0.k, 0, self.0.format.group_size())
    }
}

impl IrregularLayout for FilledRows {
    fn format(&self) -> QuantFormat {
        self.0.format
    }

    fn format_name(&self) -> String {
        reordered_name(self.0.format, true)
    }

    fn size_in_bytes(&self) -> usize {
        self.0.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let columns = self.filled().columns.len();
        self.0.bytes_of((self.0.n * columns) as u64) + ((columns + self.0.k) * size_of::<u32>()) as u64
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let (filled, Integers { format, n, k, codes, .. }) = (self.filled(), &self.0);
        let mut codes = codes.read::<u8>()?;
        if self.0.order == Order::Signed {
            // From two's complement to the distance from the least code.
            codes.iter_mut().for_each(|code| *code ^= 0x80);
        }
        let words = filled.words(&codes, *k, &(0..*k), format.bits());
        let words = Tensor::from_vec(words, (*n, format.words_per_row(filled.columns.len())?), device)?;
        let (scales, biases) = self.0.scales_and_biases(1)?;
        let spread = |values: &Tensor| -> Result<Tensor> {
            Ok(values.broadcast_as((*n, filled.runs.len()))?.contiguous()?.to_device(device)?)
        };
        let biases = biases.as_ref().map(spread).transpose()?;
        let weight = QuantTensor::new(*format, words, spread(&scales)?, biases, None)?;
        Ok(ReorderedTensor::new(weight, &filled.columns, *k)?.into())
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        let (rows, columns) = slice.within(&(0..self.0.n), &(0..self.0.k));
        Ok(Arc::new(Self::new(self.0.part((&rows, &columns), 1, &(0..1))?)?))
    }
}
