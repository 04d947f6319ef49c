//! What is not answered for, and what the errors say.

use crate::checkpoint::{folder, rejected, Tensor};
use candle_core::Device;
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::Result;
use serde_json::{json, Value};

const FILE: &str = "model.safetensors";

/// The weight of a module of a checkpoint of these tensors, and its bias.
fn ask(config: &Value, tensors: &[Tensor], module: &str) -> (Result<Weight>, Result<Weight>) {
    let dir = folder(config, tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let bias = checkpoint.dense(&format!("{module}.bias")).map(Weight::Dense);
    (checkpoint.weight(module, None), bias)
}

/// That neither weight nor bias are there.
#[track_caller]
fn missing(config: &Value, tensors: &[Tensor], module: &str) {
    let (weight, bias) = ask(config, tensors, module);
    rejected(weight, &[&format!("`{module}.weight`: expected a tensor of this name, found none")]);
    rejected(bias, &[&format!("`{module}.bias`: expected a tensor of this name, found none")]);
}

#[test]
fn experts_are_those_of_the_stack() {
    let tensors: [Tensor; 2] =
        [("b.switch_mlp.up_proj.weight", "BF16", &[4, 8, 6]), ("b.switch_mlp.up_proj.bias", "BF16", &[4, 8])];
    for name in ["up_proj", "w3"] {
        let (weight, bias) = ask(&json!({}), &tensors, &format!("b.experts.3.{name}"));
        assert_eq!((weight.unwrap().dims(), bias.unwrap().dims()), (&[8, 6][..], &[8][..]));
        for expert in ["4", "18446744073709551615"] {
            let (weight, bias) = ask(&json!({}), &tensors, &format!("b.experts.{expert}.{name}"));
            for (result, part) in [(weight, "weight"), (bias, "bias")] {
                let tensor = format!("`b.experts.{expert}.{name}.{part}`");
                let expected = "expected an expert below 4, as `b.switch_mlp.up_proj` has";
                rejected(
                    result,
                    &[FILE, &tensor, expected, &format!("found {expert}; check that config.json")],
                );
            }
        }
    }
    for module in
        ["b.experts.0.down_proj", "b.experts.up_proj.3", "b.experts.03.up_proj", "experts.0.up_proj"]
    {
        missing(&json!({}), &tensors, module);
    }
    let (weight, _) =
        ask(&json!({}), &[("b.experts.up_proj.weight", "BF16", &[8, 6])], "b.experts.0.up_proj");
    rejected(
        weight,
        &[FILE, "`b.experts.0.up_proj.weight`", "a stack of experts, of 3 dimensions", "[8, 6]"],
    );
}

#[test]
fn stacks_need_every_expert() {
    let one = |name| -> Tensor { (name, "BF16", &[8, 6]) };
    let names = ["b.experts.0.w1.weight", "b.experts.1.w1.weight", "b.experts.3.w1.weight"];
    let (weight, _) = ask(&json!({}), &names.map(one), "b.switch_mlp.gate_proj");
    rejected(
        weight,
        &["`b.experts.2.gate_proj.weight`: expected a tensor of this name, as of expert 3, found none"],
    );
    // The last one is known by its other projections.
    let names = ["b.experts.0.w1.weight", "b.experts.0.w2.weight", "b.experts.1.w2.weight"];
    let (weight, bias) = ask(&json!({}), &names.map(one), "b.switch_mlp.gate_proj");
    rejected(weight, &["`b.experts.1.gate_proj.weight`", "as of expert 1"]);
    rejected(bias, &["`b.switch_mlp.gate_proj.bias`: expected a tensor of this name, found none"]);
    let many = [one("b.experts.0.w1.weight"), one("b.experts.18446744073709551615.w1.weight")];
    let (weight, _) = ask(&json!({}), &many, "b.experts.gate_proj");
    rejected(weight, &["`b.experts.1.gate_proj.weight`", "as of expert 18446744073709551615"]);
    let shapes: [Tensor; 2] =
        [("b.experts.0.w1.weight", "BF16", &[8, 6]), ("b.experts.1.w1.weight", "BF16", &[7, 6])];
    let (weight, _) = ask(&json!({}), &shapes, "b.experts.gate_proj");
    let first = "as `b.experts.0.w1` of BF16 [8, 6], found `b.experts.1.w1` of BF16 [7, 6]";
    rejected(weight, &[FILE, "`b.experts.gate_proj.weight`", "one format and shape", first]);
}

#[test]
fn parts_have_one_format() {
    let bits = |bits| json!({"bits": bits, "group_size": 64});
    let config =
        json!({"quantization": {"bits": 4, "group_size": 64, "b.v_proj": bits(8), "b.up_proj": bits(8)}});
    let four = |module: &str| {
        [("weight", "U32", [8usize, 16]), ("scales", "BF16", [8, 2]), ("biases", "BF16", [8, 2])]
            .map(|(part, dtype, dims)| (format!("{module}.{part}"), dtype, dims))
    };
    let eight = |module: &str| {
        four(module).map(|(name, dtype, dims)| {
            let words = if dtype == "U32" { 32 } else { dims[1] };
            (name, dtype, [8, words])
        })
    };
    let all =
        [four("b.q_proj"), four("b.k_proj"), eight("b.v_proj"), four("b.gate_proj"), eight("b.up_proj")];
    let all: Vec<_> = all.iter().flatten().map(|(name, dtype, dims)| (&**name, *dtype, &dims[..])).collect();
    for (module, first, other) in
        [("b.qkv_proj", "b.q_proj", "b.v_proj"), ("b.gate_up_proj", "b.gate_proj", "b.up_proj")]
    {
        let first = format!("as `{first}` of affine 4-bit g64 [8, 128]");
        let other =
            format!("found `{other}` of affine 8-bit g64 [8, 128]; ask for the parts by their own names");
        let weight = ask(&config, &all, module).0;
        rejected(weight, &[FILE, &format!("`{module}.weight`"), &first, &other]);
    }
}

/// K, as the model knows it, decides the format of what a view is made of.
#[test]
fn in_features_decide_the_format() {
    let part = |name, dtype, k| -> Tensor { (name, dtype, if k == 16 { &[2, 8, 16] } else { &[2, 8, 4] }) };
    let stack = [
        part("b.switch_mlp.up_proj.weight", "U32", 16),
        part("b.switch_mlp.up_proj.scales", "BF16", 4),
        part("b.switch_mlp.up_proj.biases", "BF16", 4),
    ];
    let dir = folder(&json!({}), &stack);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for (k, format) in [(128, "affine 4-bit g32"), (256, "affine 2-bit g64")] {
        let weight = checkpoint.weight("b.experts.1.w3", Some(k)).unwrap();
        assert_eq!((weight.format_name().as_str(), weight.dims()), (format, &[8, k][..]));
    }
    rejected(checkpoint.weight("b.experts.1.w3", None), &[FILE, "`b.switch_mlp.up_proj"]);
}

/// Formats that differ in what only loading tells: the dtype of scales.
#[test]
fn parts_have_one_dtype_of_scales() {
    let part = |dtype: &'static str, name| {
        [("weight", "U32", [8usize, 16]), ("scales", dtype, [8, 2]), ("biases", dtype, [8, 2])]
            .map(|(part, dtype, dims)| (format!("b.{name}.{part}"), dtype, dims))
    };
    let all = [part("BF16", "gate_proj"), part("F16", "up_proj")];
    let all: Vec<_> = all.iter().flatten().map(|(name, dtype, dims)| (&**name, *dtype, &dims[..])).collect();
    let dir = folder(&json!({"quantization": {"bits": 4, "group_size": 64}}), &all);
    let weight = Checkpoint::open(dir.path()).unwrap().weight("b.gate_up_proj", Some(128)).unwrap();
    rejected(
        weight.load(&Device::Cpu),
        &[FILE, "`b.gate_up_proj.weight`", "parts that make one weight", "quantize them alike"],
    );
}

#[test]
fn rows_of_fused_projections_add_up() {
    let qkv: [Tensor; 2] = [("b.qkv_proj.weight", "BF16", &[40, 6]), ("b.qkv_proj.bias", "BF16", &[40])];
    let heads = |kv: Value, dim: Value, hidden: Value| json!({"num_attention_heads": 3, "num_key_value_heads": kv, "head_dim": dim, "hidden_size": hidden});
    let dims = |config: &Value, name: &str| {
        let (weight, bias) = ask(config, &qkv, &format!("b.{name}"));
        let (weight, bias) = (weight.unwrap(), bias.unwrap());
        assert_eq!(weight.dims()[0], bias.dims()[0]);
        weight.dims()[0]
    };
    for config in [heads(1.into(), 8.into(), 6.into()), heads(1.into(), Value::Null, 24.into())] {
        for config in [config.clone(), json!({"text_config": config})] {
            assert_eq!(["q_proj", "k_proj", "v_proj"].map(|name| dims(&config, name)), [24, 8, 8]);
        }
    }
    for (config, expected) in [
        (
            heads(1.into(), 4.into(), 24.into()),
            "`b.qkv_proj` of 12 + 4 + 4, which the heads of the config make, rows",
        ),
        (heads(Value::Null, 8.into(), 24.into()), "of 24 + 24 + 24, which"),
        (heads(1.into(), Value::Null, 25.into()), "which it lacks, rows"),
        (heads(1.into(), Value::Null, Value::Null), "which it lacks, rows"),
        (heads(1.into(), u64::MAX.into(), Value::Null), "which it lacks, rows"),
        (json!({}), "`num_attention_heads` and `head_dim` of the config make, which it lacks, rows"),
    ] {
        for name in ["q_proj", "k_proj", "v_proj"] {
            let (weight, bias) = ask(&config, &qkv, &format!("b.{name}"));
            rejected(
                weight,
                &[FILE, &format!("`b.{name}.weight`"), expected, "found 40; check that config.json"],
            );
            rejected(bias, &[FILE, &format!("`b.{name}.bias`"), expected]);
        }
    }
    let odd: [Tensor; 2] =
        [("b.gate_up_proj.weight", "BF16", &[7, 6]), ("b.gate_up_proj.bias", "BF16", &[7])];
    for name in ["gate_proj", "up_proj"] {
        let (weight, bias) = ask(&json!({}), &odd, &format!("b.{name}"));
        let expected = "expected `b.gate_up_proj` of an even number of rows, found 7";
        rejected(weight, &[FILE, &format!("`b.{name}.weight`"), expected]);
        rejected(bias, &[FILE, &format!("`b.{name}.bias`"), expected]);
    }
}

/// Rows that alternate are not taken for halves.
#[test]
fn rows_in_another_order_are_refused() {
    let gpt_oss = json!({"model_type": "gpt_oss", "hidden_size": 6});
    for fused in ["b.experts.gate_up_proj.weight", "b.experts.gate_up_proj"] {
        let tensors: [Tensor; 1] = [(fused, "BF16", &[2, 8, 6])];
        for module in ["b.experts.1.gate_proj", "b.experts.up_proj", "b.switch_mlp.gate_proj"] {
            for config in [&gpt_oss, &json!({"text_config": &gpt_oss})] {
                let weight = ask(config, &tensors, module).0;
                rejected(weight, &[FILE, &format!("`{module}.weight`"), "gpt_oss, whose rows alternate"]);
            }
        }
    }
    let parts: [Tensor; 2] = [
        ("b.experts.gate_proj.weight", "BF16", &[2, 4, 6]),
        ("b.experts.up_proj.weight", "BF16", &[2, 4, 6]),
    ];
    rejected(ask(&gpt_oss, &parts, "b.experts.gate_up_proj").0, &[FILE, "gpt_oss, whose rows alternate"]);
    assert_eq!(ask(&gpt_oss, &parts, "b.experts.1.up_proj").0.unwrap().dims(), [4, 6]);
    for model in ["hunyuan", "hunyuan_v1_moe", "codegen"] {
        let config =
            json!({"model_type": model, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8});
        let qkv: [Tensor; 1] = [("b.qkv_proj.weight", "BF16", &[40, 6])];
        rejected(ask(&config, &qkv, "b.k_proj").0, &[FILE, "`b.k_proj.weight`", model, "rows alternate"]);
    }
    // The config counts the heads of the text.
    let config = json!({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8});
    let qkv: [Tensor; 1] = [("vision_tower.b.qkv_proj.weight", "BF16", &[40, 6])];
    missing(&config, &qkv, "vision_tower.b.k_proj");
}

/// Stacks of dense parameters have rows for columns in some models.
#[test]
fn parameters_have_rows_that_are_certain() {
    let config = json!({"hidden_size": 6});
    let ask = |dims: &[usize], stored, module| ask(&config, &[(stored, "BF16", dims)], module).0;
    let gate_up = "b.experts.gate_up_proj";
    assert_eq!(ask(&[2, 8, 6], gate_up, "b.experts.1.up_proj").unwrap().dims(), [4, 6]);
    assert_eq!(ask(&[2, 6, 4], "b.experts.down_proj", "b.experts.1.w2").unwrap().dims(), [6, 4]);
    for (stored, module, dims) in [
        (gate_up, "b.experts.1.up_proj", &[2, 6, 8][..]),
        (gate_up, "b.experts.1.up_proj", &[2, 6, 6]),
        (gate_up, "b.experts.up_proj", &[8, 6]),
        ("b.experts.down_proj", "b.experts.1.down_proj", &[2, 4, 6]),
        ("b.experts.down_proj", "b.experts.1.down_proj", &[2, 6, 6]),
        ("b.experts.down_proj", "b.switch_mlp.down_proj", &[2, 4, 6]),
    ] {
        rejected(
            ask(dims, stored, module),
            &[FILE, &format!("`{stored}`"), "rows are certain", &format!("{dims:?}")],
        );
    }
    let words: [Tensor; 1] = [(gate_up, "U32", &[2, 8, 6])];
    rejected(
        crate::rules::ask(&config, &words, "b.experts.1.up_proj").0,
        &[FILE, "of floats", "found U32 [2, 8, 6]"],
    );
}

/// What is stored is what its name says, whatever else there is.
#[test]
fn stored_names_come_first() {
    let tensors: [Tensor; 3] = [
        ("b.q_proj.weight", "BF16", &[5, 6]),
        ("b.qkv_proj.weight", "BF16", &[40, 6]),
        ("b.experts.0.w1.weight", "BF16", &[5, 6]),
    ];
    assert_eq!(ask(&json!({}), &tensors, "b.q_proj").0.unwrap().dims(), [5, 6]);
    assert_eq!(ask(&json!({}), &tensors, "b.qkv_proj").0.unwrap().dims(), [40, 6]);
    let dir = folder(&json!({}), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.tensor_names().eq(["b.experts.0.w1.weight", "b.q_proj.weight", "b.qkv_proj.weight"]));
    assert!(!checkpoint.contains("b.experts.0.gate_proj.weight"));
}
