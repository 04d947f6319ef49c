//! Sampling, streaming and stopping, on a model whose answers are written down.

use crate::common::byte_tokenizer;
use candle_core::{DType, Device, Tensor};
use candle_quant::Checkpoint;
use candle_quant_models::generate::{
    generate, load_tokenizer, stop_tokens, CausalLm, Finish, Params, Sampler, Sampling, TextStream,
};
use candle_quant_models::Model;
use proptest::prelude::*;
use std::collections::HashSet;
use std::ops::ControlFlow;
use tokenizers::Tokenizer;

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

/// Answers the tokens of `script` one after the other, and remembers what it was asked.
struct Scripted {
    script: Vec<u32>,
    calls: Vec<(usize, usize)>,
    prompt: usize,
}

impl CausalLm for Scripted {
    fn forward_last(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        let len = ids.dim(1)?;
        self.calls.push((offset, len));
        let answer = (offset + len).checked_sub(self.prompt).and_then(|at| self.script.get(at));
        let mut logits = vec![0f32; 300];
        logits[*answer.unwrap_or(&299) as usize] = 50.;
        Tensor::from_vec(logits, (1, 300), &Device::Cpu)
    }

    fn clear_kv_cache(&mut self) {
        self.calls.clear();
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }
}

fn scripted(tokenizer: &Tokenizer, prompt: &str, answer: &str) -> Scripted {
    Scripted { script: ids(tokenizer, answer), calls: vec![], prompt: ids(tokenizer, prompt).len() }
}

fn greedy(sample_len: usize) -> Params {
    Params { sample_len, sampling: Sampling::GREEDY, stop_tokens: vec![299], ..Params::default() }
}

#[test]
fn characters_that_span_tokens_come_out_whole() {
    let tokenizer = byte_tokenizer();
    let answer = " zażółć 🦀🦀 中文.";
    let mut model = scripted(&tokenizer, "Hé", answer);
    let mut pieces = Vec::new();
    let generated = generate(&mut model, &tokenizer, "Hé", &greedy(1000), |text| {
        pieces.push(text.to_string());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(generated.text, answer);
    assert_eq!(pieces.concat(), answer);
    assert_eq!(pieces, answer.chars().map(String::from).collect::<Vec<_>>());
    assert_eq!((generated.finish, generated.prompt_tokens), (Finish::Stop, 3));
    assert_eq!(generated.tokens, ids(&tokenizer, answer));
    assert_eq!(generated.decode_tokens, answer.len()); // one call per byte fed back
}

#[test]
fn an_unfinished_character_is_given_at_the_end() {
    let tokenizer = byte_tokenizer();
    let mut model = scripted(&tokenizer, "x", "ab🦀");
    let mut streamed = String::new();
    let generated = generate(&mut model, &tokenizer, "x", &greedy(4), |text| {
        streamed.push_str(text);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(generated.finish, Finish::Length);
    assert_eq!(generated.text, "ab\u{FFFD}");
    assert_eq!(streamed, generated.text);
}

#[test]
fn a_stop_token_ends_the_text_and_is_not_in_it() {
    let tokenizer = byte_tokenizer();
    let full_stop = ids(&tokenizer, ".")[0];
    let params = Params { stop_tokens: vec![7, full_stop], ..greedy(100) };
    let mut model = scripted(&tokenizer, "Once", " upon. a time");
    let generated = generate(&mut model, &tokenizer, "Once", &params, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((generated.text.as_str(), generated.finish), (" upon", Finish::Stop));
}

#[test]
fn the_caller_can_break_off() {
    let tokenizer = byte_tokenizer();
    let mut model = scripted(&tokenizer, "a", "bcdef");
    let generated = generate(&mut model, &tokenizer, "a", &greedy(100), |text| match text {
        "d" => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })
    .unwrap();
    assert_eq!((generated.text.as_str(), generated.finish), ("bcd", Finish::Cancelled));
}

#[test]
fn prompts_are_fed_in_chunks_and_every_token_once() {
    let tokenizer = byte_tokenizer();
    let mut model = scripted(&tokenizer, "0123456789", "abc");
    let params = Params { prefill_chunk: 4, ..greedy(3) };
    let generated =
        generate(&mut model, &tokenizer, "0123456789", &params, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(generated.text, "abc");
    assert_eq!(model.calls, [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]);
    let none = generate(&mut model, &tokenizer, "0123456789", &greedy(0), |_| ControlFlow::Continue(()));
    assert_eq!(none.unwrap().text, "");
}

#[test]
fn senseless_requests_are_refused() {
    let tokenizer = byte_tokenizer();
    let mut model = scripted(&tokenizer, "", "abc");
    let mut run = |prompt: &str, params: &Params| {
        generate(&mut model, &tokenizer, prompt, params, |_| ControlFlow::Continue(()))
            .unwrap_err()
            .to_string()
    };
    assert!(run("", &greedy(3)).contains("prompt: expected at least one token"));
    assert!(run("a", &Params { prefill_chunk: 0, ..greedy(3) }).contains("prefill chunk"));
    let sampling = |temperature, top_k, top_p| Sampling { temperature, top_k, top_p, ..Sampling::GREEDY };
    for (bad, name) in [
        (sampling(-1., None, None), "temperature"),
        (sampling(f64::NAN, None, None), "temperature"),
        (sampling(1., Some(0), None), "top-k"),
        (sampling(1., None, Some(0.)), "top-p"),
        (sampling(1., None, Some(1.5)), "top-p"),
        (Sampling { min_p: Some(-0.1), ..Sampling::GREEDY }, "min-p"),
        (Sampling { min_p: Some(f64::NAN), ..Sampling::GREEDY }, "min-p"),
        (Sampling { repetition_penalty: 0., ..Sampling::GREEDY }, "repetition penalty"),
        (Sampling { presence_penalty: f64::INFINITY, ..Sampling::GREEDY }, "presence penalty"),
        (Sampling { frequency_penalty: f64::NAN, ..Sampling::GREEDY }, "frequency penalty"),
    ] {
        assert!(Sampler::new(bad, None).unwrap_err().to_string().contains(name));
    }
    let mut sampler = Sampler::new(Sampling::default(), Some(1)).unwrap();
    for bad in [&[0f32, f32::NAN] as &[f32], &[f32::INFINITY, 0.], &[f32::NEG_INFINITY], &[]] {
        assert!(sampler.sample(&Tensor::new(bad, &Device::Cpu).unwrap()).is_err(), "{bad:?}");
    }
}

#[test]
fn a_stream_is_the_same_text_as_decoding_at_once() {
    let tokenizer = byte_tokenizer();
    let (prompt, text) = (ids(&tokenizer, "Der"), "ö\u{FFFD}x\u{0301}\n");
    let mut stream = TextStream::new(&tokenizer, &prompt).unwrap();
    for token in ids(&tokenizer, text) {
        stream.push(token).unwrap();
    }
    let (streamed, rest) = stream.finish().unwrap();
    assert_eq!(streamed + &rest, text);
}

/// Every token drawn in 400 tries.
fn support(logits: &[f32], sampling: Sampling) -> HashSet<u32> {
    let logits = Tensor::new(logits, &Device::Cpu).unwrap();
    let mut sampler = Sampler::new(sampling, Some(5)).unwrap();
    (0..400).map(|_| sampler.sample(&logits).unwrap()).collect()
}

#[test]
fn top_k_and_top_p_cut_where_they_should() {
    // Probabilities 0.1, 0.4, 0.2, 0.3, and one token that is forbidden.
    let logits = [0.1f32.ln(), 0.4f32.ln(), 0.2f32.ln(), 0.3f32.ln(), f32::NEG_INFINITY];
    let drawn = |top_k, top_p| {
        let mut drawn: Vec<_> =
            support(&logits, Sampling { temperature: 1., top_k, top_p, ..Sampling::GREEDY })
                .into_iter()
                .collect();
        drawn.sort_unstable();
        drawn
    };
    assert_eq!(drawn(None, None), [0, 1, 2, 3]);
    assert_eq!(drawn(Some(1), None), [1]);
    assert_eq!(drawn(Some(2), None), [1, 3]);
    assert_eq!(drawn(Some(99), None), [0, 1, 2, 3]);
    assert_eq!(drawn(None, Some(0.39)), [1]);
    assert_eq!(drawn(None, Some(0.69)), [1, 3]);
    assert_eq!(drawn(None, Some(0.71)), [1, 2, 3]);
    assert_eq!(drawn(None, Some(1.)), [0, 1, 2, 3]);
    // After top-k the rest counts as the whole: 4/7 and 3/7.
    assert_eq!(drawn(Some(2), Some(0.5)), [1]);
    assert_eq!(drawn(Some(2), Some(0.6)), [1, 3]);
}

#[test]
fn frequencies_follow_the_temperature() {
    let logits = Tensor::new(&[0f32, 1., 2.], &Device::Cpu).unwrap();
    for temperature in [0.5, 1., 2.] {
        let sampling = Sampling { temperature, ..Sampling::GREEDY };
        let mut sampler = Sampler::new(sampling, Some(11)).unwrap();
        let mut counts = [0.; 3];
        for _ in 0..20_000 {
            counts[sampler.sample(&logits).unwrap() as usize] += 1. / 20_000.;
        }
        let weights = [0., 1., 2.].map(|logit: f64| (logit / temperature).exp());
        for (count, weight) in counts.iter().zip(weights) {
            // Five standard deviations of a binomial frequency are below 0.018.
            assert!((count - weight / weights.iter().sum::<f64>()).abs() < 0.018, "{counts:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn greedy_is_argmax_and_seeds_repeat(logits in prop::collection::vec(-20f32..20., 1..200), seed: u64) {
        let tensor = Tensor::new(logits.as_slice(), &Device::Cpu).unwrap();
        let greedy = Sampler::new(Sampling::GREEDY, None).unwrap().sample(&tensor).unwrap();
        prop_assert!(logits.iter().all(|logit| *logit <= logits[greedy as usize]));
        let sampling = Sampling { temperature: 1.3, top_k: Some(40), top_p: Some(0.95), ..Sampling::GREEDY };
        let draw = || {
            let mut sampler = Sampler::new(sampling, Some(seed)).unwrap();
            (0..8).map(|_| sampler.sample(&tensor).unwrap()).collect::<Vec<_>>()
        };
        prop_assert_eq!(draw(), draw());
    }
}

#[test]
fn runs_without_a_seed_differ() {
    let flat = Tensor::zeros(300, DType::F32, &Device::Cpu).unwrap();
    let draw = || {
        let mut sampler = Sampler::new(Sampling::default(), None).unwrap();
        (0..16).map(|_| sampler.sample(&flat).unwrap()).collect::<Vec<_>>()
    };
    assert_ne!(draw(), draw());
}

#[test]
fn the_bundled_model_tells_a_story_to_its_end() {
    let checkpoint = crate::common::bundled("tiny");
    let tokenizer = load_tokenizer(&checkpoint).unwrap();
    let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
    let params =
        Params { sample_len: 600, stop_tokens: stop_tokens(&checkpoint).unwrap(), ..Params::default() };
    let tell = |model: &mut Model, seed| {
        let params = Params { seed: Some(seed), ..params.clone() };
        generate(model, &tokenizer, "Once upon a time", &params, |_| ControlFlow::Continue(())).unwrap()
    };
    let story = tell(&mut model, 1);
    assert_eq!(story.finish, Finish::Stop);
    assert!(
        story.text.split(' ').count() > 40 && story.text.ends_with(['.', '!', '"', '?']),
        "{}",
        story.text
    );
    assert_eq!(tell(&mut model, 1).text, story.text);
    assert_ne!(tell(&mut model, 2).text, story.text);
}

#[test]
fn stop_tokens_come_from_both_configs() {
    let folder = tempfile::TempDir::new().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    std::fs::copy(
        crate::common::fixture("qwen3-mxfp8").join("model.safetensors"),
        folder.path().join("model.safetensors"),
    )
    .unwrap();
    let read = || stop_tokens(&Checkpoint::open(folder.path()).unwrap());
    write("config.json", r#"{"eos_token_id": 5}"#);
    assert_eq!(read().unwrap(), [5]);
    write("generation_config.json", r#"{"eos_token_id": [7, 5]}"#);
    assert_eq!(read().unwrap(), [5, 7]);
    write("config.json", "{}");
    assert_eq!(read().unwrap(), [7, 5]);
    for bad in [r#"{"eos_token_id": -1}"#, r#"{"eos_token_id": ["x"]}"#, "{"] {
        write("generation_config.json", bad);
        assert!(read().is_err(), "{bad}");
    }
    assert!(load_tokenizer(&Checkpoint::open(folder.path()).unwrap()).is_err());
}

#[test]
fn a_stop_string_ends_the_text_and_is_never_given_in_part() {
    let tokenizer = byte_tokenizer();
    let run = |stops: &[&str], answer: &str, sample_len| {
        let stop_strings = stops.iter().map(|stop| stop.to_string()).collect();
        let params = Params { stop_strings, ..greedy(sample_len) };
        let mut model = scripted(&tokenizer, "Once", answer);
        let mut streamed = String::new();
        let generated = generate(&mut model, &tokenizer, "Once", &params, |text| {
            streamed.push_str(text);
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(generated.text, streamed);
        (generated.text, generated.finish, generated.tokens.len())
    };
    assert_eq!(run(&["\nUser:"], " upon\nUs\nUser: hi", 99), (" upon\nUs".into(), Finish::StopString, 14));
    assert_eq!(run(&["\nUser:"], " upon\nUs", 99), (" upon\nUs".into(), Finish::Stop, 8));
    assert_eq!(run(&["\nUser:"], " upon\nUser:", 8), (" upon\nUs".into(), Finish::Length, 8));
    assert_eq!(run(&["x", "🦀"], "ab🦀x", 99), ("ab".into(), Finish::StopString, 6));
    assert_eq!(run(&["ab"], "ab", 99), (String::new(), Finish::StopString, 2));
    let mut model = scripted(&tokenizer, "a", "b");
    let params = Params { stop_strings: vec![String::new()], ..greedy(3) };
    let error = generate(&mut model, &tokenizer, "a", &params, |_| ControlFlow::Continue(())).unwrap_err();
    assert!(error.to_string().contains("stop string: expected at least one character"), "{error}");
}

#[test]
fn parameters_come_from_the_checkpoint() {
    let folder = tempfile::TempDir::new().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let fixture = crate::common::fixture("qwen3-mxfp8");
    for file in ["model.safetensors", "config.json"] {
        std::fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
    }
    let read = || Params::from_checkpoint(&Checkpoint::open(folder.path()).unwrap());
    assert_eq!(read().unwrap().sampling, Sampling::default());
    for (json, expected) in [
        ("{}", Sampling::default()),
        (
            r#"{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05, "do_sample": true}"#,
            Sampling {
                temperature: 0.6,
                top_k: Some(20),
                top_p: Some(0.95),
                min_p: Some(0.1),
                repetition_penalty: 1.05,
                ..Sampling::GREEDY
            },
        ),
        (
            r#"{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}"#,
            Sampling { temperature: 1., ..Sampling::GREEDY },
        ),
        (r#"{"top_k": -1, "temperature": null}"#, Sampling::default()),
        (
            r#"{"do_sample": false, "temperature": 0.7, "top_p": 0.9}"#,
            Sampling { top_p: Some(0.9), ..Sampling::GREEDY },
        ),
    ] {
        write("generation_config.json", json);
        assert_eq!(read().unwrap().sampling, expected, "{json}");
    }
    for (json, expected) in [
        (r#"{"temperature": "hot"}"#, "`temperature`: expected a number, found \"hot\""),
        (r#"{"temperature": -1}"#, "temperature: expected a finite number, at least 0, found -1"),
        (r#"{"top_k": 1.5}"#, "`top_k`: expected a whole number, found 1.5"),
        (r#"{"top_p": 7}"#, "top-p: expected above 0 and at most 1, found 7"),
    ] {
        write("generation_config.json", json);
        let error = read().unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains(expected), "{error}");
    }
}

#[test]
fn a_damaged_tokenizer_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let assets = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(format!("{assets}/{file}"), folder.path().join(file)).unwrap();
    }
    let path = folder.path().join("tokenizer.json");
    byte_tokenizer().save(&path, false).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    load_tokenizer(&checkpoint).unwrap();
    // Cut within the decoder, at which the tokenizers crate would panic, and everywhere else.
    let whole = std::fs::read_to_string(&path).unwrap();
    let decoder = whole.find("\"decoder\":").unwrap();
    for length in [0, 1, decoder + 11, decoder + 30, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = load_tokenizer(&checkpoint).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json: malformed JSON"), "{length}: {error}");
    }
}

/// A prompt is as long as it is, whatever the file asks for.
#[test]
fn padding_and_truncation_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let assets = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    std::fs::copy(format!("{assets}/model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let text = std::fs::read_to_string(format!("{assets}/tokenizer.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&text).unwrap();
    tokenizer["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": 8,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    tokenizer["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let load = |path: &std::path::Path| load_tokenizer(&Checkpoint::open(path).unwrap()).unwrap();
    let prompt = "Once upon a time there was a little girl.";
    assert_eq!(ids(&load(folder.path()), prompt), ids(&load(assets.as_ref()), prompt));
}

/// A library may give up at a text; whoever runs the model gets an error.
#[test]
fn a_tokenizer_that_panics_is_an_error() {
    let mut tokenizer = byte_tokenizer();
    // It looks at characters that a token does not have.
    tokenizer.with_decoder(Some(tokenizers::decoders::strip::Strip::new('a', 0, 5)));
    let error = TextStream::new(&tokenizer, &ids(&tokenizer, "aa")).err().unwrap().to_string();
    assert!(error.contains("the tokenizer gives up"), "{error}");
}
