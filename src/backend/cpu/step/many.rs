//! Many rows: one node after another, each on all threads.

use super::super::dense;
use super::super::dispatch;
use super::super::isa;
use super::super::low_rank::LowRank;
use super::super::tasks;
use super::attend::Layers;
use super::elementwise::{activate, normalize, scale_and_cap};
use super::experts::experts_of_many;
use super::operand::{embedded, in_order};
use crate::backend::step::{Input, Matrix, Node, Norm, Out, Plan, Projection, Updates};
use crate::backend::with_matrix;
use crate::{ActivationPrecision, KvCache, QuantTensor};
use candle_core::Result;
use std::borrow::Cow;

/// Rows that a thread takes at a time where little is done with each.
pub(super) const ROWS: usize = 8;

/// Numbers that a thread takes at a time, where rows do not matter.
pub(super) const AT_ONCE: usize = 1 << 14;

/// See [`super::run`].
pub(super) fn run(plan: &Plan, input: Input, caches: &mut [&mut KvCache]) -> Result<Vec<f32>> {
    let layers = Layers::new(plan, input, caches)?;
    let multiply = |projection: &Projection, x: &[f32]| multiply(projection, input.updates, x);
    let mut hidden = Vec::new();
    let mut projected = [Vec::new(), Vec::new(), Vec::new()];
    let (mut attended, mut inner, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    for node in &plan.nodes {
        match node {
            Node::Embed(table, scale) => {
                let ids: Vec<usize> = input.tokens.iter().map(|token| token.id as usize).collect();
                hidden = embedded(table, &ids)?;
                scale_and_cap(&mut hidden, *scale, None);
            }
            Node::Queries(norm, projections, clip) => {
                let x = normed(&hidden, norm.as_ref(), plan.hidden);
                for (to, projection) in projected.iter_mut().zip(projections) {
                    *to = multiply(projection, &x)?;
                    if let Some(clip) = clip {
                        to.iter_mut().for_each(|x| *x = x.clamp(-clip, *clip));
                    }
                }
            }
            Node::Attend(heads) => attended = layers.compute_many(heads, &mut projected),
            Node::AddAttended(projection, out) => {
                add(&mut hidden, &multiply(projection, &attended)?, out, plan.hidden);
            }
            Node::Inner { norm, gate, up, activation } => {
                let x = normed(&hidden, norm.as_ref(), plan.hidden);
                inner = multiply(gate.as_ref().unwrap_or(up), &x)?;
                let ups = if gate.is_some() { multiply(up, &x)? } else { Vec::new() };
                let len = ROWS * up.rows;
                tasks::for_each(inner.chunks_mut(len), |task, inner| {
                    activate(*activation, inner, ups.chunks(len).nth(task));
                });
            }
            Node::AddInner(projection, out) => {
                add(&mut hidden, &multiply(projection, &inner)?, out, plan.hidden);
            }
            Node::Experts(block) => experts_of_many(block, &mut hidden, plan.hidden, input.updates)?,
            Node::Logits { norm, head, scale, softcap } => {
                let rows = input.wanted.iter().filter_map(|row| hidden.chunks_exact(plan.hidden).nth(*row));
                let rows: Vec<f32> = rows.flatten().copied().collect();
                logits = multiply(head, &normed(&rows, norm.as_ref(), plan.hidden))?;
                tasks::for_each(logits.chunks_mut(AT_ONCE), |_, logits| {
                    scale_and_cap(logits, *scale, *softcap);
                });
            }
        }
    }
    Ok(logits)
}

/// norm(hidden) of every row.
pub(super) fn normed<'a>(hidden: &'a [f32], norm: Option<&Norm>, width: usize) -> Cow<'a, [f32]> {
    if norm.is_none() {
        return Cow::Borrowed(hidden);
    }
    let mut all = vec![0.; hidden.len()];
    tasks::for_each(all.chunks_mut(ROWS * width).zip(hidden.chunks(ROWS * width)), |_, (out, hidden)| {
        for (out, hidden) in out.chunks_exact_mut(width).zip(hidden.chunks_exact(width)) {
            normalize(norm, hidden, out);
        }
    });
    Cow::Owned(all)
}

pub(super) fn multiply(projection: &Projection, updates: &Updates, x: &[f32]) -> Result<Vec<f32>> {
    let updates = updates.get(projection.index).filter(|updates| !updates.is_empty());
    let (bias, n) = (projection.bias.as_deref(), projection.rows);
    // With adapters it is added behind them.
    let first_bias = bias.filter(|_| updates.is_none());
    let rows = x.len().checked_div(projection.k).unwrap_or(0);
    let ordered = in_order(x, rows, projection.columns.as_ref());
    let mut y = match &projection.weight {
        Matrix::Packed(weight) => multiply_matrix(weight, 0, first_bias, &ordered)?,
        Matrix::Dense(weight) => dense::many(weight, &ordered, first_bias)?,
    };
    if let Some(updates) = updates {
        LowRank::of_many(updates, x).apply_to_rows(&mut y, n, bias);
    }
    Ok(y)
}

/// By one matrix of a stack.
pub(super) fn multiply_matrix(
    weight: &QuantTensor,
    index: usize,
    bias: Option<&[f32]>,
    x: &[f32],
) -> Result<Vec<f32>> {
    with_matrix(weight, index, |matrix| {
        Ok(dispatch::matmul(isa::best(), matrix, x, bias, ActivationPrecision::current()))
    })
}

/// hidden += what becomes of the output of a block.
pub(super) fn add(hidden: &mut [f32], output: &[f32], Out { norm, scale }: &Out, width: usize) {
    let output = normed(output, norm.as_ref(), width);
    tasks::for_each(hidden.chunks_mut(AT_ONCE).zip(output.chunks(AT_ONCE)), |_, (hidden, output)| {
        hidden.iter_mut().zip(output).for_each(|(hidden, output)| *hidden += output * scale);
    });
}
