//! Dequantized weights on their way to cuBLAS: two halves, of which one is filled while the other one is multiplied.

use candle_core::cuda_backend::cudarc::driver::{result, sys, CudaContext, CudaEvent, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::sync::Arc;

/// A place for a part of a weight, or two that take turns.
pub(super) struct Scratch<'a> {
    pub(super) addresses: [u64; 2],
    /// Fills the two; with one place, the device's stream does everything in turn.
    pub(super) side: Option<&'a SideStream>,
}

impl Scratch<'_> {
    /// Submits the parts of a weight: `fill` puts one into a stream and to an address, `multiply` that from there into
    /// the device's stream.
    pub(super) fn each_part<P: Clone>(
        &self,
        device: &CudaStream,
        parts: impl Iterator<Item = P>,
        fill: impl Fn(&CudaStream, P, u64) -> Result<()>,
        multiply: impl Fn(P, u64) -> Result<()>,
    ) -> Result<()> {
        let Some(side) = self.side else {
            let [place, _] = self.addresses;
            let mut parts = parts;
            return parts.try_for_each(|part| {
                fill(device, part.clone(), place)?;
                multiply(part, place)
            });
        };
        let halves = side.halves.iter().zip(self.addresses);
        // What the device's stream does with the scratch now comes first.
        side.halves.iter().try_for_each(|half| half.used.record(device)).w()?;
        for (part, (half, place)) in parts.zip(halves.cycle()) {
            let stream = side.stream.stream();
            stream.wait(&half.used).w()?;
            fill(stream, part.clone(), place)?;
            half.filled.record(stream).w()?;
            device.wait(&half.filled).w()?;
            multiply(part, place)?;
            half.used.record(device).w()?;
        }
        Ok(())
    }
}

/// A stream beside the one of a device.
pub(super) struct SideStream {
    stream: OwnStream,
    halves: [Half; 2],
}

/// How far the streams are with a half.
struct Half {
    filled: CudaEvent,
    /// The device's stream has multiplied it.
    used: CudaEvent,
}

impl SideStream {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)).w();
        let half = || Ok::<_, candle_core::Error>(Half { filled: event()?, used: event()? });
        Ok(Self { halves: [half()?, half()?], stream: OwnStream::new(context)? })
    }
}

/// A stream that is not one of cudarc's own: with a second one of those it would record events for every tensor of the
/// device, for which a CUDA graph cannot wait.
pub(super) struct OwnStream(Arc<CudaStream>);

impl OwnStream {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        context.bind_to_thread().w()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking).w()?;
        // SAFETY: a stream of this context, which `drop` destroys and nobody else; events order what is submitted to it.
        Ok(Self(unsafe { context.wrap_borrowed_stream(raw) }))
    }

    pub(super) fn stream(&self) -> &CudaStream {
        &self.0
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // Errors have nowhere to go. The driver frees the stream when its work is done.
        let _ = self.0.context().bind_to_thread();
        // SAFETY: made in `new`; the wrapper, which goes with this, does not touch it any more.
        let _ = unsafe { result::stream::destroy(self.0.cu_stream()) };
    }
}
