//! Blocks of GGUF's 4-bit floating-point types, brought into the layout of this crate.

use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{GlobalScale, Layout, MlxForm, Nibbles, Slice};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// Blocks whose scales lie in front of their codes. Codes and scales keep their values; only their places
/// change.
#[derive(Clone, Debug)]
pub(super) struct Fp4Blocks {
    /// The module, for errors.
    pub module: String,
    pub kind: Fp4,
    /// Logical shape `[.., N, K]`.
    pub dims: Vec<usize>,
    pub blocks: StoredTensor,
    pub global_scale: Option<GlobalScale>,
}

/// A 4-bit floating-point type and what is in a block of it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fp4 {
    /// One E8M0 byte, 32 codes.
    Mxfp4(Nibbles),
    /// Four unsigned E4M3 bytes, 64 codes: four groups of 16, each with its own halves.
    Nvfp4,
}

impl Fp4 {
    pub fn format(self) -> QuantFormat {
        match self {
            Self::Mxfp4(_) => QuantFormat::MXFP4,
            Self::Nvfp4 => QuantFormat::NVFP4,
        }
    }

    /// Scales of a block, which are as many bytes; bytes of the whole block.
    fn block(self) -> (usize, usize) {
        match self {
            Self::Mxfp4(_) => (1, 17),
            Self::Nvfp4 => (4, 36),
        }
    }

    /// The words of one group, element 0 in the lowest bits.
    fn append_codes(self, codes: &[u8], words: &mut Vec<u32>) {
        let nibbles = match self {
            Self::Mxfp4(nibbles) => nibbles,
            Self::Nvfp4 => Nibbles::Halves,
        };
        let word = |bytes: [u8; 4]| u32::from_le_bytes(bytes);
        match nibbles {
            Nibbles::Adjacent => words.extend(codes.as_chunks::<4>().0.iter().map(|bytes| word(*bytes))),
            Nibbles::Halves => {
                let (chunks, _) = codes.as_chunks::<8>();
                let pairs = |bytes: &[u8; 8], nibble: fn(u8) -> u8| {
                    let [a, b, c, d, e, f, g, h] = bytes.map(nibble);
                    word([a | b << 4, c | d << 4, e | f << 4, g | h << 4])
                };
                words.extend(chunks.iter().map(|bytes| pairs(bytes, |byte| byte & 15)));
                words.extend(chunks.iter().map(|bytes| pairs(bytes, |byte| byte >> 4)));
            }
        }
    }

    /// The scale as this crate reads it; `None` if the byte is no scale of the type.
    fn scale(self, byte: u8) -> Option<u8> {
        match (self, byte) {
            (Self::Mxfp4(_), _) => Some(byte),
            // NaN in E4M3; ggml dequantizes it to zero.
            (Self::Nvfp4, 0x7F) => Some(0),
            (Self::Nvfp4, 0x80..) => None,
            (Self::Nvfp4, _) => Some(byte),
        }
    }
}

impl Layout for Fp4Blocks {
    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(match self.global_scale {
            Some(_) => MlxForm::Multiplied,
            None => MlxForm::Rearranged(DType::U8),
        })
    }

    fn size_in_bytes(&self) -> usize {
        let global_scale = self.global_scale.as_ref().map_or(0, |scale| scale.tensor.size_in_bytes());
        self.blocks.size_in_bytes() + global_scale
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let (scales_of_block, block_bytes) = self.kind.block();
        let blocks = self.blocks.size_in_bytes() / block_bytes;
        let mut scales = Vec::with_capacity(blocks * scales_of_block);
        let mut words = Vec::with_capacity(blocks * (block_bytes - scales_of_block) / size_of::<u32>());
        let mut wrong_scale = None;
        let take = |bytes: &[u8]| {
            for block in bytes.chunks_exact(block_bytes) {
                let (of_block, codes) = block.split_at(scales_of_block);
                for &byte in of_block {
                    scales.push(self.kind.scale(byte).unwrap_or_else(|| *wrong_scale.insert(byte)));
                }
                for group in codes.chunks_exact(codes.len() / scales_of_block) {
                    self.kind.append_codes(group, &mut words);
                }
            }
        };
        self.blocks.for_each_chunk(block_bytes, take)?;
        if let Some(byte) = wrong_scale {
            return Err(Error::tensor(
                self.blocks.path(),
                &self.module,
                "unsigned E4M3 scales, 0x00 to 0x7f",
                format!("the byte {byte:#04x}"),
                "the file is damaged: fetch or convert it again",
            ));
        }
        let format = self.kind.format();
        let (words_dims, groups_dims) = format.part_dims(&self.dims)?;
        let codes = Tensor::from_vec(words, words_dims, device)?;
        let scales = Tensor::from_vec(scales, groups_dims, device)?;
        let global_scale = self.global_scale.as_ref().map(|scale| scale.load(&self.module, device));
        QuantTensor::new(format, codes, scales, None, global_scale.transpose()?)
    }

    fn granularity(&self) -> usize {
        self.kind.block().0 * self.kind.format().group_size()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        Ok(Arc::new(Self {
            dims: slice.part_dims(),
            blocks: slice.of(&self.blocks, self.granularity(), self.kind.block().1)?,
            global_scale: self.global_scale.as_ref().map(|scale| scale.narrow(slice)).transpose()?,
            ..self.clone()
        }))
    }
}
