//! A decoder as data: what a step over a few or many tokens computes, node by node. It is built once, and run for every
//! position: what changes from step to step are the tokens and the caches.

use super::low_rank::Update;
use super::routing::Routing;
use super::StepCaches;
use crate::distributed::Rank;
use crate::tensor::DeviceRows;
use crate::{DeltaNetConfig, Error, KvCache, QuantTensor};
use candle_core::Tensor;
use std::sync::Arc;

/// `(x - mean(x)) / root of its mean square * weight + bias`, or without what it does not have.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) weight: Option<Vec<f32>>,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) subtracts_mean: bool,
    pub(crate) eps: f32,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Norm {
    /// Whether numbers are divided by a length and multiplied, no more: outputs of a projection may be divided instead of its inputs.
    pub(crate) fn is_rms(&self) -> bool {
        !self.subtracts_mean && self.bias.is_none()
    }
}

/// A weight `[N, K]`.
#[derive(Clone, Debug)]
pub(crate) enum Matrix {
    Packed(QuantTensor),
    /// Of F32, F16 or BF16 numbers, contiguous.
    Dense(Tensor),
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Matrix {
    pub(crate) fn packed(&self) -> Option<&QuantTensor> {
        match self {
            Self::Packed(weight) => Some(weight),
            Self::Dense(_) => None,
        }
    }

    pub(crate) fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Packed(_) => None,
            Self::Dense(weight) => Some(weight),
        }
    }
}

/// A weight `[N, K]`, and what is added to its outputs.
#[derive(Debug)]
pub(crate) struct Projection {
    pub(crate) weight: Matrix,
    /// N numbers.
    pub(crate) bias: Option<Vec<f32>>,
    /// Outputs, N.
    pub(crate) rows: usize,
    /// Inputs, K.
    pub(crate) k: usize,
    /// The input that each column of the weight reads, or one beyond all for none; none if they are in order. One order of several
    /// projections is the same here.
    pub(crate) columns: Option<Arc<[u32]>>,
    /// Its number in the plan.
    pub(crate) index: usize,
}

/// Whether two orders of columns are one: a plan has each but once.
pub(crate) fn same_order(a: Option<&Arc<[u32]>>, b: Option<&Arc<[u32]>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// The active adapters of projections, by their numbers; those beyond the last have none.
pub(crate) type Updates = [Vec<Arc<Update>>];

/// A norm of queries or keys. Its numbers are those of one head, for all, or those of all heads.
#[derive(Debug)]
pub(crate) struct HeadNorm {
    pub(crate) norm: Norm,
    /// Whether all heads of a token are normalized together; else each by itself.
    pub(crate) over_all: bool,
}

/// What attention does with queries, keys and values, for whole heads.
#[derive(Debug)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) q_norm: Option<HeadNorm>,
    pub(crate) k_norm: Option<HeadNorm>,
    /// Whether each query has a gate behind it, through whose sigmoid it lets what it sees.
    pub(crate) has_gate: bool,
    /// Whether norms come behind the turn: those of each head alone, then.
    pub(crate) turns_first: bool,
    /// Which of the plan's turns.
    pub(crate) turn: usize,
    /// By what products of queries and keys are multiplied.
    pub(crate) scale: f32,
    /// Where these products end: `softcap * tanh(product / softcap)`.
    pub(crate) softcap: Option<f32>,
    /// A logit for each query head, beside those of the keys.
    pub(crate) sinks: Option<Vec<f32>>,
    /// Which of the caches has its keys and values.
    pub(crate) layer: usize,
}

impl Heads {
    /// Numbers between one query and the next.
    pub(crate) fn query_stride(&self) -> usize {
        self.head_dim * (1 + usize::from(self.has_gate))
    }
}

/// Where the heads of something are among what projections make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    /// Which of the projections.
    pub(crate) projection: usize,
    /// Numbers that it makes.
    pub(crate) width: usize,
    /// Where the first head of keys has its own, and where the next one does from there.
    pub(crate) start: usize,
    pub(crate) stride: usize,
}

/// Where linear attention finds what it is given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaLanes {
    pub(crate) q: Lane,
    pub(crate) k: Lane,
    /// Of all heads of values that share a head of keys, as what follows.
    pub(crate) v: Lane,
    pub(crate) gate: Lane,
    pub(crate) decay: Lane,
    pub(crate) beta: Lane,
}

/// Added to the square of the length that queries and keys of linear attention are divided by: no number of any config.
pub(crate) const UNIT_EPS: f64 = 1e-6;

/// Linear attention, for whole heads: see [`ops::gated_delta_net`](crate::ops::gated_delta_net).
#[derive(Debug)]
pub(crate) struct DeltaNet {
    pub(crate) config: DeltaNetConfig,
    pub(crate) lanes: DeltaLanes,
    /// `[kernel, channels]`.
    pub(crate) convolution: Vec<f32>,
    /// How fast heads of values forget, and what is added to their gates.
    pub(crate) rates: Vec<f32>,
    pub(crate) gate_bias: Vec<f32>,
    /// Of a head of values.
    pub(crate) norm: Norm,
    /// Whether outputs are the first head of values of each head of keys, then the second of each, and so on.
    pub(crate) tiled: bool,
    /// Which of the states is its own.
    pub(crate) layer: usize,
}

impl DeltaNet {
    /// Where a head of values stands among outputs.
    pub(crate) fn place(&self, head: usize) -> usize {
        let shared = self.config.shared().max(1);
        match self.tiled {
            true => head % shared * self.config.key_heads + head / shared,
            false => head,
        }
    }

    /// Numbers of outputs of a token.
    pub(crate) fn width(&self) -> usize {
        self.config.value_heads * self.config.value_dim
    }
}

/// What is between the two projections of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// x times the distribution function of a normal variable.
    Gelu,
    /// The same, approximated by tanh.
    GeluTanh,
    /// The square of positive numbers.
    Relu2,
}

/// What becomes of the output of a block: `hidden += scale * norm(output)`.
#[derive(Debug)]
pub(crate) struct Out {
    /// Whether it is a part, and those of all ranks are summed first.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) is_part: bool,
    pub(crate) norm: Option<Norm>,
    pub(crate) scale: f32,
}

/// A projection of all experts: a packed stack `[E, N, K]`, and what is added to outputs, `[E, N]`.
#[derive(Debug)]
pub(crate) struct StackProjection {
    pub(crate) weight: QuantTensor,
    pub(crate) bias: Option<Vec<f32>>,
    /// Outputs of an expert, N.
    pub(crate) rows: usize,
    /// Inputs, K.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) k: usize,
}

/// What makes logits: of experts, or how much a shared one counts.
#[derive(Debug)]
pub(crate) enum Router {
    Packed(Projection),
    /// `[E, hidden]` on a device, `[hidden, E]` in f32 on the CPU; and what is added to outputs.
    Dense {
        weight: Tensor,
        bias: Option<Vec<f32>>,
    },
}

/// What joins the gate and up projections of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ExpertGating {
    Activation(Activation),
    /// [`Gating::Clamped`](super::Gating::Clamped).
    Clamped {
        alpha: f32,
        limit: f32,
    },
}

/// How much the expert counts that all tokens use: what the node before has left in `inner` is multiplied by the sigmoid of one
/// logit of norm(hidden).
#[derive(Debug)]
pub(crate) struct SharedGate {
    pub(crate) router: Router,
    /// Numbers of a row of `inner`.
    pub(crate) width: usize,
}

/// A block of experts.
#[derive(Debug)]
pub(crate) struct ExpertBlock {
    pub(crate) norm: Option<Norm>,
    pub(crate) router: Router,
    pub(crate) routing: Routing,
    /// Whether what an expert counts multiplies what it sees, instead of what it makes of that.
    pub(crate) weighs_inputs: bool,
    pub(crate) shared_gate: Option<SharedGate>,
    pub(crate) gate: StackProjection,
    pub(crate) up: StackProjection,
    pub(crate) gating: ExpertGating,
    pub(crate) down: StackProjection,
    pub(crate) out: Out,
}

/// Projections of one node: parts of queries, keys and values of linear attention, and three more.
pub(crate) const MOST_PROJECTIONS: usize = 6;

/// One piece of a step. `hidden` is the residual stream, which all rows of a step have in f32; what has no norm takes it as it
/// is.
#[derive(Debug)]
pub(crate) enum Node {
    /// hidden = the tokens' rows of the table, times a number.
    Embed {
        table: Matrix,
        factor: f32,
        /// The token of the first row, if other ranks have those of other tokens.
        #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
        first_token: Option<usize>,
    },
    /// projected = each projection of norm(hidden), [`MOST_PROJECTIONS`] at most, cut at a number and its negative if there is one.
    Project(Option<Norm>, Vec<Projection>, Option<f32>),
    /// Turns queries and keys, appends keys and values to the cache, all three projected; attended = what queries see there.
    Attend(Heads),
    /// Changes a state by what is projected; attended = what it gives.
    DeltaNet(Box<DeltaNet>),
    /// hidden += what becomes of the projection of attended.
    AddAttended(Projection, Out),
    /// inner = activation(gate) * up of norm(hidden); activation(up) without a gate.
    Inner { norm: Option<Norm>, gate: Option<Projection>, up: Projection, activation: Activation },
    /// hidden += what becomes of the projection of inner.
    AddInner(Projection, Out),
    /// hidden += what becomes of the sum of what the chosen experts make of norm(hidden); inner may be multiplied.
    Experts(Box<ExpertBlock>),
    /// logits = scale * projection of norm(hidden), of the rows that are asked for; ended by `softcap` as in [`Heads`].
    Logits {
        norm: Option<Norm>,
        head: Projection,
        scale: f32,
        softcap: Option<f32>,
        /// How many each rank has, if this one has a part.
        parts: Option<Vec<usize>>,
    },
}

impl Node {
    /// Its projections, but those of experts.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn projections(&self) -> Vec<&Projection> {
        match self {
            Self::Project(_, projections, _) => projections.iter().collect(),
            Self::AddAttended(projection, _) | Self::AddInner(projection, _) => vec![projection],
            Self::Inner { gate, up, .. } => gate.iter().chain([up]).collect(),
            Self::Logits { head, .. } => vec![head],
            Self::Embed { .. } | Self::Attend(_) | Self::DeltaNet(_) | Self::Experts(_) => Vec::new(),
        }
    }
}

/// A whole decoder.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) nodes: Vec<Node>,
    pub(crate) hidden: usize,
    /// Rows of the embedding table, of all ranks together.
    pub(crate) vocabulary: usize,
    /// This one of several, if it has a part of the plan.
    pub(crate) rank: Option<Rank>,
    /// Those of all layers, each once.
    pub(crate) turns: Vec<Turn>,
}

impl Plan {
    /// Numbers of logits of a token, of all ranks together.
    pub(crate) fn outputs(&self) -> usize {
        match self.nodes.last() {
            Some(Node::Logits { parts: Some(parts), .. }) => parts.iter().sum(),
            Some(Node::Logits { head, .. }) => head.rows,
            _ => 0,
        }
    }
}

/// Where a sequence stands that has no token in a step on a device.
pub(crate) const NO_POSITION: u32 = u32::MAX;

/// The memory of a layer's keys and values on a device, and what queries see of it.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct CacheRows {
    pub(crate) rows: DeviceRows,
    pub(crate) window: Option<usize>,
    pub(crate) is_chunked: bool,
}

/// The state of a layer on a device.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct StateRows {
    pub(crate) config: DeltaNetConfig,
    /// As [`DeltaNetState::numbers`](crate::DeltaNetState) has them.
    pub(crate) numbers: Tensor,
}

/// What the layers of a plan have on a device, each kind in their order.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct StepMemory {
    pub(crate) caches: Vec<CacheRows>,
    pub(crate) states: Vec<StateRows>,
}

/// Whether the steps of a device are CUDA graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) enum GraphMode {
    /// Where that is possible.
    Auto,
    /// It is an error where it is not.
    On,
    /// Never: launches come one by one.
    Eager,
}

/// What the position of a token does to its queries and keys; nothing by default.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Radians by which a position turns each pair of a head's first elements; the others stay as they are.
    pub inverse_frequencies: Vec<f32>,
    /// Those in long texts, if they are others there: see [`StepPlan::of_long_texts`](crate::step::StepPlan::of_long_texts).
    pub of_long_texts: Option<Vec<f32>>,
    /// Whether neighbours are pairs; else the first half of the elements that turn pairs with the second. Behind the turn,
    /// neighbours stand in the two halves, too, in queries as in keys: products are the same.
    pub interleaved: bool,
    /// By what turned elements are multiplied.
    pub factor: f32,
    /// How queries grow behind turn and norm, if they do.
    pub query_growth: Option<QueryGrowth>,
}

impl Default for Turn {
    fn default() -> Self {
        let inverse_frequencies = Vec::new();
        Self { inverse_frequencies, of_long_texts: None, interleaved: false, factor: 1., query_growth: None }
    }
}

impl Turn {
    /// Those in long texts, or in others.
    pub(crate) fn frequencies(&self, is_long: bool) -> &[f32] {
        self.of_long_texts.as_ref().filter(|_| is_long).unwrap_or(&self.inverse_frequencies)
    }
}

/// Queries are multiplied by `1 + beta ln(1 + floor((position + first) / period))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// By how much they grow.
    pub beta: f64,
    /// After how many tokens.
    pub period: usize,
    /// What the first position counts as.
    pub first: usize,
}

impl QueryGrowth {
    /// By what a query at a position is multiplied.
    pub fn factor(&self, position: usize) -> f32 {
        let periods = position.saturating_add(self.first) / self.period.max(1);
        (1. + self.beta * (periods as f64).ln_1p()) as f32
    }
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

/// What a plan is run with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    pub(crate) tokens: &'a [StepToken],
    /// The rows of the tokens whose logits are asked for, in ascending order.
    pub(crate) wanted: &'a [usize],
    pub(crate) updates: &'a Updates,
    /// Whether turns are those of long texts.
    pub(crate) is_long: bool,
}

/// The logits `[rows, outputs of the head]` of the rows that are wanted.
pub(crate) fn run(
    plan: &Plan,
    input: Input,
    caches: &mut StepCaches<KvCache>,
) -> candle_core::Result<Vec<f32>> {
    let Input { tokens, wanted, .. } = input;
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
    super::cpu::step::run(plan, input, caches)
}
