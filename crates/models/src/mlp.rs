//! Dense feed-forward blocks.

use super::projection::{columns_of, rows_of};
use super::sharding::inner_shares;
use super::Config;
use candle_core::{Result, Tensor};
use candle_nn::{Activation, Module};
use candle_quant::nn::{swiglu, LayerWeight, Linear, VarBuilder};
use candle_quant::parallel::RowParallel;
use candle_quant::step::{BlockOutput, FeedForwardBlock};

/// `down(act(gate(x)) * up(x))`, or without a gate `down(act(up(x)))`.
#[derive(Debug)]
pub(super) struct Mlp {
    gate_proj: Option<Linear>,
    up_proj: Linear,
    down_proj: RowParallel,
    activation: Activation,
}

impl Mlp {
    /// The block of a layer.
    pub fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        let names = &config.names;
        let names = (names.gate_proj, names.up_proj, names.down_proj);
        Self::of_size(config, config.intermediate_size, names, vb)
    }

    /// The expert that all tokens use, of `inner` elements.
    pub fn shared(config: &Config, inner: usize, vb: VarBuilder) -> Result<Self> {
        Self::of_size(config, inner, (Some("gate_proj"), "up_proj", "down_proj"), vb)
    }

    fn of_size(
        config: &Config,
        inner: usize,
        (gate, up, down): (Option<&str>, &str, &str),
        vb: VarBuilder,
    ) -> Result<Self> {
        let (hidden, bias) = (config.hidden_size, config.mlp_bias);
        let down = vb.pp(down);
        let own = match vb.rank() {
            None => None,
            Some(rank) => {
                let shares = inner_shares(inner, down.granularity(&[hidden, inner])?, rank.world_size());
                shares.and_then(|shares| shares.get(rank.index()).cloned())
            }
        };
        let own = own.unwrap_or(0..inner);
        let columns = |name: &str| columns_of(hidden, inner, own.clone(), bias, vb.pp(name));
        Ok(Self {
            gate_proj: gate.map(columns).transpose()?,
            up_proj: columns(up)?,
            down_proj: rows_of(inner, hidden, own.clone(), bias, down)?,
            activation: config.hidden_act,
        })
    }

    /// The block between its norms, if plans have it.
    pub fn block(&self) -> Option<FeedForwardBlock<'_>> {
        let (activation, (down_proj, sum)) = (self.activation, self.down_proj.part()?);
        let block = FeedForwardBlock::new(self.gate_proj.as_ref(), &self.up_proj, down_proj);
        Some(FeedForwardBlock { activation, out: BlockOutput { sum, ..block.out }, ..block })
    }

    /// What is made of `x`, added to `residual` if there is one.
    pub fn forward(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let inner = match (&self.gate_proj, self.activation) {
            (None, activation) => x.apply(&self.up_proj)?.apply(&activation)?,
            (Some(gate_proj), Activation::Silu) => swiglu(gate_proj, &self.up_proj, x)?,
            (Some(gate_proj), other) => (x.apply(gate_proj)?.apply(&other)? * x.apply(&self.up_proj)?)?,
        };
        match residual {
            Some(residual) => self.down_proj.forward_add(&inner, residual),
            None => self.down_proj.forward(&inner),
        }
    }

    pub fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        let inputs = self.gate_proj.iter().chain([&self.up_proj]).map(Linear::weight);
        inputs.chain([self.down_proj.weight()]).cloned()
    }
}
