//! How the tensors of two checkpoints differ.

use serde::Serialize;
use std::cmp::Ordering;

/// What [`diff`](super::diff) found.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Diff {
    /// Every tensor of either side, worst first; of equally bad ones in natural order.
    pub tensors: Vec<Comparison>,
    /// The share of both sides' numbers that were compared, from 0 to 1. What can't be read is not counted.
    pub compared_share: f64,
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
    pub(super) fn is_one_sided(&self) -> bool {
        matches!(self, Self::OnlyInA | Self::OnlyInB)
    }

    pub(super) fn is_equal(&self, tolerance: f64) -> bool {
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

    pub(super) fn worse_first(&self, other: &Self) -> Ordering {
        let (a, b) = (self.severity(), other.severity());
        let finite_first = b.0.cmp(&a.0).then(b.1.cmp(&a.1));
        finite_first.then(b.2.total_cmp(&a.2)).then(b.3.total_cmp(&a.3))
    }
}
