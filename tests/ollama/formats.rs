//! What a packed weight of an Ollama store may look like: the rules on names of companions and on formats.
//! Rules on shapes and dtypes are in `parts.rs`, on files in `rules.rs`.

use crate::checkpoint::{rejected, warned, Tensor};
use crate::ollama::{bits, blob_of, stated, weight, weight_of, Model, INT4, INT8, MXFP4, MXFP8, NVFP4};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::{Error, QuantFormat};
use serde_json::{json, Value};

fn affine(bits: usize, group_size: usize) -> QuantFormat {
    QuantFormat::affine(bits, group_size).unwrap()
}

/// The same tensors under another path.
fn at<'a>(path: &str, tensors: &[Tensor<'a>]) -> Vec<(String, &'a str, &'a [usize])> {
    tensors.iter().map(|(name, dtype, dims)| (name.replacen('m', path, 1), *dtype, *dims)).collect()
}

/// Asserts that there are no warnings.
#[track_caller]
fn silent(checkpoint: &Checkpoint) {
    assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
}

/// 6.1: the names of companions in all versions, raw imports of MLX checkpoints among them.
#[test]
fn companions_have_the_names_of_all_versions() {
    let (_, today) = weight(&Value::Null, &INT4, Some(128)).unwrap();
    for [scale, bias] in [["m.weight_scale", "m.weight_qbias"], ["m.scales", "m.biases"]] {
        let tensors = [INT4[0], (scale, INT4[1].1, INT4[1].2), (bias, INT4[2].1, INT4[2].2)];
        let (checkpoint, packed) = weight(&Value::Null, &tensors, Some(128)).unwrap();
        assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["m.weight"]);
        assert_eq!((packed.format(), bits(&packed)), (affine(4, 64), bits(&today)));
    }
}

/// 4 and 6.1: experts that are stacked in the source keep names without `.weight`.
#[test]
fn names_need_not_end_in_weight() {
    const NAME: &str = "model.layers.0.mlp.experts.gate_up_proj";
    let tensors: [Tensor; 3] = [
        (NAME, "U32", &[3, 8, 16]),
        (&format!("{NAME}.scale"), "BF16", &[3, 8, 2]),
        (&format!("{NAME}.bias"), "BF16", &[3, 8, 2]),
    ];
    let config = json!({"text_config": {"hidden_size": 128}});
    for k in [None, Some(128)] {
        let (checkpoint, packed) = weight_of(&config, &stated("int4", "64"), NAME, &tensors, k).unwrap();
        assert_eq!((packed.format(), packed.dims(), packed.name()), (affine(4, 64), &[3, 8, 128][..], NAME));
        assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), [NAME]);
        assert_eq!(checkpoint.tensor(NAME, k).unwrap().dims(), [3, 8, 128]);
    }
}

/// Section 5: NVFP4 of ModelOpt as it was stored before version 0.22.
#[test]
fn raw_nvfp4_is_packed_in_bytes() {
    let mut blob = blob_of(&Value::Null, &[("m.weight_scale_2", "F32", &[])]);
    let end = blob.len() - 4;
    blob[end..].copy_from_slice(&0.5f32.to_le_bytes());
    let mut model = Model::of(&json!({}), &Value::Null, &[("m.weight", "U8", &[8, 64])]);
    model.tensors("m.weight_scale", &Value::Null, &[("m.weight_scale", "F8_E4M3", &[8, 8])]);
    model.tensors("m.input_scale", &Value::Null, &[("m.input_scale", "F32", &[])]);
    model.add("tensor", Some("m.weight_scale_2"), &blob);
    let checkpoint = model.open().unwrap();
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["m.weight"]);
    let Weight::Packed(packed) = checkpoint.weight("m", Some(128)).unwrap() else { panic!() };
    assert_eq!((packed.format(), packed.dims()), (QuantFormat::NVFP4, &[8, 128][..]));
    // The same words and scales as U32 and U8, without the factor of one half.
    let mut model = Model::of(&json!({}), &Value::Null, &NVFP4[..1]);
    model.tensors("m.weight.scale", &Value::Null, &NVFP4[1..]);
    let Weight::Packed(whole) = model.open().unwrap().weight("m", None).unwrap() else { panic!() };
    let half = |bits: u32| (f32::from_bits(bits) * 0.5).to_bits();
    assert_eq!(bits(&packed), bits(&whole).into_iter().map(half).collect::<Vec<_>>());

    let mut model = Model::of(&json!({}), &Value::Null, &[("m.weight_packed", "U8", &[8, 64])]);
    model.tensors("m.weight_scale", &Value::Null, &[("m.weight_scale", "F8_E4M3", &[8, 8])]);
    let raw = model.open().unwrap().weight("m", Some(128));
    assert!(matches!(raw, Err(Error::Unsupported { .. })));
    rejected(raw, &["`m.weight_packed`", "compressed-tensors"]);
}

/// 6.2
#[test]
fn companions_belong_to_packed_tensors_only() {
    let mut model = Model::of(&json!({}), &stated("int4", "64"), &INT4);
    model.tensors("m.bias", &Value::Null, &[("m.bias", "BF16", &[8])]);
    let router: [Tensor; 3] =
        [("router", "F32", &[4, 4]), ("router.scale", "F32", &[4]), ("router.bias", "F32", &[4])];
    model.tensors("router", &Value::Null, &router);
    model.tensors("ids", &Value::Null, &[("ids", "U8", &[4]), ("ids.scale", "F32", &[4])]);
    let checkpoint = model.open().unwrap();
    let names = ["ids", "ids.scale", "m.bias", "m.weight", "router", "router.bias", "router.scale"];
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), names);
    for (name, dims) in [("m.bias", &[8][..]), ("router.scale", &[4]), ("router.bias", &[4]), ("ids", &[4])] {
        assert_eq!(checkpoint.dense(name).unwrap().dims(), dims);
        assert_eq!(checkpoint.tensor(name, None).unwrap().dims(), dims);
    }
}

/// 4, 6.5: types, aliases and case. `fp4` and `fp8` are affine.
#[test]
fn types_have_aliases() {
    for (tensors, names, group, format) in [
        (&INT4[..], &["int4", "q4", "fp4", "INT4", "Fp4", " int4 "][..], "64", affine(4, 64)),
        (&INT8, &["int8", "q8", "FP8"], "64", affine(8, 64)),
        (&NVFP4, &["nvfp4", "NVFP4"], "16", QuantFormat::NVFP4),
        (&MXFP4, &["mxfp4"], "32", QuantFormat::MXFP4),
        (&MXFP8, &["mxfp8", "MxFp8"], "32", QuantFormat::MXFP8),
    ] {
        for name in names {
            for metadata in [stated(name, group), json!({"quant_type": name})] {
                for k in [None, Some(128)] {
                    let (checkpoint, packed) = weight(&metadata, tensors, k).unwrap();
                    assert_eq!((packed.format(), packed.dims()), (format, &[8, 128][..]));
                    silent(&checkpoint);
                }
            }
        }
    }
}

/// 6.5: byte scales alone are enough.
#[test]
fn floating_point_formats_need_no_metadata() {
    for (tensors, format) in
        [(NVFP4, QuantFormat::NVFP4), (MXFP4, QuantFormat::MXFP4), (MXFP8, QuantFormat::MXFP8)]
    {
        for metadata in [Value::Null, json!({})] {
            let (checkpoint, packed) = weight(&metadata, &tensors, None).unwrap();
            assert_eq!((packed.format(), packed.dims()), (format, &[8, 128][..]));
            silent(&checkpoint);
        }
    }
}

/// 5 and 6.6: an entry of its own comes before that of all tensors.
#[test]
fn metadata_of_one_tensor_comes_first() {
    let mut metadata = stated("int8", "32");
    metadata["m.weight.quant_type"] = "int4".into();
    metadata["m.weight.group_size"] = "64".into();
    let (checkpoint, packed) = weight(&metadata, &INT4, None).unwrap();
    assert_eq!((packed.format(), packed.dims()), (affine(4, 64), &[8, 128][..]));
    silent(&checkpoint);
}

/// The shapes of words and scales fit several widths: which of all that MLX has it is, K decides.
#[test]
fn k_decides_between_all_widths() {
    for format in QuantFormat::all().into_iter().filter(|format| format.has_biases()) {
        let k = 4 * format.group_size();
        let words = [2, format.words_per_row(k).unwrap()];
        let tensors: [Tensor; 3] = [
            ("m.weight", "U32", &words),
            ("m.weight.scale", "F16", &[2, 4]),
            ("m.weight.bias", "F16", &[2, 4]),
        ];
        let (checkpoint, packed) = weight(&Value::Null, &tensors, Some(k)).unwrap();
        assert_eq!((packed.format(), packed.dims()), (format, &[2, k][..]));
        silent(&checkpoint);
    }
}

/// 6.6, R10
#[test]
fn what_stays_open_is_an_error_that_lists_the_readings() {
    let readings = "affine 2-bit g128 (K = 256), affine 4-bit g64 (K = 128), affine 8-bit g32 (K = 64)";
    for metadata in [Value::Null, stated("q6", "64"), json!({"group_size": "x"}), stated("nvfp4", "16")] {
        rejected(
            weight(&metadata, &INT4, None),
            &["`m.weight`", "one reading", readings, "model `m:latest`"],
        );
        let (_, packed) = weight(&metadata, &INT4, Some(128)).unwrap();
        assert_eq!(packed.format(), affine(4, 64));
    }
    rejected(
        weight(&stated("int4", "64"), &INT4, Some(512)),
        &["`m.weight`", "shapes with K = 512", readings],
    );
}

/// 6.6, 6.8: the config tells K of usual names, or has an entry for the module.
#[test]
fn the_config_decides_without_metadata() {
    let config = json!({"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
        "moe_intermediate_size": 64, "n_shared_experts": 2, "quantization": {"bits": 8, "group_size": 64}});
    for (module, format) in [
        ("model.layers.0.mlp.up_proj", affine(4, 64)),
        ("model.embed_tokens", affine(4, 64)),
        ("model.layers.0.mlp.down_proj", affine(2, 128)),
        ("model.layers.0.self_attn.o_proj", affine(2, 128)),
        ("model.layers.0.mlp.switch_mlp.down_proj", affine(8, 32)),
        ("model.layers.0.mlp.experts.3.down_proj", affine(8, 32)),
        ("model.layers.0.mlp.shared_experts.down_proj", affine(4, 64)),
    ] {
        let tensors = at(module, &INT4);
        let tensors: Vec<Tensor> =
            tensors.iter().map(|(name, dtype, dims)| (name.as_str(), *dtype, *dims)).collect();
        let (checkpoint, packed) = weight_of(&config, &Value::Null, module, &tensors, None).unwrap();
        assert_eq!(packed.format(), format, "{module}");
        silent(&checkpoint);
        // A name alone does not outdo metadata: K of the model does.
        let contradiction = weight_of(&config, &stated("int8", "32"), module, &tensors, None);
        assert_eq!(contradiction.is_ok(), format == affine(8, 32), "{module}");
    }
    let config = json!({"quantization": {"bits": 4, "group_size": 64, "m": {"bits": 8, "group_size": 32}}});
    let (checkpoint, packed) = weight_of(&config, &Value::Null, "m", &INT4, None).unwrap();
    assert_eq!(packed.format(), affine(8, 32));
    silent(&checkpoint);
}

/// 6.7: the mixed import of an MLX checkpoint, every blob stamped with the global type.
#[test]
fn lying_metadata_loses_against_k_and_the_entry_of_the_config() {
    let entry = json!({"quantization": {"bits": 4, "group_size": 64, "m": {"bits": 8, "group_size": 64}}});
    for (config, k) in [(json!({}), Some(128)), (entry, None)] {
        for metadata in [stated("int4", "64"), stated("int4", "128")] {
            let (checkpoint, packed) = weight_of(&config, &metadata, "m", &INT8, k).unwrap();
            assert_eq!((packed.format(), packed.dims()), (affine(8, 64), &[8, 128][..]));
            let said = format!("\"int4\" with group size {}", metadata["group_size"]);
            warned(&checkpoint, &["`m.weight`", &said, "affine 8-bit g64 (K = 128)", "sha256-"]);
            // Once for each tensor.
            checkpoint.weight("m", k).unwrap();
            assert_eq!(checkpoint.warnings().len(), 1);
        }
    }
    let entry = json!({"quantization": {"bits": 4, "group_size": 128, "m": {"bits": 4, "group_size": 128}}});
    let (checkpoint, packed) = weight_of(&entry, &stated("int8", "64"), "m", &INT8, Some(128)).unwrap();
    assert_eq!(packed.format(), affine(8, 64));
    warned(&checkpoint, &["`m.weight`", "config.json says affine 4-bit g128", "affine 8-bit g64"]);
}

/// Ollama writes none of them, so that an entry says nothing.
#[test]
fn entries_of_formats_that_ollama_has_not_are_no_evidence() {
    for mode in ["mxint8", "nf4", "symmetric"] {
        let config = json!({"quantization": {"bits": 4, "group_size": 64, "m": {"mode": mode}}});
        let (checkpoint, packed) = weight_of(&config, &stated("int4", "64"), "m", &INT4, Some(128)).unwrap();
        assert_eq!(packed.format(), affine(4, 64));
        silent(&checkpoint);
    }
}

/// Section 5: the type of the whole model in versions up to 0.15, where nothing else is said.
#[test]
fn model_index_decides_last() {
    let tensors: [Tensor; 3] = [
        ("m.weight", "U32", &[8, 16]),
        ("m.weight.scale", "BF16", &[8, 4]),
        ("m.weight.bias", "BF16", &[8, 4]),
    ];
    let mut model = Model::of(&json!({}), &Value::Null, &tensors);
    model.add("json", Some("model_index.json"), br#"{"group_size":32,"quantization":"INT4"}"#);
    assert_eq!(model.open().unwrap().weight("m", None).unwrap().dims(), [8, 128]);
    model.pop();
    rejected(model.open().unwrap().weight("m", None), &["one reading"]);
}

/// 6.9
#[test]
fn odd_metadata_is_told() {
    for (metadata, k, said) in [
        (stated("q6", "64"), Some(128), "the type of \"q6\""),
        (stated("int4", "sixty-four"), None, "\"sixty-four\" is no number"),
        (stated("int4", "64.0"), Some(128), "\"64.0\" is no number"),
    ] {
        let (checkpoint, packed) = weight(&metadata, &INT4, k).unwrap();
        assert_eq!(packed.format(), affine(4, 64));
        warned(&checkpoint, &["`m.weight`", said, "affine 4-bit g64"]);
    }
    let (checkpoint, packed) = weight(&stated("fp6", "16"), &NVFP4, None).unwrap();
    assert_eq!(packed.format(), QuantFormat::NVFP4);
    warned(&checkpoint, &["`m.weight`", "\"fp6\"", "is unknown", "nvfp4"]);
}

#[test]
fn quantized_vision_towers_are_told() {
    let tensors = at("vision_tower.blocks.0.mlp.fc1", &INT4);
    let tensors: Vec<Tensor> =
        tensors.iter().map(|(name, dtype, dims)| (name.as_str(), *dtype, *dims)).collect();
    let checkpoint = Model::of(&json!({}), &stated("int4", "64"), &tensors).open().unwrap();
    warned(&checkpoint, &["`vision_tower.blocks.0.mlp.fc1.weight`", "vision tower"]);
}

#[test]
fn integers_without_scales_are_no_weights() {
    for dtype in ["U8", "I32"] {
        let checkpoint =
            Model::of(&json!({}), &Value::Null, &[("m.weight", dtype, &[8, 16])]).open().unwrap();
        rejected(checkpoint.weight("m", None), &["`m.weight`", "float weight", dtype, "m:latest"]);
    }
    let checkpoint =
        Model::of(&json!({}), &Value::Null, &[("m.weight", "F8_E4M3", &[8, 16])]).open().unwrap();
    rejected(
        checkpoint.weight("m", None),
        &["`m.weight`", "F8_E4M3", "layer `m.weight` of model `m:latest`"],
    );
}
