//! What is copied from the source into files of another kind.

use crate::convert::output::OutputTensor;
use crate::convert::recipe::Spec;
use candle_quant::checkpoint::DenseTensor;

/// A weight whose codes and scales are those of the source.
#[derive(Debug)]
pub(in crate::convert) struct Exact {
    /// What it is there.
    pub spec: Spec,
    /// Its tensors: first those that are copied, then what is known already.
    pub outputs: Vec<OutputTensor>,
    /// What the former are copied from.
    pub copied: Vec<DenseTensor>,
}
