//! The compiled kernels: each fatbin is loaded once on a device, each kernel looked up once.

use super::card::Card;
use super::kernel::Kernel;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaContext, CudaFunction, CudaModule, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

// `FATBINS`, the name and the bytes of each.
include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// A kernel on a device.
#[derive(Clone)]
pub(super) struct Loaded {
    pub(super) function: CudaFunction,
    pub(super) card: Card,
    /// The most that a launch may ask for.
    pub(super) most_shared_bytes: usize,
}

/// By context: what is in it keeps the context alive, so that its address stays its own.
#[derive(Default)]
struct Cache {
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    kernels: HashMap<(usize, Kernel), Loaded>,
}

static CACHE: LazyLock<RwLock<Cache>> = LazyLock::new(RwLock::default);

/// The kernel; loads it the first time.
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
    let card = Card::of(context)?;
    let most_shared_bytes =
        if kernel.may_stay_alone() { card.all_shared_bytes } else { card.most_shared_bytes };
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let allowed = function.set_attribute(attribute, i32::try_from(most_shared_bytes).unwrap_or(i32::MAX)).w();
    allowed.map_err(|error| {
        error.context(format!("asking for {most_shared_bytes} bytes of shared memory for {kernel}"))
    })?;
    let loaded = Loaded { function, card, most_shared_bytes };
    cache.kernels.insert((device, kernel), loaded.clone());
    Ok(loaded)
}

fn load_module(context: &Arc<CudaContext>, file: &'static str) -> Result<Arc<CudaModule>> {
    let Some((_, image)) = FATBINS.iter().find(|(name, _)| *name == file) else {
        candle_core::bail!("the kernels of cuda/{file}.cu were not built");
    };
    context.load_module(Ptx::from_binary(image.to_vec())).map_err(|error| {
        let context = match error {
            DriverError(sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU) => format!(
                "the kernels were built for the architectures {}, none of which serves this device; set \
                 CANDLE_QUANT_CUDA_ARCHS (to 90 for a card of compute capability 9.0, say) and build again",
                env!("CANDLE_QUANT_BUILT_ARCHS")
            ),
            _ => format!("loading the kernels of cuda/{file}.cu"),
        };
        candle_core::Error::wrap(error).context(context)
    })
}
