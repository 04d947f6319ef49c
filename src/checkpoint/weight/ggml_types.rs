//! The types of tensors by the numbers that GGUF files use.

use super::ggml_packed::GgmlCodes;
use candle_core::quantized::GgmlDType;
use safetensors::Dtype;
use std::ops::Range;

/// A type: so many elements take so many bytes, a block.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) struct BlockType {
    pub name: &'static str,
    pub elements: usize,
    pub bytes: usize,
    pub kind: Kind,
}

/// What becomes of tensors of a type.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) enum Kind {
    /// Dense elements.
    Dense(Dtype),
    /// Known to candle, too.
    Ggml(GgmlDType),
    /// MXFP4, the order of its nibbles given.
    Mxfp4(Nibbles),
    /// NVFP4.
    Nvfp4,
    /// Codes and scales of a format of this crate that candle does not know.
    Packed(GgmlCodes),
}

/// Which two elements of a block share a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum Nibbles {
    /// Element i of the first half (low) and of the second half (high).
    Halves,
    /// Neighbours, the first one low.
    Adjacent,
}

/// The number that files of gpt-oss from before there was a number for MXFP4 give to it. It had been that of a
/// type that was dropped long before.
pub(in crate::checkpoint) const EARLY_MXFP4: u32 = 4;

/// All numbers of types are among these.
const NUMBERS: Range<u32> = 0..64;

/// The number of the first type of such a kind, and the type.
pub(super) fn type_where(fits: impl Fn(Kind) -> bool) -> Option<(u32, BlockType)> {
    NUMBERS.into_iter().find_map(|id| {
        let of_number = block_type(id, false).filter(|block| fits(block.kind))?;
        Some((id, of_number))
    })
}

/// For tests (feature `testing`): number and name of each type, and elements and bytes of a block.
#[cfg(feature = "testing")]
pub fn block_types() -> Vec<(u32, &'static str, usize, usize)> {
    let of_number = |id| {
        let BlockType { name, elements, bytes, .. } = block_type(id, false)?;
        Some((id, name, elements, bytes))
    };
    NUMBERS.filter_map(of_number).collect()
}

/// The type of this number; `None` if it is unknown, and with it the size of a tensor. `early_mxfp4` says whether
/// the file holds such a model.
pub(in crate::checkpoint) fn block_type(id: u32, early_mxfp4: bool) -> Option<BlockType> {
    use GgmlDType as G;
    let (name, elements, bytes, kind) = match id {
        0 => ("F32", 1, 4, Kind::Dense(Dtype::F32)),
        1 => ("F16", 1, 2, Kind::Dense(Dtype::F16)),
        2 => ("Q4_0", 32, 18, Kind::Ggml(G::Q4_0)),
        3 => ("Q4_1", 32, 20, Kind::Ggml(G::Q4_1)),
        EARLY_MXFP4 if early_mxfp4 => ("MXFP4", 32, 17, Kind::Mxfp4(Nibbles::Adjacent)),
        6 => ("Q5_0", 32, 22, Kind::Ggml(G::Q5_0)),
        7 => ("Q5_1", 32, 24, Kind::Ggml(G::Q5_1)),
        8 => ("Q8_0", 32, 34, Kind::Ggml(G::Q8_0)),
        9 => ("Q8_1", 32, 36, Kind::Ggml(G::Q8_1)),
        10 => ("Q2_K", 256, 84, Kind::Ggml(G::Q2K)),
        11 => ("Q3_K", 256, 110, Kind::Ggml(G::Q3K)),
        12 => ("Q4_K", 256, 144, Kind::Ggml(G::Q4K)),
        13 => ("Q5_K", 256, 176, Kind::Ggml(G::Q5K)),
        14 => ("Q6_K", 256, 210, Kind::Ggml(G::Q6K)),
        15 => ("Q8_K", 256, 292, Kind::Ggml(G::Q8K)),
        16 => ("IQ2_XXS", 256, 66, Kind::Packed(GgmlCodes::IQ2_XXS)),
        17 => ("IQ2_XS", 256, 74, Kind::Packed(GgmlCodes::IQ2_XS)),
        18 => ("IQ3_XXS", 256, 98, Kind::Packed(GgmlCodes::IQ3_XXS)),
        19 => ("IQ1_S", 256, 50, Kind::Packed(GgmlCodes::IQ1_S)),
        20 => ("IQ4_NL", 32, 18, Kind::Packed(GgmlCodes::IQ4_NL)),
        21 => ("IQ3_S", 256, 110, Kind::Packed(GgmlCodes::IQ3_S)),
        22 => ("IQ2_S", 256, 82, Kind::Packed(GgmlCodes::IQ2_S)),
        23 => ("IQ4_XS", 256, 136, Kind::Packed(GgmlCodes::IQ4_XS)),
        24 => ("I8", 1, 1, Kind::Dense(Dtype::I8)),
        25 => ("I16", 1, 2, Kind::Dense(Dtype::I16)),
        26 => ("I32", 1, 4, Kind::Dense(Dtype::I32)),
        27 => ("I64", 1, 8, Kind::Dense(Dtype::I64)),
        28 => ("F64", 1, 8, Kind::Dense(Dtype::F64)),
        29 => ("IQ1_M", 256, 56, Kind::Packed(GgmlCodes::IQ1_M)),
        30 => ("BF16", 1, 2, Kind::Dense(Dtype::BF16)),
        34 => ("TQ1_0", 256, 54, Kind::Packed(GgmlCodes::ternary(54)?)),
        35 => ("TQ2_0", 256, 66, Kind::Packed(GgmlCodes::ternary(66)?)),
        39 => ("MXFP4", 32, 17, Kind::Mxfp4(Nibbles::Halves)),
        40 => ("NVFP4", 64, 36, Kind::Nvfp4),
        41 => ("Q1_0", 128, 18, Kind::Packed(GgmlCodes::q1_0()?)),
        _ => return None,
    };
    Some(BlockType { name, elements, bytes, kind })
}
