//! Device addresses of candle's tensors.

use super::bindings::{CqDtype, CQ_BF16, CQ_F16, CQ_F32};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{bail, CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, StorageRef, Tensor};

/// What memory begins with what x, and the outputs of candle's allocator, are aligned to.
const ALIGNMENT: u64 = 16;

/// An address that may be used in its stream until this is dropped.
pub(super) struct Address<'a> {
    address: u64,
    _in_use: SyncOnDrop<'a>,
}

impl Address<'_> {
    pub(super) fn get(&self) -> u64 {
        self.address
    }

    pub(super) fn as_ptr<T>(&self) -> *const T {
        self.address as *const T
    }

    pub(super) fn as_mut_ptr<T>(&self) -> *mut T {
        self.address as *mut T
    }
}

/// A tensor on a CUDA device, locked for reading.
pub(super) struct Locked<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Locked<'a> {
    pub(super) fn new(tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self { storage, layout }
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "all other storages are refused")]
    pub(super) fn view(&self) -> Result<View<'_>> {
        match &*self.storage {
            Storage::Cuda(storage) => Ok(View { storage, layout: self.layout }),
            other => bail!("a tensor on a CUDA device is needed here, found {:?}", other.device().location()),
        }
    }
}

/// A part of a device's memory, as candle describes it.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) storage: &'a CudaStorage,
    pub(super) layout: &'a Layout,
}

impl<'a> View<'a> {
    pub(super) fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// The address of the first element of a contiguous view, to be read.
    #[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that no kernel takes")]
    pub(super) fn address(&self, stream: &'a CudaStream) -> Result<Address<'a>> {
        fn of<'a, T>(
            slice: &'a CudaSlice<T>,
            layout: &Layout,
            stream: &'a CudaStream,
        ) -> Result<Address<'a>> {
            let Some((start, _)) = layout.contiguous_offsets() else {
                bail!("a contiguous tensor is needed here, found layout {layout:?}");
            };
            let (address, in_use) = slice.device_ptr(stream);
            Ok(Address { address: address + (start * size_of::<T>()) as u64, _in_use: in_use })
        }
        let Self { storage, layout } = *self;
        match &storage.slice {
            CudaStorageSlice::U8(slice) => of(slice, layout, stream),
            CudaStorageSlice::U32(slice) => of(slice, layout, stream),
            CudaStorageSlice::I64(slice) => of(slice, layout, stream),
            CudaStorageSlice::F16(slice) => of(slice, layout, stream),
            CudaStorageSlice::BF16(slice) => of(slice, layout, stream),
            CudaStorageSlice::F32(slice) => of(slice, layout, stream),
            _ => bail!("no kernel reads {:?}", storage.dtype()),
        }
    }

    /// A copy, if the view is not contiguous or begins at an address that kernels cannot load x from.
    pub(super) fn realigned(&self, stream: &CudaStream) -> Result<Option<CudaStorage>> {
        let Self { storage, layout } = *self;
        if layout.is_contiguous() && self.address(stream)?.get().is_multiple_of(ALIGNMENT) {
            return Ok(None);
        }
        let mut copy = allocate(storage.device(), layout.shape(), storage.dtype())?;
        storage.copy_strided_src(&mut copy, 0, layout)?;
        Ok(Some(copy))
    }
}

/// A tensor as kernels take x: itself, or a copy.
pub(super) struct Contiguous<'a> {
    locked: Locked<'a>,
    layout: Layout,
    copy: Option<CudaStorage>,
}

impl<'a> Contiguous<'a> {
    pub(super) fn new(tensor: &'a Tensor, stream: &CudaStream) -> Result<Self> {
        let locked = Locked::new(tensor);
        let copy = locked.view()?.realigned(stream)?;
        Ok(Self { locked, layout: Layout::contiguous(tensor.shape()), copy })
    }

    pub(super) fn view(&self) -> Result<View<'_>> {
        match &self.copy {
            Some(storage) => Ok(View { storage, layout: &self.layout }),
            None => self.locked.view(),
        }
    }
}

/// The address of a tensor, if there is one.
pub(super) fn address_of<'a>(
    tensor: Option<&'a Locked<'a>>,
    stream: &'a CudaStream,
) -> Result<Option<Address<'a>>> {
    tensor.map(|tensor| tensor.view()?.address(stream)).transpose()
}

/// Null if there is none.
pub(super) fn pointer<T>(address: Option<&Address>) -> *const T {
    address.map_or(std::ptr::null(), Address::as_ptr)
}

/// Uninitialised device memory; the caller must write all of it before it is read. CUDA allocates no empty memory, so
/// that is one element.
pub(super) fn allocate(device: &CudaDevice, shape: &Shape, dtype: DType) -> Result<CudaStorage> {
    let one = Shape::from(1);
    let shape = if shape.elem_count() == 0 { &one } else { shape };
    // SAFETY: all elements are numbers, for which every bit pattern is valid; the caller writes all of them before
    // they are read.
    unsafe { device.alloc_uninit(shape, dtype) }
}

/// The address of storage that a kernel fills.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that no kernel takes")]
pub(super) fn address_mut<'a>(storage: &'a mut CudaStorage, stream: &'a CudaStream) -> Result<Address<'a>> {
    fn of<'a, T>(slice: &'a mut CudaSlice<T>, stream: &'a CudaStream) -> Result<Address<'a>> {
        let (address, in_use) = slice.device_ptr_mut(stream);
        Ok(Address { address, _in_use: in_use })
    }
    let dtype = storage.dtype();
    match &mut storage.slice {
        CudaStorageSlice::U8(slice) => of(slice, stream),
        CudaStorageSlice::U32(slice) => of(slice, stream),
        CudaStorageSlice::F16(slice) => of(slice, stream),
        CudaStorageSlice::BF16(slice) => of(slice, stream),
        CudaStorageSlice::F32(slice) => of(slice, stream),
        _ => bail!("no kernel writes {dtype:?}"),
    }
}

/// An error while the stream is captured: what is read back then was not computed, which the driver does not say.
pub(super) fn can_read_back(what: &str, stream: &CudaStream) -> Result<()> {
    match stream.capture_status().w()? {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        | sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => {
            bail!("{what} reads results back from the device, whose stream is being captured: end the capture first")
        }
    }
}

/// A float dtype as kernels take it.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that no kernel takes")]
pub(super) fn float_dtype(dtype: DType) -> Result<CqDtype> {
    match dtype {
        DType::F16 => Ok(CQ_F16),
        DType::BF16 => Ok(CQ_BF16),
        DType::F32 => Ok(CQ_F32),
        other => bail!("the kernels take F16, BF16 and F32, found {other:?}"),
    }
}

/// A size as kernels take it.
pub(super) fn u32_of(what: &str, size: usize) -> Result<u32> {
    match u32::try_from(size) {
        // Indices are added to it in the kernels.
        Ok(fits) if fits <= i32::MAX as u32 => Ok(fits),
        _ => bail!("{what}: {size} is more than CUDA kernels can index"),
    }
}
