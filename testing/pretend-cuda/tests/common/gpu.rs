//! Calling the driver.

use std::ffi::{c_int, c_uint, CStr, CString};
use std::mem::size_of_val;
use std::sync::Once;

use pretend_cuda::argument::{Host, In, Out, Text};
use pretend_cuda::device::*;
use pretend_cuda::launch::*;
use pretend_cuda::module::*;
use pretend_cuda::status::{cuGetErrorString, SUCCESS};
use pretend_cuda::stream::*;
use pretend_cuda::transfer::*;

pub type Handle = usize;

/// What `function` writes, if it returns success.
pub fn made<T: Default>(function: impl FnOnce(Out<T>) -> c_int) -> Result<T, c_int> {
    let mut result = T::default();
    match function(Out::from(&mut result)) {
        SUCCESS => Ok(result),
        error => Err(error),
    }
}

pub fn message(error: c_int) -> String {
    let mut text = std::ptr::null();
    assert_eq!(cuGetErrorString(error, Out::from(&mut text)), SUCCESS);
    // SAFETY: the driver gives a string that stays.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// One device, its context current on this thread, and a stream of its own.
pub struct Gpu {
    pub context: Handle,
    pub stream: Handle,
    pub module: Handle,
}

impl Gpu {
    pub fn new(device: c_int) -> Self {
        static ALL_SCHEDULES: Once = Once::new();
        ALL_SCHEDULES.call_once(|| std::env::set_var("PRETEND_CUDA_SCHEDULES", "all"));
        assert_eq!(cuInit(0), SUCCESS);
        let context = made(|out| cuDevicePrimaryCtxRetain(out, device)).unwrap();
        assert_eq!(cuCtxSetCurrent(context), SUCCESS);
        let stream = made(|out| cuStreamCreate(out, 1)).unwrap();
        let module = made(|out| cuModuleLoadData(out, In::from(&[0u8; 4][..]))).unwrap();
        Self { context, stream, module }
    }

    pub fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.room(size_of_val(values));
        let host = Host(values.as_ptr().cast_mut().cast());
        assert_eq!(cuMemcpyHtoDAsync_v2(address, host, size_of_val(values), self.stream), SUCCESS);
        address
    }

    pub fn room(&self, bytes: usize) -> u64 {
        made(|out| cuMemAllocAsync(out, bytes, self.stream)).unwrap()
    }

    pub fn download(&self, address: u64, count: usize) -> Vec<f32> {
        let mut values = vec![0f32; count];
        let host = Host(values.as_mut_ptr().cast());
        assert_eq!(cuMemcpyDtoHAsync_v2(host, address, 4 * count, self.stream), SUCCESS);
        values
    }

    pub fn function(&self, name: &str) -> Result<Handle, c_int> {
        let name = CString::new(name).unwrap();
        made(|out| cuModuleGetFunction(out, self.module, Text::from(name.as_c_str())))
    }

    pub fn launch<T: Copy>(&self, name: &str, blocks: c_uint, threads: c_uint, params: &T) -> c_int {
        let function = self.function(name).unwrap();
        let params = [In::from(params)];
        let params = In::from(&params[..]).cast();
        cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 256, self.stream, params, In::default())
    }

    /// A kernel of several parameters, each of which is the low bytes of a word.
    pub fn launch_words(
        &self,
        name: &str,
        blocks: c_uint,
        [x, y, z]: [c_uint; 3],
        shared_bytes: c_uint,
        params: &[u64],
    ) -> c_int {
        let function = self.function(name).unwrap();
        let params: Vec<In<u8>> = params.iter().map(|word| In::from(word).cast()).collect();
        let params = In::from(&params[..]);
        cuLaunchKernel(function, blocks, 1, 1, x, y, z, shared_bytes, self.stream, params, In::default())
    }
}

/// Parameters of the kernels that reverse tiles.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Reverse {
    pub x: u64,
    pub y: u64,
    pub n: u32,
}

pub fn tile() -> (Vec<f32>, Vec<f32>) {
    let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let y = x.iter().rev().copied().collect();
    (x, y)
}
