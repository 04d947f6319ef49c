//! Weights made of others: a matrix of a stack, rows one after another, a stack of matrices.

use crate::checkpoint::weight::{
    DenseTensor, Dequantize, GgmlBlocks, GgmlWeight, Layout, MlxForm, PackedWeight, Slice, Weight,
};
use crate::{Error, QuantTensor, Result};
use candle_core::{Device, Tensor};
use std::path::Path;
use std::sync::Arc;

/// How to go on if weights can't be made one.
pub(super) const REMEDY: &str = "ask for the parts by their own names, or quantize them alike";

/// A weight made of others, which have one format.
#[derive(Clone, Debug)]
pub(super) struct Composed {
    pub how: How,
    /// Its full name and the file of the first part, for errors.
    pub name: String,
    pub file: Arc<Path>,
}

/// How weights become one.
#[derive(Clone, Debug)]
pub(super) enum How {
    /// The only matrix of a stack of one.
    Matrix(Box<Weight>),
    /// One after another along dimension `dim`, that of the rows.
    Joined { parts: Vec<Weight>, dim: usize },
    /// Each a matrix of a stack.
    Stacked(Vec<Weight>),
}

impl How {
    fn parts(&self) -> &[Weight] {
        match self {
            Self::Matrix(stack) => std::slice::from_ref(&**stack),
            Self::Joined { parts, .. } | Self::Stacked(parts) => parts,
        }
    }

    fn dims(&self) -> Vec<usize> {
        let of_first = self.parts().first().map_or(&[][..], Weight::dims);
        match self {
            Self::Matrix(_) => of_first.get(1..).unwrap_or_default().to_vec(),
            Self::Joined { parts, dim } => {
                let mut dims = of_first.to_vec();
                let rows = parts.iter().filter_map(|part| part.dims().get(*dim));
                let rows = rows.fold(0usize, |sum, rows| sum.saturating_add(*rows));
                if let Some(joined) = dims.get_mut(*dim) {
                    *joined = rows;
                }
                dims
            }
            Self::Stacked(parts) => [&[parts.len()], of_first].concat(),
        }
    }

    fn narrow(&self, slice: &Slice) -> Result<Self> {
        let (dim, range) = (slice.dim, &slice.range);
        let each = |parts: &[Weight], dim: usize| {
            parts.iter().map(|part| part.narrow(dim, range.clone())).collect::<Result<Vec<_>>>()
        };
        Ok(match self {
            Self::Matrix(stack) => Self::Matrix(Box::new(stack.narrow(dim + 1, range.clone())?)),
            Self::Joined { parts, dim: rows } if dim == *rows => {
                let (mut start, mut cut) = (0, Vec::new());
                for part in parts {
                    let end = start + part.dims().get(dim).copied().unwrap_or(0);
                    let own = range.start.max(start)..range.end.min(end);
                    if !own.is_empty() {
                        cut.push(part.narrow(dim, own.start - start..own.end - start)?);
                    }
                    start = end;
                }
                Self::Joined { parts: cut, dim }
            }
            Self::Joined { parts, dim: rows } => Self::Joined { parts: each(parts, dim)?, dim: *rows },
            Self::Stacked(parts) => match dim.checked_sub(1) {
                None => Self::Stacked(parts.get(range.clone()).unwrap_or_default().to_vec()),
                Some(dim) => Self::Stacked(each(parts, dim)?),
            },
        })
    }
}

impl Composed {
    /// The weight of a module, in the format of its parts.
    pub fn into_weight(self, module: &str) -> Result<Weight> {
        let dims = self.how.dims();
        Ok(match self.how.parts().first() {
            Some(Weight::Packed(first)) => {
                Weight::Packed(PackedWeight::new(module, first.format(), dims, self.clone()))
            }
            Some(Weight::Ggml(first)) => {
                Weight::Ggml(GgmlWeight::composed(module, first.dtype(), dims, self.clone()))
            }
            Some(Weight::Dense(first)) => {
                let (name, dtype) = (self.name.clone(), first.dtype());
                Weight::Dense(DenseTensor::dequantized(&name, dtype, dims, self.clone()))
            }
            Some(Weight::Irregular(_)) => {
                return Err(Error::tensor(
                    &self.file,
                    &self.name,
                    "weights whose columns are in order, of which one can be made",
                    "weights with an order of columns each (desc_act, actorder)",
                    "load them one by one, or use another quantization of the model",
                ))
            }
            None => return Err(self.not_alike("none")),
        })
    }

    fn not_alike(&self, found: impl Into<String>) -> Error {
        Error::tensor(&self.file, &self.name, "parts that make one weight", found, REMEDY)
    }

    fn size_in_bytes(&self) -> usize {
        self.how.parts().iter().map(Weight::size_in_bytes).sum()
    }

    fn granularity(&self) -> usize {
        self.how.parts().iter().map(Weight::granularity).max().unwrap_or(1)
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { how: self.how.narrow(slice)?, ..self.clone() }))
    }
}

impl Layout for Composed {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let load = |part: &Weight| match part {
            Weight::Packed(packed) => packed.load(device),
            Weight::Irregular(_) | Weight::Ggml(_) | Weight::Dense(_) => {
                Err(self.not_alike(part.format_name()))
            }
        };
        let parts = self.how.parts().iter().map(load).collect::<Result<Vec<_>>>()?;
        let parts: Vec<_> = parts.iter().collect();
        let composed = match (&self.how, parts.as_slice()) {
            (How::Matrix(_), [stack, ..]) => stack.matrix(0),
            (How::Stacked(_), parts) => QuantTensor::stack(parts),
            (_, parts) => QuantTensor::concat(parts),
        };
        // Scales may have another dtype, and global scales another value.
        composed.map_err(|error| self.not_alike(error.to_string()))
    }

    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(MlxForm::Impossible(" that is put together from stored ones"))
    }

    fn granularity(&self) -> usize {
        self.granularity()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        Ok(self.narrow(slice)?)
    }
}

impl Dequantize for Composed {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let load = |part: &Weight| match part {
            Weight::Dense(dense) => dense.load(dense.dtype(), device),
            Weight::Ggml(_) | Weight::Packed(_) | Weight::Irregular(_) => {
                Err(self.not_alike(part.format_name()))
            }
        };
        let parts = self.how.parts().iter().map(load).collect::<Result<Vec<_>>>()?;
        Ok(match (&self.how, parts.as_slice()) {
            (How::Matrix(_), [stack, ..]) => stack.squeeze(0)?,
            (How::Joined { dim, .. }, parts) => Tensor::cat(parts, *dim)?,
            (_, parts) => Tensor::stack(parts, 0)?,
        })
    }

    fn granularity(&self) -> usize {
        self.granularity()
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        Ok(Some(self.narrow(slice)?))
    }
}

impl GgmlBlocks for Composed {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn for_each_chunk(&self, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut hand_over = |part: &Weight| match part {
            Weight::Ggml(blocks) => blocks.for_each_chunk(take),
            Weight::Packed(_) | Weight::Irregular(_) | Weight::Dense(_) => {
                Err(self.not_alike(part.format_name()))
            }
        };
        match &self.how {
            // Of each matrix the rows of all parts.
            How::Joined { parts, dim: 1 } => {
                let matrices = parts.first().and_then(|part| part.dims().first()).copied().unwrap_or(0);
                for matrix in 0..matrices {
                    for part in parts {
                        hand_over(&part.narrow(0, matrix..matrix + 1)?)?;
                    }
                }
                Ok(())
            }
            how @ (How::Matrix(_) | How::Joined { .. } | How::Stacked(_)) => {
                how.parts().iter().try_for_each(hand_over)
            }
        }
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn GgmlBlocks>> {
        Ok(self.narrow(slice)?)
    }
}
