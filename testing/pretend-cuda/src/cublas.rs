//! The matrix products of cuBLAS that candle asks for.

use std::ffi::{c_int, c_longlong, c_uint};
use std::sync::Mutex;

use half::f16;

use crate::argument::{In, Out};
use crate::device;
use crate::edge;
use crate::handles::{lock, Handle, Handles};
use crate::memory;
use crate::product::{Element, Matrices, Product};
use crate::status::{self, fail, Result, INVALID_VALUE, NOT_SUPPORTED};
use crate::stream::{self, Work};

struct Blas {
    device: usize,
    stream: Mutex<Handle>,
    math_mode: Mutex<c_uint>,
}

static HANDLES: Handles<Blas> = Handles::new("cuBLAS handle");

/// `CUBLAS_STATUS_NOT_SUPPORTED`
const BLAS_NOT_SUPPORTED: c_int = 15;
const BLAS_INVALID_VALUE: c_int = 7;
const BLAS_EXECUTION_FAILED: c_int = 13;

/// The status of cuBLAS for a result; the message goes to standard error, for cuBLAS has no other place.
fn blas_status(function: &str, result: Result<()>) -> c_int {
    let Err(error) = result else { return 0 };
    eprintln!("pretend CUDA: {function}: {}", error.message());
    let code = match error.code() {
        NOT_SUPPORTED => BLAS_NOT_SUPPORTED,
        INVALID_VALUE => BLAS_INVALID_VALUE,
        _ => BLAS_EXECUTION_FAILED,
    };
    status::report(function, Err(error));
    code
}

/// The arguments that all products have.
struct Arguments {
    operations: [c_int; 2],
    sizes: [c_int; 3],
    scalars: [In<u8>; 2],
    compute: c_int,
    addresses: [u64; 3],
    types: [c_int; 3],
    leading: [c_int; 3],
    strides: [c_longlong; 3],
    batch: c_int,
}

impl Arguments {
    fn scalar(&self, pointer: In<u8>) -> Result<f64> {
        match self.compute {
            64 | 65 => Ok(f16::from_bits(pointer.cast::<u16>().get(0)?).to_f64()),
            68 | 69 | 74 | 75 | 77 => Ok(pointer.cast::<f32>().get(0)?.into()),
            70 | 71 => pointer.cast::<f64>().get(0),
            other => fail(NOT_SUPPORTED, format!("cublasComputeType {other}")),
        }
    }

    fn product(&self, math_mode: c_uint) -> Result<Product> {
        let [m, n, k] = self.sizes;
        let transposed = self.operations.map(|operation| operation != 0);
        if self.operations.iter().any(|operation| !(0..=2).contains(operation)) {
            return fail(INVALID_VALUE, format!("operations {:?}", self.operations));
        }
        let stored = |rows, columns, transposed| if transposed { [columns, rows] } else { [rows, columns] };
        let shapes = [stored(m, k, transposed[0]), stored(k, n, transposed[1]), [m, n]];
        let matrices = |i: usize, name| {
            let [rows, columns] = shapes[i];
            let element = Element::new(self.types[i])?;
            Matrices::new(name, self.addresses[i], element, [rows, columns, self.leading[i]], self.strides[i])
        };
        let (Ok(inner), Ok(batch)) = (usize::try_from(k), usize::try_from(self.batch)) else {
            return fail(INVALID_VALUE, "negative sizes");
        };
        let [alpha, beta] = self.scalars;
        Ok(Product {
            a: matrices(0, "matrix A")?,
            b: matrices(1, "matrix B")?,
            c: matrices(2, "matrix C")?,
            transposed,
            inner,
            alpha: self.scalar(alpha)?,
            beta: self.scalar(beta)?,
            batch,
            reduced: math_mode & NO_REDUCED_PRECISION == 0,
        })
    }

    fn submit(self, handle: Handle) -> Result<()> {
        let blas = HANDLES.get(handle)?;
        let product = self.product(*lock(&blas.math_mode))?;
        let stream = stream::find(*lock(&blas.stream))?;
        if stream.device != blas.device {
            return fail(INVALID_VALUE, "a handle of another device than its stream");
        }
        let [a, b, y] = self.addresses;
        stream.submit(Work::of_kernels(move |edge| {
            let written: Vec<_> = memory::allocation_at(y, "matrix C")?.into_iter().collect();
            let before = edge::copies(&written);
            edge.cut();
            product.run()?;
            for (address, name) in [(a, "matrix A"), (b, "matrix B")] {
                memory::allocation_at(address, name)?
                    .map_or(Ok(()), |region| edge.order.uses(region, false))?;
            }
            edge.ran(&written, before)
        }))
    }
}

macro_rules! blas {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[no_mangle]
        pub extern "C" fn $name($($argument: $type),*) -> c_int {
            let run = move || -> Result<()> { $body };
            blas_status(stringify!($name), run())
        }
    )*};
}

/// `CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION`
const NO_REDUCED_PRECISION: c_uint = 16;
const COMPUTE_32F: c_int = 68;
const COMPUTE_64F: c_int = 70;

blas! {
    /// A handle for the current device.
    fn cublasCreate_v2(handle: Out<Handle>) {
        let device = device::current()?;
        handle.set(HANDLES.insert(Blas { device, stream: Mutex::default(), math_mode: Mutex::default() }))
    }

    /// Forgets a handle.
    fn cublasDestroy_v2(handle: Handle) {
        HANDLES.remove(handle).map(drop)
    }

    /// Where products are computed.
    fn cublasSetStream_v2(handle: Handle, stream: Handle) {
        *lock(&HANDLES.get(handle)?.stream) = stream;
        Ok(())
    }

    /// Where products are computed.
    fn cublasGetStream_v2(handle: Handle, stream: Out<Handle>) {
        stream.set(*lock(&HANDLES.get(handle)?.stream))
    }

    /// No workspace is needed.
    fn cublasSetWorkspace_v2(handle: Handle, _workspace: u64, _bytes: usize) {
        HANDLES.get(handle).map(drop)
    }

    /// Only the host's scalars are known.
    fn cublasSetPointerMode_v2(handle: Handle, mode: c_int) {
        HANDLES.get(handle)?;
        if mode == 0 { Ok(()) } else { fail(NOT_SUPPORTED, "scalars in device memory") }
    }

    /// The host's scalars.
    fn cublasGetPointerMode_v2(handle: Handle, mode: Out<c_int>) {
        HANDLES.get(handle)?;
        mode.set(0)
    }

    /// Of the modes, only `CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION` means something.
    fn cublasSetMathMode(handle: Handle, mode: c_uint) {
        *lock(&HANDLES.get(handle)?.math_mode) = mode;
        Ok(())
    }

    /// The mode that was set.
    fn cublasGetMathMode(handle: Handle, mode: Out<c_uint>) {
        mode.set(*lock(&HANDLES.get(handle)?.math_mode))
    }

    /// That of CUDA 13.0.
    fn cublasGetVersion_v2(handle: Handle, version: Out<c_int>) {
        HANDLES.get(handle)?;
        version.set(130000)
    }

    /// A product of `f32`.
    fn cublasSgemm_v2(
        handle: Handle, op_a: c_int, op_b: c_int, m: c_int, n: c_int, k: c_int,
        alpha: In<u8>, a: u64, lda: c_int, b: u64, ldb: c_int, beta: In<u8>, c: u64, ldc: c_int,
    ) {
        Arguments {
            operations: [op_a, op_b], sizes: [m, n, k], scalars: [alpha, beta], compute: COMPUTE_32F,
            addresses: [a, b, c], types: [0; 3], leading: [lda, ldb, ldc], strides: [0; 3], batch: 1,
        }.submit(handle)
    }

    /// A product of `f64`.
    fn cublasDgemm_v2(
        handle: Handle, op_a: c_int, op_b: c_int, m: c_int, n: c_int, k: c_int,
        alpha: In<u8>, a: u64, lda: c_int, b: u64, ldb: c_int, beta: In<u8>, c: u64, ldc: c_int,
    ) {
        Arguments {
            operations: [op_a, op_b], sizes: [m, n, k], scalars: [alpha, beta], compute: COMPUTE_64F,
            addresses: [a, b, c], types: [1; 3], leading: [lda, ldb, ldc], strides: [0; 3], batch: 1,
        }.submit(handle)
    }

    /// Products of `f32`.
    fn cublasSgemmStridedBatched(
        handle: Handle, op_a: c_int, op_b: c_int, m: c_int, n: c_int, k: c_int,
        alpha: In<u8>, a: u64, lda: c_int, stride_a: c_longlong, b: u64, ldb: c_int, stride_b: c_longlong,
        beta: In<u8>, c: u64, ldc: c_int, stride_c: c_longlong, batch: c_int,
    ) {
        Arguments {
            operations: [op_a, op_b], sizes: [m, n, k], scalars: [alpha, beta], compute: COMPUTE_32F,
            addresses: [a, b, c], types: [0; 3], leading: [lda, ldb, ldc],
            strides: [stride_a, stride_b, stride_c], batch,
        }.submit(handle)
    }

    /// Products of `f64`.
    fn cublasDgemmStridedBatched(
        handle: Handle, op_a: c_int, op_b: c_int, m: c_int, n: c_int, k: c_int,
        alpha: In<u8>, a: u64, lda: c_int, stride_a: c_longlong, b: u64, ldb: c_int, stride_b: c_longlong,
        beta: In<u8>, c: u64, ldc: c_int, stride_c: c_longlong, batch: c_int,
    ) {
        Arguments {
            operations: [op_a, op_b], sizes: [m, n, k], scalars: [alpha, beta], compute: COMPUTE_64F,
            addresses: [a, b, c], types: [1; 3], leading: [lda, ldb, ldc],
            strides: [stride_a, stride_b, stride_c], batch,
        }.submit(handle)
    }

    /// A product of any types.
    fn cublasGemmEx(
        handle: Handle, op_a: c_int, op_b: c_int, m: c_int, n: c_int, k: c_int,
        alpha: In<u8>, a: u64, type_a: c_int, lda: c_int, b: u64, type_b: c_int, ldb: c_int,
        beta: In<u8>, c: u64, type_c: c_int, ldc: c_int, compute: c_int, _algorithm: c_int,
    ) {
        Arguments {
            operations: [op_a, op_b], sizes: [m, n, k], scalars: [alpha, beta], compute,
            addresses: [a, b, c], types: [type_a, type_b, type_c], leading: [lda, ldb, ldc],
            strides: [0; 3], batch: 1,
        }.submit(handle)
    }

    /// Products of any types.
    fn cublasGemmStridedBatchedEx(
        handle: Handle, op_a: c_int, op_b: c_int, m: c_int, n: c_int, k: c_int,
        alpha: In<u8>, a: u64, type_a: c_int, lda: c_int, stride_a: c_longlong,
        b: u64, type_b: c_int, ldb: c_int, stride_b: c_longlong,
        beta: In<u8>, c: u64, type_c: c_int, ldc: c_int, stride_c: c_longlong,
        batch: c_int, compute: c_int, _algorithm: c_int,
    ) {
        Arguments {
            operations: [op_a, op_b], sizes: [m, n, k], scalars: [alpha, beta], compute,
            addresses: [a, b, c], types: [type_a, type_b, type_c], leading: [lda, ldb, ldc],
            strides: [stride_a, stride_b, stride_c], batch,
        }.submit(handle)
    }
}
