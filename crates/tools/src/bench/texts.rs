//! Prompts and decode steps of a model, timed.

use super::options::{BenchOptions, Text};
use super::spread::Spread;
use super::BenchEvent;
use candle_core::{DType, Tensor};
use candle_quant::{Error, Result};
use candle_quant_models::generate::CausalLm;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::time::Instant;

/// The time that a text took in each repetition.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Timing {
    /// What was computed.
    pub text: Text,
    /// Of each repetition; the first one, which warms up, is not among them.
    pub seconds: Vec<f64>,
}

impl Timing {
    /// Tokens per second of the repetitions.
    pub fn tokens_per_second(&self) -> Spread {
        let tokens = self.text.tokens() as f64;
        let rates: Vec<_> = self.seconds.iter().map(|time| tokens / time.max(f64::MIN_POSITIVE)).collect();
        Spread::of(&rates)
    }
}

/// What there was time to compute, and what the model is not made for.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Timings {
    /// Prompts, then depths from the shallowest on.
    pub timings: Vec<Timing>,
    /// Texts that are longer than the model's context.
    pub left_out: Vec<Text>,
}

/// Times the texts of `options` with any model, on random tokens of its vocabulary.
///
/// Nothing but the tokens of the texts is computed: each text once to warm up, and then once for each repetition. Depths are
/// reached by chunks of a prompt, from the tokens that are there; after each repetition those behind the depth are forgotten.
/// Where the model can't forget a part (a sliding window has left tokens behind), the depth is reached anew each time.
///
/// # Errors
/// As those of [`BenchOptions::validate`]; if all texts are longer than the context, the vocabulary is empty, or the model
/// fails.
pub fn time_texts<M: CausalLm + ?Sized>(
    model: &mut M,
    vocabulary: usize,
    options: &BenchOptions,
    progress: &mut dyn FnMut(BenchEvent),
) -> Result<Timings> {
    options.validate()?;
    let Some(vocabulary) = u32::try_from(vocabulary).ok().filter(|size| *size > 0) else {
        return Err(Error::mismatch("vocabulary", "1 to 2^32 - 1 tokens", vocabulary.to_string()));
    };
    let context = model.context().unwrap_or(usize::MAX);
    let (texts, left_out): (Vec<_>, Vec<_>) =
        options.texts().into_iter().partition(|text| text.len() <= context);
    if let (true, Some(shortest)) = (texts.is_empty(), left_out.iter().map(|text| text.len()).min()) {
        return Err(Error::OutOfContext { needed: shortest, context });
    }
    model.clear_kv_cache();
    let rng = StdRng::seed_from_u64(0);
    let mut reader = Reader { model, rng, vocabulary, cached: 0, chunk: options.prefill_chunk };
    let timings = texts.into_iter().map(|text| {
        let mut seconds = Vec::with_capacity(options.repetitions);
        for repetition in 0..=options.repetitions {
            progress(BenchEvent::Text { text, repetition });
            let time = reader.time(text)?;
            if repetition > 0 {
                seconds.push(time);
            }
        }
        Ok(Timing { text, seconds })
    });
    let timings = timings.collect::<Result<_>>();
    reader.model.clear_kv_cache();
    Ok(Timings { timings: timings?, left_out })
}

/// A model, and how many tokens it remembers.
struct Reader<'m, M: ?Sized> {
    model: &'m mut M,
    rng: StdRng,
    vocabulary: u32,
    cached: usize,
    chunk: usize,
}

impl<M: CausalLm + ?Sized> Reader<'_, M> {
    fn time(&mut self, text: Text) -> Result<f64> {
        let (depth, chunk) = match text {
            Text::Prefill { .. } => (0, self.chunk),
            Text::Decode { depth, .. } => (depth, 1),
        };
        self.reach(depth, text.tokens())?;
        let start = Instant::now();
        self.read(text.tokens(), chunk)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Makes the model remember so many tokens, before others.
    fn reach(&mut self, depth: usize, others: usize) -> Result<()> {
        if depth == 0 {
            self.model.clear_kv_cache();
            self.cached = 0;
        } else if self.cached > depth {
            self.cached = self.model.truncate_kv_cache(depth).min(depth);
        }
        if !self.model.expect_tokens(depth.saturating_add(others)) {
            self.cached = 0;
        }
        self.read(depth - self.cached, self.chunk)
    }

    /// Computes so many tokens, some at a time. Each time is over when its logits are there.
    fn read(&mut self, tokens: usize, chunk: usize) -> Result<()> {
        let mut left = tokens;
        while left > 0 {
            let count = left.min(chunk);
            let ids: Vec<u32> = (0..count).map(|_| self.rng.random_range(0..self.vocabulary)).collect();
            let ids = Tensor::from_vec(ids, (1, count), self.model.device())?;
            let logits = self.model.forward_last(&ids, self.cached)?;
            // Devices compute on while the host does; one number is waited for.
            logits.flatten_all()?.narrow(0, 0, 1)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            self.cached += count;
            left -= count;
        }
        Ok(())
    }
}
