//! A decoder as a plan: layers go in once, tokens run through all of them in one call.
//!
//! Layer by layer, a decode step is some hundred operations that each start all threads and allocate their outputs. A
//! [`StepPlan`] knows all of them before the first token: norms, projections, rotation, cache, attention and gates are
//! fused into few nodes, and threads go through all nodes together.

use super::{AdapterSlot, Embedding, Linear};
use crate::backend::step::{self, Heads, Node, Norm, Plan, Projection, StepToken};
use crate::tensor::LayerWeight;
use crate::{Error, KvCache, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::RmsNorm;
use std::borrow::BorrowMut;
use std::sync::Arc;

/// The attention block of a layer, before its residual is added.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBlock<'a> {
    /// Of the block's input.
    pub norm: &'a RmsNorm,
    /// Hidden state to queries, `[heads * head_dim, hidden]`.
    pub q_proj: &'a Linear,
    /// Hidden state to keys, `[kv_heads * head_dim, hidden]`.
    pub k_proj: &'a Linear,
    /// Hidden state to values, as many as keys.
    pub v_proj: &'a Linear,
    /// What queries see to the hidden state, `[hidden, heads * head_dim]`.
    pub o_proj: &'a Linear,
    /// Of each query head, before rotation.
    pub q_norm: Option<&'a RmsNorm>,
    /// Of each key head, before rotation.
    pub k_norm: Option<&'a RmsNorm>,
    /// A logit for each query head beside those of the keys, `[heads]`.
    pub sinks: Option<&'a Tensor>,
    /// Elements of a head; even.
    pub head_dim: usize,
}

/// The feed-forward block of a layer: `down(silu(gate(x)) * up(x))`, before its residual is added.
#[derive(Clone, Copy, Debug)]
pub struct FeedForwardBlock<'a> {
    /// Of the block's input.
    pub norm: &'a RmsNorm,
    /// `[inner, hidden]`.
    pub gate_proj: &'a Linear,
    /// `[inner, hidden]`.
    pub up_proj: &'a Linear,
    /// `[hidden, inner]`.
    pub down_proj: &'a Linear,
}

/// Makes a [`StepPlan`] of layers, in the order in which they compute. Their weights are shared, not copied.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_quant::step::{AttentionBlock, FeedForwardBlock, StepBuilder, StepToken};
/// use candle_quant::{embedding, linear_no_bias, rms_norm, Checkpoint, KvCache, KvCacheConfig, VarBuilder};
///
/// # fn main() -> candle_quant::Result<()> {
/// // The first layer of the bundled model: four heads of 64 elements, on two heads of keys.
/// let checkpoint = Checkpoint::open("assets/tiny")?;
/// let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu).pp("model");
/// let (table, layer) = (embedding(640, 256, vb.pp("embed_tokens"))?, vb.pp("layers.0"));
/// let norm = |vb: VarBuilder| rms_norm(256, 1e-6, vb);
/// let (attn, mlp) = (layer.pp("self_attn"), layer.pp("mlp"));
///
/// let frequencies = (0..32).map(|pair| 10_000f32.powf(-(pair as f32) / 32.)).collect();
/// let mut plan = StepBuilder::new(&table, frequencies, 1.)?;
/// plan.attention(AttentionBlock {
///     norm: &norm(layer.pp("input_layernorm"))?,
///     q_proj: &linear_no_bias(256, 256, attn.pp("q_proj"))?,
///     k_proj: &linear_no_bias(256, 128, attn.pp("k_proj"))?,
///     v_proj: &linear_no_bias(256, 128, attn.pp("v_proj"))?,
///     o_proj: &linear_no_bias(256, 256, attn.pp("o_proj"))?,
///     q_norm: Some(&rms_norm(64, 1e-6, attn.pp("q_norm"))?),
///     k_norm: Some(&rms_norm(64, 1e-6, attn.pp("k_norm"))?),
///     sinks: None,
///     head_dim: 64,
/// })?;
/// plan.feed_forward(FeedForwardBlock {
///     norm: &norm(layer.pp("post_attention_layernorm"))?,
///     gate_proj: &linear_no_bias(256, 512, mlp.pp("gate_proj"))?,
///     up_proj: &linear_no_bias(256, 512, mlp.pp("up_proj"))?,
///     down_proj: &linear_no_bias(512, 256, mlp.pp("down_proj"))?,
/// })?;
/// let plan = plan.head(&norm(vb.pp("norm"))?, &table.as_linear())?;
///
/// let mut caches = [KvCache::new(KvCacheConfig::new(2, 64))?];
/// let token = |id, position| StepToken { id, sequence: 0, position };
/// let logits = plan.run(&[token(1, 0), token(2, 1)], &mut caches, &[1])?; // of the second token
/// assert_eq!((logits.dims(), caches[0].len(0)), (&[1, 640][..], 2));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StepBuilder {
    plan: Plan,
    layers: usize,
    adapters: Vec<AdapterSlot>,
}

impl StepBuilder {
    /// A plan that begins with the rows of an embedding table `[vocabulary, hidden]`. A position turns pair i of a
    /// head by `position * inverse_frequencies[i]`; rotated queries and keys are multiplied by `attention_factor`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the table is not packed, or not on the CPU.
    pub fn new(table: &Embedding, inverse_frequencies: Vec<f32>, attention_factor: f32) -> Result<Self> {
        let weight = packed("embedding", table.embeddings())?;
        let plan = Plan {
            vocabulary: weight.dims().first().copied().unwrap_or_default(),
            nodes: vec![Node::Embed(weight)],
            hidden: table.hidden_size(),
            inverse_frequencies,
            attention_factor,
        };
        Ok(Self { plan, layers: 0, adapters: Vec::new() })
    }

    /// Adds an attention block, whose keys and values are in the next of the caches.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a weight is not packed, or not on the CPU; if shapes do not fit.
    pub fn attention(&mut self, block: AttentionBlock) -> Result<()> {
        let AttentionBlock { head_dim, .. } = block;
        let pairs = self.plan.inverse_frequencies.len();
        if head_dim == 0 || head_dim != 2 * pairs {
            return Err(Error::mismatch(
                "head",
                format!("{} elements, two for each frequency", 2 * pairs),
                head_dim.to_string(),
            ));
        }
        let q = self.projection("queries", block.q_proj, self.plan.hidden)?;
        let k = self.projection("keys", block.k_proj, self.plan.hidden)?;
        let v = self.projection("values", block.v_proj, self.plan.hidden)?;
        let (heads, kv_heads) = (q.rows / head_dim, k.rows / head_dim);
        let fits = q.rows == heads * head_dim && k.rows == kv_heads * head_dim && v.rows == k.rows;
        if !fits || kv_heads == 0 || heads % kv_heads != 0 {
            let found = format!("{}, {} and {} outputs", q.rows, k.rows, v.rows);
            return Err(Error::mismatch(
                "queries, keys and values",
                format!("whole heads of {head_dim}"),
                found,
            ));
        }
        let o = self.projection("output of attention", block.o_proj, q.rows)?;
        check_rows("output of attention", &o, self.plan.hidden)?;
        let sinks = match block.sinks {
            None => None,
            Some(sinks) => Some(numbers("sinks", sinks, heads)?),
        };
        let norm_of =
            |name, norm: Option<&RmsNorm>| norm.map(|norm| self::norm(name, norm, head_dim)).transpose();
        let of_heads = Heads {
            heads,
            kv_heads,
            head_dim,
            q_norm: norm_of("norm of queries", block.q_norm)?,
            k_norm: norm_of("norm of keys", block.k_norm)?,
            sinks,
            layer: self.layers,
        };
        let norm = norm("norm before attention", block.norm, self.plan.hidden)?;
        self.layers += 1;
        self.plan.nodes.extend([
            Node::Queries(norm, [q, k, v]),
            Node::Attend(of_heads),
            Node::AddAttended(o),
        ]);
        Ok(())
    }

    /// Adds a feed-forward block.
    ///
    /// # Errors
    /// As those of [`attention`](Self::attention).
    pub fn feed_forward(&mut self, block: FeedForwardBlock) -> Result<()> {
        let hidden = self.plan.hidden;
        let gate = self.projection("gate", block.gate_proj, hidden)?;
        let up = self.projection("up", block.up_proj, hidden)?;
        check_rows("up", &up, gate.rows)?;
        let down = self.projection("down", block.down_proj, gate.rows)?;
        check_rows("down", &down, hidden)?;
        let norm = norm("norm before the feed-forward block", block.norm, hidden)?;
        self.plan.nodes.extend([Node::Gate(norm, [gate, up]), Node::AddInner(down)]);
        Ok(())
    }

    fn projection(&mut self, what: &str, layer: &Linear, inputs: usize) -> Result<Projection> {
        let weight = packed(what, layer.weight())?;
        let &[rows, k] = weight.dims().as_slice() else {
            return Err(Error::mismatch(what, "a weight [N, K]", format!("{weight:?}")));
        };
        if k != inputs {
            return Err(Error::mismatch(what, format!("{inputs} inputs"), k.to_string()));
        }
        let bias = layer.bias().map(|bias| numbers(what, bias, rows)).transpose()?;
        let index = self.adapters.len();
        self.adapters.push(layer.adapters().clone());
        Ok(Projection { weight, bias, rows, k, index })
    }

    /// The plan, which ends with an output head `[outputs, hidden]`.
    ///
    /// # Errors
    /// As those of [`attention`](Self::attention).
    pub fn head(mut self, norm: &RmsNorm, head: &Linear) -> Result<StepPlan> {
        let norm = self::norm("norm before the head", norm, self.plan.hidden)?;
        let head = self.projection("head", head, self.plan.hidden)?;
        let outputs = head.rows;
        self.plan.nodes.push(Node::Logits(norm, head));
        let Self { plan, layers, adapters } = self;
        Ok(StepPlan { plan: Arc::new(plan), layers, outputs, adapters: adapters.into() })
    }
}

/// A decoder whose layers are known: see [`StepBuilder`]. Clones share it.
#[derive(Clone, Debug)]
pub struct StepPlan {
    plan: Arc<Plan>,
    layers: usize,
    outputs: usize,
    adapters: Arc<[AdapterSlot]>,
}

impl StepPlan {
    /// Runs the tokens through all layers: their keys and values are appended to the caches, one for each attention
    /// block. Returns the logits `[wanted, outputs]`, in f32, of the tokens `wanted`, in ascending order.
    ///
    /// Results do not depend on the number of threads.
    ///
    /// # Errors
    /// If there are no tokens, an id is outside of the vocabulary, `wanted` is not among the tokens, or caches do not
    /// fit: their number, their shapes, positions that do not follow what is cached, a cache that is full. If an active
    /// adapter of a layer is one in training. Nothing has changed then.
    pub fn run(
        &self,
        tokens: &[StepToken],
        caches: &mut [impl BorrowMut<KvCache>],
        wanted: &[usize],
    ) -> Result<Tensor> {
        if caches.len() != self.layers {
            return Err(Error::mismatch(
                "caches",
                format!("{}, one for each layer", self.layers),
                caches.len().to_string(),
            ));
        }
        if let Some(slot) = self.adapters.iter().find(|slot| slot.is_trained()) {
            return Err(Error::Unsupported {
                what: format!("training of an adapter through a step plan, at `{}`,", slot.module()),
                remedy: "switch it off, or call the layers one by one".to_string(),
            });
        }
        let updates = match self.adapters.iter().any(AdapterSlot::is_active) {
            true => self.adapters.iter().map(AdapterSlot::updates).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        let mut caches: Vec<&mut KvCache> = caches.iter_mut().map(BorrowMut::borrow_mut).collect();
        let logits = step::run(&self.plan, &updates, tokens, &mut caches, wanted)?;
        Ok(Tensor::from_vec(logits, (wanted.len(), self.outputs), &Device::Cpu)?)
    }
}

fn packed(what: &str, weight: &LayerWeight) -> Result<QuantTensor> {
    let unsupported = |found: String| Error::Unsupported {
        what: format!("{what} of a step plan {found}"),
        remedy: "call the layers one by one".to_string(),
    };
    match weight {
        LayerWeight::Quantized(weight) if weight.device().is_cpu() && weight.dims().len() == 2 => {
            Ok(weight.clone())
        }
        LayerWeight::Quantized(weight) => Err(unsupported(format!("on {:?}", weight.device().location()))),
        other => Err(unsupported(format!("as {}", other.format_name()))),
    }
}

fn check_rows(what: &str, projection: &Projection, expected: usize) -> Result<()> {
    match projection.rows == expected {
        true => Ok(()),
        false => Err(Error::mismatch(what, format!("{expected} outputs"), projection.rows.to_string())),
    }
}

fn norm(what: &str, norm: &RmsNorm, size: usize) -> Result<Norm> {
    Ok(Norm { weight: numbers(what, norm.weight(), size)?, eps: norm.eps() as f32 })
}

fn numbers(what: &str, tensor: &Tensor, len: usize) -> Result<Vec<f32>> {
    if tensor.elem_count() != len {
        return Err(Error::mismatch(what, format!("{len} numbers"), format!("shape {:?}", tensor.dims())));
    }
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
