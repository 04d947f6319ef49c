//! The layout in which gpt-oss was published: MXFP4 stacks of experts, `_blocks` U8 `[E, N, K/32, 16]` with
//! `_scales` U8 `[E, N, K/32]`, and rows of gate and up projections alternating in one tensor.
//!
//! As `convert_moe_packed_tensors` reads it (integrations/mxfp4.py of huggingface/transformers), the low nibble
//! first, and as mlx-lm splits it (mlx_lm/models/gpt_oss.py), gate rows at even places. Models see what MLX
//! makes of it: `gate_proj` and `up_proj`, each with its bias.

use super::module::{scale_dtypes, Module};
use crate::checkpoint::layout::Layout;
use crate::checkpoint::mapped::{Element, StoredTensor};
use crate::checkpoint::weight::Decode;
use crate::checkpoint::{DenseTensor, PackedWeight, Weight};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
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
    let format = QuantFormat::Mxfp4;
    let blocks = module.require(BLOCKS, BLOCKS, &[Dtype::U8])?;
    let scales = module.require(SCALES, BLOCKS, scale_dtypes(format))?;
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
    let layout = AlternatingRows { dims: dims.clone(), blocks: blocks.clone(), scales: scales.clone(), half };
    Ok(Weight::Packed(PackedWeight::new(module.path, format, dims, layout)))
}

/// MXFP4 codes and scales of which every row, or every second one, is taken.
#[derive(Debug)]
struct AlternatingRows {
    dims: Vec<usize>,
    blocks: StoredTensor,
    scales: StoredTensor,
    half: Option<Half>,
}

impl Layout for AlternatingRows {
    fn size_in_bytes(&self) -> usize {
        let stored = self.blocks.size_in_bytes() + self.scales.size_in_bytes();
        if self.half.is_some() {
            stored / 2
        } else {
            stored
        }
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let format = QuantFormat::Mxfp4;
        let k = self.dims.last().copied().unwrap_or(0);
        let of_rows = |last: usize| {
            let mut dims = self.dims.clone();
            dims.pop();
            dims.push(last);
            dims
        };
        let (words, groups) = (format.words_per_row(k)?, format.groups_per_row(k)?);
        let codes = rows::<u32>(&self.blocks, words, self.half)?;
        let scales = rows::<u8>(&self.scales, groups, self.half)?;
        let codes = Tensor::from_vec(codes, of_rows(words), device)?;
        let scales = Tensor::from_vec(scales, of_rows(groups), device)?;
        QuantTensor::new(format, codes, scales, None, None)
    }
}

/// The elements of all rows, or of every second one, each of `len` elements.
fn rows<T: Element>(tensor: &StoredTensor, len: usize, half: Option<Half>) -> Result<Vec<T>> {
    let Some(half) = half else {
        return tensor.read::<T>();
    };
    let row = len.saturating_mul(T::SIZE).max(1);
    let mut elements = Vec::with_capacity(tensor.size_in_bytes() / T::SIZE / 2);
    tensor.for_each_chunk(row.saturating_mul(2), |chunk| {
        for row in chunk.chunks_exact(row).skip(half.first()).step_by(2) {
            T::append(row, &mut elements);
        }
    })?;
    Ok(elements)
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
    let (dtype, dims_of_half) = (whole.dtype(), dims.clone());
    Ok(DenseTensor::decoded(
        name,
        dtype,
        dims,
        AlternatingElements { whole, dtype, dims: dims_of_half, half },
    ))
}

#[derive(Debug)]
struct AlternatingElements {
    whole: DenseTensor,
    dtype: DType,
    dims: Vec<usize>,
    half: Half,
}

impl Decode for AlternatingElements {
    fn size_in_bytes(&self) -> usize {
        self.whole.size_in_bytes() / 2
    }

    fn decode(&self, device: &Device) -> Result<Tensor> {
        let pairs = [self.dims.as_slice(), &[2]].concat();
        let whole = self.whole.load(self.dtype, device)?.reshape(pairs)?;
        Ok(whole.narrow(self.dims.len(), self.half.first(), 1)?.squeeze(self.dims.len())?.contiguous()?)
    }
}
