//! Linear attention by the gated delta rule.

#[cfg(test)]
mod tests;

use super::cpu::gated_delta::{gated_delta as on_cpu, DeltaInputs, DeltaSizes};
use super::unsupported_dtype;
use crate::{Error, Result};
use candle_core::{bail, CpuStorage, DType, Device, InplaceOp1, Layout, Tensor, D};
use std::cell::RefCell;

/// Linear attention by the gated delta rule: every head has a matrix S that maps keys to values. A token makes it forget a
/// part of all, corrects what it has for the token's key, and reads it:
///
/// `S = exp(g) S`, then `S = S + k (beta (v - k S))`, then `y = q S`, with rows `q`, `k`, `v` and `y`.
///
/// This is equation 10 of Yang, Kautz and Hatamizadeh, [Gated Delta Networks: Improving Mamba2 with Delta
/// Rule](https://arxiv.org/abs/2412.06464) (2024), where `exp(g)` is α and S is transposed.
///
/// * `q`, `k`: `[B, T, key_heads, key_dim]`, T consecutive tokens of each sequence, scaled and normalized as the model wants
///   it; F32, F16 or BF16.
/// * `v`: `[B, T, value_heads, value_dim]`; `value_heads` is a multiple of `key_heads`, and value head `h` uses key head
///   `h / (value_heads / key_heads)`.
/// * `g`, `beta`: `[B, T, value_heads]`; `g` is the logarithm of what is kept, `beta` how much of a correction is made.
/// * `state`: the matrices S, `[B, value_heads, key_dim, value_dim]`, F32, contiguous. **It is changed in place** to those
///   behind the last token, and so are all tensors that share its storage; of texts that begin it is zeros.
///
/// The result is `[B, T, value_heads, value_dim]` of the dtype of `v`. Sums are f32. The number of threads does not matter.
///
/// Where a gradient may be asked for, and on devices other than the CPU, candle's operations compute it token by token, which
/// is slow: for a backward pass they keep the state of every token. Gradients flow to all but the state.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::ops;
///
/// let random = |dims: &[usize]| Tensor::randn(0f32, 0.3, dims, &Device::Cpu);
/// let state = Tensor::zeros((1, 4, 16, 32), DType::F32, &Device::Cpu)?;
/// // A prompt of five tokens, then one more: four heads of values on two of keys.
/// for tokens in [5, 1] {
///     let (q, k) = (random(&[1, tokens, 2, 16])?, random(&[1, tokens, 2, 16])?);
///     let (v, g) = (random(&[1, tokens, 4, 32])?, random(&[1, tokens, 4])?.abs()?.neg()?);
///     let y = ops::gated_delta(&q, &k, &v, &g, &g.exp()?, &state)?;
///     assert_eq!(y.dims(), [1, tokens, 4, 32]);
/// }
/// assert!(state.abs()?.max_all()?.to_scalar::<f32>()? > 0.);
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// If shapes, dtypes or devices do not fit, or a dimension is zero: the state is then as before.
pub fn gated_delta(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    g: &Tensor,
    beta: &Tensor,
    state: &Tensor,
) -> Result<Tensor> {
    let inputs = [q, k, v, g, beta];
    let sizes = check(inputs, state)?;
    let y = if v.device().is_cpu() && !inputs.iter().any(|input| input.track_op()) {
        let numbers = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1();
        let [q, k, v, g, beta] = inputs.map(numbers);
        let inputs = DeltaInputs { q: q?, k: k?, v: v?, g: g?, beta: beta? };
        let step = Step { sizes, inputs, out: RefCell::default() };
        state.inplace_op1(&step)?;
        let shape = (sizes.batch, sizes.value_heads, sizes.tokens, sizes.value_dim);
        Tensor::from_vec(step.out.into_inner(), shape, &Device::Cpu)?
    } else {
        let (y, last) = by_operations(inputs, state, sizes)?;
        state.slice_set(&last.detach().contiguous()?, 0, 0)?;
        y
    };
    Ok(y.transpose(1, 2)?.contiguous()?.to_dtype(v.dtype())?)
}

/// Checks devices, dtypes and shapes.
fn check(inputs: [&Tensor; 5], state: &Tensor) -> Result<DeltaSizes> {
    let [q, k, v, g, beta] = inputs;
    for x in inputs {
        if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(unsupported_dtype("the gated delta rule", x.dtype()).into());
        }
        if !x.device().same_device(state.device()) {
            let expected = format!("on {:?}, where the state is", state.device().location());
            return Err(Error::mismatch("an input", expected, format!("on {:?}", x.device().location())));
        }
    }
    let (&[batch, tokens, key_heads, key_dim], &[_, _, value_heads, value_dim]) = (q.dims(), v.dims()) else {
        let found = format!("{:?} and {:?}", q.dims(), v.dims());
        return Err(Error::mismatch("queries and values", "shapes [B, T, heads, size]", found));
    };
    if q.elem_count() == 0 || v.elem_count() == 0 || !value_heads.is_multiple_of(key_heads) {
        let expected = "at least one of each, and heads of values that are a multiple of those of keys";
        return Err(Error::mismatch(
            "queries and values",
            expected,
            format!("{:?}, {:?}", q.dims(), v.dims()),
        ));
    }
    for (name, tensor, expected) in [
        ("keys", k, &[batch, tokens, key_heads, key_dim][..]),
        ("values", v, &[batch, tokens, value_heads, value_dim]),
        ("g", g, &[batch, tokens, value_heads]),
        ("beta", beta, &[batch, tokens, value_heads]),
        ("the state", state, &[batch, value_heads, key_dim, value_dim]),
    ] {
        if tensor.dims() != expected {
            return Err(Error::mismatch(name, format!("{expected:?}"), format!("{:?}", tensor.dims())));
        }
    }
    if state.dtype() != DType::F32 || !state.is_contiguous() {
        let found = format!("{:?}, {:?}", state.dtype(), state.layout());
        return Err(Error::mismatch("the state", "a contiguous tensor of F32", found));
    }
    Ok(DeltaSizes { batch, tokens, key_heads, value_heads, key_dim, value_dim })
}

/// Changes a state on the CPU.
struct Step {
    sizes: DeltaSizes,
    inputs: DeltaInputs,
    out: RefCell<Vec<f32>>,
}

impl InplaceOp1 for Step {
    fn name(&self) -> &'static str {
        "gated-delta"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let range = layout.contiguous_offsets().map(|(start, end)| start..end);
        let CpuStorage::F32(all) = storage else { bail!("gated-delta: the state is not F32") };
        let Some(state) = range.and_then(|range| all.get_mut(range)) else {
            bail!("gated-delta: the state is not contiguous")
        };
        self.out.replace(on_cpu(self.sizes, &self.inputs, state));
        Ok(())
    }
}

/// The outputs `[B, value_heads, T, value_dim]` and the last state, both in F32.
fn by_operations(
    inputs: [&Tensor; 5],
    state: &Tensor,
    sizes: DeltaSizes,
) -> candle_core::Result<(Tensor, Tensor)> {
    let DeltaSizes { batch, tokens, key_heads, value_heads, key_dim, .. } = sizes;
    let [q, k, v, g, beta] = inputs.map(|x| x.to_dtype(DType::F32));
    // A head of queries or keys for each one of values.
    let repeated = |x: Tensor| {
        let shape = (batch, tokens, key_heads, value_heads / key_heads, key_dim);
        x.unsqueeze(3)?.broadcast_as(shape)?.reshape((batch, tokens, value_heads, key_dim))
    };
    let (q, k, v, decay, beta) = (repeated(q?)?, repeated(k?)?, v?, g?.exp()?, beta?);
    let (mut state, mut outputs) = (state.copy()?, Vec::with_capacity(tokens));
    for token in 0..tokens {
        // `[B, value_heads, 1, size]`.
        let of_token = |x: &Tensor| x.narrow(1, token, 1)?.transpose(1, 2)?.contiguous();
        let number = |x: &Tensor| of_token(&x.unsqueeze(D::Minus1)?);
        let (q, k, v) = (of_token(&q)?, of_token(&k)?, of_token(&v)?);
        state = state.broadcast_mul(&number(&decay)?)?;
        let delta = (v - k.matmul(&state)?)?.broadcast_mul(&number(&beta)?)?;
        state = (state + k.t()?.contiguous()?.matmul(&delta)?)?;
        outputs.push(q.matmul(&state)?);
    }
    Ok((Tensor::cat(&outputs, 2)?, state))
}
