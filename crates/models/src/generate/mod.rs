//! From a prompt to text: prefill in chunks, sampling, stop tokens, streaming.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_quant::Checkpoint;
//! use candle_quant_models::{generate, Model};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> candle_quant::Result<()> {
//! let checkpoint = Checkpoint::open("../../assets/tiny")?;
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
mod sampler;
mod text;
mod tokenizer;
mod tokenizer_json;

pub use sampler::{Sampler, Sampling};
pub use text::{load_tokenizer, stop_tokens, TextStream};
pub use tokenizer::stored_tokenizer;

use crate::Model;
use candle_core::{Device, Tensor};
use candle_quant::{Error, Result};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};
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
/// let checkpoint = Checkpoint::open("../../assets/tiny")?;
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

    /// Forgets all tokens.
    fn clear_kv_cache(&mut self);

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

    fn clear_kv_cache(&mut self) {
        Model::clear_kv_cache(self);
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
    /// Tokens of the prompt computed at once; bounds the memory of the prefill.
    pub prefill_chunk: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            sample_len: 256,
            sampling: Sampling::default(),
            seed: None,
            stop_tokens: Vec::new(),
            prefill_chunk: 256,
        }
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// The model said so, with a stop token.
    Stop,
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
    /// Its tokens, without a stop token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// The seed that repeats it.
    pub seed: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time of the prefill.
    pub prompt_time: Duration,
    /// Tokens computed one by one; the first token of the text comes from the prefill.
    pub decode_tokens: usize,
    /// Time from the end of the prefill, sampling and decoding of text included.
    pub decode_time: Duration,
}

impl Generated {
    /// Tokens per second of the prefill.
    pub fn prompt_rate(&self) -> f64 {
        rate(self.prompt_tokens, self.prompt_time)
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
/// becomes longer than its context ([`Error::OutOfContext`]). What was handed to `on_text` by then is the text so far.
pub fn generate<M: CausalLm + ?Sized>(
    model: &mut M,
    tokenizer: &Tokenizer,
    prompt: &str,
    params: &Params,
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Generated> {
    if params.prefill_chunk == 0 {
        return Err(Error::mismatch("prefill chunk", "at least one token", "0"));
    }
    let mut sampler = Sampler::new(params.sampling, params.seed)?;
    let encoding = caught::used(|| tokenizer.encode(prompt, true))?;
    let prompt = encoding.get_ids();
    check_context(model, prompt.len())?;
    let mut stream = TextStream::new(tokenizer, prompt)?;

    let start = Instant::now();
    model.clear_kv_cache();
    let mut offset = 0;
    let mut logits = None;
    for chunk in prompt.chunks(params.prefill_chunk) {
        logits = Some(step(model, chunk, &mut offset)?);
    }
    let Some(mut logits) = logits else {
        return Err(Error::mismatch("prompt", "at least one token", "none"));
    };
    let prompt_time = start.elapsed();

    let start = Instant::now();
    let mut tokens = Vec::new();
    let finish = loop {
        if tokens.len() >= params.sample_len {
            break Finish::Length;
        }
        if let Some(&last) = tokens.last() {
            logits = step(model, &[last], &mut offset)?;
        }
        let token = sampler.sample(&logits)?;
        if params.stop_tokens.contains(&token) {
            break Finish::Stop;
        }
        tokens.push(token);
        if stream.push(token)?.is_some_and(|text| on_text(text).is_break()) {
            break Finish::Cancelled;
        }
    };
    let decode_time = start.elapsed();
    let (text, rest) = stream.finish()?;
    if !rest.is_empty() && finish != Finish::Cancelled {
        // Nothing is left that breaking off could stop.
        let _ = on_text(&rest);
    }
    Ok(Generated {
        text: text + &rest,
        tokens,
        finish,
        seed: sampler.seed(),
        prompt_tokens: prompt.len(),
        prompt_time,
        decode_tokens: offset - prompt.len(),
        decode_time,
    })
}

/// Refuses a text of more tokens than the model is made for.
fn check_context<M: CausalLm + ?Sized>(model: &M, needed: usize) -> Result<()> {
    match model.context() {
        Some(context) if needed > context => Err(Error::OutOfContext { needed, context }),
        _ => Ok(()),
    }
}

/// Feeds `ids` to the model and returns the logits `[vocabulary]` of the last one.
fn step<M: CausalLm + ?Sized>(model: &mut M, ids: &[u32], offset: &mut usize) -> Result<Tensor> {
    check_context(model, offset.saturating_add(ids.len()))?;
    let input = Tensor::new(ids, model.device())?.unsqueeze(0)?;
    let logits = model.forward_last(&input, *offset)?.squeeze(0)?;
    *offset += ids.len();
    Ok(logits)
}
