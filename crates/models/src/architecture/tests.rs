//! Configs of the first seven families, and what is refused.

use super::*;
use crate::{Model, Rope, RopeScaling};
use candle_core::{DType, Device};
use serde_json::json;

fn base() -> Value {
    json!({"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2})
}

/// The window of a layer.
fn window(config: &Config, layer: usize) -> Option<usize> {
    config.sliding_window.filter(|_| config.slides(layer))
}

fn with(changes: Value) -> Result<Config> {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    Config::from_json(&config)
}

#[test]
fn the_families_differ_where_they_should() {
    let llama = with(json!({})).unwrap();
    assert_eq!((llama.head_dim, llama.qkv_bias, llama.qk_norm), (32, false, None));
    assert_eq!(window(&llama, 0), None);
    let mistral = with(json!({"model_type": "mistral"})).unwrap();
    assert_eq!(window(&mistral, 2), Some(4096));
    let mistral = with(json!({"model_type": "mistral", "sliding_window": null})).unwrap();
    assert_eq!(window(&mistral, 2), None);
    let qwen2 = with(json!({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": true,
        "max_window_layers": 1}))
    .unwrap();
    assert_eq!((qwen2.qkv_bias, qwen2.output_bias), (true, false));
    assert_eq!([0, 1, 2].map(|layer| window(&qwen2, layer)), [None, Some(8), Some(8)]);
    let qwen3 = with(json!({"model_type": "qwen3", "sliding_window": 8})).unwrap();
    assert_eq!((qwen3.qk_norm.is_some(), qwen3.head_dim, window(&qwen3, 2)), (true, 128, None));
}

#[test]
fn senseless_values_are_refused_by_name() {
    for (changes, name) in [
        (json!({"hidden_size": 0}), "hidden_size"),
        (json!({"hidden_size": -128}), "hidden_size"),
        (json!({"hidden_size": 1e300}), "hidden_size"),
        (json!({"vocab_size": u64::MAX}), "vocab_size"),
        (json!({"num_hidden_layers": null}), "num_hidden_layers"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"head_dim": 31}), "head_dim"),
        (json!({"rms_norm_eps": "1e-6"}), "rms_norm_eps"),
        (json!({"rms_norm_eps": -1.0}), "rms_norm_eps"),
        (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        // Infinite and zero as f32.
        (json!({"rms_norm_eps": 1e300}), "`rms_norm_eps`: expected a finite number above zero"),
        (json!({"rms_norm_eps": 5e-324}), "rms_norm_eps"),
        (json!({"rope_theta": 0}), "rope_theta"),
        (json!({"rope_theta": 1e300}), "rope_theta"),
        (json!({"rope_theta": 5e-324}), "`rope_theta`: expected a finite number above zero"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 1e39}}), "rope_scaling: `factor`"),
        (json!({"hidden_act": "sharp"}), "hidden_act"),
        (json!({"attention_bias": 1}), "attention_bias"),
        (json!({"layer_types": ["full_attention"]}), "layer_types"),
        (json!({"model_type": "mamba"}), "mamba"),
        (json!({"model_type": null}), "model_type"),
        (json!({"rope_scaling": {"rope_type": "llama3"}}), "factor"),
    ] {
        let error = with(changes.clone()).unwrap_err().to_string();
        assert!(error.contains(name), "{changes}: {error}");
    }
}

#[test]
fn hand_made_numbers_have_to_be_numbers_as_f32() {
    let config = with(json!({})).unwrap();
    for number in [0., -1., f64::NAN, f64::INFINITY, 1e300, 5e-324] {
        let error = Config { norm_eps: number, ..config.clone() }.validate().unwrap_err().to_string();
        assert!(error.contains("`norm_eps`: expected a finite number above zero"), "{error}");
        let rope = Rope { theta: number, ..config.rope.clone() };
        let error = Config { rope, ..config.clone() }.validate().unwrap_err().to_string();
        assert!(error.contains("`rope_theta`: expected a finite number above zero"), "{error}");
    }
}

/// What is missing, of the wrong type, contradictory or not supported, in the file or an object in it.
#[test]
fn errors_of_a_checkpoint_name_its_config_file() {
    let load = |config: Option<&Value>| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy("assets/tiny/model.safetensors", dir.path().join("model.safetensors")).unwrap();
        let file = dir.path().join("config.json");
        if let Some(config) = config {
            std::fs::write(&file, config.to_string()).unwrap();
        }
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let message = Config::from_checkpoint(&checkpoint).unwrap_err().to_string();
        let loading = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap_err().to_string();
        assert!(loading.starts_with(&message), "{loading}");
        (file.display().to_string(), message)
    };
    let again = "fetch it again, or correct it";
    for (changes, message) in [
        (json!({"hidden_size": -1}), "`hidden_size`: expected an integer from 1 to 16777216, found -1"),
        (json!({"vocab_size": null}), "`vocab_size`: expected an integer, found nothing"),
        (json!({"head_dim": 31}), "`head_dim`: expected an even number, found 31"),
        (
            json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
            "rope_scaling: `factor`: expected a finite number above zero, in f32, found 0",
        ),
    ] {
        let mut config = base();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let (file, found) = load(Some(&config));
        assert_eq!(found, format!("{file}: {message}; {again}"));
    }
    let (file, found) = load(Some(&json!({"model_type": "mamba"})));
    assert!(found.starts_with(&format!("model type `mamba` ({file}) is not supported; ")), "{found}");
    let (file, found) = load(None);
    assert_eq!(found, format!("{file}: no such file; put the model's beside the weights"));
    let (file, found) = load(Some(&Value::Null));
    assert_eq!(found, format!("{file}: no config in it; put the model's beside the weights"));
}

#[test]
fn the_context_is_what_the_scaling_makes_of_it() {
    for (changes, context) in [
        (json!({}), 2048),
        (json!({"model_type": "qwen3"}), 32_768),
        (json!({"model_type": "mistral"}), 131_072),
        (json!({"max_position_embeddings": 300}), 300),
        (
            json!({"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", "factor": 32.,
                "original_max_position_embeddings": 8192}}),
            131_072,
        ),
        (json!({"max_position_embeddings": 300, "rope_scaling": {"type": "linear", "factor": 2.5}}), 750),
        (json!({"max_position_embeddings": 300, "rope_scaling": {"type": "linear", "factor": 0.5}}), 300),
        (
            json!({"max_position_embeddings": 32_768, "rope_scaling": {"type": "yarn", "factor": 4.,
                "original_max_position_embeddings": 32_768}}),
            131_072,
        ),
        (
            json!({"max_position_embeddings": 131_072, "rope_scaling": {"type": "yarn", "factor": 32.,
                "original_max_position_embeddings": 4096}}),
            131_072,
        ),
        (
            json!({"max_position_embeddings": 4, "rope_scaling": {"type": "linear", "factor": 1e38}}),
            usize::MAX,
        ),
    ] {
        assert_eq!(with(changes.clone()).unwrap().context(), context, "{changes}");
    }
}

#[test]
fn a_missing_file_is_told() {
    let error = Config::from_json(&Value::Null).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("no such file"), "{error}");
}

#[test]
fn in_features_follow_the_module() {
    let config = with(json!({"head_dim": 64})).unwrap();
    let k = |module| config.in_features(module);
    assert_eq!(k("model.layers.0.self_attn.o_proj"), Some(256));
    assert_eq!(k("model.layers.0.mlp.down_proj"), Some(256));
    assert_eq!(k("lm_head"), Some(128));
    assert_eq!(k("model.norm"), None);
}

/// What changes numbers in some families is refused by name in those that do not have it, unless it changes nothing.
#[test]
fn fields_that_a_family_does_not_know_are_refused() {
    for (changes, named) in [
        (json!({"final_logit_softcapping": 30.0}), "`final_logit_softcapping`: 30.0"),
        (json!({"residual_multiplier": 0.22}), "`residual_multiplier`: 0.22"),
        (json!({"partial_rotary_factor": 0.5, "model_type": "qwen9"}), "qwen9"),
        (json!({"use_qk_norm": true}), "`use_qk_norm`: true in a model of type `llama`"),
        (json!({"num_experts": 8}), "`num_experts`: 8"),
        (json!({"clip_qkv": 8.0, "model_type": "qwen3"}), "`clip_qkv`: 8.0 in a model of type `qwen3`"),
        (json!({"kv_lora_rank": 512}), "`kv_lora_rank`: 512"),
        (json!({"use_mrope": true, "model_type": "qwen2"}), "`use_mrope`: true"),
    ] {
        let error = with(changes.clone()).unwrap_err().to_string();
        assert!(error.contains(named), "{changes}: {error}");
    }
    for changes in [
        json!({"residual_multiplier": 1.0, "final_logit_softcapping": null, "use_qk_norm": false}),
        json!({"num_experts": 1, "model_type": "hunyuan_v1_dense", "kv_lora_rank": null}),
        json!({"clip_qkv": 8.0, "model_type": "olmo"}),
        json!({"use_mrope": false, "model_type": "qwen2"}),
    ] {
        let unchanged = with(changes.clone());
        assert!(unchanged.is_ok(), "{changes}: {unchanged:?}");
    }
}

#[test]
fn windows_of_exaone_follow_a_number_or_a_string() {
    let exaone = |pattern: Value| {
        with(json!({"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": pattern}))
    };
    assert_eq!(exaone(json!(3)).unwrap().sliding_layers, [true, true, false]);
    let config = exaone(json!("LG")).unwrap();
    assert_eq!(config.sliding_layers, [true, false, true]);
    assert_eq!(config.rotated_layers, config.sliding_layers);
    for bad in [json!(""), json!("LX"), json!(0), json!(["L"])] {
        let error = exaone(bad.clone()).unwrap_err().to_string();
        assert!(error.contains("`sliding_window_pattern`"), "{bad}: {error}");
    }
    let none = with(json!({"model_type": "exaone4", "sliding_window": null})).unwrap();
    assert_eq!((none.sliding_window, none.rotated_layers), (None, vec![true; 3]));
}

/// What transformers 5.23 makes of configs that say nothing, or contradict themselves.
#[test]
fn scalings_are_completed_as_in_transformers() {
    let scaling = |changes: Value| with(changes).unwrap().rope.scaling;
    let llama3 = |original| RopeScaling::Llama3 {
        factor: 8.,
        low_freq_factor: 1.,
        high_freq_factor: 4.,
        original_max_position_embeddings: original,
    };
    let stated = json!({"rope_type": "llama3", "factor": 8., "low_freq_factor": 1., "high_freq_factor": 4.});
    assert_eq!(scaling(json!({"max_position_embeddings": 300, "rope_scaling": stated})), llama3(300));
    let mut both = stated;
    both["original_max_position_embeddings"] = 64.into();
    assert_eq!(scaling(json!({"rope_parameters": both})), llama3(64));
    assert_eq!(scaling(json!({"rope_scaling": both, "original_max_position_embeddings": 32})), llama3(32));
    // Phi 3's field has a value of its own, which counts more than that of the scaling.
    let factors = json!({"type": "longrope", "short_factor": vec![1.; 16], "long_factor": vec![2.; 16],
        "original_max_position_embeddings": 64});
    let RopeScaling::Long { original_max_position_embeddings, attention_factor, .. } =
        scaling(json!({"model_type": "phi3", "rope_scaling": factors}))
    else {
        panic!("no LongRoPE")
    };
    assert_eq!((original_max_position_embeddings, attention_factor), (4096, 1.));
    // Without a word.
    let gpt_oss =
        json!({"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 32, "rope_scaling": null});
    let RopeScaling::Yarn { factor, truncate, attention_factor, .. } = scaling(gpt_oss) else {
        panic!("no YaRN")
    };
    assert_eq!((factor, truncate, attention_factor), (32., false, 0.1 * 32f64.ln() + 1.));
    let ministral = with(json!({"model_type": "ministral3"})).unwrap();
    assert_eq!(
        (ministral.rope.theta, ministral.query_growth.map(|growth| growth.period)),
        (1e6, Some(16_384))
    );
    let stated = json!({"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}});
    assert_eq!(
        with(stated).unwrap().rope,
        Rope { theta: 1e4, rotary_dim: 128, interleaved: false, scaling: RopeScaling::None }
    );
    // Of latents, whose scores the scaling stretches, if there is one.
    let deepseek = |kind: &str| {
        let config = json!({"model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "n_routed_experts": 16, "moe_intermediate_size": 32,
            "rope_scaling": {"type": kind, "factor": 4., "mscale": 1., "mscale_all_dim": 1.}});
        let config = with(config).unwrap();
        assert_eq!(config.moe.map(|moe| moe.top_k), Some(8));
        config.attention_scale * 48f64.sqrt()
    };
    assert!((deepseek("default") - 1.).abs() < 1e-12);
    assert!((deepseek("yarn") - (0.1 * 4f64.ln() + 1.).powi(2)).abs() < 1e-12);
}

/// What transformers does not do, or does otherwise, is no number of ours.
#[test]
fn what_transformers_leaves_out_is_refused_or_left_out() {
    let refused = |changes: Value, parts: &[&str]| {
        let error = with(changes).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(json!({"partial_rotary_factor": 0.5}), &["partial_rotary_factor", "0.5", "`llama`"]);
    refused(
        json!({"model_type": "gemma2", "rope_parameters": {"partial_rotary_factor": 0.5}}),
        &["partial_rotary_factor", "`gemma2`"],
    );
    assert_eq!(with(json!({"partial_rotary_factor": 1.0})).unwrap().rope.rotary_dim, 32);
    let phi = json!({"model_type": "phi3", "partial_rotary_factor": 0.5});
    assert_eq!(with(phi).unwrap().rope.rotary_dim, 16);
    refused(json!({"model_type": "gemma3_text", "attn_logit_softcapping": 3.0}), &["attn_logit_softcapping"]);
    refused(json!({"model_type": "gemma", "hidden_activation": "relu"}), &["hidden_activation"]);
    let gemma =
        with(json!({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu"})).unwrap();
    assert_eq!(gemma.hidden_act, candle_nn::Activation::GeluPytorchTanh);
    refused(json!({"rope_interleave": false}), &["rope_interleave"]);
    let linear =
        json!({"model_type": "qwen3_5_text", "hidden_act": "gelu", "layer_types": vec!["full_attention"; 3]});
    refused(linear, &["hidden_act", "silu"]);
    // One of two that contradict each other.
    let yarn = json!({"rope_type": "yarn", "factor": 4.0});
    let parameters = json!({"rope_type": "default", "rope_theta": 1e4});
    refused(
        json!({"rope_parameters": parameters, "rope_scaling": yarn}),
        &["rope_scaling", "rope_parameters"],
    );
    let other = json!({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4});
    refused(json!({"rope_parameters": other, "rope_scaling": yarn}), &["rope_scaling"]);
    let same = json!({"type": "yarn", "factor": 4, "rope_theta": 1e4});
    for stated in
        [same.clone(), json!({"full_attention": same, "sliding_attention": {"rope_type": "default"}})]
    {
        let config = json!({"model_type": "olmo3", "rope_parameters": stated, "rope_scaling": yarn});
        assert!(matches!(with(config).unwrap().rope.scaling, RopeScaling::Yarn { .. }));
    }
    let olmo = with(json!({"model_type": "olmo3", "rope_theta": 77.})).unwrap();
    assert_eq!((olmo.rope.theta, olmo.local_rope.map(|rope| rope.theta)), (77., Some(5e5)));
}

/// The first configs of Phi 3 call LongRoPE so.
#[test]
fn a_yarn_with_factors_for_each_pair_is_longrope() {
    let scaling = json!({"type": "yarn", "short_factor": vec![1.0; 16], "long_factor": vec![2.0; 16]});
    let config = with(json!({"model_type": "phi3", "original_max_position_embeddings": 64,
        "max_position_embeddings": 128, "rope_scaling": scaling}))
    .unwrap();
    assert!(matches!(config.rope.scaling, crate::RopeScaling::Long { .. }), "{:?}", config.rope);
}

#[test]
fn the_last_layer_with_experts_may_be_minus_one() {
    let ernie = |last: i64| {
        with(json!({"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64,
            "moe_layer_start_index": 1, "moe_layer_end_index": last}))
        .map(|config| config.moe.unwrap().sparse_layers)
    };
    assert_eq!(ernie(-1).unwrap(), [false, true, true]);
    assert_eq!(ernie(1).unwrap(), [false, true, false]);
    assert!(ernie(-2).unwrap_err().to_string().contains("`moe_layer_end_index`"));
}
