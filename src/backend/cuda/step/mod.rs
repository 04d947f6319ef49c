//! A decode step on the device: the plan of a decoder as a list of launches, for one token of each of some sequences.
//!
//! All that changes from token to token lies in device memory, so that the same launches serve every position: one by one, or
//! as a CUDA graph, which is one call of the driver. Both give the same bits. Between the copies with which a step that draws
//! begins and ends there are kernels alone: nothing is allocated, and none of candle's runs.

mod attend;
mod bound;
mod builder;
mod delta_net;
mod dense;
mod done;
mod embed;
mod experts;
mod graph;
mod launches;
mod memory;
mod output;
mod pinned;
mod projections;

use super::attention::keeps_ring;
use super::bindings::CQ_NO_POSITION;
use super::card::Card;
use super::memory::{address_mut, allocate, Locked};
use crate::backend::sample::{Choice, Draw};
use crate::backend::step::{GraphMode, Node, Plan, StepMemory, NO_POSITION};
use crate::tensor::DeviceRows;
use crate::{DeviceKvCache, Error};
use bound::Bound;
use builder::Builder;
use candle_core::cuda_backend::cudarc::driver::{result, sys, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, DType, Device, Result, Shape, Storage, Tensor};
use done::Done;
use launches::{Entry, Exchange, Launch, LaunchParams};
use memory::{zeroed, Addresses, Constants};
use pinned::Pinned;
use std::sync::Arc;
use std::thread::ThreadId;

const _: () = assert!(NO_POSITION == CQ_NO_POSITION, "where sequences without a token stand");

/// The launches of a plan, made anew when its caches have got other memory, or tables of turns have no more rows.
pub(crate) struct StepLaunches {
    plan: Arc<Plan>,
    device: CudaDevice,
    dtype: DType,
    sequences: usize,
    outputs: usize,
    is_long: bool,
    mode: GraphMode,
    bound: Option<Bound>,
    /// Who launched last: the stream of a device may be another one on each thread.
    thread: Option<ThreadId>,
    /// What was launched last.
    done: Arc<Done>,
    /// Whether the last step came as far as its launches.
    has_launched: bool,
}

impl StepLaunches {
    pub(crate) fn new(
        plan: &Arc<Plan>,
        (device, dtype): (&Device, DType),
        sequences: usize,
        is_long: bool,
        mode: GraphMode,
    ) -> crate::Result<Self> {
        let Device::Cuda(cuda) = device else {
            let found = format!("{:?}", device.location());
            return Err(Error::mismatch("device of a plan", "a CUDA device", found));
        };
        let stream = cuda.cuda_stream();
        attend::check(plan, dtype, sequences, Card::of(stream.context())?)?;
        for node in &plan.nodes {
            match node {
                Node::Experts(block) => experts::check(block, sequences)?,
                Node::DeltaNet(net) => delta_net::check(net)?,
                Node::Embed { .. } | Node::Project(..) | Node::Attend(_) | Node::AddAttended(..) => {}
                Node::Inner { .. } | Node::AddInner(..) | Node::Logits { .. } => {}
            }
        }
        Ok(Self {
            plan: plan.clone(),
            device: cuda.clone(),
            dtype,
            sequences,
            outputs: plan.outputs(),
            is_long,
            mode,
            bound: None,
            thread: None,
            done: Arc::new(Done::new(stream.context())?),
            has_launched: false,
        })
    }

    /// Whether the device's stream is being captured by somebody, so that no step can run.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let status = self.device.cuda_stream().capture_status().w()?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Whether the last step came as far as its launches: if it failed, nobody knows which of them ran.
    pub(crate) fn has_launched(&self) -> bool {
        self.has_launched
    }

    /// Whether a cache need not keep what its window leaves behind.
    pub(crate) fn keeps_ring(&self, cache: &DeviceKvCache) -> Result<bool> {
        keeps_ring(cache, (&Device::Cuda(self.device.clone()), self.dtype), self.sequences)
    }

    /// Lets go of all memory, that of caches included, before these get other memory.
    pub(crate) fn release(&mut self) {
        self.bound = None;
    }

    /// The logits `[sequences, outputs]`, in the dtype of activations, of the tokens `ids` `[sequences]`, U32 on the device, which
    /// stand at `positions` or, at `NO_POSITION`, are none. Their keys and values are appended to the
    /// caches, which have room for them, and change the states.
    pub(crate) fn run(&mut self, ids: &Tensor, memory: &StepMemory, positions: &[u32]) -> Result<Tensor> {
        self.has_launched = false;
        let stream = self.stream()?;
        let logits = self.submit(ids, memory, positions, &stream);
        let recorded = self.done.record(&stream);
        if logits.is_err() {
            self.bound = None;
        }
        recorded.and(logits)
    }

    fn submit(
        &mut self,
        ids: &Tensor,
        memory: &StepMemory,
        positions: &[u32],
        stream: &Arc<CudaStream>,
    ) -> Result<Tensor> {
        if positions.len() != self.sequences {
            bail!("{} positions for {} sequences", positions.len(), self.sequences);
        }
        let (sequences, outputs, mode, dtype) = (self.sequences, self.outputs, self.mode, self.dtype);
        // Behind the launches, states have changed: what may fail comes before.
        let shape = Shape::from((sequences, outputs));
        let mut logits = allocate(&self.device, &shape, dtype)?;
        self.bind_to(memory, positions, stream)?;
        self.has_launched = true;
        let Some(bound) = &mut self.bound else { bail!("a step without launches") };
        let places = bound.places;
        {
            let locked = Locked::new(ids);
            let from = locked.view()?.address(stream)?;
            // SAFETY: ids and positions are as many as there are sequences, both places are memory of this step, which its launches
            // use in this stream alone. What is copied from ordinary memory of the host has been read when the call returns.
            unsafe {
                let bytes = sequences * size_of::<u32>();
                result::memcpy_dtod_async(places.ids, from.get(), bytes, stream.cu_stream()).w()?;
                match positions {
                    [first, rest @ ..] if rest.iter().all(|position| position == first) => {
                        let filled =
                            sys::cuMemsetD32Async(places.positions, *first, sequences, stream.cu_stream());
                        filled.result().w()?;
                    }
                    _ => result::memcpy_htod_async(places.positions, positions, stream.cu_stream()).w()?,
                }
            }
        }
        bound.run(None, (stream, mode))?;
        {
            let to = address_mut(&mut logits, stream)?;
            let bytes = shape.elem_count() * dtype.size_in_bytes();
            // SAFETY: both have so many numbers.
            unsafe { result::memcpy_dtod_async(to.get(), places.logits, bytes, stream.cu_stream()).w()? };
        }
        Ok(Tensor::from_storage(Storage::Cuda(logits), shape, BackpropOp::none(), false))
    }

    /// Tokens drawn from these logits, for `ids` on the host: one launch of the graph, for which the host then waits. That of
    /// logits without a meaning is [`NOT_FINITE`](crate::backend::sample::NOT_FINITE).
    pub(crate) fn next(
        &mut self,
        ids: &[u32],
        memory: &StepMemory,
        positions: &[u32],
        (choice, draw): (&Choice, Draw),
    ) -> Result<Vec<u32>> {
        self.has_launched = false;
        let (stream, sequences, mode) = (self.stream()?, self.sequences, self.mode);
        if [ids.len(), positions.len()] != [sequences; 2] {
            bail!("{} ids and {} positions for {sequences} sequences", ids.len(), positions.len());
        }
        self.bind_to(memory, positions, &stream)?;
        self.has_launched = true;
        let Some(bound) = &mut self.bound else { bail!("a step without launches") };
        let draw = [draw.seed, draw.step].into_iter().flat_map(u64::to_ne_bytes);
        let numbers = positions.iter().chain(ids).flat_map(|number| number.to_ne_bytes());
        // SAFETY: whoever submitted the copies of the step before has waited for them, or failed and dropped this memory.
        let host = unsafe { bound.host.bytes() };
        host.iter_mut().zip(draw.chain(numbers)).for_each(|(to, byte)| *to = byte);
        let ran = bound.run(Some(choice), (&stream, mode)).and_then(|()| stream.synchronize().w());
        let ran = ran.and_then(|()| bound.check_ranks());
        if ran.is_err() {
            // Part of it may be on its way.
            let _ = self.done.record(&stream);
            self.bound = None;
        }
        ran?;
        let Some(bound) = &mut self.bound else { bail!("a step without launches") };
        // SAFETY: its copies have been waited for.
        let drawn = unsafe { bound.host.bytes() };
        let drawn = drawn.get(bound.places.input_bytes..).unwrap_or_default().chunks_exact(size_of::<u32>());
        Ok(drawn.filter_map(|bytes| Some(u32::from_ne_bytes(bytes.try_into().ok()?))).collect())
    }

    /// The device's stream, whose context is the thread's now, behind the steps that another thread launched.
    fn stream(&mut self) -> Result<Arc<CudaStream>> {
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let thread = std::thread::current().id();
        if self.thread.replace(thread).is_some_and(|last| last != thread) {
            self.done.before(&stream)?;
        }
        Ok(stream)
    }

    /// Makes the launches for these caches and positions, unless they are there.
    fn bind_to(&mut self, memory: &StepMemory, positions: &[u32], stream: &Arc<CudaStream>) -> Result<()> {
        let last = positions.iter().filter(|position| **position != NO_POSITION).max();
        let end = last.map_or(0, |last| *last as usize + 1);
        let bound = match self.bound.take().filter(|bound| bound.is_for(memory, end)) {
            Some(bound) => bound,
            None => self.bind(memory, end, stream)?,
        };
        self.bound = Some(bound);
        Ok(())
    }

    /// Launches of a step, once its caches are known.
    pub(crate) fn launches(&self) -> Option<usize> {
        let bound = self.bound.as_ref()?;
        Some(bound.entries.len() + bound.ends.last()?.draws.len())
    }

    /// Whether the last step was a CUDA graph.
    pub(crate) fn is_captured(&self) -> bool {
        let end = self.bound.as_ref().and_then(|bound| bound.ends.last());
        end.is_some_and(|end| end.graph.is_some())
    }

    fn bind(&self, memory: &StepMemory, end: usize, stream: &Arc<CudaStream>) -> Result<Bound> {
        // Rings take any positions: tables grow as caches of all tokens do.
        let all =
            memory.caches.iter().filter(|cache| !cache.rows.is_ring).map(|cache| cache.rows.capacity).max();
        let turn_rows = all.unwrap_or_else(|| DeviceRows::most(end));
        let card = Card::of(stream.context())?;
        let device = Device::Cuda(self.device.clone());
        let build = |constants, work, shared| {
            let builder = Builder {
                plan: &self.plan,
                memory,
                turn_rows,
                stream,
                card,
                dtype: self.dtype,
                sequences: self.sequences,
                is_long: self.is_long,
                constants,
                work,
                shared,
                entries: Vec::new(),
                orders: Vec::new(),
            };
            builder.build()
        };
        let nowhere = Addresses::new(Addresses::NOWHERE);
        let measured = build(Constants::measuring(), nowhere, Default::default())?;
        let work = zeroed(measured.work.used(), &device)?;
        let address =
            |tensor: &Tensor| Ok::<_, candle_core::Error>(Locked::new(tensor).view()?.address(stream)?.get());
        let work_at = Addresses::new(address(&work)?);
        let constants = zeroed(measured.constants.used(), &device)?;
        let constants_at = address(&constants)?;
        let built = build(Constants::at(constants_at), work_at, measured.shared)?;
        let numbers = built.constants.into_words();
        // SAFETY: memory of as many numbers, which nothing uses yet; they are there until the stream has passed.
        unsafe { result::memcpy_htod_async(constants_at, &numbers, stream.cu_stream()).w()? };
        stream.synchronize().w()?;
        Ok(Bound {
            host: Pinned::new(stream.context(), &self.done, built.places.host_bytes())?,
            entries: built.entries,
            rank: self.plan.rank.clone(),
            places: built.places,
            ends: Vec::new(),
            memory: memory.clone(),
            turn_rows,
            _constants: constants,
            _work: work,
        })
    }
}
