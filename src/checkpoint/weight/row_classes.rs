//! Integers whose groups run across rows: element `i` of the flattened weight belongs to group `i mod G` of `G` groups. So rows
//! that are a multiple of `G / gcd(G, K)` apart have the same groups in the same columns: they are of one class.

use super::filled::group_sizes;
use super::layout::IrregularLayout;
use super::slice::Slice;
use super::stored_form::StoredForm;
use crate::checkpoint::file::StoredTensor;
use crate::format::pack;
use crate::tensor::{column_scaled_name, ColumnScaledTensor, LayerWeight};
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Rows of a class at least.
const FEWEST_ROWS: usize = 4;
/// Of the place and the class of a row.
const PLACE_BITS: usize = 2 * 8 * size_of::<u32>();

/// 1 for zeros.
pub(in crate::checkpoint) fn gcd(a: usize, b: usize) -> usize {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

/// Some rows of a weight, and of these some columns.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct RowClasses {
    /// How many classes there are.
    count: usize,
    /// Groups of the whole weight, and its columns.
    groups: usize,
    k: usize,
    /// Elements of a group.
    group: usize,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    /// Of the codes.
    pub format: QuantFormat,
}

impl RowClasses {
    /// Those of all of `[N, K]` in groups of so many; none if there are none of such a size, or if a class has so few rows that
    /// scales take as much as codes.
    pub fn of(n: usize, k: usize, bits: usize, group: usize) -> Option<Self> {
        let elements = n.checked_mul(k)?;
        let groups = elements.checked_div(group).filter(|groups| *groups > 0 && elements % group == 0)?;
        let count = groups / gcd(groups, k);
        // Of few columns what they are filled up with, and places of rows, would take more than numbers.
        let row_bits = k.next_multiple_of(32).checked_mul(bits)?.checked_add(PLACE_BITS)?;
        if n / count.max(1) < FEWEST_ROWS || row_bits > k.checked_mul(8 * size_of::<f32>())? {
            return None;
        }
        Self {
            count,
            groups,
            k,
            group,
            rows: 0..n,
            columns: 0..k,
            format: QuantFormat::symmetric_opt(bits, 32)?,
        }
        .with_format()
    }

    /// Some rows or columns of it.
    pub fn narrow(&self, slice: &Slice) -> Self {
        let (rows, columns) = slice.within(&self.rows, &self.columns);
        let part = Self { rows, columns, ..self.clone() };
        part.clone().with_format().unwrap_or(part)
    }

    /// Whether it is all of the weight.
    fn is_whole(&self) -> bool {
        let elements = self.group.checked_mul(self.groups);
        self.columns.len() == self.k && self.rows.len().checked_mul(self.k) == elements
    }

    /// With the largest groups of codes.
    fn with_format(self) -> Option<Self> {
        let size = group_sizes().find(|size| self.filled().is_multiple_of(*size))?;
        Some(Self { format: QuantFormat::symmetric_opt(self.format.bits(), size)?, ..self })
    }

    /// How many classes there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Scales or zeros of all groups as those of the columns of each class, `[classes, K]`.
    fn of_columns(&self, of_groups: &StoredTensor) -> Result<Tensor> {
        let group = |class: usize, column: usize| ((class * self.k + column) % self.groups) as i64;
        let index: Vec<_> = (0..self.count)
            .flat_map(|class| self.columns.clone().map(move |column| group(class, column)))
            .collect();
        let index = Tensor::from_vec(index, self.count * self.columns.len(), &Device::Cpu)?;
        let of_groups = of_groups.load(&Device::Cpu)?.flatten_all()?;
        Ok(of_groups.index_select(&index, 0)?.reshape((self.count, self.columns.len()))?)
    }

    /// What reads a row out of the codes of the whole weight.
    fn reading<'a>(&self, codes: &'a [u8]) -> impl Fn(usize, &mut [u8]) + Sync + 'a {
        let (k, Range { start, end }) = (self.k, self.columns.clone());
        move |row, to| {
            let of_row = codes.get(row * k + start..row * k + end).unwrap_or_default();
            to.iter_mut().zip(of_row).for_each(|(to, code)| *to = *code);
        }
    }

    fn filled(&self) -> usize {
        self.columns.len().next_multiple_of(32)
    }

    pub fn format_name(&self) -> String {
        column_scaled_name(self.format.bits(), self.group)
    }

    /// Which rows of each class are there: a few more, if the first or the last is not that of all classes.
    fn of_class(&self) -> Range<usize> {
        self.rows.start / self.count..self.rows.end.div_ceil(self.count)
    }

    /// Bytes when loaded, with these scales and zeros.
    pub fn loaded_bytes(&self, scales: &StoredTensor, zeros: &StoredTensor) -> u64 {
        let each = [scales, zeros].map(|part| part.dtype().bitsize() / 8).iter().sum::<usize>();
        let codes = self.count * self.of_class().len() * self.filled();
        let parameters = self.count * self.columns.len() * each;
        let places = 2 * self.rows.len() * size_of::<u32>();
        self.format.size_in_bytes(codes as u64, DType::F32) + (parameters + places) as u64
    }

    /// The weight of codes that `read` writes: those of a row, `columns` of it. Scales and zeros are those of these columns,
    /// `[classes, K]`.
    pub fn load(
        &self,
        read: impl Fn(usize, &mut [u8]) + Sync,
        (scales, zeros): (Tensor, Tensor),
        device: &Device,
    ) -> Result<ColumnScaledTensor> {
        let (format, of_class, filled) = (self.format, self.of_class(), self.filled());
        let row = format.words_per_row(filled)?;
        let mut words = vec![0u32; self.count * of_class.len() * row];
        words.par_chunks_exact_mut(row.max(1)).enumerate().for_each_init(
            || vec![0u8; filled],
            |codes, (place, words)| {
                let (class, index) = (place / of_class.len(), place % of_class.len());
                let row = (of_class.start + index) * self.count + class;
                // What is beyond the rows is never looked at.
                if self.rows.contains(&row) {
                    read(row, codes.get_mut(..self.columns.len()).unwrap_or_default());
                    pack(codes, format.bits(), words);
                }
            },
        );
        let dims = |last: usize| (self.count, of_class.len(), last);
        let words = Tensor::from_vec(words, dims(row), device)?;
        let ones = Tensor::ones(dims(format.groups_per_row(filled)?), DType::F32, device)?;
        let codes = QuantTensor::new(format, words, ones, None, None)?;
        let place = |row: usize| (row % self.count) * of_class.len() + row / self.count - of_class.start;
        let places: Vec<_> =
            self.rows.clone().map(|row| u32::try_from(place(row)).unwrap_or(u32::MAX)).collect();
        ColumnScaledTensor::of_ones(
            codes,
            scales.to_device(device)?,
            zeros.to_device(device)?,
            &places,
            self.group,
        )
    }
}

/// Integers and what their groups have, as a file has them.
pub(in crate::checkpoint) trait StoredGroups:
    Clone + fmt::Debug + Send + Sync + 'static
{
    /// The codes of all elements, in their order.
    fn codes(&self) -> Result<Vec<u8>>;

    /// Scales and zeros of all groups.
    fn parameters(&self) -> [&StoredTensor; 2];

    /// Bytes of all tensors.
    fn stored_bytes(&self) -> usize;

    /// As [`Layout::stored_form`](super::Layout::stored_form).
    fn stored_form(&self, _module: &str) -> Option<StoredForm> {
        None
    }
}

/// A weight with groups across rows whose rows lie apart in the file: all is read, and cut in memory.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct CutInMemory<S> {
    pub classes: RowClasses,
    pub stored: S,
}

impl<S: StoredGroups> IrregularLayout for CutInMemory<S> {
    fn format(&self) -> QuantFormat {
        self.classes.format
    }

    fn format_name(&self) -> String {
        self.classes.format_name()
    }

    fn size_in_bytes(&self) -> usize {
        self.stored.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let [scales, zeros] = self.stored.parameters();
        self.classes.loaded_bytes(scales, zeros)
    }

    fn stored_form(&self, module: &str) -> Option<StoredForm> {
        self.stored.stored_form(module).filter(|_| self.classes.is_whole())
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let codes = self.stored.codes()?;
        let [scales, zeros] = self.stored.parameters();
        let parameters = (self.classes.of_columns(scales)?, self.classes.of_columns(zeros)?);
        Ok(self.classes.load(self.classes.reading(&codes), parameters, device)?.into())
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        Ok(Arc::new(Self { classes: self.classes.narrow(slice), stored: self.stored.clone() }))
    }
}
