//! Plans against layers, and what a model refuses.

use super::*;
use candle_quant::QuantFormat;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{json, Value};
use std::path::{Path, PathBuf};

fn tiny() -> Model {
    Model::load(&Checkpoint::open("assets/tiny").unwrap(), DType::F32, &Device::Cpu).unwrap()
}

/// A model of two layers with random weights, packed in 4 bits.
fn random(changes: &Value) -> Model {
    let mut config = json!({"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "tie_word_embeddings": false});
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let config = Config::from_json(&config).unwrap();
    let (expected, _) = config.inventory(["model.layers.0.", "model.layers.1."].into_iter());
    let mut random = StdRng::seed_from_u64(7);
    let tensors = expected.into_iter().map(|(name, tensor)| {
        let most =
            if tensor.dims.len() > 1 { (3. / tensor.dims[tensor.dims.len() - 1] as f32).sqrt() } else { 1. };
        let count = tensor.dims.iter().product();
        let values: Vec<f32> = (0..count).map(|_| random.random_range(-most..most)).collect();
        (name, Tensor::from_vec(values, tensor.dims, &Device::Cpu).unwrap())
    });
    let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
    Model::new(&config, vb.quantize_to(QuantFormat::affine(4, 64).unwrap())).unwrap()
}

/// Packed checkpoints of all dense families; none in a package, which has no fixtures.
fn families() -> Vec<(String, PathBuf)> {
    let Some(repository) = option_env!("CANDLE_QUANT_REPOSITORY") else { return Vec::new() };
    let entries = std::fs::read_dir(Path::new(repository).join("tests/fixtures/families")).unwrap();
    let named = entries.map(|entry| entry.unwrap()).flat_map(|entry| {
        let (name, path) = (entry.file_name().into_string().unwrap(), entry.path());
        ["mlx-affine4", "mlx-mxfp4"].map(|format| (format!("{name}, {format}"), path.join(format)))
    });
    let is_dense = |path: &Path| {
        let config = Config::from_checkpoint(&Checkpoint::open(path).unwrap()).unwrap();
        config.moe.is_none() && config.latents.is_none() && config.linear.is_none()
    };
    let packed: Vec<_> = named.filter(|(_, path)| path.is_dir() && is_dense(path)).collect();
    assert!(packed.len() >= 60, "{}", packed.len());
    packed
}

#[test]
fn a_plan_computes_what_the_layers_compute() {
    let of_type = |model_type: &str| random(&json!({"model_type": model_type}));
    let of_types = ["llama", "qwen2", "qwen3"].map(|name| (name.to_string(), [of_type(name), of_type(name)]));
    let load =
        |path: &PathBuf| Model::load(&Checkpoint::open(path).unwrap(), DType::F32, &Device::Cpu).unwrap();
    let (families, mut problems) = (families(), Vec::new());
    let families = families.iter().map(|(name, path)| (name.clone(), [load(path), load(path)]));
    for (name, [mut planned, mut layered]) in
        of_types.into_iter().chain([("tiny".to_string(), [tiny(), tiny()])]).chain(families)
    {
        let plan = planned.plan.clone();
        if plan.is_none() {
            problems.push(format!("{name}: no plan"));
        }
        layered.plan = None;
        let ids: Vec<u32> = (0..60).map(|index| index * 7 % 96).collect();
        // Both halves of a plan, for few and for many tokens, for one text and for two; parts of both ways, on one cache.
        for way in [[true; 5], [true, false, true, false, true], [false, true, false, true, false]] {
            let mut first = 0;
            for model in [&mut planned, &mut layered] {
                model.clear_kv_cache();
                model.expect_tokens(44);
            }
            for ((batch, len), is_planned) in [(2, 1), (2, 20), (2, 1), (2, 3), (2, 19)].into_iter().zip(way)
            {
                let part: Vec<u32> = [&ids[first..first + len], &ids[60 - first - len..60 - first]].concat();
                let part = Tensor::from_vec(part, (batch, len), &Device::Cpu).unwrap();
                let run = |model: &mut Model| model.forward(&part, first).unwrap().flatten_all().unwrap();
                planned.plan = plan.clone().filter(|_| is_planned);
                let (found, expected) = (run(&mut planned), run(&mut layered));
                let (found, expected) = (found.to_vec1::<f32>().unwrap(), expected.to_vec1::<f32>().unwrap());
                let spread = expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32;
                let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
                let what = format!("{name}, {len} tokens from {first} on, {way:?}");
                if worst > 2e-5 * spread.sqrt() {
                    problems.push(format!("{what}: {worst} of {}", spread.sqrt()));
                }
                first += len;
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn what_a_plan_does_not_have_runs_layer_by_layer() {
    for changes in [
        json!({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}),
        json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
        json!({"hidden_act": "mish"}),
    ] {
        assert!(random(&changes).plan.is_none(), "{changes}");
    }
}

#[test]
fn ids_that_do_not_fit_are_refused() {
    let mut model = tiny();
    let ids = |batch: usize| Tensor::ones((batch, 2), DType::U32, &Device::Cpu).unwrap();
    for (before, then) in [(2, 1), (1, 2)] {
        model.forward(&ids(before), 0).unwrap();
        let error = model.forward_last(&ids(then), 2).unwrap_err().to_string();
        assert!(error.contains("batch") && model.cached_tokens() == 0, "{error}");
    }
    let fractions = Tensor::new(&[[1.5f32]], &Device::Cpu).unwrap();
    assert!(model.forward(&fractions, 0).unwrap_err().to_string().contains("dtype U8, U32 or I64"));
    let outside = Tensor::new(&[[640u32]], &Device::Cpu).unwrap();
    assert!(model.forward(&outside, 0).unwrap_err().to_string().contains("each below 640"));
}
