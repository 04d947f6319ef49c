//! The one call into the GEMM library.

/// `out[m, n] = x[m, k] * w[n, k]^T`, all row-major f32; `out` rows are `out_stride` apart.
///
/// # Panics
/// If a slice is too short for its shape.
pub(super) fn multiply_transposed(
    (m, n, k): (usize, usize, usize),
    x: &[f32],
    w: &[f32],
    out: &mut [f32],
    out_stride: usize,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(n <= out_stride, "rows of the result overlap");
    assert!(x.len() >= m * k && w.len() >= n * k && out.len() >= (m - 1) * out_stride + n);
    // SAFETY: the assertions keep every access inside the slices: element (i, j) of a matrix lies at
    // `i * row stride + j * column stride`, and the result is borrowed exclusively.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            false,
            x.as_ptr(),
            1,
            k as isize,
            w.as_ptr(),
            k as isize,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}
