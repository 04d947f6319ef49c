//! A decoder as a plan: layers go in once, tokens run through all of them in one call.
//!
//! Layer by layer, a decode step is some hundred operations that each start all threads and allocate their outputs. A
//! [`StepPlan`] knows all of them before the first token: norms, projections, rotation, cache, attention and gates are
//! fused into few nodes, and threads go through all nodes together.

mod blocks;
mod checked;
mod delta_net;
mod device;
mod experts;

use super::parallel::{PartialSum, VocabParallelEmbedding, VocabularyShare};
use super::{AdapterSlot, Embedding, LayerWeight, Linear};
use crate::backend::step::{self, Heads, Input, Matrix, Node, Out, Plan, Projection, StepToken};
pub use crate::backend::StepCaches;
use crate::distributed::Rank;
use crate::{Error, KvCache, Result};
pub use blocks::{AttentionBlock, BlockOutput, ExpertsBlock, FeedForwardBlock, HeadBlock, StepNorm};
use candle_core::{Device, Tensor};
use checked::{
    activation, check_rows, factor, has_kernel, head_norm, limit, matrix, norm, numbers, turn, unsupported,
};
pub use delta_net::{DeltaNetBlock, DeltaNetProjections};
pub use device::DeviceStep;
use std::sync::Arc;

/// Makes a [`StepPlan`] of layers, in the order in which they compute. Their weights are shared, not copied.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_quant::step::{AttentionBlock, FeedForwardBlock, HeadBlock, StepBuilder, StepToken, Turn};
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
/// let inverse_frequencies = (0..32).map(|pair| 10_000f32.powf(-(pair as f32) / 32.)).collect();
/// let mut plan = StepBuilder::new(&table, 1.)?;
/// let projections = [
///     &linear_no_bias(256, 256, attn.pp("q_proj"))?,
///     &linear_no_bias(256, 128, attn.pp("k_proj"))?,
///     &linear_no_bias(256, 128, attn.pp("v_proj"))?,
///     &linear_no_bias(256, 256, attn.pp("o_proj"))?,
/// ];
/// plan.attention(AttentionBlock {
///     norm: Some((&norm(layer.pp("input_layernorm"))?).into()),
///     q_norm: Some((&rms_norm(64, 1e-6, attn.pp("q_norm"))?).into()),
///     k_norm: Some((&rms_norm(64, 1e-6, attn.pp("k_norm"))?).into()),
///     turn: Some(&Turn { inverse_frequencies, ..Turn::default() }),
///     ..AttentionBlock::new(projections, 64)
/// })?;
/// let gate = linear_no_bias(256, 512, mlp.pp("gate_proj"))?;
/// let up = linear_no_bias(256, 512, mlp.pp("up_proj"))?;
/// let down = linear_no_bias(512, 256, mlp.pp("down_proj"))?;
/// plan.feed_forward(FeedForwardBlock {
///     norm: Some((&norm(layer.pp("post_attention_layernorm"))?).into()),
///     ..FeedForwardBlock::new(Some(&gate), &up, &down)
/// })?;
/// let plan = plan.head(HeadBlock::new(&norm(vb.pp("norm"))?, &table.as_linear()))?;
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
    device: Device,
    /// Blocks of attention, and of linear attention.
    layers: usize,
    states: usize,
    adapters: Vec<AdapterSlot>,
    /// Those of layers whose adapters a plan does not compute.
    others: Vec<AdapterSlot>,
    /// Those of columns, each once.
    orders: Vec<Arc<[u32]>>,
}

impl StepBuilder {
    /// A plan that begins with the rows of an embedding table `[vocabulary, hidden]`, times `scale`, on the device of the table.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the table is neither packed nor F32, F16 or BF16 numbers that nothing trains, or there are no kernels
    /// for it there; if `scale` is not a number above zero.
    pub fn new(table: &Embedding, scale: f64) -> Result<Self> {
        Self::of(table, None, scale)
    }

    /// The same of a table of which each rank may have a part. All ranks have to make the same plan of their parts.
    ///
    /// # Errors
    /// As those of [`new`](Self::new); [`Error::Unsupported`] if ranks do not exchange what they have
    /// [in streams](crate::parallel::Collective::in_streams) of a device.
    pub fn of_part(table: &VocabParallelEmbedding, scale: f64) -> Result<Self> {
        let (table, share) = table.part();
        Self::of(table, share, scale)
    }

    fn of(table: &Embedding, share: Option<&VocabularyShare>, scale: f64) -> Result<Self> {
        let device = table.embeddings().device();
        let weight = matrix("embedding", table.embeddings(), &device)?;
        let rows = table.embeddings().dims().first().copied().unwrap_or_default();
        let first_token = share.map(|share| share.own().start);
        let plan = Plan {
            vocabulary: share.map_or(rows, |share| share.counts().sum()),
            nodes: vec![Node::Embed {
                table: weight,
                factor: factor("scale of embeddings", scale)?,
                first_token,
            }],
            hidden: table.hidden_size(),
            turns: Vec::new(),
            rank: None,
        };
        let (adapters, others, orders) = (Vec::new(), Vec::new(), Vec::new());
        let mut this = Self { plan, device, layers: 0, states: 0, adapters, others, orders };
        share.map_or(Ok(()), |share| this.part_of(share.rank()))?;
        Ok(this)
    }

    /// The plan is one of several, one for each rank.
    fn part_of(&mut self, rank: &Rank) -> Result<()> {
        if let Some(known) = &self.plan.rank {
            let same = || Error::mismatch("rank", "the one of the plan's other parts", "another");
            return known.is(rank).then_some(()).ok_or_else(same);
        }
        let exchange = match self.device.is_cpu() {
            true => None,
            false => rank.in_streams(&mut |_| Ok(())),
        };
        exchange.unwrap_or_else(|| {
            Err(Error::Unsupported {
                what: format!("a step plan of a rank on {:?} without NCCL", self.device.location()),
                remedy: "call the layers one by one".to_string(),
            })
        })?;
        self.plan.rank = Some(rank.clone());
        Ok(())
    }

    /// Adds an attention block, whose keys and values are in the next of the caches.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a weight is none that a [table](Self::new) may be, or not where the table is, or all heads together are to
    /// be normalized behind
    /// their turn, or queries with gates cut; if shapes do not fit, or a number is not one above zero.
    pub fn attention(&mut self, block: AttentionBlock) -> Result<()> {
        let nodes = self.attention_nodes(block)?;
        self.plan.nodes.extend(nodes);
        Ok(())
    }

    /// Adds a feed-forward block.
    ///
    /// # Errors
    /// As those of [`attention`](Self::attention); [`Error::Unsupported`] if plans do not have its activation.
    pub fn feed_forward(&mut self, block: FeedForwardBlock) -> Result<()> {
        let nodes = self.feed_forward_nodes(block)?;
        self.plan.nodes.extend(nodes);
        Ok(())
    }

    /// Adds both blocks of a layer that see the same hidden states.
    ///
    /// # Errors
    /// As those of [`feed_forward`](Self::feed_forward).
    pub fn parallel(&mut self, attention: AttentionBlock, feed_forward: FeedForwardBlock) -> Result<()> {
        let [queries, attend, add_attended] = self.attention_nodes(attention)?;
        let [inner, add_inner] = self.feed_forward_nodes(feed_forward)?;
        self.plan.nodes.extend([queries, attend, inner, add_attended, add_inner]);
        Ok(())
    }

    fn attention_nodes(&mut self, block: AttentionBlock) -> Result<[Node; 3]> {
        let (AttentionBlock { head_dim, has_gate, turns_first, .. }, hidden) = (block, self.plan.hidden);
        if has_gate && block.clip.is_some() {
            return Err(unsupported("clip of queries", "that have gates, which it would cut, too"));
        }
        let q = self.projection("queries", block.q_proj, hidden)?;
        let k = self.projection("keys", block.k_proj, hidden)?;
        let v = self.projection("values", block.v_proj, hidden)?;
        let whole = |rows: usize, size: usize| rows.checked_div(size).filter(|heads| heads * size == rows);
        // A gate is as long as its query.
        let of_query = if has_gate { head_dim.saturating_mul(2) } else { head_dim };
        let heads = whole(q.rows, of_query).zip(whole(k.rows, head_dim).filter(|_| v.rows == k.rows));
        let Some((heads, kv_heads)) =
            heads.filter(|(heads, kv_heads)| *kv_heads > 0 && heads.is_multiple_of(*kv_heads))
        else {
            let found = format!("{}, {} and {} outputs", q.rows, k.rows, v.rows);
            let gates = if has_gate { ", and as many gates as queries" } else { "" };
            let expected = format!("whole heads of {head_dim}{gates}");
            return Err(Error::mismatch("queries, keys and values", expected, found));
        };
        let mut o = self.projection("output of attention", block.o_proj, heads * head_dim)?;
        self.bias_of_sum("output of attention", &mut o, block.out.sum)?;
        check_rows("output of attention", &o, hidden)?;
        let turn = turn(block.turn, head_dim)?;
        let known = self.plan.turns.iter().position(|known| *known == turn);
        let heads = Heads {
            heads,
            kv_heads,
            head_dim,
            q_norm: head_norm("norm of queries", block.q_norm, (heads, head_dim), turns_first)?,
            k_norm: head_norm("norm of keys", block.k_norm, (kv_heads, head_dim), turns_first)?,
            has_gate,
            turns_first,
            turn: known.unwrap_or(self.plan.turns.len()),
            scale: factor("scale of attention", block.scale.unwrap_or(1. / (head_dim as f64).sqrt()))?,
            softcap: limit("softcap of attention", block.softcap)?,
            sinks: block.sinks.map(|sinks| numbers("sinks", sinks, heads)).transpose()?,
            layer: self.layers,
        };
        let norm = norm("norm before attention", block.norm, hidden)?;
        let clip = limit("clip of queries, keys and values", block.clip)?;
        let out = self.out("norm behind attention", block.out)?;
        if known.is_none() {
            self.plan.turns.push(turn);
        }
        self.layers += 1;
        Ok([Node::Project(norm, vec![q, k, v], clip), Node::Attend(heads), Node::AddAttended(o, out)])
    }

    fn feed_forward_nodes(&mut self, block: FeedForwardBlock) -> Result<[Node; 2]> {
        let hidden = self.plan.hidden;
        let up = self.projection("up", block.up_proj, hidden)?;
        let gate = block.gate_proj.map(|gate| self.projection("gate", gate, hidden)).transpose()?;
        gate.as_ref().map_or(Ok(()), |gate| check_rows("gate", gate, up.rows))?;
        let mut down = self.projection("down", block.down_proj, up.rows)?;
        self.bias_of_sum("down", &mut down, block.out.sum)?;
        check_rows("down", &down, hidden)?;
        let norm = norm("norm before the feed-forward block", block.norm, hidden)?;
        let out = self.out("norm behind the feed-forward block", block.out)?;
        let activation = activation(block.activation)?;
        Ok([Node::Inner { norm, gate, up, activation }, Node::AddInner(down, out)])
    }

    fn out(&self, what: &str, out: BlockOutput) -> Result<Out> {
        let norm = norm(what, out.norm, self.plan.hidden)?;
        let scale = factor("scale of a block's output", out.scale)?;
        Ok(Out { is_part: out.sum.is_some(), norm, scale })
    }

    /// What is added once to the sum of parts is added to the first of them.
    fn bias_of_sum(&mut self, what: &str, part: &mut Projection, sum: Option<PartialSum>) -> Result<()> {
        let Some(PartialSum { rank, bias }) = sum else { return Ok(()) };
        self.part_of(rank)?;
        if part.bias.is_some() {
            let what = format!("bias of {what}");
            return Err(Error::mismatch(&what, "none of a rank's part, but of the sum", "one"));
        }
        let bias = bias.map(|bias| numbers(what, bias, part.rows)).transpose()?;
        part.bias = bias.filter(|_| rank.index() == 0);
        Ok(())
    }

    fn projection(&mut self, what: &str, layer: &Linear, inputs: usize) -> Result<Projection> {
        let (weight, columns) = match layer.weight() {
            LayerWeight::Reordered(reordered) => {
                let columns = self.order(reordered.shared_columns());
                (Matrix::Packed(has_kernel(what, reordered.weight(), &self.device)?), Some(columns))
            }
            weight => (matrix(what, weight, &self.device)?, None),
        };
        let &[rows, k] = layer.weight().dims().as_slice() else {
            return Err(Error::mismatch(what, "a weight [N, K]", format!("{weight:?}")));
        };
        if k != inputs {
            return Err(Error::mismatch(what, format!("{inputs} inputs"), k.to_string()));
        }
        let bias = layer.bias().map(|bias| numbers(what, bias, rows)).transpose()?;
        let index = self.adapters.len();
        self.adapters.push(layer.adapters().clone());
        Ok(Projection { weight, bias, rows, k, columns, index })
    }

    /// An order of columns that the plan has already, if it is the same.
    fn order(&mut self, columns: &Arc<[u32]>) -> Arc<[u32]> {
        if let Some(known) = self.orders.iter().find(|known| *known == columns) {
            return Arc::clone(known);
        }
        self.orders.push(Arc::clone(columns));
        Arc::clone(columns)
    }

    /// The plan, which ends with an output head.
    ///
    /// # Errors
    /// As those of [`attention`](Self::attention).
    pub fn head(mut self, block: HeadBlock) -> Result<StepPlan> {
        let norm = norm("norm before the head", block.norm, self.plan.hidden)?;
        let head = self.projection("head", block.head, self.plan.hidden)?;
        let (scale, softcap) =
            (factor("scale of logits", block.scale)?, limit("softcap of logits", block.softcap)?);
        let parts: Option<Vec<_>> = block.share.map(|share| share.counts().collect());
        if let Some(share) = block.share {
            self.part_of(share.rank())?;
            check_rows("head", &head, share.own().len())?;
        }
        self.plan.nodes.push(Node::Logits { norm, head, scale, softcap, parts });
        let outputs = self.plan.outputs();
        let Self { plan, device, layers, states, adapters, others, orders: _ } = self;
        let (plan, adapters, others) = (Arc::new(plan), adapters.into(), others.into());
        Ok(StepPlan { plan, device, layers, states, outputs, adapters, others, is_long: false })
    }
}

/// A decoder whose layers are known: see [`StepBuilder`]. Clones share it.
///
/// On the CPU it computes any tokens of any sequences ([`run`](Self::run)); on a CUDA device it becomes a list of launches
/// for one token of each sequence ([`on_device`](Self::on_device)).
#[derive(Clone, Debug)]
pub struct StepPlan {
    plan: Arc<Plan>,
    device: Device,
    layers: usize,
    states: usize,
    outputs: usize,
    adapters: Arc<[AdapterSlot]>,
    others: Arc<[AdapterSlot]>,
    is_long: bool,
}

impl StepPlan {
    /// The same plan, in which queries and keys turn as in long texts: see [`Turn`](crate::step::Turn::of_long_texts). A text has to go
    /// through one of them from its beginning on.
    #[must_use]
    pub fn of_long_texts(&self) -> Self {
        Self { is_long: true, ..self.clone() }
    }

    /// Whether the plan computes all active adapters, on the CPU: not those of experts, nor of dense routers.
    pub fn computes_adapters(&self) -> bool {
        !self.others.iter().any(AdapterSlot::is_active)
    }

    /// Runs the tokens through all layers, on the CPU: their keys and values are appended to the caches, one for each attention
    /// block, and change the states, one for each block of linear attention. Returns the logits `[wanted, outputs]`, in f32, of the tokens `wanted`, in ascending order.
    ///
    /// Results do not depend on the number of threads.
    ///
    /// # Errors
    /// If there are no tokens, an id is outside of the vocabulary, `wanted` is not among the tokens, or caches or states do not
    /// fit: their number, their shapes, positions that do not follow what is cached, a cache that is full. If an active
    /// adapter of a layer is one in training, or of experts or their dense router. Nothing has changed then.
    pub fn run<'a>(
        &self,
        tokens: &[StepToken],
        caches: impl Into<StepCaches<'a, KvCache>>,
        wanted: &[usize],
    ) -> Result<Tensor> {
        let mut caches = caches.into();
        self.check_caches(&caches)?;
        if !self.device.is_cpu() {
            return Err(Error::Unsupported {
                what: format!("StepPlan::run on {:?}", self.device.location()),
                remedy: "call on_device, and run what that returns".to_string(),
            });
        }
        let trained = self.adapters.iter().find(|slot| slot.is_trained());
        let refused = trained.map(|slot| ("training of an adapter through", slot));
        let of_experts = self.others.iter().find(|slot| slot.is_active());
        if let Some((what, slot)) =
            refused.or(of_experts.map(|slot| ("an adapter of experts or their router in", slot)))
        {
            return Err(Error::Unsupported {
                what: format!("{what} a step plan, at `{}`,", slot.module()),
                remedy: "switch it off, or call the layers one by one".to_string(),
            });
        }
        let updates = match self.adapters.iter().any(AdapterSlot::is_active) {
            true => self.adapters.iter().map(AdapterSlot::updates).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        let input = Input { tokens, wanted, updates: &updates, is_long: self.is_long };
        let logits = step::run(&self.plan, input, &mut caches)?;
        Ok(Tensor::from_vec(logits, (wanted.len(), self.outputs), &Device::Cpu)?)
    }

    fn check_caches<K>(&self, caches: &StepCaches<K>) -> Result<()> {
        let counts = [
            ("caches", caches.keys.len(), self.layers, "attention"),
            ("states", caches.states.len(), self.states, "linear attention"),
        ];
        match counts.into_iter().find(|(_, found, expected, _)| found != expected) {
            None => Ok(()),
            Some((what, found, expected, kind)) => {
                let expected = format!("{expected}, one for each layer of {kind}");
                Err(Error::mismatch(what, expected, found.to_string()))
            }
        }
    }
}

#[cfg(test)]
mod tests;
