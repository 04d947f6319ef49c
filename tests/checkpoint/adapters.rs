//! Files of adapters: what is read of them, and what is refused, with what to do about it.

use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{AdapterFile, AdapterFormat, Budget, OpenOptions};
use serde_json::{json, Value};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/adapters").join(name)
}

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap()
}

type Tensors = HashMap<String, Tensor>;

fn peft() -> (Value, Tensors) {
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 8});
    let tensors = [("a.q.lora_A.weight", zeros(&[2, 8])), ("a.q.lora_B.weight", zeros(&[4, 2]))];
    let name = |name: &str| format!("base_model.model.{name}");
    (config, tensors.into_iter().map(|(end, tensor)| (name(end), tensor)).collect())
}

fn mlx() -> (Value, Tensors) {
    let config =
        json!({"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 3.0, "dropout": 0.1}});
    let tensors = [("a.q.lora_a", zeros(&[8, 2])), ("a.q.lora_b", zeros(&[2, 4]))];
    (config, tensors.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect())
}

fn written(config: &Value, tensors: &Tensors) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    let name = if config.get("peft_type").is_some() { "adapter_model" } else { "adapters" };
    candle_core::safetensors::save(tensors, dir.path().join(name).with_extension("safetensors")).unwrap();
    dir
}

fn opened(config: &Value, tensors: &Tensors) -> candle_quant::Result<AdapterFile> {
    AdapterFile::open(written(config, tensors).path())
}

#[track_caller]
fn refused(config: &Value, tensors: &Tensors, message: &str) {
    let error = opened(config, tensors).unwrap_err().to_string();
    assert!(error.contains(message), "{error}\nhas not: {message}");
}

#[test]
fn files_of_the_tools_are_read() {
    for (name, format, module, rank, scale, dims) in [
        ("peft-lora", AdapterFormat::Peft, "model.layers.1.mlp.down_proj", 2, 3., &[256, 512][..]),
        ("peft-rslora", AdapterFormat::Peft, "model.layers.0.self_attn.v_proj", 4, 1.5, &[128, 256]),
        ("peft-dora", AdapterFormat::Peft, "model.layers.1.self_attn.k_proj", 2, 2., &[128, 256]),
        ("peft-patterns", AdapterFormat::Peft, "model.layers.0.self_attn.q_proj", 1, 5., &[256, 256]),
        ("peft-patterns", AdapterFormat::Peft, "model.layers.0.self_attn.k_proj", 2, 1.25, &[128, 256]),
        ("peft-patterns", AdapterFormat::Peft, "model.layers.0.self_attn.v_proj", 3, 4. / 3., &[128, 256]),
        ("mlx-lora", AdapterFormat::MlxLm, "model.layers.2.mlp.up_proj", 2, 1.5, &[512, 256]),
        ("mlx-dora", AdapterFormat::MlxLm, "model.layers.2.self_attn.k_proj", 2, 2., &[128, 256]),
        (
            "mlx-experts",
            AdapterFormat::MlxLm,
            "model.layers.1.mlp.switch_mlp.down_proj",
            2,
            2.,
            &[8, 128, 128],
        ),
    ] {
        let file = AdapterFile::open(fixture(name)).unwrap();
        assert_eq!((file.format(), file.path()), (format, fixture(name).join(format.file_name()).as_path()));
        let lora = &file.loras()[module];
        assert_eq!((lora.rank(), lora.scale(), lora.dims()), (rank, scale, dims), "{name} {module}");
        assert_eq!(lora.is_dora(), name.ends_with("dora"));
        let loaded = lora.load(&Device::Cpu).unwrap();
        let (stack, [n, k]) = dims.split_last_chunk::<2>().unwrap();
        assert_eq!(loaded.a.dims(), [stack, &[rank, *k]].concat());
        assert_eq!(loaded.b.dims(), [stack, &[*n, rank]].concat());
        assert_eq!(loaded.magnitude.map(|m| m.dims().to_vec()), lora.is_dora().then(|| vec![*n]));
        assert_eq!(loaded.a.dtype(), DType::F32);
    }
    for format in [AdapterFormat::Peft, AdapterFormat::MlxLm] {
        assert_eq!(format.to_string().parse::<AdapterFormat>().unwrap(), format);
    }
}

#[test]
fn settings_that_would_change_numbers_are_refused() {
    let (config, tensors) = peft();
    opened(&config, &tensors).unwrap();
    for (key, value, message) in [
        ("peft_type", json!("IA3"), "`peft_type` is \"IA3\", which is not computed here; merge the adapter"),
        ("bias", json!("lora_only"), "`bias` is \"lora_only\": biases were trained"),
        ("lora_bias", json!(true), "`lora_bias` is true, which is not computed here"),
        ("modules_to_save", json!(["lm_head"]), "`modules_to_save` is [\"lm_head\"]"),
        ("layer_replication", json!([[0, 2], [1, 3]]), "`layer_replication` is"),
        ("trainable_token_indices", json!([1]), "`trainable_token_indices` is [1]"),
        ("alora_invocation_tokens", json!([1, 2]), "`alora_invocation_tokens` is"),
        ("target_parameters", json!(["experts.gate_up_proj"]), "`target_parameters` is"),
        ("use_qalora", json!(true), "`use_qalora` is true"),
        ("use_bdlora", json!({"nblocks": 2}), "`use_bdlora` is"),
        ("init_lora_weights", json!("pissa_niter_4"), "began with other weights of the model"),
        ("init_lora_weights", json!("olora"), "began with other weights of the model"),
        ("a_setting_of_tomorrow", json!(0.5), "`a_setting_of_tomorrow` is 0.5"),
        ("rank_pattern", json!({"(?=q)q": 2}), "`rank_pattern` has `(?=q)q`, which is not computed here"),
    ] {
        let mut config = config.clone();
        config[key] = value;
        refused(&config, &tensors, message);
    }
    // These change nothing.
    for (key, value) in [
        ("lora_dropout", json!(0.1)),
        ("fan_in_fan_out", json!(true)),
        ("target_modules", json!("all-linear")),
        ("modules_to_save", json!([])),
        ("layer_replication", json!(null)),
        ("init_lora_weights", json!("gaussian")),
        ("loftq_config", json!({})),
        ("qalora_group_size", json!(16)),
        ("a_setting_of_tomorrow", json!(false)),
    ] {
        let mut config = config.clone();
        config[key] = value;
        opened(&config, &tensors).unwrap();
    }
    let (mut config, tensors) = mlx();
    config["fine_tune_type"] = json!("full");
    refused(&config, &tensors, "`fine_tune_type` is \"full\", which is not computed here");
}

#[test]
fn malformed_configs_are_refused() {
    let (config, tensors) = peft();
    for (key, value, message) in [
        ("r", json!(0), "`r` is 0, expected a rank of 1 or more"),
        ("r", json!(1.5), "`r` is 1.5, expected a rank"),
        ("r", json!("2"), "`r` is \"2\", expected a rank"),
        ("r", Value::Null, "`r` is null, expected a rank"),
        ("lora_alpha", json!(null), "`lora_alpha` is null, expected a number"),
        ("use_dora", json!(1), "`use_dora` is 1, expected true or false"),
        ("rank_pattern", json!([1]), "an object of numbers by names of modules"),
        ("rank_pattern", json!({"q": "x"}), "malformed JSON"),
        ("rank_pattern", json!({"q": 0}), "`rank_pattern` has 0"),
    ] {
        let mut config = config.clone();
        config[key] = value;
        refused(&config, &tensors, message);
    }
    let (config, tensors) = mlx();
    for (parameters, message) in [
        (json!(null), "`lora_parameters` is null, expected an object"),
        (json!({"rank": 2, "alpha": 16}), "`scale` is missing, expected a number"),
        (json!({"rank": -1, "scale": 1}), "`rank` is -1, expected a rank"),
    ] {
        let mut config = config.clone();
        config["lora_parameters"] = parameters;
        refused(&config, &tensors, message);
    }
    refused(&json!({"fine_tune_type": null}), &tensors, "neither `peft_type` nor `lora_parameters` says");

    let dir = tempfile::tempdir().unwrap();
    let message = |dir: &Path| AdapterFile::open(dir).unwrap_err().to_string();
    assert!(message(dir.path()).contains("adapter_config.json: there is no such file; name the directory"));
    fs::write(dir.path().join("adapter_config.json"), r#"{"peft_type": "LORA", "r": 2"#).unwrap();
    assert!(message(dir.path()).contains("adapter_config.json: malformed JSON"));
    fs::write(dir.path().join("adapter_config.json"), r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4}"#)
        .unwrap();
    let told = message(dir.path());
    assert!(
        told.contains("adapter_model.safetensors: there is no such file") && told.contains("pickled"),
        "{told}"
    );
}

#[test]
fn tensors_that_contradict_the_config_or_each_other_are_refused() {
    let (config, tensors) = peft();
    let changed = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        tensors
    };
    let with = |name: &str, dims: &[usize]| {
        changed(&|tensors| drop(tensors.insert(format!("base_model.model.{name}"), zeros(dims))))
    };
    let without = |name: &str| changed(&|tensors| drop(tensors.remove(&format!("base_model.model.{name}"))));
    let (a, b) = ("a.q.lora_A.weight", "a.q.lora_B.weight");
    let told = "`base_model.model.a.q.lora_A.weight`: expected rank 2, as adapter_config.json says, found shape [3, 8]";
    refused(&config, &with(a, &[3, 8]), told);
    let told = "`base_model.model.a.q.lora_B.weight`: expected rank 2, as that of A, found shape [4, 3]";
    refused(&config, &with(b, &[4, 3]), told);
    refused(&config, &with(a, &[16]), "expected 2 dimensions, or 3 of a stack of experts, found shape [16]");
    refused(&config, &with(a, &[1, 2, 8]), "expected as many dimensions as A has, found shape [4, 2]");
    refused(&config, &without(a), "`a.q`: expected both A and B, found B alone");
    refused(&config, &without(b), "`a.q`: expected both A and B, found A alone");
    refused(&config, &HashMap::new(), "it has no tensors");
    refused(
        &config,
        &with("a.q.lora_A.mine.weight", &[2, 8]),
        "expected one tensor of its kind for a module",
    );
    for name in ["a.q.lora_B.bias", "e.lora_embedding_A", "lm_head.weight", "a.q.base_layer.weight"] {
        refused(&config, &with(name, &[4]), "expected `base_model.model.MODULE.lora_A.weight`");
    }
    refused(
        &config,
        &with("a.q.lora_magnitude_vector", &[4]),
        "expected no magnitudes: adapter_config.json says",
    );
    let mut dora = config.clone();
    dora["use_dora"] = json!(true);
    refused(
        &dora,
        &tensors,
        "`a.q`: expected magnitudes, as adapter_config.json says that it is DoRA, found none",
    );
    refused(&dora, &with("a.q.lora_magnitude_vector", &[5]), "expected [4], the rows of a weight");
    opened(&dora, &with("a.q.lora_magnitude_vector.weight", &[4])).unwrap();
    let integers = changed(&|tensors| {
        let integers = Tensor::zeros((2, 8), DType::I64, &Device::Cpu).unwrap();
        tensors.insert(format!("base_model.model.{a}"), integers);
    });
    refused(&config, &integers, "expected F16, BF16 or F32, found I64");

    let (config, tensors) = mlx();
    opened(&config, &tensors).unwrap();
    let with = |name: &str, dims: &[usize]| {
        let mut tensors = tensors.clone();
        tensors.insert(name.to_string(), zeros(dims));
        tensors
    };
    refused(
        &config,
        &with("a.q.lora_a", &[8, 3]),
        "`a.q.lora_a`: expected rank 2, as adapter_config.json says",
    );
    refused(&config, &with("a.q.m", &[4]), "expected `MODULE.lora_a`, `MODULE.lora_b`");
    refused(&config, &with("a.q.weight", &[4]), "expected `MODULE.lora_a`, `MODULE.lora_b`");
    refused(&config, &with("a.q.lora_a", &[3, 2, 8]), "expected as many dimensions as A has");
}

#[test]
fn damaged_files_and_large_ones_are_refused() {
    let (config, tensors) = peft();
    let dir = written(&config, &tensors);
    let path = dir.path().join("adapter_model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let few = OpenOptions { budget: Budget { bytes: 100, ..Default::default() }, ..Default::default() };
    let error = AdapterFile::open_with(dir.path(), few).unwrap_err().to_string();
    assert!(error.contains("the budget is 100"), "{error}");
    for len in [0, 4, 9, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..len]).unwrap();
        let error = AdapterFile::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("adapter_model.safetensors"), "{len}: {error}");
    }
}

/// Of several patterns the first that fits counts, as PEFT has it: names, ends of names, expressions.
#[test]
fn patterns_are_those_of_peft() {
    let (_, tensors) = peft();
    let scale = |patterns: &str| {
        let config =
            format!(r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "alpha_pattern": {patterns}}}"#);
        let dir = written(&json!({"peft_type": "LORA"}), &tensors);
        fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        AdapterFile::open(dir.path()).unwrap().loras()["a.q"].scale() * 2.
    };
    for (patterns, alpha) in [
        ("null", 8.),
        ("{}", 8.),
        (r#"{"q": 1}"#, 1.),
        (r#"{"a.q": 1}"#, 1.),
        (r#"{"a": 1, "b.q": 2, "x": 3}"#, 8.),
        (r#"{"z|q": 1, "q": 2}"#, 1.),
        (r#"{"q": 2, "z|q": 1}"#, 2.),
        (r#"{"^a\\.[pq]": 1}"#, 1.),
        (r#"{"^q": 1, "^.*q$": 4}"#, 4.),
        (r#"{"[a-z]": 1}"#, 1.),
    ] {
        assert_eq!(scale(patterns), alpha, "{patterns}");
    }
}
