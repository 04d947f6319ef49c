//! The one call into the `gemm` crate.

/// `sums[row, m] += sum over depth of vectors[depth, m] * scalars[row, depth]`, all row-major f32, on this thread alone. Rows of
/// `vectors` lie `stride` numbers apart.
///
/// The crate's kernels read in this order: whole vectors along `m`, and single numbers, which they broadcast. The crate
/// copies neither operand if `m` is a multiple of its vectors and there are at most eight times the rows that its kernels
/// take.
///
/// # Panics
/// If a slice is too short for its shape.
pub(in super::super) fn multiply_add(
    (m, rows, depth): (usize, usize, usize),
    (vectors, stride): (&[f32], usize),
    scalars: &[f32],
    sums: &mut [f32],
) {
    assert!(stride >= m && (depth == 0 || vectors.len() >= (depth - 1) * stride + m));
    assert!(scalars.len() >= rows * depth && sums.len() >= rows * m);
    // SAFETY: the assertions keep every access inside the slices: element (i, j) of a matrix lies at
    // `i * row stride + j * column stride`. `sums` is borrowed exclusively.
    unsafe {
        gemm::gemm(
            m,
            rows,
            depth,
            sums.as_mut_ptr(),
            m as isize,
            1,
            true,
            vectors.as_ptr(),
            stride as isize,
            1,
            scalars.as_ptr(),
            depth as isize,
            1,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
