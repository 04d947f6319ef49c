//! What can't be learned is an error that says so.

use crate::models::{load, lora, texts};
use candle_core::{DType, Device};
use candle_quant::nn::LoraConfig;
use candle_quant::parallel::run;
use candle_quant::VarBuilder;
use candle_quant_models::train::{
    add_adapter, finetune, gradients, perplexity, variables, Dataset, Options, SaveOptions, Schedule,
    Sequence,
};
use candle_quant_models::{Config, Model};
use std::ops::ControlFlow;

const NAME: &str = "qwen3-affine-b4-g64";

fn refusal(data: Dataset, options: Options) -> String {
    let options = Options { lora: lora(2), steps: options.steps.min(20), ..options };
    finetune(&load(NAME), &data, &options, |_| ControlFlow::Continue(())).unwrap_err().to_string()
}

fn only(training: Vec<Sequence>) -> Dataset {
    Dataset { training, held_out: vec![] }
}

#[test]
fn data_that_teach_nothing_are_refused() {
    for training in [vec![], vec![Sequence::new([5])], vec![Sequence::with_prompt(&[1, 2], &[])]] {
        let error = refusal(only(training), Options::default());
        assert!(error.contains("at least one of two or more tokens"), "{error}");
    }
    let held_out = vec![Sequence::new([5])];
    let error = refusal(Dataset { training: texts(2, 8), held_out }, Options::default());
    assert!(error.contains("at least one of two or more tokens"), "{error}");
    let error = refusal(only(vec![Sequence::new([5, 6]), Sequence::new([5, 256])]), Options::default());
    assert!(
        error.contains("sequence 1") && error.contains("below 256") && error.contains("found 256"),
        "{error}"
    );
    let model = load(NAME);
    let variables = add_adapter(&model, "a", &lora(2), &["q_proj"], 1).unwrap();
    assert!(gradients(&model, &variables, &[Sequence::new([5])], 1, 1).is_err());
}

#[test]
fn long_sequences_are_split() {
    let model = load(NAME);
    let long = Sequence::new((0..2000u32).map(|i| 40 + i * i % 31).collect::<Vec<_>>());
    assert!(long.tokens().len() > model.context());
    assert!(perplexity(&model, std::slice::from_ref(&long), 1).unwrap() > 1.);
    let options = Options { steps: 1, batch: 1, accumulation: 200, context: Some(20), ..Default::default() };
    let report = finetune(&model, &only(vec![long]), &options, |progress| {
        // Two epochs of 1999 tokens that count.
        assert_eq!(progress.tokens, 2 * 1999);
        ControlFlow::Continue(())
    });
    assert_eq!(report.unwrap().tokens, 2 * 1999);
}

#[test]
fn a_loss_that_is_no_number_names_its_step() {
    let schedule = Schedule { learning_rate: 1e30, warm_up: 0, floor: 1. };
    let options = Options { schedule, clip: None, ..Default::default() };
    let error = refusal(only(texts(3, 8)), options);
    assert!(error.contains("loss of step ") && error.contains("finite") && !error.contains('\n'), "{error}");
}

#[test]
fn senseless_options_are_refused() {
    let with = |change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        refusal(only(texts(3, 8)), options)
    };
    for error in [
        with(|options| options.steps = 0),
        with(|options| options.batch = 0),
        with(|options| options.accumulation = 0),
        with(|options| options.layers_per_segment = 0),
        with(|options| options.context = Some(0)),
        with(|options| options.held_out_every = Some(0)),
        with(|options| options.save = Some(SaveOptions { folder: "x".into(), every: Some(0) })),
    ] {
        assert!(error.contains("at least one step"), "{error}");
    }
    for rate in [f64::NAN, 0., -1., f64::INFINITY] {
        let schedule = Schedule { learning_rate: rate, ..Default::default() };
        let error = refusal(only(texts(3, 8)), Options { schedule, ..Default::default() });
        assert!(error.contains("a learning rate above 0"), "{error}");
    }
    for clip in [f64::NAN, 0., -1.] {
        let error = refusal(only(texts(3, 8)), Options { clip: Some(clip), ..Default::default() });
        assert!(error.contains("`clip`"), "{error}");
    }
}

#[test]
fn targets_that_match_nothing_list_what_there_is() {
    let model = load(NAME);
    for target in ["query", "model.layers.9.*", "embed_tokens", ""] {
        let error = add_adapter(&model, "a", &lora(2), &["q_proj", target], 1).unwrap_err().to_string();
        let there = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj";
        assert!(error.contains(there) && error.contains(&format!("`{target}`")), "{error}");
        assert!(variables(&model, "a").is_err(), "{target}");
    }
    assert!(add_adapter(&model, "a", &lora(2), &["[q"], 1).unwrap_err().to_string().contains("a glob"));
    assert!(add_adapter(&model, "a", &lora(2), &[""; 0], 1).is_err());
    assert!(add_adapter(&model, "a", &lora(0), &["q_proj"], 1).is_err());
    let alpha = LoraConfig { alpha: f64::NAN, ..lora(2) };
    assert!(add_adapter(&model, "a", &alpha, &["q_proj"], 1).is_err());

    assert_eq!(add_adapter(&model, "a", &lora(2), &["q_proj", "*.mlp.*", "q_proj"], 1).unwrap().len(), 16);
    let error = add_adapter(&model, "a", &lora(2), &["o_proj", "q_proj"], 1).unwrap_err().to_string();
    assert!(error.contains("not taken") && error.contains("q_proj"), "{error}");
    assert_eq!(variables(&model, "a").unwrap().len(), 16);
}

#[test]
fn a_part_of_a_model_does_not_learn() {
    let checkpoint = crate::common::open(NAME);
    let errors = run(&[Device::Cpu, Device::Cpu], move |rank| {
        let config = Config::from_checkpoint(&checkpoint)?;
        let model = Model::new(&config, VarBuilder::sharded(&checkpoint, &rank, DType::F32))?;
        Ok(perplexity(&model, &[Sequence::new([1, 2, 3])], 1).unwrap_err().to_string())
    });
    for error in errors.unwrap() {
        assert!(error.contains("load the whole model"), "{error}");
    }
}
