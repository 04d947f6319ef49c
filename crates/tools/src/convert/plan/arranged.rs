//! Tensors that families keep in another order in the output: heads of latent attention, convolutions, and norms of
//! which mlx-lm stores the sums.

use super::experts::{is_float, TensorGroup};
use super::fused::rows_of;
use super::heads::Heads;
use super::linear::LinearOrder;
use crate::convert::options::ConvertOptions;
use crate::convert::output::{SourcePart, SourceTensor, View};
use crate::convert::target::{ExpertLayout, Target};
use candle_quant::checkpoint::{is_one_plus_norm, Checkpoint, CheckpointKind, Weight};
use candle_quant::Result;
use candle_quant_models::MlxLm;
use serde_json::Value;

/// What is known of the model, for the order of its numbers.
pub(super) struct Arranged {
    pub family: MlxLm,
    pub experts: ExpertLayout,
    pub hidden: Option<usize>,
    pub linear: LinearOrder,
    pub heads: Heads,
    /// Whether the source is what mlx-lm has written.
    pub is_done: bool,
    /// Whether experts become stacks, packed or not: mlx-lm does not stack them while it loads them, or takes stacks for
    /// a sign that all else is arranged, too.
    pub always: bool,
    /// Heads and rows of each, those of keys first, of latent attention that is split.
    latents: Option<[usize; 3]>,
    /// Whether packed weights are arranged, too.
    packed: bool,
    /// Whether tensors are told beside what they become.
    compares: bool,
    /// Whether norms get their sums, and convolutions mlx-lm's order.
    adds_to_norms: bool,
}

impl Arranged {
    pub(super) fn new(source: &Checkpoint, family: MlxLm, options: &ConvertOptions) -> Self {
        Self { packed: options.requantize, ..Self::of(source, family, options.target) }
    }

    /// As mlx-lm has them, whatever is packed.
    pub(super) fn for_comparison(source: &Checkpoint) -> Self {
        let family = MlxLm::of(source.config());
        Self { packed: true, compares: true, ..Self::of(source, family, Target::Mlx) }
    }

    fn of(source: &Checkpoint, family: MlxLm, target: Target) -> Self {
        let config = source.config();
        let text = config.get("text_config").unwrap_or(config);
        let size =
            |key: &str| text.get(key).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
        let is_mlx = target == Target::Mlx;
        let has_its_names = matches!(target, Target::Mlx | Target::Dense);
        let is_done = has_its_names && source.kind() == CheckpointKind::Mlx;
        let sizes = || Some([size("num_attention_heads")?, size("qk_nope_head_dim")?, size("v_head_dim")?]);
        let adds_to_norms = is_mlx && family.adds_to_norms && !is_done && has_usual_convolutions(source);
        Self {
            family,
            experts: target.kind().experts(&family),
            hidden: size("hidden_size"),
            linear: LinearOrder::of(source, target == Target::Dense),
            heads: Heads::of(source, family, is_mlx && !is_done),
            is_done,
            always: target == Target::Gguf
                || is_mlx && (family.stack != "switch_mlp" || family.adds_to_norms),
            latents: if is_mlx && family.splits_latents { sizes() } else { None },
            packed: false,
            compares: false,
            adds_to_norms,
        }
    }

    /// Whether a weight is arranged anew.
    pub(super) fn takes(&self, weight: &Weight) -> bool {
        self.packed && !matches!(weight, Weight::Dense(_)) || is_float(weight)
    }

    /// What tensors are where none of them is packed.
    pub(super) fn plain(&self, tensors: Vec<SourceTensor>) -> Vec<SourceTensor> {
        if self.always {
            self.unless_packed(tensors)
        } else {
            tensors
        }
    }

    /// Tensors that are the same where none of them is packed; a comparison tells what they are.
    pub(super) fn unless_packed(&self, tensors: Vec<SourceTensor>) -> Vec<SourceTensor> {
        if self.compares {
            tensors
        } else {
            Vec::new()
        }
    }

    /// What becomes of a tensor that is in another order, if it is one.
    pub(super) fn group(&self, name: &str, weight: &Weight) -> Result<Option<TensorGroup>> {
        let is_new = self.takes(weight);
        if let (Some(sizes), Some(path), true) =
            (self.latents, name.strip_suffix(".kv_b_proj.weight"), is_new)
        {
            return self.latents(name, path, weight, sizes);
        }
        if !self.adds_to_norms || !is_float(weight) {
            return Ok(None);
        }
        let plain = || self.plain(vec![SourceTensor::whole(name.to_owned(), weight.clone())]);
        let whole = |source| Some(TensorGroup { packed: vec![source], plain: plain(), obstacle: None });
        let dims = weight.dims();
        Ok(match dims {
            [_] if is_one_plus_norm(name) => {
                let parts = vec![SourcePart::Viewed(vec![weight.clone()], View::PlusOne)];
                whole(SourceTensor { name: name.to_owned(), dims: dims.to_vec(), parts })
            }
            // The same numbers: one channel goes in.
            [channels, 1, kernel] if name.ends_with("conv1d.weight") => {
                let parts = vec![SourcePart::of(weight.clone())];
                whole(SourceTensor { name: name.to_owned(), dims: vec![*channels, *kernel, 1], parts })
            }
            _ => None,
        })
    }

    /// The rows of all heads as two stacks: those of keys transposed, and those of values.
    fn latents(
        &self,
        name: &str,
        path: &str,
        weight: &Weight,
        [heads, keys, values]: [usize; 3],
    ) -> Result<Option<TensorGroup>> {
        let of_head = keys.saturating_add(values);
        let &[rows, latent] = weight.dims() else { return Ok(None) };
        if rows != heads.saturating_mul(of_head) || [heads, keys, values, latent].contains(&0) {
            return Ok(None);
        }
        let key = |head: usize| {
            let first = head * of_head;
            Ok(SourcePart::Viewed(vec![weight.narrow(0, first..first + keys)?], View::Transposed))
        };
        let value = |head: usize| rows_of(weight, head * of_head + keys, values);
        let stack = |module: &str, dims: [usize; 3], parts| SourceTensor {
            name: format!("{path}.{module}.weight"),
            dims: dims.to_vec(),
            parts,
        };
        let keys = stack("embed_q", [heads, latent, keys], (0..heads).map(key).collect::<Result<_>>()?);
        let values =
            stack("unembed_out", [heads, values, latent], (0..heads).map(value).collect::<Result<_>>()?);
        let plain = vec![SourceTensor::whole(name.to_owned(), weight.clone())];
        Ok(Some(TensorGroup { packed: vec![keys, values], plain, obstacle: None }))
    }
}

/// Whether convolutions are as transformers has them: mlx-lm has turned them when it added to the norms.
fn has_usual_convolutions(source: &Checkpoint) -> bool {
    let is_usual = |name: &str| {
        let dense = source.dense(name);
        dense.is_ok_and(|dense| matches!(dense.dims(), [_, 1, kernel] if *kernel != 1))
    };
    source.tensor_names().filter(|name| name.ends_with("conv1d.weight")).any(is_usual)
}
