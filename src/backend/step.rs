//! A decoder as data: what a step over a few or many tokens computes, node by node. It is built once, and run for every
//! position: what changes from step to step are the tokens and the caches.

use super::low_rank::Update;
use crate::{Error, KvCache, QuantTensor};
use std::sync::Arc;

/// A root-mean-square norm.
#[derive(Debug)]
pub(crate) struct Norm {
    pub(crate) weight: Vec<f32>,
    pub(crate) eps: f32,
}

/// A packed weight `[N, K]` on the CPU, and what is added to its outputs.
#[derive(Debug)]
pub(crate) struct Projection {
    pub(crate) weight: QuantTensor,
    /// N numbers.
    pub(crate) bias: Option<Vec<f32>>,
    /// Outputs, N.
    pub(crate) rows: usize,
    /// Inputs, K.
    pub(crate) k: usize,
    /// Its number in the plan.
    pub(crate) index: usize,
}

/// The active adapters of projections, by their numbers; those beyond the last have none.
pub(crate) type Updates = [Vec<Arc<Update>>];

/// What attention does with queries, keys and values, for whole heads.
#[derive(Debug)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) q_norm: Option<Norm>,
    pub(crate) k_norm: Option<Norm>,
    /// A logit for each query head, beside those of the keys.
    pub(crate) sinks: Option<Vec<f32>>,
    /// Which of the caches has its keys and values.
    pub(crate) layer: usize,
}

/// One piece of a step. `hidden` is the residual stream, which all rows of a step have in f32.
#[derive(Debug)]
pub(crate) enum Node {
    /// hidden = the tokens' rows of the table.
    Embed(QuantTensor),
    /// queries, keys, values = each projection of norm(hidden).
    Queries(Norm, [Projection; 3]),
    /// Rotates queries and keys, appends keys and values to the cache; attended = what queries see there.
    Attend(Heads),
    /// hidden += projection of attended.
    AddAttended(Projection),
    /// inner = silu(gate) * up of norm(hidden).
    Gate(Norm, [Projection; 2]),
    /// hidden += projection of inner.
    AddInner(Projection),
    /// logits = projection of norm(hidden), of the rows that are asked for.
    Logits(Norm, Projection),
}

/// A whole decoder.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) nodes: Vec<Node>,
    pub(crate) hidden: usize,
    /// Rows of the embedding table.
    pub(crate) vocabulary: usize,
    /// Radians by which a position turns each pair of elements of a head.
    pub(crate) inverse_frequencies: Vec<f32>,
    /// By what rotated queries and keys are multiplied.
    pub(crate) attention_factor: f32,
}

/// A token of a step. Those of one sequence come one after another, at positions one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepToken {
    /// Its number in the vocabulary.
    pub id: u32,
    /// Which text of the caches it continues.
    pub sequence: usize,
    /// Its position there.
    pub position: usize,
}

/// The logits `[rows, outputs of the head]` of the rows `wanted` of the tokens, with adapters.
pub(crate) fn run(
    plan: &Plan,
    updates: &Updates,
    tokens: &[StepToken],
    caches: &mut [&mut KvCache],
    wanted: &[usize],
) -> candle_core::Result<Vec<f32>> {
    if tokens.is_empty() {
        return Err(Error::mismatch("tokens", "at least one", "none").into());
    }
    if let Some(token) = tokens.iter().find(|token| token.id as usize >= plan.vocabulary) {
        let expected = format!("each below {}, the size of the vocabulary", plan.vocabulary);
        return Err(Error::mismatch("ids", expected, token.id.to_string()).into());
    }
    if let Some(row) = wanted.iter().find(|row| **row >= tokens.len()) {
        return Err(Error::mismatch(
            "rows of logits",
            format!("each below {}", tokens.len()),
            row.to_string(),
        )
        .into());
    }
    if let Some((before, after)) =
        wanted.iter().zip(wanted.iter().skip(1)).find(|(before, after)| before >= after)
    {
        let found = format!("{after} behind {before}");
        return Err(Error::mismatch("rows of logits", "each once, in ascending order", found).into());
    }
    super::cpu::step::run(plan, updates, tokens, caches, wanted)
}
