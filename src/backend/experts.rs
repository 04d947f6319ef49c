//! Experts that tokens chose, computed together on a CUDA device, where the choice stays.

use super::fused::is_plain;
use super::{cuda, Factor};
use candle_core::{DType, Device, Result, Tensor};

/// What joins the outputs of an expert's gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) enum Join {
    /// `silu(gate) * up`.
    Silu,
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`.
    Clamped { alpha: f32, limit: f32 },
}

/// Experts and who chose them.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct ChosenExperts<'a> {
    /// Stacks `[E, inner, hidden]`, biases `[E, inner]`.
    pub(crate) gate: Factor<'a>,
    pub(crate) up: Factor<'a>,
    /// A stack `[E, hidden, inner]`, biases `[E, hidden]`.
    pub(crate) down: Factor<'a>,
    pub(crate) join: Join,
    /// U32 `[tokens, top_k]`. Those that are out of range make NaN.
    pub(crate) ids: &'a Tensor,
    /// F32 `[tokens, top_k]`.
    pub(crate) shares: &'a Tensor,
    /// Whether every pair of a token and an expert is computed by itself; else those of one expert together.
    pub(crate) alone: bool,
}

/// For each token of `x` `[tokens, hidden]` the sum of its experts' outputs, each times its share; none if the
/// device or the weights are not such that its kernels can do it.
pub(crate) fn experts(chosen: &ChosenExperts, x: &Tensor) -> Result<Option<Tensor>> {
    let factors = [chosen.gate, chosen.up, chosen.down];
    let [gate, up, down] = factors.map(|factor| factor.weight.dims());
    let fits = match (gate.as_slice(), down.as_slice(), x.dims(), chosen.ids.dims()) {
        (&[e, inner, hidden], &[of_down, n, k], &[tokens, of_x], &[of_ids, _]) => {
            (e, inner, hidden) == (of_down, k, n) && gate == up && of_x == hidden && of_ids == tokens
        }
        _ => false,
    };
    let bias_fits = |factor: &Factor| {
        factor.bias.is_none_or(|bias| {
            let dims = factor.weight.dims();
            is_plain(bias) && matches!(dims.as_slice(), [e, n, _] if bias.dims() == [*e, *n])
        })
    };
    let device = chosen.gate.weight.device();
    let here = |tensor: &Tensor| tensor.device().same_device(device);
    let possible = matches!(device, Device::Cuda(_))
        && fits
        && chosen.gate.weight.format() == chosen.up.weight.format()
        && factors.iter().all(|factor| here(factor.weight.packed()) && bias_fits(factor))
        && factors.iter().filter_map(|factor| factor.bias).all(here)
        && [x, chosen.ids, chosen.shares].into_iter().all(|tensor| here(tensor) && !tensor.track_op())
        && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
        && chosen.ids.dtype() == DType::U32
        && chosen.shares.dtype() == DType::F32
        && chosen.ids.dims() == chosen.shares.dims();
    match possible {
        true => cuda::experts(chosen, x),
        false => Ok(None),
    }
}
