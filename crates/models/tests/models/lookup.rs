//! Guesses from the text so far change how often a model is asked, and nothing else.

use crate::common::{bundled, byte_tokenizer, open};
use candle_core::{DType, Device, Tensor};
use candle_quant::VarBuilder;
use candle_quant_models::generate::{
    load_tokenizer, CausalLm, Event, Finish, Generated, Params, Sampling, Session,
};
use candle_quant_models::{CacheOptions, Config, Model, ModelOptions};
use std::ops::ControlFlow;

/// Token `i` of its text is `i` modulo a period, but for a few that are others; remembers what it is asked.
struct Periodic {
    cache: Vec<u32>,
    calls: usize,
    truncates: bool,
    /// The most tokens at a time.
    room: usize,
    context: Option<usize>,
}

const PERIOD: usize = 7;

/// What stands at a position.
fn at(position: usize) -> u32 {
    match position {
        23 | 24 | 40 => 100,
        position => (position % PERIOD) as u32,
    }
}

impl Periodic {
    fn new(truncates: bool) -> Self {
        Self { cache: vec![], calls: 0, truncates, room: usize::MAX, context: None }
    }

    /// Logits of the next token behind each of `ids`, if they are those of the text; else of nonsense.
    fn compute(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        assert_eq!(offset, self.cache.len());
        self.calls += 1;
        let mut logits = Vec::new();
        for id in ids.squeeze(0)?.to_vec1::<u32>()? {
            self.cache.push(id);
            let is_text = self.cache.iter().enumerate().all(|(position, id)| *id == at(position));
            let next = if is_text { at(self.cache.len()) } else { 299 };
            logits.extend((0..300).map(|token| if token == next { 50f32 } else { 0. }));
        }
        Tensor::from_vec(logits, (ids.dim(1)?, 300), &Device::Cpu)
    }
}

impl CausalLm for Periodic {
    fn forward_last(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        self.compute(ids, offset)?.narrow(0, ids.dim(1)? - 1, 1)
    }

    fn forward_each(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Option<Tensor>> {
        match ids.dim(1)? <= self.room {
            true => self.compute(ids, offset).map(Some),
            false => Ok(None),
        }
    }

    fn clear_kv_cache(&mut self) {
        self.cache.clear();
    }

    fn truncate_kv_cache(&mut self, len: usize) -> usize {
        self.cache.truncate(if self.truncates { len } else { 0 });
        self.cache.len()
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn context(&self) -> Option<usize> {
        self.context
    }
}

fn run<M: CausalLm>(model: &mut M, prompt: &[u32], params: &Params) -> Generated {
    let go_on = |_: Event<'_>| ControlFlow::Continue(());
    Session::default().generate(model, &byte_tokenizer(), prompt, params, go_on).unwrap()
}

fn greedy(sample_len: usize, lookup: usize) -> Params {
    Params { sample_len, lookup, sampling: Sampling::GREEDY, ..Params::default() }
}

#[test]
fn right_guesses_save_calls_and_wrong_ones_are_forgotten() {
    let prompt: Vec<u32> = (0..10).map(at).collect();
    let expected: Vec<u32> = (10..60).map(at).collect();
    for truncates in [true, false] {
        let mut model = Periodic::new(truncates);
        let generated = run(&mut model, &prompt, &greedy(50, 0));
        assert_eq!((&generated.tokens, model.calls, generated.guessed_tokens), (&expected, 50, 0));
        for lookup in [1, 3, 15] {
            let mut model = Periodic::new(truncates);
            let generated = run(&mut model, &prompt, &greedy(50, lookup));
            assert_eq!((&generated.tokens, generated.finish), (&expected, Finish::Length), "{lookup}");
            assert_eq!(generated.decode_tokens, 49);
            let (guessed, right) = (generated.guessed_tokens, generated.right_guesses);
            // A call for every token that is not guessed, and if all is forgotten, one to know the text again.
            let once = 50 - right;
            let most = if truncates { once } else { 2 * once };
            assert!((once..=most).contains(&model.calls), "{lookup}: {} of {once}", model.calls);
            assert!(
                right >= 20 && guessed > right && guessed <= right + 5 * lookup,
                "{lookup}: {right} of {guessed}"
            );
            // Nothing but the text is left, without the last token.
            assert!(model.cache.is_empty() || model.cache.iter().enumerate().all(|(i, id)| *id == at(i)));
            assert!(!truncates || model.cache.len() == 59);
        }
    }
}

#[test]
fn guesses_need_room() {
    let prompt: Vec<u32> = (0..15).map(at).collect();
    // No more than the context holds, and than may be generated.
    let mut model = Periodic { context: Some(20), ..Periodic::new(true) };
    let generated = run(&mut model, &prompt, &greedy(6, 15));
    assert_eq!(generated.tokens, (15..21).map(at).collect::<Vec<_>>());
    assert_eq!((generated.guessed_tokens, generated.right_guesses, model.calls), (4, 4, 2));
    // A model without room, or without the method, computes one by one.
    let mut model = Periodic { room: 0, ..Periodic::new(true) };
    let generated = run(&mut model, &prompt, &greedy(6, 15));
    assert_eq!(generated.tokens, (15..21).map(at).collect::<Vec<_>>());
    assert_eq!((generated.guessed_tokens, model.calls), (0, 6));
}

#[test]
fn models_draw_the_same_tokens() {
    let prompt: Vec<u32> = (0..40).map(|i| 60 + i % 8).collect();
    let windows = || Model::load(&open("gptoss-mxfp4-hf"), DType::F32, &Device::Cpu).unwrap();
    let tiny = || Model::load(&bundled("tiny"), DType::F32, &Device::Cpu).unwrap();
    let tokenizer = load_tokenizer(&bundled("tiny")).unwrap();
    let story = "Once upon a time there was a little dog. The little dog was happy. The little dog";
    let story = tokenizer.encode(story, true).unwrap().get_ids().to_vec();
    let models: [(_, _, &dyn Fn() -> Model); 2] = [("tiny", story, &tiny), ("windows", prompt, &windows)];
    for (name, prompt, load) in models {
        let mut right = 0;
        for sampling in [Sampling::GREEDY, Sampling { temperature: 0.5, ..Sampling::default() }] {
            let params = |lookup| Params { sampling, seed: Some(5), ..greedy(60, lookup) };
            let expected = run(&mut load(), &prompt, &params(0));
            for lookup in [1, 4, 12] {
                let found = run(&mut load(), &prompt, &params(lookup));
                assert_eq!(found.tokens, expected.tokens, "{name}, {lookup}, {sampling:?}");
                right += found.right_guesses;
            }
        }
        assert!(right > 0, "{name}: no guess was right");
    }
}

/// Where one token has room, a guess that has none is no error.
#[test]
fn a_full_cache_takes_the_last_tokens_one_by_one() {
    let checkpoint = bundled("tiny");
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
    let cache = CacheOptions { max_tokens: Some(44), ..CacheOptions::default() };
    let options = ModelOptions { cache, ..ModelOptions::default() };
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let mut model = Model::with_options(&config, vb, options).unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 60 + i % 8).collect();
    assert_eq!(run(&mut model, &prompt, &greedy(5, 12)).tokens.len(), 5);
}
