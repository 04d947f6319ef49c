//! A decode step on the device: the plan of a decoder as a list of launches, for one token of each of some sequences.
//!
//! All that changes from token to token lies in device memory, so that the same launches serve every position: one by one, or
//! as a CUDA graph, which is one call of the driver. Both give the same bits. Nothing is allocated in between, and no
//! kernel of candle's runs.

mod builder;
mod graph;
mod memory;
mod projections;

use super::bindings::{CqAttend, CqDequantize, CqElementwise, CqGemv, CqNorm, CqSample, CqSimt};
use super::card::Card;
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, u32_of, Locked};
use crate::backend::sample::{Choice, Draw};
use crate::backend::step::{CacheRows, GraphMode, Plan};
use crate::Error;
use builder::{Builder, Built, Places};
use candle_core::cuda_backend::cudarc::driver::{result, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaDevice, DType, Device, Result, Shape, Storage, Tensor};
use graph::Graph;
use memory::{zeroed, Addresses, Constants};
use std::sync::Arc;

/// A launch, its memory known.
#[derive(Clone, Copy)]
struct Launch {
    kernel: Kernel,
    grid: Grid,
    params: LaunchParams,
}

// SAFETY: pointers of parameters are addresses on a device, which mean the same to every thread, and which none follows.
unsafe impl Send for Launch {}
// SAFETY: as above.
unsafe impl Sync for Launch {}

#[derive(Clone, Copy)]
enum LaunchParams {
    Dequantize(CqDequantize),
    Norm(CqNorm),
    Gemv(CqGemv),
    Simt(CqSimt),
    Attend(CqAttend),
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
                LaunchParams::Norm(params) => launch(stream, kernel, grid, params),
                LaunchParams::Gemv(params) => launch(stream, kernel, grid, params),
                LaunchParams::Simt(params) => launch(stream, kernel, grid, params),
                LaunchParams::Attend(params) => launch(stream, kernel, grid, params),
                LaunchParams::Elementwise(params) => launch(stream, kernel, grid, params),
                LaunchParams::Sample(params) => launch(stream, kernel, grid, params),
            }
        }
    }
}

/// The launches of a plan, made anew when its caches have got other memory.
pub(crate) struct DeviceStep {
    plan: Arc<Plan>,
    device: CudaDevice,
    dtype: DType,
    sequences: usize,
    outputs: usize,
    is_long: bool,
    mode: GraphMode,
    bound: Option<Bound>,
}

/// Launches with all memory that they use.
struct Bound {
    launches: Vec<Launch>,
    places: Places,
    graph: Option<Graph>,
    state: State,
    caches: Vec<CacheRows>,
    choice: Option<Choice>,
    _constants: Tensor,
    _work: Tensor,
}

/// How far launches are on their way to a graph.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// They have not run yet.
    New,
    /// They have run one by one, which loads all kernels.
    HaveRun,
    /// They are captured, or cannot be.
    Settled,
}

impl DeviceStep {
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
        let card = Card::of(cuda.cuda_stream().context())?;
        builder::check(plan, dtype, sequences, card)?;
        let (device, outputs) = (cuda, plan.outputs());
        Ok(Self {
            plan: plan.clone(),
            device: device.clone(),
            dtype,
            sequences,
            outputs,
            is_long,
            mode,
            bound: None,
        })
    }

    /// The logits `[sequences, outputs]`, in f32, of the tokens `ids` `[sequences]`, U32 on the device, all of which stand at
    /// `position`. Their keys and values are appended to the caches, which have room for them.
    pub(crate) fn run(&mut self, ids: &Tensor, caches: &[CacheRows], position: usize) -> Result<Tensor> {
        let stream = self.device.cuda_stream();
        let positions = self.positions(position)?;
        let places = self.bound(caches, None, &stream)?.places;
        {
            let locked = Locked::new(ids);
            let from = locked.view()?.address(&stream)?;
            let bytes = size_of_val(positions.as_slice());
            // SAFETY: ids are as many as there are sequences, both places are memory of this step, which its launches use in
            // this stream alone; the driver has read `positions` when the call returns.
            unsafe {
                result::memcpy_dtod_async(places.ids, from.get(), bytes, stream.cu_stream()).w()?;
                result::memcpy_htod_async(places.positions, &positions, stream.cu_stream()).w()?;
            }
        }
        self.launch(&stream)?;

        let shape = Shape::from((self.sequences, self.outputs));
        let mut logits = allocate(&self.device, &shape, DType::F32)?;
        {
            let to = address_mut(&mut logits, &stream)?;
            let bytes = shape.elem_count() * size_of::<f32>();
            // SAFETY: both have so many numbers.
            unsafe { result::memcpy_dtod_async(to.get(), places.logits, bytes, stream.cu_stream()).w()? };
        }
        Ok(Tensor::from_storage(Storage::Cuda(logits), shape, BackpropOp::none(), false))
    }

    /// Tokens drawn from these logits, for `ids` on the host: one copy there, one launch of the graph, one copy back. That of
    /// logits without a meaning is [`NOT_FINITE`](crate::backend::sample::NOT_FINITE).
    pub(crate) fn next(
        &mut self,
        ids: &[u32],
        caches: &[CacheRows],
        position: usize,
        (choice, draw): (&Choice, Draw),
    ) -> Result<Vec<u32>> {
        let stream = self.device.cuda_stream();
        let positions = self.positions(position)?;
        if ids.len() != positions.len() {
            bail!("{} ids for {} sequences", ids.len(), positions.len());
        }
        let places = self.bound(caches, Some(choice), &stream)?.places;
        let draw = [draw.seed, draw.step].map(u64::to_ne_bytes).concat();
        let numbers = positions.iter().chain(ids).flat_map(|number| number.to_ne_bytes());
        let input: Vec<u8> = draw.into_iter().chain(numbers).collect();
        // SAFETY: the places of seed, step, positions and ids, one behind the other, are memory of this step, which its
        // launches use in this stream alone; the driver has read `input` when the call returns.
        unsafe { result::memcpy_htod_async(places.draw, &input, stream.cu_stream()).w()? };
        self.launch(&stream)?;
        let mut drawn = vec![0; ids.len()];
        // SAFETY: there are as many ids. The host's memory is not pinned: the driver returns when it has been written ("API
        // synchronization behavior" in the manual of the driver).
        unsafe { result::memcpy_dtoh_async(&mut drawn, places.ids, stream.cu_stream()).w()? };
        Ok(drawn)
    }

    fn positions(&self, position: usize) -> Result<Vec<u32>> {
        Ok(vec![u32_of("position", position)?; self.sequences])
    }

    /// The launches for these caches and this choice.
    fn bound(
        &mut self,
        caches: &[CacheRows],
        choice: Option<&Choice>,
        stream: &Arc<CudaStream>,
    ) -> Result<&Bound> {
        let bound = match self.bound.take().filter(|bound| bound.has(caches, choice)) {
            Some(bound) => bound,
            None => self.bind(caches, choice, stream)?,
        };
        Ok(self.bound.insert(bound))
    }

    fn launch(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        let Some(bound) = &mut self.bound else { bail!("a step without launches") };
        let run = bound.run(stream, self.mode);
        if run.is_err() {
            // What launches leave for each other may be half done.
            self.bound = None;
        }
        run
    }

    /// Launches of a step, once its caches are known.
    pub(crate) fn launches(&self) -> Option<usize> {
        self.bound.as_ref().map(|bound| bound.launches.len())
    }

    /// Whether steps are a CUDA graph now.
    pub(crate) fn is_captured(&self) -> bool {
        self.bound.as_ref().is_some_and(|bound| bound.graph.is_some())
    }

    fn bind(&self, caches: &[CacheRows], choice: Option<&Choice>, stream: &Arc<CudaStream>) -> Result<Bound> {
        let card = Card::of(stream.context())?;
        let device = Device::Cuda(self.device.clone());
        let build = |constants, work, shared| {
            let builder = Builder {
                plan: &self.plan,
                caches,
                choice,
                stream,
                card,
                dtype: self.dtype,
                sequences: self.sequences,
                is_long: self.is_long,
                constants,
                work,
                shared,
                launches: Vec::new(),
            };
            builder.build()
        };
        let nowhere = Addresses::new(Addresses::NOWHERE);
        let measured = build(Constants::measuring(), nowhere, Default::default())?;
        let work = zeroed(measured.work.used(), &device)?;
        let constants = zeroed(measured.constants.used(), &device)?;
        let address =
            |tensor: &Tensor| Ok::<_, candle_core::Error>(Locked::new(tensor).view()?.address(stream)?.get());
        let constants_at = address(&constants)?;
        let Built { launches, places, constants: numbers, .. } =
            build(Constants::at(constants_at), Addresses::new(address(&work)?), measured.shared)?;
        // SAFETY: memory of as many numbers, which nothing uses yet; the driver has read them when the call returns.
        unsafe {
            result::memcpy_htod_async(constants_at, &numbers.into_values(), stream.cu_stream()).w()?;
        }
        Ok(Bound {
            launches,
            places,
            graph: None,
            state: State::New,
            caches: caches.to_vec(),
            choice: choice.copied(),
            _constants: constants,
            _work: work,
        })
    }
}

impl Bound {
    fn has(&self, caches: &[CacheRows], choice: Option<&Choice>) -> bool {
        let ids = |caches: &[CacheRows]| caches.iter().map(|cache| cache.rows.id()).collect::<Vec<_>>();
        ids(&self.caches) == ids(caches) && self.choice.as_ref() == choice
    }

    fn run(&mut self, stream: &Arc<CudaStream>, mode: GraphMode) -> Result<()> {
        if self.state == State::HaveRun && mode != GraphMode::Eager {
            self.state = State::Settled;
            match Graph::capture(stream, |own| self.submit(own)) {
                Ok(graph) => {
                    log::info!("decode steps are a CUDA graph of {} launches", self.launches.len());
                    self.graph = Some(graph);
                }
                Err(error) if mode == GraphMode::On => return Err(error.context("capturing a decode step")),
                Err(error) => {
                    log::warn!("decode steps are launched kernel by kernel, not as a CUDA graph: {error}")
                }
            }
        }
        if let Some(graph) = &mut self.graph {
            // SAFETY: as for `submit`.
            return unsafe { graph.launch() };
        }
        self.submit(stream)?;
        if self.state == State::New {
            self.state = State::HaveRun;
        }
        Ok(())
    }

    fn submit(&self, stream: &CudaStream) -> Result<()> {
        self.launches.iter().try_for_each(|launch| {
            // SAFETY: all addresses are those of memory that this holds, of the plan's weights, which it holds, and of the
            // caches; shapes were checked when the plan was built, and cannot change. Positions are within the caches.
            unsafe { launch.submit(stream) }
        })
    }
}
