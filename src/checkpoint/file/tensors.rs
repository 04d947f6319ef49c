//! The tensors of one or more files, by name.

use super::stored::StoredTensor;
use rayon::slice::ParallelSliceMut;
use std::ops::Range;
use std::path::Path;

/// Tensors sorted by name, each name once. A header may list a million of them, so that a map would take several times
/// what the header does.
#[derive(Default)]
pub(in crate::checkpoint) struct Tensors(Vec<(Box<str>, StoredTensor)>);

/// Two tensors of one name, and the files that they are in.
pub(super) struct Twice {
    pub name: Box<str>,
    pub files: [Box<Path>; 2],
}

impl Tensors {
    /// The tensors in order of their names. If several have one name, the first two of these, by
    /// their files.
    pub(super) fn new(mut entries: Vec<(Box<str>, StoredTensor)>) -> Result<Self, Twice> {
        entries
            .par_sort_unstable_by(|(a, of_a), (b, of_b)| a.cmp(b).then_with(|| of_a.path().cmp(of_b.path())));
        let twice = entries.windows(2).find_map(|pair| match pair {
            [first, second] if first.0 == second.0 => Some(Twice {
                name: first.0.clone(),
                files: [first, second].map(|(_, tensor)| tensor.path().into()),
            }),
            _ => None,
        });
        twice.map_or(Ok(Self(entries)), Err)
    }

    pub(in crate::checkpoint) fn get(&self, name: &str) -> Option<&StoredTensor> {
        let index = self.0.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
        self.0.get(index).map(|(_, tensor)| tensor)
    }

    pub(in crate::checkpoint) fn contains_key(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(in crate::checkpoint) fn keys(&self) -> impl Iterator<Item = &str> + Clone {
        self.0.iter().map(|(name, _)| &**name)
    }

    pub(in crate::checkpoint) fn iter(&self) -> impl Iterator<Item = (&str, &StoredTensor)> {
        self.0.iter().map(|(name, tensor)| (&**name, tensor))
    }

    /// Names and ranges by where the tensors lie in their file, of which they all are.
    pub(super) fn in_file_order(&self) -> impl Iterator<Item = (&str, &Range<usize>)> {
        let place = |index: &u32| {
            let entry = self.0.get(*index as usize);
            entry.map(|(name, tensor)| (tensor.info().range.start, tensor.info().range.end, name))
        };
        let mut order: Vec<u32> = (0..self.0.len() as u32).collect();
        order.sort_unstable_by(|a, b| place(a).cmp(&place(b)));
        let entry = move |index| self.0.get(index as usize);
        order.into_iter().filter_map(entry).map(|(name, tensor)| (&**name, &tensor.info().range))
    }

    /// Counts all ranges from another place on, which lies so many bytes before. The sums have to fit.
    pub(super) fn move_by(&mut self, bytes: usize) {
        self.0.iter_mut().for_each(|(_, tensor)| tensor.move_by(bytes));
    }

    pub(in crate::checkpoint) fn len(&self) -> usize {
        self.0.len()
    }

    pub(in crate::checkpoint) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl IntoIterator for Tensors {
    type Item = (Box<str>, StoredTensor);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
