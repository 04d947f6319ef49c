//! Experts from a checkpoint, in every layout of names.

use super::{ExpertStack, Experts, ExpertsConfig, Gating, Weights};
use crate::checkpoint::Weight;
use crate::distributed::partition::whole_groups;
use crate::nn::adapters::Frozen;
use crate::nn::expert_split::ExpertShare;
use crate::nn::{AdapterSlot, LayerWeight, VarBuilder};
use crate::Error;
use candle_core::{IndexOp, Tensor};
use std::ops::Range;
use std::slice;

/// A block of experts from the tensors at the builder's path, in whichever of these layouts they are:
///
/// | tensors | written by |
/// |---|---|
/// | `switch_mlp.gate_proj.weight` `[E, inner, hidden]`, `up_proj`, `down_proj` | mlx-lm, Ollama |
/// | `experts.gate_proj.weight` `[E, inner, hidden]`, ... | mistral.rs, Ollama, gpt-oss |
/// | `experts.gate_up_proj` `[E, 2 inner, hidden]`, gate first; of gpt-oss dense ones alone, where rows alternate | transformers, Ollama |
/// | `experts.0.gate_proj.weight` `[inner, hidden]`, ... | Hugging Face (Qwen) |
/// | `experts.0.w1.weight`, `w3`, `w2` for gate, up, down | Hugging Face (Mixtral) |
///
/// # Errors
/// If there are none of these, or tensors are missing, damaged or of other shapes.
pub fn experts(config: &ExpertsConfig, vb: VarBuilder) -> candle_core::Result<Experts> {
    let whole = ExpertShare { experts: 0..config.experts, inner: 0..config.intermediate_size };
    StoredExperts::find(config, &vb)?.load(&whole)
}

/// A block of experts in one of the layouts of [`experts`], not loaded yet.
pub(crate) struct StoredExperts<'a, 'v> {
    config: &'a ExpertsConfig,
    vb: &'a VarBuilder<'v>,
    names: Names,
}

/// What the projections are called.
enum Names {
    /// The module of three stacks.
    Stacks(&'static str),
    /// Stacks of which one has gate and up.
    GateUp,
    /// Gate, up and down of each expert.
    Each([&'static str; 3]),
}

/// A projection as it is stored, and what of it is loaded.
struct Projection {
    /// Rows and columns of an expert's weight.
    dims: [usize; 2],
    /// Which of the rows are this projection's.
    outputs: Range<usize>,
    rows: Range<usize>,
    columns: Range<usize>,
    bias: bool,
    /// The module that its adapters belong to: of all experts, also where each has a module of its own.
    adapters: String,
}

impl<'a, 'v> StoredExperts<'a, 'v> {
    pub fn find(config: &'a ExpertsConfig, vb: &'a VarBuilder<'v>) -> candle_core::Result<Self> {
        let has = |path: &str| vb.pp(path).contains_tensor("weight");
        let names = if has("switch_mlp.gate_proj") {
            Names::Stacks("switch_mlp")
        } else if has("experts.gate_proj") {
            Names::Stacks("experts")
        } else if has("experts.gate_up_proj") || vb.pp("experts").contains_tensor("gate_up_proj") {
            // Dense ones are transformers', which is known to store rows in turn.
            let path = format!("{}.experts.gate_up_proj", vb.prefix());
            let is_dense = vb.checkpoint().is_some_and(|checkpoint| checkpoint.dense(&path).is_ok());
            if let (Gating::Clamped { .. }, false) = (config.gating, is_dense) {
                return Err(Error::Unsupported {
                    what: format!(
                        "`{}` of gpt-oss, whose rows may alternate or not,",
                        vb.pp("experts.gate_up_proj").prefix()
                    ),
                    remedy: "use the checkpoint as it was published, or a conversion by mlx-lm".to_string(),
                }
                .into());
            }
            match config.gating {
                Gating::Clamped { .. } => Names::Stacks("experts"),
                Gating::Plain(_) => Names::GateUp,
            }
        } else if has("experts.0.w1") {
            Names::Each(["w1", "w3", "w2"])
        } else {
            Names::Each(["gate_proj", "up_proj", "down_proj"])
        };
        Ok(Self { config, vb, names })
    }

    /// Inner elements that lie together in the down projections.
    pub fn granularity(&self) -> candle_core::Result<usize> {
        let &ExpertsConfig { experts, hidden_size, intermediate_size, .. } = self.config;
        let each = |name: &str, expert| {
            self.vb.pp("experts").pp(expert).pp(name).granularity(&[hidden_size, intermediate_size])
        };
        let stack = |path: &str| {
            self.vb.pp(path).pp("down_proj").granularity(&[experts, hidden_size, intermediate_size])
        };
        match self.names {
            Names::Stacks(path) => stack(path),
            Names::GateUp => stack("experts"),
            // Each may have a format of its own; units are powers of two.
            Names::Each([_, _, down]) => {
                (0..experts).try_fold(1, |unit, expert| Ok(each(down, expert)?.max(unit)))
            }
        }
    }

    /// The experts of `share`, with its inner elements and those in whose group of the down projections they are.
    pub fn load(&self, share: &ExpertShare) -> candle_core::Result<Experts> {
        let &ExpertsConfig { hidden_size: hidden, intermediate_size: inner, bias, .. } = self.config;
        let own = share.inner.clone();
        let loaded = match own == (0..inner) {
            true => own.clone(),
            false => whole_groups(&own, self.granularity()?, inner),
        };
        let from = |adapters: String, first: usize, of: usize| Projection {
            dims: [of, hidden],
            outputs: first..first + inner,
            rows: first + own.start..first + own.end,
            columns: 0..hidden,
            bias,
            adapters,
        };
        let whole = |adapters| from(adapters, 0, inner);
        let down = |adapters: String| Projection {
            dims: [hidden, inner],
            outputs: 0..hidden,
            rows: 0..hidden,
            columns: loaded.clone(),
            // Ranks sum what they have: one adds the bias.
            bias: bias && own.start == 0,
            adapters,
        };
        let experts = &share.experts;
        let (gate, up, down) = match self.names {
            Names::Stacks(module) => {
                let path = |name| format!("{module}.{name}");
                let stack = |path: String, projection: &dyn Fn(String) -> Projection| {
                    self.stack(&path, experts, &projection(path.clone()))
                };
                (
                    stack(path("gate_proj"), &whole)?,
                    stack(path("up_proj"), &whole)?,
                    stack(path("down_proj"), &down)?,
                )
            }
            Names::GateUp => {
                let half = |name: &str, first| {
                    let projection = from(format!("experts.{name}"), first, inner.saturating_mul(2));
                    self.stack("experts.gate_up_proj", experts, &projection)
                };
                let path = "experts.down_proj";
                (
                    half("gate_proj", 0)?,
                    half("up_proj", inner)?,
                    self.stack(path, experts, &down(path.into()))?,
                )
            }
            Names::Each([gate, up, w2]) => {
                let each = |name: &str, projection: &dyn Fn(String) -> Projection| {
                    self.each(name, experts, &projection(format!("experts.{name}")))
                };
                (each(gate, &whole)?, each(up, &whole)?, each(w2, &down)?)
            }
        };
        let padding = (own.start - loaded.start, loaded.end - own.end);
        Ok(Experts { padding, ..Experts::new(gate, up, down, self.config.gating)? })
    }

    /// Some experts of a stack `[E, N, K]` with their biases `[E, N]`.
    fn stack(
        &self,
        path: &str,
        own: &Range<usize>,
        projection: &Projection,
    ) -> candle_core::Result<ExpertStack> {
        let Projection { dims: [n, k], rows, columns, bias, .. } = projection;
        let (vb, experts) = (self.vb.pp(path), self.config.experts);
        let bias_part = [own.clone(), rows.clone()];
        let bias = bias.then(|| vb.tensor_part(&[experts, *n], "bias", &bias_part)).transpose()?;
        let dims = [experts, *n, *k];
        let part = [own.clone(), rows.clone(), columns.clone()];
        let of_dense = |stack: LayerWeight| match stack {
            LayerWeight::Quantized(stack) => Ok(Weights::Stack(stack)),
            other => {
                let dense = other.to_dense(vb.dtype())?;
                let experts = (0..own.len()).map(|expert| Ok(dense.i(expert)?.into()));
                Ok::<_, candle_core::Error>(Weights::Each(experts.collect::<candle_core::Result<_>>()?))
            }
        };
        let weights = match vb.stored_part(&dims, &part)? {
            Some(Weight::Packed(stack)) => Weights::Stack(stack.load(vb.device())?),
            Some(Weight::Ggml(stack)) => match vb.own_format(&stack) {
                Some(packed) => Weights::Stack(packed.load(vb.device())?),
                None => {
                    let matrices = stack.load_matrices(vb.device())?;
                    Weights::Each(matrices.into_iter().map(LayerWeight::from).collect())
                }
            },
            Some(Weight::Irregular(stack)) => of_dense(stack.load(vb.device())?)?,
            Some(Weight::Dense(stack)) => of_dense(vb.load_dense(&stack, columns.len())?)?,
            None => of_dense(vb.quantized(vb.tensor_part(&dims, "weight", &part)?, columns.len())?)?,
        };
        Ok(ExpertStack { weights, bias, adapters: self.adapters(own, projection) })
    }

    /// Some experts of which each has a weight `[N, K]`, `experts.E.NAME`.
    fn each(
        &self,
        name: &str,
        own: &Range<usize>,
        projection: &Projection,
    ) -> candle_core::Result<ExpertStack> {
        let Projection { dims: [n, k], rows, columns, bias, .. } = projection;
        let path = |expert: usize| self.vb.pp("experts").pp(expert).pp(name);
        let weight = |expert| path(expert).part((*n, *k), &[rows.clone(), columns.clone()]);
        let weights = own.clone().map(weight).collect::<candle_core::Result<Vec<_>>>()?;
        let bias = match bias {
            true => {
                let each =
                    own.clone().map(|expert| path(expert).tensor_part(&[*n], "bias", slice::from_ref(rows)));
                Some(Tensor::stack(&each.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
            }
            false => None,
        };
        let stack = ExpertStack::from_each(weights, bias)?;
        Ok(ExpertStack { adapters: self.adapters(own, projection), ..stack })
    }

    /// The slot for the adapters of a projection of some experts.
    fn adapters(&self, own: &Range<usize>, projection: &Projection) -> AdapterSlot {
        let Projection { dims: [_, k], outputs, rows, columns, adapters, .. } = projection;
        let rows = rows.start - outputs.start..rows.end - outputs.start;
        let part = [own.clone(), rows, columns.clone()];
        let dims = [self.config.experts, outputs.len(), *k];
        let frozen = Frozen::Stack(self.vb.device().clone());
        self.vb.pp(adapters).adapter_slot(&dims, &part, frozen)
    }
}
