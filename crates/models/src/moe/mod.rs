//! Feed-forward blocks of experts, and the router that chooses among them.

mod routing;

use super::mlp::Mlp;
use super::projection::projection;
use super::Config;
use candle_core::{DType, Tensor};
use candle_nn::Module;
pub use candle_quant::nn::{ExpertGroups, GroupScore, Scores};
use candle_quant::nn::{ExpertsConfig, Gating, LayerWeight, Linear, VarBuilder};
use candle_quant::parallel::{parallel_experts, ParallelExperts};
use candle_quant::step::{BlockOutput, ExpertsBlock};
use candle_quant::{Error, Result};
use routing::Router;
pub use routing::{Correction, Routing};

/// The experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// How many a layer has.
    pub experts: usize,
    /// How many of them a token uses.
    pub top_k: usize,
    /// Elements inside an expert.
    pub intermediate_size: usize,
    /// How they are chosen, and how much each counts.
    pub routing: Routing,
    /// Whether router and experts have biases.
    pub bias: bool,
    /// What joins gate and up projections.
    pub gating: Gating,
    /// For each layer, whether it has experts; else its feed-forward block is dense.
    pub sparse_layers: Vec<bool>,
    /// What the block is called in a layer.
    pub block_name: &'static str,
    /// The path of the router in the block.
    pub router_name: &'static str,
    /// What the stacks of gate and up, and of down projections are called in the block, if they are not in a module
    /// `experts`.
    pub stack_names: Option<[&'static str; 2]>,
    /// Whether stacks that are parameters, not modules, have rows for columns: `[E, K, N]`.
    pub transposed_parameters: bool,
    /// The expert that all tokens use.
    pub shared: Option<SharedExpert>,
}

/// An expert that all tokens use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Elements inside it.
    pub intermediate_size: usize,
    /// What it is called in the block of experts.
    pub block_name: &'static str,
    /// The projection to one number there whose sigmoid says how much it counts.
    pub gate_name: Option<&'static str>,
}

impl MoeConfig {
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
        self.routing.validate(self.experts)?;
        if self.shared.is_some_and(|shared| shared.intermediate_size == 0) {
            return Err(Error::mismatch("the shared expert", "one or more elements", "none"));
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

    /// Whether `name` in the module `parent` is the router.
    pub(crate) fn is_router(&self, parent: &str, name: &str) -> bool {
        let in_block =
            |path: &str| path == self.block_name || path.ends_with(&format!(".{}", self.block_name));
        match self.router_name.rsplit_once('.') {
            None => self.router_name == name && in_block(parent),
            Some((module, last)) => {
                let block = parent.strip_suffix(module).and_then(|path| path.strip_suffix('.'));
                last == name && block.is_some_and(in_block)
            }
        }
    }
}

/// A block of experts with its router.
#[derive(Debug)]
pub(super) struct SparseMlp {
    router: Router,
    experts: ParallelExperts,
    shared: Option<Mlp>,
    /// How much the shared expert counts.
    shared_gate: Option<Linear>,
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
        let shared =
            |shared: SharedExpert| Mlp::shared(config, shared.intermediate_size, vb.pp(shared.block_name));
        let gate = |name: &str| projection(config.hidden_size, 1, false, vb.pp(name));
        Ok(Self {
            router: Router::new(config.hidden_size, moe, &vb)?,
            experts: parallel_experts(&sizes, vb.clone())?,
            shared: moe.shared.map(shared).transpose()?,
            shared_gate: moe.shared.and_then(|shared| shared.gate_name).map(gate).transpose()?,
        })
    }

    /// What is made of `x` `[B, T, hidden]`, added to `residual` if there is one.
    pub fn forward(&self, x: &Tensor, residual: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let (ids, routing_weights) = self.router.route(x)?;
        let chosen = match self.router.weighs_inputs() {
            false => self.experts.forward(x, &ids, &routing_weights)?,
            true => self.of_weighed(x, &ids, &routing_weights)?,
        };
        let y = match residual {
            Some(residual) => (residual + chosen)?,
            None => chosen,
        };
        match (&self.shared, &self.shared_gate) {
            (None, _) => Ok(y),
            (Some(shared), None) => shared.forward(x, Some(&y)),
            (Some(shared), Some(gate)) => {
                let share = candle_nn::ops::sigmoid(&gate.forward(x)?)?;
                y + shared.forward(x, None)?.broadcast_mul(&share)?
            }
        }
    }

    /// The sum of what experts make of inputs, each multiplied by how much its expert counts.
    fn of_weighed(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, len, hidden) = x.dims3()?;
        let top_k = self.router.top_k();
        let weights = weights.to_dtype(x.dtype())?.unsqueeze(3)?;
        let each = x.unsqueeze(2)?.broadcast_mul(&weights)?.reshape((batch, len * top_k, hidden))?;
        let ids = ids.reshape((batch, len * top_k, 1))?;
        let ones = Tensor::ones(ids.dims(), DType::F32, x.device())?;
        self.experts.forward(&each, &ids, &ones)?.reshape((batch, len, top_k, hidden))?.sum(2)
    }

    /// The block between its norms, if it is of a kind that plans have.
    pub fn block(&self) -> Option<ExpertsBlock<'_>> {
        let shared = match &self.shared {
            None => None,
            Some(shared) => Some(shared.block()?),
        };
        let (experts, sum) = self.experts.part()?;
        let block = self.router.of_step(experts);
        let (shared_gate, out) = (self.shared_gate.as_ref(), BlockOutput { sum, ..block.out });
        Some(ExpertsBlock { shared, shared_gate, out, ..block })
    }

    pub fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        let of_all = self.shared.iter().flat_map(Mlp::weights);
        let gate = self.shared_gate.iter().map(|gate| gate.weight().clone());
        std::iter::once(self.router.weight().clone()).chain(self.experts.weights()).chain(of_all).chain(gate)
    }

    /// Bytes of the weights that one token is multiplied with: all but the experts that it does not use.
    pub fn bytes_of_token(&self) -> u64 {
        let bytes = |weight: LayerWeight| weight.size_in_bytes() as u64;
        let stacks: u64 = self.experts.weights().map(bytes).sum();
        let chosen = u128::from(stacks) * self.router.top_k() as u128 / self.experts.count().max(1) as u128;
        let all: u64 = self.weights().map(bytes).sum();
        all.saturating_sub(stacks).saturating_add(chosen as u64)
    }
}
