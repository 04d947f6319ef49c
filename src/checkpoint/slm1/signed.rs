//! Signed codes with F32 scales, as this crate's symmetric affine formats or decoded.

use super::NibbleOrder;
use crate::checkpoint::layout::Layout;
use crate::checkpoint::mapped::StoredTensor;
use crate::checkpoint::weight::Decode;
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// A tensor of signed codes: two's complement, each the same number of a row's elements with one scale.
#[derive(Clone, Debug)]
pub(super) struct SignedBlocks {
    pub bits: Bits,
    pub dims: Vec<usize>,
    pub codes: StoredTensor,
    pub scales: StoredTensor,
    /// Elements of one scale.
    pub block: usize,
    /// Row `i` is the stored row `order[i]`.
    pub order: Option<Arc<[usize]>>,
}

/// The width of a code.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bits {
    Four(NibbleOrder),
    Eight,
}

impl SignedBlocks {
    /// The format whose groups are parts of the blocks; `None` if there is none.
    pub fn format(&self) -> Option<QuantFormat> {
        let bits = match self.bits {
            Bits::Four(_) => 4,
            Bits::Eight => 8,
        };
        let group_size =
            [128, 64, 32].into_iter().find(|group_size| self.block.is_multiple_of(*group_size))?;
        (self.dims.len() == 2).then_some(QuantFormat::Affine { bits, group_size })
    }

    fn block_bytes(&self) -> usize {
        match self.bits {
            Bits::Four(_) => self.block / 2,
            Bits::Eight => self.block,
        }
    }

    fn read_scales(&self) -> Result<Vec<f32>> {
        let mut scales = Vec::with_capacity(self.scales.size_in_bytes() / size_of::<f32>());
        let take = |bytes: &[u8]| {
            scales.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        };
        self.for_each(&self.scales, size_of::<f32>(), take)?;
        Ok(scales)
    }

    /// Hands on bytes in whole units, rows in their order.
    fn for_each(&self, stored: &StoredTensor, unit: usize, take: impl FnMut(&[u8])) -> Result<()> {
        match &self.order {
            None => stored.for_each_chunk(unit, take),
            Some(order) => stored.with_rows(order, take),
        }
    }

    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes()
    }
}

impl Layout for SignedBlocks {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    /// Signed codes become unsigned ones by their highest bit; scales are repeated for every group of a block.
    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let format = self.format().ok_or_else(|| crate::Error::Unsupported {
            what: format!("blocks of {} elements", self.block),
            remedy: "load the tensor decoded".into(),
        })?;
        let mask = match self.bits {
            Bits::Four(_) => 0x8888_8888,
            Bits::Eight => 0x8080_8080,
        };
        let mut words = Vec::with_capacity(self.codes.size_in_bytes() / size_of::<u32>());
        let mut append = |bytes: &[u8]| {
            words.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes) ^ mask));
        };
        let block_bytes = self.block_bytes();
        let mut paired = Vec::new();
        self.for_each(&self.codes, block_bytes, |bytes| match self.bits {
            Bits::Eight | Bits::Four(NibbleOrder::Pairs) => append(bytes),
            Bits::Four(NibbleOrder::HalfBlock) => {
                for block in bytes.chunks_exact(block_bytes) {
                    let (pairs, _) = block.as_chunks::<2>();
                    paired.clear();
                    paired.extend(pairs.iter().map(|[a, b]| a & 15 | b << 4));
                    paired.extend(pairs.iter().map(|[a, b]| a >> 4 | b & 0xF0));
                    append(&paired);
                }
            }
        })?;
        let repeats = self.block / format.group_size();
        let scales = self.read_scales()?;
        let scales: Vec<_> =
            scales.into_iter().flat_map(|scale| std::iter::repeat_n(scale, repeats)).collect();
        let k = self.dims.last().copied().unwrap_or(0);
        let n = self.dims.first().copied().unwrap_or(0);
        let codes = Tensor::from_vec(words, (n, format.words_per_row(k)?), device)?;
        let scales = Tensor::from_vec(scales, (n, format.groups_per_row(k)?), device)?;
        QuantTensor::new(format, codes, scales, None, None)
    }
}

impl Decode for SignedBlocks {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn decode(&self, device: &Device) -> Result<Tensor> {
        let scales = self.read_scales()?;
        let mut values = Vec::with_capacity(self.dims.iter().product());
        let nibble = |code: u8| f32::from(((code & 15) ^ 8) as i8 - 8);
        let block_bytes = self.block_bytes();
        let mut scales = scales.into_iter();
        self.for_each(&self.codes, block_bytes, |bytes| {
            for (block, scale) in bytes.chunks_exact(block_bytes).zip(&mut scales) {
                match self.bits {
                    Bits::Eight => values.extend(block.iter().map(|&code| f32::from(code as i8) * scale)),
                    Bits::Four(NibbleOrder::Pairs) => {
                        values.extend(
                            block
                                .iter()
                                .flat_map(|code| [nibble(*code), nibble(code >> 4)].map(|x| x * scale)),
                        );
                    }
                    Bits::Four(NibbleOrder::HalfBlock) => {
                        values.extend(block.iter().map(|code| nibble(*code) * scale));
                        values.extend(block.iter().map(|code| nibble(code >> 4) * scale));
                    }
                }
            }
        })?;
        Ok(Tensor::from_vec(values, self.dims.as_slice(), device)?)
    }
}
