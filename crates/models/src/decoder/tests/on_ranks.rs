//! Steps of several ranks, a plan each, against the whole model on the CPU.

use super::on_device::{distance, logits, nth_device, PROMPTS};
use super::*;
use candle_quant::ops::SampleOptions;
use candle_quant::parallel::{run, Rank};

fn devices(count: usize) -> Option<Vec<Device>> {
    (0..count).map(nth_device).collect()
}

/// What a rank found: logits, the launches of its last step if that was captured, and tokens that it drew.
type Found = (Vec<f32>, Option<usize>, Vec<u32>);

fn found(model: &mut Model) -> candle_quant::Result<Found> {
    let logits = logits(model, &PROMPTS);
    let step = model.steps.last().map(|(_, step)| step);
    let launches = step.filter(|step| step.is_captured()).and_then(DeviceStep::launches);
    model.clear_kv_cache();
    let mut tokens = vec![3];
    for position in 0..if launches.is_some() { 4 } else { 0 } {
        let options =
            SampleOptions { temperature: if position < 2 { 0. } else { 1. }, ..SampleOptions::GREEDY };
        let drawn = model.draw_step(tokens[position], position, &options, (7, position as u64))?;
        tokens.push(drawn.unwrap());
    }
    Ok((logits, launches, tokens))
}

/// As [`found`], of all ranks, which agree.
fn of_ranks(
    devices: &[Device],
    make: impl Fn(Rank) -> candle_quant::Result<Model> + Send + Sync + 'static,
) -> Found {
    let mut all = run(devices, move |rank| found(&mut make(rank)?)).unwrap();
    let first = all.swap_remove(0);
    assert!(all.iter().all(|other| *other == first), "ranks differ");
    first
}

/// What the whole model on the CPU draws greedily.
fn greedy(model: &mut Model, tokens: usize) -> Vec<u32> {
    model.clear_kv_cache();
    let mut ids = vec![3];
    for position in 0..tokens {
        let id = Tensor::new(&[[ids[position]]], &Device::Cpu).unwrap();
        let logits = model.forward_last(&id, position).unwrap().squeeze(0).unwrap();
        ids.push(logits.argmax(0).unwrap().to_scalar::<u32>().unwrap());
    }
    ids
}

/// Blocks with what families have beside weights, split over two ranks: biases, sinks, norms behind blocks, scales, shared
/// experts, blocks side by side.
#[test]
fn parts_of_models_compute_what_the_whole_does() {
    let Some(devices) = devices(2) else { return };
    let linear = ["qwen3_next", "qwen3_5_text"];
    let others =
        ["cohere", "gemma2", "glm", "granite", "gpt_oss", "glm4_moe", "qwen2_moe", "stablelm", "starcoder2"];
    let with_plan = [&linear[..], &others].concat();
    // Norms over the heads of all ranks.
    let without_plan = ["olmo2"];
    for mut kind in planned_kinds() {
        let name = kind["model_type"].as_str().unwrap().to_string();
        if ![&with_plan[..], &without_plan].concat().contains(&name.as_str()) {
            continue;
        }
        kind["head_dim"] = json!(64);
        let config = with_sizes(&kind);
        let folder = tempfile::tempdir().unwrap();
        let weights = folder.path().join("model.safetensors");
        candle_core::safetensors::save(&random_tensors(&Config::from_json(&config).unwrap()), weights)
            .unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        // Half of an expert has 32 inner elements.
        let of = |vb: VarBuilder, config: &Config| {
            Model::new(config, vb.quantize_to(QuantFormat::affine(4, 32).unwrap()))
        };
        // BF16 takes other kernels; some kinds show what becomes of their outputs.
        let count = if ["gemma2", "gpt_oss", "qwen3_5_text"].contains(&name.as_str()) { 2 } else { 1 };
        for (dtype, bound) in [(DType::F32, 3e-6), (DType::BF16, 3e-2)].into_iter().take(count) {
            // What linear attention gives is normalized, however small it is.
            let bound = if linear.contains(&name.as_str()) { 1.5 * bound } else { bound };
            let config = Config::from_checkpoint(&checkpoint).unwrap();
            let mut whole =
                of(VarBuilder::from_checkpoint(&checkpoint, dtype, &Device::Cpu), &config).unwrap();
            let expected = logits(&mut whole, &PROMPTS);
            let checkpoint = checkpoint.clone();
            let make = move |rank: Rank| of(VarBuilder::sharded(&checkpoint, &rank, dtype), &config);
            let (found, launches, tokens) = of_ranks(&devices, make);
            let distance = distance(&found, &expected);
            assert!(distance <= bound, "{name} {dtype:?}: {distance:.2e} of {bound:.2e}");
            assert_eq!(launches.is_some(), !without_plan.contains(&name.as_str()), "{name} {dtype:?}");
            if launches.is_some() && dtype == DType::F32 {
                assert_eq!(tokens[..3], greedy(&mut whole, 2), "{name}");
            }
        }
    }
}

/// Rows of a vocabulary, groups of a weight and heads, as many as they are, shared by two, three and four.
#[test]
fn shares_of_any_size() {
    for count in 2..=4 {
        let Some(devices) = devices(count) else { return };
        let expected = logits(&mut tiny(), &PROMPTS);
        let make = |rank: Rank| {
            let checkpoint = Checkpoint::open("assets/tiny")?;
            Model::new(
                &Config::from_checkpoint(&checkpoint)?,
                VarBuilder::sharded(&checkpoint, &rank, DType::F32),
            )
        };
        let (found, launches, tokens) = of_ranks(&devices, make);
        let distance = distance(&found, &expected);
        assert!(distance <= 3e-6, "{count} ranks: {distance:.2e}");
        let layers = tiny().layers.len();
        // Embedding and head are exchanged, and of a layer the outputs of both blocks, which are added then.
        assert!(launches.is_some_and(|launches| launches >= 4 + 9 * layers), "{count} ranks: {launches:?}");
        assert_eq!(tokens[..3], greedy(&mut tiny(), 2), "{count} ranks");
    }
}

/// Where one rank has no plan, all go layer by layer: nobody waits for it in a step.
#[test]
fn one_rank_without_a_plan() {
    let Some(devices) = devices(2) else { return };
    let expected = logits(&mut tiny(), &PROMPTS);
    let make = |rank: Rank| {
        let checkpoint = Checkpoint::open("assets/tiny")?;
        let config = Config::from_checkpoint(&checkpoint)?;
        let mut model = Model::new(&config, VarBuilder::sharded(&checkpoint, &rank, DType::F32))?;
        assert!(model.plan.is_some());
        if rank.index() == 1 {
            model.plan = None;
        }
        Ok(model)
    };
    let (found, launches, _) = of_ranks(&devices, make);
    assert!(distance(&found, &expected) <= 3e-6);
    assert_eq!(launches, None);
}
