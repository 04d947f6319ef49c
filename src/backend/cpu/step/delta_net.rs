//! Linear attention in a step: a head of values is one thread's work, from its first token to its last one.

use super::super::attention::Queries;
use super::super::cursor::Cursor;
use super::super::gated_delta::{change, DeltaToken};
use super::super::isa::vectorized;
use super::super::tasks;
use super::super::team::Shared;
use super::attend::check_position;
use super::elementwise::{activate, sigmoid, softplus, to_length, Moments};
use crate::backend::step::{Activation, DeltaLanes, DeltaNet, Lane, MOST_PROJECTIONS};
use crate::tensor::DeltaHead;
use crate::{DeltaNetState, Error};
use candle_core::Result;

/// A state, and whose tokens change it.
pub(super) type Changed<'a> = (&'a DeltaNetState, &'a [Queries]);

/// A member's share of what the tokens see.
pub(super) fn mix_share(
    net: &DeltaNet,
    (state, queries): Changed,
    cursor: &Cursor,
    projected: &[Shared; MOST_PROJECTIONS],
    out: &Shared,
) {
    let (heads, value_dim) = (net.config.value_heads, net.config.value_dim);
    let read = |projection: usize, start: usize, to: &mut [f32]| {
        if let Some(from) = projected.get(projection) {
            from.read(start, to);
        }
    };
    while let Some(taken) = cursor.take(queries.len() * heads, 1) {
        let head = taken.start % heads;
        let Some(queries) = queries.get(taken.start / heads) else { continue };
        let seen = mix_head(net, (state, queries), head, read);
        for (row, seen) in (queries.first_row..).zip(seen.chunks_exact(value_dim)) {
            out.write(row * net.width() + net.place(head) * value_dim, seen);
        }
    }
}

/// What the tokens of so many rows see, `[rows, width]`, by all threads, in place of what `out` has.
pub(super) fn mix_rows(
    net: &DeltaNet,
    (state, queries): Changed,
    projected: &[Vec<f32>],
    rows: usize,
    out: &mut Vec<f32>,
) {
    let (heads, value_dim, width) = (net.config.value_heads, net.config.value_dim, net.width());
    let read = |projection: usize, start: usize, to: &mut [f32]| {
        let from = projected.get(projection).and_then(|from| from.get(start..));
        to.iter_mut().zip(from.unwrap_or_default()).for_each(|(to, from)| *to = *from);
    };
    let mut of_heads = vec![Vec::new(); queries.len() * heads];
    tasks::for_each(&mut of_heads, |index, seen| {
        if let Some(queries) = queries.get(index / heads) {
            *seen = mix_head(net, (state, queries), index % heads, read);
        }
    });
    out.resize(rows * width, 0.);
    for (queries, of_heads) in queries.iter().zip(of_heads.chunks_exact(heads)) {
        let start = queries.first_row * width;
        let rows = out.get_mut(start..start + queries.tokens * width).unwrap_or_default();
        tasks::for_each(rows.chunks_exact_mut(width), |token, row| {
            for (head, seen) in of_heads.iter().enumerate() {
                let to = row.iter_mut().skip(net.place(head) * value_dim);
                let seen = seen.get(token * value_dim..(token + 1) * value_dim);
                to.zip(seen.unwrap_or_default()).for_each(|(to, seen)| *to = *seen);
            }
        });
    }
}

/// Changes a head of values by the tokens of a sequence, and returns what they see, `[tokens, value_dim]`.
fn mix_head(
    net: &DeltaNet,
    (state, queries): (&DeltaNetState, &Queries),
    head: usize,
    read: impl Fn(usize, usize, &mut [f32]),
) -> Vec<f32> {
    let &Queries { sequence, position, tokens, first_row } = queries;
    let Some(mut state) = state.head(sequence, head) else { return Vec::new() };
    mix(net, head, position == 0, &mut state, HeadInputs::new(net, head, (first_row, tokens), read))
}

/// Checks that a state fits, and that tokens go on where it is.
pub(super) fn check_state(net: &DeltaNet, queries: &[Queries], state: Option<&DeltaNetState>) -> Result<()> {
    let Some(state) = state.filter(|state| state.device().is_cpu()) else {
        return Err(Error::mismatch("states", "one on the CPU for each layer", "fewer, or another").into());
    };
    if *state.config() != net.config {
        let (expected, found) = (format!("of {:?}", net.config), format!("of {:?}", state.config()));
        return Err(Error::mismatch("state", expected, found).into());
    }
    for &Queries { sequence, position, .. } in queries {
        state.check_sequence(sequence)?;
        check_position(state.len(sequence), position)?;
    }
    Ok(())
}

/// What a head of values is given of some tokens, one after another.
struct HeadInputs {
    /// Query, key and values, before their convolution.
    x: Vec<f32>,
    /// As many as there are values.
    gate: Vec<f32>,
    /// A number of each token.
    decay: Vec<f32>,
    beta: Vec<f32>,
}

impl HeadInputs {
    /// Of head `head` of the rows from `first` on. `read` copies what the projection with a number makes, from a place on.
    fn new(
        net: &DeltaNet,
        head: usize,
        (first, tokens): (usize, usize),
        read: impl Fn(usize, usize, &mut [f32]),
    ) -> Self {
        let (config, DeltaLanes { q, k, v, gate, decay, beta }) = (&net.config, net.lanes);
        let shared = config.shared().max(1);
        let (key_head, part) = (head / shared, head % shared);
        let copy = |lane: Lane, row: usize, size: usize, part: usize, to: &mut [f32]| {
            read(lane.projection, row * lane.width + lane.start + key_head * lane.stride + part * size, to);
        };
        let (key_dim, value_dim) = (config.key_dim, config.value_dim);
        let mut inputs = Self {
            x: vec![0.; tokens * config.channels_of_head()],
            gate: vec![0.; tokens * value_dim],
            decay: vec![0.; tokens],
            beta: vec![0.; tokens],
        };
        for (row, x) in (first..).zip(inputs.x.chunks_exact_mut(config.channels_of_head())) {
            let (of_q, rest) = x.split_at_mut(key_dim);
            let (of_k, of_v) = rest.split_at_mut(key_dim);
            copy(q, row, key_dim, 0, of_q);
            copy(k, row, key_dim, 0, of_k);
            copy(v, row, value_dim, part, of_v);
        }
        for (row, to) in (first..).zip(inputs.gate.chunks_exact_mut(value_dim)) {
            copy(gate, row, value_dim, part, to);
        }
        for (lane, to) in [(decay, &mut inputs.decay), (beta, &mut inputs.beta)] {
            for (row, to) in (first..).zip(to.chunks_exact_mut(1)) {
                copy(lane, row, 1, part, to);
            }
        }
        inputs
    }
}

/// Changes the state of a head of values by its tokens, and returns what they see, `[tokens, value_dim]`. `begins`: no token was
/// before them.
fn mix(net: &DeltaNet, head: usize, begins: bool, state: &mut DeltaHead, mut inputs: HeadInputs) -> Vec<f32> {
    let (key_dim, value_dim, size) =
        (net.config.key_dim, net.config.value_dim, net.config.channels_of_head());
    for (numbers, len) in
        [(&mut state.seen, net.config.taps() * size), (&mut state.matrix, key_dim * value_dim)]
    {
        if begins {
            numbers.clear();
        }
        numbers.reserve_exact(len.saturating_sub(numbers.len()));
        numbers.resize(len, 0.);
    }
    let number = |all: &[f32]| all.get(head).copied().unwrap_or_default();
    let (rate, bias) = (number(&net.rates), number(&net.gate_bias));
    // What the convolution sees, then what becomes of it.
    let mut all = std::mem::take(&mut state.seen);
    all.append(&mut inputs.x);
    let tokens = inputs.decay.len();
    let mut mixed = vec![0.; tokens * size];
    for (token, x) in mixed.chunks_exact_mut(size).enumerate() {
        convolve(net, head, all.get(token * size..).unwrap_or_default(), x);
    }
    // The last tokens are what the next ones see: without the memory of the others.
    state.seen = all.split_off(tokens * size);
    activate(Activation::Silu, &mut mixed, None);
    activate(Activation::Silu, &mut inputs.gate, None);
    let decays = inputs.decay.iter().map(|decay| (rate * softplus(decay + bias)).exp());
    let (mut out, mut sum, mut room) =
        (vec![0.; inputs.gate.len()], vec![0.; value_dim], vec![0.; value_dim]);
    let rows = out.chunks_exact_mut(value_dim).zip(inputs.gate.chunks_exact(value_dim));
    let of_tokens = mixed.chunks_exact_mut(size).zip(decays.zip(&inputs.beta));
    for ((out, gate), (x, (decay, beta))) in rows.zip(of_tokens) {
        let (q, rest) = x.split_at_mut(key_dim);
        let (k, v) = rest.split_at_mut(key_dim);
        to_length(q, 1. / (key_dim as f32).sqrt());
        to_length(k, 1.);
        sum.fill(0.);
        let token = DeltaToken { q, k, v, decay, beta: sigmoid(*beta) };
        change(&mut state.matrix, token, &mut room, &mut sum);
        Moments::new(&net.norm, &sum).apply(&net.norm, 0, &sum, out);
        out.iter_mut().zip(gate).for_each(|(out, gate)| *out *= gate);
    }
    out
}

/// What the convolution makes of the first `kernel` tokens of `all`, for the channels of a head of values.
fn convolve(net: &DeltaNet, head: usize, all: &[f32], x: &mut [f32]) {
    let config = &net.config;
    let (key_dim, value_dim, channels) = (config.key_dim, config.value_dim, config.channels());
    let (key_head, size) = (head / config.shared().max(1), x.len());
    let keys = config.key_heads * key_dim;
    x.fill(0.);
    for (weights, tokens) in net.convolution.chunks_exact(channels).zip(all.chunks_exact(size)) {
        let parts = [
            (0, key_head * key_dim, key_dim),
            (key_dim, keys + key_head * key_dim, key_dim),
            (2 * key_dim, 2 * keys + head * value_dim, value_dim),
        ];
        for (start, channel, len) in parts {
            let to = x.get_mut(start..start + len).unwrap_or_default();
            let from = tokens.get(start..start + len).unwrap_or_default();
            let weights = weights.get(channel..channel + len).unwrap_or_default();
            vectorized!(add_products(to: &mut [f32], from: &[f32], weights: &[f32]));
        }
    }
}

#[inline(always)]
fn add_products(to: &mut [f32], from: &[f32], weights: &[f32]) {
    for ((to, from), weight) in to.iter_mut().zip(from).zip(weights) {
        *to += from * weight;
    }
}
