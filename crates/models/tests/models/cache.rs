//! The choice of a KV cache: formats, limits.

use crate::common::{bundled, distance, open, reference};
use candle_core::{DType, Device, Tensor, D};
use candle_quant::{Checkpoint, Error, KvFormat, VarBuilder};
use candle_quant_models::generate::load_tokenizer;
use candle_quant_models::{CacheOptions, Config, Model, ModelOptions};

fn load(checkpoint: &Checkpoint, cache: CacheOptions) -> Model {
    let vb = VarBuilder::from_checkpoint(checkpoint, DType::F32, &Device::Cpu);
    Model::with_options(
        &Config::from_checkpoint(checkpoint).unwrap(),
        vb,
        ModelOptions { cache, ..Default::default() },
    )
    .unwrap()
}

fn with(keys: KvFormat, values: KvFormat) -> CacheOptions {
    CacheOptions { keys: Some(keys), values: Some(values), ..Default::default() }
}

/// In one piece, and the second half token by token.
#[test]
fn logits_stay_close_with_every_format() {
    for name in ["qwen3-affine-b4-g64", "llama-mixed-custom", "qwen3-nvfp4"] {
        let (tokens, expected) = reference(name);
        for (keys, values, bound) in [
            (KvFormat::F32, KvFormat::F32, 3e-4),
            (KvFormat::F16, KvFormat::F16, 2e-3),
            (KvFormat::Bf16, KvFormat::Bf16, 1e-2),
            (KvFormat::Affine8, KvFormat::Affine8, 2e-2),
            (KvFormat::Affine8, KvFormat::Affine4, 0.15),
            // A layer's attention is 0.14 off, relative to its output, and these models have two layers of random weights.
            (KvFormat::Affine4, KvFormat::Affine4, 0.25),
        ] {
            let mut model = load(&open(name), with(keys, values));
            let whole = model.forward(&tokens, 0).unwrap();
            model.clear_kv_cache();
            let mut pieces = vec![model.forward(&tokens.narrow(1, 0, 20).unwrap(), 0).unwrap()];
            for offset in 20..40 {
                pieces.push(model.forward(&tokens.narrow(1, offset, 1).unwrap(), offset).unwrap());
            }
            for logits in [whole, Tensor::cat(&pieces, 1).unwrap()] {
                let distance = distance(&logits, &expected);
                assert!(distance.rms <= bound, "{name} {keys},{values}: {distance:?}");
            }
        }
    }
}

/// Of the bundled model on stories that it has not seen.
fn perplexity(cache: CacheOptions) -> f64 {
    let checkpoint = bundled("tiny-bf16");
    let tokenizer = load_tokenizer(&checkpoint).unwrap();
    let mut model = load(&checkpoint, cache);
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/heldout.txt");
    let texts = std::fs::read_to_string(path).unwrap();
    let (mut sum, mut count) = (0., 0);
    for text in texts.split("\n\n").map(str::trim).filter(|text| !text.is_empty()).take(12) {
        let encoding = tokenizer.encode(text, false).unwrap();
        let ids = Tensor::new(encoding.get_ids(), &Device::Cpu).unwrap();
        let len = ids.dim(0).unwrap() - 1;
        model.clear_kv_cache();
        let inputs = ids.narrow(0, 0, len).unwrap().unsqueeze(0).unwrap();
        let logits = model.forward(&inputs, 0).unwrap().squeeze(0).unwrap();
        let targets = ids.narrow(0, 1, len).unwrap().unsqueeze(1).unwrap().contiguous().unwrap();
        let likelihoods =
            candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap().gather(&targets, 1).unwrap();
        sum -= f64::from(likelihoods.sum_all().unwrap().to_scalar::<f32>().unwrap());
        count += len;
    }
    (sum / count as f64).exp()
}

#[test]
fn the_perplexity_hardly_grows() {
    let exact = perplexity(CacheOptions::default());
    for (keys, values, bound) in [
        (KvFormat::F16, KvFormat::F16, 1e-4),
        (KvFormat::Affine8, KvFormat::Affine8, 1e-3),
        (KvFormat::Affine8, KvFormat::Affine4, 2e-2),
        (KvFormat::Affine4, KvFormat::Affine4, 3e-2),
    ] {
        let growth = perplexity(with(keys, values)) / exact - 1.;
        println!("{keys},{values}: {growth:+.5}");
        assert!(growth <= bound, "{keys},{values}: {growth:+e} of {exact}");
    }
}

#[test]
fn a_text_beyond_the_most_tokens_is_an_error_that_changes_nothing() {
    let (tokens, _) = reference("qwen3-mxfp8");
    let mut model = load(&open("qwen3-mxfp8"), CacheOptions { max_tokens: Some(41), ..Default::default() });
    let first = model.forward(&tokens, 0).unwrap();
    let one = tokens.narrow(1, 0, 1).unwrap();
    let two = tokens.narrow(1, 0, 2).unwrap();
    let error = model.forward(&two, 40).unwrap_err();
    assert!(error.to_string().contains("42 tokens, but the KV cache holds at most 41"), "{error}");
    assert_eq!(model.cached_tokens(), 40);
    model.forward(&one, 40).unwrap();
    assert!(model.forward_last(&one, 41).is_err());
    model.clear_kv_cache();
    assert_eq!(distance(&model.forward(&tokens, 0).unwrap(), &first).max, 0.);
    let error = Error::OutOfCache { needed: 2, max_tokens: 1 }.to_string();
    assert!(error.contains("`max_tokens`"), "{error}");
}

#[test]
fn a_text_is_no_longer_than_its_context() {
    use candle_quant_models::generate::{self, Params, Sampling};
    use std::ops::ControlFlow;
    let checkpoint = Checkpoint::open(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny")).unwrap();
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let with_context = |context| {
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        Model::with_options(&config, vb, ModelOptions { context, ..Default::default() }).unwrap()
    };
    assert_eq!((with_context(None).context(), config.context()), (512, 512));
    let mut model = with_context(Some(10));
    let ids = |len: usize| Tensor::ones((1, len), DType::U32, &Device::Cpu).unwrap();
    let told = |error: candle_core::Error| {
        let text = error.to_string();
        assert!(text.contains("11 tokens, but the model is made for texts of at most 10"), "{text}");
    };
    told(model.forward(&ids(11), 0).unwrap_err());
    assert_eq!(model.cached_tokens(), 0);
    model.forward(&ids(10), 0).unwrap();
    told(model.forward_last(&ids(1), 10).unwrap_err());
    // What there is of the text stays.
    assert_eq!(model.cached_tokens(), 10);

    let tokenizer = generate::load_tokenizer(&checkpoint).unwrap();
    let params = Params { sample_len: 20, sampling: Sampling::GREEDY, ..Params::default() };
    let mut text = String::new();
    let mut run = |model: &mut Model, prompt: &str| {
        text.clear();
        let result = generate::generate(model, &tokenizer, prompt, &params, |piece| {
            text.push_str(piece);
            ControlFlow::Continue(())
        });
        (result.map(|generated| generated.tokens.len()), text.clone())
    };
    let (error, nothing) = run(&mut model, "one two three four five six seven eight nine ten eleven");
    assert!(matches!(error, Err(Error::OutOfContext { needed: 11.., context: 10 })), "{error:?}");
    assert_eq!(nothing, "");
    let (error, some) = run(&mut model, "Once upon");
    assert!(matches!(error, Err(Error::OutOfContext { needed: 11, context: 10 })), "{error:?}");
    assert_ne!(some, "");
    assert_eq!(run(&mut with_context(Some(60)), "Once upon").0.unwrap(), 20);
}

#[test]
fn a_truncated_text_goes_on_as_one_that_was_never_longer() {
    for name in ["qwen3-affine-b4-g64", "gptoss-mxfp4-mlxlm"] {
        let (tokens, _) = reference(name);
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Affine8, KvFormat::Affine4] {
            let mut model = load(&open(name), with(format, format));
            let part = |from: usize, len: usize| tokens.narrow(1, from, len).unwrap();
            model.forward(&part(0, 25), 0).unwrap();
            let expected = model.forward(&part(0, 10), 25).unwrap();
            model.clear_kv_cache();
            // As few rows as before: without integer kernels, more are multiplied in tiles, which round in another order.
            model.forward(&part(0, 30), 0).unwrap();
            assert_eq!(model.truncate_kv_cache(50), 30);
            let left = model.truncate_kv_cache(25);
            assert_eq!(left, model.cached_tokens());
            // With a window, it may have left tokens behind.
            assert!(left == 25 || (left == 0 && name.starts_with("gptoss")), "{name} {format}: {left}");
            if left == 0 {
                model.forward(&part(0, 25), 0).unwrap();
            }
            let found = model.forward(&part(0, 10), 25).unwrap();
            assert_eq!(distance(&found, &expected).max, 0., "{name} {format}");
            assert_eq!((model.truncate_kv_cache(0), model.cached_tokens()), (0, 0));
        }
    }
}
