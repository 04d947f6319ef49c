//! What the layers of a plan are.

use crate::backend::step::Turn;
use crate::backend::{ExpertGroups, Scores};
use crate::nn::parallel::{PartialSum, VocabularyShare};
use crate::nn::Experts;
use crate::Linear;
use candle_core::Tensor;
use candle_nn::{Activation, LayerNorm, RmsNorm};

/// A norm over the last dimension: `(x - mean(x)) / sqrt(mean square + eps) * weight + bias`, or without what it does not have.
/// Made of candle's norms by `into`.
#[derive(Clone, Copy, Debug)]
pub struct StepNorm<'a> {
    /// A factor for each element.
    pub weight: Option<&'a Tensor>,
    /// What is added to each.
    pub bias: Option<&'a Tensor>,
    /// Whether the mean is subtracted, as layer norms do; RMS norms do not.
    pub subtracts_mean: bool,
    /// Added to the mean square.
    pub eps: f64,
}

impl<'a> From<&'a RmsNorm> for StepNorm<'a> {
    fn from(norm: &'a RmsNorm) -> Self {
        Self { weight: Some(norm.weight()), bias: None, subtracts_mean: false, eps: norm.eps() }
    }
}

impl<'a> From<&'a LayerNorm> for StepNorm<'a> {
    fn from(norm: &'a LayerNorm) -> Self {
        let subtracts_mean = norm.remove_mean();
        Self { weight: Some(norm.weight()), bias: norm.bias(), subtracts_mean, eps: norm.eps() }
    }
}

/// What becomes of the output of a block before it is added to what the layer was given; nothing by default.
#[derive(Clone, Copy, Debug)]
pub struct BlockOutput<'a> {
    /// How it is summed, if this rank has a part of the block's last weight.
    pub sum: Option<PartialSum<'a>>,
    /// Its norm.
    pub norm: Option<StepNorm<'a>>,
    /// By what it is multiplied, behind the norm.
    pub scale: f64,
}

impl Default for BlockOutput<'_> {
    fn default() -> Self {
        Self { sum: None, norm: None, scale: 1. }
    }
}

/// The attention block of a layer. [`new`](Self::new) has what all have.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBlock<'a> {
    /// Of the block's input.
    pub norm: Option<StepNorm<'a>>,
    /// Hidden state to queries, `[heads * head_dim, hidden]`; with gates `[heads * 2 * head_dim, hidden]`.
    pub q_proj: &'a Linear,
    /// Hidden state to keys, `[kv_heads * head_dim, hidden]`.
    pub k_proj: &'a Linear,
    /// Hidden state to values, as many as keys.
    pub v_proj: &'a Linear,
    /// What queries see to the hidden state, `[hidden, heads * head_dim]`.
    pub o_proj: &'a Linear,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether each query has a gate behind it, and what it sees is multiplied by the gate's sigmoid.
    pub has_gate: bool,
    /// Queries, keys and values are cut at this number and its negative.
    pub clip: Option<f64>,
    /// Of queries: of each head by a weight `[head_dim]` or `[heads, head_dim]`; of all heads of a token together by one of
    /// `[heads * head_dim]`.
    pub q_norm: Option<StepNorm<'a>>,
    /// Of keys, likewise.
    pub k_norm: Option<StepNorm<'a>>,
    /// What positions do to queries and keys, if anything.
    pub turn: Option<&'a Turn>,
    /// Whether queries and keys are normalized behind the turn; else before it. Those of all heads together are not.
    pub turns_first: bool,
    /// By what products of queries and keys are multiplied; `1 / sqrt(head_dim)` without it.
    pub scale: Option<f64>,
    /// Where these products end: `softcap * tanh(product / softcap)`.
    pub softcap: Option<f64>,
    /// A logit for each query head beside those of the keys, `[heads]`.
    pub sinks: Option<&'a Tensor>,
    /// What becomes of the output.
    pub out: BlockOutput<'a>,
}

impl<'a> AttentionBlock<'a> {
    /// Projections to queries, keys and values, and of what queries see, for heads of so many elements. Has no norms, and
    /// does not know positions.
    pub fn new(projections: [&'a Linear; 4], head_dim: usize) -> Self {
        let [q_proj, k_proj, v_proj, o_proj] = projections;
        Self {
            norm: None,
            q_proj,
            k_proj,
            v_proj,
            o_proj,
            head_dim,
            has_gate: false,
            clip: None,
            q_norm: None,
            k_norm: None,
            turn: None,
            turns_first: false,
            scale: None,
            softcap: None,
            sinks: None,
            out: BlockOutput::default(),
        }
    }
}

/// The feed-forward block of a layer: `down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`.
/// [`new`](Self::new) has what most have.
#[derive(Clone, Copy, Debug)]
pub struct FeedForwardBlock<'a> {
    /// Of the block's input.
    pub norm: Option<StepNorm<'a>>,
    /// `[inner, hidden]`.
    pub gate_proj: Option<&'a Linear>,
    /// `[inner, hidden]`.
    pub up_proj: &'a Linear,
    /// `[hidden, inner]`.
    pub down_proj: &'a Linear,
    /// SiLU, GELU, its approximation by tanh, or the square of ReLU.
    pub activation: Activation,
    /// What becomes of the output.
    pub out: BlockOutput<'a>,
}

impl<'a> FeedForwardBlock<'a> {
    /// A block with SiLU, without a norm.
    pub fn new(gate_proj: Option<&'a Linear>, up_proj: &'a Linear, down_proj: &'a Linear) -> Self {
        let (activation, out) = (Activation::Silu, BlockOutput::default());
        Self { norm: None, gate_proj, up_proj, down_proj, activation, out }
    }
}

/// The feed-forward block of a layer in which each token uses some of many experts: those of the largest scores, of several
/// alike the first. [`new`](Self::new) has what most have.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::nn::{ExpertStack, Experts, Gating};
/// use candle_quant::step::{ExpertsBlock, HeadBlock, StepBuilder, StepToken};
/// use candle_quant::{Activation, Embedding, KvCache, Linear, QuantFormat, QuantTensor, RmsNorm};
///
/// # fn main() -> candle_quant::Result<()> {
/// let random = |dims: &[usize]| Tensor::randn(0f32, 0.1, dims, &Device::Cpu);
/// let packed = |dims: &[usize]| QuantTensor::quantize(&random(dims)?, QuantFormat::MXFP4);
/// let stack = |n, k| ExpertStack::from_quant(packed(&[8, n, k])?, None);
/// let gating = Gating::Plain(Activation::Silu);
/// let experts = Experts::new(stack(96, 64)?, stack(96, 64)?, stack(64, 96)?, gating)?;
/// let router = Linear::new(random(&[8, 64])?, None);
/// let norm = RmsNorm::new(Tensor::ones(64, DType::F32, &Device::Cpu)?, 1e-6);
/// let table = Embedding::from_quant(packed(&[32, 64])?, DType::F32)?;
///
/// let mut plan = StepBuilder::new(&table, 1.)?;
/// // Two of eight experts for each token.
/// plan.experts(ExpertsBlock { norm: Some((&norm).into()), ..ExpertsBlock::new(&router, 2, &experts) })?;
/// let plan = plan.head(HeadBlock::new(&norm, &table.as_linear()))?;
/// // Where there is no attention, there are no caches.
/// let token = StepToken { id: 3, sequence: 0, position: 0 };
/// let logits = plan.run(&[token], &mut [] as &mut [KvCache], &[0])?;
/// assert_eq!(logits.dims(), [1, 32]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ExpertsBlock<'a> {
    /// Of the block's input.
    pub norm: Option<StepNorm<'a>>,
    /// Hidden state to a logit for each expert, `[experts, hidden]`, packed or dense.
    pub router: &'a Linear,
    /// What makes scores of logits.
    pub scores: Scores,
    /// What is added to the scores for the choice, but not to what an expert counts: `[experts]`.
    pub correction: Option<&'a Tensor>,
    /// Groups of experts, of which some are chosen first.
    pub groups: Option<ExpertGroups>,
    /// How many experts a token uses.
    pub top_k: usize,
    /// Whether the scores of the chosen experts are made to add up to 1.
    pub normalize: bool,
    /// By what they are multiplied then.
    pub scale: f64,
    /// Whether they multiply what experts see, instead of what they make of it.
    pub weighs_inputs: bool,
    /// Packed stacks.
    pub experts: &'a Experts,
    /// An expert that all tokens use, between the norm of the block and its output: it has none of its own.
    pub shared: Option<FeedForwardBlock<'a>>,
    /// Hidden state to a logit, `[1, hidden]`, packed or dense: what the shared expert makes is multiplied by its sigmoid.
    pub shared_gate: Option<&'a Linear>,
    /// What becomes of the output.
    pub out: BlockOutput<'a>,
}

impl<'a> ExpertsBlock<'a> {
    /// A block whose scores are a softmax over all experts, those of the chosen ones made to add up to 1.
    pub fn new(router: &'a Linear, top_k: usize, experts: &'a Experts) -> Self {
        Self {
            norm: None,
            router,
            scores: Scores::Softmax,
            correction: None,
            groups: None,
            top_k,
            normalize: true,
            scale: 1.,
            weighs_inputs: false,
            experts,
            shared: None,
            shared_gate: None,
            out: BlockOutput::default(),
        }
    }
}

/// What comes behind the layers.
#[derive(Clone, Copy, Debug)]
pub struct HeadBlock<'a> {
    /// Of what the last layer gives.
    pub norm: Option<StepNorm<'a>>,
    /// Hidden state to logits, `[outputs, hidden]`.
    pub head: &'a Linear,
    /// By what logits are multiplied.
    pub scale: f64,
    /// Where logits end: `softcap * tanh(logit / softcap)`.
    pub softcap: Option<f64>,
    /// Whose logits these are, if this rank has a part of the head.
    pub share: Option<&'a VocabularyShare>,
}

impl<'a> HeadBlock<'a> {
    /// Logits as they come.
    pub fn new(norm: impl Into<StepNorm<'a>>, head: &'a Linear) -> Self {
        Self { norm: Some(norm.into()), head, scale: 1., softcap: None, share: None }
    }
}
