//! A slice of a weight: a range of entries along one dimension of its shape.

use crate::checkpoint::file::StoredTensor;
use crate::{Error, Result};
use std::ops::Range;

/// Entries `range` along dimension `dim` of a tensor of shape `dims`.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct Slice<'a> {
    pub dims: &'a [usize],
    pub dim: usize,
    pub range: Range<usize>,
}

impl<'a> Slice<'a> {
    /// A slice of the tensor `name`, along K at multiples of `unit` only.
    ///
    /// # Errors
    /// If the range is empty, leaves the dimension or cuts a unit.
    pub(in crate::checkpoint) fn new(
        name: &str,
        dims: &'a [usize],
        dim: usize,
        range: Range<usize>,
        unit: usize,
    ) -> Result<Self> {
        let size = dims.get(dim).copied().unwrap_or(0);
        let what = || format!("range of dimension {dim} of `{name}` {dims:?}");
        if range.start >= range.end || range.end > size {
            return Err(Error::mismatch(what(), format!("1 or more of {size}"), format!("{range:?}")));
        }
        let slice = Self { dims, dim, range };
        if slice.cuts(unit) {
            let expected = format!("multiples of {unit}, which lie together");
            return Err(Error::mismatch(what(), expected, format!("{:?}", slice.range)));
        }
        Ok(slice)
    }

    /// Whether units of `unit` elements along K are cut.
    pub(in crate::checkpoint) fn cuts(&self, unit: usize) -> bool {
        let whole = |k: usize| k.is_multiple_of(unit);
        self.along_k() && !(whole(self.range.start) && whole(self.range.end))
    }

    pub(in crate::checkpoint) fn along_k(&self) -> bool {
        self.dim + 1 == self.dims.len()
    }

    /// The rows and columns that are left of these.
    pub(in crate::checkpoint) fn within(
        &self,
        rows: &Range<usize>,
        columns: &Range<usize>,
    ) -> (Range<usize>, Range<usize>) {
        let part = |all: &Range<usize>| all.start + self.range.start..all.start + self.range.end;
        match self.along_k() {
            true => (rows.clone(), part(columns)),
            false => (part(rows), columns.clone()),
        }
    }

    /// The shape of the part.
    pub(in crate::checkpoint) fn part_dims(&self) -> Vec<usize> {
        let mut dims = self.dims.to_vec();
        if let Some(dim) = dims.get_mut(self.dim) {
            *dim = self.range.len();
        }
        dims
    }

    /// The same entries of a stored tensor that has `bytes` for every `elements` along K.
    pub(in crate::checkpoint) fn of(
        &self,
        stored: &StoredTensor,
        elements: usize,
        bytes: usize,
    ) -> Result<StoredTensor> {
        let in_bytes = |k: usize| (k / elements.max(1)).saturating_mul(bytes);
        let mut sizes = self.dims.to_vec();
        if let Some(last) = sizes.last_mut() {
            *last = in_bytes(*last);
        }
        match self.along_k() {
            true => {
                let range = in_bytes(self.range.start)..in_bytes(self.range.end);
                stored.narrow(&sizes, self.dim, &range)
            }
            false => stored.narrow(&sizes, self.dim, &self.range),
        }
    }
}
