//! The kernels of `cuda/` by name.

use super::formats::GemvKernels;
use std::fmt;

/// A kernel of `cuda/`. Those of a format have its name in them; [`super::formats`] makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    /// The tensor-core GEMV of up to `rows` rows of x.
    Gemv {
        format: GemvKernels,
        rows: usize,
    },
    /// The tensor-core GEMV of one row of x with each of the experts that were chosen for it.
    GemvExperts(GemvKernels),
    /// The fp32 matmul.
    Simt(&'static str),
    /// The fp32 matmul of tiles of pairs with their experts.
    SimtExperts(&'static str),
    /// The same on tensor cores.
    Tiles {
        format: &'static str,
        bf16: bool,
    },
    SortPairs,
    WeightedSum,
    Dequantize(&'static str),
    Quantize(&'static str),
    FillBias,
    Absmax,
}

impl Kernel {
    /// The source file, without its extension.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::Gemv { format, .. } | Self::GemvExperts(format) => format.file,
            Self::Simt(_) | Self::SimtExperts(_) => "simt",
            Self::Tiles { .. } => "tiles",
            Self::SortPairs | Self::WeightedSum => "experts",
            Self::Dequantize(_) => "dequantize",
            Self::Quantize(_) => "quantize",
            Self::FillBias => "fill_bias",
            Self::Absmax => "absmax",
        }
    }

    /// Whether it may start before the kernel ahead of it in the stream has finished, for which it
    /// waits itself.
    pub(super) fn starts_early(self) -> bool {
        match self {
            Self::Gemv { .. } | Self::GemvExperts(_) | Self::Simt(_) | Self::SimtExperts(_) => true,
            Self::Tiles { .. } | Self::SortPairs | Self::WeightedSum => true,
            Self::Dequantize(_) | Self::Quantize(_) | Self::FillBias | Self::Absmax => false,
        }
    }
}

/// The kernel's name.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gemv { format, rows } => write!(f, "gemv_{format}_m{rows}"),
            Self::GemvExperts(format) => write!(f, "gemv_{format}_experts"),
            Self::Simt(format) => write!(f, "simt_{format}"),
            Self::SimtExperts(format) => write!(f, "simt_{format}_experts"),
            Self::Tiles { format, bf16 } => {
                write!(f, "tiles_{format}_{}", if *bf16 { "bf16" } else { "f16" })
            }
            Self::SortPairs => f.write_str("experts_sort"),
            Self::WeightedSum => f.write_str("experts_sum"),
            Self::Dequantize(format) => write!(f, "dequantize_{format}"),
            Self::Quantize(format) => write!(f, "quantize_{format}"),
            Self::FillBias => f.write_str("fill_bias"),
            Self::Absmax => f.write_str("absmax"),
        }
    }
}

impl fmt::Display for GemvKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group_size {
            Some(group_size) => write!(f, "{}_g{group_size}", self.name),
            None => f.write_str(self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::formats::FormatKernels;
    use super::super::gemv::{ExpertGemv, GemvShape, Outputs};
    use super::*;
    use crate::QuantFormat;
    use std::collections::BTreeSet;
    use std::fs;
    use std::process::Command;

    /// (source file, kernel)
    type Names = BTreeSet<(String, String)>;

    /// Every format, also those that are only read.
    fn formats() -> Vec<QuantFormat> {
        let all = QuantFormat::all();
        let symmetric =
            |format: &QuantFormat| QuantFormat::symmetric(format.bits(), format.group_size()).ok();
        let integers = all.iter().filter(|format| format.has_biases()).filter_map(symmetric);
        integers.chain(all.iter().copied()).collect()
    }

    /// What the crate can launch, for weights of any format, shape and alignment, and any x.
    fn launched() -> Names {
        let mut kernels = vec![Kernel::SortPairs, Kernel::WeightedSum, Kernel::FillBias, Kernel::Absmax];
        for format in formats() {
            let of_format = FormatKernels::of(format).unwrap();
            kernels.extend([of_format.dequantize(), of_format.simt(), of_format.simt_experts()]);
            kernels.extend([of_format.quantize(), of_format.tiles(true), of_format.tiles(false)]);
            let Some(gemv) = of_format.gemv() else { continue };
            for k in (1..=40).map(|groups| groups * format.group_size()) {
                for alignment in [4, 8, 16, 256] {
                    let shapes = (1..=32).filter_map(|m| GemvShape::choose(format, m, k, alignment));
                    kernels.extend(shapes.map(|shape| Kernel::Gemv { format: gemv, rows: shape.rows }));
                    let experts = ExpertGemv::plan(format, 64, Outputs::Each, 4, k, alignment, 48 << 10);
                    kernels.extend(experts.map(|_| Kernel::GemvExperts(gemv)));
                }
            }
        }
        kernels.into_iter().map(|kernel| (kernel.file().to_string(), kernel.to_string())).collect()
    }

    /// What the compiler sees in `cuda/`: the preprocessor leaves the names in place of the kernels' heads.
    fn compiled() -> Names {
        let stub = tempfile::tempdir().unwrap();
        fs::write(stub.path().join("emulator.h"), "").unwrap();
        let mut names = Names::new();
        for source in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda")).unwrap() {
            let source = source.unwrap().path();
            if source.extension().is_none_or(|extension| extension != "cu") {
                continue;
            }
            let mut compiler = Command::new(std::env::var("CXX").unwrap_or("c++".into()));
            compiler.args(["-E", "-P", "-std=c++17", "-DCANDLE_QUANT_EMULATED", "-x", "c++", "-I"]);
            let done = compiler.args([stub.path(), &source]).output().expect("a C++ compiler");
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let text = String::from_utf8(done.stdout).unwrap();
            let file = source.file_stem().unwrap().to_str().unwrap();
            let heads = text.split("EMULATED_KERNEL(").skip(1);
            let of_file = heads.map(|head| head.split(',').next().unwrap_or_default().trim().to_string());
            names.extend(of_file.map(|name| (file.to_string(), name)));
        }
        names
    }

    #[test]
    fn the_crate_launches_every_kernel_that_is_compiled_and_no_other() {
        let (launched, compiled) = (launched(), compiled());
        let missing: Vec<_> = launched.difference(&compiled).collect();
        assert!(missing.is_empty(), "not in cuda/: {missing:?}");
        let dead: Vec<_> = compiled.difference(&launched).collect();
        assert!(dead.is_empty(), "never launched: {dead:?}");
    }

    #[test]
    fn names_say_format_and_rows() {
        let format = QuantFormat::affine(3, 128).unwrap();
        let of_format = FormatKernels::of(format).unwrap();
        let gemv = |format| FormatKernels::of(format).unwrap().gemv().unwrap();
        assert_eq!(Kernel::Gemv { format: gemv(format), rows: 16 }.to_string(), "gemv_a3_g128_m16");
        assert_eq!(Kernel::Gemv { format: gemv(QuantFormat::NVFP4), rows: 1 }.to_string(), "gemv_nvfp4_m1");
        assert_eq!(Kernel::GemvExperts(gemv(format)).to_string(), "gemv_a3_g128_experts");
        assert_eq!(of_format.tiles(false).to_string(), "tiles_a3_f16");
        assert_eq!(of_format.dequantize().to_string(), "dequantize_a3");
    }

    /// The affine GEMV reads biases, which a symmetric weight does not have.
    #[test]
    fn symmetric_formats_have_the_scalar_kernels_of_affine_ones() {
        let of = |format: crate::Result<QuantFormat>| FormatKernels::of(format.unwrap()).unwrap();
        let (symmetric, affine) = (of(QuantFormat::symmetric(4, 64)), of(QuantFormat::affine(4, 64)));
        assert_eq!(symmetric.gemv(), None);
        assert_eq!((symmetric.simt(), symmetric.dequantize()), (affine.simt(), affine.dequantize()));
    }
}
