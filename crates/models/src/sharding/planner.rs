//! How a plan is made.

mod linear;

use super::parts::{inner_shares, Heads, Sharding};
use super::shard_plan::{Communication, ShardPlan, ShardedTensor, Split};
use crate::config::{Inside, QkNormOver, Role};
use crate::{layer_of, Config, LinearAttentionConfig, MoeConfig};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::parallel::{expert_shares, whole_groups, ExpertShare, ExpertSplit, MOST_RANKS};
use candle_quant::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;

impl ShardPlan {
    /// The plan that [`VarBuilder::sharded`](candle_quant::VarBuilder::sharded) follows. Nothing is read.
    ///
    /// # Errors
    /// If there are no ranks or more than [`MOST_RANKS`], the model is not supported, or its tensors are missing or damaged.
    pub fn new(checkpoint: &Checkpoint, ranks: usize) -> Result<Self> {
        Self::with_experts(checkpoint, ranks, ExpertSplit::default())
    }

    /// As [`new`](ShardPlan::new), with a choice of how experts are split
    /// ([`VarBuilder::split_experts`](candle_quant::VarBuilder::split_experts)).
    ///
    /// # Errors
    /// As those of [`new`](ShardPlan::new).
    pub fn with_experts(checkpoint: &Checkpoint, ranks: usize, experts: ExpertSplit) -> Result<Self> {
        if ranks == 0 || ranks > MOST_RANKS {
            return Err(Error::mismatch("ranks", format!("1 to {MOST_RANKS}"), ranks.to_string()));
        }
        let config = Config::from_checkpoint(checkpoint)?;
        let planner = Planner::new(checkpoint, &config, ranks, experts)?;
        let (tensors, communication) = (planner.tensors()?, planner.communication());
        Ok(Self { ranks, experts, tensors, communication, config })
    }
}

struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a Config,
    ranks: usize,
    sharding: Sharding,
    how: ExpertSplit,
    /// Name and K of all tensors.
    names: Vec<(String, Option<usize>)>,
    /// Of the feed-forward blocks of each layer, elements that lie together along the inputs of down projections.
    units: BTreeMap<(usize, Inside), usize>,
}

/// How a tensor is split, and why parts of it are on several ranks.
type Shared = (Split, Option<String>);

/// What is known of a tensor by its name.
struct ModuleName<'n> {
    layer: usize,
    /// The module that the projection is in.
    parent: &'n str,
    projection: &'n str,
    is_bias: bool,
    role: Option<Role>,
}

impl<'n> ModuleName<'n> {
    fn of(name: &'n str, config: &Config) -> Self {
        let (module, is_bias) = match name.rsplit_once('.') {
            Some((module, "weight")) => (module, false),
            Some((module, "bias")) => (module, true),
            _ => (name, false),
        };
        let (parent, projection) = module.rsplit_once('.').unwrap_or(("", module));
        Self { layer: layer_of(name).unwrap_or(0), parent, projection, is_bias, role: config.role(module) }
    }

    /// The number of the expert that the tensor belongs to.
    fn expert(&self) -> Option<usize> {
        let (parent, index) = self.parent.rsplit_once('.')?;
        index.parse().ok().filter(|_| parent.ends_with("experts"))
    }
}

impl<'a> Planner<'a> {
    fn new(checkpoint: &'a Checkpoint, config: &'a Config, ranks: usize, how: ExpertSplit) -> Result<Self> {
        let (expected, _) = config.inventory(checkpoint.tensor_names());
        let tied = config.tie_word_embeddings.unwrap_or(!checkpoint.contains("lm_head.weight"));
        let is_head = |name: &str| name.ends_with("lm_head.weight") || name.ends_with("lm_head.bias");
        let is_loaded = |name: &str, required: bool| required || (is_head(name) && !tied);
        let names = expected.into_iter().filter(|(name, tensor)| is_loaded(name, tensor.required));
        let names: Vec<_> = names.map(|(name, tensor)| (name, tensor.dims.last().copied())).collect();
        let mut units = BTreeMap::new();
        for (name, k) in &names {
            let module = ModuleName::of(name, config);
            if let (Some(Role::Down(inside)), false) = (module.role, module.is_bias) {
                let unit = units.entry((module.layer, inside)).or_insert(1);
                *unit = checkpoint.tensor(name, *k)?.granularity().max(*unit);
            }
        }
        let sharding = Sharding::new(config, ranks);
        Ok(Self { checkpoint, config, ranks, sharding, how, names, units })
    }

    fn tensors(&self) -> Result<Vec<ShardedTensor>> {
        self.names.iter().map(|(name, k)| self.tensor(name, *k)).collect()
    }

    /// A tensor as the model reads it.
    fn read(&self, name: &str, k: Option<usize>) -> Result<Weight> {
        let is_transposed = self.config.moe.as_ref().is_some_and(|moe| moe.transposed_parameters);
        match name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj") {
            true if is_transposed => self.checkpoint.weight(name, None),
            _ => self.checkpoint.tensor(name, k),
        }
    }

    fn tensor(&self, name: &str, k: Option<usize>) -> Result<ShardedTensor> {
        let weight = self.read(name, k)?;
        let module = ModuleName::of(name, self.config);
        let (split, mut replicated) = match self.ranks {
            1 => (Split::Whole, None),
            _ => self.split(&module, &weight),
        };
        let of_ranks = |measure| self.of_ranks(&split, &weight, &module, measure);
        let rank_bytes = of_ranks(|weight| weight.size_in_bytes() as u64)?;
        let rank_loaded = of_ranks(Weight::loaded_bytes)?;
        let rank_elements = of_ranks(|weight| weight.dims().iter().map(|size| *size as u64).product())?;
        let stored_bytes = weight.size_in_bytes() as u64;
        if replicated.is_none() && split != Split::Whole {
            // Of a global scale each run is a part.
            let runs = match &split {
                Split::Segments(runs) => runs.first().map_or(1, Vec::len),
                _ => 1,
            };
            let matrices =
                weight.dims().iter().rev().skip(2).fold(runs, |count, size| count.saturating_mul(*size));
            replicated = shared_bytes(stored_bytes, &rank_bytes, matrices as u64).map(str::to_owned);
        }
        let is_matrix = weight.dims().len() > 1 && !module.is_bias;
        Ok(ShardedTensor {
            name: name.to_owned(),
            format: weight.format_name(),
            dims: weight.dims().to_vec(),
            dense: match &weight {
                Weight::Dense(dense) => Some(dense.dtype()),
                _ => None,
            },
            is_decoded: matches!(module.role, Some(Role::OfLatent | Role::OfLatentByHeads)),
            split,
            stored_bytes,
            rank_bytes,
            rank_loaded,
            rank_elements,
            replicated: replicated.filter(|_| is_matrix),
        })
    }

    /// The part of a tensor that each rank loads, by some measure.
    fn of_ranks(
        &self,
        split: &Split,
        weight: &Weight,
        module: &ModuleName,
        measure: fn(&Weight) -> u64,
    ) -> Result<Vec<u64>> {
        let last = weight.dims().len().saturating_sub(1);
        let of_rows = match module.role {
            Some(Role::Convolution) => 0,
            _ if module.is_bias => last,
            _ => last.saturating_sub(1),
        };
        let along = |dim: usize, ranges: &[Range<usize>]| {
            let part = |range: &Range<usize>| Ok(measure(&weight.narrow(dim, range.clone())?));
            ranges.iter().map(part).collect::<Result<Vec<u64>>>()
        };
        match split {
            Split::Whole => Ok(vec![measure(weight); self.ranks]),
            Split::One(only) => {
                Ok((0..self.ranks).map(|rank| if rank == *only { measure(weight) } else { 0 }).collect())
            }
            Split::Rows(rows) => along(of_rows, rows),
            Split::Columns(columns) => along(last, columns),
            Split::Experts(experts) => along(0, experts),
            Split::Segments(runs) => {
                let sum = |runs: &Vec<Range<usize>>| Ok(along(of_rows, runs)?.into_iter().sum());
                runs.iter().map(sum).collect()
            }
        }
    }

    fn split(&self, module: &ModuleName, weight: &Weight) -> Shared {
        let ranks = self.ranks;
        let by_heads = || match &self.sharding.heads {
            Some(heads) => self.by_heads(module, heads, weight),
            None => {
                let (queries, keys) = (self.config.num_attention_heads, self.config.num_key_value_heads);
                let why = format!("{queries} query heads on {keys} key heads are too few for {ranks} ranks");
                (Split::Whole, Some(why))
            }
        };
        match module.role {
            Some(Role::Embedding | Role::Head) => match self.sharding.vocabulary() {
                Some(rows) => (Split::Rows(rows), None),
                None => (Split::Whole, Some(format!("fewer tokens than the {ranks} ranks"))),
            },
            Some(Role::Query | Role::KeyValue | Role::OfLatent | Role::OfLatentByHeads | Role::Output) => {
                by_heads()
            }
            Some(Role::LinearInput | Role::Convolution | Role::LinearOutput) => {
                self.of_linear(module, weight)
            }
            None if matches!(module.projection, "A_log" | "dt_bias") => self.of_linear(module, weight),
            None if module.projection == "sinks" || self.is_norm_of_heads(module) => by_heads(),
            Some(Role::Inner(Inside::Experts) | Role::Down(Inside::Experts)) => match &self.config.moe {
                Some(moe) => self.of_experts(moe, module, weight),
                None => (Split::Whole, None),
            },
            Some(Role::Inner(inside) | Role::Down(inside)) => {
                match self.inner_shares(inside, self.granularity(module.layer, inside)) {
                    None => (Split::Whole, Some(format!("fewer inner elements than the {ranks} ranks"))),
                    Some(inner) if matches!(module.role, Some(Role::Down(_))) => {
                        columns(module, inner, weight)
                    }
                    Some(inner) => (Split::Rows(inner), None),
                }
            }
            Some(Role::Router | Role::SharedGate | Role::Latent) | None => (Split::Whole, None),
        }
    }

    fn inner_shares(&self, inside: Inside, unit: usize) -> Option<Vec<Range<usize>>> {
        inner_shares(self.config.inner_size(inside)?, unit, self.ranks)
    }

    /// Whether it is a norm with a weight for each head.
    fn is_norm_of_heads(&self, module: &ModuleName) -> bool {
        let names = [self.config.names.q_norm, self.config.names.k_norm];
        let is_of_all = self.config.qk_norm.is_some_and(|norm| norm.over != QkNormOver::Head);
        // Those that are modules of their own are small.
        is_of_all && names.contains(&module.projection) && module.parent.ends_with("self_attn")
    }

    fn by_heads(&self, module: &ModuleName, heads: &[Heads], weight: &Weight) -> Shared {
        let size = self.config.head_dim;
        let elements = |heads: &Range<usize>| heads.start * size..heads.end * size;
        let rows = self.config.query_rows();
        let queries = heads.iter().map(|heads| heads.query.start * rows..heads.query.end * rows).collect();
        match module.role {
            None if module.projection == "sinks" => {
                (Split::Rows(heads.iter().map(|heads| heads.query.clone()).collect()), None)
            }
            None => self.norm_of_heads(module, heads),
            Some(Role::Query) => (Split::Rows(queries), None),
            Some(Role::Output) => {
                let size = self.config.value_dim();
                let values = |heads: &Heads| heads.query.start * size..heads.query.end * size;
                columns(module, heads.iter().map(values).collect(), weight)
            }
            Some(Role::OfLatentByHeads) => {
                (Split::Experts(heads.iter().map(|heads| heads.query.clone()).collect()), None)
            }
            Some(Role::OfLatent) => {
                let latents = self.config.latents;
                let size = latents.map_or(1, |latents| latents.key_dim.saturating_add(latents.value_dim));
                let rows = |heads: &Heads| heads.query.start * size..heads.query.end * size;
                (Split::Rows(heads.iter().map(rows).collect()), None)
            }
            Some(_) => {
                let keys = self.config.num_key_value_heads;
                let why = format!("{keys} key heads are fewer than the {} ranks", self.ranks);
                let rows = heads.iter().map(|heads| elements(&heads.key)).collect();
                (Split::Rows(rows), (keys < self.ranks).then_some(why))
            }
        }
    }

    /// The part of a norm with a weight for each head.
    fn norm_of_heads(&self, module: &ModuleName, heads: &[Heads]) -> Shared {
        let is_of_queries = module.projection == self.config.names.q_norm;
        let own = |heads: &Heads| if is_of_queries { heads.query.clone() } else { heads.key.clone() };
        let heads = heads.iter().map(own);
        match self.config.qk_norm.map(|norm| norm.over) {
            Some(QkNormOver::All) => {
                let size = self.config.head_dim;
                (Split::Columns(heads.map(|own| own.start * size..own.end * size).collect()), None)
            }
            _ => (Split::Rows(heads.collect()), None),
        }
    }

    fn of_experts(&self, moe: &MoeConfig, module: &ModuleName, weight: &Weight) -> Shared {
        let Some(shares) = self.expert_shares(moe, self.granularity(module.layer, Inside::Experts)) else {
            let what = match self.how {
                ExpertSplit::Inside => "inner elements",
                ExpertSplit::Across => "experts",
            };
            return (Split::Whole, Some(format!("fewer {what} than the {} ranks", self.ranks)));
        };
        let inner = || shares.iter().map(|share| share.inner.clone());
        let is_down = matches!(module.role, Some(Role::Down(_)));
        let split = match (self.how, module.projection) {
            (ExpertSplit::Across, _) => match module.expert() {
                Some(expert) => {
                    let owner = shares.iter().position(|share| share.experts.contains(&expert));
                    owner.map_or(Split::Whole, Split::One)
                }
                None => Split::Experts(shares.into_iter().map(|share| share.experts).collect()),
            },
            // The outputs of an expert are weighed before they are summed: one rank adds its bias.
            (ExpertSplit::Inside, _) if is_down && module.is_bias => Split::One(0),
            (ExpertSplit::Inside, _) if is_down => return columns(module, inner().collect(), weight),
            (ExpertSplit::Inside, "gate_up_proj" | "input_linear") => {
                let up =
                    |own: &Range<usize>| moe.intermediate_size + own.start..moe.intermediate_size + own.end;
                Split::Segments(inner().map(|own| vec![own.clone(), up(&own)]).collect())
            }
            (ExpertSplit::Inside, _) => Split::Rows(inner().collect()),
        };
        (split, None)
    }

    fn expert_shares(&self, moe: &MoeConfig, unit: usize) -> Option<Vec<ExpertShare>> {
        expert_shares(self.how, moe.experts, moe.intermediate_size, unit, self.ranks)
    }

    fn granularity(&self, layer: usize, inside: Inside) -> usize {
        self.units.get(&(layer, inside)).copied().unwrap_or(1)
    }

    fn communication(&self) -> Communication {
        let hidden_size = self.config.hidden_size;
        if self.ranks == 1 {
            return Communication { hidden_size, ..Communication::default() };
        }
        let layers = self.config.num_hidden_layers;
        let linear = self.config.linear.as_ref().map_or(0, LinearAttentionConfig::count);
        let attending = layers.saturating_sub(linear);
        let (sparse, experts_are_split) = self.config.moe.as_ref().map_or((0, false), |moe| {
            let sparse = moe.sparse_layers.iter().filter(|is_sparse| **is_sparse).count();
            (sparse, self.expert_shares(moe, 1).is_some())
        });
        let sums = |layers: usize, is_split: bool| if is_split { layers } else { 0 };
        let is_split = |inside| self.inner_shares(inside, 1).is_some();
        // Of queries and keys.
        let norms = self.config.qk_norm.filter(|norm| norm.over == QkNormOver::All);
        let norms = attending.saturating_mul(if norms.is_some() { 2 } else { 0 });
        let vocabulary = self.sharding.vocabulary().is_some();
        let all_reduces = [
            sums(attending, self.sharding.heads.is_some()),
            sums(linear, self.sharding.linear_heads.is_some()),
            sums(sparse, experts_are_split),
            sums(layers.saturating_sub(sparse), is_split(Inside::Dense)),
            sums(sparse, is_split(Inside::Shared)),
            sums(norms, self.sharding.heads.is_some()),
            sums(1, vocabulary),
        ];
        Communication {
            all_reduces: all_reduces.into_iter().fold(0, usize::saturating_add),
            hidden_size,
            gathered_logits: if vocabulary { self.config.vocab_size } else { 0 },
        }
    }
}

/// Columns of a weight, in whole groups; its bias is whole.
fn columns(module: &ModuleName, own: Vec<Range<usize>>, weight: &Weight) -> Shared {
    let (unit, k) = (weight.granularity(), weight.dims().last().copied().unwrap_or(0));
    if module.is_bias {
        return (Split::Whole, None);
    }
    let columns: Vec<_> = own.iter().map(|own| whole_groups(own, unit, k)).collect();
    let why = (columns != own).then(|| format!("groups of {unit} in the inputs of two ranks are on both"));
    (Split::Columns(columns), why)
}

/// Why ranks that share out a tensor, of so many matrices each, read more than its bytes, if they do.
fn shared_bytes(stored: u64, rank_bytes: &[u64], matrices: u64) -> Option<&'static str> {
    // The global scale of a matrix is 4 bytes, for all ranks.
    let once = stored.saturating_add((4 * rank_bytes.len() as u64).saturating_mul(matrices));
    if rank_bytes.len() > 1 && rank_bytes.iter().all(|bytes| *bytes == stored) {
        return Some("every rank needs all of its bytes");
    }
    (rank_bytes.iter().sum::<u64>() > once)
        .then_some("bytes that several ranks need are read by each of them")
}

#[cfg(test)]
mod tests {
    use super::shared_bytes;

    /// One number of four bytes for each matrix and rank is a global scale.
    #[test]
    fn global_scales_are_not_counted_as_shared() {
        assert_eq!((shared_bytes(100, &[100], 1), shared_bytes(100, &[54, 54], 1)), (None, None));
        assert_eq!(shared_bytes(100, &[58, 58], 2), None);
        assert_eq!(
            shared_bytes(100, &[55, 54], 1),
            Some("bytes that several ranks need are read by each of them")
        );
        assert_eq!(shared_bytes(100, &[100, 100], 1), Some("every rank needs all of its bytes"));
    }
}
