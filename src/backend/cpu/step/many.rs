//! Many rows: one node after another, each on all threads.

use super::super::dense;
use super::super::dispatch::ManyRows;
use super::super::isa;
use super::super::low_rank::LowRank;
use super::super::tasks;
use super::attend::Layers;
use super::delta_net::mix_rows;
use super::elementwise::{activate, normalize, scale_and_cap};
use super::experts::experts_of_many;
use super::operand::{embedded, in_order};
use crate::backend::step::{
    same_order, Input, Matrix, Node, Norm, Out, Plan, Projection, Updates, MOST_PROJECTIONS,
};
use crate::backend::{with_matrix, StepCaches};
use crate::{ActivationPrecision, KvCache, QuantTensor};
use candle_core::Result;
use std::sync::Arc;

/// Rows that a thread takes at a time where little is done with each.
pub(super) const ROWS: usize = 8;

/// Numbers that a thread takes at a time, where rows do not matter.
pub(super) const AT_ONCE: usize = 1 << 14;

/// See [`super::run`].
pub(super) fn run(plan: &Plan, input: Input, caches: &mut StepCaches<KvCache>) -> Result<Vec<f32>> {
    let layers = Layers::new(plan, input, caches)?;
    let multiply = |projection: &Projection, x: &[f32], out: &mut Vec<f32>| {
        OperandOfMany::new(x, projection.k).multiply(projection, input.updates, out)
    };
    // In the same memory for all layers: fresh pages cost as much as some of the work.
    let (mut hidden, mut room, mut output, mut logits) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut projected = [const { Vec::new() }; MOST_PROJECTIONS];
    let (mut attended, mut inner, mut ups) = (Vec::new(), Vec::new(), Vec::new());
    for node in &plan.nodes {
        match node {
            Node::Embed { table, factor, .. } => {
                let ids: Vec<usize> = input.tokens.iter().map(|token| token.id as usize).collect();
                hidden = embedded(table, &ids)?;
                scale_and_cap(&mut hidden, *factor, None);
            }
            Node::Project(norm, projections, clip) => {
                let x = normed(&hidden, norm.as_ref(), plan.hidden, &mut room);
                let mut x = OperandOfMany::new(x, plan.hidden);
                for (to, projection) in projected.iter_mut().zip(projections) {
                    x.multiply(projection, input.updates, to)?;
                    if let Some(clip) = clip {
                        to.iter_mut().for_each(|x| *x = x.clamp(-clip, *clip));
                    }
                }
            }
            Node::Attend(heads) => layers.compute_many(heads, &mut projected, &mut attended),
            Node::DeltaNet(net) => {
                if let Some(changed) = layers.state(net) {
                    mix_rows(net, changed, &projected, input.tokens.len(), &mut attended);
                }
            }
            Node::AddAttended(projection, out) => {
                multiply(projection, &attended, &mut output)?;
                add(&mut hidden, &output, out, plan.hidden);
            }
            Node::Inner { norm, gate, up, activation } => {
                let x = normed(&hidden, norm.as_ref(), plan.hidden, &mut room);
                let mut x = OperandOfMany::new(x, plan.hidden);
                x.multiply(gate.as_ref().unwrap_or(up), input.updates, &mut inner)?;
                match gate.is_some() {
                    true => x.multiply(up, input.updates, &mut ups)?,
                    false => ups.clear(),
                }
                let len = ROWS * up.rows;
                tasks::for_each(inner.chunks_mut(len), |task, inner| {
                    activate(*activation, inner, ups.chunks(len).nth(task));
                });
            }
            Node::AddInner(projection, out) => {
                multiply(projection, &inner, &mut output)?;
                add(&mut hidden, &output, out, plan.hidden);
            }
            Node::Experts(block) => {
                experts_of_many(block, (&mut hidden, &mut inner), plan.hidden, input.updates)?;
            }
            Node::Logits { norm, head, scale, softcap, .. } => {
                let rows = input.wanted.iter().filter_map(|row| hidden.chunks_exact(plan.hidden).nth(*row));
                let rows: Vec<f32> = rows.flatten().copied().collect();
                multiply(head, normed(&rows, norm.as_ref(), plan.hidden, &mut room), &mut logits)?;
                tasks::for_each(logits.chunks_mut(AT_ONCE), |_, logits| {
                    scale_and_cap(logits, *scale, *softcap);
                });
            }
        }
    }
    Ok(logits)
}

/// norm(hidden) of every row, in `room` if it is another.
pub(super) fn normed<'a>(
    hidden: &'a [f32],
    norm: Option<&Norm>,
    width: usize,
    room: &'a mut Vec<f32>,
) -> &'a [f32] {
    if norm.is_none() {
        return hidden;
    }
    room.resize(hidden.len(), 0.);
    tasks::for_each(room.chunks_mut(ROWS * width).zip(hidden.chunks(ROWS * width)), |_, (out, hidden)| {
        for (out, hidden) in out.chunks_exact_mut(width).zip(hidden.chunks_exact(width)) {
            normalize(norm, hidden, out);
        }
    });
    room
}

/// Rows of x that several weights multiply, one whole output after another.
pub(super) struct OperandOfMany<'x> {
    x: &'x [f32],
    k: usize,
    /// An order of columns, and x in it.
    ordered: Vec<(Option<Arc<[u32]>>, ManyRows<'x>)>,
}

impl<'x> OperandOfMany<'x> {
    /// Rows of `k` numbers.
    pub(super) fn new(x: &'x [f32], k: usize) -> Self {
        Self { x, k, ordered: Vec::new() }
    }

    /// One after the other.
    pub(super) fn rows(&self) -> &'x [f32] {
        self.x
    }

    /// Numbers of a row.
    pub(super) fn width(&self) -> usize {
        self.k
    }

    /// What a projection makes of them, in place of what `out` has.
    pub(super) fn multiply(
        &mut self,
        projection: &Projection,
        updates: &Updates,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let updates = updates.get(projection.index).filter(|updates| !updates.is_empty());
        let (bias, n) = (projection.bias.as_deref(), projection.rows);
        // With adapters it is added behind them.
        let first_bias = bias.filter(|_| updates.is_none());
        match &projection.weight {
            Matrix::Dense(weight) => *out = dense::many(weight, self.x, first_bias)?,
            Matrix::Packed(weight) => {
                self.multiply_matrix((weight, 0), projection.columns.as_ref(), first_bias, out)?;
            }
        }
        if let Some(updates) = updates {
            LowRank::of_many(updates, self.x).apply_to_rows(out, n, bias);
        }
        Ok(())
    }

    /// By one matrix of a stack, whose columns have this order.
    pub(super) fn multiply_matrix(
        &mut self,
        (weight, index): (&QuantTensor, usize),
        columns: Option<&Arc<[u32]>>,
        bias: Option<&[f32]>,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        with_matrix(weight, index, |matrix| {
            if let Some(rows) = self.in_order(matrix.k, columns) {
                rows.matmul(matrix, bias, out);
            }
            Ok(())
        })
    }

    /// x in this order of `k` columns.
    fn in_order(&mut self, k: usize, columns: Option<&Arc<[u32]>>) -> Option<&mut ManyRows<'x>> {
        let known = self.ordered.iter().position(|(order, _)| same_order(order.as_ref(), columns));
        let index = known.unwrap_or_else(|| {
            let x = in_order(self.x, self.x.len().checked_div(self.k).unwrap_or(0), columns);
            let rows = ManyRows::new(isa::best(), k, x, ActivationPrecision::current());
            self.ordered.push((columns.cloned(), rows));
            self.ordered.len() - 1
        });
        self.ordered.get_mut(index).map(|(_, rows)| rows)
    }
}

/// hidden += what becomes of the output of a block.
pub(super) fn add(hidden: &mut [f32], output: &[f32], Out { norm, scale, .. }: &Out, width: usize) {
    let mut room = Vec::new();
    let output = normed(output, norm.as_ref(), width, &mut room);
    tasks::for_each(hidden.chunks_mut(AT_ONCE).zip(output.chunks(AT_ONCE)), |_, (hidden, output)| {
        hidden.iter_mut().zip(output).for_each(|(hidden, output)| *hidden += output * scale);
    });
}
