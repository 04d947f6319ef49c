//! Tensors that only one side has, unless the other one has them in another layout.

use super::report::Outcome;
use super::values::compare_usual;
use crate::convert::{count_elements, rearranged, Rearranged, UsualTensor};
use crate::source::Source;
use std::collections::BTreeMap;

/// What was found of a tensor, and how many numbers it has.
type Found = (String, (Outcome, u64));

/// The tensors of one side in mlx-lm's layout.
struct Side {
    groups: Vec<Rearranged>,
    /// What can't be read alone, such as codes of which no config tells the width.
    unread: Vec<String>,
}

impl Side {
    fn new(source: &Source, names: Vec<String>) -> Self {
        let (mut tensors, mut unread) = (Vec::new(), Vec::new());
        for name in names {
            match source.tensor(&name) {
                Ok(weight) => tensors.push((name, weight)),
                Err(_) => unread.push(name),
            }
        }
        let names: Vec<_> = tensors.iter().map(|(name, _)| name.clone()).collect();
        let groups = rearranged(source.checkpoint, tensors).unwrap_or_else(|_| {
            unread.extend(names);
            Vec::new()
        });
        Self { groups, unread }
    }

    fn usual(&self) -> BTreeMap<String, &UsualTensor> {
        self.groups.iter().flat_map(|group| &group.usual).map(|tensor| (tensor.name(), tensor)).collect()
    }

    /// The tensors of which no part has a counterpart, and parts that have none of those that have some.
    fn alone(&self, other: &BTreeMap<String, &UsualTensor>, outcome: &Outcome) -> Vec<Found> {
        let unread = |name: &String| (name.clone(), (outcome.clone(), 0));
        let mut found: Vec<_> = self.unread.iter().map(unread).collect();
        for group in &self.groups {
            let alone = || group.usual.iter().filter(|tensor| !other.contains_key(&tensor.name()));
            let each: Vec<(String, u64)> = match alone().count() == group.usual.len() {
                true => group.stored.clone(),
                false => alone().map(|tensor| (tensor.name(), count_elements(tensor.dims()))).collect(),
            };
            found.extend(each.into_iter().map(|(name, elements)| (name, (outcome.clone(), elements))));
        }
        found
    }
}

/// Compares what both sides have in different layouts, and tells what is left.
pub(super) fn compare(a: &Source, only_a: Vec<String>, b: &Source, only_b: Vec<String>) -> Vec<Found> {
    let (a, b) = (Side::new(a, only_a), Side::new(b, only_b));
    let (usual_a, usual_b) = (a.usual(), b.usual());
    let mut found = a.alone(&usual_b, &Outcome::OnlyInA);
    found.extend(b.alone(&usual_a, &Outcome::OnlyInB));
    for (name, of_a) in &usual_a {
        let Some(of_b) = usual_b.get(name) else { continue };
        let outcome = match of_a.dims() == of_b.dims() {
            true => compare_usual(of_a, of_b)
                .unwrap_or_else(|error| Outcome::Unreadable { message: error.to_string() }),
            false => Outcome::Shapes { a: of_a.dims().to_vec(), b: of_b.dims().to_vec() },
        };
        found.push((name.clone(), (outcome, count_elements(of_a.dims()))));
    }
    found
}
