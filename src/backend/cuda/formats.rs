//! Which kernels there are for a format: the one place that knows. `cuda/formats/<family>.cuh` lists the same, and a
//! test of [`super::kernel`] compares the two.
//!
//! A format needs nothing but the scalar half of its family's header. Without a GEMV, which is the other half, the SIMT
//! kernel multiplies: slower, never wrong.

use super::kernel::Kernel;
use crate::format::{Bits, Element, Scale, ZeroPoint};
use crate::{Error, QuantFormat, Result};

/// The kernels of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FormatKernels {
    /// The format in the names of kernels.
    name: &'static str,
    gemv: Option<GemvKernels>,
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

impl FormatKernels {
    /// # Errors
    /// If the format has no kernels at all.
    pub(super) fn of(format: QuantFormat) -> Result<Self> {
        let kernels = match format.element().uint() {
            Some(bits) => match (format.scale(), format.zero_point()) {
                (Scale::Float, ZeroPoint::Bias) => Some(Self::affine(bits, format.group_size())),
                (Scale::Float, ZeroPoint::Midpoint) => Some(Self::symmetric(bits)),
                (Scale::SuperBlock, _) => Self::ggml(format),
                (Scale::Float, ZeroPoint::None) | (Scale::E8m0 | Scale::E4m3, _) => None,
            },
            None => match format {
                QuantFormat::MXFP4 => Some(Self::all("mxfp4", "gemv_mx")),
                QuantFormat::MXFP8 => Some(Self::all("mxfp8", "gemv_mx")),
                QuantFormat::NVFP4 => Some(Self::all("nvfp4", "gemv_nvfp4")),
                QuantFormat::MXINT8 => Some(Self::scalar("mxint8")),
                QuantFormat::NF4 => Some(Self::scalar("nf4")),
                QuantFormat::FP4 => Some(Self::scalar("fp4")),
                _ if format.element() == Element::E4m3 && format.scale() == Scale::Float => {
                    Some(Self::scalar("fp8"))
                }
                _ => Self::ggml(format),
            },
        };
        kernels.ok_or_else(|| Error::Unsupported {
            what: format!("{format} on a CUDA device"),
            remedy: "keep the weight on Device::Cpu".to_string(),
        })
    }

    /// What a format has that is in no list but `CQ_FORMATS_<FAMILY>`, and `CQ_QUANTIZE_<FAMILY>` if weights are quantized to it.
    const fn scalar(name: &'static str) -> Self {
        Self { name, gemv: None }
    }

    /// What a format has that is in all lists of its family.
    const fn all(name: &'static str, file: &'static str) -> Self {
        Self { name, gemv: Some(GemvKernels { file, name, group_size: None }) }
    }

    const fn affine(bits: Bits, group_size: usize) -> Self {
        let (name, file) = integers(bits);
        Self { name, gemv: Some(GemvKernels { file, name, group_size: Some(group_size) }) }
    }

    const fn ggml(format: QuantFormat) -> Option<Self> {
        Some(match format {
            QuantFormat::Q2_K => Self::all("q2_k", "gemv_k"),
            QuantFormat::Q3_K => Self::all("q3_k", "gemv_k"),
            QuantFormat::Q4_K => Self::all("q4_k", "gemv_k"),
            QuantFormat::Q5_K => Self::all("q5_k", "gemv_k"),
            QuantFormat::Q6_K => Self::all("q6_k", "gemv_k"),
            QuantFormat::IQ4_XS => Self::all("iq4_xs", "gemv_iq"),
            QuantFormat::IQ4_NL => Self::all("iq4_nl", "gemv_iq"),
            QuantFormat::IQ1_S => Self::all("iq1_s", "gemv_iq"),
            QuantFormat::IQ1_M => Self::all("iq1_m", "gemv_iq"),
            QuantFormat::IQ2_XXS => Self::all("iq2_xxs", "gemv_iq"),
            QuantFormat::IQ2_XS => Self::all("iq2_xs", "gemv_iq"),
            QuantFormat::IQ3_XXS => Self::all("iq3_xxs", "gemv_iq"),
            QuantFormat::IQ3_S => Self::all("iq3_s", "gemv_iq"),
            _ => return None,
        })
    }

    /// The kernels of the affine format take the middle code for zero where there are no biases; the GEMV needs them.
    const fn symmetric(bits: Bits) -> Self {
        Self::scalar(integers(bits).0)
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

    /// The tensor-core GEMM of tiles of pairs with their experts.
    pub(super) fn tiles(self, bf16: bool) -> Kernel {
        Kernel::Tiles { format: self.name, bf16 }
    }

    pub(super) fn dequantize(self) -> Kernel {
        Kernel::Dequantize(self.name)
    }

    pub(super) fn quantize(self) -> Kernel {
        Kernel::Quantize(self.name)
    }
}

/// Integer codes in the names of kernels, and the file of their GEMV.
const fn integers(bits: Bits) -> (&'static str, &'static str) {
    match bits {
        Bits::One => ("a1", "gemv_affine_1"),
        Bits::Two => ("a2", "gemv_affine_2"),
        Bits::Three => ("a3", "gemv_affine_3"),
        Bits::Four => ("a4", "gemv_affine_4"),
        Bits::Five => ("a5", "gemv_affine_5"),
        Bits::Six => ("a6", "gemv_affine_6"),
        Bits::Eight => ("a8", "gemv_affine_8"),
    }
}
