//! Blocks of GGML's types in formats of this crate: codes and scales keep their values, only their places change.

use super::ggml::GgmlWeight;
use super::ggml_types::{type_where, Kind};
use super::ggml_unpack as unpack;
use super::ggml_unpack::{Unpack, Unpacked};
use super::ggml_unpack_grids as grids;
use super::layout::Layout;
use super::mlx_form::MlxForm;
use super::packed::PackedWeight;
use super::slice::Slice;
use super::stored_form::{StoredBlocks, StoredForm};
use crate::checkpoint::file::StoredTensor;
use crate::format::{pack, Scale, SUPER_BLOCK};
use crate::{QuantFormat, QuantTensor, Result, SuperBlocks};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use half::f16;
use rayon::prelude::*;
use std::sync::Arc;

/// A type, and the format that means the same.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) struct GgmlCodes {
    format: QuantFormat,
    /// Elements and bytes of a block.
    elements: usize,
    bytes: usize,
    unpack: Unpack,
    /// Whether scales are F32, not F16.
    wide: bool,
}

impl GgmlCodes {
    const fn new(format: QuantFormat, elements: usize, bytes: usize, unpack: Unpack) -> Self {
        Self { format, elements, bytes, unpack, wide: false }
    }

    const fn of_super_blocks(format: QuantFormat, bytes: usize, unpack: Unpack) -> Self {
        Self::new(format, SUPER_BLOCK, bytes, unpack)
    }

    /// IQ4_NL: as Q4_0, with other numbers.
    pub(super) const IQ4_NL: Self = Self::new(QuantFormat::IQ4_NL, 32, 18, unpack::q4_0);
    /// IQ4_XS.
    pub(super) const IQ4_XS: Self = Self::of_super_blocks(QuantFormat::IQ4_XS, 136, unpack::iq4_xs);

    /// IQ1_S.
    pub(super) const IQ1_S: Self = Self::of_super_blocks(QuantFormat::IQ1_S, 50, grids::iq1_s);
    /// IQ1_M.
    pub(super) const IQ1_M: Self = Self::of_super_blocks(QuantFormat::IQ1_M, 56, grids::iq1_m);
    /// IQ2_XXS.
    pub(super) const IQ2_XXS: Self = Self::of_super_blocks(QuantFormat::IQ2_XXS, 66, grids::iq2_xxs);
    /// IQ2_XS.
    pub(super) const IQ2_XS: Self = Self::of_super_blocks(QuantFormat::IQ2_XS, 74, grids::iq2_xs);
    /// IQ2_S: as IQ2_XS once its grid is resolved.
    pub(super) const IQ2_S: Self = Self::of_super_blocks(QuantFormat::IQ2_XS, 82, grids::iq2_s);
    /// IQ3_XXS.
    pub(super) const IQ3_XXS: Self = Self::of_super_blocks(QuantFormat::IQ3_XXS, 98, grids::iq3_xxs);
    /// IQ3_S.
    pub(super) const IQ3_S: Self = Self::of_super_blocks(QuantFormat::IQ3_S, 110, grids::iq3_s);

    /// Q1_0: one number and its negative.
    pub(super) fn q1_0() -> Option<Self> {
        Some(Self::new(QuantFormat::affine_opt(1, 128)?, 128, 18, unpack::q1_0))
    }

    /// TQ1_0 and TQ2_0, which have these bytes: -1, 0 and 1 as codes of 2 bits, with a scale for each half of a block.
    pub(super) fn ternary(bytes: usize) -> Option<Self> {
        let unpack = if bytes == 54 { unpack::tq1_0 } else { unpack::tq2_0 };
        Some(Self::new(QuantFormat::affine_opt(2, 128)?, 256, bytes, unpack))
    }

    /// The format of blocks that candle knows, too; `None` for those of dense elements.
    pub(super) fn of(dtype: GgmlDType) -> Option<Self> {
        use GgmlDType as G;
        let (affine, symmetric) = (QuantFormat::affine_opt, QuantFormat::symmetric_opt);
        Some(match dtype {
            G::Q4_0 => Self::new(symmetric(4, 32)?, 32, 18, unpack::q4_0),
            G::Q4_1 => Self::new(affine(4, 32)?, 32, 20, unpack::q4_1),
            G::Q5_0 => Self::new(symmetric(5, 32)?, 32, 22, unpack::q5_0),
            G::Q5_1 => Self::new(affine(5, 32)?, 32, 24, unpack::q5_1),
            G::Q8_0 => Self::new(symmetric(8, 32)?, 32, 34, unpack::q8_0),
            G::Q8_1 => Self::new(symmetric(8, 32)?, 32, 36, unpack::q8_1),
            G::Q8K => Self { wide: true, ..Self::new(symmetric(8, 128)?, 256, 292, unpack::q8_k) },
            G::Q2K => Self::of_super_blocks(QuantFormat::Q2_K, 84, unpack::q2_k),
            G::Q3K => Self::of_super_blocks(QuantFormat::Q3_K, 110, unpack::q3_k),
            G::Q4K => Self::of_super_blocks(QuantFormat::Q4_K, 144, unpack::q4_k),
            G::Q5K => Self::of_super_blocks(QuantFormat::Q5_K, 176, unpack::q5_k),
            G::Q6K => Self::of_super_blocks(QuantFormat::Q6_K, 210, unpack::q6_k),
            G::F32 | G::F16 | G::BF16 => return None,
        })
    }

    /// What blocks become.
    pub(super) fn format(self) -> QuantFormat {
        self.format
    }

    /// A weight of shape `dims` in such blocks, whose size the reader has checked.
    pub(in crate::checkpoint) fn weight(
        self,
        module: &str,
        dims: Vec<usize>,
        blocks: impl BlockSource + 'static,
    ) -> PackedWeight {
        let layout = PackedBlocks { codes: self, dims: dims.clone(), blocks: Arc::new(blocks) };
        PackedWeight::new(module, self.format, dims, layout)
    }
}

/// Where blocks come from.
pub(in crate::checkpoint) trait BlockSource: std::fmt::Debug + Send + Sync {
    fn size_in_bytes(&self) -> usize;

    /// Hands the blocks, of so many bytes each, to `take`: in order, some at a time.
    fn for_each_blocks(&self, bytes: usize, take: &mut dyn FnMut(&[u8])) -> Result<()>;

    /// A part, of which no other bytes are read.
    fn narrow(&self, slice: &Slice, elements: usize, bytes: usize) -> Result<Arc<dyn BlockSource>>;
}

impl BlockSource for StoredTensor {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn for_each_blocks(&self, bytes: usize, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.for_each_chunk(bytes, take)
    }

    fn narrow(&self, slice: &Slice, elements: usize, bytes: usize) -> Result<Arc<dyn BlockSource>> {
        Ok(Arc::new(slice.of(self, elements, bytes)?))
    }
}

impl BlockSource for GgmlWeight {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn for_each_blocks(&self, _: usize, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.for_each_chunk(take)
    }

    fn narrow(&self, slice: &Slice, _: usize, _: usize) -> Result<Arc<dyn BlockSource>> {
        Ok(Arc::new(self.narrow(slice.dim, slice.range.clone())?))
    }
}

/// Blocks in the order of their weights.
#[derive(Clone, Debug)]
struct PackedBlocks {
    codes: GgmlCodes,
    dims: Vec<usize>,
    blocks: Arc<dyn BlockSource>,
}

/// What blocks unpack to, of all of them one after the other.
#[derive(Default)]
struct Parts {
    words: Vec<u32>,
    steps: Vec<u8>,
    bias_steps: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl Parts {
    fn append(&mut self, other: &mut Self) {
        self.words.append(&mut other.words);
        self.steps.append(&mut other.steps);
        self.bias_steps.append(&mut other.bias_steps);
        self.scales.append(&mut other.scales);
        self.biases.append(&mut other.biases);
    }
}

impl GgmlCodes {
    /// Some whole blocks.
    fn unpack(&self, blocks: &[u8]) -> Parts {
        let (format, count) = (self.format, blocks.len() / self.bytes);
        let groups = self.elements / format.group_size();
        let words = self.elements * format.bits() / 32;
        // Of a super-block one number, of other blocks one for each group.
        let (steps, numbers) = match format.scale() {
            Scale::SuperBlock => (groups, 1),
            Scale::Float | Scale::E8m0 | Scale::E4m3 => (0, groups),
        };
        let mut parts = Parts { words: vec![0; count * words], ..Parts::default() };
        let mut of = Unpacked::new();
        for (block, words) in blocks.chunks_exact(self.bytes).zip(parts.words.chunks_exact_mut(words)) {
            (self.unpack)(block, &mut of);
            pack(of.codes.get(..self.elements).unwrap_or_default(), format.bits(), words);
            parts.steps.extend(of.steps.iter().take(steps));
            parts.scales.extend(std::iter::repeat_n(of.scale, numbers));
            if format.has_biases() {
                parts.bias_steps.extend(of.bias_steps.iter().take(steps));
                parts.biases.extend(std::iter::repeat_n(of.bias, numbers));
            }
        }
        parts
    }
}

impl Layout for PackedBlocks {
    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(match self.codes.format.scale() {
            Scale::Float if self.codes.format.has_biases() => MlxForm::Rearranged(DType::F16),
            Scale::Float | Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => MlxForm::ROUNDED,
        })
    }

    fn stored_form(&self, _: &str) -> Option<StoredForm> {
        let GgmlCodes { format, bytes, .. } = self.codes;
        // Formats and sizes of blocks together are those of one type.
        let is_it = |codes: GgmlCodes| codes.format == format && codes.bytes == bytes;
        let (id, of_number) = type_where(|kind| matches!(kind, Kind::Packed(codes) if is_it(codes)))?;
        let (name, blocks) = (of_number.name, Arc::clone(&self.blocks));
        Some(StoredForm::Blocks(StoredBlocks { name, id, bytes, format: Some(format), blocks }))
    }

    fn size_in_bytes(&self) -> usize {
        self.blocks.size_in_bytes()
    }

    /// Beside F16 scales the zero points of symmetric codes are written out.
    fn loaded_bytes(&self) -> u64 {
        let GgmlCodes { format, wide, .. } = self.codes;
        let elements = self.dims.iter().map(|dim| *dim as u64).product();
        match wide {
            true => format.size_in_bytes(elements, DType::F32),
            false if format.scale() == Scale::Float => {
                format.with_biases().size_in_bytes(elements, DType::F16)
            }
            false => format.size_in_bytes(elements, DType::F16),
        }
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        /// Blocks that a thread unpacks at a time.
        const AT_ONCE: usize = 256;
        let GgmlCodes { format, bytes, wide, .. } = self.codes;
        let elements = self.dims.iter().fold(1, |all: usize, dim| all.saturating_mul(*dim));
        let mut parts =
            Parts { words: Vec::with_capacity(elements / 32 * format.bits()), ..Parts::default() };
        self.blocks.for_each_blocks(bytes, &mut |blocks| {
            let blocks = blocks.par_chunks(AT_ONCE * bytes);
            let mut unpacked: Vec<_> = blocks.map(|blocks| self.codes.unpack(blocks)).collect();
            unpacked.iter_mut().for_each(|some| parts.append(some));
        })?;
        let (words_dims, groups_dims) = format.part_dims(&self.dims)?;
        // A scale of Q1_0 is twice a number of the file.
        let wide =
            wide || parts.scales.iter().any(|scale| scale.is_finite() && !f16::from_f32(*scale).is_finite());
        let numbers = |numbers: Vec<f32>, dims: &[usize]| {
            let numbers = Tensor::from_vec(numbers, dims, &Device::Cpu)?;
            let dtype = if wide { DType::F32 } else { DType::F16 };
            numbers.to_dtype(dtype)?.to_device(device)
        };
        let words = Tensor::from_vec(parts.words, words_dims, device)?;
        let has_biases = format.has_biases();
        if format.scale() != Scale::SuperBlock {
            let scales = numbers(parts.scales, &groups_dims)?;
            let biases = has_biases.then(|| numbers(parts.biases, &groups_dims)).transpose()?;
            return QuantTensor::new(format, words, scales, biases, None);
        }
        let mut blocks_dims = groups_dims.clone();
        if let Some(last) = blocks_dims.last_mut() {
            *last /= SUPER_BLOCK / format.group_size();
        }
        let steps = |steps: Vec<u8>| Tensor::from_vec(steps, groups_dims.as_slice(), device);
        let biases = has_biases.then(|| steps(parts.bias_steps)).transpose()?;
        let super_blocks = SuperBlocks {
            scales: numbers(parts.scales, &blocks_dims)?,
            biases: has_biases.then(|| numbers(parts.biases, &blocks_dims)).transpose()?,
        };
        QuantTensor::with_super_blocks(format, words, (steps(parts.steps)?, biases), super_blocks)
    }

    fn granularity(&self) -> usize {
        self.codes.elements
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        let blocks = self.blocks.narrow(slice, self.codes.elements, self.codes.bytes)?;
        Ok(Arc::new(Self { codes: self.codes, dims: slice.part_dims(), blocks }))
    }
}
