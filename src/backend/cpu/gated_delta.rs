//! The gated delta rule, head by head.

use super::isa::vectorized;
use super::tasks;

/// Sizes of a call, each at least 1; `value_heads` is a multiple of `key_heads`.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend) struct DeltaSizes {
    pub batch: usize,
    pub tokens: usize,
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl DeltaSizes {
    pub fn outputs(&self) -> usize {
        self.batch * self.value_heads * self.tokens * self.value_dim
    }
}

/// `[batch, tokens, heads, ..]` each, of so many elements as the sizes say.
#[derive(Clone, Debug)]
pub(in crate::backend) struct DeltaInputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub g: Vec<f32>,
    pub beta: Vec<f32>,
}

/// Changes `state` `[batch, value_heads, key_dim, value_dim]`, and returns `[batch, value_heads, tokens, value_dim]`.
///
/// A head is one thread's work from its first token to its last one: sums do not depend on the number of threads.
pub(in crate::backend) fn gated_delta(
    sizes: DeltaSizes,
    inputs: &DeltaInputs,
    state: &mut [f32],
) -> Vec<f32> {
    let mut out = vec![0.; sizes.outputs()];
    let states = state.chunks_exact_mut(sizes.key_dim * sizes.value_dim);
    let heads = states.zip(out.chunks_exact_mut(sizes.tokens * sizes.value_dim));
    tasks::for_each(heads, |index, (state, out)| one_head(sizes, inputs, index, state, out));
    out
}

fn one_head(sizes: DeltaSizes, inputs: &DeltaInputs, index: usize, state: &mut [f32], out: &mut [f32]) {
    let DeltaSizes { tokens, key_heads, value_heads, key_dim, value_dim, .. } = sizes;
    let (entry, head) = (index / value_heads, index % value_heads);
    let key_head = head / (value_heads / key_heads);
    let mut room = vec![0.; value_dim];
    for (token, out) in (entry * tokens..).zip(out.chunks_exact_mut(value_dim)) {
        let (by_key, by_value) = (token * key_heads + key_head, token * value_heads + head);
        let number = |all: &[f32]| all.get(by_value).copied().unwrap_or_default();
        let seen = DeltaToken {
            q: row(&inputs.q, by_key, key_dim),
            k: row(&inputs.k, by_key, key_dim),
            v: row(&inputs.v, by_value, value_dim),
            decay: number(&inputs.g).exp(),
            beta: number(&inputs.beta),
        };
        change(state, seen, &mut room, out);
    }
}

/// What a head is given of a token.
#[derive(Clone, Copy)]
pub(super) struct DeltaToken<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    /// By what the state is multiplied first.
    pub(super) decay: f32,
    pub(super) beta: f32,
}

/// Changes the state `[key_dim, value_dim]` of a head, and adds what the query sees then to `out`. `room` is for as many numbers
/// as that.
pub(super) fn change(state: &mut [f32], token: DeltaToken, room: &mut [f32], out: &mut [f32]) {
    vectorized!(change_rows(state: &mut [f32], token: DeltaToken, room: &mut [f32], out: &mut [f32]));
}

#[inline(always)]
fn change_rows(state: &mut [f32], token: DeltaToken, room: &mut [f32], out: &mut [f32]) {
    let DeltaToken { q, k, v, decay, beta } = token;
    let (delta, width) = (room, out.len().max(1));
    // What the decayed state has for this key.
    delta.fill(0.);
    for (state, k) in state.chunks_exact_mut(width).zip(k) {
        for (state, sum) in state.iter_mut().zip(delta.iter_mut()) {
            *state *= decay;
            *sum += *state * k;
        }
    }
    for (delta, v) in delta.iter_mut().zip(v) {
        *delta = (v - *delta) * beta;
    }
    for (state, (k, q)) in state.chunks_exact_mut(width).zip(k.iter().zip(q)) {
        for ((state, delta), sum) in state.iter_mut().zip(delta.iter()).zip(out.iter_mut()) {
            *state += k * delta;
            *sum += *state * q;
        }
    }
}

fn row(all: &[f32], index: usize, size: usize) -> &[f32] {
    all.get(index * size..(index + 1) * size).unwrap_or_default()
}
