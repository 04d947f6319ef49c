//! Codes and scales that are copied into files of another kind, or of the same, which have the same.

use super::common::{convert, json_file, tensors, tensors_of, Source, Stored};
use super::gguf_writer::{f32_tensor, path, tensor, write, File};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, StoredForm};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec};
use candle_quant_tools::verify;
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path)
}

fn open(path: &str) -> Checkpoint {
    Checkpoint::open(folder(path)).unwrap()
}

fn keep() -> Recipe {
    Recipe::safe(Spec::Keep)
}

fn refused(source: &Checkpoint, options: &ConvertOptions) -> String {
    ConvertPlan::new(source, options).map(drop).unwrap_err().to_string()
}

/// As bits, so that zeros have signs.
fn numbers(checkpoint: &Checkpoint, name: &str) -> Vec<u32> {
    let numbers = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    numbers.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// The same numbers under the same names, and nothing to be found fault with.
fn assert_same_numbers(source: &Checkpoint, written: &Checkpoint, what: &str) {
    for name in source.tensor_names() {
        assert!(numbers(source, name) == numbers(written, name), "{what}: {name}");
    }
    let report = verify::verify(written);
    assert!(report.passed(true), "{what}: {report} {:?}", report.findings);
}

/// Floats as F32.
fn floats((dtype, _, bytes): &Stored) -> Vec<f32> {
    match dtype.as_str() {
        "F32" => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        "F16" => bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
        "BF16" => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
        other => panic!("{other}"),
    }
}

/// The tensors of all files of UQFF.
fn layers(folder: &Path) -> BTreeMap<String, Stored> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "uqff"));
    files.flat_map(|path| tensors_of(&path)).collect()
}

/// Types of GGML that nothing here quantizes to, by the numbers that GGUF files use.
const ONLY_READ: [(&str, u32); 13] = [
    ("iq2_xxs", 16),
    ("iq2_xs", 17),
    ("iq3_xxs", 18),
    ("iq1_s", 19),
    ("iq4_nl", 20),
    ("iq3_s", 21),
    ("iq2_s", 22),
    ("iq4_xs", 23),
    ("iq1_m", 29),
    ("tq1_0", 34),
    ("tq2_0", 35),
    ("q1_0", 41),
    ("q8_1", 9),
];

/// Rows of queries and keys come in the order of models and go back to that of files.
#[test]
fn blocks_of_every_type_are_copied_from_gguf_to_gguf() {
    let stored = tensors_of(&folder("gguf/blocks.safetensors"));
    for (kind, id) in ONLY_READ {
        let (_, dims, blocks) = &stored[&format!("{kind}.blocks")];
        let rows: Vec<_> = blocks.chunks_exact(blocks.len() / dims[0]).collect();
        // Neighbours differ, also within a head.
        let weight =
            |n: usize| -> Vec<u8> { (0..n).flat_map(|row| rows[row * row / 3 % 2].to_vec()).collect() };
        let mut file = File::of("llama").u32("llama.context_length", 64);
        for (key, size) in [
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("embedding_length", 512),
            ("feed_forward_length", 512),
            ("block_count", 1),
        ] {
            file = file.u32(&format!("llama.{key}"), size);
        }
        file = file.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
        let mut of_type = Vec::new();
        for (name, n) in [
            ("token_embd", 8),
            ("output", 8),
            ("blk.0.attn_q", 512),
            ("blk.0.attn_k", 256),
            ("blk.0.attn_v", 256),
            ("blk.0.attn_output", 512),
            ("blk.0.ffn_gate", 512),
            ("blk.0.ffn_up", 512),
            ("blk.0.ffn_down", 512),
        ] {
            of_type.push(weight(n));
            file = file.tensor(tensor(&format!("{name}.weight"), &[n as u64, 512], id, weight(n)));
        }
        for norm in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
            file = file.tensor(f32_tensor(&format!("{norm}.weight"), &[512], &[1.; 512]));
        }
        let (read, name) = (write(&file.bytes()), "model.layers.0.self_attn.q_proj");
        let source = Checkpoint::open(path(&read)).unwrap();
        let out = convert(&source, &ConvertOptions::gguf(keep()));
        let written = Checkpoint::open(out.path()).unwrap();
        assert_same_numbers(&source, &written, kind);
        let Some(StoredForm::Blocks(found)) = written.weight(name, None).unwrap().stored_form() else {
            panic!()
        };
        assert_eq!((found.type_name().to_lowercase().as_str(), found.type_id()), (kind, id));
        // By the letter: tensors begin at multiples of 32.
        let bytes = fs::read(out.path().join("model.gguf")).unwrap();
        for weight in of_type {
            assert!((0..bytes.len()).step_by(32).any(|at| bytes[at..].starts_with(&weight)), "{kind}");
        }
        // The grids of the IQ types are in no other file.
        let others = [ConvertOptions::hugging_face(keep()), ConvertOptions::uqff(keep())];
        for options in others.into_iter().filter(|_| kind.starts_with("iq")) {
            let error = refused(&source, &options);
            assert!(error.contains("requantize or dequantize it"), "{kind}: {error}");
        }
    }
}

/// As mistral.rs has it: the scale twice, and the number that it divided by.
#[test]
fn fp8_with_one_scale_is_copied_to_uqff() {
    for name in ["hf/modelopt-fp8", "hf/ct-fp8-tensor"] {
        let (source, stored) = (open(name), tensors(folder(name)));
        let out = convert(&source, &ConvertOptions::uqff(keep()));
        let (written, found) = (Checkpoint::open(out.path()).unwrap(), layers(&out.path()));
        assert_same_numbers(&source, &written, name);
        let mut count = 0;
        for (weight, (_, dims, codes)) in stored.iter().filter(|(_, (dtype, ..))| dtype == "F8_E4M3") {
            assert_eq!(found[weight], ("F8_E4M3".to_owned(), dims.clone(), codes.clone()), "{name} {weight}");
            let module = weight.strip_suffix(".weight").unwrap();
            let scale = floats(&stored[&format!("{module}.weight_scale")]);
            for (part, expected) in
                [("dequant_w_scale", scale[0]), ("dequant_x_scale", scale[0]), ("quant_scale", 1. / scale[0])]
            {
                let (dtype, dims, bytes) = &found[&format!("{weight}.{part}")];
                assert_eq!((dtype.as_str(), dims.len()), ("F32", 0), "{name} {weight}");
                assert_eq!(bytes[..], expected.to_le_bytes(), "{name} {weight} {part}");
            }
            assert_eq!(found[&format!("{weight}.format")].2, [3]);
            assert_eq!(found[&format!("{weight}.dtype")].2, [9, 0, 0, 0]);
            count += 1;
        }
        assert!(count >= 6, "{name}");
        assert!(out.path().join("fp8-0.uqff").is_file(), "{name}");
        // And as it is there again.
        let again = convert(&written, &ConvertOptions::uqff(keep()));
        assert!(layers(&again.path()) == found, "{name}");
    }
    // UQFF has no other scales of FP8.
    for name in ["hf/modelopt-fp8-rows", "hf/ct-fp8-block", "hf/fp8-128x128"] {
        let error = refused(&open(name), &ConvertOptions::uqff(keep()));
        let parts = ["fp8 g", "as it is in UQFF", "requantize or dequantize it"];
        assert!(parts.iter().all(|part| error.contains(part)), "{name}: {error}");
    }
}

#[test]
fn scales_of_fp8_that_are_no_numbers_are_refused() {
    for (scale, is_zero) in [(f32::NAN, false), (f32::INFINITY, false), (0., true)] {
        let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}"#;
        let source = Source::new()
            .with_config(config)
            .with_bytes("m.weight", "F8_E4M3", &[4, 32], &[0x38; 128])
            .with("m.weight_scale", &[], &[scale])
            .finish();
        let plan = ConvertPlan::new(&source.open(), &ConvertOptions::uqff(keep()));
        match plan {
            Ok(_) => assert!(is_zero),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    !is_zero && error.contains("`m.weight`") && error.contains("a finite number"),
                    "{error}"
                );
            }
        }
    }
}

/// `float-quantized` of compressed-tensors, in each of its strategies.
#[test]
fn fp8_is_copied_to_hugging_face() {
    for (name, strategy, scales_of) in [
        ("hf/modelopt-fp8", "tensor", "weight_scale"),
        ("hf/ct-fp8-tensor", "tensor", "weight_scale"),
        ("hf/modelopt-fp8-rows", "channel", "weight_scale"),
        ("hf/ct-fp8-channel", "channel", "weight_scale"),
        ("hf/ct-fp8-block", "block", "weight_scale"),
        ("hf/fp8-128x128", "block", "weight_scale_inv"),
        ("uqff/fp8", "tensor", "weight.dequant_w_scale"),
    ] {
        let stored = if name.starts_with("uqff") { layers(&folder(name)) } else { tensors(folder(name)) };
        let source = open(name);
        let out = convert(&source, &ConvertOptions::hugging_face(keep()));
        let (written, found) = (Checkpoint::open(out.path()).unwrap(), tensors(out.path()));
        assert_eq!(written.kind().to_string(), "Hugging Face compressed-tensors", "{name}");
        let mut count = 0;
        for (weight, (dtype, dims, codes)) in &found {
            if dtype != "F8_E4M3" {
                continue;
            }
            assert!(codes == &stored[weight].2 && dims == &stored[weight].1, "{name} {weight}");
            let module = weight.strip_suffix(".weight").unwrap();
            let expected = &stored[&format!("{module}.{scales_of}")];
            let (dtype, shape, bytes) = &found[&format!("{module}.weight_scale")];
            assert!((dtype, bytes) == (&expected.0, &expected.2), "{name} {weight}");
            let shape_of = match strategy {
                "tensor" => vec![1],
                "channel" => vec![dims[0], 1],
                // One block is all of it.
                _ if expected.1 == [1, 1] => vec![1],
                _ => expected.1.clone(),
            };
            assert_eq!(shape, &shape_of, "{name} {weight}");
            assert!(numbers(&source, weight) == numbers(&written, weight), "{name} {weight}");
            count += 1;
        }
        // All but what is no linear layer.
        let all = stored.values().filter(|(dtype, ..)| dtype == "F8_E4M3").count();
        assert_eq!(count, if name == "uqff/fp8" { all - 1 } else { all }, "{name}");
        let config = &json_file(out.path().join("config.json"))["quantization_config"];
        assert_eq!(config["format"], "float-quantized", "{name}");
        let groups = config["config_groups"].as_object().unwrap();
        let weights = groups.values().map(|group| &group["weights"]);
        let weights = weights.into_iter().find(|weights| weights["strategy"] == strategy).expect(name);
        assert_eq!((&weights["strategy"], &weights["num_bits"]), (&strategy.into(), &8.into()), "{name}");
        assert_eq!(weights["type"], "float");
        let block = match name {
            "hf/fp8-128x128" => serde_json::json!([128, 128]),
            "hf/ct-fp8-block" => serde_json::json!([64, 64]),
            _ => serde_json::Value::Null,
        };
        assert_eq!(weights["block_structure"], block, "{name}");
        let report = verify::verify(&written);
        assert!(report.passed(true), "{name}: {report} {:?}", report.findings);
        // And as it is there again.
        let again = convert(&written, &ConvertOptions::hugging_face(keep()));
        assert!(tensors(again.path()) == found, "{name}");
    }
}

/// Codes of a matrix of groups as HQQ packs them.
fn packed(codes: &[u8], bits: usize, groups: usize) -> Vec<u8> {
    if bits == 3 {
        let rows = (codes.len() / groups).div_ceil(10);
        let word = |at: usize| {
            let code = |part: usize| codes.get(part * rows * groups + at).copied().unwrap_or(0);
            (0..10).fold(0u32, |word, part| word << 3 | u32::from(code(part)))
        };
        return (0..rows * groups).flat_map(|at| word(at).to_le_bytes()).collect();
    }
    let bytes = codes.len() * bits / 8;
    let byte =
        |at: usize| (0..8 / bits).fold(0u16, |byte, part| byte << bits | u16::from(codes[part * bytes + at]));
    (0..bytes).map(|at| byte(at) as u8).collect()
}

/// A matrix in groups along axis 0.
fn hqq([n, k]: [usize; 2], bits: usize, group: usize) -> Source {
    let groups = n * k / group;
    let codes: Vec<_> = (0..n * k).map(|index| (index * 37 % 251 % (1 << bits)) as u8).collect();
    let halves = |seed: usize| -> Vec<u8> {
        let number = |index: usize| f16::from_f32(0.25 + (index * seed % 61) as f32 / 64.);
        (0..groups).flat_map(|index| number(index).to_le_bytes()).collect()
    };
    let (dtype, rows) = if bits == 3 { ("I32", group.div_ceil(10)) } else { ("U8", group * bits / 8) };
    let packing = if bits == 3 { "3bit_32".to_owned() } else { format!("{bits}bit_u8") };
    let number = |number: i32| number.to_le_bytes();
    let shape: Vec<_> = [n, k].iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
    Source::new()
        .with_config(r#"{"quantization_config": {"quant_method": "hqq"}}"#)
        .with_bytes("m.W_q", dtype, &[rows, groups], &packed(&codes, bits, groups))
        .with_bytes("m.scale", "F16", &[1, groups], &halves(7))
        .with_bytes("m.zero", "F16", &[1, groups], &halves(11))
        .with_bytes("m.shape", "I64", &[2], &shape)
        .with_bytes("m.axis", "I32", &[], &number(0))
        .with_bytes("m.group_size", "I32", &[], &number(group as i32))
        .with_bytes("m.packing", "U8", &[packing.len()], packing.as_bytes())
        .finish()
}

#[test]
fn hqq_along_axis_0_is_copied_to_uqff() {
    let generated =
        [(1, 8, [64, 96]), (2, 64, [64, 96]), (4, 32, [64, 96]), (8, 128, [64, 128]), (8, 6, [24, 40])];
    let generated: Vec<_> = generated.map(|(bits, group, dims)| (hqq(dims, bits, group), bits, group)).into();
    let sources = generated.iter().map(|(source, bits, group)| (source.open(), *bits, *group));
    for (source, bits, group) in sources.chain([(open("hf/hqq-b4-g64-axis0"), 4, 64)]) {
        let what = format!("{bits} bits, {group}");
        let stored = tensors(source.path());
        let out = convert(&source, &ConvertOptions::uqff(keep()));
        let (written, found) = (Checkpoint::open(out.path()).unwrap(), layers(&out.path()));
        assert_same_numbers(&source, &written, &what);
        let mut count = 0;
        for (codes, (_, dims, bytes)) in stored.iter().filter(|(name, _)| name.ends_with(".W_q")) {
            let module = codes.strip_suffix(".W_q").unwrap();
            let part = |part: &str| &found[&format!("{module}.weight{part}")];
            assert_eq!(part(""), &("U8".to_owned(), dims.clone(), bytes.clone()), "{what} {module}");
            for (here, there) in [(".scales", "scale"), (".zeros", "zero")] {
                let there = &stored[&format!("{module}.{there}")];
                assert_eq!((part(here).0.as_str(), &part(here).1), ("F32", &there.1), "{what} {module}");
                assert_eq!(floats(part(here)), floats(there), "{what} {module}");
            }
            assert_eq!((part(".bits").2[0], part(".axis").2[0], part(".format").2[0]), (bits as u8, 0, 2));
            assert_eq!(part(".group_size").2, (group as u32).to_le_bytes());
            count += 1;
        }
        assert!(count >= 1, "{what}");
        assert!(out.path().join(format!("hqq{bits}-0.uqff")).is_file(), "{what}");
        let again = convert(&written, &ConvertOptions::uqff(keep()));
        assert!(layers(&again.path()) == found, "{what}");
    }
}

/// Of groups along K mistral.rs reads none, and of 3-bit codes on a CPU only those that fill words.
#[test]
fn other_hqq_is_still_a_choice() {
    for source in [open("hf/hqq-b3-g32-axis0"), hqq([64, 96], 3, 32).open(), open("hf/hqq-b4-g64")] {
        let error = refused(&source, &ConvertOptions::uqff(keep()));
        assert!(
            error.contains("as it is in UQFF") && error.contains("requantize or dequantize it"),
            "{error}"
        );
    }
}
