//! Feed-forward blocks of experts, and the router that chooses among them.

use super::differentiable::softmax;
use super::fields::Fields;
use super::projection::projection;
use super::Config;
use candle_core::{DType, Tensor, D};
use candle_nn::{Activation, Module};
use candle_quant::nn::{ExpertsConfig, Gating, LayerWeight, Linear, VarBuilder};
use candle_quant::parallel::{parallel_experts, ParallelExperts};
use candle_quant::{Error, Result};
use std::collections::BTreeSet;

/// The experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// How many a layer has.
    pub experts: usize,
    /// How many of them a token uses.
    pub top_k: usize,
    /// Elements inside an expert.
    pub intermediate_size: usize,
    /// Whether the routing weights of the chosen experts are made to add up to 1.
    pub normalize: bool,
    /// Whether router and experts have biases.
    pub bias: bool,
    /// What joins gate and up projections.
    pub gating: Gating,
    /// For each layer, whether it has experts; else its feed-forward block is dense.
    pub sparse_layers: Vec<bool>,
    /// What the block is called in a layer.
    pub block_name: &'static str,
    /// What the router is called in the block.
    pub router_name: &'static str,
}

impl MoeConfig {
    /// The experts of a config, if its model type has any.
    pub(super) fn from_fields(
        fields: Fields,
        model_type: &str,
        layers: usize,
        activation: Activation,
    ) -> Result<Option<Self>> {
        let everywhere = vec![true; layers];
        Ok(Some(match model_type {
            "qwen3_moe" => {
                let step = fields.size("decoder_sparse_step")?.unwrap_or(1);
                let dense: BTreeSet<usize> = fields.indices("mlp_only_layers")?.into_iter().collect();
                let sparse = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
                Self {
                    experts: fields.required_size("num_experts")?,
                    top_k: fields.required_size("num_experts_per_tok")?,
                    intermediate_size: fields.required_size("moe_intermediate_size")?,
                    normalize: fields.flag("norm_topk_prob")?.unwrap_or(false),
                    bias: false,
                    gating: Gating::Plain(activation),
                    sparse_layers: (0..layers).map(sparse).collect(),
                    block_name: "mlp",
                    router_name: "gate",
                }
            }
            "mixtral" => Self {
                experts: fields.required_size("num_local_experts")?,
                top_k: fields.required_size("num_experts_per_tok")?,
                intermediate_size: fields.required_size("intermediate_size")?,
                normalize: true,
                bias: false,
                gating: Gating::Plain(activation),
                sparse_layers: everywhere,
                block_name: "block_sparse_moe",
                router_name: "gate",
            },
            "gpt_oss" => Self {
                experts: fields.required_size("num_local_experts")?,
                top_k: match fields.size("num_experts_per_tok")? {
                    Some(top_k) => top_k,
                    None => fields.required_size("experts_per_token")?,
                },
                intermediate_size: fields.required_size("intermediate_size")?,
                normalize: true,
                bias: true,
                gating: Gating::Clamped {
                    alpha: 1.702,
                    limit: fields.positive("swiglu_limit")?.unwrap_or(7.),
                },
                sparse_layers: everywhere,
                block_name: "mlp",
                router_name: "router",
            },
            _ => return Ok(None),
        }))
    }

    pub(super) fn validate(&self, layers: usize) -> Result<()> {
        if self.experts == 0 || self.intermediate_size == 0 {
            return Err(Error::mismatch("experts", "one or more, of one or more elements", "none"));
        }
        if self.top_k == 0 || self.top_k > self.experts {
            return Err(Error::mismatch(
                "`num_experts_per_tok`",
                format!("1 to {}, the number of experts", self.experts),
                self.top_k.to_string(),
            ));
        }
        if self.sparse_layers.len() != layers {
            return Err(Error::mismatch(
                "`sparse_layers`",
                format!("one entry for each of {layers} layers"),
                self.sparse_layers.len().to_string(),
            ));
        }
        Ok(())
    }

    /// Whether layer `index` has experts.
    pub(crate) fn is_sparse(&self, index: usize) -> bool {
        self.sparse_layers.get(index).copied().unwrap_or(false)
    }
}

/// A block of experts with its router.
#[derive(Debug)]
pub(super) struct SparseMlp {
    router: Linear,
    experts: ParallelExperts,
    top_k: usize,
    normalize: bool,
}

impl SparseMlp {
    /// `vb` stands at the layer.
    pub fn new(config: &Config, moe: &MoeConfig, vb: VarBuilder) -> candle_core::Result<Self> {
        let vb = vb.pp(moe.block_name);
        let sizes = ExpertsConfig {
            experts: moe.experts,
            hidden_size: config.hidden_size,
            intermediate_size: moe.intermediate_size,
            bias: moe.bias,
            gating: moe.gating,
        };
        Ok(Self {
            router: projection(config.hidden_size, moe.experts, moe.bias, vb.pp(moe.router_name))?,
            experts: parallel_experts(&sizes, vb)?,
            top_k: moe.top_k,
            normalize: moe.normalize,
        })
    }

    /// What is made of `x` `[B, T, hidden]` is added to `residual`.
    pub fn forward(&self, x: &Tensor, residual: &Tensor) -> candle_core::Result<Tensor> {
        let (ids, routing_weights) = self.route(x)?;
        residual + self.experts.forward(x, &ids, &routing_weights)?
    }

    /// The chosen experts of each token and their routing weights, both `[B, T, top_k]`, the largest first.
    fn route(&self, x: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let logits = self.router.forward(x)?.to_dtype(DType::F32)?;
        let routing_weights = softmax(&logits)?;
        let order = routing_weights.detach().contiguous()?.arg_sort_last_dim(false)?;
        let ids = order.narrow(D::Minus1, 0, self.top_k)?.contiguous()?;
        let routing_weights = routing_weights.gather(&ids, D::Minus1)?;
        let routing_weights = match self.normalize {
            true => routing_weights.broadcast_div(&routing_weights.sum_keepdim(D::Minus1)?)?,
            false => routing_weights,
        };
        Ok((ids, routing_weights))
    }

    pub fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        std::iter::once(self.router.weight().clone()).chain(self.experts.weights())
    }

    /// Bytes of the weights that one token is multiplied with: the router, and as many experts as it uses.
    pub fn bytes_of_token(&self) -> u64 {
        let stacks: u64 = self.experts.weights().map(|weight| weight.size_in_bytes() as u64).sum();
        let chosen = u128::from(stacks) * self.top_k as u128 / self.experts.count().max(1) as u128;
        (self.router.weight().size_in_bytes() as u64).saturating_add(chosen as u64)
    }
}
