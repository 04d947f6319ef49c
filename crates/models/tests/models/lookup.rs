//! Guesses from the text so far change how often a model is asked, and nothing else.

use crate::common::{bundled, byte_tokenizer, open};
use crate::counting::Counting;
use candle_core::{DType, Device};
use candle_quant::VarBuilder;
use candle_quant_models::generate::{
    load_tokenizer, CausalLm, Event, Finish, Generated, Params, Sampling, Session,
};
use candle_quant_models::{CacheOptions, Config, Model, ModelOptions};
use std::ops::ControlFlow;

const PERIOD: usize = 7;

/// What stands at a position of a text that repeats itself, but for a few tokens.
fn at(position: usize) -> u32 {
    match position {
        23 | 24 | 40 => 100,
        position => (position % PERIOD) as u32,
    }
}

/// A model of that text; behind any other one comes nonsense.
fn periodic(truncates: bool) -> Counting {
    let next = |text: &[u32]| match text.iter().enumerate().all(|(position, id)| *id == at(position)) {
        true => at(text.len()),
        false => 299,
    };
    Counting::new(next, truncates)
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
        let mut model = periodic(truncates);
        let generated = run(&mut model, &prompt, &greedy(50, 0));
        assert_eq!((&generated.tokens, model.calls, generated.guessed_tokens), (&expected, 50, 0));
        for lookup in [1, 3, 15] {
            let mut model = periodic(truncates);
            let generated = run(&mut model, &prompt, &greedy(50, lookup));
            assert_eq!((&generated.tokens, generated.finish), (&expected, Finish::Length), "{lookup}");
            assert_eq!(generated.decode_tokens, 49);
            let (guessed, right) = (generated.guessed_tokens, generated.right_guesses);
            // A call for every token that is not guessed, and where all was forgotten, one to know the text again: then there
            // are no more guesses.
            assert_eq!(model.calls, 50 - right + usize::from(!truncates), "{lookup}");
            let most = if truncates { 5 * lookup } else { lookup };
            assert!(guessed > right && guessed <= right + most, "{lookup}: {right} of {guessed}");
            assert!(right >= if truncates { 20 } else { 3 }, "{lookup}: {right}");
            // Nothing but the text is left, without the last token.
            assert_eq!(model.cache, (0..59).map(at).collect::<Vec<_>>());
        }
    }
}

#[test]
fn guesses_need_room() {
    let prompt: Vec<u32> = (0..15).map(at).collect();
    // No more than the context holds, and than may be generated.
    let mut model = Counting { context: Some(20), ..periodic(true) };
    let generated = run(&mut model, &prompt, &greedy(6, 15));
    assert_eq!(generated.tokens, (15..21).map(at).collect::<Vec<_>>());
    assert_eq!((generated.guessed_tokens, generated.right_guesses, model.calls), (4, 4, 2));
    // A model without room, or without the method, computes one by one.
    let mut model = Counting { room: 0, ..periodic(true) };
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

#[test]
fn a_failure_beside_guesses_leaves_nothing_behind() {
    let prompt: Vec<u32> = (0..15).map(at).collect();
    let mut model = Counting { works: 1, ..periodic(true) };
    let go_on = |_: Event<'_>| ControlFlow::Continue(());
    let mut session = Session::default();
    let mut run =
        |model: &mut Counting| session.generate(model, &byte_tokenizer(), &prompt, &greedy(6, 4), go_on);
    let error = run(&mut model).unwrap_err().to_string();
    assert!(error.contains("planted") && model.cache.is_empty(), "{error}");
    let generated = run(&mut model).unwrap();
    assert_eq!((generated.cached_tokens, generated.tokens), (0, (15..21).map(at).collect()));
}
