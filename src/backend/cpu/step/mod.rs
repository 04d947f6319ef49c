//! Runs the nodes of a step ([`Plan`]) on the CPU: few rows by a team of threads in one parallel region ([`few`]), many
//! rows node by node ([`many`]). Both compute in f32, whatever the model's dtype is.

mod attend;
mod delta_net;
mod elementwise;
mod experts;
mod few;
mod many;
mod operand;
mod place;
#[cfg(test)]
mod tests;

use super::attention::Queries;
use super::team::Crew;
use crate::backend::step::{DeltaNet, Input, Plan};
use crate::backend::StepCaches;
use crate::{DeltaNetState, KvCache};
use candle_core::Result;

/// So many rows are a team's work: with more, products take so long that it does not matter how they are started.
const FEW: usize = 16;

/// Rows that go through all nodes together: more would take more memory and not less time.
const MANY: usize = 512;

/// The logits of the rows `wanted`; see [`crate::backend::step::run`], which has checked its arguments.
pub(in crate::backend) fn run(
    plan: &Plan,
    input: Input,
    caches: &mut StepCaches<KvCache>,
) -> Result<Vec<f32>> {
    let Input { tokens, wanted, .. } = input;
    attend::check(plan, tokens, caches)?;
    if tokens.len() <= FEW {
        return few::run(Crew::Pool, plan, input, caches);
    }
    let mut logits = Vec::new();
    for (chunk, tokens) in tokens.chunks(MANY).enumerate() {
        let rows = chunk * MANY..chunk * MANY + tokens.len();
        let wanted: Vec<usize> =
            wanted.iter().filter(|row| rows.contains(row)).map(|row| row - rows.start).collect();
        logits.extend(many::run(plan, Input { tokens, wanted: &wanted, ..input }, caches)?);
    }
    Ok(logits)
}

/// Linear attention of so many texts, and tokens of each, to their states: what projections make to `[texts, tokens, width]`.
pub(in crate::backend) fn mix_all(
    net: &DeltaNet,
    state: &DeltaNetState,
    (texts, tokens): (usize, usize),
    projected: &[Vec<f32>],
) -> Vec<f32> {
    let queries =
        |text| Queries { sequence: text, position: state.len(text), tokens, first_row: text * tokens };
    let (queries, mut out) = ((0..texts).map(queries).collect::<Vec<_>>(), Vec::new());
    delta_net::mix_rows(net, (state, &queries), projected, texts * tokens, &mut out);
    out
}
