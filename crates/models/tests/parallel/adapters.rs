//! Adapters over several ranks against the same model as one.

use crate::common::{bundled, distance, open};
use crate::packed::{bits, tensor};
use crate::ranks::{logits, written, RANKS, SPLITS};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{write_adapter, AdapterFile, AdapterFormat, LoraTensors};
use candle_quant::parallel::{run, ExpertSplit};
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::{Config, Model};
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::slice::from_ref;

/// The logits of all ranks with these adapters.
fn over(
    checkpoint: &Checkpoint,
    ranks: usize,
    how: ExpertSplit,
    tokens: &Tensor,
    adapters: &[AdapterFile],
) -> Vec<Tensor> {
    let (checkpoint, tokens, adapters) = (checkpoint.clone(), tokens.clone(), adapters.to_vec());
    let of_rank = run(&vec![Device::Cpu; ranks], move |rank| {
        let config = Config::from_json(checkpoint.config())?;
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32).split_experts(how);
        let mut model = Model::new(&config, vb)?;
        for (name, file) in adapters.iter().enumerate() {
            model.adapters().load(&name.to_string(), file)?;
        }
        logits(&mut model, &tokens)
    });
    of_rank.unwrap()
}

fn check(name: &str, checkpoint: &Checkpoint, tokens: &Tensor, adapters: &[AdapterFile]) {
    let without = &over(checkpoint, 1, SPLITS[0], tokens, &[])[0];
    let alone = &over(checkpoint, 1, SPLITS[0], tokens, adapters)[0];
    assert!(distance(alone, without).max > 0.05, "{name} changes something");
    let has_experts = Config::from_json(checkpoint.config()).unwrap().moe.is_some();
    let splits = if has_experts { &SPLITS[..] } else { &SPLITS[..1] };
    for (ranks, how) in RANKS.into_iter().flat_map(|ranks| splits.iter().map(move |how| (ranks, *how))) {
        let of_ranks = over(checkpoint, ranks, how, tokens, adapters);
        assert!(of_ranks.iter().all(|logits| bits(logits) == bits(&of_ranks[0])), "{name}: ranks differ");
        let distance = distance(&of_ranks[0], alone);
        assert!(
            distance.max <= 3e-4 && distance.other_argmax == 0,
            "{name} over {ranks} {how}: {distance:?}"
        );
    }
}

/// An adapter of all linear layers of a model but its experts, DoRA or not.
fn of_all(checkpoint: &Checkpoint, dir: &Path, is_dora: bool) -> AdapterFile {
    let model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    let mut loras = BTreeMap::new();
    for (seed, slot) in (1..).zip(model.adapters().slots()) {
        let dims = slot.dims();
        let (n, k) = (dims[dims.len() - 2], dims[dims.len() - 1]);
        let random = |dims: &[usize], seed| (tensor(dims, seed) * 0.1).unwrap();
        let stack = &dims[..dims.len() - 2];
        if is_dora && !stack.is_empty() {
            continue;
        }
        let magnitude = is_dora.then(|| {
            let norms = slot.row_norms().unwrap();
            (&norms * (random(&[n], seed + 2000) + 1.).unwrap()).unwrap()
        });
        let (a, b) =
            (random(&[stack, &[3, k]].concat(), seed), random(&[stack, &[n, 3]].concat(), seed + 1000));
        loras.insert(slot.module().to_owned(), LoraTensors { a, b, magnitude, scale: 0.5 });
    }
    write_adapter(dir, AdapterFormat::MlxLm, &loras).unwrap();
    AdapterFile::open(dir).unwrap()
}

/// With heads that ranks share, groups that they share, biases of linear layers, and a head that is tied or not.
#[test]
fn logits_are_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let names =
        ["qwen3-affine-b4-g64", "qwen3-affine-b8-g128", "llama-untied-mxfp4", "llama-untied-bias-b4-g64-f16"];
    let fixtures = names.map(|name| (name, open(name)));
    let tokens = Tensor::new(&[[3i64, 14, 15, 92, 65, 35, 89, 79]], &Device::Cpu).unwrap();
    for (name, checkpoint) in fixtures.into_iter().chain([("tiny", bundled("tiny"))]) {
        let lora = of_all(&checkpoint, &dir.path().join("lora"), false);
        let dora = of_all(&checkpoint, &dir.path().join("dora"), true);
        check(&format!("{name}, LoRA"), &checkpoint, &tokens, from_ref(&lora));
        check(&format!("{name}, both"), &checkpoint, &tokens, &[lora, dora]);
    }
}

/// Inside each and across them, in layouts of one stack and of single experts.
#[test]
fn experts_are_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tensor::new(&[[3i64, 14, 15, 92, 65, 35, 89, 79]], &Device::Cpu).unwrap();
    for name in ["qwen3moe-affine-b4-g64", "gptoss-mxfp4-mlxlm", "gptoss-mxfp4-hf"] {
        let checkpoint = open(name);
        let lora = of_all(&checkpoint, &dir.path().join(name), false);
        check(name, &checkpoint, &tokens, &[lora]);
    }

    let name = "qwen3moe-affine-b4-g64";
    let of_stacks = of_all(&open(name), &dir.path().join("stacks"), false);
    let path = crate::common::fixture(name).join("model.safetensors");
    let mut tensors = HashMap::new();
    for (name, tensor) in candle_core::safetensors::load(path, &Device::Cpu).unwrap() {
        match name.split_once(".switch_mlp.") {
            Some((block, rest)) => {
                for expert in 0..tensor.dim(0).unwrap() {
                    let name = format!("{block}.experts.{expert}.{rest}");
                    tensors.insert(name, tensor.get(expert).unwrap().contiguous().unwrap());
                }
            }
            None => drop(tensors.insert(name, tensor)),
        }
    }
    let mut config = open(name).config().clone();
    config.as_object_mut().unwrap().remove("quantization_config");
    for layer in 0..2 {
        config["quantization"][format!("model.layers.{layer}.mlp.gate")] =
            json!({"group_size": 64, "bits": 8});
    }
    let (_dir, single) = written(&tensors, &config);
    check("single experts", &single, &tokens, from_ref(&of_stacks));
    // The file has stacks, as mlx-lm names them, whatever the names of the checkpoint are.
    let [a, b] = [open(name), single]
        .map(|checkpoint| over(&checkpoint, 1, SPLITS[0], &tokens, from_ref(&of_stacks)).remove(0));
    assert!(distance(&a, &b).max <= 1e-5);
}
