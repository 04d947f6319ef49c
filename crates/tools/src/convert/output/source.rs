//! What a tensor of the output is made of.

use crate::chunks::Chunks;
use candle_core::{DType, Tensor};
use candle_quant::checkpoint::{DenseTensor, Weight};
use candle_quant::Result;

/// Numbers that lie one after another in a tensor of the output.
#[derive(Clone, Debug)]
pub(in crate::convert) enum SourcePart {
    /// Whole rows of a stored tensor.
    Stored(DenseTensor),
    /// A weight that has to be dequantized.
    Encoded(Weight),
    /// Numbers of weights in another order: the rows of all one after another are one matrix.
    Viewed(Vec<Weight>, View),
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
    /// Rows become columns, those of the first half and of the second in turn.
    AlternatingColumns,
    /// Rows of the first half and of the second in turn.
    AlternatingRows,
    /// The numbers of all rows in turn make one row.
    OneRow,
    /// One is added to each number.
    PlusOne,
    /// One is subtracted from each number.
    LessOne,
    /// Columns in runs of `size`, the first of each of `keys` groups, then the second of each and so on, get the order of one
    /// group after another.
    OfTiles { keys: usize, size: usize },
}

impl View {
    /// Whether rows stay rows.
    pub(in crate::convert) fn keeps_rows(self) -> bool {
        matches!(self, Self::EverySecond(_) | Self::PlusOne | Self::LessOne)
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
            Self::AlternatingColumns => {
                let (rows, columns) = matrix.dims2()?;
                matrix.reshape((2, rows / 2, columns))?.permute((2, 1, 0))?.reshape((columns, rows))?
            }
            Self::AlternatingRows => {
                let columns = matrix.dim(1)?;
                matrix.reshape((2, (), columns))?.transpose(0, 1)?.reshape(((), columns))?
            }
            Self::OneRow => matrix.t()?.reshape((1, ()))?,
            // The sum is rounded once, to what it becomes.
            Self::PlusOne => (matrix.to_dtype(DType::F32)? + 1.)?,
            Self::OfTiles { keys, size } => {
                let rows = matrix.dim(0)?;
                matrix.reshape((rows, (), keys, size))?.transpose(1, 2)?.reshape((rows, ()))?
            }
            // The sum was rounded once already.
            Self::LessOne => (matrix.to_dtype(DType::F32)? - 1.)?,
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
            Self::Stored(dense) | Self::Encoded(Weight::Dense(dense)) => Some(dense),
            Self::Viewed(weights, _) => match weights.first() {
                Some(Weight::Dense(dense)) => Some(dense),
                Some(_) | None => None,
            },
            Self::Encoded(_) => None,
        }
    }

    /// What it is in the source: `BF16`, `affine 4-bit g64`.
    pub(in crate::convert) fn format_name(&self) -> String {
        match self {
            Self::Stored(dense) => format!("{:?}", dense.dtype()),
            Self::Encoded(weight) => weight.format_name(),
            Self::Viewed(weights, _) => weights.first().map(Weight::format_name).unwrap_or_default(),
        }
    }

    /// The numbers, not dequantized as long as they are in their order.
    pub(in crate::convert) fn load(&self) -> Result<Chunks> {
        match self {
            Self::Stored(dense) => Chunks::load(&Weight::Dense(dense.clone())),
            Self::Encoded(weight) => Chunks::load(weight),
            Self::Viewed(weights, view) => Chunks::viewed(weights, |matrix| view.of(matrix)),
        }
    }

    /// Bytes in the source.
    pub(in crate::convert) fn size_in_bytes(&self) -> u64 {
        match self {
            Self::Stored(dense) => dense.size_in_bytes() as u64,
            Self::Encoded(weight) => weight.size_in_bytes() as u64,
            Self::Viewed(weights, view) => {
                let bytes: u64 = weights.iter().map(|weight| weight.size_in_bytes() as u64).sum();
                bytes / if view.is_half() { 2 } else { 1 }
            }
        }
    }
}

impl SourceTensor {
    pub(in crate::convert) fn whole(name: String, weight: Weight) -> Self {
        Self { name, dims: weight.dims().to_vec(), parts: vec![SourcePart::of(weight)] }
    }
}
