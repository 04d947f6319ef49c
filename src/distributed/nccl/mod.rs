//! Ranks that are GPUs, of one process or of many, on one machine or on many: NCCL.

mod communicator;

use super::collective::{no_rank, wrong_dim, Collective, StreamCollective};
use super::host_group::Group;
use super::launcher_env::RankInfo;
use super::partition::split;
use super::rank::Rank;
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr,
};
use candle_core::cuda_backend::cudarc::nccl::result::NcclError;
use candle_core::cuda_backend::cudarc::nccl::{Id, NcclType};
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, DeviceLocation, Storage, Tensor, WithDType};
use communicator::{together, Buffers, Communicator, Live};
use half::{bf16, f16};
use std::ffi::c_char;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// This build has NCCL.
pub fn available() -> Result<()> {
    Ok(())
}

/// Whether each rank has a GPU of its own.
pub fn serves(devices: &[Device]) -> bool {
    let mut gpus: Vec<usize> = devices
        .iter()
        .filter_map(|device| match device.location() {
            DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
            _ => None,
        })
        .collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus.len() == devices.len() && devices.len() > 1
}

/// What all ranks of one group have to know, and no others.
pub fn new_id() -> Result<Vec<u8>> {
    let id = Id::new().map_err(|error| failed("an id", &error))?;
    Ok(id.internal().iter().map(|&byte| byte as u8).collect())
}

/// The GPU of a process: that of its number on the machine, or the only one it can see.
pub fn device(info: &RankInfo) -> Result<Device> {
    let count = CudaContext::device_count().map_err(candle_core::Error::wrap)?;
    let ordinal = if count == 1 { 0 } else { info.local_rank() };
    // Not the stream of each thread: NCCL has threads of its own.
    Ok(Device::new_cuda_with_stream(ordinal)?)
}

/// Makes this thread a rank on `device`, with all others that do the same with this `id`.
pub fn connect(id: &[u8], device: &Device, index: usize, group: &Arc<Group>) -> Result<Rank> {
    let Device::Cuda(gpu) = device else {
        return Err(Error::mismatch("device of a rank", "a GPU", format!("{:?}", device.location())));
    };
    let bytes: Vec<_> = id.iter().map(|&byte| byte as c_char).collect();
    let bytes = <[_; 128]>::try_from(bytes);
    let bytes = bytes.map_err(|_| Error::mismatch("id of NCCL", "128 bytes", id.len().to_string()))?;
    let stream = gpu.cuda_stream();
    stream.context().bind_to_thread().map_err(candle_core::Error::wrap)?;
    let live = Live::connect(bytes, stream, index, group.world_size());
    let communicator = Arc::new(Communicator::new(live.map_err(|error| cause(group, error))?));
    // It stays until the whole group ends: other ranks may still read from this one's buffers.
    let of_group = Arc::clone(&communicator);
    group.on_failure(move |_, _| of_group.abort());
    let member = Member { index, gpu: gpu.clone(), communicator, group: Arc::clone(group) };
    Ok(Rank::new(device, Arc::new(member)))
}

/// How long the report of another rank's failure may take: NCCL may have noticed it earlier.
const REPORTED_WITHIN: Duration = Duration::from_secs(2);

/// The failure of a rank that an error of NCCL follows from, or else the error.
fn cause(group: &Group, error: Error) -> Error {
    group.failure_within(REPORTED_WITHIN).unwrap_or(error)
}

fn failed(what: &str, NcclError(code): &NcclError) -> Error {
    let why = format!("NCCL, {what}: {code:?}; the environment variable NCCL_DEBUG=WARN makes it log more");
    Error::Candle(candle_core::Error::Msg(why))
}

#[derive(Debug)]
struct Member {
    index: usize,
    gpu: CudaDevice,
    communicator: Arc<Communicator>,
    group: Arc<Group>,
}

enum Operation<'a> {
    Sum,
    Broadcast {
        root: usize,
    },
    /// So many elements from each rank.
    Gather {
        counts: &'a [usize],
    },
    /// So many for each.
    ReduceScatter {
        counts: &'a [usize],
    },
}

trait Element: WithDType + CudaDType + NcclType + DeviceRepr {}
impl<T: WithDType + CudaDType + NcclType + DeviceRepr> Element for T {}

fn nccl_rank(rank: usize) -> Result<i32> {
    i32::try_from(rank).map_err(|_| no_rank(rank))
}

fn is_even(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair.first() == pair.last())
}

/// Device memory for `len` elements; the caller must write all of it before it is read. CUDA allocates no empty memory:
/// there it is one element that nobody sees.
fn allocate<T: Element>(gpu: &CudaDevice, len: usize) -> candle_core::Result<CudaSlice<T>> {
    // SAFETY: elements are numbers, for which every bit pattern is valid.
    unsafe { gpu.alloc::<T>(len.max(1)) }
}

impl Member {
    /// `x` where NCCL takes it, unless a rank has failed.
    fn on_gpu(&self, x: &Tensor) -> Result<Tensor> {
        match self.group.failure() {
            Some(failure) => Err(failure),
            None => Ok(x.to_device(&Device::Cuda(self.gpu.clone()))?.contiguous()?),
        }
    }

    /// The output of an operation with a contiguous `x` on the GPU, flat; that of all ranks one after another.
    fn run(&self, operation: &Operation, x: &Tensor) -> Result<Tensor> {
        match x.dtype() {
            DType::U8 => self.run_with::<u8>(operation, x),
            DType::U32 => self.run_with::<u32>(operation, x),
            DType::I32 => self.run_with::<i32>(operation, x),
            DType::I64 => self.run_with::<i64>(operation, x),
            DType::F16 => self.run_with::<f16>(operation, x),
            DType::BF16 => self.run_with::<bf16>(operation, x),
            DType::F32 => self.run_with::<f32>(operation, x),
            DType::F64 => self.run_with::<f64>(operation, x),
            other => Err(Error::Unsupported {
                what: format!("NCCL with {other:?}"),
                remedy: "convert it before".to_string(),
            }),
        }
    }

    fn run_with<T: Element>(&self, operation: &Operation, x: &Tensor) -> Result<Tensor> {
        let (storage, layout) = x.storage_and_layout();
        let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
            return Err(Error::mismatch(
                "tensor for NCCL",
                "a contiguous one on a GPU",
                format!("{layout:?}"),
            ));
        };
        let sent = T::as_cuda_slice(storage)?.slice(start..end);
        let own = |counts: &[usize]| counts.get(self.index).copied().unwrap_or_default();
        let len = match operation {
            Operation::Sum | Operation::Broadcast { .. } => sent.len(),
            Operation::Gather { counts } => counts.iter().sum(),
            Operation::ReduceScatter { counts } => own(counts),
        };
        // NCCL writes all of it before anything reads it in the order of the stream.
        let mut received = allocate::<T>(&self.gpu, len)?;
        let told = self.communicator.with(|live| {
            live.stream().context().bind_to_thread().map_err(candle_core::Error::wrap)?;
            let ((from, _sent), (to, _received)) =
                (sent.device_ptr(live.stream()), received.device_ptr_mut(live.stream()));
            let (dtype, stream) = (T::as_nccl_type(), live.own_stream());
            let of = |count| Buffers { from, to, count, dtype };
            // SAFETY: both are memory of the rank's GPU, of as many elements as the operation reads and writes: ranks have
            // agreed on shapes. The views are held, and drops of memory come behind in the order of the stream.
            unsafe {
                match operation {
                    Operation::Sum => live.all_reduce(of(sent.len()), stream),
                    Operation::Broadcast { root } => live.broadcast(of(sent.len()), *root, stream),
                    Operation::Gather { counts } => {
                        live.gather((of(sent.len()), size_of::<T>()), counts, stream)
                    }
                    Operation::ReduceScatter { counts } if is_even(counts) => {
                        live.reduce_scatter(of(own(counts)), stream)
                    }
                    // NCCL knows only shares of one size.
                    Operation::ReduceScatter { counts } => together(|| {
                        let mut from = from;
                        counts.iter().enumerate().try_for_each(|(root, count)| {
                            let to = if root == self.index { to } else { 0 };
                            let part = Buffers { from, to, ..of(*count) };
                            from += (count * size_of::<T>()) as u64;
                            live.reduce(part, root, stream)
                        })
                    }),
                }
            }
        });
        match told {
            Some(done) => done.map_err(|error| cause(&self.group, error))?,
            None => return Err(self.group.failure().unwrap_or_else(|| no_rank(self.index))),
        }
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(received, self.gpu.clone()));
        Ok(Tensor::from_storage(storage, len, BackpropOp::none(), false))
    }

    /// The output of an operation in the shape `dims`, where `x` is.
    fn shaped(&self, operation: &Operation, on_gpu: &Tensor, dims: &[usize], x: &Tensor) -> Result<Tensor> {
        Ok(self.run(operation, on_gpu)?.reshape(dims)?.to_device(x.device())?)
    }

    /// What each rank brings along `dim` to a gathering. The ranks have to agree on the rest.
    fn lens(&self, x: &Tensor, dim: usize, len: usize) -> Result<Vec<usize>> {
        let mut hasher = DefaultHasher::new();
        let others = x.dims().iter().enumerate().filter(|(other, _)| *other != dim);
        (dim, format!("{:?}", x.dtype()), others.collect::<Vec<_>>()).hash(&mut hasher);
        let own = [len as i64, hasher.finish().cast_signed()];
        let own = Tensor::new(&own, &Device::Cuda(self.gpu.clone()))?;
        let counts = vec![2; self.world_size()];
        let all = self.run(&Operation::Gather { counts: &counts }, &own)?.to_vec1::<i64>()?;
        // A failure while waiting has ended the operation with any result.
        if let Some(failure) = self.group.failure() {
            return Err(failure);
        }
        let pairs = all.chunks_exact(2).map(|pair| (pair.first().copied(), pair.last().copied()));
        pairs
            .enumerate()
            .map(|(rank, pair)| match pair {
                (Some(len), rest) if rest == Some(hasher.finish().cast_signed()) => {
                    usize::try_from(len).map_err(|_| no_rank(rank))
                }
                _ => Err(Error::Rank {
                    rank: self.index,
                    problem: format!(
                        "is at all_gather along {dim} of {:?} {:?}, while rank {rank} is at another operation",
                        x.dtype(),
                        x.dims()
                    ),
                }),
            })
            .collect()
    }
}

fn not_done(error: NcclError) -> Error {
    failed("an operation", &error)
}

impl Collective for Member {
    fn index(&self) -> usize {
        self.index
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor> {
        self.shaped(&Operation::Sum, &self.on_gpu(x)?, x.dims(), x)
    }

    fn all_gather(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let len = *x.dims().get(dim).ok_or_else(|| wrong_dim(x, dim))?;
        let on_gpu = self.on_gpu(x)?;
        let lens = self.lens(x, dim, len)?;
        let other = |len: usize| {
            let mut dims = x.dims().to_vec();
            dims.iter_mut().skip(dim).take(1).for_each(|entry| *entry = len);
            dims
        };
        let counts: Vec<usize> = lens.iter().map(|&len| other(len).iter().product()).collect();
        let flat = self.run(&Operation::Gather { counts: &counts }, &on_gpu)?;
        let is_joined = x.dims().iter().take(dim).all(|&len| len == 1);
        let joined = if is_joined {
            flat.reshape(other(lens.iter().sum()))?
        } else {
            let mut start = 0;
            let parts = counts.iter().zip(&lens).map(|(&count, &len)| {
                let part = flat.narrow(0, start, count)?.reshape(other(len));
                start += count;
                part
            });
            Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, dim)?
        };
        Ok(joined.to_device(x.device())?)
    }

    fn reduce_scatter(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let len = *x.dims().get(dim).ok_or_else(|| wrong_dim(x, dim))?;
        let shares = split(len, 1, self.world_size()).ok_or_else(|| {
            let expected = format!("{} or more entries along {dim}, one for each rank", self.world_size());
            Error::mismatch("reduce_scatter", expected, len.to_string())
        })?;
        let on_gpu = self.on_gpu(x)?;
        let parts = shares.iter().map(|share| on_gpu.narrow(dim, share.start, share.len()));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        let own = parts.get(self.index).ok_or_else(|| no_rank(self.index))?;
        let counts: Vec<usize> = parts.iter().map(Tensor::elem_count).collect();
        let in_order = x.dims().iter().take(dim).all(|&len| len == 1);
        let sent = if in_order {
            on_gpu.clone()
        } else {
            let flat = parts.iter().map(Tensor::flatten_all).collect::<candle_core::Result<Vec<_>>>()?;
            Tensor::cat(&flat, 0)?
        };
        self.shaped(&Operation::ReduceScatter { counts: &counts }, &sent, own.dims(), x)
    }

    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        if root >= self.world_size() {
            return Err(no_rank(root));
        }
        self.shaped(&Operation::Broadcast { root }, &self.on_gpu(x)?, x.dims(), x)
    }

    fn in_streams(&self, work: &mut dyn FnMut(&dyn StreamCollective) -> Result<()>) -> Option<Result<()>> {
        let told = match self.group.failure() {
            Some(failure) => Some(Err(failure)),
            None => self.communicator.with(|live| work(live)),
        };
        let failure = || Err(self.group.failure().unwrap_or_else(|| no_rank(self.index)));
        Some(told.unwrap_or_else(failure).map_err(|error| cause(&self.group, error)))
    }

    fn barrier(&self) -> Result<()> {
        let nothing = Tensor::zeros(1, DType::U8, &Device::Cpu)?;
        // To be read on the host, it has to be there.
        self.all_reduce_sum(&nothing)?;
        self.group.failure().map_or(Ok(()), Err)
    }
}
