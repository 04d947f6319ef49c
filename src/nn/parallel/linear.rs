//! Linear layers of which every rank has some outputs (column-parallel) or some inputs (row-parallel).

use crate::distributed::partition::whole_groups;
use crate::distributed::Rank;
use crate::nn::adapters::OwnColumns;
use crate::nn::{forward_add, linear_b, LayerWeight, Linear, VarBuilder};
use candle_core::{bail, Result, Tensor, D};
use candle_nn::Module;
use std::ops::Range;

/// The part of a linear layer that computes the outputs `rows`, from the tensors `weight` `[out_dim, in_dim]` and,
/// if `bias`, `bias`.
///
/// # Errors
/// If a tensor is missing, damaged, or of another shape; if there are no such rows.
pub fn column_parallel(
    in_dim: usize,
    out_dim: usize,
    rows: Range<usize>,
    bias: bool,
    vb: VarBuilder,
) -> Result<Linear> {
    let part = [rows.clone(), 0..in_dim];
    let weight = vb.part((out_dim, in_dim), &part)?;
    let bias = bias.then(|| vb.tensor_part(&[out_dim], "bias", &[rows])).transpose()?;
    Ok(Linear::new(weight, bias).of_module(&vb, [out_dim, in_dim], &part, None))
}

/// A linear layer of which every rank has other inputs. The ranks' partial outputs are summed, then the bias is added.
#[derive(Clone, Debug)]
pub struct RowParallel {
    /// With the bias, if the layer is whole.
    linear: Linear,
    sum: Option<Sum>,
}

/// What makes an output of the partial outputs of ranks: they are summed, then a bias is added.
#[derive(Clone, Copy, Debug)]
pub struct PartialSum<'a> {
    /// This rank.
    pub rank: &'a Rank,
    /// The same on all ranks.
    pub bias: Option<&'a Tensor>,
}

/// What is left to do after a partial output.
#[derive(Clone, Debug)]
struct Sum {
    rank: Rank,
    bias: Option<Tensor>,
    /// Elements before and after the inputs, of groups that begin or end in another rank's inputs.
    padding: (usize, usize),
}

/// The part of a linear layer with the inputs `columns`, from the tensors `weight` `[out_dim, in_dim]` and, if
/// `bias`, `bias`; the whole layer, of which nothing is summed, if these are all inputs.
///
/// Where a group or block of the weight belongs to the inputs of two ranks, both load it.
///
/// # Errors
/// If a tensor is missing, damaged, or of another shape; if there are no such inputs, or only some of them and
/// the builder knows no other ranks.
pub fn row_parallel(
    in_dim: usize,
    out_dim: usize,
    columns: Range<usize>,
    bias: bool,
    vb: VarBuilder,
) -> Result<RowParallel> {
    if columns == (0..in_dim) {
        return Ok(RowParallel { linear: linear_b(in_dim, out_dim, bias, vb)?, sum: None });
    }
    let bias = bias.then(|| vb.get(out_dim, "bias")).transpose()?;
    let Some(rank) = vb.rank().cloned() else {
        bail!("inputs {columns:?} of {in_dim}: a builder for one rank of several is needed");
    };
    let loaded = whole_groups(&columns, vb.granularity(&[out_dim, in_dim])?, in_dim);
    let padding = match (columns.start.checked_sub(loaded.start), loaded.end.checked_sub(columns.end)) {
        (Some(before), Some(after)) => (before, after),
        _ => bail!("inputs {columns:?}: expected some of {in_dim}"),
    };
    let part = [0..out_dim, loaded];
    let linear = Linear::new(vb.part((out_dim, in_dim), &part)?, None);
    let own = OwnColumns { rank: rank.clone(), own: padding.0..padding.0 + columns.len() };
    let linear = linear.of_module(&vb, [out_dim, in_dim], &part, Some(own));
    Ok(RowParallel { linear, sum: Some(Sum { rank, bias, padding }) })
}

impl RowParallel {
    /// `residual + layer(x)`, where `x` `[.., columns]` are this rank's inputs.
    ///
    /// # Errors
    /// If shapes do not fit, or another rank fails.
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        match &self.sum {
            None => forward_add(&self.linear, x, residual),
            Some(_) => residual + self.forward(x)?,
        }
    }

    /// This rank's part of the weight.
    pub fn weight(&self) -> &LayerWeight {
        self.linear.weight()
    }

    /// The layer, or this rank's part of it and what is left to do after that; none if a group of the weight begins or ends in another
    /// rank's inputs, for which this rank has zeros.
    pub fn part(&self) -> Option<(&Linear, Option<PartialSum<'_>>)> {
        match &self.sum {
            None => Some((&self.linear, None)),
            Some(Sum { rank, bias, padding: (0, 0) }) => {
                Some((&self.linear, Some(PartialSum { rank, bias: bias.as_ref() })))
            }
            Some(_) => None,
        }
    }
}

impl Module for RowParallel {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Some(Sum { rank, bias, padding: (before, after) }) = &self.sum else {
            return self.linear.forward(x);
        };
        let x = match (before, after) {
            (0, 0) => x.clone(),
            (before, after) => x.pad_with_zeros(D::Minus1, *before, *after)?,
        };
        let sum = rank.all_reduce_sum(&self.linear.forward(&x)?)?;
        match bias {
            Some(bias) => sum.broadcast_add(bias),
            None => Ok(sum),
        }
    }
}
