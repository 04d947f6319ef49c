//! Which kernels there are for a format: the one place that knows. `cuda/formats/<family>.cuh` lists the same, and a
//! test of [`super::kernel`] compares the two.
//!
//! A format needs nothing but the scalar half of its family's header, which gives it all of [`FormatKernels::scalar`].
//! What else is missing is slower, never wrong: without a GEMV the SIMT kernel multiplies, and without that one the
//! weight is dequantized for cuBLAS; without a quantization the CPU quantizes.

use super::kernel::Kernel;
use crate::format::{Bits, Scale, ZeroPoint};
use crate::{Error, QuantFormat, Result};

/// The kernels of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FormatKernels {
    /// The format in the names of kernels.
    name: &'static str,
    gemv: Option<GemvKernels>,
    /// The fp32 matmul on CUDA cores, and that of experts.
    simt: bool,
    /// The tensor-core GEMM of experts.
    tiles: bool,
    quantize: bool,
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
                (Scale::Float, ZeroPoint::None) | (Scale::E8m0 | Scale::E4m3, _) => None,
            },
            None => match format {
                QuantFormat::MXFP4 => Some(Self::all("mxfp4", "gemv_mx")),
                QuantFormat::MXFP8 => Some(Self::all("mxfp8", "gemv_mx")),
                QuantFormat::NVFP4 => Some(Self::all("nvfp4", "gemv_nvfp4")),
                // A format without its scalar half in cuda/formats fails the test that compares the lists.
                other => QuantFormat::named(other.mode()).map(|_| Self::scalar(other.mode())),
            },
        };
        kernels.ok_or_else(|| Error::Unsupported {
            what: format!("{format} on a CUDA device"),
            remedy: "keep the weight on Device::Cpu".to_string(),
        })
    }

    /// What a format has that is listed in `CQ_FORMATS_<FAMILY>` only.
    const fn scalar(name: &'static str) -> Self {
        Self { name, gemv: None, simt: true, tiles: true, quantize: false }
    }

    /// What a format has that is in all lists of its family.
    const fn all(name: &'static str, file: &'static str) -> Self {
        let gemv = GemvKernels { file, name, group_size: None };
        Self { gemv: Some(gemv), quantize: true, ..Self::scalar(name) }
    }

    const fn affine(bits: Bits, group_size: usize) -> Self {
        let name = integers(bits);
        let file = match bits {
            Bits::One => "gemv_affine_1",
            Bits::Two => "gemv_affine_2",
            Bits::Three => "gemv_affine_3",
            Bits::Four => "gemv_affine_4",
            Bits::Five => "gemv_affine_5",
            Bits::Six => "gemv_affine_6",
            Bits::Eight => "gemv_affine_8",
        };
        let gemv = GemvKernels { file, name, group_size: Some(group_size) };
        Self { gemv: Some(gemv), quantize: true, ..Self::scalar(name) }
    }

    /// The kernels of the affine format take the middle code for zero where there are no biases; the GEMV needs them,
    /// and nothing is quantized to such a format.
    const fn symmetric(bits: Bits) -> Self {
        Self::scalar(integers(bits))
    }

    pub(super) fn gemv(self) -> Option<GemvKernels> {
        self.gemv
    }

    /// The fp32 matmul.
    pub(super) fn simt(self) -> Option<Kernel> {
        self.simt.then_some(Kernel::Simt(self.name))
    }

    /// The fp32 matmul of pairs with their experts.
    pub(super) fn simt_experts(self) -> Option<Kernel> {
        self.simt.then_some(Kernel::SimtExperts(self.name))
    }

    /// The tensor-core GEMM of tiles of pairs with their experts.
    pub(super) fn tiles(self, bf16: bool) -> Option<Kernel> {
        self.tiles.then_some(Kernel::Tiles { format: self.name, bf16 })
    }

    pub(super) fn dequantize(self) -> Kernel {
        Kernel::Dequantize(self.name)
    }

    pub(super) fn quantize(self) -> Option<Kernel> {
        self.quantize.then_some(Kernel::Quantize(self.name))
    }
}

/// Integer codes in the names of kernels.
const fn integers(bits: Bits) -> &'static str {
    match bits {
        Bits::One => "a1",
        Bits::Two => "a2",
        Bits::Three => "a3",
        Bits::Four => "a4",
        Bits::Five => "a5",
        Bits::Six => "a6",
        Bits::Eight => "a8",
    }
}

#[cfg(test)]
impl FormatKernels {
    /// The least a format can have.
    pub(super) const DEQUANTIZE_ALONE: Self =
        Self { name: "test", gemv: None, simt: false, tiles: false, quantize: false };
    pub(super) const SCALAR: Self = Self::scalar("test");
}
