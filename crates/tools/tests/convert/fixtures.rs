//! All checkpoints of Hugging Face's tools in `tests/fixtures/hf`: decoded, and copied wherever another kind of files can say the same.

use super::common::{convert, json_file};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// Every folder.
fn folders() -> Vec<PathBuf> {
    let all = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/hf");
    let mut folders: Vec<_> = fs::read_dir(all).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|folder| folder.join("expected.json").is_file());
    folders.sort();
    assert!(folders.len() >= 46, "{folders:?}");
    folders
}

fn name(folder: &Path) -> &str {
    folder.file_name().unwrap().to_str().unwrap()
}

/// The bytes of its numbers in F32.
fn bytes(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let numbers = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    let numbers: Vec<f32> = numbers.flatten_all().unwrap().to_vec1().unwrap();
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// `expected.json` is what the tools themselves decode.
#[test]
fn every_checkpoint_of_hugging_face_is_decoded_as_its_tool_does() {
    for folder in folders() {
        let source = Checkpoint::open(&folder).unwrap();
        let mut options = ConvertOptions::dense();
        options.dtype = Some(DType::F32);
        let out = convert(&source, &options);
        let written = Checkpoint::open(out.path()).unwrap();
        let expected = json_file(folder.join("expected.json"));
        let expected = expected.as_object().unwrap();
        assert!(expected.len() >= 6, "{}", name(&folder));
        for (tensor, expected) in expected {
            assert!(
                matches!(written.tensor(tensor, None).unwrap(), Weight::Dense(_)),
                "{} {tensor}",
                name(&folder)
            );
            let digest = Sha256::digest(bytes(&written, tensor));
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(digest, expected["sha256"].as_str().unwrap(), "{} {tensor}", name(&folder));
        }
    }
}

/// Where a plan keeps what is packed, the output has the numbers of the source.
#[test]
fn every_checkpoint_of_hugging_face_keeps_its_numbers_where_it_is_copied() {
    let keep = || Recipe::safe(Spec::Keep);
    let mut copied = Vec::new();
    for folder in folders() {
        let source = Checkpoint::open(&folder).unwrap();
        for (to, options) in [
            ("hf", ConvertOptions::hugging_face(keep())),
            ("mlx", ConvertOptions::mlx(keep())),
            ("uqff", ConvertOptions::uqff(keep())),
            ("gguf", ConvertOptions::gguf(keep())),
        ] {
            let what = format!("{} to {to}", name(&folder));
            let Ok(plan) = ConvertPlan::new(&source, &options) else { continue };
            let out = convert(&source, &options);
            let written = Checkpoint::open(out.path()).unwrap();
            let is_copied = |name: &&str| written.tensor_names().any(|other| other == *name);
            let kept =
                plan.tensors().filter(|tensor| tensor.rule == "packed already" && tensor.fallback.is_none());
            let kept: Vec<_> = kept.map(|tensor| tensor.name.as_str()).filter(is_copied).collect();
            for tensor in &kept {
                if source.tensor_names().any(|name| name == *tensor) {
                    assert!(bytes(&source, tensor) == bytes(&written, tensor), "{what}: {tensor}");
                }
            }
            if !kept.is_empty() {
                copied.push(what);
            }
        }
    }
    assert_eq!(copied, COPIED);
}

/// What is copied into what, and not an error.
const COPIED: &[&str] = &[
    "awq-g64 to hf",
    "awq-g64 to mlx",
    "awq-g64 to uqff",
    "awq-gemv-g64 to hf",
    "awq-gemv-g64 to mlx",
    "awq-gemv-g64 to uqff",
    "awq-gemv_fast-g32 to mlx",
    "awq-gemv_fast-g32 to uqff",
    "awq-marlin-g128 to hf",
    "awq-marlin-g128 to mlx",
    "awq-marlin-g128 to uqff",
    "awq-marlin-g128 to gguf",
    "awq-rows to hf",
    "awq-rows to mlx",
    "awq-rows to uqff",
    "bnb-fp4 to hf",
    "bnb-fp4 to mlx",
    "bnb-int8 to hf",
    "bnb-nf4 to hf",
    "bnb-nf4 to mlx",
    "bnb-nf4-b512 to hf",
    "bnb-nf4-b512 to mlx",
    "bnb-nf4-nested to hf",
    "bnb-nf4-nested to mlx",
    "ct-fp8-block to hf",
    "ct-fp8-channel to hf",
    "ct-fp8-tensor to hf",
    "ct-fp8-tensor to uqff",
    "ct-int4-asym-g64 to hf",
    "ct-int4-asym-g64 to mlx",
    "ct-int4-asym-g64 to uqff",
    "ct-int4-g128-f32 to hf",
    "ct-int4-g32 to hf",
    "ct-int4-g32 to mlx",
    "ct-int4-g32 to uqff",
    "ct-int4-g32 to gguf",
    "ct-int8-channel to hf",
    "ct-int8-channel to mlx",
    "ct-int8-channel to uqff",
    "ct-int8-channel to gguf",
    "ct-llmc-awq to hf",
    "ct-llmc-awq to mlx",
    "ct-llmc-awq to uqff",
    "ct-llmc-fp8-kv to hf",
    "ct-llmc-fp8-kv to uqff",
    "ct-llmc-w4a8 to hf",
    "ct-llmc-w4a8 to mlx",
    "ct-llmc-w4a8 to uqff",
    "ct-llmc-w4a8 to gguf",
    "ct-mxfp4 to hf",
    "ct-mxfp4 to mlx",
    "ct-mxfp4 to uqff",
    "ct-mxfp4 to gguf",
    "ct-nvfp4 to gguf",
    "ct-w8a8 to hf",
    "ct-w8a8 to mlx",
    "ct-w8a8 to uqff",
    "ct-w8a8 to gguf",
    "fp8-128x128 to hf",
    "fp8-ue8m0-32x32 to hf",
    "fp8-ue8m0-32x32 to mlx",
    "gptq-b2-g64 to mlx",
    "gptq-b2-g64 to uqff",
    "gptq-b3-g32 to mlx",
    "gptq-b3-g32 to uqff",
    "gptq-b4-g128 to hf",
    "gptq-b4-g128 to mlx",
    "gptq-b4-g128 to uqff",
    "gptq-b4-g128 to gguf",
    "gptq-b8-channel to hf",
    "gptq-b8-channel to mlx",
    "gptq-b8-channel to uqff",
    "gptq-v2-b4-g32 to hf",
    "gptq-v2-b4-g32 to mlx",
    "gptq-v2-b4-g32 to uqff",
    "hqq-b4-g64-axis0 to uqff",
    "modelopt-fp8 to hf",
    "modelopt-fp8 to uqff",
    "modelopt-fp8-rows to hf",
    "modelopt-nvfp4 to gguf",
];
