//! Experts in a step: logits of the router, what the chosen experts make of a row, the sum of that, how much a shared one counts.
//!
//! Rows are gathered by expert. Of few, threads share out the outputs of all experts, each a block; of many, the experts.

use super::super::cursor::{Blocks, Cursor};
use super::super::dispatch::dense_columns;
use super::super::tasks;
use super::super::team::{Failure, Member};
use super::elementwise::{join, weigh};
use super::few::{scatter, take_blocks, take_share, Cursors, Step, BLOCK};
use super::many::{add, normed, OperandOfMany, AT_ONCE, ROWS};
use super::operand::Operand;
use crate::backend::contiguous;
use crate::backend::step::{ExpertBlock, Router, SharedGate, StackProjection, Updates};
use candle_core::{bail, Result, Storage, Tensor};
use std::ops::Range;

/// So many experts of a thread, if threads are to have as much to do each.
const EXPERTS_OF_THREAD: usize = 4;

/// A row and one of the experts that it chose.
#[derive(Clone, Copy)]
struct Pair {
    row: usize,
    expert: usize,
    /// How much the expert counts.
    weight: f32,
}

/// All pairs of rows that have chosen so, those of an expert together; those of a row stay in the order of experts.
fn pairs_of(chosen: impl Iterator<Item = Vec<(usize, f32)>>) -> Vec<Pair> {
    let of_row = |(row, chosen): (usize, Vec<(usize, f32)>)| {
        chosen.into_iter().map(move |(expert, weight)| Pair { row, expert, weight })
    };
    let mut pairs: Vec<Pair> = chosen.enumerate().flat_map(of_row).collect();
    pairs.sort_by_key(|pair| pair.expert);
    pairs
}

/// What an expert sees: a row for each of its pairs.
fn seen_by(block: &ExpertBlock, pairs: &[Pair], x: &[f32], width: usize) -> Vec<f32> {
    let mut seen = Vec::with_capacity(pairs.len() * width);
    for pair in pairs {
        seen.extend_from_slice(x.chunks_exact(width).nth(pair.row).unwrap_or_default());
    }
    if block.weighs_inputs {
        for (seen, pair) in seen.chunks_exact_mut(width).zip(pairs) {
            seen.iter_mut().for_each(|x| *x *= pair.weight);
        }
    }
    seen
}

/// How much what a pair's expert makes of it counts in the sum.
fn share(block: &ExpertBlock, pair: Pair) -> f32 {
    if block.weighs_inputs {
        1.
    } else {
        pair.weight
    }
}

/// Logits `[rows of x, experts]` of some experts, by a dense router.
fn logits_of_dense(
    (weight, bias): (&Tensor, Option<&[f32]>),
    x: &[f32],
    experts: Range<usize>,
) -> Result<Vec<f32>> {
    let (storage, layout) = weight.storage_and_layout();
    let (Storage::Cpu(storage), [_, all]) = (&*storage, layout.dims()) else {
        bail!("a router [hidden, E] on the CPU is needed here")
    };
    let weight = contiguous(storage.as_slice::<f32>()?, layout)?;
    let mut logits = dense_columns(weight, *all, experts.clone(), x);
    if let Some(bias) = bias.and_then(|bias| bias.get(experts)) {
        for logits in logits.chunks_exact_mut(bias.len()) {
            logits.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
        }
    }
    Ok(logits)
}

/// What a member ends early with.
type Done = std::result::Result<(), Failure<candle_core::Error>>;

impl Step<'_> {
    /// A member's share of a block of experts.
    pub(super) fn experts(&self, block: &ExpertBlock, member: &Member, cursors: &Cursors) -> Done {
        let (rows, hidden, experts) = (self.input.tokens.len(), self.plan.hidden, block.routing.experts);
        let [of_logits, of_inner, projected, normalized] = cursors;
        let x = self.normed(block.norm.as_ref(), None);
        self.logits_of_block(block, &x, member, of_logits)?;
        member.wait()?;
        // Each member chooses for itself: to wait for what another one has chosen would take as long.
        let mut logits = vec![0.; rows * experts];
        self.buffers.logits_of_experts.read(0, &mut logits);
        let pairs = pairs_of(logits.chunks_exact(experts).map(|logits| block.routing.choose(logits)));
        let groups: Vec<&[Pair]> = pairs.chunk_by(|a, b| a.expert == b.expert).collect();
        self.inner_of_experts(block, &x, &groups, member, of_inner)?;
        member.wait()?;
        let mut operands = self.operands_of_down(block, &groups);
        self.add_outputs((hidden, block.down.k), &block.out, member, (projected, normalized), |range| {
            let mut sums = vec![0.; range.len() * rows];
            for (pairs, operand) in groups.iter().zip(&mut operands) {
                let Some(expert) = pairs.first().map(|pair| pair.expert) else { continue };
                let outputs = operand.multiply_expert(&block.down, expert, range.start, range.len())?;
                for (sums, outputs) in sums.chunks_exact_mut(rows).zip(outputs.chunks_exact(pairs.len())) {
                    for (pair, output) in pairs.iter().zip(outputs) {
                        if let Some(sum) = sums.get_mut(pair.row) {
                            *sum += share(block, *pair) * output;
                        }
                    }
                }
            }
            Ok(sums)
        })
    }

    /// The router's logits of x, all rows normalized; and what the shared expert counts, if it has a gate.
    fn logits_of_block(&self, block: &ExpertBlock, x: &[f32], member: &Member, cursor: &Cursor) -> Done {
        let (rows, experts) = (self.input.tokens.len(), block.routing.experts);
        let (blocks, to) = (experts.div_ceil(BLOCK), &self.buffers.logits_of_experts);
        let mut operand = None;
        let all = blocks + usize::from(block.shared_gate.is_some());
        while let Some(taken) = take_blocks(cursor, (all, self.plan.hidden), member) {
            let range = taken.start * BLOCK..experts.min(taken.end * BLOCK);
            if !range.is_empty() {
                let logits = self.logits(&block.router, (x, rows), &mut operand, range.clone())?;
                for (row, logits) in logits.chunks_exact(range.len()).enumerate() {
                    to.write(row * experts + range.start, logits);
                }
            }
            if let Some(gate) = block.shared_gate.as_ref().filter(|_| taken.end > blocks) {
                let logits = self.logits(&gate.router, (x, rows), &mut operand, 0..1)?;
                let mut inner = vec![0.; rows * gate.width];
                self.buffers.inner.read(0, &mut inner);
                weigh(&mut inner, gate.width, &logits);
                self.buffers.inner.write(0, &inner);
            }
        }
        Ok(())
    }

    /// Some logits `[rows of x, logits]` of a router.
    fn logits<'s>(
        &'s self,
        router: &'s Router,
        (x, rows): (&[f32], usize),
        operand: &mut Option<Operand<'s>>,
        range: Range<usize>,
    ) -> Result<Vec<f32>> {
        match router {
            Router::Packed(projection) => {
                let operand = operand.get_or_insert_with(|| self.operand(x.to_vec(), rows));
                let products = operand.multiply(projection, range.start, range.len())?;
                let mut logits = Vec::with_capacity(products.len());
                scatter(&products, rows, |_, of_row| logits.extend_from_slice(of_row));
                Ok(logits)
            }
            Router::Dense { weight, bias } => logits_of_dense((weight, bias.as_deref()), x, range),
        }
    }

    /// Gate and up of all pairs, joined.
    fn inner_of_experts(
        &self,
        block: &ExpertBlock,
        x: &[f32],
        groups: &[&[Pair]],
        member: &Member,
        cursor: &Cursor,
    ) -> Done {
        let (hidden, inner) = (self.plan.hidden, block.up.rows);
        // Of a single row, all experts see the same.
        let is_shared = self.input.tokens.len() == 1 && !block.weighs_inputs;
        let mut operands: Vec<Option<Operand>> = Vec::new();
        operands.resize_with(if is_shared { 1 } else { groups.len() }, || None);
        let own = vec![inner.div_ceil(BLOCK); groups.len()];
        let blocks = Blocks::new(&own);
        let first_pairs: Vec<usize> = groups
            .iter()
            .scan(0, |next, pairs| {
                *next += pairs.len();
                Some(*next - pairs.len())
            })
            .collect();
        while let Some(share) = take_share(cursor, &blocks, hidden, member) {
            for (group, run) in blocks.runs(share, member) {
                let place = operands.get_mut(if is_shared { 0 } else { group });
                let (Some(place), Some(pairs), Some(first_of_group)) =
                    (place, groups.get(group), first_pairs.get(group))
                else {
                    continue;
                };
                let Some(expert) = pairs.first().map(|pair| pair.expert) else { continue };
                let first = run.start * BLOCK;
                let count = inner.min(run.end * BLOCK) - first;
                let operand =
                    place.get_or_insert_with(|| self.operand(seen_by(block, pairs, x, hidden), pairs.len()));
                let mut joined = operand.multiply_expert(&block.gate, expert, first, count)?;
                let up = operand.multiply_expert(&block.up, expert, first, count)?;
                join(block.gating, &mut joined, &up);
                scatter(&joined, pairs.len(), |pair, joined| {
                    self.buffers.inner_of_experts.write((first_of_group + pair) * inner + first, joined);
                });
            }
        }
        Ok(())
    }

    /// What the down projection of each expert sees.
    fn operands_of_down(&self, block: &ExpertBlock, groups: &[&[Pair]]) -> Vec<Operand<'_>> {
        let (inner, mut first_pair) = (block.up.rows, 0);
        let of_group = |pairs: &&[Pair]| {
            let mut x = vec![0.; pairs.len() * inner];
            self.buffers.inner_of_experts.read(first_pair * inner, &mut x);
            first_pair += pairs.len();
            self.operand(x, pairs.len())
        };
        groups.iter().map(of_group).collect()
    }
}

/// A block of experts of many rows, and what the shared one has inside.
pub(super) fn experts_of_many(
    block: &ExpertBlock,
    (hidden, inner): (&mut [f32], &mut [f32]),
    width: usize,
    updates: &Updates,
) -> Result<()> {
    let experts = block.routing.experts;
    let mut room = Vec::new();
    let x = normed(hidden, block.norm.as_ref(), width, &mut room);
    let mut x = OperandOfMany::new(x, width);
    let logits = logits_of_many(&block.router, &mut x, experts, updates)?;
    if let Some(SharedGate { router, width }) = &block.shared_gate {
        let logits = logits_of_many(router, &mut x, 1, updates)?;
        tasks::for_each(inner.chunks_mut(ROWS * width).zip(logits.chunks(ROWS)), |_, (inner, logits)| {
            weigh(inner, *width, logits);
        });
    }
    let mut chosen = vec![Vec::new(); hidden.len() / width];
    let rows = logits.chunks(ROWS * experts);
    tasks::for_each(chosen.chunks_mut(ROWS).zip(rows), |_, (chosen, logits)| {
        for (chosen, logits) in chosen.iter_mut().zip(logits.chunks_exact(experts)) {
            *chosen = block.routing.choose(logits);
        }
    });
    let pairs = pairs_of(chosen.into_iter());
    // Of each row, where in the outputs of which expert its own is, and how much that counts.
    let mut parts = vec![Vec::new(); hidden.len() / width];
    let of_experts: Vec<&[Pair]> = pairs.chunk_by(|a, b| a.expert == b.expert).collect();
    for (expert, pairs) in of_experts.iter().enumerate() {
        for (index, pair) in pairs.iter().enumerate() {
            if let Some(parts) = parts.get_mut(pair.row) {
                parts.push((expert, index, share(block, *pair)));
            }
        }
    }
    let mut outputs: Vec<Result<Vec<f32>>> = Vec::new();
    outputs.resize_with(of_experts.len(), || Ok(Vec::new()));
    let compute = |(outputs, pairs): (&mut Result<Vec<f32>>, &&[Pair])| {
        *outputs = outputs_of(block, pairs, x.rows(), width);
    };
    // Threads share out experts, where there are enough of them, or else the rows of one after another.
    match of_experts.len() >= EXPERTS_OF_THREAD * tasks::threads() {
        true => tasks::for_each(outputs.iter_mut().zip(&of_experts), |_, item| compute(item)),
        false => outputs.iter_mut().zip(&of_experts).for_each(compute),
    }
    let outputs = outputs.into_iter().collect::<Result<Vec<_>>>()?;
    let mut sums = vec![0.; hidden.len()];
    tasks::for_each(sums.chunks_mut(width).zip(&parts), |_, (sums, parts)| {
        for &(expert, index, share) in parts {
            let output = outputs.get(expert).and_then(|outputs| outputs.chunks_exact(width).nth(index));
            sums.iter_mut().zip(output.unwrap_or_default()).for_each(|(sum, output)| *sum += share * output);
        }
    });
    add(hidden, &sums, &block.out, width);
    Ok(())
}

/// Logits `[rows of x, logits of a row]`.
fn logits_of_many(
    router: &Router,
    x: &mut OperandOfMany,
    count: usize,
    updates: &Updates,
) -> Result<Vec<f32>> {
    match router {
        Router::Packed(projection) => {
            let mut logits = Vec::new();
            x.multiply(projection, updates, &mut logits)?;
            Ok(logits)
        }
        Router::Dense { weight, bias } => {
            let rows = x.rows().chunks(ROWS * x.width());
            let mut logits: Vec<Result<Vec<f32>>> = Vec::new();
            logits.resize_with(rows.len(), || Ok(Vec::new()));
            tasks::for_each(logits.iter_mut().zip(rows), |_, (logits, x)| {
                *logits = logits_of_dense((weight, bias.as_deref()), x, 0..count);
            });
            Ok(logits.into_iter().collect::<Result<Vec<_>>>()?.concat())
        }
    }
}

/// What an expert makes of the rows of its pairs.
fn outputs_of(block: &ExpertBlock, pairs: &[Pair], x: &[f32], width: usize) -> Result<Vec<f32>> {
    let Some(expert) = pairs.first().map(|pair| pair.expert) else { return Ok(Vec::new()) };
    let seen = seen_by(block, pairs, x, width);
    let mut x = OperandOfMany::new(&seen, width);
    let mut joined = multiply_stack(&mut x, &block.gate, expert)?;
    let up = multiply_stack(&mut x, &block.up, expert)?;
    tasks::for_each(joined.chunks_mut(AT_ONCE).zip(up.chunks(AT_ONCE)), |_, (gate, up)| {
        join(block.gating, gate, up);
    });
    multiply_stack(&mut OperandOfMany::new(&joined, block.down.k), &block.down, expert)
}

fn multiply_stack(x: &mut OperandOfMany, stack: &StackProjection, expert: usize) -> Result<Vec<f32>> {
    let bias = stack.bias.as_ref().and_then(|bias| bias.chunks_exact(stack.rows).nth(expert));
    let mut output = Vec::new();
    x.multiply_matrix((&stack.weight, expert), None, bias, &mut output)?;
    Ok(output)
}
