//! Parts of weights.

use super::{narrow, VarBuilder};
use crate::checkpoint::{tensor_of, Weight};
use crate::nn::dequantizing::shape_error;
use crate::nn::loaded::LoadedAs;
use crate::nn::LayerWeight;
use candle_core::{Result, Tensor};
use std::ops::Range;

impl VarBuilder<'_> {
    /// Part of the weight at the current path, of logical shape `[n, k]`: rows and columns.
    pub(crate) fn part(&self, (n, k): (usize, usize), part: &[Range<usize>; 2]) -> Result<LayerWeight> {
        match self.stored_part(&[n, k], part)? {
            Some(weight) => self.load(&weight),
            None => self.quantized(self.tensor_part(&[n, k], "weight", part)?, part[1].len()),
        }
    }

    /// Part of the weight at the current path, as [`stored_weight`](VarBuilder::stored_weight): of each of `dims` a
    /// range.
    pub(in crate::nn) fn stored_part(&self, dims: &[usize], part: &[Range<usize>]) -> Result<Option<Weight>> {
        let stored = self.stored_weight(dims)?;
        Ok(stored.map(|weight| narrow(weight, part)).transpose()?)
    }

    /// Part of the dense tensor `name` at the current path, of shape `dims`: of each dimension a range.
    pub fn tensor_part(&self, dims: &[usize], name: &str, part: &[Range<usize>]) -> Result<Tensor> {
        let is_whole = dims.iter().zip(part).all(|(&size, range)| *range == (0..size));
        let Some(checkpoint) = self.checkpoint.as_ref().filter(|_| !is_whole) else {
            let narrow = |tensor: Tensor, (dim, range): (usize, &Range<usize>)| {
                tensor.narrow(dim, range.start, range.len())
            };
            return part.iter().enumerate().try_fold(self.get(dims, name)?, narrow)?.contiguous();
        };
        let name = tensor_of(&self.prefix(), name);
        let stored = checkpoint.dense(&name)?;
        if stored.dims() != dims {
            return Err(shape_error(checkpoint, &name, dims, stored.dims()));
        }
        Ok(narrow(Weight::Dense(stored), part)?.to_dense(self.dtype(), self.device())?)
    }

    /// Part of the weight at the current path, of shape `dims`, as a dense tensor: of each dimension a range. For weights that
    /// a model multiplies by in ways that a packed one is not made for.
    ///
    /// # Errors
    /// If it is missing or damaged, or has another shape.
    pub fn decoded_part(&self, dims: &[usize], part: &[Range<usize>]) -> Result<Tensor> {
        match self.stored_part(dims, part)? {
            Some(weight) => {
                self.loaded.add(&self.prefix(), LoadedAs::Dense);
                Ok(weight.to_dense(self.dtype(), self.device())?)
            }
            None => self.tensor_part(dims, "weight", part),
        }
    }

    /// Elements along K of the weight at the current path, of logical shape `dims`, that a part keeps together.
    pub fn granularity(&self, dims: &[usize]) -> Result<usize> {
        let k = dims.last().copied().unwrap_or(0);
        let stored = self.stored_weight(dims)?;
        Ok(match (stored, self.format(k)) {
            (None | Some(Weight::Dense(_)), Some(format)) => format.group_size(),
            (Some(weight), _) => weight.granularity(),
            (None, None) => 1,
        })
    }
}
