//! Attention of one new token of each sequence, with its key and value appended to the cache, in one launch.

mod call;
mod prompt;
#[cfg(test)]
mod tests;

use super::attend::{Attend, AttendShape, Cached};
use super::bindings::CqAttend;
use super::card::Card;
use super::launch::{launch, Grid};
use super::memory::{address_mut, address_of, allocate, u32_of, Contiguous, Locked};
use super::workspace;
use crate::backend::NewToken;
use crate::tensor::DeviceRows;
pub(super) use call::{AttendCall, AttendMemory, CacheAddresses, HeadNormCall, Positions, Turns};
use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::cuda_backend::WrapErr;
use candle_core::op::BackpropOp;
use candle_core::{
    bail, CpuStorage, CudaStorage, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor,
};
pub(crate) use prompt::{attend_prompt, attends_to_prompts, keeps_ring};
use std::sync::Arc;

/// An error while the stream is captured: a graph would read what the host has there when it runs.
fn can_copy_positions(stream: &CudaStream) -> Result<()> {
    match stream.capture_status().w()? {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        | CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => bail!(
            "attention to sequences of different lengths copies these to the device, whose stream is being captured: use a step \
             plan, or end the capture first"
        ),
    }
}

/// `[B, 1, heads * head_dim]`, what the tokens see of a cache, to which theirs are appended. None, with nothing appended, if there
/// is no kernel for it.
pub(crate) fn attend(cache: &DeviceRows, token: &NewToken) -> Result<Option<Tensor>> {
    let Device::Cuda(device) = cache.memory.device() else { return Ok(None) };
    let (batch, _, heads, head_dim) = token.q.dims4()?;
    let &DeviceRows { kv_heads, capacity, is_ring, .. } = cache;
    let stream = device.cuda_stream();
    let card = Card::of(stream.context())?;
    let each = match token.positions {
        [first, rest @ ..] if rest.iter().all(|position| position == first) => None,
        each => {
            can_copy_positions(&stream)?;
            let each = each.iter().map(|position| u32_of("position", *position));
            let each = each.collect::<Result<Vec<_>>>()?;
            Some(Tensor::new(each, cache.memory.device())?)
        }
    };
    let each = each.as_ref().map(Locked::new);
    let each = address_of(each.as_ref(), &stream)?;
    let positions = match (&each, token.positions.first()) {
        (None, Some(&position)) => {
            let first = token.config.first_seen(position);
            Positions::Known { first, position, settled: token.settled }
        }
        // The copy of the positions has waited for all that was launched before, and the launch waits for it.
        (Some(each), _) => Positions::OnDevice(each.get()),
        (None, None) => bail!("attention of no sequences"),
    };
    let call = AttendCall {
        shape: AttendShape { sequences: batch, heads, kv_heads, head_dim },
        dtype: token.q.dtype(),
        cached: Cached::of(cache),
        capacity,
        is_ring,
        positions,
        window: token.config.window,
        is_chunked: token.config.is_chunked,
        scale: token.scale,
        softcap: token.softcap,
        has_gate: false,
        q_norm: None,
        k_norm: None,
        turns_first: false,
        turns: Turns::default(),
    };
    let Some(plan) = call.plan(card) else { return Ok(None) };

    let [q, k, v] = [token.q, token.k, token.v].map(|tensor| Contiguous::new(tensor, &stream));
    let (q, k, v) = (q?, k?, v?);
    let (q, k, v) = (q.view()?, k.view()?, v.view()?);
    let (q, k, v) = (q.address(&stream)?, k.address(&stream)?, v.address(&stream)?);
    let sinks = token.sinks.map(Locked::new);
    let sinks = address_of(sinks.as_ref(), &stream)?;
    let (partial, arrivals) = match plan.splits {
        1 => (std::ptr::null_mut(), std::ptr::null_mut()),
        _ => workspace::with(&stream, |workspace| workspace.split_sums(plan.partial(head_dim), plan.shares))?,
    };
    let y_shape = Shape::from((batch, 1, heads * head_dim));
    let mut output = allocate(device, &y_shape, token.q.dtype())?;
    {
        let y = address_mut(&mut output, &stream)?;
        let memory = AttendMemory {
            q: q.get(),
            k: k.get(),
            v: v.get(),
            sinks: sinks.as_ref().map_or(0, |sinks| sinks.get()),
            y: y.get(),
            partial: partial as u64,
            arrivals: arrivals as u64,
            ..Default::default()
        };
        let params = call.params(&plan, &memory)?;
        cache.memory.inplace_op1(&Append { stream: &stream, rows: cache, plan, params })?;
    }
    Ok(Some(Tensor::from_storage(Storage::Cuda(output), y_shape, BackpropOp::none(), false)))
}

/// The launch, as an operation on the cache.
struct Append<'a> {
    stream: &'a Arc<CudaStream>,
    rows: &'a DeviceRows,
    plan: Attend,
    /// Without the addresses of the cache. All others are held until after the launch, and of shapes and an alignment that
    /// the header asks for.
    params: CqAttend,
}

impl InplaceOp1 for Append<'_> {
    fn name(&self) -> &'static str {
        "kv-cache-attention"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("attention on a CUDA device is needed here")
    }

    fn cuda_fwd(&self, cache: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Some((0, _)) = layout.contiguous_offsets() else {
            bail!("a contiguous cache is needed here, found layout {layout:?}")
        };
        let memory = address_mut(cache, self.stream)?;
        let CacheAddresses { keys, values, key_groups, value_groups } =
            CacheAddresses::of(self.rows, memory.get());
        let params = CqAttend {
            keys: keys as *mut _,
            values: values as *mut _,
            key_groups: key_groups as *mut _,
            value_groups: value_groups as *mut _,
            ..self.params
        };
        let Attend { kernel, shares, splits, shared_bytes, .. } = self.plan;
        // SAFETY: all addresses are those of tensors that are held until after the launch, and of the workspace of this
        // thread and stream. Shapes were checked by the caller, and the position is one of the cache.
        unsafe { launch(self.stream, kernel, Grid { blocks: (splits, shares), shared_bytes }, &params) }
    }
}
