//! `--to hf`: every family as transformers writes it, from every container.

use super::common::{content, convert, json_file, tensors, Source, Stored};
use super::families_of::{folders, open, reference_of};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::QuantTensor;
use candle_quant_models::{Config, Model};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Rule, RunOptions, Target};
use half::bf16;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

pub fn keep() -> Recipe {
    Recipe::safe("keep".parse().unwrap())
}

pub fn dense(dtype: Option<DType>) -> ConvertOptions {
    let mut options = ConvertOptions::hugging_face(keep());
    (options.dequantize, options.dtype) = (true, dtype);
    options
}

/// The text that is expected of a model, and its logits.
pub fn reference(folder: &Path) -> (Tensor, Vec<f32>) {
    let tensors = candle_core::safetensors::load(reference_of(folder), &Device::Cpu).unwrap();
    let tokens = tensors["tokens"].to_dtype(DType::U32).unwrap().unsqueeze(0).unwrap();
    (tokens, tensors["logits_f32"].flatten_all().unwrap().to_vec1().unwrap())
}

pub fn logits(checkpoint: &Checkpoint, tokens: &Tensor) -> Vec<f32> {
    let mut model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    model.forward(tokens, 0).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference, in standard deviations of what is expected.
pub fn distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let count = expected.len() as f64;
    let mean = expected.iter().copied().map(f64::from).sum::<f64>() / count;
    let variance = expected.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count;
    let differences = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    differences.fold(0., f64::max) / variance.sqrt()
}

fn shapes(tensors: &BTreeMap<String, Stored>) -> BTreeMap<&str, &[usize]> {
    tensors.iter().map(|(name, (_, shape, _))| (name.as_str(), shape.as_slice())).collect()
}

/// What mlx-lm drops of ERNIE's experts; a model without it chooses by its scores alone.
fn is_lost(folder: &str, name: &str) -> bool {
    folder.starts_with("ernie4_5_moe/mlx") && name.ends_with("moe_statics.e_score_correction_bias")
}

/// The families that mistral.rs does not have as models of text alone.
const LARGER: [&str; 5] =
    ["llama4_text", "llama4_text-dense", "ministral3", "qwen3_5_moe_text", "qwen3_5_text"];

/// transformers wrote the names that are expected, and peers the logits.
#[test]
fn every_family_becomes_what_transformers_writes_of_it() {
    let folders = folders();
    assert!(folders.len() >= 100);
    let mut compared = 0;
    for (name, folder) in folders {
        let source = open(&folder).unwrap_or_else(|error| panic!("{name}: {error}"));
        // mistral.rs has these with their vision towers.
        if LARGER.iter().any(|family| name == format!("{family}/uqff")) {
            let error = ConvertPlan::new(&source, &dense(None)).unwrap_err().to_string();
            assert!(error.contains("that the config's model of text does not use"), "{error}");
            continue;
        }
        let out = convert(&source, &dense(Some(DType::F32)));
        let written = Checkpoint::open(out.path()).unwrap();
        let (found, published) = (tensors(out.path()), tensors(folder.with_file_name("hf")));
        let mut expected = shapes(&published);
        expected.retain(|tensor, _| !["tokens", "logits_f32"].contains(tensor) && !is_lost(&name, tensor));
        let mut written_shapes = shapes(&found);
        // Other models: these tools know none without experts in each layer.
        let other =
            [("qwen3_next/uqff", ".1.mlp."), ("qwen3_next/gguf", ".1.mlp."), ("qwen3_moe/gguf", ".0.mlp.")];
        if let Some((_, layer)) = other.into_iter().find(|(other, _)| *other == name) {
            expected.retain(|tensor, _| !tensor.contains(layer));
            written_shapes.retain(|tensor, _| !tensor.contains(layer));
        }
        assert_eq!(written_shapes, expected, "{name}");
        assert!(found.values().all(|(dtype, ..)| dtype == "F32"), "{name}");
        let (tokens, expected) = reference(&folder);
        let (before, after) = (logits(&source, &tokens), logits(&written, &tokens));
        // Of packed weights products are rounded in another order.
        assert!(distance(&after, &before) < 3e-5, "{name}: {}", distance(&after, &before));
        let numbers = |checkpoint: &Checkpoint, tensor: &str, k: usize| {
            let weight = checkpoint.tensor(tensor, Some(k)).ok()?;
            let numbers = weight.to_dense(DType::F32, &Device::Cpu).unwrap();
            Some((weight.dims().to_vec(), numbers.flatten_all().unwrap().to_vec1::<f32>().unwrap()))
        };
        // Norms of which sums are stored, and experts whose columns may be rows in the source, are the logits' to compare.
        let is_compared = |tensor: &str| !tensor.contains("norm") && !tensor.ends_with("experts.down_proj");
        for (tensor, (_, shape, _)) in found.iter().filter(|(tensor, _)| is_compared(tensor)) {
            let k = *shape.last().unwrap();
            let Some(expected) = numbers(&source, tensor, k).filter(|(dims, _)| dims == shape) else {
                continue;
            };
            assert!(numbers(&written, tensor, k).unwrap() == expected, "{name}: {tensor}");
            compared += 1;
        }
        assert!(distance(&after, &expected) < 3e-4, "{name}: {}", distance(&after, &expected));
        let config = json_file(out.path().join("config.json"));
        let of = json_file(folder.with_file_name("hf").join("config.json"));
        // What GGUF files call llama may be one of several, which compute the same.
        let is_llama = ["internlm3/gguf", "mistral/gguf"].contains(&name.as_str());
        let keys = if is_llama { &[][..] } else { &["model_type", "architectures"] };
        for key in keys {
            assert_eq!(config[key], of[key], "{name}: {key}");
        }
        assert_eq!(config.get("dtype").or(config.get("torch_dtype")).unwrap(), "float32", "{name}");
        for key in ["quantization", "quantization_config", "text_config"] {
            assert!(config.get(key).is_none(), "{name}: {key}");
        }
        assert_eq!(Config::from_json(&config).unwrap(), Config::from_checkpoint(&written).unwrap(), "{name}");
    }
    assert!(compared > 2000, "{compared}");
}

/// Through MLX's layout and back.
#[test]
fn there_and_back_again() {
    for (name, folder) in folders().into_iter().filter(|(name, _)| name.ends_with("/hf")) {
        let source = open(&folder).unwrap();
        let mut mlx = ConvertOptions::mlx(keep());
        // Norms of which mlx-lm stores sums lose nothing.
        mlx.dtype = Some(DType::F32);
        let there = convert(&source, &mlx);
        let back = convert(&Checkpoint::open(there.path()).unwrap(), &dense(Some(DType::BF16)));
        let (found, mut expected) = (tensors(back.path()), tensors(&folder));
        expected.retain(|tensor, _| !["tokens", "logits_f32"].contains(&tensor.as_str()));
        // Published in F32.
        let corrections = |tensors: &mut BTreeMap<String, Stored>| {
            tensors.retain(|name, _| !name.ends_with("e_score_correction_bias"));
        };
        let mut found = found;
        assert_eq!(shapes(&found), shapes(&expected), "{name}");
        corrections(&mut found);
        corrections(&mut expected);
        // mlx-lm adds one in the source's dtype.
        let sums = |bytes: &[u8]| -> Vec<u8> {
            let of = |bytes: &[u8]| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            let number = |x: f32| bf16::from_f32(bf16::from_f32(x + 1.).to_f32() - 1.).to_le_bytes();
            bytes.chunks(2).flat_map(|bytes| number(of(bytes))).collect()
        };
        let adds = name.starts_with("qwen3_next") || name.starts_with("qwen3_5");
        for (tensor, (_, _, bytes)) in &found {
            let expected = &expected[tensor].2;
            let is_norm = adds && tensor.ends_with("norm.weight") && !tensor.contains("linear_attn");
            let equal = if is_norm { *bytes == sums(expected) } else { bytes == expected };
            assert!(equal, "{name}: {tensor}");
        }
    }
}

#[test]
fn a_published_model_stays_what_it_is() {
    for (name, folder) in folders().into_iter().filter(|(name, _)| name.ends_with("/hf")) {
        let out = convert(&open(&folder).unwrap(), &dense(None));
        let mut expected = tensors(&folder);
        expected.retain(|tensor, _| !["tokens", "logits_f32"].contains(&tensor.as_str()));
        assert!(tensors(out.path()) == expected, "{name}");
        let config = |path: &Path| json_file(path.join("config.json"));
        assert_eq!(config(&out.path()), config(&folder), "{name}");
    }
}

/// Floats with the codes and scales of this crate, integers by compressed-tensors' definition.
fn numbers_of(module: &str, stored: &BTreeMap<String, Stored>, numbers: &Tensor, format: &str) -> Vec<f32> {
    let part = |part: &str| stored.get(&format!("{module}.{part}")).unwrap();
    if !format.contains("g32") {
        let format = format.parse().unwrap();
        let quantized = QuantTensor::quantize(&numbers.to_dtype(DType::BF16).unwrap(), format).unwrap();
        return quantized.dequantize(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    }
    let bits: usize = format[..1].parse().unwrap();
    let ((n, k), per_word) = (numbers.dims2().unwrap(), 32 / bits);
    let ((_, dims, codes), (_, groups, scales)) = (part("weight_packed"), part("weight_scale"));
    assert_eq!((dims, groups), (&vec![n, k * bits / 32], &vec![n, k / 32]));
    assert_eq!(part("weight_shape").2, [n as u64, k as u64].map(u64::to_le_bytes).concat());
    let number = |at: usize| {
        let bytes = &codes[at / per_word * 4..][..4];
        let code =
            u32::from_le_bytes(bytes.try_into().unwrap()) >> (bits * (at % per_word)) & ((1 << bits) - 1);
        let scale = bf16::from_le_bytes([scales[at / 32 * 2], scales[at / 32 * 2 + 1]]);
        (code as f32 - (1 << (bits - 1)) as f32) * scale.to_f32()
    };
    (0..n * k).map(number).collect()
}

#[test]
fn packed_weights_are_read_back_as_they_were_quantized() {
    for family in ["llama", "phi3", "deepseek_v3", "mixtral", "llama4_text", "qwen3_next"] {
        let folder = Path::new(env!("CANDLE_QUANT_REPOSITORY"))
            .join("tests/fixtures/families")
            .join(family)
            .join("hf");
        let source = open(&folder).unwrap();
        for format in ["4:g32", "8:g32", "mxfp4", "mxfp8", "nvfp4"] {
            let case = format!("{family} {format}");
            let recipe = Target::HuggingFace.usual_recipe(format.parse().unwrap());
            let out = convert(&source, &ConvertOptions::hugging_face(recipe));
            let written = Checkpoint::open(out.path()).unwrap();
            assert_eq!(written.kind().to_string(), "Hugging Face compressed-tensors");
            assert!(family == "llama4_text" || written.tensor_names().eq(source.tensor_names()), "{case}");
            let (stored, mut count, mut squares) = (tensors(out.path()), 0, [0.; 2]);
            for name in written.tensor_names() {
                let weight = written.tensor(name, None).unwrap();
                let module = name.strip_suffix(".weight").unwrap_or(name);
                let dense = |weight: &Weight| weight.to_dense(DType::F32, &Device::Cpu).unwrap();
                let (found, numbers) = (dense(&weight), dense(&source.tensor(name, None).unwrap()));
                let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
                let is_packed = matches!(weight, Weight::Packed(_));
                let is_linear = name.ends_with("proj.weight") || name.contains(".experts.");
                assert!(is_packed || !is_linear, "{case}: {name}");
                if is_packed {
                    assert!(found == numbers_of(module, &stored, &numbers, format), "{case}: {name}");
                    count += 1;
                }
                let numbers: Vec<f32> = numbers.flatten_all().unwrap().to_vec1().unwrap();
                for (a, b) in found.iter().zip(&numbers) {
                    squares[0] += f64::from(a - b).powi(2);
                    squares[1] += f64::from(*b).powi(2);
                }
            }
            assert!(count >= 8, "{case}: {count}");
            let bound = if format.contains('8') { 0.04 } else { 0.15 };
            assert!((squares[0] / squares[1]).sqrt() < bound, "{case}: {squares:?}");
            let (tokens, _) = reference(&folder);
            let dequantized = convert(&written, &dense(Some(DType::F32)));
            let dequantized = Checkpoint::open(dequantized.path()).unwrap();
            let (packed, dense) = (logits(&written, &tokens), logits(&dequantized, &tokens));
            assert!(distance(&packed, &dense) < 3e-5, "{case}: {}", distance(&packed, &dense));
        }
    }
}

/// As llm-compressor's files say it, but for what says nothing.
#[test]
fn the_config_says_what_is_packed() {
    let folder = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/mixtral/hf");
    let mut recipe = Target::HuggingFace.usual_recipe("mxfp4".parse().unwrap());
    recipe = recipe.with_rules_first([Rule::tensors("*.q_proj", "8:g32".parse().unwrap()).unwrap()]);
    let out = convert(&open(&folder).unwrap(), &ConvertOptions::hugging_face(recipe));
    let config = &json_file(out.path().join("config.json"))["quantization_config"];
    assert_eq!(config["quant_method"], "compressed-tensors");
    assert_eq!(config["format"], "mixed-precision");
    assert_eq!(config["quantization_status"], "compressed");
    let groups = &config["config_groups"];
    assert_eq!(groups["group_0"]["format"], "mxfp4-pack-quantized");
    assert_eq!(groups["group_0"]["targets"], json!(["Linear"]));
    assert_eq!(groups["group_0"]["weights"]["scale_dtype"], "torch.uint8");
    assert_eq!(groups["group_1"]["format"], "pack-quantized");
    let queries: Vec<_> = (0..2).map(|layer| format!("model.layers.{layer}.self_attn.q_proj")).collect();
    assert_eq!(groups["group_1"]["targets"], json!(queries));
    let weights = &groups["group_1"]["weights"];
    for (key, value) in [
        ("num_bits", json!(8)),
        ("group_size", json!(32)),
        ("symmetric", json!(true)),
        ("type", json!("int")),
        ("strategy", json!("group")),
    ] {
        assert_eq!(weights[key], value);
    }
    let ignored =
        json!(["model.layers.0.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.gate", "lm_head"]);
    let mut found: Vec<String> = serde_json::from_value(config["ignore"].clone()).unwrap();
    found.sort_by_key(|module| module == "lm_head");
    assert_eq!(json!(found), ignored);
    let written = Checkpoint::open(out.path()).unwrap();
    let format = |name: &str| written.tensor(name, None).unwrap().format_name();
    assert_eq!(format("model.layers.0.self_attn.k_proj.weight"), "mxfp4");
    assert_eq!(format("model.layers.0.self_attn.q_proj.weight"), "symmetric 8-bit g32");
}

/// What fails leaves nothing that the next one stumbles over.
#[test]
fn a_conversion_that_fails_is_no_obstacle() {
    let folder = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/qwen3/hf");
    let source = open(&folder).unwrap();
    let plan = |format: &str| {
        let recipe = Target::HuggingFace.usual_recipe(format.parse().unwrap());
        ConvertPlan::new(&source, &ConvertOptions::hugging_face(recipe)).unwrap()
    };
    let target = tempfile::tempdir().unwrap();
    let out = target.path().join("out");
    let strict = RunOptions { max_relative_rms: Some(1e-9), ..RunOptions::default() };
    candle_quant_tools::convert::convert(&plan("4:g32"), &out, &strict, &|_| ()).unwrap_err();
    assert!(!out.exists());
    candle_quant_tools::convert::convert(&plan("mxfp8"), &out, &RunOptions::default(), &|_| ()).unwrap();
    let recipe = Target::HuggingFace.usual_recipe("mxfp8".parse().unwrap());
    let expected = convert(&source, &ConvertOptions::hugging_face(recipe));
    assert!(content(&out) == content(expected.path()));
    assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 1);
}

#[test]
fn formats_that_transformers_has_not_are_refused() {
    let folder = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families/llama/hf");
    let source = open(&folder).unwrap();
    for format in ["3:g32", "5:g32", "nf4", "mxint8"] {
        let options = ConvertOptions::hugging_face(Target::HuggingFace.usual_recipe(format.parse().unwrap()));
        let error = ConvertPlan::new(&source, &options).unwrap_err().to_string();
        assert!(
            error.contains("affine formats of 4 and 8 bits, mxfp4, mxfp8 and nvfp4"),
            "{format}: {error}"
        );
    }
    let recipe = Target::HuggingFace.usual_recipe("4:g32".parse().unwrap());
    let mut options = ConvertOptions::hugging_face(recipe);
    options.search = true;
    let error = ConvertPlan::new(&source, &options).unwrap_err().to_string();
    assert!(error.contains("--search"), "{error}");
    // A config that counts more experts than there can be names.
    let config = r#"{"model_type": "qwen3_moe", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 32,
        "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "num_experts": 1000000, "num_experts_per_tok": 1}"#;
    let many = Source::new().with_config(config).random("model.embed_tokens.weight", &[8, 32]).finish();
    let error = ConvertPlan::new(&many.open(), &dense(None)).unwrap_err().to_string();
    assert!(error.contains("experts: expected at most 65536"), "{error}");
    // A model of unknown parts.
    let unknown =
        Source::new().with_config(r#"{"model_type": "unheard_of"}"#).random("a.weight", &[4, 32]).finish();
    let error = ConvertPlan::new(&unknown.open(), &dense(None)).unwrap_err().to_string();
    assert!(error.contains("model type `unheard_of`") && error.contains("supported are"), "{error}");
}

/// Containers that say less of their models, or other things.
#[test]
fn other_containers_lead_back_as_well() {
    let fixtures = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures");
    let recipe = Target::Ollama.usual_recipe("mxfp4".parse().unwrap());
    let of_ollama = ConvertOptions::ollama(recipe, "m").unwrap();
    let store = convert(&open(&fixtures.join("families/qwen3_moe/hf")).unwrap(), &of_ollama);
    let manifest = store.path().join("manifests/registry.ollama.ai/library/m/latest");
    for name in [
        manifest.to_str().unwrap(),
        "uqff/moe_afq4",
        "uqff/q4k",
        "uqff/qwen2_afq4",
        "slm1/q4_0_gqa_b32.slm",
        "slm1/q4_0_tied.slm",
        "hf/awq-g64",
        "hf/bnb-nf4",
        "mlx/gptoss-mxfp4-hf",
        "mlx/gptoss-mxfp4-mlxlm",
    ] {
        let source = Checkpoint::open(fixtures.join(name)).unwrap();
        let out = convert(&source, &dense(Some(DType::F32)));
        let written = Checkpoint::open(out.path()).unwrap();
        assert_eq!(written.kind().to_string(), "dense safetensors", "{name}");
        let tokens = Tensor::new(&[[1u32, 5, 3, 9, 2, 7]], &Device::Cpu).unwrap();
        let (before, after) = (logits(&source, &tokens), logits(&written, &tokens));
        assert!(distance(&after, &before) < 3e-5, "{name}: {}", distance(&after, &before));
        let unused = Config::from_checkpoint(&written).unwrap().unused(&written);
        assert!(unused.is_empty(), "{name}: {unused:?}");
        let config = json_file(out.path().join("config.json"));
        assert!(config["architectures"][0].as_str().unwrap().ends_with("ForCausalLM"), "{name}");
        // What was one stack, or rows of one, is published as transformers has it.
        let names: Vec<_> = written.tensor_names().collect();
        assert!(!names.iter().any(|name| name.contains("switch_mlp")), "{name}: {names:?}");
    }
}

/// Of another model than the config says: without them it would be a third one.
#[test]
fn tensors_that_the_model_has_not_are_told() {
    let fixtures = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures");
    let model = "ollama/current/manifests/registry.ollama.ai/library/tiny-dense/int8";
    let source = Checkpoint::open(fixtures.join(model)).unwrap();
    let error = ConvertPlan::new(&source, &dense(None)).unwrap_err().to_string();
    for part in ["q_proj.bias", "1 tensor", "does not use", "--dequantize without --to"] {
        assert!(error.contains(part), "{error}");
    }
}
