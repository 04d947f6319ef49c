//! Which kernels there are for a format: the one place that knows. `cuda/formats/<family>.cuh` lists the same, and a
//! test of [`super::kernel`] compares the two.
//!
//! A format may have no GEMV: the SIMT kernel multiplies few rows of x then, slower, never wrong.

use super::kernel::Kernel;
use crate::format::{Bits, Element, Scale, ZeroPoint};
use crate::{Error, QuantFormat, Result};

/// The kernels of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FormatKernels {
    /// The format in the names of kernels.
    name: &'static str,
    gemv: Option<GemvKernels>,
    tiles: TileKernels,
}

/// The tensor-core GEMV kernels of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GemvKernels {
    /// The source file, without its extension.
    pub(super) file: &'static str,
    pub(super) name: &'static str,
    /// In the names of kernels, if there are several for a format.
    pub(super) group_size: Option<usize>,
}

/// The tensor-core GEMM kernels of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TileKernels {
    /// The source file, without its extension.
    pub(super) file: &'static str,
    pub(super) name: &'static str,
    /// Weights whose products are added up before a scale is applied: 16, 32 or 64.
    pub(super) group: usize,
    /// Whether that is in the names of kernels, since there are several for a format.
    pub(super) several: bool,
}

impl FormatKernels {
    /// # Errors
    /// If the format has no kernels at all.
    pub(super) fn of(format: QuantFormat) -> Result<Self> {
        let kernels = match format.element().uint() {
            Some(bits) => match (format.scale(), format.zero_point()) {
                (Scale::Float, ZeroPoint::Bias) => Some(Self::affine(bits, format.group_size())),
                (Scale::Float, ZeroPoint::Midpoint) => Some(Self::symmetric(bits, format.group_size())),
                (Scale::SuperBlock, _) => Self::ggml(format),
                (Scale::Float, ZeroPoint::None) | (Scale::E8m0 | Scale::E4m3, _) => None,
            },
            None => match format {
                QuantFormat::MXFP4 => Some(Self::all("mxfp4", "gemv_mx", "tiles_float", 32)),
                QuantFormat::MXFP8 => Some(Self::all("mxfp8", "gemv_mx", "tiles_float", 32)),
                QuantFormat::NVFP4 => Some(Self::all("nvfp4", "gemv_nvfp4", "tiles_float", 16)),
                QuantFormat::MXINT8 => Some(Self::without_gemv("mxint8", "tiles_float", 32)),
                QuantFormat::NF4 => Some(Self::without_gemv("nf4", "tiles_float", 32)),
                QuantFormat::FP4 => Some(Self::without_gemv("fp4", "tiles_float", 32)),
                _ if format.element() == Element::E4m3 && format.scale() == Scale::Float => {
                    let tiles = TileKernels::by_group("fp8", "tiles_float", format.group_size());
                    Some(Self { name: "fp8", gemv: None, tiles })
                }
                _ => Self::ggml(format),
            },
        };
        kernels.ok_or_else(|| Error::Unsupported {
            what: format!("{format} on a CUDA device"),
            remedy: "keep the weight on Device::Cpu".to_string(),
        })
    }

    /// What a format has that is in no list but `CQ_FORMATS_<FAMILY>`, `CQ_TILES_<FAMILY>`, and `CQ_QUANTIZE_<FAMILY>` if weights
    /// are quantized to it.
    const fn without_gemv(name: &'static str, tiles: &'static str, group: usize) -> Self {
        Self { name, gemv: None, tiles: TileKernels { file: tiles, name, group, several: false } }
    }

    /// What a format has that is in all lists of its family.
    const fn all(name: &'static str, gemv: &'static str, tiles: &'static str, group: usize) -> Self {
        let gemv = GemvKernels { file: gemv, name, group_size: None };
        Self { gemv: Some(gemv), ..Self::without_gemv(name, tiles, group) }
    }

    const fn affine(bits: Bits, group_size: usize) -> Self {
        let (name, file, _) = integers(bits);
        let gemv = GemvKernels { file, name, group_size: Some(group_size) };
        Self { gemv: Some(gemv), ..Self::symmetric(bits, group_size) }
    }

    const fn ggml(format: QuantFormat) -> Option<Self> {
        const fn k(name: &'static str, group: usize) -> FormatKernels {
            FormatKernels::all(name, "gemv_k", "tiles_k", group)
        }
        const fn iq(name: &'static str, group: usize) -> FormatKernels {
            FormatKernels::all(name, "gemv_iq", "tiles_iq", group)
        }
        Some(match format {
            QuantFormat::Q2_K => k("q2_k", 16),
            QuantFormat::Q3_K => k("q3_k", 16),
            QuantFormat::Q4_K => k("q4_k", 32),
            QuantFormat::Q5_K => k("q5_k", 32),
            QuantFormat::Q6_K => k("q6_k", 16),
            QuantFormat::IQ4_XS => iq("iq4_xs", 32),
            QuantFormat::IQ4_NL => iq("iq4_nl", 32),
            QuantFormat::IQ1_S => iq("iq1_s", 32),
            QuantFormat::IQ1_M => iq("iq1_m", 16),
            QuantFormat::IQ2_XXS => iq("iq2_xxs", 32),
            QuantFormat::IQ2_XS => iq("iq2_xs", 16),
            QuantFormat::IQ3_XXS => iq("iq3_xxs", 32),
            QuantFormat::IQ3_S => iq("iq3_s", 32),
            _ => return None,
        })
    }

    /// The scalar kernels of the affine format take the middle code for zero where there are no biases, as scales in f32 leave it;
    /// those of tensor cores, which take no such scales, need biases.
    const fn symmetric(bits: Bits, group_size: usize) -> Self {
        let (name, _, tiles) = integers(bits);
        Self { name, gemv: None, tiles: TileKernels::by_group(name, tiles, group_size) }
    }

    pub(super) fn gemv(self) -> Option<GemvKernels> {
        self.gemv
    }

    /// The fp32 matmul.
    pub(super) fn simt(self) -> Kernel {
        Kernel::Simt(self.name)
    }

    /// The fp32 matmul of pairs with their experts.
    pub(super) fn simt_experts(self) -> Kernel {
        Kernel::SimtExperts(self.name)
    }

    pub(super) fn tiles(self) -> TileKernels {
        self.tiles
    }

    pub(super) fn dequantize(self) -> Kernel {
        Kernel::Dequantize(self.name)
    }

    pub(super) fn quantize(self) -> Kernel {
        Kernel::Quantize(self.name)
    }
}

impl TileKernels {
    /// Groups of more than 64 are multiplied as several of 64.
    const fn by_group(name: &'static str, file: &'static str, group_size: usize) -> Self {
        Self { file, name, group: if group_size > 32 { 64 } else { 32 }, several: true }
    }
}

/// Integer codes in the names of kernels, the file of their GEMV and that of their GEMM.
const fn integers(bits: Bits) -> (&'static str, &'static str, &'static str) {
    match bits {
        Bits::One => ("a1", "gemv_affine_1", "tiles_affine_narrow"),
        Bits::Two => ("a2", "gemv_affine_2", "tiles_affine_narrow"),
        Bits::Three => ("a3", "gemv_affine_3", "tiles_affine_narrow"),
        Bits::Four => ("a4", "gemv_affine_4", "tiles_affine_wide"),
        Bits::Five => ("a5", "gemv_affine_5", "tiles_affine_wide"),
        Bits::Six => ("a6", "gemv_affine_6", "tiles_affine_wide"),
        Bits::Eight => ("a8", "gemv_affine_8", "tiles_affine_wide"),
    }
}
