//! Few rows: all threads go through the nodes together, and meet at a barrier behind each.
//!
//! Whatever a node reads, each member copies and prepares for itself: rows are few, and another barrier would cost more.
//! Members take shares of the outputs as they come, so results do not depend on how many there are.

use super::super::cursor::{Blocks, Cursor};
use super::super::fast_kernel::Digits;
use super::super::team::{self, Crew, Failure, Member, Shared};
use super::attend::Layers;
use super::delta_net::mix_share;
use super::elementwise::{activate, normalize, scale_and_cap};
use super::operand::{embedded, Operand};
use crate::backend::step::{ExpertBlock, Input, Node, Norm, Out, Plan, Projection, MOST_PROJECTIONS};
use crate::backend::StepCaches;
pub(super) use crate::memory_nodes::BLOCK;
use crate::{ActivationPrecision, KvCache};
use candle_core::Result;
use std::ops::Range;

/// Numbers of a weight that a member takes at least: their product takes longer than it takes to begin it.
const LEAST: usize = 1 << 16;

/// Of the parts of a node, one after the other.
pub(super) type Cursors = [Cursor; 4];

/// What the nodes hand on, each `[rows, width]`.
pub(super) struct Buffers {
    hidden: Shared,
    projected: [Shared; MOST_PROJECTIONS],
    attended: Shared,
    pub(super) inner: Shared,
    pub(super) logits_of_experts: Shared,
    /// Of each row and each expert that it uses.
    pub(super) inner_of_experts: Shared,
    /// Of a block, before it is normalized.
    output: Shared,
    logits: Shared,
}

impl Buffers {
    fn new(plan: &Plan, rows: usize, wanted: usize) -> Self {
        let (mut projected, mut attended) = ([0; MOST_PROJECTIONS], 0);
        let (mut inner, mut output, mut logits) = (0, 0, 0);
        let (mut experts, mut inner_of_experts) = (0, 0);
        for node in &plan.nodes {
            match node {
                Node::Project(_, projections, _) => {
                    for (width, projection) in projected.iter_mut().zip(projections) {
                        *width = projection.rows.max(*width);
                    }
                }
                Node::Attend(heads) => attended = attended.max(heads.heads * heads.head_dim),
                Node::DeltaNet(net) => attended = attended.max(net.width()),
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
                Node::Embed { .. } | Node::AddAttended(..) | Node::AddInner(..) => {}
            }
        }
        Self {
            hidden: Shared::new(rows * plan.hidden),
            projected: projected.map(|width| Shared::new(rows * width)),
            attended: Shared::new(rows * attended),
            inner: Shared::new(rows * inner),
            logits_of_experts: Shared::new(rows * experts),
            inner_of_experts: Shared::new(rows * inner_of_experts),
            output: Shared::new(rows * output),
            logits: Shared::new(wanted * logits),
        }
    }
}

/// See [`super::run`].
pub(super) fn run(
    crew: Crew,
    plan: &Plan,
    input: Input,
    caches: &mut StepCaches<KvCache>,
) -> Result<Vec<f32>> {
    let buffers = Buffers::new(plan, input.tokens.len(), input.wanted.len());
    let cursors: Vec<Cursors> = plan.nodes.iter().map(|_| Cursors::default()).collect();
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
    Ok(buffers.logits.into_numbers())
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
            Node::Embed { table, factor, .. } => {
                while let Some(range) = cursor.take(rows, 1) {
                    for row in range {
                        let ids = [self.input.tokens.get(row).map_or(0, |token| token.id as usize)];
                        let mut embedded = embedded(table, &ids)?;
                        scale_and_cap(&mut embedded, *factor, None);
                        buffers.hidden.write(row * hidden, &embedded);
                    }
                }
            }
            Node::Project(norm, projections, clip) => {
                let mut x = self.operand(self.normed(norm.as_ref(), None), rows);
                let own: Vec<usize> =
                    projections.iter().map(|projection| projection.rows.div_ceil(BLOCK)).collect();
                let blocks = Blocks::new(&own);
                while let Some(share) = take_share(cursor, &blocks, hidden, member) {
                    for (index, run) in blocks.runs(share, member) {
                        let (Some(projection), Some(to)) =
                            (projections.get(index), buffers.projected.get(index))
                        else {
                            continue;
                        };
                        let range = run.start * BLOCK..projection.rows.min(run.end * BLOCK);
                        let mut sums = x.multiply(projection, range.start, range.len())?;
                        if let Some(clip) = clip {
                            sums.iter_mut().for_each(|sum| *sum = sum.clamp(-clip, *clip));
                        }
                        scatter(&sums, rows, |row, sums| to.write(row * projection.rows + range.start, sums));
                    }
                }
            }
            Node::Attend(heads) => {
                let out = (self.partials, &buffers.attended);
                self.layers.compute(heads, (member, cursors), &buffers.projected, out)?;
            }
            Node::DeltaNet(net) => {
                if let Some(changed) = self.layers.state(net) {
                    mix_share(net, changed, cursor, &buffers.projected, &buffers.attended);
                }
            }
            Node::AddAttended(projection, out) => {
                self.add((projection, out), &buffers.attended, member, cursors)?;
            }
            Node::Inner { norm, gate, up, activation } => {
                let mut x = self.operand(self.normed(norm.as_ref(), None), rows);
                let blocks = up.rows.div_ceil(BLOCK);
                while let Some(taken) = take_blocks(cursor, (blocks, hidden), member) {
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
            Node::Logits { norm, head, scale, softcap, .. } => {
                let wanted = self.input.wanted.len();
                let mut x = self.operand(self.normed(norm.as_ref(), Some(self.input.wanted)), wanted);
                let blocks = if wanted == 0 { 0 } else { head.rows.div_ceil(BLOCK) };
                while let Some(taken) = take_blocks(cursor, (blocks, hidden), member) {
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
        Operand::new(x, rows, self.digits, self.input.updates)
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
        self.add_outputs((projection.rows, projection.k), out, member, (projected, normalized), |range| {
            x.multiply(projection, range.start, range.len())
        })
    }

    /// hidden += what becomes of outputs, of which `multiply` gives a range `[outputs, rows]`, each from `k` numbers.
    pub(super) fn add_outputs(
        &self,
        (width, k): (usize, usize),
        Out { norm, scale, .. }: &Out,
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
        while let Some(taken) = take_blocks(projected, (blocks, k), member) {
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

/// The next of so many blocks of a weight with rows of `k` numbers.
pub(super) fn take_blocks(
    cursor: &Cursor,
    (blocks, k): (usize, usize),
    member: &Member,
) -> Option<Range<usize>> {
    take_share(cursor, &Blocks::new(&[blocks]), k, member)
}

/// The next of the blocks of weights with rows of `k` numbers.
pub(super) fn take_share(
    cursor: &Cursor,
    blocks: &Blocks,
    k: usize,
    member: &Member,
) -> Option<Range<usize>> {
    cursor.take_share(blocks, LEAST.div_ceil(BLOCK * k.max(1)), member)
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
