//! Every family of the table, on small checkpoints that transformers, mlx-lm, llama.cpp's converter and mistral.rs wrote: logits
//! against those of the first two, and a model against itself in other orders of work.

use crate::common::{distance, reference_in};
use crate::families_of::{folders, open, reference_of};
use candle_core::{DType, Device, Tensor};
use candle_quant::{Checkpoint, Result, VarBuilder};
use candle_quant_models::{Config, Model};
use serde_json::{json, Value};
use std::path::Path;

/// Fails with all that `check` has to say of the fixtures.
fn check_all(check: impl Fn(&Path) -> Result<Option<String>>) {
    let problems = folders().into_iter().filter_map(|(name, path)| match check(&path) {
        Ok(None) => None,
        Ok(Some(problem)) => Some(format!("{name}: {problem}")),
        Err(error) => Some(format!("{name}: {error}")),
    });
    let problems: Vec<_> = problems.collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

fn load(path: &Path) -> Result<Model> {
    Model::load(&open(path)?, DType::F32, &Device::Cpu)
}

/// What is wrong with logits, if they are not those expected.
fn other(logits: &Tensor, expected: &Tensor, bound: f64) -> Option<String> {
    let distance = distance(logits, expected);
    (distance.max > bound || distance.other_argmax > 0).then(|| format!("{distance:?}"))
}

#[test]
fn logits_are_those_of_transformers_and_mlx_lm() {
    assert!(folders().len() >= 100);
    check_all(|path| {
        let (tokens, expected) = reference_in(&reference_of(path));
        Ok(other(&load(path)?.forward(&tokens, 0)?, &expected, 3e-4))
    });
}

/// Transformers 4 and 5 call the same fields otherwise.
#[test]
fn configs_of_before_mean_the_same() {
    let with_both = folders().iter().filter(|(_, path)| path.join("config_v4.json").is_file()).count();
    assert!(with_both >= 40, "{with_both}");
    check_all(|path| {
        let Ok(config) = std::fs::read_to_string(path.join("config_v4.json")) else { return Ok(None) };
        let config = Config::from_json(&serde_json::from_str(&config).unwrap())?;
        let (tokens, expected) = reference_in(&reference_of(path));
        let vb = VarBuilder::from_checkpoint(&open(path)?, DType::F32, &Device::Cpu);
        Ok(other(&Model::new(&config, vb)?.forward(&tokens, 0)?, &expected, 3e-4))
    });
}

/// OLMoE's queries and keys are cut behind their norms: the numbers are those of transformers 5.23, token by token as well.
#[test]
fn what_is_cut_behind_norms_is_what_they_make() {
    const EXPECTED: [f32; 8] = [-1.50064, -0.62362, 0.92514, -1.91092, 0.75987, -1.56413, -0.86438, -0.16424];
    let path = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/olmoe/hf");
    let checkpoint = open(&path).unwrap();
    let mut config = checkpoint.config().clone();
    config["clip_qkv"] = json!(0.5);
    let config = Config::from_json(&config).unwrap();
    let (tokens, _) = reference_in(&reference_of(&path));
    let len = tokens.dim(1).unwrap();
    for piece in [len, 1] {
        let mut model =
            Model::new(&config, VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu)).unwrap();
        let mut last = Vec::new();
        for start in (0..len).step_by(piece) {
            let logits = model.forward(&tokens.narrow(1, start, piece).unwrap(), start).unwrap();
            last = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        }
        let found = &last[last.len() - config.vocab_size..][..8];
        let far = found.iter().zip(EXPECTED).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
        // In parts of the standard deviation, 1.414.
        assert!(far < 3e-4 * 1.414, "{piece}: {found:?}");
    }
}

/// Keys turn otherwise in long texts of LongRoPE: a text in pieces has to say how long it will be.
#[test]
fn a_text_in_pieces_gives_the_logits_of_the_whole() {
    check_all(|path| {
        let (tokens, expected) = reference_in(&reference_of(path));
        let (mut model, len) = (load(path)?, tokens.dim(1)?);
        for size in [1, 7] {
            model.clear_kv_cache();
            model.expect_tokens(len);
            let mut parts = Vec::new();
            for offset in (0..len).step_by(size) {
                let part = tokens.narrow(1, offset, size.min(len - offset))?;
                parts.push(model.forward(&part, offset)?);
            }
            if let Some(problem) = other(&Tensor::cat(&parts, 1)?, &expected, 3e-4) {
                return Ok(Some(format!("by {size}: {problem}")));
            }
        }
        Ok(None)
    });
}

#[test]
fn whole_texts_without_a_cache_give_the_same_logits() {
    check_all(|path| {
        let (tokens, expected) = reference_in(&reference_of(path));
        Ok(other(&load(path)?.forward_whole(&tokens)?, &expected, 3e-4))
    });
}

/// Texts with a cache run as step plans where a family has one, and those without it layer by layer.
#[test]
fn plans_compute_what_layers_compute() {
    check_all(|path| {
        let (tokens, _) = reference_in(&reference_of(path));
        let mut model = load(path)?;
        let layered = model.forward_whole(&tokens)?;
        Ok(other(&model.forward(&tokens, 0)?, &layered, 2e-5))
    });
}

#[test]
fn families_use_all_tensors_of_their_checkpoints() {
    check_all(|path| {
        let checkpoint = open(path)?;
        let mut unused = Config::from_checkpoint(&checkpoint)?.unused(&checkpoint);
        // Those for images.
        let towers = ["model.visual.", "multi_modal_projector.", "vision_model.", "vision_tower."];
        unused.retain(|name| !towers.iter().any(|tower| name.starts_with(tower)));
        Ok((!unused.is_empty()).then(|| format!("{unused:?}")))
    });
}

/// Llama 4 was published with a number where transformers has a flag.
#[test]
fn the_temperature_of_llama_4_is_a_number_or_a_flag() {
    let path = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/llama4_text/uqff");
    let config = open(&path).unwrap().config().clone();
    let read = |value: Value| {
        let mut config = config.clone();
        config["text_config"]["attn_temperature_tuning"] = value;
        Config::from_json(&config)
    };
    let grows = |value: Value| read(value).unwrap().query_growth.is_some();
    assert_eq!([json!(4), json!(true), json!(0), json!(false)].map(grows), [true, true, false, false]);
    let error = read(json!("4")).unwrap_err().to_string();
    assert!(error.contains("`attn_temperature_tuning`"), "{error}");
}

/// Those of a layer behind the last, as models that guess several tokens have it.
#[test]
fn tensors_that_a_model_does_not_use_are_told() {
    let path =
        Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/glm4_moe/mlx-affine4");
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut config = checkpoint.config().clone();
    config["num_hidden_layers"] = 1.into();
    let unused = Config::from_json(&config).unwrap().unused(&checkpoint);
    assert!(unused.iter().any(|name| name == "model.layers.1.mlp.switch_mlp.up_proj.weight"), "{unused:?}");
    assert!(unused.iter().all(|name| name.starts_with("model.layers.1.")), "{unused:?}");
}

/// What a model lists as its tensors is there, of these shapes, fused in the file or not.
#[test]
fn the_tensors_of_a_family_are_those_of_its_checkpoints() {
    check_all(|path| {
        let checkpoint = open(path)?;
        let config = Config::from_checkpoint(&checkpoint)?;
        let (expected, absent_layers) = config.inventory(checkpoint.tensor_names());
        assert_eq!(absent_layers, None);
        for (name, tensor) in expected.iter().filter(|(_, tensor)| tensor.required) {
            let found = checkpoint.tensor(name, tensor.dims.last().copied())?;
            if found.dims() != tensor.dims {
                return Ok(Some(format!("{name}: {:?} for {:?}", found.dims(), tensor.dims)));
            }
            let module = name.strip_suffix(".weight").unwrap_or(name);
            let k = config.in_features(module);
            let is_transposed = config.moe.as_ref().is_some_and(|moe| moe.transposed_parameters);
            let is_parameter = is_transposed && module.contains("experts.") && module == name;
            let is_matrix = tensor.dims.len() > 1 && !name.contains("norm") && !name.contains("correction");
            let is_matrix = is_matrix && !is_parameter;
            if is_matrix && k != tensor.dims.last().copied() {
                return Ok(Some(format!("{name}: K is {k:?}, not the last of {:?}", tensor.dims)));
            }
        }
        Ok(None)
    });
}

/// Whatever stands in a config, reading it is a config that holds together or an error.
#[test]
fn changed_configs_are_read_or_refused() {
    let others = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1),
        json!(3),
        json!(0.5),
        json!(1e300),
        json!(u64::MAX),
        json!(1 << 24),
        json!("x"),
        json!([]),
        json!([1, 0]),
        json!({}),
    ];
    check_all(|path| {
        let Ok(text) = std::fs::read_to_string(path.join("config.json")) else { return Ok(None) };
        let whole: Value = serde_json::from_str(&text).unwrap();
        for key in whole.as_object().unwrap().keys() {
            let inner: Vec<_> = whole[key].as_object().into_iter().flat_map(|object| object.keys()).collect();
            for other in &others {
                let changed = std::iter::once(None).chain(inner.iter().map(Some)).map(|within| {
                    let mut config = whole.clone();
                    match within {
                        None => config[key] = other.clone(),
                        Some(within) => config[key][within] = other.clone(),
                    }
                    config
                });
                for config in changed {
                    // Twice the head's size, or a size of nothing, would show here.
                    if let Ok(config) = Config::from_json(&config) {
                        config.validate()?;
                        config.inventory(["model.layers.0.x"].into_iter());
                    }
                }
            }
        }
        Ok(None)
    });
}
