//! Groups of a file, and the smaller ones that formats have.

use crate::{QuantFormat, Result};
use candle_core::{Device, Tensor};
use std::ops::Range;

/// Which elements along K share a scale in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    /// Elements of a group.
    pub size: usize,
    /// Elements of the first group that lie before the part.
    first: usize,
}

impl Groups {
    pub(super) fn of(size: usize) -> Self {
        Self { size: size.max(1), first: 0 }
    }

    /// `count` groups of all of K, and the size of a format's groups that each is made of, the largest that fits.
    pub(super) fn divide(k: usize, count: usize) -> Option<(Self, usize)> {
        let size = k.checked_div(count).filter(|size| *size > 0 && k.is_multiple_of(count))?;
        let smaller =
            QuantFormat::AFFINE_GROUP_SIZES.into_iter().rev().find(|smaller| size % smaller == 0)?;
        Some((Self::of(size), smaller))
    }

    /// Groups that `k` elements touch.
    pub(super) fn count(self, k: usize) -> usize {
        self.first.saturating_add(k).div_ceil(self.size)
    }

    /// The groups that a range of K touches, and what they are to it.
    pub(super) fn narrow(self, range: &Range<usize>) -> (Range<usize>, Self) {
        let (start, end) = (self.first.saturating_add(range.start), self.first.saturating_add(range.end));
        (start / self.size..end.div_ceil(self.size), Self { size: self.size, first: start % self.size })
    }

    /// Repeats the values `[N, groups]` of a part of K for each group of the format.
    pub(super) fn spread(self, values: &Tensor, format: QuantFormat, k: usize) -> Result<Tensor> {
        if self.size == format.group_size() {
            return Ok(values.contiguous()?);
        }
        let group = |index: usize| (self.first + index * format.group_size()) / self.size;
        let groups =
            (0..format.groups_per_row(k)?).map(|index| u32::try_from(group(index)).unwrap_or(u32::MAX));
        let groups = Tensor::from_iter(groups, &Device::Cpu)?;
        Ok(values.contiguous()?.index_select(&groups, 1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_divided_into_the_largest_that_formats_have() {
        for (k, count, size, smaller) in
            [(256, 1, 256, 128), (192, 1, 192, 64), (96, 1, 96, 32), (256, 8, 32, 32), (512, 2, 256, 128)]
        {
            assert_eq!(Groups::divide(k, count), Some((Groups::of(size), smaller)));
        }
        for (k, count) in [(0, 1), (64, 0), (64, 3), (48, 1), (64, 4), (16, 32)] {
            assert_eq!(Groups::divide(k, count), None);
        }
    }

    #[test]
    fn a_part_of_a_part_knows_its_groups() {
        let (range, part) = Groups::of(256).narrow(&(128..640));
        assert_eq!((range, part.count(512)), (0..3, 3));
        let (range, part) = part.narrow(&(256..512));
        assert_eq!((range, part.count(256)), (1..3, 2));
        let format = QuantFormat::affine(4, 128).unwrap();
        let values = Tensor::new(&[[1f32, 2.]], &Device::Cpu).unwrap();
        assert_eq!(part.spread(&values, format, 256).unwrap().to_vec2::<f32>().unwrap(), [[1., 2.]]);
    }
}
