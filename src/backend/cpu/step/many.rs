//! Many rows: one node after another, each on all threads.

use super::super::dispatch;
use super::super::isa;
use super::super::low_rank::LowRank;
use super::super::tasks;
use super::attend::Layers;
use super::elementwise::{rms_norm, silu_mul};
use crate::backend::step::{Node, Norm, Plan, Projection, StepToken, Updates};
use crate::backend::with_matrix;
use crate::{ActivationPrecision, KvCache};
use candle_core::Result;

/// Rows that a thread takes at a time where little is done with each.
const ROWS: usize = 8;

/// See [`super::run`].
pub(super) fn run(
    plan: &Plan,
    updates: &Updates,
    tokens: &[StepToken],
    caches: &mut [&mut KvCache],
    wanted: &[usize],
) -> Result<Vec<f32>> {
    let layers = Layers::new(plan, tokens, caches)?;
    let multiply = |projection: &Projection, x: &[f32]| multiply(projection, updates, x);
    let mut hidden = Vec::new();
    let mut projected = [Vec::new(), Vec::new(), Vec::new()];
    let (mut attended, mut inner, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    for node in &plan.nodes {
        match node {
            Node::Embed(table) => {
                let ids: Vec<usize> = tokens.iter().map(|token| token.id as usize).collect();
                hidden = with_matrix(table, 0, |table| Ok(super::super::embed::<f32>(table, &ids)))?;
            }
            Node::Queries(norm, projections) => {
                let x = normed(&hidden, norm);
                for (to, projection) in projected.iter_mut().zip(projections) {
                    *to = multiply(projection, &x)?;
                }
            }
            Node::Attend(heads) => attended = layers.compute_many(heads, &mut projected),
            Node::AddAttended(projection) => add(&mut hidden, &multiply(projection, &attended)?),
            Node::Gate(norm, [gate, up]) => {
                let x = normed(&hidden, norm);
                inner = multiply(gate, &x)?;
                let up_rows = multiply(up, &x)?;
                let len = ROWS * gate.rows;
                tasks::for_each(inner.chunks_mut(len).zip(up_rows.chunks(len)), |_, (gate, up)| {
                    silu_mul(gate, up)
                });
            }
            Node::AddInner(projection) => add(&mut hidden, &multiply(projection, &inner)?),
            Node::Logits(norm, head) => {
                let rows = wanted.iter().filter_map(|row| hidden.chunks_exact(plan.hidden).nth(*row));
                let rows: Vec<f32> = rows.flatten().copied().collect();
                logits = multiply(head, &normed(&rows, norm))?;
            }
        }
    }
    Ok(logits)
}

/// norm(hidden) of every row.
fn normed(hidden: &[f32], norm: &Norm) -> Vec<f32> {
    let width = norm.weight.len();
    let mut all = vec![0.; hidden.len()];
    tasks::for_each(all.chunks_mut(ROWS * width).zip(hidden.chunks(ROWS * width)), |_, (out, hidden)| {
        for (out, hidden) in out.chunks_exact_mut(width).zip(hidden.chunks_exact(width)) {
            rms_norm(hidden, &norm.weight, norm.eps, out);
        }
    });
    all
}

fn multiply(projection: &Projection, updates: &Updates, x: &[f32]) -> Result<Vec<f32>> {
    let updates = updates.get(projection.index).filter(|updates| !updates.is_empty());
    let (bias, n) = (projection.bias.as_deref(), projection.rows);
    // With adapters it is added behind them.
    let first_bias = bias.filter(|_| updates.is_none());
    let mut y = with_matrix(&projection.weight, 0, |matrix| {
        Ok(dispatch::matmul(isa::best(), matrix, x, first_bias, ActivationPrecision::current()))
    })?;
    if let Some(updates) = updates {
        LowRank::of_many(updates, x).apply_to_rows(&mut y, n, bias);
    }
    Ok(y)
}

fn add(hidden: &mut [f32], added: &[f32]) {
    const AT_ONCE: usize = 1 << 14;
    tasks::for_each(hidden.chunks_mut(AT_ONCE).zip(added.chunks(AT_ONCE)), |_, (hidden, added)| {
        hidden.iter_mut().zip(added).for_each(|(hidden, added)| *hidden += added);
    });
}
