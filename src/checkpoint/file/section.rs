//! Which bytes of a tensor are wanted: a box of a row-major array.

use std::ops::Range;
use std::sync::Arc;

/// A box of a row-major array: of each dimension, which of its entries.
#[derive(Clone, Debug)]
pub(super) struct Section {
    /// Sizes of the whole array, the last one in bytes.
    sizes: Vec<usize>,
    /// As many as there are sizes, with entries below them.
    picks: Vec<Pick>,
}

/// Entries of one dimension.
#[derive(Clone, Debug)]
enum Pick {
    /// `len` of them from `first` on, every `step`-th.
    Every { first: usize, step: usize, len: usize },
    /// `len` of them from `first` on, where runs of `run` have another order: run `i` is the stored run `order[i]`.
    Ordered { order: Arc<[usize]>, run: usize, first: usize, len: usize },
}

impl Pick {
    fn len(&self) -> usize {
        match self {
            Self::Every { len, .. } | Self::Ordered { len, .. } => *len,
        }
    }

    fn get(&self, index: usize) -> Option<usize> {
        match self {
            Self::Every { first, step, len } => (index < *len).then(|| first + index * step),
            Self::Ordered { order, run, first, len } => {
                let entry = first + index;
                (index < *len).then(|| Some(order.get(entry / run)? * run + entry % run))?
            }
        }
    }

    /// Entries that lie together, in order.
    fn spans(&self) -> Vec<Range<usize>> {
        let mut spans: Vec<Range<usize>> = Vec::new();
        let mut index = 0;
        while let Some(entry) = self.get(index) {
            let together = match self {
                Self::Every { step: 1, len, .. } => *len,
                Self::Every { .. } => 1,
                Self::Ordered { run, first, len, .. } => (run - (first + index) % run).min(len - index),
            };
            index += together;
            match spans.last_mut() {
                Some(last) if last.end == entry => last.end += together,
                _ => spans.push(entry..entry + together),
            }
        }
        spans
    }

    fn narrow(&self, range: &Range<usize>) -> Option<Self> {
        if range.start >= range.end || range.end > self.len() {
            return None;
        }
        Some(match self {
            Self::Every { first, step, .. } => {
                Self::Every { first: first + range.start * step, step: *step, len: range.len() }
            }
            Self::Ordered { order, run, first, .. } => Self::Ordered {
                order: Arc::clone(order),
                run: *run,
                first: first + range.start,
                len: range.len(),
            },
        })
    }
}

impl Section {
    /// All of an array; `None` if its size is not `bytes`.
    pub fn whole(sizes: &[usize], bytes: usize) -> Option<Self> {
        let product = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
        let picks = sizes.iter().map(|&len| Pick::Every { first: 0, step: 1, len }).collect();
        (product == bytes).then(|| Self { sizes: sizes.to_vec(), picks })
    }

    /// Sizes of the box, the last one in bytes.
    pub fn dims(&self) -> Vec<usize> {
        self.picks.iter().map(Pick::len).collect()
    }

    pub fn size_in_bytes(&self) -> usize {
        self.picks.iter().map(Pick::len).product()
    }

    /// Part of a box of `sizes` along one dimension; `None` if it has other sizes, or none of that range. The
    /// last size may be the product of the box's last two.
    pub fn narrow(mut self, sizes: &[usize], dim: usize, range: &Range<usize>) -> Option<Self> {
        let dims = self.dims();
        let range = match dims.as_slice() {
            dims if dims == sizes => range.clone(),
            [outer @ .., rows, row] if *row > 0 && *sizes == [outer, &[rows * row]].concat() => {
                match (dim == outer.len(), [range.start, range.end].map(|end| end.is_multiple_of(*row))) {
                    (true, [true, true]) => range.start / row..range.end / row,
                    (true, _) => return None,
                    (false, _) => range.clone(),
                }
            }
            _ => return None,
        };
        let pick = self.picks.get_mut(dim)?;
        *pick = pick.narrow(&range)?;
        Some(self)
    }

    /// A whole array with every `step`-th entry of one dimension, from `first` on; `None` if there are none.
    pub fn every(mut self, dim: usize, first: usize, step: usize) -> Option<Self> {
        let size = *self.sizes.get(dim)?;
        let len = size.checked_sub(first)?.div_ceil(step.max(1));
        *self.picks.get_mut(dim)? = Pick::Every { first, step, len };
        (len > 0).then_some(self)
    }

    /// A whole array with other entries of one dimension, which come in runs of `run`: run `i` is the stored run `order[i]`.
    pub fn reordered(mut self, dim: usize, order: &Arc<[usize]>, run: usize) -> Option<Self> {
        let runs = self.sizes.get(dim)?.checked_div(run)?;
        let len = order.len().checked_mul(run)?;
        *self.picks.get_mut(dim)? = Pick::Ordered { order: Arc::clone(order), run, first: 0, len };
        order.iter().all(|entry| *entry < runs).then_some(self)
    }

    /// The bytes of the box in order, in runs that lie together.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let is_full = |(size, pick): (&usize, &Pick)| matches!(pick, Pick::Every { len, .. } if len == size);
        let full = self.sizes.iter().zip(&self.picks).rev().take_while(|pair| is_full(*pair)).count();
        // One dimension is cut inside the runs; those before it are counted through.
        let outer = self.sizes.len().saturating_sub(full);
        let row: usize = self.sizes.iter().skip(outer).product();
        let outer = self.sizes.iter().zip(&self.picks).take(outer);
        let (stride, spans) = match outer.clone().next_back() {
            Some((size, pick)) => (row.saturating_mul(*size), pick.spans()),
            None => (row, std::iter::once(0..1).collect()),
        };
        let before = outer.len().saturating_sub(1);
        let outer = outer.take(before);
        let count = outer.clone().map(|(_, pick)| pick.len()).product::<usize>();
        (0..count.saturating_mul(spans.len())).filter_map(move |index| {
            let span = spans.get(index % spans.len())?;
            let (mut rest, mut stride, mut start) = (index / spans.len(), stride, span.start * row);
            for (size, pick) in outer.clone().rev() {
                start += pick.get(rest % pick.len())? * stride;
                rest /= pick.len();
                stride *= size;
            }
            Some(start..start + span.len() * row)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each byte says where it lies.
    fn bytes(section: &Section) -> Vec<usize> {
        let bytes: Vec<_> = section.runs().flatten().collect();
        assert_eq!(bytes.len(), section.size_in_bytes());
        bytes
    }

    #[test]
    fn boxes_have_the_bytes_of_nested_loops() {
        let sizes = [3usize, 4, 5];
        for (a, b, c) in [(0..3, 0..4, 0..5), (1..2, 0..4, 0..5), (0..3, 1..3, 0..5), (1..3, 1..4, 2..5)] {
            let mut section = Section::whole(&sizes, 60).unwrap();
            for (dim, range) in [(0, &a), (1, &b), (2, &c)] {
                let dims = section.dims();
                section = section.narrow(&dims, dim, range).unwrap();
            }
            let at = |i: usize, j: usize| (c.clone()).map(move |k| (i * 4 + j) * 5 + k);
            let expected = a.clone().flat_map(|i| b.clone().flat_map(move |j| [(i, j)]));
            let expected: Vec<_> = expected.flat_map(|(i, j)| at(i, j)).collect();
            assert_eq!(bytes(&section), expected, "{a:?} {b:?} {c:?}");
        }
    }

    #[test]
    fn parts_of_parts_count_from_their_own_start() {
        let whole = Section::whole(&[10, 2], 20).unwrap();
        let part = whole.narrow(&[10, 2], 0, &(3..9)).unwrap().narrow(&[6, 2], 0, &(1..3)).unwrap();
        assert_eq!(part.runs().collect::<Vec<_>>(), [Range { start: 8, end: 12 }]);
        assert_eq!(part.dims(), [2, 2]);
    }

    #[test]
    fn rows_in_another_order_are_cut_in_that_order() {
        let whole = Section::whole(&[4, 3], 12).unwrap();
        let swapped = whole.reordered(0, &[2, 0, 3, 1].into(), 1).unwrap();
        assert_eq!(bytes(&swapped), [6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5]);
        let rows = swapped.clone().narrow(&[4, 3], 0, &(1..3)).unwrap();
        assert_eq!(bytes(&rows), [0, 1, 2, 9, 10, 11]);
        assert_eq!(bytes(&rows.narrow(&[2, 3], 1, &(1..2)).unwrap()), [1, 10]);
        assert!(Section::whole(&[4, 3], 12).unwrap().reordered(0, &[4].into(), 1).is_none());
    }

    #[test]
    fn runs_of_columns_in_another_order_are_cut_anywhere() {
        let turned = Section::whole(&[2, 6], 12).unwrap().reordered(1, &[2, 0, 1].into(), 2).unwrap();
        assert_eq!(bytes(&turned), [4, 5, 0, 1, 2, 3, 10, 11, 6, 7, 8, 9]);
        assert_eq!(turned.runs().count(), 4);
        let cut = turned.clone().narrow(&[2, 6], 1, &(1..4)).unwrap();
        assert_eq!(bytes(&cut), [5, 0, 1, 11, 6, 7]);
        assert_eq!(bytes(&cut.narrow(&[2, 3], 0, &(1..2)).unwrap()), [11, 6, 7]);
        let whole = || Section::whole(&[2, 6], 12).unwrap();
        assert!(whole().reordered(1, &[3].into(), 2).is_none());
        assert!(
            whole().reordered(1, &[0].into(), 0).is_none() && whole().reordered(2, &[0].into(), 1).is_none()
        );
    }

    #[test]
    fn every_second_row_of_every_matrix() {
        let odd = Section::whole(&[2, 4, 3], 24).unwrap().every(1, 1, 2).unwrap();
        assert_eq!(bytes(&odd), [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]);
        assert_eq!(bytes(&odd.clone().narrow(&[2, 2, 3], 1, &(1..2)).unwrap()), [9, 10, 11, 21, 22, 23]);
        // The rows as elements of three bytes each.
        assert_eq!(bytes(&odd.clone().narrow(&[2, 6], 1, &(3..6)).unwrap()), [9, 10, 11, 21, 22, 23]);
        assert_eq!(bytes(&odd.clone().narrow(&[2, 6], 0, &(1..2)).unwrap()), [15, 16, 17, 21, 22, 23]);
        assert!(odd.narrow(&[2, 6], 1, &(2..6)).is_none());
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert!(Section::whole(&[4, 3], 11).is_none());
        assert!(Section::whole(&[usize::MAX, 3], 3).is_none());
        let whole = Section::whole(&[4, 3], 12).unwrap();
        assert!(whole.clone().narrow(&[3, 4], 0, &(0..1)).is_none());
        assert!(whole.clone().narrow(&[4, 3], 0, &(3..5)).is_none());
        assert!(whole.clone().narrow(&[4, 3], 2, &(0..1)).is_none());
        assert!(whole.narrow(&[4, 3], 0, &(2..2)).is_none());
    }
}
