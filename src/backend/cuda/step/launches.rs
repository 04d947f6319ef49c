//! The launches of a step, and what ranks exchange between them.

use super::super::bindings::{
    CqAttend, CqDeltaNet, CqDense, CqDequantize, CqElementwise, CqEmbed, CqExperts, CqGemv, CqNorm, CqRoute,
    CqSample, CqSimt, CqWeightedSum,
};
use super::super::kernel::Kernel;
use super::super::launch::{launch, Grid};
use crate::distributed::StreamCollective;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, DType, Result};

/// What is put into a stream.
#[allow(clippy::large_enum_variant, reason = "nearly all are launches")]
pub(super) enum Entry {
    Launch(Launch),
    Exchange(Exchange),
}

/// What ranks do together with the memory of their devices.
pub(super) enum Exchange {
    /// Numbers become their sums over all ranks.
    Sum { address: u64, count: usize, dtype: DType },
    /// Parts of rows at the first address, of so many numbers on each rank, become whole rows at the second.
    Gather { addresses: [u64; 2], rows: usize, counts: Vec<usize>, dtype: DType },
}

impl Entry {
    /// `ranks` are those of the plan.
    ///
    /// # Safety
    /// As that of [`launch`] and of [`StreamCollective`].
    pub(super) unsafe fn submit(
        &self,
        stream: &CudaStream,
        ranks: Option<&dyn StreamCollective>,
    ) -> Result<()> {
        let to = stream.cu_stream().cast();
        // SAFETY: the caller promises it.
        unsafe {
            match (self, ranks) {
                (Self::Launch(launch), _) => launch.submit(stream),
                (Self::Exchange(Exchange::Sum { address, count, dtype }), Some(ranks)) => {
                    Ok(ranks.all_reduce_sum(*address, *count, *dtype, to)?)
                }
                (Self::Exchange(Exchange::Gather { addresses, rows, counts, dtype }), Some(ranks)) => {
                    Ok(ranks.all_gather(*addresses, *rows, counts, *dtype, to)?)
                }
                (Self::Exchange(_), None) => bail!("a part of a plan without other ranks"),
            }
        }
    }
}

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
    DeltaNet(CqDeltaNet),
    Route(CqRoute),
    Experts(CqExperts),
    WeightedSum(CqWeightedSum),
    Elementwise(CqElementwise),
    Sample(CqSample),
}

impl Launch {
    /// # Safety
    /// As that of [`launch`].
    unsafe fn submit(&self, stream: &CudaStream) -> Result<()> {
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
                LaunchParams::DeltaNet(params) => launch(stream, kernel, grid, params),
                LaunchParams::Route(params) => launch(stream, kernel, grid, params),
                LaunchParams::Experts(params) => launch(stream, kernel, grid, params),
                LaunchParams::WeightedSum(params) => launch(stream, kernel, grid, params),
                LaunchParams::Elementwise(params) => launch(stream, kernel, grid, params),
                LaunchParams::Sample(params) => launch(stream, kernel, grid, params),
            }
        }
    }
}
