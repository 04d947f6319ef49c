//! 4-bit weights of bitsandbytes to `--to hf`: all tensors of its files, as they are.

use super::common::{convert, json_file, tensors, tensors_of};
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec, Target};
use candle_quant_tools::verify;
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/hf").join(name)
}

/// bitsandbytes and transformers have written what is compared with, byte for byte.
#[test]
fn four_bits_of_bitsandbytes_are_copied_to_hugging_face() {
    for name in ["bnb-nf4", "bnb-nf4-nested", "bnb-nf4-b512", "bnb-fp4"] {
        let source = Checkpoint::open(folder(name)).unwrap();
        let options = ConvertOptions::hugging_face(Recipe::safe(Spec::Keep));
        let out = convert(&source, &options);
        assert!(tensors(out.path()) == tensors_of(&folder(name).join("model.safetensors")), "{name}");
        let of = |folder: &Path| json_file(folder.join("config.json"))["quantization_config"].clone();
        let (found, expected) = (of(&out.path()), of(&folder(name)));
        for (key, value) in expected.as_object().unwrap() {
            if key != "llm_int8_skip_modules" {
                assert_eq!(&found[key], value, "{name} {key}");
            }
        }
        let dense: Vec<_> = found["llm_int8_skip_modules"].as_array().unwrap().iter().collect();
        assert_eq!(dense, ["lm_head", "model.layers.0.self_attn.v_proj"], "{name}");
        let written = Checkpoint::open(out.path()).unwrap();
        assert_eq!(written.kind(), source.kind(), "{name}");
        let report = verify::verify(&written);
        assert!(report.passed(true), "{name}: {report} {:?}", report.findings);
    }
}

/// transformers has one method for a model.
#[test]
fn nothing_else_is_packed_beside_bitsandbytes() {
    let source = Checkpoint::open(folder("bnb-nf4")).unwrap();
    let mut options =
        ConvertOptions::hugging_face(Target::HuggingFace.usual_recipe("4:g32".parse().unwrap()));
    let told = ConvertPlan::new(&source, &options).unwrap_err().to_string();
    for part in ["v_proj.weight` as affine 4-bit g32", "nf4", "of bitsandbytes", "keep it dense"] {
        assert!(told.contains(part), "{part} in {told}");
    }
    options.requantize = true;
    ConvertPlan::new(&source, &options).unwrap();
}
