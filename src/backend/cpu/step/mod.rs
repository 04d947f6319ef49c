//! Runs the nodes of a step ([`Plan`]) on the CPU: few rows by a team of threads in one parallel region ([`few`]), many
//! rows node by node ([`many`]). Both compute in f32, whatever the model's dtype is.

mod attend;
mod elementwise;
mod few;
mod many;
#[cfg(test)]
mod tests;

use super::team::Crew;
use crate::backend::step::{Plan, StepToken, Updates};
use crate::KvCache;
use candle_core::Result;

/// So many rows are a team's work: with more, products take so long that it does not matter how they are started.
const FEW: usize = 16;

/// Rows that go through all nodes together: more would take more memory and not less time.
const MANY: usize = 512;

/// The logits of the rows `wanted`; see [`crate::backend::step::run`], which has checked its arguments.
pub(in crate::backend) fn run(
    plan: &Plan,
    updates: &Updates,
    tokens: &[StepToken],
    caches: &mut [&mut KvCache],
    wanted: &[usize],
) -> Result<Vec<f32>> {
    attend::check(plan, tokens, caches)?;
    if tokens.len() <= FEW {
        return few::run(Crew::Pool, plan, updates, tokens, caches, wanted);
    }
    let mut logits = Vec::new();
    for (chunk, tokens) in tokens.chunks(MANY).enumerate() {
        let rows = chunk * MANY..chunk * MANY + tokens.len();
        let wanted: Vec<usize> =
            wanted.iter().filter(|row| rows.contains(row)).map(|row| row - rows.start).collect();
        logits.extend(many::run(plan, updates, tokens, caches, &wanted)?);
    }
    Ok(logits)
}

/// Cosines and sines of the positions of some tokens, times the plan's factor. Angles are f32 products, as in the
/// implementations that models were trained with.
struct Angles {
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    fn new(plan: &Plan, tokens: &[StepToken]) -> Self {
        let angles = tokens.iter().flat_map(|token| {
            plan.inverse_frequencies.iter().map(|frequency| (token.position as f32 * frequency).sin_cos())
        });
        let (sin, cos) =
            angles.map(|(sin, cos)| (sin * plan.attention_factor, cos * plan.attention_factor)).unzip();
        Self { pairs: plan.inverse_frequencies.len(), cos, sin }
    }

    /// How many positions there are.
    fn rows(&self) -> usize {
        self.cos.len() / self.pairs.max(1)
    }

    /// Those of a row.
    fn of(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.pairs..(row + 1) * self.pairs;
        (self.cos.get(range.clone()).unwrap_or_default(), self.sin.get(range).unwrap_or_default())
    }
}
