//! Models with experts over several ranks, inside each expert and across them, against themselves as one.

use crate::common::{distance, fixture, open, reference};
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::{experts, ExpertsConfig, Gating};
use candle_quant::parallel::{parallel_experts, run, ExpertSplit};
use candle_quant::{QuantFormat, VarBuilder};
use candle_quant_models::sharding::{ShardPlan, Split};
use candle_quant_models::Config;
use serde_json::json;
use std::collections::HashMap;

use crate::packed::{bits, tensor};
use crate::ranks::{check, over, written, SPLITS};

const FIXTURES: [&str; 4] =
    ["gptoss-mxfp4-hf", "gptoss-mxfp4-mlxlm", "qwen3moe-affine-b4-g64", "qwen3moe-nvfp4-global_scale"];

#[test]
fn logits_are_those_of_one_rank() {
    for name in FIXTURES {
        check(name, &open(name), &reference(name).0);
    }
}

#[test]
fn half_precision_stays_as_close_over_more_ranks() {
    for name in ["qwen3moe-affine-b4-g64", "gptoss-mxfp4-hf"] {
        let (checkpoint, (tokens, expected)) = (open(name), reference(name));
        for how in SPLITS {
            let rms = |ranks| distance(&over(&checkpoint, ranks, how, &tokens, DType::F16)[0], &expected).rms;
            // One alone computes in f32, of weights, biases and a cache that are rounded.
            let (alone, two, four) = (rms(1), rms(2), rms(4));
            assert!(
                alone <= 5e-3 && two <= 5e-3 && four <= 1.5 * two,
                "{name} {how}: {alone}, {two}, {four}"
            );
        }
    }
}

fn tensors_of(name: &str) -> HashMap<String, Tensor> {
    let path = fixture(name).join("model.safetensors");
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

/// Weights of single experts, as Mixtral has them; and which rank has which.
#[test]
fn experts_of_mixtral() {
    const NAME: &str = "qwen3moe-affine-b4-g64";
    let mut tensors = HashMap::new();
    for (name, tensor) in tensors_of(NAME) {
        let name = name.replace(".mlp.", ".block_sparse_moe.");
        match name.split_once(".switch_mlp.") {
            Some((block, of_stack)) => {
                let (projection, part) = of_stack.split_once('.').unwrap();
                let of_one = match projection {
                    "gate_proj" => "w1",
                    "up_proj" => "w3",
                    _ => "w2",
                };
                for expert in 0..tensor.dim(0).unwrap() {
                    let name = format!("{block}.experts.{expert}.{of_one}.{part}");
                    tensors.insert(name, tensor.get(expert).unwrap().contiguous().unwrap());
                }
            }
            None if name.contains("q_norm") || name.contains("k_norm") => (),
            None => drop(tensors.insert(name, tensor)),
        }
    }
    let mut config = open(NAME).config().clone();
    config["model_type"] = "mixtral".into();
    config["intermediate_size"] = config["moe_intermediate_size"].clone();
    config["num_local_experts"] = config["num_experts"].clone();
    config["quantization"] = json!({"group_size": 64, "bits": 4});
    for layer in 0..2 {
        let router = format!("model.layers.{layer}.block_sparse_moe.gate");
        config["quantization"][router] = json!({"group_size": 64, "bits": 8});
    }
    config.as_object_mut().unwrap().remove("quantization_config");
    let (_dir, checkpoint) = written(&tensors, &config);
    check("mixtral", &checkpoint, &reference(NAME).0);

    let split = |how, name: &str| {
        let plan = ShardPlan::with_experts(&checkpoint, 3, how).unwrap();
        let name = format!("model.layers.0.block_sparse_moe.experts.{name}.weight");
        plan.tensors().iter().find(|tensor| tensor.name == name).unwrap().split.clone()
    };
    for (expert, rank) in [("0", 0), ("2", 0), ("3", 1), ("7", 2)] {
        assert_eq!(split(ExpertSplit::Across, &format!("{expert}.w2")), Split::One(rank));
    }
    assert_eq!(split(ExpertSplit::Inside, "5.w3"), Split::Rows(vec![0..43, 43..86, 86..128]));
}

/// Gate and up in one tensor: its rows are cut in two places.
#[test]
fn gate_and_up_in_one_stack() {
    const NAME: &str = "qwen3moe-affine-b4-g64";
    let mut tensors = tensors_of(NAME);
    for layer in 0..2 {
        let path = format!("model.layers.{layer}.mlp");
        for part in ["weight", "scales", "biases"] {
            let mut take = |name: &str| tensors.remove(&format!("{path}.switch_mlp.{name}.{part}")).unwrap();
            let both = Tensor::cat(&[take("gate_proj"), take("up_proj")], 1).unwrap();
            let down = take("down_proj");
            tensors.insert(format!("{path}.experts.gate_up_proj.{part}"), both);
            tensors.insert(format!("{path}.experts.down_proj.{part}"), down);
        }
    }
    let (_dir, checkpoint) = written(&tensors, open(NAME).config());
    let (tokens, expected) = reference(NAME);
    let to_mlx = distance(&check("gate_up_proj", &checkpoint, &tokens), &expected);
    assert!(to_mlx.max <= 3e-4, "{to_mlx:?}");

    let plan = ShardPlan::new(&checkpoint, 2).unwrap();
    plan.require_split().unwrap();
    let name = "model.layers.0.mlp.experts.gate_up_proj.weight";
    let gate_up = plan.tensors().iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!(gate_up.split, Split::Segments(vec![vec![0..64, 128..192], vec![64..128, 192..256]]));
    assert_eq!(gate_up.rank_bytes, [gate_up.stored_bytes / 2; 2]);
}

/// The inner size of gpt-oss: 90 groups of 32, which 4 ranks share unevenly.
#[test]
fn shares_of_90_groups() {
    const NAME: &str = "gptoss-mxfp4-mlxlm";
    let mut tensors = tensors_of(NAME);
    for layer in 0..2u64 {
        for (seed, (name, n, k)) in
            (10 * layer..).zip([("gate_proj", 2880, 128), ("up_proj", 2880, 128), ("down_proj", 128, 2880)])
        {
            let path = format!("model.layers.{layer}.mlp.experts.{name}");
            let dense = (tensor(&[4, n, k], seed) * 0.1).unwrap();
            let weight = candle_quant::QuantTensor::quantize(&dense, QuantFormat::MXFP4).unwrap();
            tensors.insert(format!("{path}.weight"), weight.packed().clone());
            tensors.insert(format!("{path}.scales"), weight.scales().clone());
            tensors.insert(format!("{path}.bias"), tensor(&[4, n], 100 + seed));
        }
    }
    let mut config = open(NAME).config().clone();
    config["intermediate_size"] = 2880.into();
    let (_dir, checkpoint) = written(&tensors, &config);
    let plan = ShardPlan::new(&checkpoint, 4).unwrap();
    let name = "model.layers.1.mlp.experts.down_proj.weight";
    let down = plan.tensors().iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!(down.split, Split::Columns(vec![0..736, 736..1472, 1472..2176, 2176..2880]));
    assert_eq!(down.replicated, None);
    check("K = 2880", &checkpoint, &reference(NAME).0);
}

/// With one expert for each token, the only terms of a sum are the output of that expert, computed by one rank, and
/// zeros: the bits are those of the whole block.
#[test]
fn whole_experts_compute_the_bits_of_the_whole_block() {
    for (name, module, bias) in [
        ("gptoss-mxfp4-hf", "model.layers.0.mlp", true),
        ("qwen3moe-nvfp4-global_scale", "model.layers.1.mlp", false),
    ] {
        let checkpoint = open(name);
        let moe = Config::from_json(checkpoint.config()).unwrap().moe.unwrap();
        let config = ExpertsConfig {
            experts: moe.experts,
            hidden_size: 128,
            intermediate_size: moe.intermediate_size,
            bias,
            gating: moe.gating,
        };
        for (batch, len) in [(5, 1), (1, 9)] {
            let x = tensor(&[batch, len, 128], 3);
            let ids: Vec<u32> = (0..(batch * len) as u32).map(|i| i * 3 % moe.experts as u32).collect();
            let ids = Tensor::from_vec(ids, (batch, len, 1), &Device::Cpu).unwrap();
            let routing_weights = (ids.ones_like().unwrap().to_dtype(DType::F32).unwrap() * 0.3).unwrap();
            let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
            let alone = experts(&config, vb.pp(module)).unwrap().forward(&x, &ids, &routing_weights).unwrap();
            for ranks in [2, 3, 4] {
                let checkpoint = checkpoint.clone();
                let (x, ids, routing_weights) = (x.clone(), ids.clone(), routing_weights.clone());
                let outputs = run(&vec![Device::Cpu; ranks], move |rank| {
                    let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32);
                    let vb = vb.split_experts(ExpertSplit::Across).pp(module);
                    Ok(parallel_experts(&config, vb)?.forward(&x, &ids, &routing_weights)?)
                });
                for output in outputs.unwrap() {
                    assert_eq!(bits(&output), bits(&alone), "{name} over {ranks}");
                }
            }
        }
    }
}

#[test]
fn wrong_input_is_refused_by_all_ranks() {
    let checkpoint = open("qwen3moe-affine-b4-g64");
    let config = ExpertsConfig {
        experts: 8,
        hidden_size: 128,
        intermediate_size: 128,
        bias: false,
        gating: Gating::Plain(candle_quant::Activation::Silu),
    };
    let errors = run(&[Device::Cpu, Device::Cpu], move |rank| {
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32).split_experts(ExpertSplit::Across);
        let experts = parallel_experts(&config, vb.pp("model.layers.0.mlp"))?;
        let x = tensor(&[1, 2, 128], 1);
        let told = |ids: &Tensor, routing_weights: &Tensor| {
            experts.forward(&x, ids, routing_weights).unwrap_err().to_string()
        };
        let routing_weights = Tensor::full(0.5f32, (1, 2, 2), &Device::Cpu)?;
        let of_none = told(&Tensor::new(&[[[0u32, 7], [8, 1]]], &Device::Cpu)?, &routing_weights);
        let of_fewer = told(&Tensor::new(&[[[0u32, 7]]], &Device::Cpu)?, &routing_weights);
        // And they go on.
        experts.forward(&x, &Tensor::new(&[[[0u32, 7], [0, 1]]], &Device::Cpu)?, &routing_weights)?;
        Ok([of_none, of_fewer])
    });
    for [of_none, of_fewer] in errors.unwrap() {
        assert!(of_none.contains("each below 8, the number of experts, found 8"), "{of_none}");
        assert!(of_fewer.contains("do not fit"), "{of_fewer}");
    }
}
