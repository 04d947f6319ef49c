//! The matrix products of cuBLAS that candle asks for, on the host. Sums are taken in `f32`, or `f64` for `f64`.

use std::ffi::{c_int, c_longlong, c_uint};
use std::sync::{Arc, Mutex};

use gemm::{gemm, Parallelism};
use half::{bf16, f16};

use crate::argument::{In, Out};
use crate::device;
use crate::handles::{lock, Handle, Handles};
use crate::memory;
use crate::status::{self, fail, Result, INVALID_VALUE, NOT_SUPPORTED};
use crate::stream;

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

/// Elements of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    F16,
    Bf16,
    F32,
    F64,
}

impl Element {
    fn new(cuda_data_type: c_int) -> Result<Self> {
        match cuda_data_type {
            0 => Ok(Self::F32),
            1 => Ok(Self::F64),
            2 => Ok(Self::F16),
            14 => Ok(Self::Bf16),
            other => fail(NOT_SUPPORTED, format!("matrices of cudaDataType {other}")),
        }
    }

    fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    fn read(self, bytes: &[u8]) -> f64 {
        match *bytes {
            [a, b] if self == Self::F16 => f16::from_ne_bytes([a, b]).to_f64(),
            [a, b] => bf16::from_ne_bytes([a, b]).to_f64(),
            [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]).into(),
            [a, b, c, d, e, f, g, h] => f64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            _ => f64::NAN,
        }
    }

    fn write(self, value: f64, bytes: &mut [u8]) {
        match self {
            Self::F16 => bytes.copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
            Self::Bf16 => bytes.copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
            Self::F32 => bytes.copy_from_slice(&(value as f32).to_ne_bytes()),
            Self::F64 => bytes.copy_from_slice(&value.to_ne_bytes()),
        }
    }
}

/// Matrices of a batch, column by column.
#[derive(Clone, Copy)]
struct Matrices {
    name: &'static str,
    address: u64,
    element: Element,
    rows: usize,
    columns: usize,
    leading: usize,
    stride: i64,
}

impl Matrices {
    fn new(
        name: &'static str,
        address: u64,
        element: Element,
        [rows, columns, leading]: [c_int; 3],
        stride: c_longlong,
    ) -> Result<Self> {
        let [Ok(rows), Ok(columns), Ok(leading)] = [rows, columns, leading].map(usize::try_from) else {
            return fail(INVALID_VALUE, format!("{name}: negative sizes"));
        };
        if leading < rows.max(1) {
            return fail(INVALID_VALUE, format!("{name}: a leading dimension of {leading} for {rows} rows"));
        }
        Ok(Self { name, address, element, rows, columns, leading, stride })
    }

    /// Where matrix `i` of the batch begins, checked to lie in memory.
    fn matrix(self, i: usize) -> Result<u64> {
        let address = self.address.wrapping_add_signed(self.stride * i as i64 * self.element.size() as i64);
        if self.rows > 0 && self.columns > 0 {
            let elements = (self.columns - 1) * self.leading + self.rows;
            memory::check(address, elements * self.element.size(), self.name)?;
        }
        Ok(address)
    }

    fn bytes(self, matrix: u64, row: usize, column: usize) -> *mut u8 {
        (matrix as usize + (column * self.leading + row) * self.element.size()) as *mut u8
    }

    /// Matrix `i`, dense and column by column.
    fn read(self, i: usize) -> Result<Vec<f64>> {
        let matrix = self.matrix(i)?;
        let places = (0..self.columns).flat_map(|column| (0..self.rows).map(move |row| (row, column)));
        Ok(places
            .map(|(row, column)| {
                let place = self.bytes(matrix, row, column);
                // SAFETY: `matrix` checked that all rows and columns lie in device memory.
                self.element.read(unsafe { std::slice::from_raw_parts(place, self.element.size()) })
            })
            .collect())
    }

    fn write(self, i: usize, values: &[f64]) -> Result<()> {
        let matrix = self.matrix(i)?;
        for (n, value) in values.iter().enumerate() {
            let place = self.bytes(matrix, n % self.rows, n / self.rows);
            // SAFETY: as in `read`.
            self.element.write(*value, unsafe { std::slice::from_raw_parts_mut(place, self.element.size()) });
        }
        Ok(())
    }
}

/// `c = alpha op(a) op(b) + beta c`
#[derive(Clone, Copy)]
struct Product {
    a: Matrices,
    b: Matrices,
    c: Matrices,
    transposed: [bool; 2],
    inner: usize,
    alpha: f64,
    beta: f64,
    batch: usize,
}

trait Number: Copy + 'static {
    const ZERO: Self;
    const ONE: Self;
    fn new(value: f64) -> Self;
    fn get(self) -> f64;
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl Number for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            fn new(value: f64) -> Self {
                value as $type
            }
            fn get(self) -> f64 {
                self.into()
            }
        }
    )*};
}
numbers!(f32 f64);

impl Product {
    fn run(self) -> Result<()> {
        for i in 0..self.batch {
            if self.c.rows == 0 || self.c.columns == 0 {
                continue;
            }
            if self.c.element == Element::F64 {
                self.multiply::<f64>(i)?;
            } else {
                self.multiply::<f32>(i)?;
            }
        }
        Ok(())
    }

    fn multiply<T: Number>(self, i: usize) -> Result<()> {
        let read = |matrices: Matrices| -> Result<Vec<T>> {
            Ok(matrices.read(i)?.into_iter().map(T::new).collect())
        };
        let (a, b) = (read(self.a)?, read(self.b)?);
        let (m, n, k) = (self.c.rows, self.c.columns, self.inner);
        // Strides from column to column and from row to row, as `op` sees them.
        let strides = |matrices: Matrices, transposed| {
            let rows = matrices.rows as isize;
            if transposed {
                (1, rows)
            } else {
                (rows, 1)
            }
        };
        let (a_columns, a_rows) = strides(self.a, self.transposed[0]);
        let (b_columns, b_rows) = strides(self.b, self.transposed[1]);
        let mut product = vec![T::ZERO; m * n];
        // SAFETY: dense matrices of the sizes given: m n, m k, and k n elements.
        unsafe {
            gemm(
                m,
                n,
                k,
                product.as_mut_ptr(),
                m as isize,
                1,
                false,
                a.as_ptr(),
                a_columns,
                a_rows,
                b.as_ptr(),
                b_columns,
                b_rows,
                T::ZERO,
                T::ONE,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
        // With beta = 0, c is not read: it may be NaN.
        let old = if self.beta == 0.0 { vec![0.0; m * n] } else { self.c.read(i)? };
        let new = product.iter().zip(old).map(|(p, c)| self.alpha * p.get() + self.beta * c);
        self.c.write(i, &new.collect::<Vec<_>>())
    }
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

    fn product(&self) -> Result<Product> {
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
        })
    }

    fn submit(self, handle: Handle) -> Result<()> {
        let blas = HANDLES.get(handle)?;
        let product = self.product()?;
        let stream = stream::find(*lock(&blas.stream))?;
        if stream.device != blas.device {
            return fail(INVALID_VALUE, "a handle of another device than its stream");
        }
        stream.submit(Arc::new(move || product.run()))
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

    /// Modes mean nothing.
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
