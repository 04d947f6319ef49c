//! Experts in a step: logits of the router, what the chosen experts make of a row, the sum of that.
//!
//! Few rows are multiplied pair by pair, a pair being a row and one of its experts, so that the bits of a row do not depend on
//! what else is in a step; threads share out the rows of all pairs' weights. Many rows are gathered by expert.

use super::super::tasks;
use super::super::team::{Failure, Member};
use super::elementwise::join;
use super::few::{scatter, turn, Cursors, Operand, Step, BLOCK};
use super::many::{add, multiply, multiply_matrix, normed};
use crate::backend::routing::Routing;
use crate::backend::step::{ExpertBlock, Router, StackProjection, Updates};
use candle_core::{bail, Result, Storage, Tensor};

/// A row and one of the experts that it chose.
#[derive(Clone, Copy)]
struct Pair {
    row: usize,
    expert: usize,
    /// How much the expert counts.
    weight: f32,
}

/// All pairs, those of an expert together; those of a row stay in the order of experts.
fn pairs_of<'a>(routing: &Routing, logits: impl Iterator<Item = &'a [f32]>) -> Vec<Pair> {
    let of_row = |(row, logits): (usize, &[f32])| {
        let chosen = routing.choose(logits);
        chosen.into_iter().map(move |(expert, weight)| Pair { row, expert, weight })
    };
    let mut pairs: Vec<Pair> = logits.enumerate().flat_map(of_row).collect();
    pairs.sort_by_key(|pair| pair.expert);
    pairs
}

/// What an expert sees: of a row, or of a pair.
fn weighed(block: &ExpertBlock, pair: Pair, x: &[f32]) -> Vec<f32> {
    let factor = if block.weighs_inputs { pair.weight } else { 1. };
    x.iter().map(|x| x * factor).collect()
}

/// How much what a pair's expert makes of it counts in the sum.
fn share(block: &ExpertBlock, pair: Pair) -> f32 {
    if block.weighs_inputs {
        1.
    } else {
        pair.weight
    }
}

/// Calls `work` with the numbers of a dense router `[E, hidden]`.
fn with_dense<T>(weight: &Tensor, work: impl FnOnce(&[f32]) -> T) -> Result<T> {
    let (storage, layout) = weight.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("a router on the CPU is needed here") };
    Ok(work(crate::backend::contiguous(storage.as_slice::<f32>()?, layout)?))
}

/// Sums of independent lanes, which the compiler makes vectors of.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Logits `[outputs, rows of x]` of some experts, from `first` on.
fn logits_of_dense(
    (weight, bias): (&[f32], Option<&[f32]>),
    (x, hidden): (&[f32], usize),
    (first, count): (usize, usize),
) -> Vec<f32> {
    let experts = weight.chunks_exact(hidden).enumerate().skip(first).take(count);
    experts
        .flat_map(|(expert, weight)| {
            let bias = bias.and_then(|bias| bias.get(expert)).copied().unwrap_or(0.);
            x.chunks_exact(hidden).map(move |x| dot(weight, x) + bias)
        })
        .collect()
}

impl Step<'_> {
    /// A member's share of a block of experts.
    pub(super) fn experts(
        &self,
        block: &ExpertBlock,
        member: &Member,
        cursors: &Cursors,
    ) -> std::result::Result<(), Failure<candle_core::Error>> {
        let (rows, hidden) = (self.input.tokens.len(), self.plan.hidden);
        let (experts, inner) = (block.routing.experts, block.up.rows);
        let [of_logits, of_inner, projected, normalized] = cursors;
        let x = self.normed(block.norm.as_ref(), None);

        let blocks = experts.div_ceil(BLOCK);
        let mut operand = self.operand(x.clone(), rows);
        while let Some(taken) = of_logits.take(blocks, turn(blocks, member)) {
            let range = taken.start * BLOCK..experts.min(taken.end * BLOCK);
            let logits = match &block.router {
                Router::Packed(projection) => operand.multiply(projection, range.start, range.len())?,
                Router::Dense { weight, bias } => with_dense(weight, |weight| {
                    logits_of_dense((weight, bias.as_deref()), (&x, hidden), (range.start, range.len()))
                })?,
            };
            scatter(&logits, rows, |row, logits| {
                self.buffers.logits_of_experts.write(row * experts + range.start, logits);
            });
        }
        member.wait()?;

        // Each member chooses for itself: to wait for what another one has chosen would take as long.
        let mut logits = vec![0.; rows * experts];
        self.buffers.logits_of_experts.read(0, &mut logits);
        let pairs = pairs_of(&block.routing, logits.chunks_exact(experts));
        // What is prepared serves all experts of a row.
        let seen = |index: usize, pair: Pair| if block.weighs_inputs { index } else { pair.row };
        let mut operands: Vec<Option<Operand>> = Vec::new();
        operands.resize_with(if block.weighs_inputs { pairs.len() } else { rows }, || None);
        let blocks = inner.div_ceil(BLOCK);
        while let Some(taken) = of_inner.take(pairs.len() * blocks, turn(pairs.len() * blocks, member)) {
            for (index, pair) in pairs.iter().enumerate() {
                let own = (taken.start.max(index * blocks), taken.end.min((index + 1) * blocks));
                if own.0 >= own.1 {
                    continue;
                }
                let first = (own.0 - index * blocks) * BLOCK;
                let count = inner.min((own.1 - index * blocks) * BLOCK) - first;
                let (Some(operand), Some(x)) =
                    (operands.get_mut(seen(index, *pair)), x.chunks_exact(hidden).nth(pair.row))
                else {
                    continue;
                };
                let operand = operand.get_or_insert_with(|| self.operand(weighed(block, *pair, x), 1));
                let mut joined = operand.multiply_expert(&block.gate, pair.expert, first, count)?;
                let up = operand.multiply_expert(&block.up, pair.expert, first, count)?;
                join(block.gating, &mut joined, &up);
                self.buffers.inner_of_experts.write(index * inner + first, &joined);
            }
        }
        member.wait()?;

        let mut operands: Vec<Operand> = Vec::with_capacity(pairs.len());
        for index in 0..pairs.len() {
            let mut x = vec![0.; inner];
            self.buffers.inner_of_experts.read(index * inner, &mut x);
            operands.push(self.operand(x, 1));
        }
        self.add_outputs(hidden, &block.out, member, (projected, normalized), |range| {
            let mut sums = vec![0.; range.len() * rows];
            for (pair, operand) in pairs.iter().zip(&mut operands) {
                let of_pair = operand.multiply_expert(&block.down, pair.expert, range.start, range.len())?;
                let share = share(block, *pair);
                for (sum, output) in sums.iter_mut().skip(pair.row).step_by(rows).zip(of_pair) {
                    *sum += share * output;
                }
            }
            Ok(sums)
        })
    }
}

/// A block of experts of many rows.
pub(super) fn experts_of_many(
    block: &ExpertBlock,
    hidden: &mut [f32],
    width: usize,
    updates: &Updates,
) -> Result<()> {
    let (experts, inner) = (block.routing.experts, block.up.rows);
    let x = normed(hidden, block.norm.as_ref(), width);
    let logits = match &block.router {
        Router::Packed(projection) => multiply(projection, updates, &x)?,
        Router::Dense { weight, bias } => with_dense(weight, |weight| {
            let mut logits = vec![0.; hidden.len() / width * experts];
            tasks::for_each(logits.chunks_mut(experts).zip(x.chunks(width)), |_, (logits, x)| {
                let all = logits_of_dense((weight, bias.as_deref()), (x, width), (0, experts));
                logits.copy_from_slice(&all);
            });
            logits
        })?,
    };
    let pairs = pairs_of(&block.routing, logits.chunks_exact(experts));
    let mut sums = vec![0.; hidden.len()];
    for pairs in pairs.chunk_by(|a, b| a.expert == b.expert) {
        let Some(expert) = pairs.first().map(|pair| pair.expert) else { continue };
        let rows =
            pairs.iter().filter_map(|pair| Some(weighed(block, *pair, x.chunks_exact(width).nth(pair.row)?)));
        let x: Vec<f32> = rows.flatten().collect();
        let mut joined = multiply_stack(&block.gate, expert, &x)?;
        let up = multiply_stack(&block.up, expert, &x)?;
        tasks::for_each(joined.chunks_mut(inner).zip(up.chunks(inner)), |_, (gate, up)| {
            join(block.gating, gate, up);
        });
        let outputs = multiply_stack(&block.down, expert, &joined)?;
        for (pair, output) in pairs.iter().zip(outputs.chunks_exact(width)) {
            let share = share(block, *pair);
            if let Some(sums) = sums.chunks_exact_mut(width).nth(pair.row) {
                sums.iter_mut().zip(output).for_each(|(sum, output)| *sum += share * output);
            }
        }
    }
    add(hidden, &sums, &block.out, width);
    Ok(())
}

fn multiply_stack(stack: &StackProjection, expert: usize, x: &[f32]) -> Result<Vec<f32>> {
    let bias = stack.bias.as_ref().and_then(|bias| bias.chunks_exact(stack.rows).nth(expert));
    multiply_matrix(&stack.weight, expert, bias, x)
}
