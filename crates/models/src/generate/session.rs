//! A text that goes on: what the cache holds of it is not computed again.

use super::stop::StopStrings;
use super::{caught, CausalLm, Finish, Generated, Params, Sampler, TextStream};
use candle_core::Tensor;
use candle_quant::{Error, Result};
use std::ops::ControlFlow;
use std::time::Instant;
use tokenizers::Tokenizer;

/// What happens while a text is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'t> {
    /// So many tokens of the prompt are in the cache.
    Prompt(usize),
    /// A token is drawn, and this text is certain by it; empty if a character or a stop string may still go on.
    Text(&'t str),
}

/// The tokens in a model's cache, from prompt to prompt of a conversation.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_quant::Checkpoint;
/// use candle_quant_models::generate::{self, Params, Session};
/// use candle_quant_models::Model;
/// use std::ops::ControlFlow;
///
/// # fn main() -> candle_quant::Result<()> {
/// let checkpoint = Checkpoint::open("assets/tiny")?;
/// let tokenizer = generate::load_tokenizer(&checkpoint)?;
/// let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu)?;
/// let (mut session, params) = (Session::default(), Params { sample_len: 4, ..Params::default() });
/// let mut answer = |prompt: &[u32]| {
///     session.generate(&mut model, &tokenizer, prompt, &params, |_| ControlFlow::Continue(()))
/// };
/// let first = answer(&[10, 20, 30])?;
/// let prompt = [&[10, 20, 30], first.tokens.as_slice(), &[40]].concat();
/// // The last token of an answer was drawn, but not computed.
/// assert_eq!(answer(&prompt)?.cached_tokens, 3 + first.decode_tokens);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Session {
    tokens: Vec<u32>,
}

impl Session {
    /// Continues the tokens of a prompt. Those with which it begins as the text before are not computed again; the model's
    /// cache has to be as this session left it.
    ///
    /// `on_event` may break off, after any token and between the chunks of a prompt.
    ///
    /// # Errors
    /// If the prompt is empty, a parameter is senseless, the text is longer than the model is made for, or the model fails.
    /// If that fails, the cache is empty.
    pub fn generate<M: CausalLm + ?Sized>(
        &mut self,
        model: &mut M,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        params: &Params,
        mut on_event: impl FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generated> {
        if params.prefill_chunk == 0 {
            return Err(Error::mismatch("prefill chunk", "at least one token", "0"));
        }
        let Some(last) = prompt.len().checked_sub(1) else {
            return Err(Error::mismatch("prompt", "at least one token", "none"));
        };
        check_context(model, prompt.len())?;
        let mut sampler = Sampler::new(params.sampling, params.seed)?.with_prompt(prompt);
        let mut stops = StopStrings::new(&params.stop_strings)?;
        // The text has no special tokens, so that it can't have these.
        let added =
            if params.stop_strings.is_empty() { None } else { Some(tokenizer.get_added_tokens_decoder()) };
        let is_stop_string = |token: &u32| {
            let added = added.as_ref().and_then(|added| added.get(token));
            added.is_some_and(|token| token.special && params.stop_strings.contains(&token.content))
        };
        let mut stream = TextStream::new(tokenizer, prompt)?;

        let start = Instant::now();
        let cached = self.keep_common(model, prompt, last);
        let mut finish = None;
        let mut logits = None;
        for chunk in prompt.get(cached..).unwrap_or_default().chunks(params.prefill_chunk) {
            logits = Some(self.step(model, chunk)?);
            if on_event(Event::Prompt(self.tokens.len())).is_break() {
                finish = Some(Finish::Cancelled);
                break;
            }
        }
        let prompt_time = start.elapsed();

        let start = Instant::now();
        let (mut tokens, mut text) = (Vec::new(), String::new());
        let finish = loop {
            if let Some(finish) = finish {
                break finish;
            }
            if tokens.len() >= params.sample_len {
                break Finish::Length;
            }
            if let Some(&last) = tokens.last() {
                logits = Some(self.step(model, &[last])?);
            }
            let Some(logits) = &logits else { break Finish::Length };
            let token = sampler.sample(logits)?;
            if params.stop_tokens.contains(&token) || is_stop_string(&token) {
                break Finish::Stop;
            }
            tokens.push(token);
            let (piece, stopped) = stops.push(stream.push(token)?.unwrap_or_default());
            text.push_str(&piece);
            let go_on = on_event(Event::Text(&piece));
            if stopped {
                break Finish::StopString;
            }
            if go_on.is_break() {
                finish = Some(Finish::Cancelled);
            }
        };
        let decode_time = start.elapsed();
        if finish != Finish::StopString {
            let (mut rest, stopped) = stops.push(&stream.finish()?.1);
            if !stopped {
                rest += &stops.finish();
            }
            if !rest.is_empty() && finish != Finish::Cancelled {
                // Nothing is left that breaking off could stop.
                let _ = on_event(Event::Text(&rest));
            }
            text += &rest;
        }
        Ok(Generated {
            text,
            finish,
            seed: sampler.seed(),
            prompt_tokens: prompt.len(),
            cached_tokens: cached,
            prompt_time,
            decode_tokens: self.tokens.len().saturating_sub(prompt.len()),
            decode_time,
            tokens,
        })
    }

    /// Keeps of the cache what `prompt` begins with, but not more than `most` tokens, and returns how many that are.
    fn keep_common<M: CausalLm + ?Sized>(&mut self, model: &mut M, prompt: &[u32], most: usize) -> usize {
        let common = self.tokens.iter().zip(prompt).take(most).take_while(|(a, b)| a == b).count();
        let kept = match common {
            0 => {
                model.clear_kv_cache();
                0
            }
            common if common == self.tokens.len() => common,
            common => model.truncate_kv_cache(common),
        };
        self.tokens.truncate(kept);
        kept
    }

    /// Feeds `ids` to the model and returns the logits `[vocabulary]` of the last one.
    fn step<M: CausalLm + ?Sized>(&mut self, model: &mut M, ids: &[u32]) -> Result<Tensor> {
        check_context(model, self.tokens.len().saturating_add(ids.len()))?;
        let input = Tensor::new(ids, model.device())?.unsqueeze(0)?;
        let logits = model.forward_last(&input, self.tokens.len()).and_then(|logits| logits.squeeze(0));
        match logits {
            Ok(logits) => {
                self.tokens.extend_from_slice(ids);
                Ok(logits)
            }
            Err(error) => {
                model.clear_kv_cache();
                self.tokens.clear();
                Err(error.into())
            }
        }
    }
}

/// Refuses a text of more tokens than the model is made for.
fn check_context<M: CausalLm + ?Sized>(model: &M, needed: usize) -> Result<()> {
    match model.context() {
        Some(context) if needed > context => Err(Error::OutOfContext { needed, context }),
        _ => Ok(()),
    }
}

/// The tokens of a prompt. A text that a chat template has written has its special tokens already; any other one needs
/// those that the tokenizer adds.
///
/// # Errors
/// If the tokenizer can't encode it.
pub fn encode(tokenizer: &Tokenizer, prompt: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
    Ok(caught::used(|| tokenizer.encode(prompt, add_special_tokens))?.get_ids().to_vec())
}
