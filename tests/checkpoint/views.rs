//! What answers for a name that is not stored has the bits of the stored tensors, reads nothing else, and is cut
//! as they are.

use crate::slices::{bits, check, checkpoints, manifests};
use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{module_of, reads, tensor_of, Checkpoint, Weight};
use candle_quant::VarBuilder;
use serde_json::{json, Value};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MOE: &str = "qwen3moe-affine-b4-g64";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/mlx").join(name)
}

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(fixture(name)).unwrap()
}

/// The tensors of a fixture, under other names or joined.
fn tensors_of(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture(name).join("model.safetensors"), &Device::Cpu).unwrap()
}

fn written(tensors: &HashMap<String, Tensor>, config: &Value) -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(tensors, dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

fn k_of(weight: &Weight) -> Option<usize> {
    weight.dims().last().copied()
}

/// The weight of a module that is not stored; nothing is read for it.
fn view(checkpoint: &Checkpoint, module: &str, k: Option<usize>) -> Weight {
    assert!(!checkpoint.contains(&tensor_of(module, "weight")), "{module} is stored");
    reads::take();
    let view = checkpoint.weight(module, k).unwrap();
    let count: usize = reads::take().iter().map(|(_, range)| range.len()).sum();
    assert_eq!(count, 0, "{module}: read before it was asked for");
    assert_eq!(bits(&checkpoint.tensor(&tensor_of(module, "weight"), k).unwrap(), None), bits(&view, None));
    view
}

/// That a view has the shape, format and bits of a stored weight, reads as many bytes, and is cut as that is.
fn same(name: &str, view: &Weight, stored: &Weight) {
    assert_eq!(view.dims(), stored.dims(), "{name}");
    assert_eq!(view.format_name(), stored.format_name(), "{name}");
    assert_eq!(view.granularity(), stored.granularity(), "{name}");
    assert!(bits(view, None) == bits(stored, None), "{name}: bits");
    check(name, view);
}

/// Stacks of experts of a checkpoint, with their biases.
fn stacks(checkpoint: &Checkpoint) -> Vec<(String, String, Weight)> {
    let mut stacks = Vec::new();
    for name in checkpoint.tensor_names() {
        let module = module_of(name).unwrap_or(name);
        for group in ["switch_mlp", "experts"] {
            if let Some((block, projection)) = module.split_once(&format!(".{group}.")) {
                if !projection.contains('.') {
                    let weight = checkpoint.weight(module, None).unwrap();
                    stacks.push((block.to_owned(), projection.to_owned(), weight));
                }
            }
        }
    }
    stacks
}

fn names_of_expert(block: &str, projection: &str, expert: usize) -> [String; 2] {
    let of_mixtral = match projection {
        "gate_proj" => "w1",
        "up_proj" => "w3",
        "down_proj" => "w2",
        other => panic!("{other}"),
    };
    [projection, of_mixtral].map(|name| format!("{block}.experts.{expert}.{name}"))
}

/// Of every fixture with stacks: those of MLX, of Ollama and of UQFF, and gpt-oss with alternating rows.
#[test]
fn one_expert_of_a_stack() {
    let mut all: Vec<_> = ["mlx", "uqff"].into_iter().flat_map(checkpoints).collect();
    let store = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/ollama/current/manifests");
    all.extend(
        manifests(&store).into_iter().filter_map(|path| Some((path.clone(), Checkpoint::open(path).ok()?))),
    );
    let mut count = HashMap::new();
    for (path, checkpoint) in all {
        for (block, projection, stack) in stacks(&checkpoint) {
            *count.entry(path.clone()).or_insert(0) += 1;
            let experts = stack.dims()[0];
            for expert in [0, 1, experts - 1] {
                let whole = stack.narrow(0, expert..expert + 1).unwrap();
                for name in names_of_expert(&block, &projection, expert) {
                    let one = view(&checkpoint, &name, k_of(&stack));
                    assert_eq!(one.dims(), &stack.dims()[1..], "{name}");
                    assert_eq!(one.format_name(), stack.format_name(), "{name}");
                    reads::take();
                    let of_one = bits(&one, None);
                    let read: usize = reads::take().iter().map(|(_, range)| range.len()).sum();
                    assert!(read <= whole.size_in_bytes(), "{name}: {read} of {}", stack.size_in_bytes());
                    assert!(of_one == bits(&stack, Some((0, expert..expert + 1))), "{name}");
                    check(&name, &one);
                }
            }
            let bias = format!("{block}.switch_mlp.{projection}.bias").replace("switch_mlp", "experts");
            if checkpoint.contains(&bias) {
                let stack = checkpoint.dense(&bias).unwrap().load(DType::F32, &Device::Cpu).unwrap();
                for expert in 0..experts {
                    for name in names_of_expert(&block, &projection, expert) {
                        let one = checkpoint.dense(&tensor_of(&name, "bias")).unwrap();
                        let one = one.load(DType::F32, &Device::Cpu).unwrap();
                        assert_eq!(one.dims(), &stack.dims()[1..]);
                        let values = |tensor: &Tensor| tensor.to_vec1::<f32>().unwrap();
                        assert_eq!(values(&one), values(&stack.get(expert).unwrap()), "{name}");
                    }
                }
                *count.entry(path.join("bias")).or_insert(0) += 1;
            }
        }
    }
    let mut count: Vec<_> = count.into_iter().collect();
    count.sort();
    let of_mlx = |name: &str, count| (fixture(name), count);
    for expected in [
        of_mlx(MOE, 6),
        of_mlx("qwen3moe-nvfp4-global_scale", 6),
        of_mlx("gptoss-mxfp4-mlxlm", 6),
        of_mlx("gptoss-mxfp4-mlxlm/bias", 6),
        of_mlx("gptoss-mxfp4-hf", 6),
        of_mlx("gptoss-mxfp4-hf/bias", 6),
    ] {
        assert!(count.contains(&expected), "{expected:?} in {count:#?}");
    }
    assert!(count.iter().any(|(path, _)| path.ends_with("moe_afq4")), "{count:#?}");
    assert!(count.iter().any(|(path, _)| path.to_string_lossy().contains("ollama")), "{count:#?}");
}

/// A fixture whose stacks are taken apart, under our names or Mixtral's.
fn taken_apart(name: &str, which: usize) -> HashMap<String, Tensor> {
    let mut tensors = HashMap::new();
    for (name, tensor) in tensors_of(name) {
        match name.split_once(".switch_mlp.").or_else(|| name.split_once(".mlp.experts.")) {
            None => drop(tensors.insert(name, tensor)),
            Some((block, rest)) => {
                let block = block.strip_suffix(".mlp").unwrap_or(block).to_owned() + ".mlp";
                let (projection, part) = rest.split_once('.').unwrap();
                for expert in 0..tensor.dim(0).unwrap() {
                    let module = &names_of_expert(&block, projection, expert)[which];
                    // The one number of MLX's global scale is that of the stack.
                    let one = if tensor.rank() == 1 { tensor.clone() } else { tensor.get(expert).unwrap() };
                    tensors.insert(format!("{module}.{part}"), one.contiguous().unwrap());
                }
            }
        }
    }
    tensors
}

/// A config that gives formats to all experts, whatever they are called.
fn config_of(name: &str) -> Value {
    open(name).config().clone()
}

#[test]
fn a_stack_of_experts() {
    for name in [MOE, "gptoss-mxfp4-mlxlm"] {
        for which in [0, 1] {
            let (_dir, apart) = written(&taken_apart(name, which), &config_of(name));
            let whole = open(name);
            for (block, projection, stack) in stacks(&whole) {
                for group in ["switch_mlp", "experts"] {
                    let module = format!("{block}.{group}.{projection}");
                    same(&module, &view(&apart, &module, k_of(&stack)), &stack);
                    let bias = tensor_of(&module, "bias");
                    if whole.contains(&format!("{block}.experts.{projection}.bias")) {
                        let both = [&whole, &apart].map(|checkpoint| {
                            let bias = Weight::Dense(checkpoint.dense(&bias).unwrap());
                            check(&module, &bias);
                            bits(&bias, None)
                        });
                        assert!(both[0] == both[1], "{bias}");
                    }
                }
                // And the other names of one expert.
                for expert in [0, 3] {
                    let name = &names_of_expert(&block, &projection, expert)[1 - which];
                    let one = view(&apart, name, k_of(&stack));
                    assert!(bits(&one, None) == bits(&stack, Some((0, expert..expert + 1))), "{name}");
                }
            }
        }
    }
}

/// Joins modules along the rows, which are dimension `dim` of weights, scales and biases.
fn join(tensors: &mut HashMap<String, Tensor>, dim: usize, parts: &[&str], path: &str, fused: &str) {
    let mut joined = Vec::new();
    for part in ["weight", "scales", "biases", "bias"] {
        let names: Vec<_> = parts.iter().map(|name| format!("{path}.{name}.{part}")).collect();
        if !tensors.contains_key(&names[0]) {
            continue;
        }
        let parts: Vec<_> = names.iter().map(|name| tensors.remove(name).unwrap()).collect();
        joined.push((format!("{path}.{fused}.{part}"), Tensor::cat(&parts, dim).unwrap()));
    }
    assert!(!joined.is_empty(), "{path}");
    tensors.extend(joined);
}

/// Gate and up of all experts in one stack, and of one expert in one weight.
#[test]
fn gate_and_up_of_experts() {
    let whole = open(MOE);
    let mut stacked = tensors_of(MOE);
    let mut apart = taken_apart(MOE, 0);
    for layer in 0..2 {
        let path = format!("model.layers.{layer}.mlp.switch_mlp");
        join(&mut stacked, 1, &["gate_proj", "up_proj"], &path, "gate_up_proj");
        for expert in 0..8 {
            let path = format!("model.layers.{layer}.mlp.experts.{expert}");
            join(&mut apart, 0, &["gate_proj", "up_proj"], &path, "gate_up_proj");
        }
    }
    let (_dirs, fused): (Vec<_>, Vec<_>) =
        [stacked, apart].iter().map(|tensors| written(tensors, whole.config())).unzip();
    for checkpoint in &fused {
        for (block, projection, stack) in stacks(&whole) {
            for group in ["switch_mlp", "experts"] {
                let module = format!("{block}.{group}.{projection}");
                if !checkpoint.contains(&tensor_of(&module, "weight")) {
                    same(&module, &view(checkpoint, &module, k_of(&stack)), &stack);
                }
            }
            for name in names_of_expert(&block, &projection, 5) {
                if checkpoint.contains(&tensor_of(&name, "weight")) {
                    continue;
                }
                let one = view(checkpoint, &name, k_of(&stack));
                assert!(bits(&one, None) == bits(&stack, Some((0, 5..6))), "{name}");
                reads::take();
                let half = one.load(&Device::Cpu).unwrap();
                let read: usize = reads::take().iter().map(|(_, range)| range.len()).sum();
                assert_eq!(read, half.size_in_bytes(), "{name}");
                check(&name, &one);
            }
        }
    }
    let [stacked, apart] = fused.as_slice() else { panic!() };
    let (_dir, single) = written(&taken_apart(MOE, 1), whole.config());
    let block = "model.layers.1.mlp";
    let stored = stacked.weight(&format!("{block}.switch_mlp.gate_up_proj"), Some(128)).unwrap();
    for checkpoint in [&whole, apart, &single] {
        let module = format!("{block}.experts.gate_up_proj");
        same(&module, &view(checkpoint, &module, Some(128)), &stored);
        let stored = apart.weight(&format!("{block}.experts.6.gate_up_proj"), Some(128)).unwrap();
        for checkpoint in [&whole, stacked, &single] {
            let one = view(checkpoint, &format!("{block}.experts.6.gate_up_proj"), Some(128));
            same(&module, &one, &stored);
        }
    }
}

#[test]
fn fused_projections_and_their_parts() {
    const QKV: [&str; 3] = ["q_proj", "k_proj", "v_proj"];
    const GATE_UP: [&str; 2] = ["gate_proj", "up_proj"];
    let mut biases = 0;
    for name in ["llama-untied-bias-b4-g64-f16", "qwen3-affine-b3-g64", "qwen3-mxfp8", "qwen3-nvfp4"] {
        let parts = open(name);
        let mut tensors = tensors_of(name);
        for layer in 0..2 {
            join(&mut tensors, 0, &QKV, &format!("model.layers.{layer}.self_attn"), "qkv_proj");
            join(&mut tensors, 0, &GATE_UP, &format!("model.layers.{layer}.mlp"), "gate_up_proj");
        }
        let (_dir, fused) = written(&tensors, parts.config());
        // The same config as that of a model with other parts than text.
        let within = json!({"text_config": parts.config(), "quantization": parts.config()["quantization"]});
        let (_dir, multimodal) = written(&tensors, &within);
        for (parent, names, whole) in [("self_attn", &QKV[..], "qkv_proj"), ("mlp", &GATE_UP, "gate_up_proj")]
        {
            let path = |name: &str| format!("model.layers.1.{parent}.{name}");
            let stored = fused.weight(&path(whole), Some(128)).unwrap();
            same(&path(whole), &view(&parts, &path(whole), Some(128)), &stored);
            for part in names {
                let stored = parts.weight(&path(part), Some(128)).unwrap();
                for checkpoint in [&fused, &multimodal] {
                    same(&path(part), &view(checkpoint, &path(part), Some(128)), &stored);
                }
            }
            if parts.contains(&tensor_of(&path(names[0]), "bias")) {
                biases += 1;
                for name in names.iter().chain([&whole]).map(|name| tensor_of(&path(name), "bias")) {
                    let [a, b] = [&parts, &fused].map(|checkpoint| {
                        let bias = Weight::Dense(checkpoint.dense(&name).unwrap());
                        check(&name, &bias);
                        bits(&bias, None)
                    });
                    assert!(a == b, "{name}");
                }
            }
        }
    }
    assert_eq!(biases, 2);
}

/// GGML blocks: in a file of one layer, stacks, single experts, and what is made of them.
#[test]
fn views_of_ggml_blocks() {
    let cpu = &Device::Cpu;
    let dense = |dims: &[usize]| Tensor::rand(-1f32, 1., dims, cpu).unwrap();
    for dtype in [GgmlDType::Q4K, GgmlDType::Q4_1, GgmlDType::Q8_0, GgmlDType::F16] {
        let block = |dims: &[usize]| QTensor::quantize(&dense(dims), dtype).unwrap();
        let stack = |n: usize, k: usize| block(&[3, n, k]);
        let stored = [
            ("a.experts.gate_proj.weight", stack(8, 512)),
            ("a.experts.up_proj.weight", stack(8, 512)),
            ("b.experts.gate_up_proj.weight", stack(16, 512)),
            ("c.experts.0.w2.weight", block(&[4, 512])),
            ("c.experts.1.w2.weight", block(&[4, 512])),
            ("d.q_proj.weight", block(&[8, 512])),
            ("d.k_proj.weight", block(&[4, 512])),
            ("d.v_proj.weight", block(&[4, 512])),
        ];
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let tensors: Vec<_> = stored.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let architecture = gguf_file::Value::String("other".into());
        let mut file = std::fs::File::create(&path).unwrap();
        gguf_file::write(&mut file, &[("general.architecture", &architecture)], &tensors).unwrap();
        drop(file);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let values: HashMap<_, _> =
            stored.iter().map(|(name, tensor)| (*name, tensor.dequantize(cpu).unwrap())).collect();
        let of = |name: &str| values[&*format!("{name}.weight")].clone();
        let cat =
            |names: &[&str], dim| Tensor::cat(&names.iter().map(|name| of(name)).collect::<Vec<_>>(), dim);
        for (name, expected) in [
            ("a.experts.2.gate_proj", of("a.experts.gate_proj").get(2)),
            ("a.experts.1.w3", of("a.experts.up_proj").get(1)),
            ("a.switch_mlp.gate_proj", Ok(of("a.experts.gate_proj"))),
            ("a.experts.gate_up_proj", cat(&["a.experts.gate_proj", "a.experts.up_proj"], 1)),
            ("a.experts.1.gate_up_proj", {
                cat(&["a.experts.gate_proj", "a.experts.up_proj"], 1).unwrap().get(1)
            }),
            ("b.experts.gate_proj", of("b.experts.gate_up_proj").narrow(1, 0, 8)),
            ("b.experts.2.up_proj", of("b.experts.gate_up_proj").get(2).unwrap().narrow(0, 8, 8)),
            ("c.switch_mlp.down_proj", { Tensor::stack(&[of("c.experts.0.w2"), of("c.experts.1.w2")], 0) }),
            ("d.qkv_proj", cat(&["d.q_proj", "d.k_proj", "d.v_proj"], 0)),
        ] {
            let (view, expected) = (view(&checkpoint, name, Some(512)), expected.unwrap());
            assert_eq!(view.dims(), expected.dims(), "{name}");
            let loaded = match &view {
                Weight::Ggml(blocks) => blocks.load(cpu).unwrap().dequantize(cpu).unwrap(),
                Weight::Dense(dense) => dense.load(DType::F32, cpu).unwrap(),
                other => panic!("{other:?}"),
            };
            let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(flat(&loaded) == flat(&expected), "{dtype:?} {name}");
            check(name, &view);
            if let (Weight::Ggml(blocks), [_, n, _]) = (&view, expected.dims()) {
                for (matrix, expert) in blocks.load_matrices(cpu).unwrap().iter().zip(0..) {
                    let expected = expected.get(expert).unwrap();
                    assert_eq!(matrix.shape().dims(), [*n, 512]);
                    assert!(flat(&matrix.dequantize(cpu).unwrap()) == flat(&expected), "{name} {expert}");
                }
            }
        }
    }
}

/// The embedding answers for the head if the config says so, and only then, with the prefixes of multimodal models.
#[test]
fn tied_heads() {
    let mut tensors = tensors_of("qwen3-affine-b4-g64");
    tensors.retain(|name, _| name.starts_with("model.embed_tokens."));
    let quantization = &open("qwen3-affine-b4-g64").config()["quantization"].clone();
    let config = |tied: Value| {
        let mut config = json!({"quantization": quantization, "hidden_size": 128});
        config.as_object_mut().unwrap().extend(tied.as_object().unwrap().clone());
        config
    };
    let tied = config(json!({"tie_word_embeddings": true}));
    for (embedding, head) in [
        ("model", "lm_head"),
        ("model.language_model", "lm_head"),
        ("language_model.model", "language_model.lm_head"),
        ("language_model.model", "lm_head"),
        ("", "lm_head"),
    ] {
        let renamed = |(name, tensor): (&String, &Tensor)| {
            let name = tensor_of(embedding, name.strip_prefix("model.").unwrap());
            (name, tensor.clone())
        };
        let (_dir, checkpoint) = written(&tensors.iter().map(renamed).collect(), &tied);
        let stored = checkpoint.weight(&tensor_of(embedding, "embed_tokens"), Some(128)).unwrap();
        same(head, &view(&checkpoint, head, Some(128)), &stored);
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        assert!(!vb.pp(head).contains_tensor("bias"));
    }
    for (says, tied) in [
        (json!({}), false),
        (json!({"tie_word_embeddings": false}), false),
        (json!({"tie_word_embeddings": null}), false),
        (json!({"tie_word_embeddings": "true"}), false),
        (json!({"text_config": {"tie_word_embeddings": true}}), true),
        (json!({"tie_word_embeddings": null, "text_config": {"tie_word_embeddings": true}}), true),
        (json!({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}), false),
    ] {
        let (_dir, checkpoint) = written(&tensors, &config(says.clone()));
        let head = checkpoint.weight("lm_head", Some(128));
        assert_eq!(head.is_ok(), tied, "{says}");
        if let Err(error) = head {
            let error = error.to_string();
            assert!(error.contains("`lm_head.weight`") && error.contains("a tensor of this name"), "{error}");
        }
    }
}
