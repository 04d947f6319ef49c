//! Which experts a token uses, and how much each counts.

use super::MoeConfig;
use crate::differentiable::softmax;
use crate::projection::projection;
use candle_core::{DType, Result, Tensor, D};
use candle_nn::Module;
use candle_quant::nn::{ExpertGroups, Experts, GroupScore, LayerWeight, Linear, Scores, VarBuilder};
use candle_quant::step::ExpertsBlock;

/// How experts are chosen by the logits of a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// What makes scores of logits. The chosen experts are those of the largest.
    pub scores: Scores,
    /// Numbers that are added to the scores for the choice, but not to what an expert counts.
    pub correction: Option<Correction>,
    /// Groups of experts, of which some are chosen first.
    pub groups: Option<ExpertGroups>,
    /// Whether the scores of the chosen experts are made to add up to 1.
    pub normalize: bool,
    /// By what they are multiplied then.
    pub scale: f64,
    /// Whether they multiply what experts see, instead of what they make of it.
    pub weighs_inputs: bool,
}

/// A tensor in a block of experts, with a number for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Correction {
    /// Its path in the block.
    pub path: &'static str,
    /// Whether it is `[1, experts]`, not `[experts]`.
    pub is_row: bool,
    /// Whether there are checkpoints without it, which compute as if it were zeros: mlx-lm drops that of some families.
    pub is_optional: bool,
}

impl Correction {
    /// Its shape.
    pub(crate) fn dims(self, experts: usize) -> Vec<usize> {
        match self.is_row {
            true => vec![1, experts],
            false => vec![experts],
        }
    }
}

impl Routing {
    /// Softmax over all experts.
    pub const fn softmax(normalize: bool) -> Self {
        Self {
            scores: Scores::Softmax,
            correction: None,
            groups: None,
            normalize,
            scale: 1.,
            weighs_inputs: false,
        }
    }

    pub(super) fn validate(&self, experts: usize) -> candle_quant::Result<()> {
        self.groups.map_or(Ok(()), |groups| groups.validate(experts))
    }
}

/// Chooses the experts of each token.
#[derive(Debug)]
pub(super) struct Router {
    logits: Linear,
    routing: Routing,
    /// `[experts]`, in f32.
    correction: Option<Tensor>,
    top_k: usize,
}

impl Router {
    /// `vb` stands at the block.
    pub fn new(hidden: usize, moe: &MoeConfig, vb: &VarBuilder) -> Result<Self> {
        let correction = |correction: Correction| -> Result<Option<Tensor>> {
            if correction.is_optional && !vb.contains_tensor(correction.path) {
                log::warn!(
                    "{}: no `{}`: the choice of experts is not corrected",
                    vb.prefix(),
                    correction.path
                );
                return Ok(None);
            }
            let stored = vb.get(correction.dims(moe.experts), correction.path)?;
            stored.flatten_all()?.to_dtype(DType::F32).map(Some)
        };
        let path = moe.router_name.split('.').fold(vb.clone(), |vb, name| vb.pp(name));
        Ok(Self {
            logits: projection(hidden, moe.experts, moe.bias, path)?,
            routing: moe.routing,
            correction: moe.routing.correction.map(correction).transpose()?.flatten(),
            top_k: moe.top_k,
        })
    }

    /// The choice in a plan, among these experts.
    pub fn of_step<'a>(&'a self, experts: &'a Experts) -> ExpertsBlock<'a> {
        let Routing { scores, groups, normalize, scale, weighs_inputs, .. } = self.routing;
        ExpertsBlock {
            scores,
            correction: self.correction.as_ref(),
            groups,
            normalize,
            scale,
            weighs_inputs,
            ..ExpertsBlock::new(&self.logits, self.top_k, experts)
        }
    }

    pub fn weight(&self) -> &LayerWeight {
        self.logits.weight()
    }

    /// Whether scores multiply what experts see.
    pub fn weighs_inputs(&self) -> bool {
        self.routing.weighs_inputs
    }

    /// Experts that a token uses.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The chosen experts of each token and how much each counts, both `[B, T, top_k]`, the largest first.
    pub fn route(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let logits = self.logits.forward(x)?.to_dtype(DType::F32)?;
        let scores = match self.routing.scores {
            Scores::Softmax => softmax(&logits)?,
            Scores::Sigmoid => candle_nn::ops::sigmoid(&logits)?,
        };
        let mut choice = scores.detach().contiguous()?;
        if let Some(correction) = &self.correction {
            choice = choice.broadcast_add(correction)?;
        }
        if let Some(groups) = self.routing.groups {
            choice = within_groups(&choice, groups)?;
        }
        let ids = choice.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, self.top_k)?.contiguous()?;
        let mut weights = scores.gather(&ids, D::Minus1)?;
        if self.routing.normalize {
            weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        }
        if self.routing.scale != 1. {
            weights = (weights * self.routing.scale)?;
        }
        Ok((ids, weights))
    }
}

/// The scores `[B, T, experts]`, those of groups that are not chosen minus infinity.
fn within_groups(scores: &Tensor, groups: ExpertGroups) -> Result<Tensor> {
    let (batch, len, experts) = scores.dims3()?;
    let by_group = scores.reshape((batch, len, groups.count, experts / groups.count))?;
    let of_groups = match groups.by {
        GroupScore::Largest => by_group.max(D::Minus1)?,
        GroupScore::TwoLargest => {
            let best = by_group.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, 2)?.contiguous()?;
            by_group.gather(&best, D::Minus1)?.sum(D::Minus1)?
        }
    };
    // The place of each group among all of them, by their scores.
    let places = of_groups.arg_sort_last_dim(false)?.arg_sort_last_dim(true)?;
    let is_chosen = places.lt(groups.chosen as u32)?.unsqueeze(D::Minus1)?.broadcast_as(by_group.shape())?;
    let none = Tensor::new(f32::NEG_INFINITY, scores.device())?.broadcast_as(by_group.shape())?;
    is_chosen.where_cond(&by_group, &none)?.reshape((batch, len, experts))
}
