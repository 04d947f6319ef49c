//! Packed weights on the CPU, lent to its kernels.

use super::cpu::{GroupValues, PackedMatrix, SuperBlockValues};
use super::{contiguous, unsupported_device};
use crate::format::SUPER_BLOCK;
use crate::QuantTensor;
use candle_core::{bail, CpuStorage, Layout, Result, Storage, Tensor};
use half::f16;
use std::ops::Deref;

/// What a tensor stores, by a guard that keeps others from writing to it.
type Stored<'a> = (Box<dyn Deref<Target = Storage> + 'a>, &'a Layout);

fn stored(tensor: &Tensor) -> Stored<'_> {
    let (storage, layout) = tensor.storage_and_layout();
    (Box::new(storage), layout)
}

/// A (stack of) packed weights on the CPU. Threads that take it often share a lock each time, so a step takes it once.
pub(super) struct Lent<'a> {
    weight: &'a QuantTensor,
    rows: usize,
    k: usize,
    packed: Stored<'a>,
    scales: Stored<'a>,
    biases: Option<Stored<'a>>,
    /// Of super-blocks.
    of_scales: Option<Stored<'a>>,
    of_biases: Option<Stored<'a>>,
}

impl<'a> Lent<'a> {
    /// # Errors
    /// If the weight has less than two dimensions.
    pub(super) fn new(weight: &'a QuantTensor) -> Result<Self> {
        let [.., rows, k] = weight.dims()[..] else { bail!("a weight has at least two dimensions") };
        let super_blocks = weight.super_blocks();
        Ok(Self {
            weight,
            rows,
            k,
            packed: stored(weight.packed()),
            scales: stored(weight.scales()),
            biases: weight.biases().map(stored),
            of_scales: super_blocks.map(|of| stored(&of.scales)),
            of_biases: super_blocks.and_then(|of| of.biases.as_ref()).map(stored),
        })
    }

    /// The weight.
    pub(super) fn weight(&self) -> &'a QuantTensor {
        self.weight
    }

    /// Matrix `index` of the stack.
    ///
    /// # Errors
    /// If the weight is on another device, or has no such matrix.
    pub(super) fn matrix(&self, index: usize) -> Result<PackedMatrix<'_>> {
        let (format, rows, k) = (self.weight.format(), self.rows, self.k);
        let part = |len_of_row: usize| (index * rows * len_of_row, rows * len_of_row);
        let (words, groups) = (part(k * format.bits() / 32), part(k / format.group_size()));
        let of_blocks = part(k / SUPER_BLOCK);
        let (packed, packed_layout) = &self.packed;
        let Storage::Cpu(CpuStorage::U32(packed)) = &***packed else {
            return Err(unsupported_device(self.weight.device()));
        };
        Ok(PackedMatrix {
            format,
            rows,
            k,
            words: slice(contiguous(packed, packed_layout)?, words)?,
            scales: values(&self.scales, groups)?,
            biases: self.biases.as_ref().map(|biases| values(biases, groups)).transpose()?,
            global_scale: self.weight.global_scale_of(index),
            super_blocks: match &self.of_scales {
                None => None,
                Some(scales) => Some(SuperBlockValues {
                    scales: halves(scales, of_blocks)?,
                    biases: match &self.of_biases {
                        Some(biases) => halves(biases, of_blocks)?,
                        None => &[],
                    },
                }),
            },
        })
    }
}

/// Lends matrix `index` of a (stack of) packed weights on the CPU to `compute`.
pub(super) fn with_matrix<R>(
    weight: &QuantTensor,
    index: usize,
    compute: impl FnOnce(&PackedMatrix) -> Result<R>,
) -> Result<R> {
    compute(&Lent::new(weight)?.matrix(index)?)
}

#[allow(clippy::wildcard_enum_match_arm, reason = "parts are U8 or floats, on the CPU")]
pub(super) fn group_values<'a>(
    storage: &'a Storage,
    layout: &Layout,
    part: (usize, usize),
) -> Result<GroupValues<'a>> {
    Ok(match storage {
        Storage::Cpu(CpuStorage::U8(all)) => GroupValues::Byte(slice(contiguous(all, layout)?, part)?),
        Storage::Cpu(CpuStorage::F16(all)) => GroupValues::F16(slice(contiguous(all, layout)?, part)?),
        Storage::Cpu(CpuStorage::BF16(all)) => GroupValues::Bf16(slice(contiguous(all, layout)?, part)?),
        Storage::Cpu(CpuStorage::F32(all)) => GroupValues::F32(slice(contiguous(all, layout)?, part)?),
        _ => bail!("scales and biases live on the CPU as U8, F16, BF16 or F32"),
    })
}

fn values<'a>((storage, layout): &'a Stored<'_>, part: (usize, usize)) -> Result<GroupValues<'a>> {
    group_values(storage, layout, part)
}

fn halves<'a>(of: &'a Stored<'_>, part: (usize, usize)) -> Result<&'a [f16]> {
    match values(of, part)? {
        GroupValues::F16(values) => Ok(values),
        GroupValues::Byte(_) | GroupValues::Bf16(_) | GroupValues::F32(_) => {
            bail!("numbers of super-blocks are F16")
        }
    }
}

fn slice<T>(all: &[T], (start, len): (usize, usize)) -> Result<&[T]> {
    match all.get(start..).and_then(|rest| rest.get(..len)) {
        Some(part) => Ok(part),
        None => bail!("{len} elements from {start} on, of {}", all.len()),
    }
}
