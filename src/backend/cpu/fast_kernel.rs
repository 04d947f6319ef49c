//! What dispatch needs of a kernel that is faster than those in f32, and takes some formats only.

use super::matrix::PackedMatrix;
use crate::QuantFormat;

/// The kernel cannot represent these activations or scales: an infinity, a NaN, or magnitudes too far apart. The f32
/// kernels can.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotRepresentable;

/// A kernel for a whole output.
pub(super) trait FastKernel {
    /// Whether the kernel computes with weights of this format.
    fn supports(&self, format: QuantFormat) -> bool;

    /// `x * weight^T`, `[M, N]`, for `x` `[M, K]` and a weight of a supported format.
    ///
    /// # Errors
    /// If the kernel cannot represent the activations or scales.
    fn matmul(&self, matrix: &PackedMatrix, x: &[f32]) -> Result<Vec<f32>, NotRepresentable>;
}
