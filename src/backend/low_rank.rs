//! What low-rank adapters add to the outputs of a layer, without candle's operations, which are slow to start.

use super::cpu;
use candle_core::{DType, Result, Tensor};
use std::sync::Arc;

/// `y + scale * x (B A)^T`, of which outputs are then multiplied by numbers of their own, with DoRA; on the CPU.
#[derive(Debug)]
pub(crate) struct Update {
    /// A, `[rank, K]`, of each expert one.
    pub(crate) a: Vec<f32>,
    /// B, `[N, rank]`, of each expert one.
    pub(crate) b: Vec<f32>,
    pub(crate) rank: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) scale: f32,
    /// N numbers.
    pub(crate) rescale: Option<Vec<f32>>,
}

/// With more rows of x candle's matmuls take less time.
const FEW: usize = 32;

/// The outputs `y` `[.., N]` of a layer for `x` `[.., K]`, as updates change them one after another; of a stack those of
/// one expert. None if others have to compute it: where gradients may be asked for, on other devices, of other dtypes,
/// and for many rows.
pub(crate) fn updated(
    updates: &[Arc<Update>],
    expert: usize,
    x: &Tensor,
    y: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let is_plain =
        |tensor: &Tensor| tensor.device().is_cpu() && tensor.dtype() == DType::F32 && !tensor.track_op();
    let rows = y.elem_count() / y.dims().last().copied().unwrap_or(1).max(1);
    if rows > FEW || ![x, y].into_iter().chain(bias).all(is_plain) {
        return Ok(None);
    }
    let numbers = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    let bias = bias.map(numbers).transpose()?;
    let mut outputs = numbers(y)?;
    cpu::low_rank::LowRank::new(updates, expert, &numbers(x)?).add_to(&mut outputs, bias.as_deref());
    Tensor::from_vec(outputs, y.dims(), y.device()).map(Some)
}
