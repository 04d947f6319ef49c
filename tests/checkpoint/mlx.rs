//! Checkpoints written by mlx-lm: every module resolves as mlx-lm resolved it, and embedding rows dequantize
//! to the bits that mlx gives.

use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, PackedWeight, Weight};
use candle_quant::{QuantFormat, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::{fs, path::Path, path::PathBuf};

/// All checkpoint folders.
fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/mlx");
    let paths = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    // One is the same model in another layout: `tests/hf/gpt_oss.rs`.
    let is_mlx = |path: &PathBuf| path.is_dir() && !path.ends_with("gptoss-mxfp4-hf");
    let mut folders: Vec<_> = paths.filter(is_mlx).collect();
    folders.sort();
    assert_eq!(folders.len(), 18);
    folders
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

fn packed(checkpoint: &Checkpoint, module: &str, k: Option<usize>) -> PackedWeight {
    match checkpoint.weight(module, k).unwrap() {
        Weight::Packed(packed) => packed,
        other => panic!("{other:?}"),
    }
}

/// Compares every packed module with what mlx-lm resolved, with K known and, if asked, unknown.
fn check_resolution(checkpoint: &Checkpoint, expect: &Value, also_without_k: bool) {
    let modules = expect["modules"].as_object().unwrap();
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    for (module, expected) in modules {
        let context = format!("{} {module}", checkpoint.path().display());
        let k = number(&expected["in_dims"]);
        let weight_shape: Vec<_> = expected["weight_shape"].as_array().unwrap().iter().map(number).collect();
        for k_known in [Some(k), None].into_iter().take(1 + usize::from(also_without_k)) {
            let packed = packed(checkpoint, module, k_known);
            let format = packed.format();
            assert_eq!(packed.name(), module);
            assert_eq!(format.mode(), expected["mode"], "{context}");
            assert_eq!(format.bits(), number(&expected["bits"]), "{context}");
            assert_eq!(format.group_size(), number(&expected["group_size"]), "{context}");
            assert_eq!(format.has_biases(), expected["has_biases"], "{context}");
            let rows = &weight_shape[..weight_shape.len() - 1];
            assert_eq!(packed.dims(), [rows, &[k]].concat(), "{context}");
            let scale_bytes = match expected["scales_dtype"].as_str().unwrap() {
                "uint8" => 1,
                "bfloat16" | "float16" => 2,
                other => panic!("{context}: {other}"),
            };
            let per_group = scale_bytes * (1 + usize::from(format.has_biases()));
            assert_eq!(
                packed.size_in_bytes(),
                rows.iter().product::<usize>()
                    * (weight_shape.last().unwrap() * 4 + k / format.group_size() * per_group)
                    + if expected["global_scale"] == true { 4 * weight_shape[0] } else { 0 },
                "{context}"
            );
        }
        assert_eq!(checkpoint.contains(&format!("{module}.bias")), expected["has_bias"], "{context}");
    }
    // No other module is packed.
    for module in checkpoint.modules() {
        let weight = checkpoint.weight(&module, None);
        match modules.contains_key(&module) {
            true => assert!(!also_without_k || matches!(weight, Ok(Weight::Packed(_)))),
            false => assert!(matches!(weight, Ok(Weight::Dense(_))), "{module}"),
        }
    }
    let listed: BTreeSet<_> = checkpoint.modules().into_iter().collect();
    assert!(modules.keys().all(|module| listed.contains(module)));
}

#[test]
fn modules_resolve_as_in_mlx_lm() {
    for folder in folders() {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        assert_eq!(checkpoint.kind(), CheckpointKind::Mlx);
        assert_eq!(*checkpoint.config(), json(folder.join("config.json")));
        check_resolution(&checkpoint, &json(folder.join("expect.json")), true);
        assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
    }
}

/// With K known the config is not needed: every entry of a module can go, and the whole object too.
#[test]
fn shapes_resolve_modules_without_the_config() {
    for folder in folders() {
        let mut config = json(folder.join("config.json"));
        let Some(Value::Object(mut object)) = config.get("quantization").cloned() else {
            panic!("{folder:?}: no quantization object");
        };
        object.retain(|_, value| !value.is_object());
        object.retain(|_, value| value != false || folder.ends_with("llama-mixed-custom"));
        let expect = json(folder.join("expect.json"));
        for quantization in [Value::Object(object), Value::Null] {
            config["quantization"] = quantization.clone();
            config["quantization_config"] = quantization.clone();
            let copy = tempfile::tempdir().unwrap();
            for entry in fs::read_dir(&folder).unwrap() {
                let entry = entry.unwrap();
                fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
            }
            fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
            let checkpoint = Checkpoint::open(copy.path()).unwrap();
            check_resolution(&checkpoint, &expect, false);
            // Routers have 8 bits.
            let mixed = ["mixed", "moe", "gptoss"].iter().any(|kind| folder.to_str().unwrap().contains(kind));
            assert_eq!(checkpoint.warnings().is_empty(), !mixed && !quantization.is_null());
        }
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn embedding_rows_equal_mlx_bit_for_bit() {
    for folder in folders() {
        let refs = candle_core::safetensors::load(folder.join("refs.safetensors"), &Device::Cpu).unwrap();
        let tokens = refs["tokens"].to_dtype(DType::U32).unwrap();
        let expected = bits(&refs["hidden_embed_f32"]);
        assert_eq!(expected.len(), 40 * 128);

        let checkpoint = Checkpoint::open(&folder).unwrap();
        let packed = packed(&checkpoint, "model.embed_tokens", None);
        let table = packed.load(&Device::Cpu).unwrap();
        assert_eq!(table.format(), packed.format());
        assert_eq!(table.dims(), packed.dims());
        assert_eq!(table.size_in_bytes(), packed.size_in_bytes());
        let dequantized = table.dequantize(DType::F32).unwrap();
        assert_eq!(bits(&dequantized.index_select(&tokens, 0).unwrap()), expected, "{folder:?}");
        assert_eq!(bits(&table.embed(&tokens, DType::F32).unwrap()), expected, "{folder:?}");
    }
}

/// Loads module `m` of a file with these tensors and data; its format, and its first and last element.
fn first_and_last(tensors: &[crate::checkpoint::Tensor], data: &[&[u8]]) -> Result<(QuantFormat, f32, f32)> {
    let file = crate::checkpoint::raw_file(&crate::checkpoint::header(tensors).0, &data.concat());
    let dir = crate::checkpoint::folder_of(&[
        ("model.safetensors", &file),
        ("config.json", br#"{"quantization":{}}"#),
    ]);
    let packed = packed(&Checkpoint::open(dir.path()).unwrap(), "m", None);
    let values = packed.load(&Device::Cpu)?.dequantize(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok((packed.format(), values[0], values[values.len() - 1]))
}

/// Special scales are loaded for what they are: NaN, infinite, negative.
#[test]
fn odd_scales_are_accepted() {
    let ones = [0x11; 64];
    // Code 1 of E2M1 is 0.5. E8M0 255 is NaN, 0 is 2^-127.
    let mxfp4 = [("m.weight", "U32", &[1usize, 8][..]), ("m.scales", "U8", &[1, 2])];
    let (format, first, last) = first_and_last(&mxfp4, &[&ones[..32], &[255, 0]]).unwrap();
    assert_eq!(format, QuantFormat::MXFP4);
    assert!(first.is_nan());
    assert_eq!(last, f32::from_bits(0x0020_0000));
    // E4M3 0x7f is NaN, 0xc0 is -2.
    let nvfp4 = [("m.weight", "U32", &[1usize, 4][..]), ("m.scales", "U8", &[1, 2])];
    let (format, first, last) = first_and_last(&nvfp4, &[&ones[..16], &[0x7f, 0xc0]]).unwrap();
    assert_eq!(format, QuantFormat::NVFP4);
    assert!(first.is_nan());
    assert_eq!(last, -1.0);
    // A scale of infinity with bias 0, and scale 2 with a NaN bias.
    let affine =
        [("m.weight", "U32", &[1usize, 16][..]), ("m.scales", "F16", &[1, 2]), ("m.biases", "F16", &[1, 2])];
    let (format, first, last) =
        first_and_last(&affine, &[&ones, &[0x00, 0x7c, 0x00, 0x40], &[0, 0, 0x00, 0x7e]]).unwrap();
    assert_eq!(format, QuantFormat::affine(4, 64).unwrap());
    assert_eq!(first, f32::INFINITY);
    assert!(last.is_nan());
}

/// MLX stores the largest magnitude, 6 * 448 times the factor of the scales.
#[test]
fn global_scales_are_magnitudes() {
    let load = |global_scales: &[f32]| {
        let one_each = [global_scales.len()];
        let tensors = [
            ("m.global_scale", "F32", &one_each[..]),
            ("m.weight", "U32", &[2, 1, 2]),
            ("m.scales", "U8", &[2, 1, 1]),
        ];
        let values: Vec<u8> = global_scales.iter().flat_map(|value| value.to_le_bytes()).collect();
        // Codes 0.5, E4M3 scales 1.
        first_and_last(&tensors, &[&values, &[0x11; 16], &[0x38; 2]])
    };
    assert_eq!(load(&[2688.0]).unwrap(), (QuantFormat::NVFP4, 0.5, 0.5));
    assert_eq!(load(&[5376.0, 0.0]).unwrap(), (QuantFormat::NVFP4, 1.0, 0.0));
    for (value, shown) in [(-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let parts = ["model.safetensors", "`m.global_scale`", "finite magnitude", shown];
        crate::checkpoint::rejected(load(&[value]), &parts);
        crate::checkpoint::rejected(load(&[1.0, value]), &parts);
    }
}
