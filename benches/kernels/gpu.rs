//! One GPU: its facts, its floors, and the time of launches on it.

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaGraph, CudaStream, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::{cublas, nvrtc};
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result, Tensor};
use std::sync::Arc;

const CUBLAS_WORKSPACE_BYTES: usize = 64 << 20;
const WARM_UP_REPLAYS: usize = 3;

pub struct Gpu {
    pub device: Device,
    stream: Arc<CudaStream>,
    /// Keeps the memory of cuBLAS.
    _workspace: Tensor,
}

/// Microseconds of one launch, over the replays.
pub struct Timing {
    pub median: f64,
    pub p10: f64,
    pub p90: f64,
    pub launches: usize,
}

/// Kernels of floors.cu.
pub struct Floors {
    read: CudaFunction,
    copy: CudaFunction,
    empty: CudaFunction,
}

impl Gpu {
    pub fn new(small: bool) -> Result<Self> {
        let device = Device::new_cuda_with_stream(0)?;
        let cuda = device.as_cuda_device()?.clone();
        // SAFETY: there is one stream. Tracking would wait for events from outside the captured graph.
        unsafe { cuda.disable_event_tracking() };
        let stream = cuda.cuda_stream();
        let shrink = if small { 64 } else { 1 };
        // Without its own workspace cuBLAS allocates one in each captured product.
        let workspace = Tensor::zeros(CUBLAS_WORKSPACE_BYTES / shrink, DType::U8, &device)?;
        let handle = *cuda.cublas_handle().handle();
        // SAFETY: the handle is candle's; the memory is there as long as this struct.
        unsafe {
            cublas::sys::cublasSetWorkspace_v2(
                handle,
                address(&workspace)? as *mut _,
                CUBLAS_WORKSPACE_BYTES / shrink,
            )
            .result()
            .w()?;
        }
        Ok(Self { device, stream, _workspace: workspace })
    }

    pub fn name(&self) -> Result<String> {
        self.stream.context().name().w()
    }

    pub fn l2_bytes(&self) -> Result<usize> {
        Ok(self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize)
    }

    pub fn multiprocessors(&self) -> Result<u32> {
        Ok(self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32)
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        self.stream.context().attribute(attribute).w()
    }

    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().w()
    }

    /// Times `launches` launches, captured as one graph, which is replayed. candle's allocations of results are nodes of
    /// that graph, and their time is part of the launches', as in a step that a user captures.
    pub fn time(
        &self,
        launches: usize,
        replays: usize,
        mut launch: impl FnMut(usize) -> Result<()>,
    ) -> Result<Timing> {
        for i in 0..2 {
            launch(i)?; // loads modules, allocates what is kept
        }
        self.synchronize()?;
        let graph = self.capture(launches, launch)?;
        graph.upload().w()?;
        for _ in 0..WARM_UP_REPLAYS {
            graph.launch().w()?;
        }
        let event = || self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w();
        let mut events = Vec::new();
        for _ in 0..replays {
            let (start, end) = (event()?, event()?);
            start.record(&self.stream).w()?;
            graph.launch().w()?;
            end.record(&self.stream).w()?;
            events.push((start, end));
        }
        self.synchronize()?;
        let mut samples = Vec::new();
        for (start, end) in &events {
            samples.push(f64::from(start.elapsed_ms(end).w()?) * 1e3 / launches as f64);
        }
        samples.sort_by(f64::total_cmp);
        let at = |part: f64| samples[((samples.len() - 1) as f64 * part).round() as usize];
        Ok(Timing { median: at(0.5), p10: at(0.1), p90: at(0.9), launches })
    }

    fn capture(&self, launches: usize, mut launch: impl FnMut(usize) -> Result<()>) -> Result<CudaGraph> {
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).w()?;
        let launched = (0..launches).try_for_each(&mut launch);
        // Ended in any case, lest everything after it fail too.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0)).w();
        launched?;
        graph?.ok_or_else(|| candle_core::Error::Msg("nothing was captured".into()))
    }

    pub fn floors(&self) -> Result<Floors> {
        let source = include_str!("floors.cu");
        let ptx =
            nvrtc::compile_ptx(source).map_err(|error| candle_core::Error::Msg(format!("{error:?}")))?;
        let module = self.stream.context().load_module(ptx).w()?;
        let function = |name| module.load_function(name).w();
        Ok(Floors { read: function("read")?, copy: function("copy")?, empty: function("empty")? })
    }

    /// Reads `bytes` of `memory` from `start` on, and does nothing with them.
    pub fn read(&self, floors: &Floors, memory: &Tensor, start: usize, bytes: usize) -> Result<()> {
        let from = address(memory)? + start as u64;
        self.launch_floor(&floors.read, &[from, bytes as u64 / 16, 0], bytes)
    }

    /// Copies the first `bytes` of `memory` to the `bytes` after them.
    pub fn copy(&self, floors: &Floors, memory: &Tensor, bytes: usize) -> Result<()> {
        let from = address(memory)?;
        self.launch_floor(&floors.copy, &[from, bytes as u64 / 16, from + bytes as u64], bytes)
    }

    pub fn empty(&self, floors: &Floors) -> Result<()> {
        self.launch_floor(&floors.empty, &[0, 0, 0], usize::MAX)
    }

    fn launch_floor(&self, function: &CudaFunction, arguments: &[u64; 3], bytes: usize) -> Result<()> {
        // Four loads of 16 bytes in flight for each of 256 threads; no more blocks than are resident.
        let blocks = (self.multiprocessors()? as usize * 8).min(bytes.div_ceil(256 * 64)).max(1);
        let config =
            LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.stream.launch_builder(function);
        for argument in arguments {
            launch.arg(argument);
        }
        // SAFETY: the kernels of floors.cu take three 64-bit words and stay within `bytes` of the memory.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }
}

/// The device address of a contiguous tensor.
pub fn address(tensor: &Tensor) -> Result<u64> {
    use candle_core::cuda_backend::cudarc::driver::DevicePtr;
    use candle_core::Storage;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { candle_core::bail!("a tensor on the GPU is wanted") };
    let stream = storage.device.cuda_stream();
    let base = match tensor.dtype() {
        DType::U8 => storage.as_cuda_slice::<u8>()?.device_ptr(&stream).0,
        DType::U32 => storage.as_cuda_slice::<u32>()?.device_ptr(&stream).0,
        other => candle_core::bail!("U8 or U32 is wanted, not {other:?}"),
    };
    Ok(base + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}
