//! Products of cuBLAS against sums in `f64`.

use half::{bf16, f16};
use pretend_cuda::argument::{Host, In, Out};
use pretend_cuda::cublas::*;
use pretend_cuda::device::*;
use pretend_cuda::transfer::*;

/// How a type is written in memory, and how far one rounding to it may be off.
struct Format {
    cuda_type: i32,
    compute: i32,
    encode: fn(f64) -> Vec<u8>,
    decode: fn(&[u8]) -> f64,
    rounding: f64,
}

const F16: Format = Format {
    cuda_type: 2,
    compute: 68,
    encode: |x| f16::from_f64(x).to_ne_bytes().into(),
    decode: |bytes| f16::from_ne_bytes(bytes.try_into().unwrap()).to_f64(),
    rounding: 1.0 / 2048.0,
};
const BF16: Format = Format {
    cuda_type: 14,
    compute: 68,
    encode: |x| bf16::from_f64(x).to_ne_bytes().into(),
    decode: |bytes| bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f64(),
    rounding: 1.0 / 256.0,
};
const F32: Format = Format {
    cuda_type: 0,
    compute: 68,
    encode: |x| (x as f32).to_ne_bytes().into(),
    decode: |bytes| f32::from_ne_bytes(bytes.try_into().unwrap()).into(),
    rounding: 1e-7,
};
const F64: Format = Format {
    cuda_type: 1,
    compute: 70,
    encode: |x| x.to_ne_bytes().into(),
    decode: |bytes| f64::from_ne_bytes(bytes.try_into().unwrap()),
    rounding: 1e-16,
};

/// Numbers in device memory, and as they are after rounding.
fn upload(format: &Format, count: usize, seed: usize) -> (u64, Vec<f64>) {
    let values = (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f64 / 50.0 - 1.0);
    let bytes: Vec<u8> = values.flat_map(format.encode).collect();
    let mut address = 0;
    assert_eq!(cuMemAlloc_v2(Out::from(&mut address), bytes.len()), 0);
    assert_eq!(cuMemcpyHtoD_v2(address, Host(bytes.as_ptr().cast_mut().cast()), bytes.len()), 0);
    (address, bytes.chunks(bytes.len() / count).map(format.decode).collect())
}

/// `CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION`
const NO_REDUCED_PRECISION: u32 = 16;

fn products(format: &Format, transposed: [bool; 2], beta: f64, math_mode: u32) {
    let mut handle = 0;
    assert_eq!(cublasCreate_v2(Out::from(&mut handle)), 0);
    assert_eq!(cublasSetMathMode(handle, math_mode), 0);
    let (m, n, k, batch) = (5, 7, 33, 3);
    // One column more than needed between columns, a few elements between matrices.
    let lda = if transposed[0] { k } else { m } + 1;
    let ldb = if transposed[1] { n } else { k } + 1;
    let ldc = m + 1;
    let strides = [lda * m.max(k) + 2, ldb * n.max(k) + 3, ldc * n + 4];
    let [(a, a_values), (b, b_values), (c, c_values)] =
        [0, 1, 2].map(|i| upload(format, strides[i] * batch, i));
    let (alpha32, beta32, alpha64) = (0.5f32, beta as f32, 0.5f64);
    let (alpha, beta_pointer) = match format.compute {
        70 => (In::from(&alpha64).cast(), In::from(&beta).cast()),
        _ => (In::from(&alpha32).cast(), In::from(&beta32).cast()),
    };
    let status = cublasGemmStridedBatchedEx(
        handle,
        transposed[0].into(),
        transposed[1].into(),
        m as i32,
        n as i32,
        k as i32,
        alpha,
        a,
        format.cuda_type,
        lda as i32,
        strides[0] as i64,
        b,
        format.cuda_type,
        ldb as i32,
        strides[1] as i64,
        beta_pointer,
        c,
        format.cuda_type,
        ldc as i32,
        strides[2] as i64,
        batch as i32,
        format.compute,
        99,
    );
    assert_eq!(status, 0);
    let size = (format.encode)(0.0).len();
    let mut bytes = vec![0u8; c_values.len() * size];
    assert_eq!(cuMemcpyDtoH_v2(Host(bytes.as_mut_ptr().cast()), c, bytes.len()), 0);
    let got: Vec<f64> = bytes.chunks(size).map(format.decode).collect();
    let at = |leading: usize, transposed: bool, row: usize, column: usize| {
        if transposed {
            row * leading + column
        } else {
            column * leading + row
        }
    };
    for (i, (got, old)) in got.iter().zip(&c_values).enumerate() {
        let (matrix, place) = (i / strides[2], i % strides[2]);
        let (column, row) = (place / ldc, place % ldc);
        if row >= m || column >= n {
            assert_eq!(got, old, "nothing else is written");
            continue;
        }
        let terms = (0..k).map(|inner| {
            a_values[matrix * strides[0] + at(lda, transposed[0], row, inner)]
                * b_values[matrix * strides[1] + at(ldb, transposed[1], inner, column)]
        });
        let exact = 0.5 * terms.clone().sum::<f64>() + beta * old;
        let sum_error = if format.compute == 70 { 1e-14 } else { k as f64 * 6e-8 };
        let bound = exact.abs() * format.rounding + sum_error * terms.map(f64::abs).sum::<f64>();
        assert!((got - exact).abs() <= bound, "matrix {matrix} [{row}][{column}]: {got} for {exact}");
    }
    assert_eq!(cublasDestroy_v2(handle), 0);
}

#[test]
fn strided_batches() {
    assert_eq!(cuCtxSetCurrent(context()), 0);
    for format in [&F16, &BF16, &F32, &F64] {
        for transposed in [[false, false], [true, false], [false, true], [true, true]] {
            products(format, transposed, 0.0, NO_REDUCED_PRECISION);
            products(format, transposed, 0.75, NO_REDUCED_PRECISION);
        }
    }
}

#[test]
fn sums_of_sixteen_bits_are_rounded_in_between_unless_the_mode_forbids_it() {
    assert_eq!(cuCtxSetCurrent(context()), 0);
    // 1 + 2^-12 is 1 as f16.
    let halves: Vec<u8> = [1.0, 1.0 / 4096.0, -1.0, 0.0].into_iter().flat_map(F16.encode).collect();
    let ones: Vec<u8> = [1.0; 4].into_iter().flat_map(F16.encode).collect();
    let put = |bytes: &[u8]| {
        let mut address = 0;
        assert_eq!(cuMemAlloc_v2(Out::from(&mut address), bytes.len()), 0);
        assert_eq!(cuMemcpyHtoD_v2(address, Host(bytes.as_ptr().cast_mut().cast()), bytes.len()), 0);
        address
    };
    let (a, b, c) = (put(&halves), put(&ones), put(&[0; 2]));
    for (math_mode, expected) in [(0, 0.0), (NO_REDUCED_PRECISION, 1.0 / 4096.0)] {
        let mut handle = 0;
        assert_eq!(cublasCreate_v2(Out::from(&mut handle)), 0);
        assert_eq!(cublasSetMathMode(handle, math_mode), 0);
        let (alpha, beta) = (1f32, 0f32);
        let (alpha, beta) = (In::from(&alpha).cast(), In::from(&beta).cast());
        let status = cublasGemmEx(handle, 0, 0, 1, 1, 4, alpha, a, 2, 1, b, 2, 4, beta, c, 2, 1, 68, 99);
        assert_eq!(status, 0);
        let mut bytes = [0u8; 2];
        assert_eq!(cuMemcpyDtoH_v2(Host(bytes.as_mut_ptr().cast()), c, 2), 0);
        assert_eq!((F16.decode)(&bytes), expected, "mode {math_mode}");
        assert_eq!(cublasDestroy_v2(handle), 0);
    }
}

fn context() -> usize {
    let mut context = 0;
    assert_eq!(cuDevicePrimaryCtxRetain(Out::from(&mut context), 1), 0);
    context
}

#[test]
fn what_is_not_supported_or_wrong() {
    assert_eq!(cuCtxSetCurrent(context()), 0);
    let mut handle = 0;
    assert_eq!(cublasCreate_v2(Out::from(&mut handle)), 0);
    let (x, _) = upload(&F32, 16, 0);
    let one = 1f32;
    let product = |lda, operation, a, cuda_type| {
        let one = In::from(&one).cast();
        cublasGemmEx(handle, operation, 0, 4, 4, 4, one, a, cuda_type, lda, x, 0, 4, one, x, 0, 4, 68, 0)
    };
    assert_eq!(product(4, 0, x, 0), 0);
    assert_eq!(product(3, 0, x, 0), 7, "leading dimension");
    assert_eq!(product(4, 5, x, 0), 7, "operation");
    assert_eq!(product(4, 0, x, 3), 15, "8-bit integers");
    assert_eq!(product(4, 0, x + 4, 0), 13, "past the end of memory");
    assert_eq!(cublasDestroy_v2(handle), 0);
    assert_eq!(product(4, 0, x, 0), 13, "destroyed");
}
