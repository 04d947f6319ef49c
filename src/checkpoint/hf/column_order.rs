//! Columns that are not in the order of their groups: `g_idx` of GPTQ with `desc_act`, `weight_g_idx` of compressed-tensors
//! with `actorder`.
//!
//! The codes of such a file lie in the order of x, and a tensor says of each column in which group it is. While it is loaded,
//! the columns of each group come together, as they were when the weight was quantized, and x is brought into this order
//! before it is multiplied. Of a part of K a group has as many columns as fell into the part: they are filled up to whole
//! groups of the format.

use super::integers::Integers;
use super::module::Module;
use crate::checkpoint::weight::{IrregularLayout, Slice};
use crate::format::{pack, unpack};
use crate::tensor::{reordered_name, LayerWeight, ReorderedTensor, NO_COLUMN};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
use std::sync::Arc;

/// Columns of words that are whole in all widths.
const UNIT: usize = 32;
const REMEDY: &str = "fetch the file again, or use another quantization of the model";

/// The group of each of `k` columns, as the tensor `name` tells; `None` if columns are in order, `size` to a group, if there is
/// no such tensor, or if all of it is what a tool writes for a weight that it has not ordered.
pub(super) fn column_groups(
    module: &Module,
    name: &str,
    k: usize,
    size: usize,
    unordered: Option<i32>,
) -> Result<Option<Vec<u32>>> {
    if module.get(name).is_none() {
        return Ok(None);
    }
    let stored = module.require(name, name, &[Dtype::I32])?;
    module.check_dims(name, stored, &[k])?;
    let index = stored.read::<i32>()?;
    if index.iter().all(|group| Some(*group) == unordered) {
        return Ok(None);
    }
    let count = k.div_ceil(size.max(1));
    let group = |(column, group): (usize, &i32)| {
        let within = u32::try_from(*group).ok().filter(|group| (*group as usize) < count);
        within.ok_or_else(|| {
            let expected = format!("groups 0 to {} of {size} columns each", count.saturating_sub(1));
            let found = format!("group {group} for column {column}");
            Error::tensor(stored.path(), module.name(name), expected, found, REMEDY)
        })
    };
    let groups = index.iter().enumerate().map(group).collect::<Result<Vec<_>>>()?;
    let in_order = groups.iter().enumerate().all(|(column, group)| *group as usize == column / size.max(1));
    Ok(Some(groups).filter(|_| !in_order))
}

/// A matrix of integer codes with a group for each column.
#[derive(Clone, Debug)]
pub(super) struct ReorderedIntegers {
    /// With all groups of the file, whatever part of K it is.
    integers: Integers,
    /// The group of each column.
    groups: Arc<[u32]>,
    /// Groups of the file.
    count: usize,
}

impl ReorderedIntegers {
    /// `integers`, whole along K, with the groups of their columns.
    pub(super) fn new(integers: Integers, groups: Vec<u32>) -> Result<Self> {
        let count = integers.groups.count(integers.k);
        Self { integers, groups: groups.into(), count }.with_format()
    }

    /// Itself with the largest groups of a format that columns fill, or the smallest.
    fn with_format(self) -> Result<Self> {
        let mut counts = vec![0usize; self.count];
        for group in self.groups.iter() {
            if let Some(count) = counts.get_mut(*group as usize) {
                *count += 1;
            }
        }
        let fits = |size: &usize| counts.iter().all(|count| count.is_multiple_of(*size));
        let sizes = QuantFormat::AFFINE_GROUP_SIZES.into_iter();
        let size = sizes.rev().find(fits).unwrap_or(UNIT);
        let bits = self.integers.format.bits();
        let format = match self.integers.format.has_biases() {
            true => QuantFormat::affine(bits, size),
            false => QuantFormat::symmetric(bits, size),
        }?;
        Ok(Self { integers: Integers { format, ..self.integers }, ..self })
    }

    /// The column of each packed one, and the group of each group of the format.
    fn order(&self) -> (Vec<u32>, Vec<u32>) {
        let size = self.integers.format.group_size();
        let mut columns_of = vec![Vec::new(); self.count];
        for (column, group) in (0u32..).zip(self.groups.iter()) {
            if let Some(columns) = columns_of.get_mut(*group as usize) {
                columns.push(column);
            }
        }
        let (mut columns, mut groups) = (Vec::new(), Vec::new());
        for (group, of_group) in (0u32..).zip(columns_of) {
            columns.extend(of_group);
            columns.resize(columns.len().next_multiple_of(size), NO_COLUMN);
            groups.resize(columns.len() / size, group);
        }
        (columns, groups)
    }

    /// Codes `[N, K']` in this order, zeros where there is no column.
    fn codes(&self, columns: &[u32]) -> Result<Vec<u32>> {
        let Integers { format, n, k, .. } = self.integers;
        let words = self.integers.words()?;
        let (bits, row, packed) =
            (format.bits(), format.words_per_row(k.max(1))?, format.words_per_row(columns.len())?);
        let mut output = vec![0; n * packed];
        let rows = output.par_chunks_exact_mut(packed.max(1)).zip(words.par_chunks_exact(row.max(1)));
        rows.for_each_init(
            || (vec![0; k], vec![0; columns.len()]),
            |(codes, ordered), (to, from)| {
                unpack(from, bits, codes);
                for (to, column) in ordered.iter_mut().zip(columns) {
                    *to = codes.get(*column as usize).copied().unwrap_or(0);
                }
                pack(ordered, bits, to);
            },
        );
        Ok(output)
    }
}

impl IrregularLayout for ReorderedIntegers {
    fn format(&self) -> QuantFormat {
        self.integers.format
    }

    fn format_name(&self) -> String {
        reordered_name(self.format(), false)
    }

    fn size_in_bytes(&self) -> usize {
        self.integers.stored_bytes()
    }

    fn loaded_bytes(&self) -> u64 {
        let (columns, _) = self.order();
        let elements = (self.integers.n * columns.len()) as u64;
        self.integers.bytes_of(elements) + ((columns.len() + self.groups.len()) * size_of::<u32>()) as u64
    }

    fn load(&self, device: &Device) -> Result<LayerWeight> {
        let (columns, groups) = self.order();
        let Integers { format, n, k, .. } = self.integers;
        let (scales, biases) = self.integers.scales_and_biases(self.count)?;
        let groups = Tensor::new(groups, &Device::Cpu)?;
        let spread = |values: &Tensor| -> Result<Tensor> {
            Ok(values.contiguous()?.index_select(&groups, 1)?.to_device(device)?)
        };
        let codes =
            Tensor::from_vec(self.codes(&columns)?, (n, format.words_per_row(columns.len())?), device)?;
        let biases = biases.as_ref().map(spread).transpose()?;
        let weight = QuantTensor::new(format, codes, spread(&scales)?, biases, None)?;
        Ok(ReorderedTensor::new(weight, &columns, k)?.into())
    }

    fn granularity(&self) -> usize {
        UNIT
    }

    /// Any column of a part may be in any group: all scales of its rows are read.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>> {
        let (rows, of_k) = match slice.along_k() {
            true => (0..self.integers.n, slice.range.clone()),
            false => (slice.range.clone(), 0..self.integers.k),
        };
        let groups = self.groups.get(of_k.clone()).unwrap_or_default().into();
        let integers = self.integers.part((&rows, &of_k), self.count, &(0..self.count))?;
        Ok(Arc::new(Self { integers, groups, count: self.count }.with_format()?))
    }
}
