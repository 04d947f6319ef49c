//! Products of matrices in device memory, on the host. Sums are taken in `f32`, or `f64` for `f64`.

use std::ffi::{c_int, c_longlong};
use std::ops::Range;

use gemm::{gemm, Parallelism};
use half::{bf16, f16};

use crate::memory;
use crate::status::{fail, Result, INVALID_VALUE, NOT_SUPPORTED};

/// Elements of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    Bf16,
    F32,
    F64,
}

impl Element {
    pub fn new(cuda_data_type: c_int) -> Result<Self> {
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

    /// The element nearest to a number.
    fn rounded(self, value: f64) -> f64 {
        match self {
            Self::F16 => f16::from_f64(value).to_f64(),
            Self::Bf16 => bf16::from_f64(value).to_f64(),
            Self::F32 => (value as f32).into(),
            Self::F64 => value,
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
pub struct Matrices {
    name: &'static str,
    address: u64,
    element: Element,
    rows: usize,
    columns: usize,
    leading: usize,
    stride: i64,
}

impl Matrices {
    pub fn new(
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
pub struct Product {
    pub a: Matrices,
    pub b: Matrices,
    pub c: Matrices,
    pub transposed: [bool; 2],
    pub inner: usize,
    pub alpha: f64,
    pub beta: f64,
    pub batch: usize,
    /// Whether sums of 16-bit results may be added up in 16 bits: then each half of the inner dimension is rounded
    /// before the two are added.
    pub reduced: bool,
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
    pub fn run(self) -> Result<()> {
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
        let over = |inner: Range<usize>| {
            let mut product = vec![T::ZERO; m * n];
            let (a_from, b_from) = (inner.start as isize * a_columns, inner.start as isize * b_rows);
            // SAFETY: dense matrices of the sizes given: m n, m k, and k n elements, of the inner ones a range.
            unsafe {
                gemm(
                    m,
                    n,
                    inner.len(),
                    product.as_mut_ptr(),
                    m as isize,
                    1,
                    false,
                    a.as_ptr().offset(a_from),
                    a_columns,
                    a_rows,
                    b.as_ptr().offset(b_from),
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
            product
        };
        let product: Vec<f64> = match self.reduced && self.c.element.size() == 2 {
            false => over(0..k).into_iter().map(T::get).collect(),
            true => {
                let halves = over(0..k / 2).into_iter().zip(over(k / 2..k));
                halves
                    .map(|(p, q)| self.c.element.rounded(p.get()) + self.c.element.rounded(q.get()))
                    .collect()
            }
        };
        // With beta = 0, c is not read: it may be NaN.
        let old = if self.beta == 0.0 { vec![0.0; m * n] } else { self.c.read(i)? };
        let new = product.iter().zip(old).map(|(p, c)| self.alpha * p + self.beta * c);
        self.c.write(i, &new.collect::<Vec<_>>())
    }
}
