//! The launches of a step.

use super::super::bindings::{
    CqAttend, CqDense, CqDequantize, CqElementwise, CqEmbed, CqExperts, CqGemv, CqNorm, CqRoute, CqSample,
    CqSimt, CqWeightedSum,
};
use super::super::kernel::Kernel;
use super::super::launch::{launch, Grid};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::Result;

/// A launch, its memory known.
#[derive(Clone, Copy)]
pub(super) struct Launch {
    pub(super) kernel: Kernel,
    pub(super) grid: Grid,
    pub(super) params: LaunchParams,
}

// SAFETY: pointers of parameters are addresses on a device, which mean the same to every thread, and which none follows.
unsafe impl Send for Launch {}
// SAFETY: as above.
unsafe impl Sync for Launch {}

#[derive(Clone, Copy)]
pub(super) enum LaunchParams {
    Dequantize(CqDequantize),
    Embed(CqEmbed),
    Norm(CqNorm),
    Gemv(CqGemv),
    Simt(CqSimt),
    Dense(CqDense),
    Attend(CqAttend),
    Route(CqRoute),
    Experts(CqExperts),
    WeightedSum(CqWeightedSum),
    Elementwise(CqElementwise),
    Sample(CqSample),
}

impl Launch {
    /// # Safety
    /// As that of [`launch`].
    pub(super) unsafe fn submit(&self, stream: &CudaStream) -> Result<()> {
        let Self { kernel, grid, .. } = *self;
        // SAFETY: the caller promises it.
        unsafe {
            match &self.params {
                LaunchParams::Dequantize(params) => launch(stream, kernel, grid, params),
                LaunchParams::Embed(params) => launch(stream, kernel, grid, params),
                LaunchParams::Norm(params) => launch(stream, kernel, grid, params),
                LaunchParams::Gemv(params) => launch(stream, kernel, grid, params),
                LaunchParams::Simt(params) => launch(stream, kernel, grid, params),
                LaunchParams::Dense(params) => launch(stream, kernel, grid, params),
                LaunchParams::Attend(params) => launch(stream, kernel, grid, params),
                LaunchParams::Route(params) => launch(stream, kernel, grid, params),
                LaunchParams::Experts(params) => launch(stream, kernel, grid, params),
                LaunchParams::WeightedSum(params) => launch(stream, kernel, grid, params),
                LaunchParams::Elementwise(params) => launch(stream, kernel, grid, params),
                LaunchParams::Sample(params) => launch(stream, kernel, grid, params),
            }
        }
    }
}
