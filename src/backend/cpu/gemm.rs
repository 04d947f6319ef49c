//! The one call into the GEMM library.

/// `products[row, column] += sum over k of x[k, column] * weights[row, k]`, all row-major f32, by this thread alone.
///
/// This is the order in which the library's kernels read: whole vectors of columns, and single weights, which they
/// repeat. It copies neither if `columns` is a multiple of its vectors and there are at most eight times the rows that
/// its kernels take.
///
/// # Panics
/// If a slice is too short for its shape.
pub(super) fn multiply_add(
    (columns, rows, depth): (usize, usize, usize),
    x: &[f32],
    weights: &[f32],
    products: &mut [f32],
) {
    assert!(x.len() >= depth * columns && weights.len() >= rows * depth && products.len() >= rows * columns);
    // SAFETY: the assertion keeps every access inside the slices: element (i, j) of a matrix lies at
    // `i * row stride + j * column stride`, and the products are borrowed exclusively.
    unsafe {
        gemm::gemm(
            columns,
            rows,
            depth,
            products.as_mut_ptr(),
            columns as isize,
            1,
            true,
            x.as_ptr(),
            columns as isize,
            1,
            weights.as_ptr(),
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
