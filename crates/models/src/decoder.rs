//! The decoder: embedding, layers of attention and feed-forward, output head.

mod differentiable;
mod footprint;
mod plan;
#[cfg(test)]
mod tests;

pub use footprint::StepBytes;

use super::attention::Visible;
use super::config::Window;
use super::layer::Layer;
use super::norm::Norm;
use super::options::ModelOptions;
use super::root::Root;
use super::rope::Turns;
use super::Config;
use candle_core::{DType, Device, Tensor};
use candle_nn::Module;
use candle_quant::checkpoint::Checkpoint;
use candle_quant::nn::{Adapters, VarBuilder};
use candle_quant::parallel::{
    vocab_parallel_embedding, vocab_parallel_head, Rank, VocabParallelEmbedding, VocabParallelHead,
};
use candle_quant::step::{DeviceStep, StepPlan};
use candle_quant::{Error, Result};

/// A decoder-only language model with its key/value cache.
#[derive(Debug)]
pub struct Model {
    embed_tokens: VocabParallelEmbedding,
    layers: Vec<Layer>,
    /// All of it in one call; none if a layer is of a kind that a plan does not have.
    plan: Option<StepPlan>,
    /// Whether this rank knows that all have one, or none.
    has_agreed: bool,
    /// Its steps on a device, each with whether it is of a long text.
    steps: Vec<(bool, DeviceStep)>,
    norm: Norm,
    lm_head: VocabParallelHead,
    tied: bool,
    turns: Turns,
    /// Whether the cached keys have turned as in a long text.
    is_long: bool,
    scales: Scales,
    window: Option<Window>,
    max_tokens: usize,
    /// The most tokens of a text.
    context: usize,
    dtype: DType,
    device: Device,
    /// If it is a part of a model, whose other parts it waits for.
    rank: Option<Rank>,
    adapters: Adapters,
}

/// What embeddings and logits are multiplied by, and where logits end.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scales {
    embedding: f64,
    logits: f64,
    softcap: Option<f64>,
}

impl Scales {
    fn of_logits(self, logits: Tensor) -> candle_core::Result<Tensor> {
        let logits = if self.logits == 1. { logits } else { (logits * self.logits)? };
        match self.softcap {
            None => Ok(logits),
            Some(cap) => (logits / cap)?.tanh()? * cap,
        }
    }
}

/// Says what of a checkpoint has no effect.
fn warn_of_unused(config: &Config, checkpoint: &Checkpoint) {
    let unused = config.unused(checkpoint);
    if let Some(first) = unused.first() {
        let path = checkpoint.path().display();
        log::warn!("{path}: {} tensors that the model does not use, `{first}` among them", unused.len());
    }
}

impl Model {
    /// Loads a checkpoint: the architecture its config names, each weight packed or dense as it is
    /// stored, activations of `dtype`.
    ///
    /// # Errors
    /// If the architecture is not supported, or the weights are damaged or contradict the config.
    pub fn load(checkpoint: &Checkpoint, dtype: DType, device: &Device) -> Result<Self> {
        let config = Config::from_checkpoint(checkpoint)?;
        Self::new(&config, VarBuilder::from_checkpoint(checkpoint, dtype, device))
    }

    /// Builds a model from the weights at the root of `vb`; activations have the builder's dtype.
    ///
    /// On a builder for one of several ranks ([`VarBuilder::sharded`]) it is that rank's part: all ranks have to
    /// call [`forward`](Model::forward) alike, and all receive the logits.
    ///
    /// # Errors
    /// If the config is senseless, the dtype is not f32, f16 or bf16, or the weights are missing, damaged or contradict
    /// the config.
    pub fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        Self::with_options(config, vb, ModelOptions::default())
    }

    /// As [`new`](Model::new), with a choice of cache and context.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_quant::{Checkpoint, KvFormat, VarBuilder};
    /// use candle_quant_models::{CacheOptions, Config, Model, ModelOptions};
    ///
    /// # fn main() -> candle_quant::Result<()> {
    /// let checkpoint = Checkpoint::open("assets/tiny")?;
    /// let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
    /// let cache = CacheOptions { keys: Some(KvFormat::F16), max_tokens: Some(4096), ..Default::default() };
    /// let config = Config::from_checkpoint(&checkpoint)?;
    /// let model = Model::with_options(&config, vb, ModelOptions { cache, ..Default::default() })?;
    /// assert_eq!(model.cached_tokens(), 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As those of [`new`](Model::new); if the device has no cache of the chosen format.
    pub fn with_options(config: &Config, vb: VarBuilder, options: ModelOptions) -> Result<Self> {
        let stored = vb.checkpoint().map(|checkpoint| config.stored_in(checkpoint));
        let config = stored.as_ref().unwrap_or(config);
        config.validate()?;
        let dtype = vb.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::mismatch("activations", "F32, F16 or BF16", format!("{dtype:?}")));
        }
        options.cache.validate(vb.device().is_cpu(), dtype)?;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let root = Root::find(|name| vb.contains_tensor(name));
        let model = root.decoder(&vb);
        let embed_tokens = vocab_parallel_embedding(vocab, hidden, model.pp("embed_tokens"))?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| Layer::new(config, index, &options, model.pp("layers").pp(index)))
            .collect::<candle_core::Result<_>>()?;
        // The two defaults in use for a missing key contradict each other; the file decides.
        let head = root.head(&vb);
        let tied = config.tie_word_embeddings.unwrap_or_else(|| !head.contains_tensor("weight"));
        let lm_head = match tied {
            true => embed_tokens.as_head_of(&head),
            false => vocab_parallel_head(hidden, vocab, config.head_bias, head)?,
        };
        let mut this = Self {
            norm: Norm::new(config.norm, hidden, config.norm_eps, model.pp(config.names.final_norm))?,
            plan: None,
            has_agreed: false,
            steps: Vec::new(),
            embed_tokens,
            layers,
            lm_head,
            tied,
            turns: Turns::new(config),
            is_long: false,
            scales: Scales {
                embedding: config.embedding_scale,
                logits: config.logit_scale,
                softcap: config.logit_softcap,
            },
            window: config.sliding_window.map(|tokens| Window { tokens, is_chunked: config.chunked_window }),
            max_tokens: options.cache.max_tokens.unwrap_or(usize::MAX),
            context: options.context.unwrap_or(config.context()),
            dtype,
            device: vb.device().clone(),
            rank: vb.rank().cloned(),
            adapters: vb.adapters().clone(),
        };
        this.plan = this.planned();
        // Once, of several ranks.
        if let Some(checkpoint) = vb.checkpoint().filter(|_| vb.rank().is_none_or(|rank| rank.index() == 0)) {
            warn_of_unused(config, checkpoint);
        }
        Ok(this)
    }

    /// Logits `[B, T, vocabulary]`, of the activations' dtype, for `ids` `[B, T]`, whose first token
    /// stands at position `offset`. The tokens are appended to the cache, so that a text may come in
    /// pieces: a prompt in chunks, then token by token.
    ///
    /// # Errors
    /// If `offset` is not the number of tokens in the cache, there are no tokens, or more than the model is made for
    /// ([`Error::OutOfContext`]) or the cache may have ([`Error::OutOfCache`]). If the batch size
    /// differs from the cached one or an id is outside the vocabulary; the cache is then empty.
    pub fn forward(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        if let Some(logits) = self.run_step(ids, offset)? {
            return logits.unsqueeze(1);
        }
        if self.has_plan() {
            let (batch, len) = ids.dims2()?;
            let logits = self.run_plan(ids, offset, &(0..batch * len).collect::<Vec<_>>())?;
            return logits.reshape((batch, len, ()));
        }
        self.on_pool(ids, |model| {
            let hidden = model.hidden(ids, offset)?;
            model.logits(&hidden)
        })
    }

    /// As [`forward`](Model::forward), the logits `[B, vocabulary]` of the last token alone.
    ///
    /// # Errors
    /// As those of [`forward`](Model::forward).
    pub fn forward_last(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        if let Some(logits) = self.run_step(ids, offset)? {
            return Ok(logits);
        }
        if self.has_plan() {
            let (batch, len) = ids.dims2()?;
            let last: Vec<usize> = (1..=batch).map(|sequence| (sequence * len).saturating_sub(1)).collect();
            return self.run_plan(ids, offset, &last);
        }
        self.on_pool(ids, |model| {
            let hidden = model.hidden(ids, offset)?;
            let last = hidden.dim(1)?.saturating_sub(1);
            model.logits(&hidden.narrow(1, last, 1)?.squeeze(1)?.contiguous()?)
        })
    }

    /// Works on a thread of rayon's pool where the CPU computes a few tokens: many small operations share their work with
    /// its other threads, which takes long from outside. Ranks do not, for they wait for each other; nor do prompts, for
    /// which a thread keeps large buffers.
    fn on_pool<T: Send>(&mut self, ids: &Tensor, work: impl FnOnce(&mut Self) -> T + Send) -> T {
        const FEW: usize = 16;
        let is_small = self.device.is_cpu() && ids.elem_count() <= FEW;
        if is_small && self.rank.is_none() && rayon::current_thread_index().is_none() {
            rayon::scope(|_| work(self))
        } else {
            work(self)
        }
    }

    /// Whether all layers are computed in one call on the CPU, which has no gradients.
    fn has_plan(&self) -> bool {
        let computes = self.plan.as_ref().is_some_and(StepPlan::computes_adapters);
        computes && self.device.is_cpu() && !self.adapters.is_trained() && !self.adapters.is_observed()
    }

    /// The adapters of all layers.
    pub fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    /// Says that a text of `len` tokens will come, of which some may be cached. Models with LongRoPE turn queries and keys
    /// otherwise in long texts: they have to know before the first part of one comes. False if the cached keys had turned
    /// otherwise: all tokens are forgotten then.
    pub fn expect_tokens(&mut self, len: usize) -> bool {
        let Some(short) = self.turns.short_context() else { return true };
        let is_long = len > short;
        let kept = is_long == self.is_long || self.cached_tokens() == 0;
        if !kept {
            self.clear_kv_cache();
        }
        self.is_long = is_long;
        kept
    }

    /// Forgets all tokens.
    pub fn clear_kv_cache(&mut self) {
        self.is_long = false;
        for layer in &mut self.layers {
            layer.attention.clear_cache();
        }
    }

    /// Forgets the tokens from position `len` on, of every text of a batch, and returns how many are left: `len`, or none
    /// if the next token would see some that a sliding window has left behind, or a layer of linear attention has seen more.
    pub fn truncate_kv_cache(&mut self, len: usize) -> usize {
        if len >= self.cached_tokens() {
            return self.cached_tokens();
        }
        if len == 0 || !self.layers.iter_mut().all(|layer| layer.attention.truncate_cache(len)) {
            self.clear_kv_cache();
        }
        self.cached_tokens()
    }

    /// Tokens in the cache, which is the offset of the next one.
    pub fn cached_tokens(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.attention.cached())
    }

    /// Whether so many tokens more may come.
    pub(crate) fn has_room(&self, tokens: usize) -> bool {
        let short = self.turns.short_context().filter(|_| !self.is_long).unwrap_or(usize::MAX);
        self.cached_tokens().saturating_add(tokens) <= self.max_tokens.min(self.context).min(short)
    }

    /// The most tokens of a text.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Where the model lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The dtype of activations and logits.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Checks that tokens may come, and that these follow those in the cache.
    fn check_ids(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<()> {
        if ids.elem_count() == 0 {
            candle_core::bail!("ids: expected at least one token, found shape {:?}", ids.dims());
        }
        self.check(ids.dim(candle_core::D::Minus1)?, offset)
    }

    fn check(&mut self, tokens: usize, offset: usize) -> candle_core::Result<()> {
        let cached = self.cached_tokens();
        if offset != cached {
            candle_core::bail!(
                "offset: expected {cached}, the tokens in the cache, found {offset}; \
                 call clear_kv_cache to start a new text"
            );
        }
        let needed = offset.saturating_add(tokens);
        if needed > self.context {
            return Err(Error::OutOfContext { needed, context: self.context }.into());
        }
        if needed > self.max_tokens {
            return Err(Error::OutOfCache { needed, max_tokens: self.max_tokens }.into());
        }
        match self.turns.short_context() {
            Some(short) if needed > short && !self.is_long => match cached {
                0 => self.is_long = true,
                _ => candle_core::bail!(
                    "a text of {needed} tokens: beyond {short}, keys turn otherwise than the {cached} that are cached; \
                     call expect_tokens before a text that comes in parts"
                ),
            },
            _ => {}
        }
        Ok(())
    }

    /// The normalized hidden states `[B, T, hidden]` behind the last layer.
    fn hidden(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        self.check_ids(ids, offset)?;
        let hidden = self.run_layers(ids, offset);
        if hidden.is_err() {
            // Some layers may have appended their keys and others not.
            self.clear_kv_cache();
        }
        hidden
    }

    fn run_layers(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        let (batch, len) = ids.dims2()?;
        self.release_steps(batch, len);
        let like = (self.dtype, &self.device);
        let positions = self.turns.at(&(offset..offset + len), self.is_long, like)?;
        let visible =
            |window| (!self.device.is_cpu()).then(|| Visible::new(offset, len, window, &self.device));
        let (all, near) = (visible(None), visible(self.window));
        let mut x = self.embed(ids)?;
        for layer in &mut self.layers {
            let visible = if layer.slides { &near } else { &all };
            x = layer.forward(&x, &positions, visible.as_ref())?;
        }
        self.norm.forward(&x)
    }

    /// What the first layer begins with.
    pub(crate) fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.embed_tokens.forward(ids)?;
        if self.scales.embedding == 1. {
            Ok(x)
        } else {
            x * self.scales.embedding
        }
    }

    /// The logits of normalized hidden states.
    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        self.scales.of_logits(hidden.apply(&self.lm_head)?)
    }
}
