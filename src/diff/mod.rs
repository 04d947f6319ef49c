//! Compares two checkpoints, number by number.
//!
//! Both sides may be of any kind: an original and its quantized form, two conversions of one model, a
//! checkpoint and a safetensors file of dense tensors. Packed weights are decoded to f32, as they are for
//! products; differences are computed in f64.
//!
//! ```
//! use candle_quant::{diff, Checkpoint};
//!
//! let original = Checkpoint::open("assets/tiny-bf16")?;
//! let packed = Checkpoint::open("assets/tiny")?;
//! let diff = diff::diff(&original, &packed, &diff::DiffOptions::default());
//! assert!(!diff.equal());
//! // Worst first: a 4-bit weight.
//! let diff::Outcome::Values { relative_rms, .. } = diff.tensors[0].outcome else { unreachable!() };
//! assert!(relative_rms > 0.05 && relative_rms < 0.15);
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! # Numbers that are not finite
//! Two NaN are equal, and so are two infinities of one sign. Any other pair with a NaN or an infinity in it is
//! unequal, whatever the tolerance; such pairs are counted, and left out of the two distances.

mod values;

use crate::checkpoint::{natural_order, Checkpoint, Weight};
use crate::source::Source;
use crate::Result;
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// What counts as different.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiffOptions {
    /// The relative RMS up to which the numbers of a tensor count as equal; 0 for equal numbers only.
    pub tolerance: f64,
    /// Whether tensors that one side has and the other has not are left out.
    pub common: bool,
}

/// What [`diff`] found.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Diff {
    /// Every tensor of either side, worst first; of equally bad ones in natural order.
    pub tensors: Vec<Comparison>,
}

/// One tensor on both sides.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Comparison {
    /// Its name; a quantized weight is one tensor.
    pub name: String,
    /// Whether it counts as equal.
    pub equal: bool,
    /// What was found.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// How a tensor differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// One side can't be read.
    Unreadable {
        /// Why.
        message: String,
    },
    /// Only the first checkpoint has it.
    OnlyInA,
    /// Only the second checkpoint has it.
    OnlyInB,
    /// The shapes differ.
    Shapes {
        /// The shape in the first checkpoint.
        a: Vec<usize>,
        /// The shape in the second checkpoint.
        b: Vec<usize>,
    },
    /// The shapes are equal, and the numbers were compared.
    Values {
        /// Root of the mean square of the difference, over that of the first checkpoint's numbers. 0 if all
        /// are equal; infinite (in JSON null) if they are not and the first checkpoint's are all zero.
        relative_rms: f64,
        /// The largest absolute difference.
        max_abs: f64,
        /// Unequal pairs with a NaN or an infinity in them.
        not_finite: usize,
        /// The format in the first checkpoint.
        a: String,
        /// The format in the second checkpoint.
        b: String,
    },
}

impl Diff {
    /// Whether all tensors count as equal.
    pub fn equal(&self) -> bool {
        self.tensors.iter().all(|tensor| tensor.equal)
    }

    /// Whether both sides of all tensors could be read.
    pub fn readable(&self) -> bool {
        !self.tensors.iter().any(|tensor| matches!(tensor.outcome, Outcome::Unreadable { .. }))
    }
}

impl Outcome {
    fn is_equal(&self, tolerance: f64) -> bool {
        match self {
            Self::Values { relative_rms, max_abs, not_finite: 0, .. } => {
                *max_abs == 0. || (tolerance > 0. && *relative_rms <= tolerance)
            }
            _ => false,
        }
    }

    /// Unreadable, on one side only, of another shape, then by how far the numbers are apart.
    fn severity(&self) -> (u8, usize, f64, f64) {
        match self {
            Self::Unreadable { .. } => (3, 0, 0., 0.),
            Self::OnlyInA | Self::OnlyInB => (2, 0, 0., 0.),
            Self::Shapes { .. } => (1, 0, 0., 0.),
            Self::Values { relative_rms, max_abs, not_finite, .. } => {
                (0, *not_finite, *relative_rms, *max_abs)
            }
        }
    }

    fn worse_first(&self, other: &Self) -> Ordering {
        let (a, b) = (self.severity(), other.severity());
        let finite_first = b.0.cmp(&a.0).then(b.1.cmp(&a.1));
        finite_first.then(b.2.total_cmp(&a.2)).then(b.3.total_cmp(&a.3))
    }
}

/// Compares all tensors of two checkpoints.
///
/// Where a format has more than one reading, K is that of the config's model (of either side), else that of
/// the same tensor on the other side.
pub fn diff(a: &Checkpoint, b: &Checkpoint, options: &DiffOptions) -> Diff {
    let (a, b) = (Source::new(a), Source::new(b));
    let names: BTreeSet<&str> = a.checkpoint.tensor_names().chain(b.checkpoint.tensor_names()).collect();
    let compare = |name: &str| {
        let outcome = match (a.checkpoint.contains(name), b.checkpoint.contains(name)) {
            (true, true) => compare(&a, &b, name),
            _ if options.common => return None,
            (true, false) => Outcome::OnlyInA,
            _ => Outcome::OnlyInB,
        };
        Some(Comparison { name: name.to_owned(), equal: outcome.is_equal(options.tolerance), outcome })
    };
    let mut tensors: Vec<_> = names.into_iter().filter_map(compare).collect();
    tensors.sort_by(|a, b| a.outcome.worse_first(&b.outcome).then_with(|| natural_order(&a.name, &b.name)));
    Diff { tensors }
}

fn compare(a: &Source, b: &Source, name: &str) -> Outcome {
    let unreadable = |error: crate::Error| Outcome::Unreadable { message: error.to_string() };
    let (a, b) = match pair(a, b, name) {
        Ok(weights) => weights,
        Err(error) => return unreadable(error),
    };
    if a.dims() != b.dims() {
        return Outcome::Shapes { a: a.dims().to_vec(), b: b.dims().to_vec() };
    }
    values::compare(&a, &b).unwrap_or_else(unreadable)
}

/// The same tensor of both checkpoints.
fn pair(a: &Source, b: &Source, name: &str) -> Result<(Weight, Weight)> {
    let in_features =
        |own: &Source, other: &Source| own.in_features(name).or_else(|| other.in_features(name));
    let (k_of_a, k_of_b) = (in_features(a, b), in_features(b, a));
    let first = a.checkpoint.tensor(name, k_of_a);
    let second = b.checkpoint.tensor(name, k_of_b);
    if let (Ok(first), Ok(second)) = (&first, &second) {
        if first.dims() == second.dims() {
            return Ok((first.clone(), second.clone()));
        }
    }
    // What no config decides, the other side may.
    let with_k_of = |side: &Source, known: Option<usize>, other: &Result<Weight>| match (known, other) {
        (None, Ok(other)) => side.checkpoint.tensor(name, other.dims().last().copied()).ok(),
        _ => None,
    };
    let same_dims =
        |one: &Weight, other: &Result<Weight>| other.as_ref().is_ok_and(|other| one.dims() == other.dims());
    if let Some(reread) = with_k_of(a, k_of_a, &second).filter(|reread| same_dims(reread, &second)) {
        return Ok((reread, second?));
    }
    if let Some(reread) = with_k_of(b, k_of_b, &first).filter(|reread| same_dims(reread, &first)) {
        return Ok((first?, reread));
    }
    Ok((first?, second?))
}
