//! Few rows: all threads go through the nodes together, and meet at a barrier behind each.
//!
//! Whatever a node reads, each member copies and prepares for itself: rows are few, and another barrier would cost more.
//! Members take blocks of outputs in turn, so results do not depend on how many there are.

use super::super::dispatch::{self, Prepared};
use super::super::fast_kernel::Digits;
use super::super::low_rank::LowRank;
use super::super::team::{self, Crew, Cursor, Failure, Member, Shared};
use super::attend::{Layers, Projected};
use super::elementwise::{rms_norm, silu_mul};
use crate::backend::step::{Node, Norm, Plan, Projection, StepToken, Updates};
use crate::backend::with_matrix;
use crate::{ActivationPrecision, KvCache, QuantFormat};
use candle_core::Result;

/// Rows of a weight that are multiplied together at least.
const BLOCK: usize = 16;

/// How many times each member takes blocks of a node: some, lest all wait for one that was held up.
const TURNS: usize = 8;

/// What the nodes hand on, each `[rows, width]`.
struct Buffers {
    hidden: Shared,
    queries: Shared,
    keys: Shared,
    values: Shared,
    attended: Shared,
    inner: Shared,
    logits: Shared,
}

impl Buffers {
    fn new(plan: &Plan, rows: usize, wanted: usize) -> Self {
        let (mut queries, mut keys, mut values, mut inner, mut logits) = (0, 0, 0, 0, 0);
        for node in &plan.nodes {
            match node {
                Node::Queries(_, [q, k, v]) => {
                    (queries, keys, values) = (queries.max(q.rows), keys.max(k.rows), values.max(v.rows));
                }
                Node::Gate(_, [gate, _]) => inner = inner.max(gate.rows),
                Node::Logits(_, head) => logits = logits.max(head.rows),
                Node::Embed(_) | Node::Attend(_) | Node::AddAttended(_) | Node::AddInner(_) => {}
            }
        }
        Self {
            hidden: Shared::new(rows * plan.hidden),
            queries: Shared::new(rows * queries),
            keys: Shared::new(rows * keys),
            values: Shared::new(rows * values),
            attended: Shared::new(rows * queries),
            inner: Shared::new(rows * inner),
            logits: Shared::new(wanted * logits),
        }
    }
}

/// See [`super::run`].
pub(super) fn run(
    crew: Crew,
    plan: &Plan,
    updates: &Updates,
    tokens: &[StepToken],
    caches: &mut [&mut KvCache],
    wanted: &[usize],
) -> Result<Vec<f32>> {
    let buffers = Buffers::new(plan, tokens.len(), wanted.len());
    let cursors: Vec<_> = plan.nodes.iter().map(|_| [Cursor::new(), Cursor::new(), Cursor::new()]).collect();
    let layers = Layers::new(plan, tokens, caches)?;
    let partials = Shared::new(layers.partial_len());
    let digits = Digits::of::<f32>(ActivationPrecision::current());
    let step = Step {
        plan,
        updates,
        tokens,
        wanted,
        digits,
        buffers: &buffers,
        partials: &partials,
        layers: &layers,
    };
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
struct Step<'a> {
    plan: &'a Plan,
    updates: &'a Updates,
    tokens: &'a [StepToken],
    wanted: &'a [usize],
    digits: Digits,
    buffers: &'a Buffers,
    partials: &'a Shared,
    layers: &'a Layers<'a>,
}

impl Step<'_> {
    /// A member's share of a node.
    fn compute(
        &self,
        node: &Node,
        member: &Member,
        cursors: &[Cursor; 3],
    ) -> std::result::Result<(), Failure<candle_core::Error>> {
        let [cursor, ..] = cursors;
        let (buffers, hidden, rows) = (self.buffers, self.plan.hidden, self.tokens.len());
        match node {
            Node::Embed(table) => {
                while let Some(range) = cursor.take(rows, 1) {
                    for row in range {
                        let ids = [self.tokens.get(row).map_or(0, |token| token.id as usize)];
                        let embedded =
                            with_matrix(table, 0, |table| Ok(super::super::embed::<f32>(table, &ids)))?;
                        buffers.hidden.write(row * hidden, &embedded);
                    }
                }
            }
            Node::Queries(norm, projections) => {
                let mut x = self.operand(self.normed(norm, None), rows);
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
                            let sums = x.multiply(projection, range.start, range.len())?;
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
            Node::AddAttended(projection) => self.add(projection, &buffers.attended, member, cursor)?,
            Node::Gate(norm, [gate, up]) => {
                let mut x = self.operand(self.normed(norm, None), rows);
                let blocks = gate.rows.div_ceil(BLOCK);
                while let Some(taken) = cursor.take(blocks, turn(blocks, member)) {
                    let range = taken.start * BLOCK..gate.rows.min(taken.end * BLOCK);
                    let mut gates = x.multiply(gate, range.start, range.len())?;
                    silu_mul(&mut gates, &x.multiply(up, range.start, range.len())?);
                    scatter(&gates, rows, |row, inner| {
                        buffers.inner.write(row * gate.rows + range.start, inner)
                    });
                }
            }
            Node::AddInner(projection) => self.add(projection, &buffers.inner, member, cursor)?,
            Node::Logits(norm, head) => {
                let wanted = self.wanted.len();
                let mut x = self.operand(self.normed(norm, Some(self.wanted)), wanted);
                let blocks = if wanted == 0 { 0 } else { head.rows.div_ceil(BLOCK) };
                while let Some(taken) = cursor.take(blocks, turn(blocks, member)) {
                    let range = taken.start * BLOCK..head.rows.min(taken.end * BLOCK);
                    let sums = x.multiply(head, range.start, range.len())?;
                    scatter(&sums, wanted, |row, sums| {
                        buffers.logits.write(row * head.rows + range.start, sums)
                    });
                }
            }
        }
        Ok(())
    }

    fn operand(&self, x: Vec<f32>, rows: usize) -> Operand<'_> {
        Operand {
            x,
            rows,
            digits: self.digits,
            updates: self.updates,
            prepared: Vec::new(),
            adapters: Vec::new(),
        }
    }

    /// norm(hidden) of all rows, or of those that are wanted.
    fn normed(&self, norm: &Norm, wanted: Option<&[usize]>) -> Vec<f32> {
        let width = self.plan.hidden;
        let rows = wanted.map_or(self.tokens.len(), <[usize]>::len);
        let mut hidden = vec![0.; width];
        let mut all = vec![0.; rows * width];
        for (row, out) in all.chunks_exact_mut(width).enumerate() {
            let row = wanted.and_then(|wanted| wanted.get(row)).copied().unwrap_or(row);
            self.buffers.hidden.read(row * width, &mut hidden);
            rms_norm(&hidden, &norm.weight, norm.eps, out);
        }
        all
    }

    /// hidden += projection of `from`.
    fn add(&self, projection: &Projection, from: &Shared, member: &Member, cursor: &Cursor) -> Result<()> {
        let (rows, hidden) = (self.tokens.len(), &self.buffers.hidden);
        let mut x = vec![0.; rows * projection.k];
        from.read(0, &mut x);
        let mut x = self.operand(x, rows);
        let blocks = projection.rows.div_ceil(BLOCK);
        let mut residual = Vec::new();
        while let Some(taken) = cursor.take(blocks, turn(blocks, member)) {
            let range = taken.start * BLOCK..projection.rows.min(taken.end * BLOCK);
            let sums = x.multiply(projection, range.start, range.len())?;
            scatter(&sums, rows, |row, sums| {
                let at = row * projection.rows + range.start;
                residual.resize(sums.len(), 0.);
                hidden.read(at, &mut residual);
                residual.iter_mut().zip(sums).for_each(|(residual, sum)| *residual += sum);
                hidden.write(at, &residual);
            });
        }
        Ok(())
    }
}

/// How many of so many blocks a member takes at a time.
fn turn(blocks: usize, member: &Member) -> usize {
    blocks.div_ceil(TURNS * member.count()).max(1)
}

/// Hands out `sums` `[outputs, rows]` row by row.
fn scatter(sums: &[f32], rows: usize, mut write: impl FnMut(usize, &[f32])) {
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

/// x, prepared for each format and for the adapters of each projection that it meets.
struct Operand<'a> {
    x: Vec<f32>,
    rows: usize,
    digits: Digits,
    updates: &'a Updates,
    prepared: Vec<(QuantFormat, Prepared<'static>)>,
    /// By the numbers of projections.
    adapters: Vec<(usize, LowRank<'a>)>,
}

impl<'a> Operand<'a> {
    /// Outputs `[outputs, rows of x]` of some rows of a weight, with the bias.
    fn multiply(&mut self, projection: &Projection, first: usize, count: usize) -> Result<Vec<f32>> {
        let format = projection.weight.format();
        let known = self.prepared.iter().position(|(known, _)| *known == format);
        let index = known.unwrap_or_else(|| {
            self.prepared.push((
                format,
                dispatch::prepare(super::super::isa::best(), format, projection.k, &self.x, self.digits),
            ));
            self.prepared.len() - 1
        });
        let mut sums = vec![0.; count * self.rows];
        if let Some((_, prepared)) = self.prepared.get(index) {
            with_matrix(&projection.weight, 0, |matrix| {
                prepared.rows(matrix, first, &mut sums);
                Ok(())
            })?;
        }
        let rows = self.rows;
        if let Some(adapters) = self.adapters(projection) {
            adapters.apply_to_columns(&mut sums, rows, first);
        }
        if let Some(bias) = projection.bias.as_ref().and_then(|bias| bias.get(first..)) {
            for (sums, bias) in sums.chunks_exact_mut(self.rows).zip(bias) {
                sums.iter_mut().for_each(|sum| *sum += bias);
            }
        }
        Ok(sums)
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
