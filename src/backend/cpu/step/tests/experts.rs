//! Blocks of experts of random weights, and the same in f64, written out.

use super::kinds::numbers;
use super::model::{activated, dense, normed};
use crate::backend::routing::Routing;
use crate::backend::step::{
    Activation, ExpertBlock, ExpertGating, Norm, Out, Projection, Router, SharedGate, StackProjection,
};
use crate::backend::{ExpertGroups, GroupScore, Scores};
use crate::{QuantFormat, QuantTensor};
use candle_core::{Device, Tensor};
use rand::rngs::StdRng;

/// Three blocks of outputs, the last one not whole.
pub(super) const EXPERTS: usize = 39;
const INNER: usize = 64;
/// Less than dense blocks have.
pub(super) const SHARED_INNER: usize = 128;

/// What differs from block to block.
#[derive(Clone, Copy)]
pub(super) struct ExpertKind {
    pub packed_router: bool,
    pub scores: Scores,
    pub corrected: bool,
    pub groups: Option<ExpertGroups>,
    pub top_k: usize,
    pub normalize: bool,
    pub weighs_inputs: bool,
    pub clamped: bool,
    pub bias: bool,
    pub shared: Shared,
}

/// An expert that all tokens use.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Shared {
    None,
    Plain,
    /// How much it counts is up to each token.
    Gated,
}

pub(super) const PLAIN_EXPERTS: ExpertKind = ExpertKind {
    packed_router: true,
    scores: Scores::Softmax,
    corrected: false,
    groups: None,
    top_k: 3,
    normalize: true,
    weighs_inputs: false,
    clamped: false,
    bias: false,
    shared: Shared::None,
};

pub(super) const GROUPS: ExpertGroups = ExpertGroups { count: 3, chosen: 2, by: GroupScore::TwoLargest };

impl ExpertKind {
    pub fn block(
        &self,
        rng: &mut StdRng,
        format: QuantFormat,
        hidden: usize,
        (norm, (router, shared_gate), out): (Option<Norm>, (Projection, Option<Projection>), Out),
    ) -> ExpertBlock {
        let mut stack = |rows: usize, k: usize| {
            let all = numbers(rng, EXPERTS * rows * k, 2. / (k as f32).sqrt());
            let all = Tensor::from_vec(all, (EXPERTS, rows, k), &Device::Cpu).unwrap();
            let weight = QuantTensor::quantize(&all, format).unwrap();
            StackProjection { weight, bias: self.bias.then(|| numbers(rng, EXPERTS * rows, 0.5)), rows, k }
        };
        let (gate, up, down) = (stack(INNER, hidden), stack(INNER, hidden), stack(hidden, INNER));
        let mut router_of = |packed: Projection| match self.packed_router {
            true => Router::Packed(packed),
            false => {
                let weight = numbers(rng, packed.rows * hidden, 0.3);
                let weight = Tensor::from_vec(weight, (hidden, packed.rows), &Device::Cpu).unwrap();
                Router::Dense { weight, bias: Some(numbers(rng, packed.rows, 1.)) }
            }
        };
        let router = router_of(router);
        let shared_gate = shared_gate.map(|gate| SharedGate { router: router_of(gate), width: SHARED_INNER });
        let routing = Routing {
            experts: EXPERTS,
            top_k: self.top_k,
            scores: self.scores,
            correction: self.corrected.then(|| numbers(rng, EXPERTS, 0.4)),
            groups: self.groups,
            normalize: self.normalize,
            scale: 1.3,
        };
        let gating = match self.clamped {
            true => ExpertGating::Clamped { alpha: 1.702, limit: 0.8 },
            false => ExpertGating::Activation(Activation::Silu),
        };
        let weighs_inputs = self.weighs_inputs;
        ExpertBlock { norm, router, routing, weighs_inputs, shared_gate, gate, up, gating, down, out }
    }
}

/// Logits of a dense router.
pub(super) fn of_dense(weight: &Tensor, bias: Option<&[f32]>, x: &[f64]) -> Vec<f64> {
    let weight = weight.t().unwrap().to_vec2::<f32>().unwrap();
    let dot = |row: &Vec<f32>| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
    weight.iter().zip(bias.unwrap()).map(|(row, bias)| dot(row) + f64::from(*bias)).collect()
}

/// What a block makes of a row for which its router has these logits.
pub(super) fn of_experts(block: &ExpertBlock, hidden: &[f64], logits: &[f64]) -> Vec<f64> {
    let x = normed(hidden, block.norm.as_ref());
    let mut sum = vec![0.; hidden.len()];
    for (expert, share) in chosen(&block.routing, logits) {
        let (before, behind) = if block.weighs_inputs { (share, 1.) } else { (1., share) };
        let x: Vec<f64> = x.iter().map(|x| x * before).collect();
        let (gate, up) = (product(&block.gate, expert, &x), product(&block.up, expert, &x));
        let join = |(gate, up): (&f64, &f64)| match block.gating {
            ExpertGating::Activation(activation) => activated(activation, *gate) * up,
            ExpertGating::Clamped { alpha, limit } => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let gate = gate.min(limit);
                gate / (1. + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.)
            }
        };
        let joined: Vec<f64> = gate.iter().zip(&up).map(join).collect();
        let output = product(&block.down, expert, &joined);
        sum.iter_mut().zip(output).for_each(|(sum, y)| *sum += behind * y);
    }
    normed(&sum, block.out.norm.as_ref()).into_iter().map(|y| y * f64::from(block.out.scale)).collect()
}

fn chosen(routing: &Routing, logits: &[f64]) -> Vec<(usize, f64)> {
    let exps: Vec<f64> = logits.iter().map(|logit| logit.exp()).collect();
    let sum: f64 = exps.iter().sum();
    let scores: Vec<f64> = match routing.scores {
        Scores::Softmax => exps.iter().map(|exp| exp / sum).collect(),
        Scores::Sigmoid => exps.iter().map(|exp| exp / (1. + exp)).collect(),
    };
    let correction = |expert| routing.correction.as_ref().map_or(0., |by| f64::from(by[expert]));
    let choice: Vec<f64> =
        scores.iter().enumerate().map(|(expert, score)| score + correction(expert)).collect();
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| choice[*b].total_cmp(&choice[*a]));
    if let Some(groups) = routing.groups {
        let size = scores.len() / groups.count;
        let summed = if groups.by == GroupScore::Largest { 1 } else { 2 };
        let score = |group: usize| {
            let own = order.iter().filter(|expert| *expert / size == group).take(summed);
            own.map(|expert| choice[*expert]).sum::<f64>()
        };
        let mut best: Vec<usize> = (0..groups.count).collect();
        best.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
        order.retain(|expert| best[..groups.chosen].contains(&(expert / size)));
    }
    order.truncate(routing.top_k);
    let sum: f64 = order.iter().map(|expert| scores[*expert]).sum();
    let factor = f64::from(routing.scale) / if routing.normalize { sum } else { 1. };
    order.into_iter().map(|expert| (expert, scores[expert] * factor)).collect()
}

fn product(stack: &StackProjection, expert: usize, x: &[f64]) -> Vec<f64> {
    let bias = |row: usize| stack.bias.as_ref().map_or(0., |bias| f64::from(bias[expert * stack.rows + row]));
    let dot = |(row, w): (usize, &Vec<f64>)| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>() + bias(row);
    dense(&stack.weight.matrix(expert).unwrap()).iter().enumerate().map(dot).collect()
}
