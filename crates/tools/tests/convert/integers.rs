//! Integers with zeros, looked at by their numbers: what is symmetric, or has zeros that are codes, is so in other files, whichever
//! tool has packed it.

use super::common::{convert, json_file, tensors, tensors_of};
use super::families_of;
use candle_core::{DType, Device};
use candle_quant::checkpoint::StoredForm;
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec, Target};
use candle_quant_tools::verify;
use std::path::{Path, PathBuf};

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path)
}

fn keep() -> Recipe {
    Recipe::safe(Spec::Keep)
}

fn numbers(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let numbers = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    numbers.flatten_all().unwrap().to_vec1().unwrap()
}

/// What the config of a folder says of packed weights.
fn described(folder: &Path) -> serde_json::Value {
    let config = &json_file(folder.join("config.json"))["quantization_config"];
    config["config_groups"]["group_0"]["weights"].clone()
}

/// Codes and scales as they are, and zeros if there are others than the middle code.
#[test]
fn integers_of_other_tools_become_those_of_compressed_tensors() {
    for (name, bits, has_zeros) in [
        ("gptq-b4-g128", 4, false),
        ("gptq-b8-channel", 8, true),
        ("gptq-v2-b4-g32", 4, true),
        ("awq-g64", 4, true),
        ("awq-rows", 4, true),
        ("awq-gemv-g64", 4, true),
        ("ct-int4-asym-g64", 4, true),
        ("ct-llmc-awq", 4, true),
    ] {
        let path = folder(&format!("hf/{name}"));
        let (source, before) =
            (Checkpoint::open(&path).unwrap(), tensors_of(&path.join("model.safetensors")));
        let options = ConvertOptions::hugging_face(keep());
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let told = plan.notes().iter().any(|note| note.contains("dequantize=True"));
        assert_eq!(told, has_zeros, "{name}");
        let out = convert(&source, &options);
        let (written, after) = (Checkpoint::open(out.path()).unwrap(), tensors(out.path()));
        let weights = described(&out.path());
        assert_eq!(weights["symmetric"], !has_zeros, "{name}");
        assert_eq!((&weights["num_bits"], &weights["strategy"]), (&bits.into(), &"group".into()), "{name}");
        let packed: Vec<_> = after.keys().filter_map(|name| name.strip_suffix(".weight_packed")).collect();
        assert!(packed.len() >= 6, "{name}");
        for module in packed {
            assert_eq!(
                after.contains_key(&format!("{module}.weight_zero_point")),
                has_zeros,
                "{name} {module}"
            );
            let weight = format!("{module}.weight");
            assert!(numbers(&written, &weight) == numbers(&source, &weight), "{name} {module}");
        }
        if name.starts_with("ct-") {
            assert!(after == before, "{name}");
        }
        let report = verify::verify(&written);
        assert!(report.passed(true), "{name}: {report} {:?}", report.findings);
        let again = convert(&written, &options);
        assert!(tensors(again.path()) == after, "{name}");
    }
}

#[test]
fn biases_that_are_no_zeros_and_other_widths_are_still_a_choice() {
    for name in ["gptq-b2-g64", "gptq-b3-g32", "awq-gemv_fast-g32", "hqq-b4-g64", "hqq-b8-g128"] {
        let source = Checkpoint::open(folder(&format!("hf/{name}"))).unwrap();
        let told = ConvertPlan::new(&source, &ConvertOptions::hugging_face(keep())).unwrap_err().to_string();
        assert!(told.contains("requantize or dequantize it"), "{name}: {told}");
    }
}

/// From compressed-tensors, and from MLX, where the same weights have biases.
#[test]
fn symmetric_integers_of_any_format_are_blocks_of_ggml() {
    let dense = families_of::open(&folder("families/llama/hf")).unwrap();
    for (format, dtype, kind) in [
        ("4:g32", DType::F16, "q4_0"),
        ("4:g64", DType::F16, "q4_0"),
        ("4:g64", DType::BF16, "q4_0"),
        ("8:g32", DType::F16, "q8_0"),
        ("8:g64", DType::BF16, "q8_0"),
    ] {
        let mut options =
            ConvertOptions::hugging_face(Target::HuggingFace.usual_recipe(format.parse().unwrap()));
        options.dtype = Some(dtype);
        let compressed = convert(&dense, &options);
        let source = Checkpoint::open(compressed.path()).unwrap();
        let mlx = convert(&source, &ConvertOptions::mlx(keep()));
        let in_mlx = Checkpoint::open(mlx.path()).unwrap();
        assert!(in_mlx
            .tensor("model.layers.0.self_attn.q_proj.weight", None)
            .unwrap()
            .format_name()
            .starts_with("affine"));
        for source in [&source, &in_mlx] {
            let what = format!("{format} {dtype:?} {}", source.kind());
            let out = convert(source, &ConvertOptions::gguf(keep()));
            let written = Checkpoint::open(out.path()).unwrap();
            let mut blocks = 0;
            for name in source.tensor_names() {
                assert!(numbers(source, name) == numbers(&written, name), "{what} {name}");
                if let Some(StoredForm::Blocks(found)) = written.tensor(name, None).unwrap().stored_form() {
                    assert_eq!(found.type_name().to_lowercase(), kind, "{what} {name}");
                    blocks += 1;
                }
            }
            assert!(blocks >= 12, "{what}: {blocks}");
            let report = verify::verify(&written);
            assert!(report.passed(true), "{what}: {report} {:?}", report.findings);
        }
        // And in compressed-tensors again, byte for byte.
        let again = convert(&in_mlx, &ConvertOptions::hugging_face(keep()));
        assert!(tensors(again.path()) == tensors(compressed.path()), "{format} {dtype:?}");
        assert_eq!(described(&again.path()), described(&compressed.path()), "{format} {dtype:?}");
    }
}
