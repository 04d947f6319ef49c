//! Signed codes with F32 scales, as this crate's symmetric formats or dequantized.

use super::options::NibbleOrder;
use crate::checkpoint::file::StoredTensor;
use crate::checkpoint::weight::{Dequantize, Layout, MlxForm, Slice};
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
    /// The packed format whose groups are parts of the blocks, if there is one.
    pub format: Option<QuantFormat>,
}

/// The width of a code.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bits {
    Four(NibbleOrder),
    Eight,
}

impl SignedBlocks {
    /// Codes and scales of a tensor of shape `dims`.
    pub fn new(
        bits: Bits,
        dims: Vec<usize>,
        codes: StoredTensor,
        scales: StoredTensor,
        block: usize,
    ) -> Self {
        let width = match bits {
            Bits::Four(_) => 4,
            Bits::Eight => 8,
        };
        let group_size = [128, 64, 32].into_iter().find(|group_size| block.is_multiple_of(*group_size));
        let format = group_size
            .filter(|_| dims.len() == 2)
            .and_then(|group_size| QuantFormat::symmetric_opt(width, group_size));
        Self { bits, dims, codes, scales, block, format }
    }

    fn block_bytes(&self) -> usize {
        match self.bits {
            Bits::Four(_) => self.block / 2,
            Bits::Eight => self.block,
        }
    }

    fn read_scales(&self) -> Result<Vec<f32>> {
        self.scales.read::<f32>()
    }

    /// Elements along K that a part keeps together: with one scale for a row any, but the packed format's groups.
    fn whole_elements(&self) -> usize {
        match self.bits {
            Bits::Four(_) => self.block,
            Bits::Eight => self.format.map_or(1, QuantFormat::group_size),
        }
    }

    fn part(&self, slice: &Slice) -> Result<Self> {
        let of_blocks = |stored: &StoredTensor, bytes: usize| slice.of(stored, self.block, bytes);
        let dims = slice.part_dims();
        let (codes, scales, block) = match self.bits {
            Bits::Eight if slice.along_k() => {
                (slice.of(&self.codes, 1, 1)?, self.scales.clone(), slice.range.len())
            }
            Bits::Four(_) | Bits::Eight => (
                of_blocks(&self.codes, self.block_bytes())?,
                of_blocks(&self.scales, size_of::<f32>())?,
                self.block,
            ),
        };
        Ok(Self { bits: self.bits, dims, codes, scales, block, format: self.format })
    }

    fn size_in_bytes(&self) -> usize {
        self.codes.size_in_bytes() + self.scales.size_in_bytes()
    }
}

impl Layout for SignedBlocks {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn mlx_form(&self) -> Result<MlxForm> {
        let bits = self.format.and_then(|format| format.element().uint());
        bits.map_or(Ok(MlxForm::ROUNDED), |bits| MlxForm::of_symmetric(&self.scales, bits))
    }

    /// Signed codes become unsigned ones by their highest bit; scales are repeated for every group of a block.
    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let format = self.format.ok_or_else(|| crate::Error::Unsupported {
            what: format!("blocks of {} elements", self.block),
            remedy: "load the tensor as numbers".into(),
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
        self.codes.for_each_chunk(block_bytes, |bytes| match self.bits {
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

    fn granularity(&self) -> usize {
        self.whole_elements()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        Ok(Arc::new(self.part(slice)?))
    }
}

impl Dequantize for SignedBlocks {
    fn size_in_bytes(&self) -> usize {
        self.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let scales = self.read_scales()?;
        let mut values = Vec::with_capacity(self.dims.iter().product());
        let nibble = |code: u8| f32::from(((code & 15) ^ 8) as i8 - 8);
        let block_bytes = self.block_bytes();
        let mut scales = scales.into_iter();
        self.codes.for_each_chunk(block_bytes, |bytes| {
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

    fn granularity(&self) -> usize {
        self.whole_elements()
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        if slice.cuts(self.whole_elements()) {
            return Ok(None);
        }
        Ok(Some(Arc::new(self.part(slice)?)))
    }
}
