//! A layer of a decoder: attention and a feed-forward block, with norms around them.

use super::attention::Visible;
use super::config::{LayerRope, Window};
use super::mixer::{Mixer, MixerBlock};
use super::mlp::Mlp;
use super::moe::SparseMlp;
use super::norm::Norm;
use super::options::ModelOptions;
use super::rope::{Positions, Turns};
use super::Config;
use candle_core::{Result, Tensor};
use candle_quant::nn::{LayerWeight, VarBuilder};
use candle_quant::step::{
    AttentionBlock, BlockOutput, DeltaNetBlock, ExpertsBlock, FeedForwardBlock, StepBuilder, StepNorm,
};
use candle_quant::Error;

#[derive(Debug)]
pub(super) struct Layer {
    /// Whether the model's window, if it has one, applies.
    pub slides: bool,
    rope: LayerRope,
    attention_norm: Option<Norm>,
    pub attention: Mixer,
    attention_out: Out,
    mlp_norm: Option<Norm>,
    pub mlp: FeedForward,
    mlp_out: Out,
    /// Whether the feed-forward block sees what attention sees.
    is_parallel: bool,
}

#[derive(Debug)]
pub(super) enum FeedForward {
    Dense(Box<Mlp>),
    Sparse(Box<SparseMlp>),
}

/// What becomes of the output of a block before it is added.
#[derive(Debug)]
struct Out {
    norm: Option<Norm>,
    scale: f64,
}

impl Out {
    /// `x` and the output of a block, which adds it itself where nothing is between them.
    fn add(&self, x: &Tensor, block: impl FnOnce(Option<&Tensor>) -> Result<Tensor>) -> Result<Tensor> {
        if self.norm.is_none() && self.scale == 1. {
            return block(Some(x));
        }
        let y = block(None)?;
        let y = match &self.norm {
            Some(norm) => norm.forward(&y)?,
            None => y,
        };
        let y = if self.scale == 1. { y } else { (y * self.scale)? };
        x + y
    }

    /// What becomes of the output of a block, which is summed as that says.
    fn of_step<'a>(&'a self, block: BlockOutput<'a>) -> candle_quant::Result<BlockOutput<'a>> {
        Ok(BlockOutput { norm: of_step(&self.norm)?, scale: self.scale, ..block })
    }
}

impl FeedForward {
    /// What is made of `x`, added to `residual` if there is one.
    fn forward(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(x, residual),
            Self::Sparse(mlp) => mlp.forward(x, residual),
        }
    }
}

impl Layer {
    /// `vb` stands at the layer.
    pub fn new(config: &Config, index: usize, options: &ModelOptions, vb: VarBuilder) -> Result<Self> {
        let norm = |name: Option<&str>| {
            name.map(|name| Norm::new(config.norm, config.hidden_size, config.norm_eps, vb.pp(name)))
                .transpose()
        };
        let out = |name| Ok::<_, candle_core::Error>(Out { norm: norm(name)?, scale: config.residual_scale });
        let names = &config.names;
        Ok(Self {
            slides: config.slides(index),
            rope: config.rope_of(index),
            attention_norm: norm(names.attention_norm)?,
            attention: Mixer::new(config, index, &options.cache, &vb)?,
            attention_out: out(names.attention_out_norm)?,
            mlp_norm: norm(names.mlp_norm)?,
            mlp: match config.moe.as_ref().filter(|moe| moe.is_sparse(index)) {
                Some(moe) => FeedForward::Sparse(Box::new(SparseMlp::new(config, moe, vb.clone())?)),
                None => FeedForward::Dense(Box::new(Mlp::new(config, vb.pp(names.mlp))?)),
            },
            mlp_out: out(names.mlp_out_norm)?,
            is_parallel: config.parallel_blocks,
        })
    }

    /// The layer's output for the tokens behind those in the cache.
    pub fn forward(
        &mut self,
        x: &Tensor,
        positions: &Positions,
        visible: Option<&Visible>,
    ) -> Result<Tensor> {
        let seen = normalized(self.attention_norm.as_ref(), x)?;
        let rope = self.rope;
        let attention = &mut self.attention;
        let y = self.attention_out.add(x, |x| attention.forward(&seen, x, (positions, rope), visible))?;
        self.feed_forward(&seen, &y)
    }

    /// That of whole texts, without the cache, with gradients.
    pub fn forward_whole(&self, x: &Tensor, positions: &Positions, window: Option<Window>) -> Result<Tensor> {
        let seen = normalized(self.attention_norm.as_ref(), x)?;
        let at = (positions, self.rope);
        let y = self.attention_out.add(x, |x| self.attention.forward_whole(&seen, x, at, window))?;
        self.feed_forward(&seen, &y)
    }

    /// `seen` is what attention saw, `y` what has become of the layer's input.
    fn feed_forward(&self, seen: &Tensor, y: &Tensor) -> Result<Tensor> {
        let seen = match self.is_parallel {
            true => seen.clone(),
            false => normalized(self.mlp_norm.as_ref(), y)?,
        };
        self.mlp_out.add(y, |y| self.mlp.forward(&seen, y))
    }

    /// Adds the layer to a plan.
    ///
    /// # Errors
    /// If it has something that plans do not have.
    pub fn plan(&self, plan: &mut StepBuilder, turns: &Turns) -> candle_quant::Result<()> {
        let turn = turns.of_step(self.rope);
        let attention =
            self.attention.block(&turn, self.rope).ok_or_else(|| unplanned("another attention"))?;
        let norm = of_step(&self.attention_norm)?;
        let of_mlp = if self.is_parallel { norm } else { of_step(&self.mlp_norm)? };
        let attention = match attention {
            MixerBlock::Attention(block) => {
                let out = self.attention_out.of_step(block.out)?;
                AttentionBlock { norm, out, ..block }
            }
            MixerBlock::Linear(_) if self.is_parallel => {
                return Err(unplanned("linear attention beside a feed-forward block"))
            }
            MixerBlock::Linear(block) => {
                let out = self.attention_out.of_step(block.out)?;
                plan.delta_net(DeltaNetBlock { norm, out, ..block })?;
                return self.plan_feed_forward(plan, of_mlp);
            }
        };
        match (&self.mlp, self.is_parallel) {
            (FeedForward::Dense(mlp), true) => plan.parallel(attention, self.dense_block(mlp, of_mlp)?),
            (FeedForward::Sparse(_), true) => Err(unplanned("experts beside attention")),
            (_, false) => {
                plan.attention(attention)?;
                self.plan_feed_forward(plan, of_mlp)
            }
        }
    }

    fn dense_block<'a>(
        &'a self,
        mlp: &'a Mlp,
        norm: Option<StepNorm<'a>>,
    ) -> candle_quant::Result<FeedForwardBlock<'a>> {
        let mlp = mlp.block().ok_or_else(|| unplanned("a rank's part of a feed-forward block"))?;
        Ok(FeedForwardBlock { norm, out: self.mlp_out.of_step(mlp.out)?, ..mlp })
    }

    fn plan_feed_forward(&self, plan: &mut StepBuilder, norm: Option<StepNorm>) -> candle_quant::Result<()> {
        match &self.mlp {
            FeedForward::Dense(mlp) => plan.feed_forward(self.dense_block(mlp, norm)?),
            FeedForward::Sparse(experts) => {
                let experts = experts.block().ok_or_else(|| unplanned("a rank's part of experts"))?;
                let out = self.mlp_out.of_step(experts.out)?;
                plan.experts(ExpertsBlock { norm, out, ..experts })
            }
        }
    }

    pub fn weights(&self) -> Vec<LayerWeight> {
        let mut weights = self.attention.weights();
        match &self.mlp {
            FeedForward::Dense(mlp) => weights.extend(mlp.weights()),
            FeedForward::Sparse(mlp) => weights.extend(mlp.weights()),
        }
        weights
    }
}

fn normalized(norm: Option<&Norm>, x: &Tensor) -> Result<Tensor> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x.clone()),
    }
}

/// A norm in a plan.
fn of_step(norm: &Option<Norm>) -> candle_quant::Result<Option<StepNorm<'_>>> {
    let part = || unplanned("a rank's part of a norm");
    norm.as_ref().map(|norm| norm.of_step().ok_or_else(part)).transpose()
}

/// What makes a model run layer by layer.
pub(super) fn unplanned(what: &str) -> Error {
    Error::Unsupported {
        what: format!("{what} in a step plan"),
        remedy: "call the layers one by one".to_string(),
    }
}
