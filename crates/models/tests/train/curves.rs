//! Curves of losses: they fall, and depend on nothing but the seed.

use crate::common::{bundled, open};
use crate::models::{decoded, ids, load, lora, texts};
use candle_core::{DType, Device};
use candle_quant::checkpoint::AdapterFile;
use candle_quant::nn::LoraConfig;
use candle_quant_models::train::{finetune, perplexity, Dataset, Options, SaveOptions, Schedule};
use candle_quant_models::Model;
use std::env;
use std::ops::ControlFlow;
use std::process::Command;

fn options(steps: usize, learning_rate: f64) -> Options {
    let schedule = Schedule { learning_rate, warm_up: 3, floor: 0.1 };
    Options { steps, schedule, lora: lora(4), batch: 2, accumulation: 2, seed: 11, ..Default::default() }
}

fn curve(model: &Model, data: &Dataset, options: &Options) -> Vec<f64> {
    finetune(model, data, options, |_| ControlFlow::Continue(())).unwrap().losses
}

#[test]
fn a_few_texts_are_learned_by_heart() {
    for name in ["qwen3-affine-b4-g64", "qwen3moe-affine-b4-g64"] {
        let (model, texts) = (load(name), texts(4, 16));
        let data = Dataset { held_out: texts.clone(), training: texts };
        let report = finetune(&model, &data, &options(60, 2e-2), |_| ControlFlow::Continue(())).unwrap();
        let (first, last) = (report.losses[0], report.losses[59]);
        assert!(last < first / 5., "{name}: {first} to {last}");
        let (before, after) = (report.held_out_before.unwrap(), report.held_out_after.unwrap());
        assert!((before.ln() - first).abs() < 1e-5 && after.ln() < first / 5., "{name}: {before} to {after}");
        let again = perplexity(&model, &data.training, 2).unwrap();
        assert!((again / after - 1.).abs() < 1e-5, "{name}: {again}, {after}");
        // Nothing is left that takes part in gradients.
        let logits = model.forward_whole(&ids(&data.training)).unwrap();
        assert!(!logits.track_op());
        model.adapters().set_active("default", false);
        let off = perplexity(&model, &data.training, 2).unwrap();
        assert!((off / before - 1.).abs() < 1e-6, "{name}: {off} without the adapter, {before} before it");
    }
}

/// DoRA begins with the lengths of the weight's rows: it changes nothing before it has learned. What it is saved as is
/// what it is.
#[test]
fn dora_learns_and_is_saved() {
    let texts = texts(4, 16);
    let (model, again) = (load("qwen3-affine-b4-g64"), load("qwen3-affine-b4-g64"));
    let data = Dataset { held_out: texts.clone(), training: texts };
    let lora = LoraConfig { dora: true, ..lora(4) };
    let folder = tempfile::tempdir().unwrap();
    let save = SaveOptions { folder: folder.path().to_owned(), every: None };
    let options = Options { lora, save: Some(save), ..options(40, 2e-2) };
    let before = perplexity(&model, &data.held_out, 2).unwrap();
    let report = finetune(&model, &data, &options, |_| ControlFlow::Continue(())).unwrap();
    let (first, last) = (report.losses[0], report.losses[39]);
    assert!((before.ln() - first).abs() < 1e-5 && last < first / 4., "{before}: {first} to {last}");
    let slot = model.adapters().slot("model.layers.0.mlp.up_proj").unwrap();
    let magnitude = slot.get("default").unwrap().magnitude.unwrap();
    let moved = (magnitude - slot.row_norms().unwrap()).unwrap().abs().unwrap().max_all().unwrap();
    assert!(moved.to_scalar::<f32>().unwrap() > 1e-3, "the magnitudes have not learned");

    again.adapters().load("default", &AdapterFile::open(folder.path()).unwrap()).unwrap();
    let (after, loaded) = (report.held_out_after.unwrap(), perplexity(&again, &data.held_out, 2).unwrap());
    assert!((loaded / after - 1.).abs() < 1e-5, "{loaded} loaded, {after} saved");
}

#[test]
fn packed_weights_learn_as_decoded_ones() {
    for name in ["qwen3-affine-b4-g64", "llama-untied-mxfp4"] {
        let data = Dataset { training: texts(12, 16), held_out: vec![] };
        let packed = curve(&load(name), &data, &options(50, 5e-3));
        let dense = curve(&decoded(&open(name)), &data, &options(50, 5e-3));
        let far = packed.iter().zip(&dense).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
        assert!(far < 1e-4, "{name}: {far}");
        assert!(packed[49] < packed[0] - 0.5, "{name}: {} to {}", packed[0], packed[49]);
    }
}

/// Set for the process that learns.
const CHILD: &str = "CANDLE_QUANT_TEST_CURVE";

/// In processes of their own, since candle's matmul and rayon ask for the number of threads once.
#[test]
fn threads_change_no_bit() {
    if env::var_os(CHILD).is_some() {
        let mut bits = Vec::new();
        let mut learn = |model: Model, data: Dataset, steps| {
            bits.extend(curve(&model, &data, &options(steps, 5e-3)).into_iter().map(f64::to_bits));
        };
        let tiny = Model::load(&bundled("tiny"), DType::F32, &Device::Cpu).unwrap();
        learn(tiny, Dataset { training: texts(8, 60), held_out: vec![] }, 3);
        learn(load("gptoss-mxfp4-hf"), Dataset { training: texts(8, 20), held_out: vec![] }, 4);
        learn(decoded(&open("qwen3-affine-b4-g64")), Dataset { training: texts(8, 40), held_out: vec![] }, 4);
        println!("bits: {bits:?}");
        return;
    }
    let curve_on = |threads: &str| {
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", "curves::threads_change_no_bit", "--nocapture"])
            .envs([(CHILD, "1"), ("RAYON_NUM_THREADS", threads)])
            .output()
            .unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        stdout.lines().find(|line| line.contains("bits: ")).expect("a curve").to_owned()
    };
    let one = curve_on("1");
    assert_eq!(one.matches(',').count(), 10, "{one}");
    for threads in ["2", "3"] {
        assert_eq!(curve_on(threads), one, "{threads} threads");
    }
}

#[test]
fn another_seed_is_another_curve() {
    let data = Dataset { training: texts(12, 12), held_out: vec![] };
    let curve_of = |seed| curve(&load("qwen3-affine-b4-g64"), &data, &Options { seed, ..options(4, 5e-3) });
    assert_eq!(curve_of(1), curve_of(1));
    assert_ne!(curve_of(1), curve_of(2));
}
