//! Dense GEMM on device memory, by candle's cuBLAS handle.

use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::WrapErr;
use candle_core::{bail, CudaDevice, DType, Result};
use std::ffi::c_int;

/// `y (+)= x * weight^T` or `x * weight`, sums f32.
#[derive(Clone, Copy)]
pub(super) struct Gemm {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Of x and the weight.
    pub(super) dtype: DType,
    /// `[m, k]`, rows `x_stride` elements apart.
    pub(super) x: u64,
    pub(super) x_stride: usize,
    /// `[n, k]` if it is to be transposed, else `[k, n]`.
    pub(super) weight: u64,
    pub(super) transposed: bool,
    /// `[m, n]`, rows `y_stride` elements apart.
    pub(super) y: u64,
    pub(super) y_stride: usize,
    /// That of x, or f32.
    pub(super) y_dtype: DType,
    /// Whether the result is added to what y holds.
    pub(super) add: bool,
}

#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that no kernel takes")]
fn element_of(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        other => bail!("a dense matmul takes F16, BF16 and F32, found {other:?}"),
    }
}

/// While it lives, cuBLAS adds up in f32 what it splits: by default it may do so in the 16 bits of the result. The
/// handle is candle's, whose own matmuls go on as they were.
struct ExactSums {
    handle: sys::cublasHandle_t,
    before: sys::cublasMath_t,
}

impl ExactSums {
    fn new(handle: sys::cublasHandle_t) -> Result<Self> {
        let mut before = sys::cublasMath_t::CUBLAS_DEFAULT_MATH;
        // SAFETY: candle's handle lives as long as its device; the mode goes to a variable that outlives the call.
        unsafe { sys::cublasGetMathMode(handle, &mut before) }.result().w()?;
        let exact = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        // SAFETY: as above.
        unsafe { sys::cublasSetMathMode(handle, exact) }.result().w()?;
        Ok(Self { handle, before })
    }
}

impl Drop for ExactSums {
    fn drop(&mut self) {
        // SAFETY: the handle outlives this value, which `multiply` drops before it returns; the mode was its own.
        let _ = unsafe { sys::cublasSetMathMode(self.handle, self.before) };
    }
}

/// Puts the GEMM into the device's stream.
///
/// # Safety
/// The addresses are of device memory of the sizes above, which nothing but work ordered by the device's
/// stream touches until the GEMM is done.
pub(super) unsafe fn multiply(device: &CudaDevice, gemm: Gemm) -> Result<()> {
    use sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
    let Gemm { m, n, k, dtype, x, x_stride, weight, transposed, y, y_stride, y_dtype, add } = gemm;
    let (element, y_element) = (element_of(dtype)?, element_of(y_dtype)?);
    let (operation, weight_stride) = if transposed { (CUBLAS_OP_T, k) } else { (CUBLAS_OP_N, n) };
    let size = |what: &str, size: usize| match c_int::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!("{what} = {size} is more than cuBLAS takes"),
    };
    let (alpha, beta) = (1f32, f32::from(u8::from(add)));
    let handle = device.cublas_handle();
    let _exact_sums = ExactSums::new(*handle.handle())?;
    // SAFETY: cuBLAS thinks in columns: y^T = weight * x^T or weight^T * x^T, each of these read as it lies. The
    // caller answers for the addresses.
    let status = unsafe {
        result::gemm_ex(
            *handle.handle(),
            operation,
            CUBLAS_OP_N,
            size("N", n)?,
            size("M", m)?,
            size("K", k)?,
            std::ptr::from_ref(&alpha).cast(),
            weight as *const _,
            element,
            size("a weight's stride", weight_stride)?,
            x as *const _,
            element,
            size("x's stride", x_stride)?,
            std::ptr::from_ref(&beta).cast(),
            y as *mut _,
            y_element,
            size("y's stride", y_stride)?,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    };
    status.w()
}
