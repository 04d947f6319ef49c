//! The layout in which gpt-oss was published: MXFP4 stacks of experts, `_blocks` U8 `[E, N, K/32, 16]` with
//! `_scales` U8 `[E, N, K/32]`, and rows of gate and up projections alternating in one tensor.
//!
//! As `convert_moe_packed_tensors` reads it (integrations/mxfp4.py of huggingface/transformers), the low nibble
//! first, and as mlx-lm splits it (mlx_lm/models/gpt_oss.py), gate rows at even places. Models see what MLX
//! makes of it: `gate_proj` and `up_proj`, each with its bias.

use super::module::{scale_dtypes, Module};
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{DenseTensor, PackedWeight, Parts, Weight};
use crate::{Error, QuantFormat, Result};
use safetensors::Dtype;

pub(super) const BLOCKS: &str = "_blocks";
pub(super) const SCALES: &str = "_scales";
pub(super) const BIAS: &str = "_bias";

/// Bytes of a block of 32 codes.
const BLOCK: usize = 16;

/// Every second row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    /// Rows 0, 2, 4, ..
    Even,
    /// Rows 1, 3, 5, ..
    Odd,
}

impl Half {
    fn first(self) -> usize {
        match self {
            Self::Even => 0,
            Self::Odd => 1,
        }
    }
}

/// The modules whose weights are stored under the name `stored`, and which half of the rows is whose.
pub(super) fn weights_of(stored: &str) -> Vec<(String, Option<Half>)> {
    match stored.strip_suffix("gate_up_proj") {
        Some(parent) if parent.is_empty() || parent.ends_with('.') => vec![
            (format!("{parent}gate_proj"), Some(Half::Even)),
            (format!("{parent}up_proj"), Some(Half::Odd)),
        ],
        _ => vec![(stored.to_owned(), None)],
    }
}

/// The weight in `_blocks` and `_scales`, or half of its rows.
pub(super) fn weight(module: &Module, half: Option<Half>) -> Result<Weight> {
    let format = QuantFormat::MXFP4;
    let blocks = module.require(BLOCKS, BLOCKS, &[Dtype::U8])?;
    let scales = module.require(SCALES, BLOCKS, scale_dtypes(format.scale()))?;
    let (rows, k) = match blocks.dims() {
        [rows @ .., groups, BLOCK] if !rows.is_empty() && !rows.contains(&0) && *groups > 0 => {
            module.check_dims(SCALES, scales, &[rows, &[*groups]].concat())?;
            (rows, groups.saturating_mul(format.group_size()))
        }
        dims => {
            let expected = "a shape [.., N, K/32, 16], no dimension zero";
            return Err(module.wrong(BLOCKS, blocks, expected, format!("{dims:?}")));
        }
    };
    let mut dims = [rows, &[k]].concat();
    if let (Some(_), [.., n, _]) = (half, dims.as_mut_slice()) {
        if *n % 2 != 0 {
            let expected = "an even number of rows, gate and up alternating";
            return Err(module.wrong(BLOCKS, blocks, expected, n.to_string()));
        }
        *n /= 2;
    }
    let parts = Parts {
        module: module.path.to_owned(),
        format,
        dims: dims.clone(),
        codes: rows_of(half, blocks, rows, k / 2)?,
        scales: rows_of(half, scales, rows, k / format.group_size())?,
        biases: None,
        global_scale: None,
    };
    Ok(Weight::Packed(PackedWeight::new(module.path, format, dims, parts)))
}

/// Every row of `bytes` bytes, or every second one.
fn rows_of(half: Option<Half>, stored: &StoredTensor, rows: &[usize], bytes: usize) -> Result<StoredTensor> {
    match half {
        None => Ok(stored.clone()),
        Some(half) => stored.every_second(&[rows, &[bytes]].concat(), rows.len() - 1, half.first()),
    }
}

/// Every second element along the last dimension of a stored tensor, the biases of one half of the rows.
pub(super) fn half_of(name: &str, stored: &StoredTensor, half: Half) -> Result<DenseTensor> {
    let whole = DenseTensor::new(name, stored)?;
    let mut dims = whole.dims().to_vec();
    match dims.last_mut() {
        Some(last) if *last % 2 == 0 => *last /= 2,
        _ => {
            return Err(Error::tensor(
                stored.path(),
                name,
                "an even number of biases, gate and up alternating",
                format!("shape {:?}", stored.dims()),
                super::module::REMEDY,
            ));
        }
    }
    let bytes = stored.dtype().bitsize() / 8;
    let sizes = [stored.dims(), &[bytes]].concat();
    let stored = stored.every_second(&sizes, dims.len() - 1, half.first())?;
    stored.as_numbers(stored.dtype(), &dims).map_or(Ok(whole), |stored| DenseTensor::new(name, &stored))
}
