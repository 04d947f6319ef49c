//! Weights in memory: parts, checks, slices. Nothing is computed here: operations are the backend's.

mod checks;
mod column_scaled;
mod delta_net_state;
mod kv_cache;
mod layer_weight;
mod reordered;
mod super_blocks;

use crate::memory_nodes::placed;
use crate::{Error, QuantFormat, Result};
use candle_core::{Device, Tensor};
use checks::{check_biases, check_global_scale, check_groups, check_packed};
pub(crate) use column_scaled::column_scaled_name;
pub use column_scaled::ColumnScaledTensor;
pub(crate) use delta_net_state::DeltaHead;
pub use delta_net_state::{DeltaNetConfig, DeltaNetState};
pub(crate) use kv_cache::{CachePlace, DeviceRows, Layout as KvLayout, Plane as KvPlane, BLOCK as KV_BLOCK};
pub use kv_cache::{DeviceKvCache, KvCache, KvCacheConfig, KvFormat};
pub(crate) use layer_weight::reordered_name;
pub use layer_weight::LayerWeight;
pub use reordered::ReorderedTensor;
pub(crate) use reordered::NO_COLUMN;
use std::sync::Arc;
pub use super_blocks::SuperBlocks;

/// A quantized weight of logical shape `[.., N, K]`: packed codes, scales, and what else its format
/// needs, on one device.
///
/// Construction checks every shape and dtype, so that nothing that holds a `QuantTensor` needs to.
/// Cloning is cheap: the data is shared.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::{QuantFormat, QuantTensor};
///
/// let weight = Tensor::randn(0f32, 1.0, (256, 128), &Device::Cpu)?;
/// let packed = QuantTensor::quantize(&weight, QuantFormat::MXFP4)?;
/// assert_eq!(packed.dims(), [256, 128]);
/// assert_eq!(packed.bits_per_weight(), 4.25);
///
/// let x = Tensor::randn(0f32, 1.0, (3, 128), &Device::Cpu)?;
/// assert_eq!(packed.matmul(&x, None)?.dims(), [3, 256]);
/// assert_eq!(packed.dequantize(DType::F16)?.dims(), [256, 128]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct QuantTensor {
    format: QuantFormat,
    k: usize,
    packed: Tensor,
    scales: Tensor,
    biases: Option<Tensor>,
    global_scale: Option<GlobalScale>,
    super_blocks: Option<SuperBlocks>,
}

/// The multiplier of all scales, on the device and at hand.
#[derive(Clone)]
struct GlobalScale {
    tensor: Tensor,
    values: Arc<[f32]>,
}

impl std::fmt::Debug for QuantTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QuantTensor[{}; {:?}, {:?}]", self.format, self.dims(), self.device().location())
    }
}

impl QuantTensor {
    /// Puts a weight together from its parts.
    ///
    /// * `packed`: U32 `[.., N, K * bits / 32]`.
    /// * `scales`: `[.., N, K / group_size]`; F16, BF16 or F32 for affine and symmetric formats, else U8.
    /// * `biases`: for affine formats, of the shape of `scales`, any of the three float dtypes. A symmetric format has
    ///   none; beside 16-bit scales the biases that say the same are written out, and the weight becomes one of the
    ///   affine format; beside F32 scales they are implied and take no memory.
    /// * `global_scale`: for formats whose scales are bytes, F32, one value (`[]` or `[1]`) or one for each matrix of a
    ///   stack `[E, N, K]`. It *multiplies* the scales; MLX's number, the absolute maximum, becomes
    ///   one by [`global_scale_from_absmax`](crate::format::global_scale_from_absmax).
    ///
    /// # Errors
    /// If a shape, dtype or device is not as above, a global scale negative or not finite, or scales belong to
    /// super-blocks: see [`QuantTensor::with_super_blocks`].
    pub fn new(
        format: QuantFormat,
        packed: Tensor,
        scales: Tensor,
        biases: Option<Tensor>,
        global_scale: Option<Tensor>,
    ) -> Result<Self> {
        Self::of_parts(format, packed, (scales, biases), global_scale, None)
    }

    /// Puts a weight of a format of GGML ([`QuantFormat::Q4_K`] and others) with super-blocks together from its parts.
    ///
    /// * `packed`: U32 `[.., N, K * bits / 32]`.
    /// * `scales`: U8 `[.., N, K / group_size]`, integers in two's complement; `biases` alike, for formats with biases.
    /// * `super_blocks`: what these integers count.
    ///
    /// # Errors
    /// If a shape, dtype or device is not as above, or the format has no super-blocks.
    pub fn with_super_blocks(
        format: QuantFormat,
        packed: Tensor,
        (scales, biases): (Tensor, Option<Tensor>),
        super_blocks: SuperBlocks,
    ) -> Result<Self> {
        Self::of_parts(format, packed, (scales, biases), None, Some(super_blocks))
    }

    fn of_parts(
        format: QuantFormat,
        packed: Tensor,
        (scales, biases): (Tensor, Option<Tensor>),
        global_scale: Option<Tensor>,
        super_blocks: Option<SuperBlocks>,
    ) -> Result<Self> {
        let k = check_packed(format, &packed)?;
        let mut group_dims = packed.dims().to_vec();
        if let Some(last) = group_dims.last_mut() {
            *last = format.groups_per_row(k)?;
        }
        check_groups(format, "scales", &scales, &group_dims)?;
        let of_super_blocks = super_blocks.iter().flat_map(SuperBlocks::tensors);
        let parts = [Some(&scales), biases.as_ref(), global_scale.as_ref()];
        for part in parts.into_iter().flatten().chain(of_super_blocks) {
            if !part.device().same_device(packed.device()) {
                return Err(Error::mismatch(
                    format!("parts of an {format} weight"),
                    format!("all on {:?}", packed.device().location()),
                    format!("one on {:?}", part.device().location()),
                ));
            }
        }
        let global_scale =
            global_scale.map(|tensor| check_global_scale(format, &packed, tensor)).transpose()?;
        let (format, biases) = check_biases(format, &scales, biases, &group_dims)?;
        super_blocks::check(format, super_blocks.as_ref(), packed.dims(), k)?;
        let weight = Self { format, k, packed, scales, biases, global_scale, super_blocks };
        let contiguous = weight.map_parts(|part| placed(&part.contiguous()?))?;
        // CUDA kernels read weights without waiting for the kernels before them.
        contiguous.device().synchronize()?;
        Ok(contiguous)
    }

    /// Part of the weight along one of its logical dimensions `[.., N, K]`: `len` entries from
    /// `start`. Along K both must be multiples of the group size, or of a super-block.
    ///
    /// # Errors
    /// If the range is empty or leaves the dimension, or cuts a group.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        let dims = self.dims();
        let size = dims.get(dim).copied().unwrap_or(0);
        if len == 0 || start.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::mismatch(
                format!("range of dimension {dim} of {self:?}"),
                format!("1 or more of {size}"),
                format!("{len} from {start} on"),
            ));
        }
        let along_k = dim + 1 == dims.len();
        let group_size = self.format.group_size();
        let whole = self.format.granularity();
        if along_k && !(start.is_multiple_of(whole) && len.is_multiple_of(whole)) {
            return Err(Error::mismatch(
                format!("range of K of {self:?}"),
                format!("multiples of the group size {whole}"),
                format!("{len} from {start} on"),
            ));
        }
        let words = |elements: usize| elements / whole * (whole * self.format.bits() / 32);
        let (packed, groups) = if along_k {
            (self.packed.narrow(dim, words(start), words(len))?, (start / group_size, len / group_size))
        } else {
            (self.packed.narrow(dim, start, len)?, (start, len))
        };
        let part = |tensor: &Tensor| tensor.narrow(dim, groups.0, groups.1);
        // One global scale serves every slice; one for each matrix is cut with the stack.
        let global_scale = match &self.global_scale {
            Some(GlobalScale { tensor, values }) if values.len() > 1 && dim == 0 => Some(GlobalScale {
                tensor: tensor.narrow(0, start, len)?,
                values: values.get(start..start + len).unwrap_or_default().into(),
            }),
            other => other.clone(),
        };
        let k = if along_k { len } else { self.k };
        let biases = self.biases.as_ref().map(part).transpose()?;
        let unit = if along_k { whole } else { 1 };
        let blocks = |tensor: &Tensor| tensor.narrow(dim, start / unit, len / unit);
        let super_blocks = self.super_blocks.as_ref().map(|all| all.map(blocks)).transpose()?;
        let scales = part(&self.scales)?;
        let slice = Self { format: self.format, k, packed, scales, biases, global_scale, super_blocks };
        if slice.packed.is_contiguous() && slice.scales.is_contiguous() {
            return Ok(slice);
        }
        let copy = slice.map_parts(Tensor::contiguous)?;
        copy.device().synchronize()?;
        Ok(copy)
    }

    /// Joins weights along N, as fused QKV or gate and up projections want.
    ///
    /// # Errors
    /// If there are none, or formats, K, leading dimensions, devices or global scales differ.
    pub fn concat(parts: &[&Self]) -> Result<Self> {
        let Some((first, rest)) = parts.split_first() else {
            return Err(Error::mismatch("weights to join", "at least one", "none"));
        };
        let along_n = first.packed.rank() - 2;
        let globals = |part: &Self| part.global_scale.as_ref().map(|global| global.values.clone());
        for part in rest {
            if part.format != first.format || globals(part) != globals(first) {
                return Err(Error::mismatch(
                    "weights to join",
                    format!("{} and one global scale throughout", first.format),
                    format!("{} or another global scale", part.format),
                ));
            }
        }
        let join = |of: fn(&Self) -> &Tensor| {
            let tensors: Vec<&Tensor> = parts.iter().map(|part| of(part)).collect();
            Tensor::cat(&tensors, along_n)
        };
        let biases: Vec<&Tensor> = parts.iter().filter_map(|part| part.biases.as_ref()).collect();
        let biases = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, along_n)?) };
        let super_blocks =
            SuperBlocks::join(parts.iter().map(|part| part.super_blocks.as_ref()), |tensors| {
                Tensor::cat(tensors, along_n)
            })?;
        Self::of_parts(
            first.format,
            join(|part| &part.packed)?,
            (join(|part| &part.scales)?, biases),
            first.global_scale.as_ref().map(|global| global.tensor.clone()),
            super_blocks,
        )
    }

    /// Joins weights `[.., N, K]` to a stack `[E, .., N, K]`.
    ///
    /// # Errors
    /// If there are none, or formats, shapes or devices differ; if some have a global scale, and others
    /// don't.
    pub fn stack(parts: &[&Self]) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::mismatch("weights to stack", "at least one", "none"));
        };
        let alike = |part: &Self| (part.format, part.dims(), part.global_scale().map(Tensor::elem_count));
        if let Some(other) = parts.iter().find(|part| alike(part) != alike(first)) {
            return Err(Error::mismatch(
                "weights to stack",
                format!("{first:?}, with or without a global scale, throughout"),
                format!("{other:?}"),
            ));
        }
        let join = |of: &dyn Fn(&Self) -> Option<Tensor>| -> Result<Option<Tensor>> {
            let tensors: Vec<_> = parts.iter().filter_map(|part| of(part)).collect();
            Ok(if tensors.is_empty() { None } else { Some(Tensor::stack(&tensors, 0)?) })
        };
        let missing = || Error::mismatch("weights to stack", "packed words and scales", "none");
        let global_scale = join(&|part| part.global_scale().cloned())?;
        let super_blocks =
            SuperBlocks::join(parts.iter().map(|part| part.super_blocks.as_ref()), |tensors| {
                Tensor::stack(tensors, 0)
            })?;
        let scales = join(&|part| Some(part.scales.clone()))?.ok_or_else(missing)?;
        Self::of_parts(
            first.format,
            join(&|part| Some(part.packed.clone()))?.ok_or_else(missing)?,
            (scales, join(&|part| part.biases.clone())?),
            global_scale.map(|scales| scales.flatten_all()).transpose()?,
            super_blocks,
        )
    }

    /// The same weight on another device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let moved = |part: &Tensor| part.to_device(device);
        Self::of_parts(
            self.format,
            moved(&self.packed)?,
            (moved(&self.scales)?, self.biases.as_ref().map(moved).transpose()?),
            self.global_scale().map(moved).transpose()?,
            self.super_blocks.as_ref().map(|all| all.map(moved)).transpose()?,
        )
    }

    /// How codes, scales and biases become numbers.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Logical shape `[.., N, K]`.
    pub fn dims(&self) -> Vec<usize> {
        let mut dims = self.packed.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = self.k;
        }
        dims
    }

    /// Where the weight lives.
    pub fn device(&self) -> &Device {
        self.packed.device()
    }

    /// Packed codes, U32 `[.., N, K * bits / 32]`.
    pub fn packed(&self) -> &Tensor {
        &self.packed
    }

    /// Scales, `[.., N, K / group_size]`.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// Affine biases, of the shape of the scales; none if codes are symmetric and scales F32.
    pub fn biases(&self) -> Option<&Tensor> {
        self.biases.as_ref()
    }

    /// What scales and biases count, for formats with super-blocks.
    pub fn super_blocks(&self) -> Option<&SuperBlocks> {
        self.super_blocks.as_ref()
    }

    /// The multiplier of the scales: F32 `[1]`, or `[E]` for a stack.
    pub fn global_scale(&self) -> Option<&Tensor> {
        self.global_scale.as_ref().map(|global| &global.tensor)
    }

    /// The multiplier of the scales of one matrix of a stack; 1 where there is none.
    pub(crate) fn global_scale_of(&self, matrix: usize) -> f32 {
        let values = self.global_scale.as_ref().map_or(&[1.0][..], |global| &global.values);
        values.get(matrix).or(values.first()).copied().unwrap_or(1.0)
    }

    /// A stack with one leading dimension.
    ///
    /// # Errors
    /// If the weight is no stack `[.., E, N, K]`.
    pub fn flatten_stack(&self) -> Result<Self> {
        self.ensure_stack()?;
        Ok(self.map_parts(|part| part.flatten_to(part.rank() - 3))?)
    }

    /// The rows of all matrices of a stack `[E, N, K]` as one matrix, if they have one global scale or none.
    ///
    /// # Errors
    /// If the weight is no stack `[.., E, N, K]`.
    pub(crate) fn as_matrix(&self) -> Result<Self> {
        self.ensure_stack()?;
        Ok(self.map_parts(|part| part.flatten_to(part.rank() - 2))?)
    }

    /// Matrix `index` of a stack with one leading dimension.
    ///
    /// # Errors
    /// If the weight is no stack `[E, N, K]`, or has no such matrix.
    pub fn matrix(&self, index: usize) -> Result<Self> {
        self.ensure_stack()?;
        Ok(self.narrow(0, index, 1)?.map_parts(|part| part.squeeze(0))?)
    }

    fn ensure_stack(&self) -> Result<()> {
        match self.packed.rank() {
            3.. => Ok(()),
            _ => Err(Error::mismatch(
                "stack of weights",
                "a shape [.., E, N, K]",
                format!("{:?}", self.dims()),
            )),
        }
    }

    /// The same weights, packed words, scales and biases reshaped or copied alike.
    fn map_parts(
        &self,
        change: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Self> {
        Ok(Self {
            format: self.format,
            k: self.k,
            packed: change(&self.packed)?,
            scales: change(&self.scales)?,
            biases: self.biases.as_ref().map(&change).transpose()?,
            global_scale: self.global_scale.clone(),
            super_blocks: self.super_blocks.as_ref().map(|all| all.map(&change)).transpose()?,
        })
    }

    /// All parts: packed codes, scales, and what else there is.
    pub fn parts(&self) -> impl Iterator<Item = &Tensor> {
        let parts = [Some(&self.packed), Some(&self.scales), self.biases.as_ref(), self.global_scale()];
        parts.into_iter().flatten().chain(self.super_blocks.iter().flat_map(SuperBlocks::tensors))
    }

    /// Bytes of all parts.
    pub fn size_in_bytes(&self) -> usize {
        self.parts().map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Bits of all parts for each weight.
    pub fn bits_per_weight(&self) -> f64 {
        self.size_in_bytes() as f64 * 8.0 / self.dims().iter().product::<usize>() as f64
    }
}
