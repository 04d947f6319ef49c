//! What the cache holds of a text is not computed again.

use crate::common::{byte_tokenizer, reference_in};
use crate::counting::Counting;
use candle_core::{DType, Device, Tensor};
use candle_quant::{Checkpoint, Error};
use candle_quant_models::generate::{
    encode, generate, load_tokenizer, Event, Finish, Params, Sampling, Session,
};
use candle_quant_models::Model;
use std::ops::ControlFlow;
use std::path::Path;
use tokenizers::AddedToken;

fn greedy(sample_len: usize) -> Params {
    Params { sample_len, sampling: Sampling::GREEDY, ..Params::default() }
}

/// A model that gives each token's successor.
fn successors(truncates: bool) -> Counting {
    Counting::new(|text| text.last().map_or(0, |last| last + 1), truncates)
}

#[test]
fn a_session_computes_only_what_is_new() {
    let tokenizer = byte_tokenizer();
    for truncates in [true, false] {
        let mut model = successors(truncates);
        let mut session = Session::default();
        let mut run = |prompt: &[u32], sample_len| {
            model.computed = 0;
            let params = Params { prefill_chunk: 3, ..greedy(sample_len) };
            let on_event = |_: Event<'_>| ControlFlow::Continue(());
            let generated = session.generate(&mut model, &tokenizer, prompt, &params, on_event).unwrap();
            let computed = prompt.len() - generated.cached_tokens + generated.decode_tokens;
            assert_eq!(computed, model.computed);
            (generated.tokens, generated.cached_tokens)
        };
        assert_eq!(run(&[5, 6, 7, 8, 20], 3), (vec![21, 22, 23], 0));
        // The answer's last token was not computed.
        assert_eq!(run(&[5, 6, 7, 8, 20, 21, 22, 23, 40], 1), (vec![41], 7));
        // Another text from the fifth token on.
        let kept = if truncates { 4 } else { 0 };
        assert_eq!(run(&[5, 6, 7, 8, 30], 1), (vec![31], kept));
        // The same again: one token has to be computed for its logits.
        assert_eq!(run(&[5, 6, 7, 8, 30], 1), (vec![31], kept));
        assert_eq!(run(&[9], 1), (vec![10], 0));
    }
}

#[test]
fn a_session_goes_on_after_breaking_off_and_after_errors() {
    let tokenizer = byte_tokenizer();
    let mut model = successors(true);
    let mut session = Session::default();
    let prompt: Vec<u32> = (0..10).collect();
    let params = Params { prefill_chunk: 4, ..greedy(9) };
    let mut events = Vec::new();
    let generated = session.generate(&mut model, &tokenizer, &prompt, &params, |event| {
        events.push(format!("{event:?}"));
        if events.len() == 2 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    let generated = generated.unwrap();
    assert_eq!(
        (generated.finish, generated.decode_tokens, events),
        (Finish::Cancelled, 0, vec!["Prompt(4)".to_string(), "Prompt(8)".into()])
    );
    let go_on = |_: Event<'_>| ControlFlow::Continue(());
    assert_eq!(session.generate(&mut model, &tokenizer, &prompt, &params, go_on).unwrap().cached_tokens, 8);
    let error = session.generate(&mut model, &tokenizer, &[], &params, go_on).unwrap_err().to_string();
    assert!(error.contains("prompt: expected at least one token"), "{error}");

    // A model that fails begins anew; one whose context is full keeps what it has.
    let expected: Vec<u32> = (10..19).collect();
    model.works = 2;
    let mut run = |model: &mut Counting| session.generate(model, &tokenizer, &prompt, &params, go_on);
    assert!(run(&mut model).unwrap_err().to_string().contains("planted"));
    let generated = run(&mut model).unwrap();
    assert_eq!((generated.cached_tokens, generated.tokens), (0, expected.clone()));
    model.context = Some(12);
    let error = run(&mut model).unwrap_err();
    assert!(matches!(error, Error::OutOfContext { needed: 13, context: 12 }), "{error}");
    model.context = None;
    let generated = run(&mut model).unwrap();
    assert_eq!((generated.cached_tokens, generated.tokens), (9, expected));
}

/// Special tokens are in no text: one that is a stop string ends it all the same.
#[test]
fn a_special_token_may_be_a_stop_string() {
    let mut tokenizer = byte_tokenizer();
    let end = AddedToken::from("<end>", true);
    assert_eq!(tokenizer.add_special_tokens([end]).unwrap(), 1);
    let id = tokenizer.token_to_id("<end>").unwrap();
    let params = Params { stop_strings: vec!["never".into(), "<end>".into()], ..greedy(9) };
    let go_on = |_: Event<'_>| ControlFlow::Continue(());
    let prompt = [id - 4, id - 3];
    let generated =
        Session::default().generate(&mut successors(true), &tokenizer, &prompt, &params, go_on).unwrap();
    assert_eq!((generated.finish, generated.tokens), (Finish::Stop, vec![id - 2, id - 1]));
}

#[test]
fn a_real_model_goes_on_as_if_it_had_read_all_at_once() {
    let checkpoint = crate::common::bundled("tiny");
    let tokenizer = load_tokenizer(&checkpoint).unwrap();
    let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
    let params = greedy(20);
    let go_on = |_: Event<'_>| ControlFlow::Continue(());
    let mut session = Session::default();
    let prompts = ["Once upon a time", "Once upon a time there was a dog. It", "Once upon a day"];
    let answers: Vec<_> = prompts
        .map(|prompt| {
            let prompt = encode(&tokenizer, prompt, true).unwrap();
            session.generate(&mut model, &tokenizer, &prompt, &params, go_on).unwrap()
        })
        .into();
    assert!(answers[1].cached_tokens > 0 && answers[2].cached_tokens > 0, "{answers:?}");
    for (prompt, answer) in prompts.iter().zip(&answers) {
        let alone = generate(&mut model, &tokenizer, prompt, &params, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!((&alone.text, alone.cached_tokens), (&answer.text, 0));
    }
}

/// Texts that begin within the context of pre-training and go on behind it: every token is that of the whole text so far.
#[test]
fn a_text_that_outgrows_short_turns_is_computed_anew() {
    let path = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/phi3/mlx-affine4");
    let load = || Model::load(&Checkpoint::open(&path).unwrap(), DType::F32, &Device::Cpu).unwrap();
    // Short turns are those of 16 tokens.
    let (tokens, _) = reference_in(&path.join("refs.safetensors"));
    let prompt: Vec<u32> = tokens.narrow(1, 0, 12).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let tokenizer = byte_tokenizer();
    for prefill_chunk in [256, 5] {
        let mut model = load();
        let params = Params { prefill_chunk, ..greedy(10) };
        let mut session = Session::default();
        let generated = session
            .generate(&mut model, &tokenizer, &prompt, &params, |_| ControlFlow::Continue(()))
            .unwrap();
        assert_eq!(generated.tokens.len(), 10);
        let mut text = prompt.clone();
        for token in generated.tokens {
            let ids = Tensor::new(text.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let logits = load().forward_last(&ids, 0).unwrap().squeeze(0).unwrap();
            assert_eq!(logits.argmax(0).unwrap().to_scalar::<u32>().unwrap(), token, "behind {text:?}");
            text.push(token);
        }
    }
    // Who does not say how long a text will be is told so.
    let mut model = load();
    model.forward(&tokens.narrow(1, 0, 12).unwrap(), 0).unwrap();
    let error = model.forward(&tokens.narrow(1, 12, 12).unwrap(), 12).unwrap_err().to_string();
    assert!(error.contains("beyond 16") && error.contains("expect_tokens"), "{error}");
    assert_eq!(model.cached_tokens(), 12);
    assert!(!model.expect_tokens(24) && model.cached_tokens() == 0);
}
