//! Attention as other containers have it, which becomes that of mlx-lm: projections of all heads in one, latents in two
//! stacks, norms of heads in one matrix.

use super::experts::TensorGroup;
use crate::convert::output::{SourcePart, SourceTensor, View};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::Result;
use candle_quant_models::{Config, MlxLm, QkNormOver};
use std::collections::BTreeMap;

/// The attention of a model, if it is a known one.
pub(super) struct Heads {
    config: Option<Config>,
    family: MlxLm,
}

impl Heads {
    /// `is_renamed`: whether the output has mlx-lm's names. If not, all stays what it is.
    pub(super) fn of(source: &Checkpoint, family: MlxLm, is_renamed: bool) -> Self {
        let config = Config::from_json(source.config()).ok().filter(|_| is_renamed);
        Self { config, family }
    }

    /// Takes the tensors out that are others in mlx-lm.
    pub(super) fn take(&self, tensors: &mut Vec<(String, Weight)>) -> Result<Vec<TensorGroup>> {
        let Some(config) = &self.config else { return Ok(Vec::new()) };
        let (mut groups, mut latents) = (Vec::new(), BTreeMap::<String, [Option<Weight>; 2]>::new());
        for (name, weight) in std::mem::take(tensors) {
            if let Some(parts) = self.parts(config, &name, &weight)? {
                groups.extend(parts.into_iter().map(group));
            } else if let Some((attention, of_values)) = self.latent(config, &name) {
                let [keys, values] = latents.entry(attention.to_owned()).or_default();
                *(if of_values { values } else { keys }) = Some(weight);
            } else {
                tensors.push((name, weight));
            }
        }
        for (attention, stacks) in latents {
            let joined = match &stacks {
                [Some(keys), Some(values)] => joined(&attention, keys, values)?,
                _ => None,
            };
            match joined {
                Some(joined) => groups.push(group(joined)),
                None => tensors.extend(
                    NAMES
                        .into_iter()
                        .zip(stacks)
                        .filter_map(|(stack, weight)| Some((format!("{attention}{stack}"), weight?))),
                ),
            }
        }
        Ok(groups)
    }

    /// What one tensor becomes; `None` if it stays what it is.
    fn parts(&self, config: &Config, name: &str, weight: &Weight) -> Result<Option<Vec<SourceTensor>>> {
        let Some((path, part)) = name.rsplit_once('.') else { return Ok(None) };
        let rows = |name: String, first: usize, rows: usize, dims: Vec<usize>| {
            let parts = vec![SourcePart::of(weight.narrow(0, first..first + rows)?)];
            Ok(SourceTensor { name, dims, parts })
        };
        if let (Some(attention), false) = (path.strip_suffix(".qkv_proj"), self.family.fuses_qkv) {
            let of = |heads: usize| heads.saturating_mul(config.head_dim);
            let (queries, keys) = (of(config.num_attention_heads), of(config.num_key_value_heads));
            let all = keys.saturating_mul(2).saturating_add(queries);
            let Some((_, others)) = weight.dims().split_first().filter(|(rows, _)| **rows == all) else {
                return Ok(None);
            };
            let of = |(module, first, count): (&str, usize, usize)| {
                rows(format!("{attention}.{module}.{part}"), first, count, [&[count], others].concat())
            };
            let parts = [("q_proj", 0, queries), ("k_proj", queries, keys), ("v_proj", queries + keys, keys)];
            return parts.into_iter().map(of).collect::<Result<_>>().map(Some);
        }
        let names = [config.names.q_norm, config.names.k_norm];
        let has_norms = self.family.norms_of_heads
            && config.qk_norm.is_some_and(|norm| norm.over == QkNormOver::HeadOfItsOwn);
        let is_norm = || path.rsplit('.').next().is_some_and(|module| names.contains(&module));
        match *weight.dims() {
            [heads, dim] if has_norms && is_norm() && dim > 0 => {
                let of = |head: usize| rows(format!("{path}.norms.{head}.{part}"), head, 1, vec![dim]);
                (0..heads).map(of).collect::<Result<_>>().map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The attention block of a stack of latents that mlx-lm has none of, and whether it makes values.
    fn latent<'n>(&self, config: &Config, name: &'n str) -> Option<(&'n str, bool)> {
        let [keys, values] = NAMES.map(|stack| name.strip_suffix(stack));
        let stack = keys.map(|attention| (attention, false)).or(values.map(|attention| (attention, true)));
        stack.filter(|_| config.latents.is_some() && !self.family.splits_latents)
    }
}

/// The stacks that latents become keys and values by, those of keys transposed.
const NAMES: [&str; 2] = [".embed_q.weight", ".unembed_out.weight"];

fn group(tensor: SourceTensor) -> TensorGroup {
    TensorGroup { packed: vec![tensor], plain: Vec::new(), obstacle: None }
}

/// Both stacks as one matrix: of each head the rows of keys, then those of values.
fn joined(attention: &str, keys: &Weight, values: &Weight) -> Result<Option<SourceTensor>> {
    let (&[heads, latent, key_dim], &[others, value_dim, columns]) = (keys.dims(), values.dims()) else {
        return Ok(None);
    };
    if heads != others || latent != columns || [latent, key_dim, value_dim].contains(&0) {
        return Ok(None);
    }
    let mut parts = Vec::new();
    for head in 0..heads {
        let [keys, values] = [keys, values].map(|stack| stack.narrow(0, head..head + 1));
        parts.extend([SourcePart::Viewed(vec![keys?], View::Transposed), SourcePart::of(values?)]);
    }
    let dims = vec![heads.saturating_mul(key_dim.saturating_add(value_dim)), latent];
    Ok(Some(SourceTensor { name: format!("{attention}.kv_b_proj.weight"), dims, parts }))
}
