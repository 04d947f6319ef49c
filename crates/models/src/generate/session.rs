//! A text that goes on: what the cache holds of it is not computed again.

use super::lookup::{guess, Ahead};
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
        let mut cached = self.keep_common(model, prompt, last);
        if !model.expect_tokens(prompt.len()) {
            cached = 0;
            self.tokens.clear();
        }
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
        let (mut known, mut text) = (prompt.to_vec(), String::new());
        let (mut ahead, mut decode_tokens) = (Ahead::default(), 0);
        let finish = loop {
            if let Some(finish) = finish {
                break finish;
            }
            let left = params.sample_len.saturating_sub(known.len() - prompt.len());
            if left == 0 {
                break Finish::Length;
            }
            let mut drawn = None;
            if known.len() > prompt.len() {
                drawn = self.drawn(model, &known, params, &mut sampler)?;
                if drawn.is_none() {
                    logits = Some(self.next(model, &known, (params, left - 1), &mut ahead)?);
                }
                decode_tokens += 1;
            }
            let token = match (drawn, &logits) {
                (Some(token), _) => token,
                (None, Some(logits)) => sampler.sample(logits)?,
                (None, None) => break Finish::Length,
            };
            if params.stop_tokens.contains(&token) || is_stop_string(&token) {
                break Finish::Stop;
            }
            known.push(token);
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
        self.keep_common(model, &known, known.len());
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
            decode_tokens,
            guessed_tokens: ahead.guessed,
            right_guesses: ahead.right,
            decode_time,
            tokens: known.split_off(prompt.len()),
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

    /// The token behind the known ones, if the model draws it where it computes. Guesses need logits.
    fn drawn<M: CausalLm + ?Sized>(
        &mut self,
        model: &mut M,
        known: &[u32],
        params: &Params,
        sampler: &mut Sampler,
    ) -> Result<Option<u32>> {
        let Some((last, before)) = known.split_last().filter(|_| params.lookup == 0) else { return Ok(None) };
        self.expect(model, known, params)?;
        if self.tokens.len() != before.len() {
            return Ok(None);
        }
        check_context(model, known.len())?;
        let token =
            sampler.elsewhere(|options, draw| Ok(model.next_token(*last, before.len(), options, draw)?));
        match token {
            Ok(None) => Ok(None),
            token => self.remember(model, &[*last], token),
        }
    }

    /// Says that the known tokens are about to be in the cache. False if what is there had to be computed anew.
    fn expect<M: CausalLm + ?Sized>(
        &mut self,
        model: &mut M,
        known: &[u32],
        params: &Params,
    ) -> Result<bool> {
        if model.expect_tokens(known.len()) {
            return Ok(true);
        }
        self.tokens.clear();
        self.feed(model, known.get(..known.len().saturating_sub(1)).unwrap_or_default(), params)?;
        Ok(false)
    }

    /// The logits `[vocabulary]` of the last of the known tokens: of a guess that was right, or computed, and at most `most`
    /// guesses with it.
    fn next<M: CausalLm + ?Sized>(
        &mut self,
        model: &mut M,
        known: &[u32],
        (params, most): (&Params, usize),
        ahead: &mut Ahead,
    ) -> Result<Tensor> {
        let position = known.len().saturating_sub(1);
        if !self.expect(model, known, params)? {
            ahead.clear();
        }
        if self.tokens.get(position) == known.last() {
            if let Some(logits) = ahead.take(position)? {
                return Ok(logits);
            }
        }
        ahead.clear();
        if self.tokens.len() > position {
            // Guesses were wrong. A model that can't forget a few tokens forgets all.
            let kept = self.keep_common(model, known, position);
            ahead.is_over = kept < position;
            self.feed(model, known.get(kept..position).unwrap_or_default(), params)?;
        }
        let room = model.context().map_or(usize::MAX, |context| context.saturating_sub(known.len()));
        let most = if ahead.is_over { 0 } else { params.lookup.min(most).min(room) };
        let guesses = guess(known, most);
        let last = known.get(position..).unwrap_or_default();
        if !guesses.is_empty() {
            let ids = [last, guesses].concat();
            let input = Tensor::new(ids.as_slice(), model.device())?.unsqueeze(0)?;
            if let Some(logits) = model.forward_each(&input, position).transpose() {
                let logits = self.remember(model, &ids, logits)?;
                let first = logits.get(0)?;
                ahead.put(position, logits, guesses.len());
                return Ok(first);
            }
        }
        self.step(model, last)
    }

    /// Feeds `ids` to the model, in chunks.
    fn feed<M: CausalLm + ?Sized>(&mut self, model: &mut M, ids: &[u32], params: &Params) -> Result<()> {
        ids.chunks(params.prefill_chunk).try_for_each(|chunk| self.step(model, chunk).map(drop))
    }

    /// Feeds `ids` to the model and returns the logits `[vocabulary]` of the last one.
    fn step<M: CausalLm + ?Sized>(&mut self, model: &mut M, ids: &[u32]) -> Result<Tensor> {
        check_context(model, self.tokens.len().saturating_add(ids.len()))?;
        let input = Tensor::new(ids, model.device())?.unsqueeze(0)?;
        let logits = model.forward_last(&input, self.tokens.len()).and_then(|logits| logits.squeeze(0));
        self.remember(model, ids, logits)
    }

    /// Counts `ids` among the tokens in the cache, unless the model failed: then there are none.
    fn remember<M: CausalLm + ?Sized, T, E: Into<Error>>(
        &mut self,
        model: &mut M,
        ids: &[u32],
        computed: std::result::Result<T, E>,
    ) -> Result<T> {
        match computed {
            Ok(computed) => {
                self.tokens.extend_from_slice(ids);
                Ok(computed)
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
