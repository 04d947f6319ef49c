//! What a model needs of the memory of its devices, before anything is loaded.

use super::parts::{Heads, Sharding};
use super::shard_plan::{ShardPlan, ShardedTensor, Split};
use crate::options::{CacheOptions, PREFILL_CHUNK};
use candle_core::DType;
use candle_quant::checkpoint::module_of;
use candle_quant::parallel::{whole_groups, ExpertSplit};
use candle_quant::{DeviceKvCache, KvCacheConfig, QuantFormat};
use std::ops::Range;

/// What a model is loaded for.
///
/// ```
/// use candle_core::DType;
/// use candle_quant::Checkpoint;
/// use candle_quant_models::sharding::{ShardPlan, Workload};
///
/// let plan = ShardPlan::new(&Checkpoint::open("assets/tiny")?, 1)?;
/// // As stored; a function that returns a format says what dense weights become.
/// let needs = |context| plan.footprints(&Workload::on_cpu(DType::F32, context), |_module| None)[0];
/// assert_eq!(needs(512).weights, needs(256).weights);
/// assert_eq!(needs(512).cache, 2 * needs(256).cache);
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// The dtype of activations, which dense weights get, too.
    pub dtype: DType,
    /// How keys and values are held.
    pub cache: CacheOptions,
    /// Tokens of the longest text.
    pub context: usize,
    /// Tokens of a prompt that are computed at once.
    pub prefill_chunk: usize,
    /// Whether the devices are CPUs.
    pub is_on_cpu: bool,
}

impl Workload {
    /// Texts of up to `context` tokens on the CPU.
    pub fn on_cpu(dtype: DType, context: usize) -> Self {
        let (cache, prefill_chunk) = (CacheOptions::default(), PREFILL_CHUNK);
        Self { dtype, cache, context, prefill_chunk, is_on_cpu: true }
    }

    /// Texts of up to `context` tokens on GPUs.
    pub fn on_gpu(dtype: DType, context: usize) -> Self {
        Self { is_on_cpu: false, ..Self::on_cpu(dtype, context) }
    }

    /// The most tokens that are computed at once.
    fn chunk(&self) -> usize {
        self.prefill_chunk.min(self.context)
    }
}

/// What a rank needs of the memory of its device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Footprint {
    /// Weights as they are held.
    pub weights: u64,
    /// Keys and values of the longest text, and its states of linear attention.
    pub cache: u64,
    /// What a part of a prompt takes at most while it is computed, about.
    pub workspace: u64,
}

impl Footprint {
    /// All together.
    pub fn total(self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.workspace)
    }
}

impl ShardPlan {
    /// What each rank needs. `formats` tells what dense weights are quantized to while they are loaded, as for
    /// [`VarBuilder::quantize_with`](candle_quant::VarBuilder::quantize_with).
    ///
    /// Not counted: the program itself, and what a driver takes.
    pub fn footprints(
        &self,
        workload: &Workload,
        formats: impl Fn(&str) -> Option<QuantFormat>,
    ) -> Vec<Footprint> {
        let Sharding { heads, linear_heads, .. } = Sharding::new(&self.config, self.ranks);
        let all =
            Heads { query: 0..self.config.num_attention_heads, key: 0..self.config.num_key_value_heads };
        let of_rank = |rank: usize| {
            let own = heads.as_ref().and_then(|heads| heads.get(rank)).unwrap_or(&all);
            let all_linear = self.config.linear.as_ref().map_or(0, |linear| linear.key_heads);
            let linear_heads =
                linear_heads.as_ref().and_then(|heads| heads.get(rank)).map_or(all_linear, Range::len);
            let weights = self.tensors.iter().map(|tensor| held_bytes(tensor, rank, workload, &formats));
            Footprint {
                weights: weights.fold(0, u64::saturating_add),
                cache: self.cache_bytes(own, linear_heads, workload),
                workspace: self.workspace_bytes(own, linear_heads, workload),
            }
        };
        (0..self.ranks).map(of_rank).collect()
    }

    fn cache_bytes(&self, own: &Heads, linear_heads: usize, workload: &Workload) -> u64 {
        let of_layer = |layer: usize| {
            if let Some(linear) = self.config.linear.as_ref().filter(|linear| linear.is_linear(layer)) {
                return linear.state_bytes(linear_heads);
            }
            let (heads, size) = self.config.cached(own.key.len());
            let cache = workload.cache.layer(heads, size, self.config.window_of(layer), workload.dtype);
            if workload.is_on_cpu {
                return cache.size_in_bytes(workload.context);
            }
            let rows = DeviceKvCache::most_rows(&cache, workload.context, workload.chunk());
            KvCacheConfig { window: None, ..cache }.size_in_bytes(rows)
        };
        (0..self.config.num_hidden_layers).map(of_layer).fold(0, u64::saturating_add)
    }

    /// The hidden states and their norm, queries, keys, values and what attention makes of them, and the inner elements of
    /// gate, up and their product, or of the copy of it that is multiplied; then the logits of a token. On a device also the
    /// scores of all tokens seen, of which softmax makes several copies, and a layer's keys and values while its cache grows.
    fn workspace_bytes(&self, own: &Heads, linear_heads: usize, workload: &Workload) -> u64 {
        let config = &self.config;
        let product = |sizes: &[usize]| sizes.iter().fold(1u64, |all, size| all.saturating_mul(*size as u64));
        let dense = config.intermediate_size.div_ceil(self.ranks);
        // Every token may have chosen experts of one rank.
        let parts = if self.experts == ExpertSplit::Inside { self.ranks } else { 1 };
        let inner = |layer: usize| match config.moe.as_ref().filter(|moe| moe.is_sparse(layer)) {
            None => dense,
            Some(moe) => moe.intermediate_size.div_ceil(parts).saturating_mul(moe.top_k),
        };
        let inner = (0..config.num_hidden_layers).map(inner).max().unwrap_or(0);
        let (kv_heads, size) = config.cached(own.key.len());
        let (queries, keys) = (product(&[own.query.len(), size]), product(&[kv_heads, size]));
        // Queries, keys and values before and behind the convolution, values and their gates.
        let linear = self.config.linear.as_ref().map_or(0, |linear| {
            let (keys, values) = linear.elements(linear_heads);
            product(&[4, keys]).saturating_add(product(&[5, values]))
        });
        let of_token = [
            product(&[2, config.hidden_size]),
            queries.saturating_mul(2).saturating_add(keys.saturating_mul(2)).max(linear),
            product(&[3, inner]),
        ];
        let element = if workload.is_on_cpu { 4 } else { workload.dtype.size_in_bytes() };
        let chunk = workload.chunk();
        let states =
            of_token.into_iter().fold(0, u64::saturating_add).saturating_mul(product(&[chunk, element]));
        let logits = product(&[config.vocab_size, 4]);
        let on_device = match workload.is_on_cpu {
            true => 0,
            false if workload.cache.has_codes(workload.dtype) => {
                // Nothing but kernels reads them.
                let config = workload.cache.layer(kv_heads, size, None, workload.dtype);
                config.size_in_bytes(DeviceKvCache::most_rows(&config, workload.context, chunk))
            }
            false => {
                let scores = product(&[own.query.len(), chunk, workload.context, 2 * 4 + 2 * element]);
                scores.saturating_add(keys.saturating_mul(product(&[2, workload.context, element])))
            }
        };
        states.saturating_add(logits).saturating_add(on_device)
    }
}

/// Bytes in which a rank holds a tensor.
fn held_bytes(
    tensor: &ShardedTensor,
    rank: usize,
    workload: &Workload,
    formats: &impl Fn(&str) -> Option<QuantFormat>,
) -> u64 {
    let (Some(&bytes), Some(&elements)) = (tensor.rank_loaded.get(rank), tensor.rank_elements.get(rank))
    else {
        return 0;
    };
    let decoded = || elements.saturating_mul(workload.dtype.size_in_bytes() as u64);
    if tensor.is_decoded {
        return decoded();
    }
    let Some(stored) = tensor.dense else { return bytes };
    // Stacks of experts are parameters in some files, not weights of modules.
    let stack = (tensor.dims.len() == 3).then_some(tensor.name.as_str());
    let Some(format) = module_of(&tensor.name).or(stack).and_then(formats) else { return decoded() };
    // Of a row: what is the rank's, and what it quantizes, whole groups.
    let group = format.group_size();
    let (own, whole) = match (&tensor.split, tensor.dims.as_slice()) {
        (Split::Columns(columns), [_, .., k]) => {
            columns.get(rank).map_or((0, 0), |own| (own.len(), whole_groups(own, group, *k).len()))
        }
        (_, [_, .., k]) => (*k, *k),
        _ => (0, 0),
    };
    match elements.checked_div(own as u64) {
        Some(rows) if whole.is_multiple_of(group) => {
            format.size_in_bytes(rows.saturating_mul(whole as u64), stored)
        }
        _ => decoded(),
    }
}
