//! What a tensor of the output is made of.

use candle_quant::checkpoint::{DenseTensor, Weight};

/// Numbers that lie one after another in a tensor of the output.
#[derive(Clone, Debug)]
pub(in crate::convert) enum SourcePart {
    /// Whole rows of a stored tensor.
    Stored(DenseTensor),
    /// A weight that has to be dequantized.
    Encoded(Weight),
}

/// A tensor of the output before it is decided what it becomes.
#[derive(Clone, Debug)]
pub(in crate::convert) struct SourceTensor {
    pub name: String,
    pub dims: Vec<usize>,
    pub parts: Vec<SourcePart>,
}

impl SourcePart {
    pub(in crate::convert) fn of(weight: Weight) -> Self {
        match &weight {
            Weight::Dense(dense) if dense.is_stored() => Self::Stored(dense.clone()),
            Weight::Packed(_) | Weight::Ggml(_) | Weight::Dense(_) | _ => Self::Encoded(weight),
        }
    }
}

impl SourceTensor {
    pub(in crate::convert) fn whole(name: String, weight: Weight) -> Self {
        Self { name, dims: weight.dims().to_vec(), parts: vec![SourcePart::of(weight)] }
    }
}
