//! What a tensor of the output is made of.

use candle_core::Tensor;
use candle_quant::checkpoint::{DenseTensor, Weight};
use candle_quant::Result;

/// Numbers that lie one after another in a tensor of the output.
#[derive(Clone, Debug)]
pub(in crate::convert) enum SourcePart {
    /// Whole rows of a stored tensor.
    Stored(DenseTensor),
    /// A weight that has to be dequantized.
    Encoded(Weight),
    /// Numbers of a weight in another order.
    Viewed(Weight, View),
}

/// What of a weight is taken, in the order in which it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::convert) enum View {
    /// Rows become columns.
    Transposed,
    /// Every second column from this one on.
    EverySecond(usize),
    /// Both.
    EverySecondTransposed(usize),
    /// One is added to each number.
    PlusOne,
}

impl View {
    /// Whether rows stay rows.
    pub(in crate::convert) fn keeps_rows(self) -> bool {
        matches!(self, Self::EverySecond(_) | Self::PlusOne)
    }

    fn is_half(self) -> bool {
        matches!(self, Self::EverySecond(_) | Self::EverySecondTransposed(_))
    }

    /// What is seen of a matrix.
    pub(in crate::convert) fn of(self, matrix: &Tensor) -> Result<Tensor> {
        let every_second = |first: usize| {
            let columns = matrix.dim(candle_core::D::Minus1)?;
            matrix.reshape(((), columns / 2, 2))?.narrow(2, first, 1)?.squeeze(2)
        };
        let seen = match self {
            Self::Transposed => matrix.t()?,
            Self::EverySecond(first) => every_second(first)?,
            Self::EverySecondTransposed(first) => every_second(first)?.t()?,
            Self::PlusOne => (matrix + 1.)?,
        };
        Ok(seen.contiguous()?)
    }
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

    /// The numbers, if they are dense.
    pub(in crate::convert) fn dense(&self) -> Option<&DenseTensor> {
        match self {
            Self::Stored(dense)
            | Self::Encoded(Weight::Dense(dense))
            | Self::Viewed(Weight::Dense(dense), _) => Some(dense),
            Self::Encoded(_) | Self::Viewed(..) => None,
        }
    }

    /// What it is in the source: `BF16`, `affine 4-bit g64`.
    pub(in crate::convert) fn format_name(&self) -> String {
        match self {
            Self::Stored(dense) => format!("{:?}", dense.dtype()),
            Self::Encoded(weight) | Self::Viewed(weight, _) => weight.format_name(),
        }
    }

    /// Bytes in the source.
    pub(in crate::convert) fn size_in_bytes(&self) -> u64 {
        match self {
            Self::Stored(dense) => dense.size_in_bytes() as u64,
            Self::Encoded(weight) => weight.size_in_bytes() as u64,
            Self::Viewed(weight, view) => weight.size_in_bytes() as u64 / if view.is_half() { 2 } else { 1 },
        }
    }
}

impl SourceTensor {
    pub(in crate::convert) fn whole(name: String, weight: Weight) -> Self {
        Self { name, dims: weight.dims().to_vec(), parts: vec![SourcePart::of(weight)] }
    }
}
