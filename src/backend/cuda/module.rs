//! The compiled kernels: each fatbin is loaded once on a device, each kernel looked up once.

use crate::format::{Bits, Element};
use crate::QuantFormat;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaContext, CudaFunction, CudaModule, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

// `FATBINS`, the name and the bytes of each.
include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// A kernel of `cuda/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    /// The tensor-core product of up to `rows` rows of x.
    Gemv {
        format: QuantFormat,
        rows: usize,
    },
    /// The tensor-core product of one row of x with each of the experts that were chosen for it.
    GemvExperts(QuantFormat),
    /// The fp32 product.
    Simt(QuantFormat),
    /// The fp32 products of tiles of pairs with their experts.
    SimtExperts(QuantFormat),
    /// Those on tensor cores.
    Tiles {
        format: QuantFormat,
        bf16: bool,
    },
    SortPairs,
    WeightedSum,
    Decode(QuantFormat),
    Encode(QuantFormat),
    FillBias,
    Absmax,
}

impl Kernel {
    /// The source file, without its extension.
    fn file(self) -> &'static str {
        match self {
            Self::Gemv { format, .. } | Self::GemvExperts(format) => match format.element() {
                Element::Uint(Bits::One) => "gemv_a1",
                Element::Uint(Bits::Two) => "gemv_a2",
                Element::Uint(Bits::Three) => "gemv_a3",
                Element::Uint(Bits::Four) => "gemv_a4",
                Element::Uint(Bits::Five) => "gemv_a5",
                Element::Uint(Bits::Six) => "gemv_a6",
                Element::Uint(Bits::Eight) => "gemv_a8",
                Element::E2m1 | Element::E4m3 => "gemv_floats",
            },
            Self::Simt(_) | Self::SimtExperts(_) => "simt",
            Self::Tiles { .. } => "tiles",
            Self::SortPairs | Self::WeightedSum => "experts",
            Self::Decode(_) => "decode",
            Self::Encode(_) => "encode",
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
            Self::Decode(_) | Self::Encode(_) | Self::FillBias | Self::Absmax => false,
        }
    }
}

/// The kernel's name.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codes = |format: &QuantFormat| match format.element() {
            Element::Uint(bits) => format!("a{}", bits.get()),
            Element::E2m1 | Element::E4m3 => format.mode().to_string(),
        };
        let groups = |format: &QuantFormat| match format.element() {
            Element::Uint(_) => format!("{}_g{}", codes(format), format.group_size()),
            Element::E2m1 | Element::E4m3 => codes(format),
        };
        match self {
            Self::Gemv { format, rows } => write!(f, "gemv_{}_m{rows}", groups(format)),
            Self::GemvExperts(format) => write!(f, "gemv_{}_experts", groups(format)),
            Self::Simt(format) => write!(f, "simt_{}", codes(format)),
            Self::SimtExperts(format) => write!(f, "simt_{}_experts", codes(format)),
            Self::Tiles { format, bf16 } => {
                write!(f, "tiles_{}_{}", codes(format), if *bf16 { "bf16" } else { "f16" })
            }
            Self::SortPairs => f.write_str("experts_sort"),
            Self::WeightedSum => f.write_str("experts_sum"),
            Self::Decode(format) => write!(f, "decode_{}", codes(format)),
            Self::Encode(format) => write!(f, "encode_{}", codes(format)),
            Self::FillBias => f.write_str("fill_bias"),
            Self::Absmax => f.write_str("absmax"),
        }
    }
}

/// A kernel on a device.
#[derive(Clone)]
pub(super) struct Loaded {
    pub(super) function: CudaFunction,
    /// Whether the device can start a kernel before the one ahead of it has finished.
    pub(super) early_start: bool,
}

/// By context: what is in it keeps the context alive, so that its address stays its own.
#[derive(Default)]
struct Cache {
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    kernels: HashMap<(usize, Kernel), Loaded>,
}

static CACHE: LazyLock<RwLock<Cache>> = LazyLock::new(RwLock::default);

/// The kernel, loaded if this is the first time that it is asked for.
pub(super) fn load(context: &Arc<CudaContext>, kernel: Kernel) -> Result<Loaded> {
    let device = context.cu_ctx() as usize;
    let cache = CACHE.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = cache.kernels.get(&(device, kernel)) {
        return Ok(loaded.clone());
    }
    drop(cache);
    let mut cache = CACHE.write().unwrap_or_else(PoisonError::into_inner);
    let file = kernel.file();
    let module = match cache.modules.get(&(device, file)) {
        Some(module) => module.clone(),
        None => {
            let module = load_module(context, file)?;
            cache.modules.insert((device, file), module.clone());
            module
        }
    };
    let function = module.load_function(&kernel.to_string()).w();
    let function = function.map_err(|error| error.context(format!("looking up the kernel {kernel}")))?;
    let loaded = Loaded { function, early_start: context.compute_capability().w()?.0 >= 9 };
    cache.kernels.insert((device, kernel), loaded.clone());
    Ok(loaded)
}

fn load_module(context: &Arc<CudaContext>, file: &'static str) -> Result<Arc<CudaModule>> {
    let Some((_, image)) = FATBINS.iter().find(|(name, _)| *name == file) else {
        candle_core::bail!("the kernels of cuda/{file}.cu were not built");
    };
    context.load_module(Ptx::from_binary(image.to_vec())).map_err(|error| {
        let told = match error {
            DriverError(sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU) => format!(
                "the kernels were built for the architectures {}, none of which serves this device; set \
                 CANDLE_QUANT_CUDA_ARCHS (to 90 for a card of compute capability 9.0, say) and build again",
                env!("CANDLE_QUANT_BUILT_ARCHS")
            ),
            _ => format!("loading the kernels of cuda/{file}.cu"),
        };
        candle_core::Error::wrap(error).context(told)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_name_and_a_file_that_was_built() {
        let mut kernels = vec![Kernel::FillBias, Kernel::Absmax, Kernel::SortPairs, Kernel::WeightedSum];
        for format in QuantFormat::all() {
            kernels.extend([Kernel::Gemv { format, rows: 8 }, Kernel::GemvExperts(format)]);
            kernels.extend([Kernel::SimtExperts(format), Kernel::Tiles { format, bf16: true }]);
            kernels.extend([Kernel::Simt(format), Kernel::Decode(format), Kernel::Encode(format)]);
        }
        for kernel in kernels {
            let file = kernel.file();
            assert!(FATBINS.iter().any(|(name, _)| *name == file), "{kernel}: no {file}.cu");
        }
        let format = QuantFormat::affine(3, 128).unwrap();
        assert_eq!(Kernel::Gemv { format, rows: 16 }.to_string(), "gemv_a3_g128_m16");
        assert_eq!(Kernel::Gemv { format: QuantFormat::NVFP4, rows: 1 }.to_string(), "gemv_nvfp4_m1");
        assert_eq!(Kernel::GemvExperts(format).to_string(), "gemv_a3_g128_experts");
        assert_eq!(Kernel::Tiles { format, bf16: false }.to_string(), "tiles_a3_f16");
        assert_eq!(Kernel::Decode(format).to_string(), "decode_a3");
    }
}
