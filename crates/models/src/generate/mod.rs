//! From a prompt to text: prefill in chunks, sampling, stop tokens, streaming.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_quant::Checkpoint;
//! use candle_quant_models::{generate, Model};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> candle_quant::Result<()> {
//! let checkpoint = Checkpoint::open("assets/tiny")?;
//! let tokenizer = generate::load_tokenizer(&checkpoint)?;
//! let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu)?;
//! let params = generate::Params {
//!     sample_len: 40,
//!     seed: Some(1),
//!     stop_tokens: generate::stop_tokens(&checkpoint)?,
//!     ..Default::default()
//! };
//! let generated = generate::generate(&mut model, &tokenizer, "Once upon a time", &params, |text| {
//!     print!("{text}");
//!     ControlFlow::Continue(())
//! })?;
//! println!("\n{:.1} tokens/s", generated.decode_rate());
//! assert!(!generated.text.is_empty() && generated.tokens.len() <= 40);
//! # Ok(())
//! # }
//! ```

mod caught;
mod defaults;
mod lookup;
mod sampler;
mod sentencepiece;
mod session;
mod stop;
mod text;
mod tokenizer;
mod tokenizer_json;

pub use defaults::{stored_sampling, SAMPLING_KEYS};
pub use sampler::{Sampler, Sampling};
pub use session::{encode, Event, Session};
pub use text::{load_tokenizer, stop_tokens, TextStream};
pub use tokenizer::stored_tokenizer;

use crate::options::PREFILL_CHUNK;
use crate::Model;
use candle_core::{Device, Tensor};
use candle_quant::ops::SampleOptions;
use candle_quant::Result;
use std::ops::ControlFlow;
use std::time::Duration;
use tokenizers::Tokenizer;

/// A model that [`generate`] can drive: [`Model`], or one of your own.
///
/// ```
/// use candle_core::{DType, Device, Module, Result, Tensor};
/// use candle_quant::{embedding, Checkpoint, Embedding, VarBuilder};
/// use candle_quant_models::generate::{generate, load_tokenizer, CausalLm, Params};
/// use std::ops::ControlFlow;
///
/// /// The next token is the one whose embedding is most like that of the last.
/// struct Echo(Embedding);
///
/// impl CausalLm for Echo {
///     fn forward_last(&mut self, ids: &Tensor, _offset: usize) -> Result<Tensor> {
///         let last = ids.narrow(1, ids.dim(1)? - 1, 1)?;
///         self.0.as_linear().forward(&self.0.forward(&last)?.squeeze(1)?) // [B, vocabulary]
///     }
///     fn clear_kv_cache(&mut self) {}
///     fn device(&self) -> &Device {
///         &Device::Cpu
///     }
/// }
///
/// # fn main() -> candle_quant::Result<()> {
/// let checkpoint = Checkpoint::open("assets/tiny")?;
/// let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
/// let mut model = Echo(embedding(640, 256, vb.pp("model.embed_tokens"))?);
/// let params = Params { sample_len: 5, ..Default::default() };
/// let tokenizer = load_tokenizer(&checkpoint)?;
/// let echo = generate(&mut model, &tokenizer, "Once", &params, |_| ControlFlow::Continue(()))?;
/// assert_eq!(echo.tokens.len(), 5);
/// # Ok(())
/// # }
/// ```
pub trait CausalLm {
    /// Logits `[B, vocabulary]` of the last token of `ids` `[B, T]`, the first of which stands at
    /// position `offset`; the tokens are remembered.
    ///
    /// # Errors
    /// Whatever the model can't compute.
    fn forward_last(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor>;

    /// Logits `[T, vocabulary]` of each of the tokens `ids` `[1, T]`, as those that [`forward_last`](Self::forward_last) gives
    /// for the last; the tokens are remembered. None if the model has nothing of the kind, which is what happens here, or no
    /// room for so many, and then nothing has happened. [`Params::lookup`] needs it.
    ///
    /// # Errors
    /// Whatever the model can't compute.
    fn forward_each(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Option<Tensor>> {
        let _ = (ids, offset);
        Ok(None)
    }

    /// The token that is drawn, as [`sample`](candle_quant::ops::sample) does with these options, a seed and a step, from the
    /// logits that [`forward_last`](Self::forward_last) would give for token `id` at position `offset`; `id` is remembered. None,
    /// and then nothing has happened, if the model does not draw where it computes, which is what happens here.
    ///
    /// # Errors
    /// Whatever the model can't compute; if the logits have no meaning.
    fn next_token(
        &mut self,
        id: u32,
        offset: usize,
        options: &SampleOptions,
        draw: (u64, u64),
    ) -> candle_core::Result<Option<u32>> {
        let _ = (id, offset, options, draw);
        Ok(None)
    }

    /// Says that a text of `len` tokens will come, of which some may be cached; false if that made the model forget all tokens,
    /// which does not happen here.
    fn expect_tokens(&mut self, len: usize) -> bool {
        let _ = len;
        true
    }

    /// Forgets all tokens.
    fn clear_kv_cache(&mut self);

    /// Forgets the tokens from position `len` on, and returns how many are left: `len`, or none, which is what happens here.
    fn truncate_kv_cache(&mut self, len: usize) -> usize {
        let _ = len;
        self.clear_kv_cache();
        0
    }

    /// Where ids have to be.
    fn device(&self) -> &Device;

    /// The most tokens of a text, if there is a limit: a longer prompt is refused before anything is computed.
    fn context(&self) -> Option<usize> {
        None
    }
}

impl CausalLm for Model {
    fn forward_last(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        Model::forward_last(self, ids, offset)
    }

    fn forward_each(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Option<Tensor>> {
        match self.has_room(ids.dim(1)?) {
            true => Model::forward(self, ids, offset)?.squeeze(0).map(Some),
            false => Ok(None),
        }
    }

    fn next_token(
        &mut self,
        id: u32,
        offset: usize,
        options: &SampleOptions,
        draw: (u64, u64),
    ) -> candle_core::Result<Option<u32>> {
        self.draw_step(id, offset, options, draw)
    }

    fn expect_tokens(&mut self, len: usize) -> bool {
        Model::expect_tokens(self, len)
    }

    fn clear_kv_cache(&mut self) {
        Model::clear_kv_cache(self);
    }

    fn truncate_kv_cache(&mut self, len: usize) -> usize {
        Model::truncate_kv_cache(self, len)
    }

    fn device(&self) -> &Device {
        Model::device(self)
    }

    fn context(&self) -> Option<usize> {
        Some(Model::context(self))
    }
}

/// How text is generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// The most tokens to generate.
    pub sample_len: usize,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Makes a run repeatable; without it every run differs.
    pub seed: Option<u64>,
    /// Tokens that end the text and are no part of it.
    pub stop_tokens: Vec<u32>,
    /// Texts that end the text and are no part of it. What may be the beginning of one is held back.
    pub stop_strings: Vec<String>,
    /// Tokens of the prompt computed at once; bounds the memory of the prefill.
    pub prefill_chunk: usize,
    /// The most tokens that are guessed at a time, 0 for none: what followed the last tokens of the text where they stood
    /// before in prompt or text. They are computed together with the last token, in less time than one by one, and count if
    /// they are what is drawn anyway: tokens are drawn from the same distribution, by the same random numbers. (Sums of
    /// several rows may be rounded differently in their last bits.) It pays where a text repeats itself: code, quotations,
    /// summaries. A model that can't forget a few tokens, as one with a sliding window that has left some behind, is asked no
    /// more after a wrong guess.
    pub lookup: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            sample_len: 256,
            sampling: Sampling::default(),
            seed: None,
            stop_tokens: Vec::new(),
            stop_strings: Vec::new(),
            prefill_chunk: PREFILL_CHUNK,
            lookup: 0,
        }
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// The model said so, with a stop token.
    Stop,
    /// A stop string came.
    StopString,
    /// `sample_len` tokens were generated.
    Length,
    /// The caller broke off.
    Cancelled,
}

/// A generated text and what it took.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Generated {
    /// The text, without the prompt.
    pub text: String,
    /// Its tokens, without a stop token, but with those of a stop string.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// The seed that repeats it.
    pub seed: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were in the cache before.
    pub cached_tokens: usize,
    /// Time of the prefill.
    pub prompt_time: Duration,
    /// Tokens computed behind the prompt, without wrong guesses; the first token of the text comes from the prefill.
    pub decode_tokens: usize,
    /// Tokens that were guessed ([`Params::lookup`]).
    pub guessed_tokens: usize,
    /// How many of them were right.
    pub right_guesses: usize,
    /// Time from the end of the prefill, sampling and decoding of text included.
    pub decode_time: Duration,
}

impl Generated {
    /// Tokens per second of the prefill, without those that were in the cache.
    pub fn prompt_rate(&self) -> f64 {
        rate(self.prompt_tokens.saturating_sub(self.cached_tokens), self.prompt_time)
    }

    /// Tokens per second after the prefill.
    pub fn decode_rate(&self) -> f64 {
        rate(self.decode_tokens, self.decode_time)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    match tokens {
        0 => 0.,
        tokens => tokens as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE),
    }
}

/// Continues `prompt`; the model's cache is cleared first.
///
/// `on_text` receives the text as it grows, in whole characters, and may break off.
///
/// # Errors
/// If the prompt is empty or can't be tokenized, a parameter is senseless, or the model fails; it does where the text
/// becomes longer than its context ([`Error::OutOfContext`](candle_quant::Error::OutOfContext)). What was handed to
/// `on_text` by then is the text so far.
pub fn generate<M: CausalLm + ?Sized>(
    model: &mut M,
    tokenizer: &Tokenizer,
    prompt: &str,
    params: &Params,
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Generated> {
    let prompt = encode(tokenizer, prompt, true)?;
    Session::default().generate(model, tokenizer, &prompt, params, |event| match event {
        Event::Text(text) if !text.is_empty() => on_text(text),
        _ => ControlFlow::Continue(()),
    })
}
