//! The one place where kernels are launched.

use super::bindings::{
    CqAbsmax, CqAppend, CqAttend, CqAttendPrompt, CqDeltaNet, CqDense, CqDequantize, CqElementwise, CqEmbed,
    CqExperts, CqFillBias, CqGemv, CqNorm, CqQuantize, CqRoute, CqSample, CqSimt, CqSortPairs, CqTiles,
    CqTilesX, CqWeightedSum,
};
use super::card::EarlyStart;
use super::kernel::Kernel;
use super::module;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::{bail, Result};

/// The parameter struct of a kernel.
pub(super) trait Params: Copy {
    fn fits(kernel: Kernel) -> bool;
}

macro_rules! params {
    ($($params:ty => $kernel:pat),* $(,)?) => {
        $(impl Params for $params {
            fn fits(kernel: Kernel) -> bool {
                matches!(kernel, $kernel)
            }
        })*
    };
}
params! {
    CqGemv => Kernel::Gemv { .. },
    CqSimt => Kernel::Simt(_),
    CqDense => Kernel::Dense { .. },
    CqEmbed => Kernel::Embed,
    CqExperts => Kernel::GemvExperts(_) | Kernel::SimtExperts(_),
    CqTiles => Kernel::Tiles { .. },
    CqTilesX => Kernel::TilesX,
    CqSortPairs => Kernel::SortPairs,
    CqWeightedSum => Kernel::WeightedSum,
    CqRoute => Kernel::Route,
    CqAttend => Kernel::Attend { .. } | Kernel::AttendF32 | Kernel::AttendCodes { .. },
    CqAttendPrompt => Kernel::AttendPrompt { .. } | Kernel::AttendPromptCodes { .. },
    CqAppend => Kernel::AppendCodes { .. },
    CqDeltaNet => Kernel::DeltaNet { .. },
    CqDequantize => Kernel::Dequantize(_),
    CqQuantize => Kernel::Quantize(_),
    CqFillBias => Kernel::FillBias,
    CqAbsmax => Kernel::Absmax,
    CqSample => Kernel::Sample(_),
    CqNorm => Kernel::Norm | Kernel::Order,
    CqElementwise => Kernel::Elementwise,
}

/// Blocks and the shared memory of each, all of it dynamic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: (usize, usize),
    pub(super) shared_bytes: usize,
}

/// Puts a kernel into the stream.
///
/// # Safety
/// Every pointer in `params` is null where the header allows it, or points to device memory of the
/// stream's context that holds what the header says, until the kernel has run. Nobody writes what the
/// kernel reads, or touches what it writes, but work ordered by this stream. Weights, positions, and the settled
/// rows of a cache, were complete before the kernel ahead of this one in the stream was launched, or were copied behind that.
pub(super) unsafe fn launch<P: Params>(
    stream: &CudaStream,
    kernel: Kernel,
    grid: Grid,
    params: &P,
) -> Result<()> {
    if !P::fits(kernel) {
        bail!("{kernel} takes other parameters than {}", std::any::type_name::<P>());
    }
    let dimension = |blocks: usize, most: u32| match u32::try_from(blocks) {
        Ok(blocks) if blocks <= most => Ok(blocks),
        _ => bail!("{kernel}: {blocks} blocks are more than the {most} that a grid may have"),
    };
    let (x, y) = (dimension(grid.blocks.0, i32::MAX as u32)?, dimension(grid.blocks.1, u16::MAX.into())?);
    if x == 0 || y == 0 {
        return Ok(());
    }
    let loaded = module::load(stream.context(), kernel)?;
    let most = loaded.most_shared_bytes;
    if grid.shared_bytes > most {
        bail!(
            "{kernel}: {} bytes of shared memory are more than the {most} of a block here",
            grid.shared_bytes
        );
    }
    let starts_early = kernel.starts_early()
        && match loaded.card.early_start {
            EarlyStart::Never => false,
            EarlyStart::Always => true,
            EarlyStart::OutsideGraphs => {
                stream.capture_status().w()? == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
            }
        };
    let mut early_start = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: 1,
        blockDimX: kernel.threads(),
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: dimension(grid.shared_bytes, u32::MAX)?,
        hStream: stream.cu_stream(),
        attrs: &mut early_start,
        numAttrs: u32::from(starts_early),
    };
    let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
    stream.context().bind_to_thread().w()?;
    // SAFETY: the driver copies the struct, which is the one that the kernel takes, before it returns;
    // the caller answers for the pointers in it.
    let launched = unsafe {
        sys::cuLaunchKernelEx(
            &config,
            loaded.function.cu_function(),
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    launched.result().w().map_err(|error| error.context(format!("launching {kernel}, {grid:?}")))
}
