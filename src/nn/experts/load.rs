//! Experts from a checkpoint, in every layout of names.

use super::{ExpertStack, Experts, ExpertsConfig, Gating, Weights};
use crate::checkpoint::Weight;
use crate::nn::{LayerWeight, VarBuilder};
use crate::{Error, Result};
use candle_core::{IndexOp, Tensor, D};
use candle_nn::Init;

/// A block of experts from the tensors at the builder's path, in whichever of these layouts they are:
///
/// | tensors | written by |
/// |---|---|
/// | `switch_mlp.gate_proj.weight` `[E, inner, hidden]`, `up_proj`, `down_proj` | mlx-lm, Ollama |
/// | `experts.gate_proj.weight` `[E, inner, hidden]`, ... | mistral.rs, Ollama, gpt-oss |
/// | `experts.gate_up_proj` `[E, 2 inner, hidden]`, gate first; not for gpt-oss, where rows alternate in some files | Ollama |
/// | `experts.0.gate_proj.weight` `[inner, hidden]`, ... | Hugging Face (Qwen) |
/// | `experts.0.w1.weight`, `w3`, `w2` for gate, up, down | Hugging Face (Mixtral) |
///
/// # Errors
/// If there are none of these, or tensors are missing, damaged or of other shapes.
pub fn experts(config: &ExpertsConfig, vb: VarBuilder) -> candle_core::Result<Experts> {
    let &ExpertsConfig { experts, hidden_size, intermediate_size, .. } = config;
    let source = Source { config, vb: &vb };
    let (inner, hidden) = (intermediate_size, hidden_size);
    let stacked = |path: &str| {
        let stack = |name: &str, n, k| source.stack(&format!("{path}.{name}"), n, k);
        let (gate, up) = (stack("gate_proj", inner, hidden)?, stack("up_proj", inner, hidden)?);
        Ok::<_, candle_core::Error>((gate, up, stack("down_proj", hidden, inner)?))
    };
    let each = |[gate, up, down]: [&str; 3]| {
        let each = |name, n, k| source.each(name, n, k);
        Ok::<_, candle_core::Error>((
            each(gate, inner, hidden)?,
            each(up, inner, hidden)?,
            each(down, hidden, inner)?,
        ))
    };
    let has = |path: &str| vb.pp(path).contains_tensor("weight");
    let (gate, up, down) = if has("switch_mlp.gate_proj") {
        stacked("switch_mlp")?
    } else if has("experts.gate_proj") {
        stacked("experts")?
    } else if has("experts.gate_up_proj") || vb.pp("experts").contains_tensor("gate_up_proj") {
        if let Gating::Clamped { .. } = config.gating {
            return Err(Error::Unsupported {
                what: format!(
                    "`{}` of gpt-oss, whose rows may alternate or not,",
                    vb.pp("experts.gate_up_proj").prefix()
                ),
                remedy: "use the checkpoint as it was published, or a conversion by mlx-lm".to_string(),
            }
            .into());
        }
        let (gate, up) = source.gate_up("experts.gate_up_proj", experts, inner, hidden)?;
        (gate, up, source.stack("experts.down_proj", hidden, inner)?)
    } else if has("experts.0.w1") {
        each(["w1", "w3", "w2"])?
    } else {
        each(["gate_proj", "up_proj", "down_proj"])?
    };
    Ok(Experts::new(gate, up, down, config.gating)?)
}

/// Where the weights of experts come from.
struct Source<'a, 'v> {
    config: &'a ExpertsConfig,
    vb: &'a VarBuilder<'v>,
}

impl Source<'_, '_> {
    /// A stack `[E, n, k]` with its biases.
    fn stack(&self, path: &str, n: usize, k: usize) -> candle_core::Result<ExpertStack> {
        let vb = self.vb.pp(path);
        let bias = self.config.bias.then(|| vb.get((self.config.experts, n), "bias")).transpose()?;
        Ok(ExpertStack { weights: self.load(&vb, n, k)?, bias })
    }

    /// The weights of a stack `[E, n, k]`.
    fn load(&self, vb: &VarBuilder, n: usize, k: usize) -> candle_core::Result<Weights> {
        let dims = [self.config.experts, n, k];
        let each = |dense: Tensor| {
            let experts = (0..self.config.experts).map(|expert| Ok(dense.i(expert)?.into()));
            Ok(Weights::Each(experts.collect::<candle_core::Result<_>>()?))
        };
        match vb.stored_weight(&dims)? {
            Some(Weight::Packed(stack)) => Ok(Weights::Stack(stack.load(vb.device())?)),
            Some(Weight::Ggml(stack)) => {
                let matrices = stack.load_matrices(vb.device())?;
                Ok(Weights::Each(matrices.into_iter().map(LayerWeight::from).collect()))
            }
            Some(Weight::Dense(stack)) => each(stack.load(vb.dtype(), vb.device())?),
            None => each(vb.get(&dims, "weight")?),
        }
    }

    /// Gate and up from one stack `[E, 2 inner, hidden]`, gate first.
    fn gate_up(
        &self,
        path: &str,
        experts: usize,
        inner: usize,
        hidden: usize,
    ) -> candle_core::Result<(ExpertStack, ExpertStack)> {
        let vb = self.vb.pp(path);
        let bias = self.config.bias.then(|| vb.get((experts, 2 * inner), "bias")).transpose()?;
        let weights = self.load(&vb, 2 * inner, hidden)?;
        let half = |start| {
            let bias = bias.as_ref().map(|bias| bias.narrow(D::Minus1, start, inner)).transpose()?;
            let weights = match &weights {
                Weights::Stack(stack) => Weights::Stack(stack.narrow(1, start, inner)?),
                Weights::Each(each) => {
                    let half = |weight: &LayerWeight| {
                        Ok(weight.to_dense(vb.dtype())?.narrow(0, start, inner)?.contiguous()?.into())
                    };
                    Weights::Each(each.iter().map(half).collect::<Result<_>>()?)
                }
            };
            Ok::<_, candle_core::Error>(ExpertStack { weights, bias })
        };
        Ok((half(0)?, half(inner)?))
    }

    /// One weight `[n, k]` for each expert, `experts.E.NAME`.
    fn each(&self, name: &str, n: usize, k: usize) -> candle_core::Result<ExpertStack> {
        let path = |expert: usize| self.vb.pp("experts").pp(expert).pp(name);
        let all = 0..self.config.experts;
        let weight = |expert| path(expert).weight(n, k, Init::Const(0.));
        let weights = all.clone().map(weight).collect::<candle_core::Result<Vec<_>>>()?;
        let bias = match self.config.bias {
            true => {
                let each = all.map(|expert| path(expert).get(n, "bias"));
                Some(Tensor::stack(&each.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
            }
            false => None,
        };
        Ok(ExpertStack::from_each(weights, bias)?)
    }
}
