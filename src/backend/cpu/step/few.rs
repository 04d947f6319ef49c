//! Few rows: all threads go through the nodes together, and meet at a barrier behind each.
//!
//! Whatever a node reads, each member copies and prepares for itself: rows are few, and another barrier would cost more.
//! Members take blocks of outputs in turn, so results do not depend on how many there are.

use super::super::dense;
use super::super::dispatch::{self, Prepared};
use super::super::fast_kernel::Digits;
use super::super::isa;
use super::super::low_rank::LowRank;
use super::super::team::{self, Crew, Cursor, Failure, Member, Shared};
use super::attend::{Layers, Projected};
use super::elementwise::{activate, normalize, scale_and_cap};
use crate::backend::step::{
    ExpertBlock, Input, Matrix, Node, Norm, Out, Plan, Projection, StackProjection, Updates,
};
use crate::backend::with_matrix;
use crate::{ActivationPrecision, KvCache, QuantFormat, QuantTensor};
use candle_core::Result;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Rows of a weight that are multiplied together at least.
pub(super) const BLOCK: usize = 16;

/// How many times each member takes blocks of a node: some, lest all wait for one that was held up.
const TURNS: usize = 8;

/// Of the parts of a node, one after the other.
pub(super) type Cursors = [Cursor; 4];

/// What the nodes hand on, each `[rows, width]`.
pub(super) struct Buffers {
    hidden: Shared,
    queries: Shared,
    keys: Shared,
    values: Shared,
    attended: Shared,
    inner: Shared,
    pub(super) logits_of_experts: Shared,
    /// Of each row and each expert that it uses.
    pub(super) inner_of_experts: Shared,
    /// Of a block, before it is normalized.
    output: Shared,
    logits: Shared,
}

impl Buffers {
    fn new(plan: &Plan, rows: usize, wanted: usize) -> Self {
        let (mut queries, mut keys, mut values) = (0, 0, 0);
        let (mut inner, mut output, mut logits) = (0, 0, 0);
        let (mut experts, mut inner_of_experts) = (0, 0);
        for node in &plan.nodes {
            match node {
                Node::Queries(_, [q, k, v], _) => {
                    (queries, keys, values) = (queries.max(q.rows), keys.max(k.rows), values.max(v.rows));
                }
                Node::Inner { up, .. } => inner = inner.max(up.rows),
                Node::AddAttended(projection, Out { norm: Some(_), .. })
                | Node::AddInner(projection, Out { norm: Some(_), .. }) => {
                    output = output.max(projection.rows)
                }
                Node::Experts(block) => {
                    let ExpertBlock { routing, up, out, .. } = &**block;
                    experts = experts.max(routing.experts);
                    inner_of_experts = inner_of_experts.max(routing.top_k * up.rows);
                    output = output.max(if out.norm.is_some() { plan.hidden } else { 0 });
                }
                Node::Logits { head, .. } => logits = logits.max(head.rows),
                Node::Embed(..) | Node::Attend(_) | Node::AddAttended(..) | Node::AddInner(..) => {}
            }
        }
        Self {
            hidden: Shared::new(rows * plan.hidden),
            queries: Shared::new(rows * queries),
            keys: Shared::new(rows * keys),
            values: Shared::new(rows * values),
            attended: Shared::new(rows * queries),
            inner: Shared::new(rows * inner),
            logits_of_experts: Shared::new(rows * experts),
            inner_of_experts: Shared::new(rows * inner_of_experts),
            output: Shared::new(rows * output),
            logits: Shared::new(wanted * logits),
        }
    }
}

/// See [`super::run`].
pub(super) fn run(crew: Crew, plan: &Plan, input: Input, caches: &mut [&mut KvCache]) -> Result<Vec<f32>> {
    let buffers = Buffers::new(plan, input.tokens.len(), input.wanted.len());
    let cursors: Vec<Cursors> = plan.nodes.iter().map(|_| std::array::from_fn(|_| Cursor::new())).collect();
    let layers = Layers::new(plan, input, caches)?;
    let partials = Shared::new(layers.partial_len());
    let digits = Digits::of::<f32>(ActivationPrecision::current());
    let step = Step { plan, input, digits, buffers: &buffers, partials: &partials, layers: &layers };
    team::run(crew, |member| {
        for (node, cursors) in plan.nodes.iter().zip(&cursors) {
            step.compute(node, member, cursors)?;
            member.wait()?;
        }
        Ok(())
    })?;
    let mut logits = vec![0.; buffers.logits.len()];
    buffers.logits.read(0, &mut logits);
    Ok(logits)
}

/// What all members see.
pub(super) struct Step<'a> {
    pub(super) plan: &'a Plan,
    pub(super) input: Input<'a>,
    digits: Digits,
    pub(super) buffers: &'a Buffers,
    partials: &'a Shared,
    layers: &'a Layers<'a>,
}

impl Step<'_> {
    /// A member's share of a node.
    fn compute(
        &self,
        node: &Node,
        member: &Member,
        cursors: &Cursors,
    ) -> std::result::Result<(), Failure<candle_core::Error>> {
        let [cursor, ..] = cursors;
        let (buffers, hidden, rows) = (self.buffers, self.plan.hidden, self.input.tokens.len());
        match node {
            Node::Embed(table, scale) => {
                while let Some(range) = cursor.take(rows, 1) {
                    for row in range {
                        let ids = [self.input.tokens.get(row).map_or(0, |token| token.id as usize)];
                        let mut embedded = embedded(table, &ids)?;
                        scale_and_cap(&mut embedded, *scale, None);
                        buffers.hidden.write(row * hidden, &embedded);
                    }
                }
            }
            Node::Queries(norm, projections, clip) => {
                let mut x = self.operand(self.normed(norm.as_ref(), None), rows);
                let to = [&buffers.queries, &buffers.keys, &buffers.values];
                let blocks: usize =
                    projections.iter().map(|projection| projection.rows.div_ceil(BLOCK)).sum();
                while let Some(taken) = cursor.take(blocks, turn(blocks, member)) {
                    let mut first = 0;
                    for (projection, to) in projections.iter().zip(to) {
                        let own = projection.rows.div_ceil(BLOCK);
                        let (start, end) = (taken.start.max(first), taken.end.min(first + own));
                        if start < end {
                            let range = (start - first) * BLOCK..projection.rows.min((end - first) * BLOCK);
                            let mut sums = x.multiply(projection, range.start, range.len())?;
                            if let Some(clip) = clip {
                                sums.iter_mut().for_each(|sum| *sum = sum.clamp(-clip, *clip));
                            }
                            scatter(&sums, rows, |row, sums| {
                                to.write(row * projection.rows + range.start, sums)
                            });
                        }
                        first += own;
                    }
                }
            }
            Node::Attend(heads) => {
                let projected =
                    Projected { queries: &buffers.queries, keys: &buffers.keys, values: &buffers.values };
                let out = (self.partials, &buffers.attended);
                self.layers.compute(heads, (member, cursors), projected, out)?;
            }
            Node::AddAttended(projection, out) => {
                self.add((projection, out), &buffers.attended, member, cursors)?;
            }
            Node::Inner { norm, gate, up, activation } => {
                let mut x = self.operand(self.normed(norm.as_ref(), None), rows);
                let blocks = up.rows.div_ceil(BLOCK);
                while let Some(taken) = cursor.take(blocks, turn(blocks, member)) {
                    let range = taken.start * BLOCK..up.rows.min(taken.end * BLOCK);
                    let mut inner = x.multiply(gate.as_ref().unwrap_or(up), range.start, range.len())?;
                    let ups = match gate {
                        Some(_) => Some(x.multiply(up, range.start, range.len())?),
                        None => None,
                    };
                    activate(*activation, &mut inner, ups.as_deref());
                    scatter(&inner, rows, |row, inner| {
                        buffers.inner.write(row * up.rows + range.start, inner)
                    });
                }
            }
            Node::AddInner(projection, out) => {
                self.add((projection, out), &buffers.inner, member, cursors)?;
            }
            Node::Experts(block) => self.experts(block, member, cursors)?,
            Node::Logits { norm, head, scale, softcap } => {
                let wanted = self.input.wanted.len();
                let mut x = self.operand(self.normed(norm.as_ref(), Some(self.input.wanted)), wanted);
                let blocks = if wanted == 0 { 0 } else { head.rows.div_ceil(BLOCK) };
                while let Some(taken) = cursor.take(blocks, turn(blocks, member)) {
                    let range = taken.start * BLOCK..head.rows.min(taken.end * BLOCK);
                    let mut sums = x.multiply(head, range.start, range.len())?;
                    scale_and_cap(&mut sums, *scale, *softcap);
                    scatter(&sums, wanted, |row, sums| {
                        buffers.logits.write(row * head.rows + range.start, sums)
                    });
                }
            }
        }
        Ok(())
    }

    pub(super) fn operand(&self, x: Vec<f32>, rows: usize) -> Operand<'_> {
        Operand {
            x,
            rows,
            digits: self.digits,
            updates: self.input.updates,
            prepared: Vec::new(),
            adapters: Vec::new(),
        }
    }

    /// norm(hidden) of all rows, or of those that are wanted.
    pub(super) fn normed(&self, norm: Option<&Norm>, wanted: Option<&[usize]>) -> Vec<f32> {
        let width = self.plan.hidden;
        let rows = wanted.map_or(self.input.tokens.len(), <[usize]>::len);
        let mut hidden = vec![0.; width];
        let mut all = vec![0.; rows * width];
        for (row, out) in all.chunks_exact_mut(width).enumerate() {
            let row = wanted.and_then(|wanted| wanted.get(row)).copied().unwrap_or(row);
            self.buffers.hidden.read(row * width, &mut hidden);
            normalize(norm, &hidden, out);
        }
        all
    }

    /// hidden += what becomes of the projection of `from`.
    fn add(
        &self,
        (projection, out): (&Projection, &Out),
        from: &Shared,
        member: &Member,
        [projected, normalized, ..]: &Cursors,
    ) -> std::result::Result<(), Failure<candle_core::Error>> {
        let rows = self.input.tokens.len();
        let mut x = vec![0.; rows * projection.k];
        from.read(0, &mut x);
        let mut x = self.operand(x, rows);
        self.add_outputs(projection.rows, out, member, (projected, normalized), |range| {
            x.multiply(projection, range.start, range.len())
        })
    }

    /// hidden += what becomes of outputs, of which `multiply` gives a range `[outputs, rows]`.
    pub(super) fn add_outputs(
        &self,
        width: usize,
        Out { norm, scale }: &Out,
        member: &Member,
        (projected, normalized): (&Cursor, &Cursor),
        mut multiply: impl FnMut(Range<usize>) -> Result<Vec<f32>>,
    ) -> std::result::Result<(), Failure<candle_core::Error>> {
        let (rows, hidden) = (self.input.tokens.len(), &self.buffers.hidden);
        let mut residual = Vec::new();
        let mut add = |at: usize, output: &[f32]| {
            residual.resize(output.len(), 0.);
            hidden.read(at, &mut residual);
            residual.iter_mut().zip(output).for_each(|(residual, output)| *residual += output * scale);
            hidden.write(at, &residual);
        };
        let blocks = width.div_ceil(BLOCK);
        while let Some(taken) = projected.take(blocks, turn(blocks, member)) {
            let range = taken.start * BLOCK..width.min(taken.end * BLOCK);
            let first = range.start;
            scatter(&multiply(range)?, rows, |row, sums| {
                let at = row * width + first;
                match norm {
                    Some(_) => self.buffers.output.write(at, sums),
                    None => add(at, sums),
                }
            });
        }
        if norm.is_some() {
            member.wait()?;
            let (mut output, mut normed) = (vec![0.; width], vec![0.; width]);
            while let Some(taken) = normalized.take(rows, 1) {
                self.buffers.output.read(taken.start * width, &mut output);
                normalize(norm.as_ref(), &output, &mut normed);
                add(taken.start * width, &normed);
            }
        }
        Ok(())
    }
}

/// How many of so many blocks a member takes at a time.
pub(super) fn turn(blocks: usize, member: &Member) -> usize {
    blocks.div_ceil(TURNS * member.count()).max(1)
}

/// Rows of an embedding table.
pub(super) fn embedded(table: &Matrix, ids: &[usize]) -> Result<Vec<f32>> {
    match table {
        Matrix::Packed(table) => with_matrix(table, 0, |table| Ok(super::super::embed::<f32>(table, ids))),
        Matrix::Dense(table) => {
            Ok(ids.iter().map(|id| dense::row(table, *id)).collect::<Result<Vec<_>>>()?.concat())
        }
    }
}

/// Hands out `sums` `[outputs, rows]` row by row.
pub(super) fn scatter(sums: &[f32], rows: usize, mut write: impl FnMut(usize, &[f32])) {
    if rows == 1 {
        return write(0, sums);
    }
    let mut of_row = Vec::with_capacity(sums.len() / rows.max(1));
    for row in 0..rows {
        of_row.clear();
        of_row.extend(sums.iter().skip(row).step_by(rows));
        write(row, &of_row);
    }
}

/// Rows of x in the order of a weight's columns.
pub(super) fn in_order<'x>(x: &'x [f32], rows: usize, columns: Option<&Arc<[u32]>>) -> Cow<'x, [f32]> {
    let Some(columns) = columns else { return Cow::Borrowed(x) };
    let k = x.len().checked_div(rows).unwrap_or(0);
    let mut ordered = Vec::with_capacity(rows * columns.len());
    for row in x.chunks_exact(k.max(1)) {
        // What has no input is beyond all of them.
        ordered.extend(columns.iter().map(|column| row.get(*column as usize).copied().unwrap_or(0.)));
    }
    Cow::Owned(ordered)
}

/// A format, an order of columns, and x as these have it.
type PreparedFor = (QuantFormat, Option<Arc<[u32]>>, Prepared<'static>);

/// x, prepared for each format and order of columns, and for the adapters of each projection that it meets.
pub(super) struct Operand<'a> {
    x: Vec<f32>,
    rows: usize,
    digits: Digits,
    updates: &'a Updates,
    prepared: Vec<PreparedFor>,
    /// By the numbers of projections.
    adapters: Vec<(usize, LowRank<'a>)>,
}

impl<'a> Operand<'a> {
    /// Outputs `[outputs, rows of x]` of some rows of a weight, with the bias.
    pub(super) fn multiply(
        &mut self,
        projection: &Projection,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>> {
        let mut sums = match &projection.weight {
            Matrix::Packed(weight) => {
                self.products((weight, 0), projection.columns.as_ref(), first, count)?
            }
            Matrix::Dense(weight) => dense::few(isa::best(), weight, first, count, &self.x)?,
        };
        let rows = self.rows;
        if let Some(adapters) = self.adapters(projection) {
            adapters.apply_to_columns(&mut sums, rows, first);
        }
        self.add_bias(projection.bias.as_deref(), first, &mut sums);
        Ok(sums)
    }

    /// The same of a matrix of a stack.
    pub(super) fn multiply_expert(
        &mut self,
        stack: &StackProjection,
        expert: usize,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>> {
        let mut sums = self.products((&stack.weight, expert), None, first, count)?;
        self.add_bias(stack.bias.as_deref(), expert * stack.rows + first, &mut sums);
        Ok(sums)
    }

    fn products(
        &mut self,
        (weight, index): (&QuantTensor, usize),
        columns: Option<&Arc<[u32]>>,
        first: usize,
        count: usize,
    ) -> Result<Vec<f32>> {
        let format = weight.format();
        let is_same = |known: Option<&Arc<[u32]>>| match (known, columns) {
            (Some(known), Some(columns)) => Arc::ptr_eq(known, columns),
            (known, columns) => known.is_none() && columns.is_none(),
        };
        let known =
            self.prepared.iter().position(|(known, order, _)| *known == format && is_same(order.as_ref()));
        let place = known.unwrap_or_else(|| {
            let x = in_order(&self.x, self.rows, columns);
            let k = x.len() / self.rows.max(1);
            let prepared = dispatch::prepare(isa::best(), format, k, &x, self.digits);
            self.prepared.push((format, columns.cloned(), prepared));
            self.prepared.len() - 1
        });
        let mut sums = vec![0.; count * self.rows];
        if let Some((_, _, prepared)) = self.prepared.get(place) {
            with_matrix(weight, index, |matrix| {
                prepared.rows(matrix, first, &mut sums);
                Ok(())
            })?;
        }
        Ok(sums)
    }

    fn add_bias(&self, bias: Option<&[f32]>, first: usize, sums: &mut [f32]) {
        if let Some(bias) = bias.and_then(|bias| bias.get(first..)) {
            for (sums, bias) in sums.chunks_exact_mut(self.rows).zip(bias) {
                sums.iter_mut().for_each(|sum| *sum += bias);
            }
        }
    }

    /// The active adapters of a projection, if there are any.
    fn adapters(&mut self, projection: &Projection) -> Option<&LowRank<'a>> {
        let updates = self.updates.get(projection.index).filter(|updates| !updates.is_empty())?;
        let known = self.adapters.iter().position(|(known, _)| *known == projection.index);
        let index = known.unwrap_or_else(|| {
            self.adapters.push((projection.index, LowRank::new(updates, 0, &self.x)));
            self.adapters.len() - 1
        });
        self.adapters.get(index).map(|(_, adapters)| adapters)
    }
}
