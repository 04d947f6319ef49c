//! Grouped-query attention with a key/value cache: on the CPU by [`candle_quant::ops::attention`], on other devices by
//! [`candle_quant::ops::decode_attention`] or candle's operations.

mod differentiable;
mod latent;
mod linear;
mod on_device;

use super::config::{LayerRope, QkNorm, QkNormOver, Window};
use super::mixer::LayerCache;
use super::norm::Norm;
use super::options::CacheOptions;
use super::projection::{columns_of, rows_of};
use super::rope::Positions;
use super::sharding::{Heads, Sharding};
use super::Config;
use candle_core::{DType, Result, Tensor, D};
use candle_nn::Module;
use candle_quant::nn::{forward_all, LayerWeight, Linear, VarBuilder};
use candle_quant::ops::{self, AttentionOptions};
use candle_quant::parallel::RowParallel;
use candle_quant::step::{AttentionBlock, BlockOutput, Turn};
use candle_quant::{KvCache, KvFormat};
use latent::LatentInputs;
pub(super) use linear::LinearAttention;
pub(super) use on_device::Visible;
use on_device::{OnDevice, Scores};
use std::ops::Range;
use std::slice;

#[derive(Debug)]
pub(super) struct Attention {
    inputs: Inputs,
    o_proj: RowParallel,
    scale: f64,
    softcap: Option<f64>,
    /// A logit for each query head, `[heads]` in f32.
    sinks: Option<Tensor>,
    /// Elements of a head of the cache.
    head_dim: usize,
    cache: Cache,
}

/// What makes queries, keys and values.
#[derive(Debug)]
enum Inputs {
    Heads(HeadInputs),
    Latent(LatentInputs),
}

/// Queries, keys and values, and the gate that what queries see is multiplied by.
type Projected = ([Tensor; 3], Option<Tensor>);

/// Projections to queries, keys and values of each head.
#[derive(Debug)]
struct HeadInputs {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    norms: Option<QkNorms>,
    /// Whether there is a gate behind the queries of each head.
    has_gate: bool,
    /// Where queries, keys and values are cut.
    clip: Option<f64>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// The norms of queries and keys.
#[derive(Debug)]
struct QkNorms {
    how: QkNorm,
    q_norm: Norm,
    k_norm: Norm,
}

impl QkNorms {
    /// Whether a layer has them: those behind a rotation are where there is one.
    fn applies(&self, rope: LayerRope) -> bool {
        !self.how.after_rotation || rope != LayerRope::None
    }

    /// Of `[B, T, heads, head_dim]`.
    fn forward(&self, q: &Tensor, k: &Tensor) -> Result<[Tensor; 2]> {
        let normalized = |norm: &Norm, x: &Tensor| match self.how.over {
            QkNormOver::All => norm.forward(&x.flatten_from(2)?)?.reshape(x.shape()),
            QkNormOver::Head | QkNormOver::HeadOfItsOwn => norm.forward(x),
        };
        Ok([normalized(&self.q_norm, q)?, normalized(&self.k_norm, k)?])
    }
}

/// The keys and values so far, and who attends to them.
#[derive(Debug)]
enum Cache {
    OnCpu(KvCache),
    OnDevice(OnDevice),
}

impl HeadInputs {
    /// `copies` ranks have these keys.
    fn new(config: &Config, Heads { query, key }: &Heads, copies: usize, vb: &VarBuilder) -> Result<Self> {
        let head_dim = config.head_dim;
        let (all_heads, all_kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let rows = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let project = |heads: usize, own: &Range<usize>, size: usize, name| {
            let rows = own.start * size..own.end * size;
            columns_of(config.hidden_size, heads * size, rows, config.qkv_bias, vb.pp(name))
        };
        let norm = |QkNorm { kind, over, .. }, heads, own: &Range<usize>, copies, name| {
            let (eps, vb) = (config.norm_eps, vb.pp(name));
            match over {
                QkNormOver::Head => Norm::new(kind, head_dim, eps, vb),
                QkNormOver::HeadOfItsOwn => Norm::of_each_head(kind, heads, own, head_dim, eps, vb),
                QkNormOver::All => Norm::of_all_heads(kind, heads * head_dim, &rows(own), copies, eps, vb),
            }
        };
        let norms = |how| {
            Ok::<_, candle_core::Error>(QkNorms {
                how,
                q_norm: norm(how, all_heads, query, 1, config.names.q_norm)?,
                k_norm: norm(how, all_kv_heads, key, copies, config.names.k_norm)?,
            })
        };
        Ok(Self {
            q_proj: project(all_heads, query, config.query_rows(), "q_proj")?,
            k_proj: project(all_kv_heads, key, head_dim, "k_proj")?,
            v_proj: project(all_kv_heads, key, head_dim, "v_proj")?,
            norms: config.qk_norm.map(norms).transpose()?,
            has_gate: config.attention_gate,
            clip: config.qkv_clip,
            heads: query.len(),
            kv_heads: key.len(),
            head_dim,
        })
    }

    /// Queries `[B, T, heads, head_dim]`, keys and values `[B, T, kv_heads, head_dim]` of `x`, in their positions.
    fn project(&self, x: &Tensor, (positions, rope): (&Positions, LayerRope)) -> Result<Projected> {
        let (batch, len, _) = x.dims3()?;
        let heads = |x: Tensor, heads| x.reshape((batch, len, heads, self.head_dim));
        let clipped = |x: Tensor| self.clip.map_or(Ok(x.clone()), |clip| x.clamp(-clip, clip));
        let [mut q, k, v] = forward_all([&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        let mut gate = None;
        if self.has_gate {
            let both = q.reshape((batch, len, self.heads, ()))?;
            let half = |start| both.narrow(D::Minus1, start, self.head_dim)?.contiguous();
            (q, gate) = (half(0)?, Some(half(self.head_dim)?.flatten_from(2)?));
        }
        let (mut q, mut k) = (heads(q, self.heads)?, heads(k, self.kv_heads)?);
        if let Some(norms) = self.norms.as_ref().filter(|norms| !norms.how.after_rotation) {
            [q, k] = norms.forward(&q, &k)?;
        }
        [q, k] = positions.place(rope, clipped(q)?, clipped(k)?)?;
        let behind = self.norms.as_ref().filter(|norms| norms.how.after_rotation && norms.applies(rope));
        if let Some(norms) = behind {
            [q, k] = norms.forward(&q, &k)?;
        }
        // Where queries grow, they do so last.
        Ok(([positions.grown(rope, q)?, k, clipped(heads(v, self.kv_heads)?)?], gate))
    }
}

impl Attention {
    /// The attention of layer `layer`.
    pub fn new(config: &Config, layer: usize, options: &CacheOptions, vb: VarBuilder) -> Result<Self> {
        let (all_heads, all_kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let shares =
            vb.rank().and_then(|rank| Some((rank.index(), Sharding::new(config, rank.world_size()).heads?)));
        let own = shares.as_ref().and_then(|(rank, shares)| shares.get(*rank).cloned());
        let own = own.unwrap_or(Heads { query: 0..all_heads, key: 0..all_kv_heads });
        // Ranks that have the same keys.
        let copies =
            shares.map_or(1, |(_, shares)| shares.iter().filter(|share| share.key == own.key).count());
        let inputs = match config.latents {
            None => Inputs::Heads(HeadInputs::new(config, &own, copies, &vb)?),
            Some(sizes) => Inputs::Latent(LatentInputs::new(config, sizes, &own.query, &vb)?),
        };
        let (kv_heads, head_dim) = config.cached(own.key.len());
        let cache = options.layer(kv_heads, head_dim, config.window_of(layer), vb.dtype());
        let cache = match vb.device().is_cpu() {
            true => Cache::OnCpu(KvCache::new(cache)?),
            false => Cache::OnDevice(OnDevice::new(cache, vb.device())?),
        };
        let (value_dim, output) = (config.value_dim(), vb.pp(config.names.o_proj));
        let columns = own.query.start * value_dim..own.query.end * value_dim;
        Ok(Self {
            inputs,
            o_proj: rows_of(all_heads * value_dim, config.hidden_size, columns, config.output_bias, output)?,
            scale: config.attention_scale,
            softcap: config.attention_softcap,
            sinks: config
                .attention_sinks
                .then(|| {
                    vb.tensor_part(&[all_heads], "sinks", slice::from_ref(&own.query))?.to_dtype(DType::F32)
                })
                .transpose()?,
            head_dim,
            cache,
        })
    }

    /// The block between its norms, if it is of the kind that plans have.
    pub fn block<'a>(&'a self, turn: &'a Turn, rope: LayerRope) -> Option<AttentionBlock<'a>> {
        let Inputs::Heads(inputs) = &self.inputs else { return None };
        let HeadInputs { q_proj, k_proj, v_proj, norms, clip, has_gate, .. } = inputs;
        // A step clips before norms, and what it clips has no gate.
        if clip.is_some() && (norms.is_some() || *has_gate) {
            return None;
        };
        let norms = norms.as_ref().filter(|norms| norms.applies(rope));
        let (q_norm, k_norm) = match norms {
            None => (None, None),
            Some(norms) => (Some(norms.q_norm.of_step()?), Some(norms.k_norm.of_step()?)),
        };
        let (o_proj, sum) = self.o_proj.part()?;
        Some(AttentionBlock {
            q_norm,
            k_norm,
            has_gate: *has_gate,
            turns_first: norms.is_some_and(|norms| norms.how.after_rotation),
            clip: *clip,
            turn: Some(turn),
            scale: Some(self.scale),
            softcap: self.softcap,
            sinks: self.sinks.as_ref(),
            out: BlockOutput { sum, ..Default::default() },
            ..AttentionBlock::new([q_proj, k_proj, v_proj, o_proj], self.head_dim)
        })
    }

    pub fn cache_mut(&mut self) -> LayerCache<'_> {
        match &mut self.cache {
            Cache::OnCpu(cache) => LayerCache::OnCpu(cache),
            Cache::OnDevice(OnDevice { cache }) => LayerCache::OnDevice(cache),
        }
    }

    /// `x` is `[B, T, hidden]`, the tokens that follow those in the cache; what attention makes of them is
    /// added to `residual`, if there is one. `visible` is what they see; on the CPU the cache knows.
    pub fn forward(
        &mut self,
        x: &Tensor,
        residual: Option<&Tensor>,
        at: (&Positions, LayerRope),
        visible: Option<&Visible>,
    ) -> Result<Tensor> {
        let ([q, k, v], gate) = self.project(x, at)?;
        let y = match &mut self.cache {
            Cache::OnCpu(cache) => {
                let options = options(self.scale, self.softcap, self.sinks.as_ref());
                ops::attention(&q, &k, &v, cache, options)?
            }
            Cache::OnDevice(cache) => {
                let scores = Scores { scale: self.scale, softcap: self.softcap, sinks: self.sinks.as_ref() };
                cache.attend([&q, &k, &v], visible, &scores)?
            }
        };
        self.output(&y, gate.as_ref(), residual)
    }

    /// The output projection of what queries see, as far as gates let it through, added to `residual` if there is one.
    fn output(&self, y: &Tensor, gate: Option<&Tensor>, residual: Option<&Tensor>) -> Result<Tensor> {
        let y = match &self.inputs {
            Inputs::Heads(_) => y.clone(),
            Inputs::Latent(inputs) => inputs.finish(y)?,
        };
        let y = match gate {
            Some(gate) => (y * candle_nn::ops::sigmoid(gate)?)?,
            None => y,
        };
        match residual {
            Some(residual) => self.o_proj.forward_add(&y, residual),
            None => self.o_proj.forward(&y),
        }
    }

    fn project(&self, x: &Tensor, at: (&Positions, LayerRope)) -> Result<Projected> {
        match &self.inputs {
            Inputs::Heads(inputs) => inputs.project(x, at),
            Inputs::Latent(inputs) => Ok((inputs.project(x, at)?, None)),
        }
    }

    /// How the cache holds keys and values.
    pub fn cache_formats(&self) -> (KvFormat, KvFormat) {
        let config = match &self.cache {
            Cache::OnCpu(cache) => cache.config(),
            Cache::OnDevice(OnDevice { cache }) => cache.config(),
        };
        (config.keys, config.values)
    }

    /// Bytes of the cache as it is, blocks without tokens included.
    pub fn cache_bytes(&self) -> u64 {
        match &self.cache {
            Cache::OnCpu(cache) => cache.size_in_bytes() as u64,
            Cache::OnDevice(OnDevice { cache }) => cache.size_in_bytes(),
        }
    }

    /// Bytes of keys and values that a token reads which is the last of so many. `window` is what it sees.
    pub fn bytes_seen(&self, tokens: usize, window: Option<Window>) -> u64 {
        match &self.cache {
            Cache::OnCpu(cache) => cache.config().size_in_bytes(tokens),
            Cache::OnDevice(OnDevice { cache }) => {
                let seen = tokens.min(window.map_or(tokens, |window| window.tokens));
                cache.token_bytes().saturating_mul(seen as u64)
            }
        }
    }

    /// Tokens in the cache.
    pub fn cached(&self) -> usize {
        match &self.cache {
            Cache::OnCpu(cache) => cache.len(0),
            Cache::OnDevice(OnDevice { cache }) => cache.len(),
        }
    }

    pub fn clear_cache(&mut self) {
        match &mut self.cache {
            Cache::OnCpu(cache) => cache.clear(),
            Cache::OnDevice(OnDevice { cache }) => cache.clear(),
        }
    }

    /// Keeps the first `len` tokens; false if that is not possible.
    pub fn truncate_cache(&mut self, len: usize) -> bool {
        match &mut self.cache {
            Cache::OnCpu(cache) => (0..cache.sequences()).all(|sequence| cache.truncate(sequence, len)),
            Cache::OnDevice(OnDevice { cache }) => cache.truncate(len),
        }
    }

    pub fn weights(&self) -> Vec<LayerWeight> {
        let inputs: Vec<_> = match &self.inputs {
            Inputs::Heads(HeadInputs { q_proj, k_proj, v_proj, .. }) => {
                [q_proj, k_proj, v_proj].map(|linear| linear.weight().clone()).into()
            }
            Inputs::Latent(inputs) => inputs.weights().collect(),
        };
        inputs.into_iter().chain([self.o_proj.weight().clone()]).collect()
    }
}

/// How kernels attend.
fn options(scale: f64, softcap: Option<f64>, sinks: Option<&Tensor>) -> AttentionOptions<'_> {
    let softcap = softcap.map(|cap| cap as f32);
    AttentionOptions { scale: scale as f32, softcap, sinks, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::Turns;
    use candle_core::Device;

    #[test]
    fn a_rank_has_the_keys_of_its_own_heads() {
        let checkpoint = candle_quant::Checkpoint::open("assets/tiny").unwrap();
        let config = Config::from_json(checkpoint.config()).unwrap();
        // 4 query heads on 2 key heads, two tokens of 64 elements.
        for (ranks, heads) in
            [(1, vec![2]), (2, vec![1; 2]), (3, vec![1; 3]), (4, vec![1; 4]), (8, vec![2; 8])]
        {
            let (checkpoint, config) = (checkpoint.clone(), config.clone());
            let cached = candle_quant::parallel::run(&vec![Device::Cpu; ranks], move |rank| {
                let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32);
                let mut attention =
                    Attention::new(&config, 0, &CacheOptions::default(), vb.pp("model.layers.0.self_attn"))?;
                let x = Tensor::ones((1, 2, 256), DType::F32, rank.device())?;
                let positions = Turns::new(&config).at(&(0..2), false, (DType::F32, rank.device()))?;
                attention.forward(&x, Some(&x), (&positions, LayerRope::All), None)?;
                let Cache::OnCpu(cache) = &attention.cache else { panic!("{:?}", attention.cache) };
                Ok((cache.config().kv_heads, cache.len(0)))
            });
            let expected: Vec<_> = heads.into_iter().map(|heads| (heads, 2)).collect();
            assert_eq!(cached.unwrap(), expected, "{ranks} ranks");
        }
    }
}
