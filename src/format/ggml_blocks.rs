//! Blocks of GGML's types, as they are written: what the readers of such blocks take apart.
//!
//! The layouts are those of ggml-common.h; the order of elements is that of the `dequantize_row` functions in ggml-quants.c.

use super::ggml::SUPER_BLOCK;
use super::ggml_super_blocks::{self as super_blocks, Group};
use super::{ggml_quantize, unpack, GroupScales, QuantFormat, QuantizedRows, Quantizer};
use crate::{Error, Result};
use half::f16;

/// A type of GGML that rows are quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgmlType {
    /// 4-bit codes around 8, an F16 scale for each 32.
    Q4_0,
    /// 4-bit codes, an F16 scale and an F16 bias for each 32.
    Q4_1,
    /// 5-bit codes around 16, an F16 scale for each 32.
    Q5_0,
    /// 5-bit codes, an F16 scale and an F16 bias for each 32.
    Q5_1,
    /// Signed bytes, an F16 scale for each 32.
    Q8_0,
    /// 2-bit codes, 4-bit scales and biases for each 16, in super-blocks.
    Q2K,
    /// 3-bit codes around 4, 6-bit scales for each 16, in super-blocks.
    Q3K,
    /// 4-bit codes, 6-bit scales and biases for each 32, in super-blocks.
    Q4K,
    /// 5-bit codes, 6-bit scales and biases for each 32, in super-blocks.
    Q5K,
    /// 6-bit codes around 32, 8-bit scales for each 16, in super-blocks.
    Q6K,
    /// E2M1 codes, an E8M0 scale for each 32.
    Mxfp4,
    /// E2M1 codes, an E4M3 scale for each 16, four of which are a block.
    Nvfp4,
}

impl GgmlType {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Mxfp4,
        Self::Nvfp4,
    ];

    /// The name in upper case, as GGML has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Mxfp4 => "MXFP4",
            Self::Nvfp4 => "NVFP4",
        }
    }

    /// The number that GGUF files use.
    pub const fn id(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2K => 10,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Mxfp4 => 39,
            Self::Nvfp4 => 40,
        }
    }

    /// Elements and bytes of a block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q2K => (SUPER_BLOCK, 84),
            Self::Q3K => (SUPER_BLOCK, 110),
            Self::Q4K => (SUPER_BLOCK, 144),
            Self::Q5K => (SUPER_BLOCK, 176),
            Self::Q6K => (SUPER_BLOCK, 210),
            Self::Mxfp4 => (32, 17),
            Self::Nvfp4 => (64, 36),
        }
    }

    /// The format that means the same; that of types without super-blocks with F16 scales.
    pub const fn format(self) -> QuantFormat {
        const FOUR: QuantFormat = QuantFormat::symmetric_opt(4, 32).unwrap();
        const FIVE: QuantFormat = QuantFormat::symmetric_opt(5, 32).unwrap();
        const EIGHT: QuantFormat = QuantFormat::symmetric_opt(8, 32).unwrap();
        match self {
            Self::Q4_0 => FOUR,
            Self::Q4_1 => FOUR.with_biases(),
            Self::Q5_0 => FIVE,
            Self::Q5_1 => FIVE.with_biases(),
            Self::Q8_0 => EIGHT,
            Self::Q2K => QuantFormat::Q2_K,
            Self::Q3K => QuantFormat::Q3_K,
            Self::Q4K => QuantFormat::Q4_K,
            Self::Q5K => QuantFormat::Q5_K,
            Self::Q6K => QuantFormat::Q6_K,
            Self::Mxfp4 => QuantFormat::MXFP4,
            Self::Nvfp4 => QuantFormat::NVFP4,
        }
    }

    /// The type that means the same as a format. Those whose format has other numbers in MLX's layout are not found: Q4_1, Q5_1.
    pub fn of(format: QuantFormat) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.format() == format && !kind.is_affine())
    }

    /// Whether its format is one of MLX's, too, of which the scales are no F16 numbers.
    pub const fn is_affine(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q5_1)
    }

    /// Bytes of so many elements, which are whole blocks.
    pub const fn size_in_bytes(self, elements: u64) -> u64 {
        let (of_block, bytes) = self.block();
        elements / of_block as u64 * bytes as u64
    }

    /// Appends the blocks of a row of finite weights, and sets `values` to what they mean. Those without super-blocks are of ggml's
    /// reference, bit for bit; `search` looks for a smaller squared error, which those of super-blocks have anyway.
    ///
    /// # Errors
    /// If the row is no whole number of blocks.
    pub fn quantize(
        self,
        weights: &[f32],
        search: bool,
        blocks: &mut Vec<u8>,
        values: &mut [f32],
    ) -> Result<()> {
        self.quantize_by(weights, None, search, blocks, values)
    }

    /// As [`quantize`](Self::quantize) with a search, where the squared errors of each column count as much as `columns` says:
    /// numbers that are not below zero.
    ///
    /// # Errors
    /// If the row is no whole number of blocks, or there are other columns.
    pub fn quantize_weighted(
        self,
        weights: &[f32],
        columns: &[f32],
        blocks: &mut Vec<u8>,
        values: &mut [f32],
    ) -> Result<()> {
        if columns.len() != weights.len() {
            let expected = format!("{} numbers", weights.len());
            return Err(Error::mismatch("columns of a row", expected, columns.len().to_string()));
        }
        self.quantize_by(weights, Some(columns), true, blocks, values)
    }

    fn quantize_by(
        self,
        weights: &[f32],
        columns: Option<&[f32]>,
        search: bool,
        blocks: &mut Vec<u8>,
        values: &mut [f32],
    ) -> Result<()> {
        let (of_block, _) = self.block();
        if !weights.len().is_multiple_of(of_block) || values.len() != weights.len() {
            let expected = format!("a multiple of {of_block}");
            return Err(Error::mismatch(
                format!("K of {}", self.name()),
                expected,
                weights.len().to_string(),
            ));
        }
        if matches!(self, Self::Mxfp4 | Self::Nvfp4) {
            return self.quantize_small_floats(weights, columns, search, blocks, values);
        }
        let all = weights.chunks_exact(of_block).zip(values.chunks_exact_mut(of_block));
        for (index, (weights, to)) in all.enumerate() {
            let start = index * of_block;
            let columns = relative(columns.and_then(|all| all.get(start..start + of_block)));
            let columns = columns.get(..of_block).unwrap_or_default();
            let group = Group { weights, columns };
            match self {
                Self::Q4_0 => ggml_quantize::q4_0(group, search, blocks, to),
                Self::Q4_1 => ggml_quantize::q4_1(group, search, blocks, to),
                Self::Q5_0 => ggml_quantize::q5_0(group, search, blocks, to),
                Self::Q5_1 => ggml_quantize::q5_1(group, search, blocks, to),
                Self::Q8_0 => ggml_quantize::q8_0(group, search, blocks, to),
                Self::Q2K => super_blocks::biased(super_blocks::Q2_K, group, blocks, to),
                Self::Q3K => super_blocks::unbiased(super_blocks::Q3_K, group, blocks, to),
                Self::Q4K => super_blocks::biased(super_blocks::Q4_K, group, blocks, to),
                Self::Q5K => super_blocks::biased(super_blocks::Q5_K, group, blocks, to),
                Self::Q6K => super_blocks::unbiased(super_blocks::Q6_K, group, blocks, to),
                Self::Mxfp4 | Self::Nvfp4 => {}
            }
        }
        Ok(())
    }

    /// Those of MXFP4 and NVFP4.
    fn quantize_small_floats(
        self,
        weights: &[f32],
        columns: Option<&[f32]>,
        search: bool,
        blocks: &mut Vec<u8>,
        values: &mut [f32],
    ) -> Result<()> {
        let (format, k) = (self.format(), weights.len());
        let mut rows = QuantizedRows::quantize(format, Quantizer::Mlx, weights, k, None)?;
        match columns {
            _ if !search => {}
            Some(columns) => rows.improve_weighted(format, weights, k, columns)?,
            None => rows.improve(format, weights, k)?,
        }
        values.copy_from_slice(&rows.dequantize(format, k, 1.)?);
        match rows.scales {
            GroupScales::Bytes(scales) => self.append(&rows.words, &scales, blocks),
            GroupScales::Float { .. } => Ok(()),
        }
    }

    /// Appends the blocks of a packed weight in this type's format: its words, and the bytes of its scales, which are F16 or
    /// bytes.
    ///
    /// # Errors
    /// If the type has biases or super-blocks: such weights have other parts.
    pub fn append(self, words: &[u32], scales: &[u8], blocks: &mut Vec<u8>) -> Result<()> {
        let (of_block, _) = self.block();
        let bits = self.format().bits();
        let bytes_of_scales = match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => 2,
            Self::Mxfp4 => 1,
            Self::Nvfp4 => 4,
            Self::Q4_1 | Self::Q5_1 | Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => {
                return Err(Error::Unsupported {
                    what: format!("blocks of {} of codes and scales", self.name()),
                    remedy: "take the blocks of the file".into(),
                })
            }
        };
        let mut codes = [0; 64];
        let codes = codes.get_mut(..of_block).unwrap_or_default();
        for (words, scales) in
            words.chunks_exact(of_block * bits / 32).zip(scales.chunks_exact(bytes_of_scales))
        {
            unpack(words, bits, codes);
            blocks.extend_from_slice(scales);
            match self {
                Self::Q8_0 => blocks.extend(codes.iter().map(|code| code ^ 0x80)),
                Self::Nvfp4 => codes.chunks_exact(16).for_each(|group| halves(group, blocks)),
                Self::Q5_0 => five_bits(codes, blocks),
                Self::Q4_0
                | Self::Mxfp4
                | Self::Q4_1
                | Self::Q5_1
                | Self::Q2K
                | Self::Q3K
                | Self::Q4K
                | Self::Q5K
                | Self::Q6K => halves(codes, blocks),
            }
        }
        Ok(())
    }
}

/// The least that a column counts, of what the one counts that counts most: what was never given anything is not made up.
const LEAST: f32 = 1e-6;

/// How much the columns of a block count, of which the most is 1.
fn relative(columns: Option<&[f32]>) -> [f32; SUPER_BLOCK] {
    let mut counts = [1.; SUPER_BLOCK];
    let columns = columns.unwrap_or_default();
    let most = columns.iter().copied().filter(|column| column.is_finite()).fold(0f32, f32::max);
    if most > 0. {
        let pairs = counts.iter_mut().zip(columns);
        pairs.for_each(|(count, column)| *count = (column / most).clamp(LEAST, 1.));
    }
    counts
}

/// Appends codes of four bits: those of the first half are the low nibbles, those of the second the high ones.
pub(super) fn halves(codes: &[u8], bytes: &mut Vec<u8>) {
    let (low, high) = codes.split_at(codes.len() / 2);
    bytes.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
}

/// Appends 32 codes of five bits: the highest of all, then four of each.
pub(super) fn five_bits(codes: &[u8], bytes: &mut Vec<u8>) {
    let high = codes.iter().rev().fold(0u32, |bits, code| bits << 1 | u32::from(code >> 4 & 1));
    bytes.extend(high.to_le_bytes());
    let low: Vec<_> = codes.iter().map(|code| code & 15).collect();
    halves(&low, bytes);
}

/// Rounded to F16, as a number; the largest one instead of an infinity.
pub(super) fn half(number: f32) -> f32 {
    let most = f16::MAX.to_f32();
    f16::from_f32(number.clamp(-most, most)).to_f32()
}

/// Appends a number that is F16 already.
pub(super) fn append_half(number: f32, bytes: &mut Vec<u8>) {
    bytes.extend(f16::from_f32(number).to_le_bytes());
}
