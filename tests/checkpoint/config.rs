//! The quantization object of `config.json`: where it is found, what may be in it.

use crate::checkpoint::{file, folder, folder_of, packed, rejected, warned, Tensor};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind};
use candle_quant::QuantFormat;
use candle_quant_models::Config;
use serde_json::{json, Value};

/// Affine with 8 words for each scale: 2-bit g128, 4-bit g64 or 8-bit g32.
const AFFINE: [Tensor; 3] =
    [("m.weight", "U32", &[8, 16]), ("m.scales", "BF16", &[8, 2]), ("m.biases", "BF16", &[8, 2])];

fn open(config: &Value) -> candle_quant::Result<Checkpoint> {
    Checkpoint::open(folder(config, &AFFINE).path())
}

#[test]
fn either_key_is_read() {
    let object = json!({"bits": 8, "group_size": 32});
    for config in [
        json!({"quantization": object}),
        json!({"quantization_config": object}),
        json!({"quantization": null, "quantization_config": object}),
        json!({"quantization": object, "quantization_config": {"quant_method": "gptq"}}),
        json!({"quantization_config": {"bits": 8, "group_size": 32, "quant_method": null}}),
        json!({"quantization": object, "quantization_config": {"bits": 2, "group_size": 128}}),
    ] {
        let (_, packed) = packed(&config, &AFFINE, None).unwrap();
        assert_eq!(packed.format().to_string(), "affine 8-bit g32", "{config}");
    }
}

#[test]
fn missing_numbers_are_the_defaults_of_the_mode() {
    for object in [json!({}), json!({"bits": 4}), json!({"group_size": 64}), json!({"mode": "affine"})] {
        let (checkpoint, packed) = packed(&json!({"quantization": object}), &AFFINE, None).unwrap();
        assert_eq!(packed.format().to_string(), "affine 4-bit g64", "{object}");
        assert!(checkpoint.warnings().is_empty());
    }
}

#[test]
fn without_an_object_the_shapes_decide_if_k_is_known() {
    for config in [json!(null), json!({}), json!({"quantization": null}), json!({"quantization": 4})] {
        let (checkpoint, weight) = packed(&config, &AFFINE, Some(64)).unwrap();
        assert_eq!(weight.format().to_string(), "affine 8-bit g32");
        warned(&checkpoint, &["model.safetensors", "without a quantization object", "`m`"]);
        rejected(packed(&config, &AFFINE, None), &["model.safetensors", "`m`", "number of input features"]);
    }
}

/// As FFAI and mlx-vlm read them: of the formats that fit, the one with the config's size of groups.
#[test]
fn mixed_widths_are_told_by_shapes_where_k_is_not_known() {
    for (group_size, bits, read) in [(128, 4, 2), (64, 8, 4), (32, 2, 8), (32, 8, 8)] {
        let config = json!({"quantization": {"bits": bits, "group_size": group_size}});
        let (checkpoint, weight) = packed(&config, &AFFINE, None).unwrap();
        assert_eq!(weight.format().to_string(), format!("affine {read}-bit g{group_size}"));
        if read != bits {
            let expected = format!("affine {read}-bit g{group_size}");
            warned(&checkpoint, &["model.safetensors", "`m`", "the shapes win", &expected]);
        }
    }
    // 3 words and 1 scale: 3 bits of 32.
    let one: [Tensor; 3] =
        [("m.weight", "U32", &[8, 3]), ("m.scales", "BF16", &[8, 1]), ("m.biases", "BF16", &[8, 1])];
    let (_, weight) = packed(&json!({"quantization": {"bits": 4, "group_size": 32}}), &one, None).unwrap();
    assert_eq!(weight.format().to_string(), "affine 3-bit g32");
    let none = json!({"quantization": {"bits": 4, "group_size": 64}});
    rejected(packed(&none, &one, None), &["`m`", "with its groups", "affine 3-bit g32 (K = 32)"]);
}

#[test]
fn one_warning_stands_for_all_modules_alike() {
    let tensors: [Tensor; 6] = [
        AFFINE[0],
        AFFINE[1],
        AFFINE[2],
        ("n.weight", "U32", &[8, 16]),
        ("n.scales", "F16", &[8, 2]),
        ("n.biases", "F16", &[8, 2]),
    ];
    let dir = folder(&json!({"quantization": {"bits": 4, "group_size": 64}}), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for module in ["m", "n", "m"] {
        checkpoint.weight(module, Some(64)).unwrap();
    }
    warned(&checkpoint, &["`m`", "affine 8-bit g32"]);
}

#[test]
fn numbers_are_positive_and_whole() {
    for (value, shown) in [
        (json!(0), "0"),
        (json!(-4), "-4"),
        (json!(4.5), "4.5"),
        (json!("4"), "\"4\""),
        (json!(1e300), "1e+300"),
        (json!([4]), "[4]"),
        (json!(true), "true"),
    ] {
        for (key, object) in [
            ("quantization.bits", json!({"bits": value})),
            ("quantization.group_size", json!({"group_size": value})),
            ("quantization.m.bits", json!({"m": {"bits": value}})),
        ] {
            rejected(
                open(&json!({"quantization": object})),
                &["config.json", key, shown, "positive whole number"],
            );
        }
    }
}

#[test]
fn numbers_are_finite() {
    let model = file(&AFFINE);
    let open = |text: &str| {
        let dir = folder_of(&[("model.safetensors", &model), ("config.json", text.as_bytes())]);
        Checkpoint::open(dir.path())
    };
    for text in [r#"{"quantization": {"bits": 1e999}}"#, r#"{"rope_theta": nan}"#, r#"{"rope_theta": NaN"#] {
        rejected(open(text), &["config.json", "malformed JSON", "line 1"]);
    }
    // As Python writes them: kept where nobody asks for them, refused where a number is needed.
    for literal in ["NaN", "Infinity", "-Infinity"] {
        let text = r#"{"time_step_limit": [0.0, X], "quantization": {"bits": 8, "group_size": 32}}"#;
        let checkpoint = open(&text.replace('X', literal)).unwrap();
        assert_eq!(checkpoint.config()["time_step_limit"][1], literal);
        let format = checkpoint.weight("m", None).unwrap().format_name();
        assert_eq!(format, "affine 8-bit g32");
        let bits = open(&r#"{"quantization": {"bits": X}}"#.replace('X', literal));
        rejected(bits, &["config.json", "`quantization.bits`", literal]);
        let model = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 8,
            "intermediate_size": 64, "num_attention_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": X}"#;
        let config = open(&model.replace('X', literal)).unwrap().config().clone();
        let told = Config::from_json(&config).unwrap_err().to_string();
        assert!(told.contains("`rope_theta`: expected a finite number") && told.contains(literal), "{told}");
    }
}

#[test]
fn formats_outside_the_table_are_refused() {
    for (object, parts) in [
        (json!({"bits": 7, "group_size": 64}), ["bits 7", "1, 2, 3, 4, 5, 6 or 8"]),
        (json!({"bits": 4, "group_size": 16}), ["group_size 16", "32, 64 or 128"]),
        (json!({"bits": 4, "group_size": 256}), ["group_size 256", "32, 64 or 128"]),
        (
            json!({"mode": "mxfp4", "group_size": 64}),
            ["mxfp4 with bits 4 and group_size 64", "group_size 32"],
        ),
        (
            json!({"mode": "nvfp4", "group_size": 32}),
            ["nvfp4 with bits 4 and group_size 32", "group_size 16"],
        ),
        (json!({"mode": "mxfp8", "bits": 4}), ["mxfp8 with bits 4", "bits 8"]),
        (
            json!({"mode": "int4"}),
            ["\"int4\"", "expected one of affine, mxfp4, nvfp4, mxfp8, mxint8, nf4, fp4"],
        ),
        (json!({"mode": 4}), ["4", "expected a string"]),
    ] {
        rejected(
            open(&json!({"quantization": object})),
            &["config.json", "`quantization", parts[0], parts[1]],
        );
        let inside = json!({"quantization": {"bits": 4, "group_size": 64, "m": object}});
        rejected(open(&inside), &["config.json", "`quantization.m", parts[0], parts[1]]);
    }
}

#[test]
fn unknown_keys_are_ignored_with_a_warning() {
    for (object, key) in [
        (json!({"linear_class": "x"}), "`quantization.linear_class`"),
        (json!({"damping": 0.1}), "`quantization.damping`"),
        (json!({"m": {"bits": 4, "speed": "high"}}), "`quantization.m.speed`"),
    ] {
        let (checkpoint, _) = packed(&json!({"quantization": object}), &AFFINE, None).unwrap();
        warned(&checkpoint, &["config.json", key, "unknown and ignored"]);
    }
}

#[test]
fn overrides_of_absent_modules_are_ignored_with_a_warning() {
    for entry in [json!({"bits": 8, "group_size": 32}), json!({"bits": "many"}), json!(false), json!(true)] {
        let config = json!({"quantization": {"model.language_model.m": entry}});
        let (checkpoint, packed) = packed(&config, &AFFINE, None).unwrap();
        assert_eq!(packed.format().to_string(), "affine 4-bit g64");
        warned(&checkpoint, &["config.json", "`quantization.model.language_model.m`", "matches no module"]);
    }
}

#[test]
fn true_means_the_top_level() {
    let config = json!({"quantization": {"bits": 8, "group_size": 32, "m": true}});
    let (checkpoint, packed) = packed(&config, &AFFINE, None).unwrap();
    assert_eq!(packed.format().to_string(), "affine 8-bit g32");
    assert!(checkpoint.warnings().is_empty());
}

#[test]
fn quantized_activations_are_left_out_with_a_warning() {
    let nvfp4: [Tensor; 2] = [("m.weight", "U32", &[8, 16]), ("m.scales", "U8", &[8, 8])];
    for object in [
        json!({"mode": "nvfp4", "quantize_activations": true}),
        json!({"mode": "nvfp4", "m": {"mode": "nvfp4", "quantize_activations": true, "global_scale": true}}),
    ] {
        let (checkpoint, packed) = packed(&json!({"quantization": object}), &nvfp4, None).unwrap();
        assert_eq!(packed.format(), QuantFormat::NVFP4);
        warned(&checkpoint, &["config.json", "quantize_activations", "only the weights"]);
    }
    let object = json!({"mode": "nvfp4", "quantize_activations": false});
    let (checkpoint, _) = packed(&json!({"quantization": object}), &nvfp4, None).unwrap();
    assert!(checkpoint.warnings().is_empty());
}

#[test]
fn the_kind_is_told_by_tensors() {
    assert_eq!(open(&json!({})).unwrap().kind(), CheckpointKind::Mlx);
    let config = json!({"quantization": {"bits": 4, "group_size": 64}});
    let dir = folder(&config, &[("m.weight", "BF16", &[8, 128])]);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().kind(), CheckpointKind::Dense);
}
