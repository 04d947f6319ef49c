//! Linear layers of a model, of which a rank may have a part.
//!
//! All are refused if the checkpoint has a bias that the config does not know of: an error instead of wrong
//! numbers. One of zeros is none: AutoGPTQ has written such beside every layer.

use candle_core::{DType, Device, Result};
use candle_quant::nn::{linear_b, Linear, VarBuilder};
use candle_quant::parallel::{column_parallel, row_parallel, RowParallel};
use candle_quant::Error;
use std::ops::Range;

/// A layer that every rank has whole.
pub(super) fn projection(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    check_bias(bias, &vb)?;
    linear_b(in_dim, out_dim, bias, vb)
}

/// The part of a layer that computes the outputs `own`.
pub(super) fn columns_of(
    in_dim: usize,
    out_dim: usize,
    own: Range<usize>,
    bias: bool,
    vb: VarBuilder,
) -> Result<Linear> {
    if own == (0..out_dim) {
        return projection(in_dim, out_dim, bias, vb);
    }
    check_bias(bias, &vb)?;
    column_parallel(in_dim, out_dim, own, bias, vb)
}

/// The part of a layer with the inputs `own`.
pub(super) fn rows_of(
    in_dim: usize,
    out_dim: usize,
    own: Range<usize>,
    bias: bool,
    vb: VarBuilder,
) -> Result<RowParallel> {
    check_bias(bias, &vb)?;
    row_parallel(in_dim, out_dim, own, bias, vb)
}

fn check_bias(bias: bool, vb: &VarBuilder) -> Result<()> {
    if let (false, Some(checkpoint), true) = (bias, vb.checkpoint(), vb.contains_tensor("bias")) {
        let stored = checkpoint.dense(&format!("{}.bias", vb.prefix()))?.load(DType::F32, &Device::Cpu)?;
        if stored.flatten_all()?.to_vec1::<f32>()?.iter().all(|number| *number == 0.) {
            return Ok(());
        }
        return Err(Error::Tensor {
            file: checkpoint.path().into(),
            tensor: format!("{}.bias", vb.prefix()),
            expected: "no such tensor, as the config says".to_string(),
            found: "one".to_string(),
            remedy: "check that config.json belongs to these weights".to_string(),
        }
        .into());
    }
    Ok(())
}
