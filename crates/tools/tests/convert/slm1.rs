//! `convert --to slm1`: files that this crate's reader takes for published ones, but for the checksum.

use super::common::{bundled, convert, Out};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::slm1::{self, ChecksumPolicy, Slm1, Slm1Options};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind};
use candle_quant_models::Model;
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec, Target};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(name)
}

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(fixture(name)).unwrap()
}

fn slm1(format: &str) -> ConvertOptions {
    ConvertOptions::slm1(Target::Slm1.usual_recipe(format.parse().unwrap()))
}

fn requantized(format: &str) -> ConvertOptions {
    let mut options = slm1(format);
    options.requantize = true;
    options
}

/// Everything as it is, what is packed as numbers.
fn dense() -> ConvertOptions {
    let mut options = ConvertOptions::slm1(Recipe::safe(Spec::Keep));
    options.dequantize = true;
    options
}

fn bytes(out: &Out) -> Vec<u8> {
    fs::read(out.path().join("model.slm")).unwrap()
}

/// Opened by the strictest rules, by a checksum that is the placeholder.
fn open_strictly(out: &Out) -> Slm1 {
    let checksum = ChecksumPolicy::Verify(|_| u64::from_le_bytes(*b"unknown!"));
    let options = Slm1Options { strict: true, checksum, ..Slm1Options::default() };
    slm1::open(out.path().join("model.slm"), &options).unwrap()
}

fn logits(checkpoint: &Checkpoint) -> Vec<f32> {
    let tokens = Tensor::new(&[[1u32, 50, 3, 61, 28, 200]], &Device::Cpu).unwrap();
    let logits = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap().forward(&tokens, 0).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

fn numbers(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let tensor = checkpoint.tensor(name, None).unwrap();
    tensor.to_dense(DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Shape, numbers or codes, and scales.
type Parts = (Vec<u32>, Vec<u8>, Vec<u8>);

/// What each matrix is, by the hash of its name; by the letter of the format.
fn matrices(bytes: &[u8]) -> BTreeMap<u64, Parts> {
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let entry = |index: usize| {
        let at = u64_at(80) as usize + 64 * index;
        let dims: Vec<_> = (0..u32_at(at + 12) as usize).map(|dim| u32_at(at + 16 + 4 * dim)).collect();
        let (payload, size, scales) =
            (u64_at(at + 32) as usize, u64_at(at + 40) as usize, u64_at(at + 48) as usize);
        let elements = dims.iter().product::<u32>() as usize;
        let of_scales = if scales == 0 { 0 } else { elements / u32_at(at + 56) as usize * 4 };
        let parts = (bytes[payload..payload + size].to_vec(), bytes[scales..scales + of_scales].to_vec());
        (u64_at(at), (dims, parts.0, parts.1))
    };
    (0..u32_at(88) as usize).map(entry).filter(|(_, (dims, ..))| dims.len() == 2).collect()
}

/// A file of numbers is written byte for byte, but for the checksum; of packed ones the matrices are, and vectors are numbers.
#[test]
fn files_are_written_as_they_are() {
    let keep = ConvertOptions::slm1(Recipe::safe(Spec::Keep));
    let mut written = bytes(&convert(&open("slm1/f32.slm"), &keep));
    let stored = fs::read(fixture("slm1/f32.slm")).unwrap();
    assert_ne!(written[100..108], stored[100..108]);
    written[100..108].copy_from_slice(&stored[100..108]);
    assert_eq!(written.len(), stored.len());
    assert!(written == stored);
    // From the folder of an output, too.
    let out = convert(&open("slm1/f32.slm"), &keep);
    let again = convert(&Checkpoint::open(out.path()).unwrap(), &keep);
    assert!(bytes(&again) == bytes(&out));

    let out = convert(&open("slm1/q4_0_gqa_b32.slm"), &keep);
    let stored = fs::read(fixture("slm1/q4_0_gqa_b32.slm")).unwrap();
    assert!(matrices(&bytes(&out)) == matrices(&stored) && matrices(&stored).len() == 16);
    assert_eq!(bytes(&out)[12..80], stored[12..80]);
    let again = Checkpoint::open(out.path()).unwrap();
    assert_eq!(
        (again.kind(), again.config()),
        (CheckpointKind::Slm1, open("slm1/q4_0_gqa_b32.slm").config())
    );
}

#[test]
fn rows_and_blocks_have_the_smallest_scales_that_clip_nothing() {
    let source = open("convert/odd_small");
    for (format, limit, block) in [("q8_0", 127f64, 120), ("q4_0", 7., 32)] {
        let out = convert(&source, &requantized(format));
        let file = Checkpoint::open(out.path()).unwrap();
        let mut packed = 0;
        for name in source.tensor_names().filter(|name| name.ends_with("_proj.weight")) {
            let (stored, written) = (numbers(&source, name), numbers(&file, name));
            let k = source.tensor(name, None).unwrap().dims()[1];
            if format == "q4_0" && !k.is_multiple_of(32) {
                assert!(stored == written, "{name}");
                continue;
            }
            packed += 1;
            let block = if format == "q8_0" { k } else { block };
            for (stored, written) in stored.chunks(block).zip(written.chunks(block)) {
                let (least, most) = stored.iter().fold((0f64, 0f64), |(least, most), number| {
                    (least.min(f64::from(*number)), most.max(f64::from(*number)))
                });
                let scale = (most / limit).max(-least / (limit + 1.));
                for (number, value) in stored.iter().zip(written) {
                    let error = f64::from(number - value).abs();
                    assert!(error <= scale * 0.50001, "{name}: {number} {value} {scale}");
                    let code = f64::from(*value) / scale;
                    assert!((code - code.round()).abs() < 1e-4 && code < limit + 0.5, "{name}: {code}");
                }
            }
        }
        assert!(packed > 0, "{format}");
    }
}

#[test]
fn models_of_the_llama_family_are_read_strictly() {
    let source = open("mlx/llama-mixed_3_6");
    let exact = logits(&source);
    let far = |found: &[f32]| {
        let most = |of: &mut dyn Iterator<Item = f32>| of.fold(0f32, |most, x| most.max(x.abs()));
        most(&mut found.iter().zip(&exact).map(|(a, b)| a - b)) / most(&mut exact.iter().copied())
    };
    for (options, limit) in [(dense(), 1e-5), (requantized("q8_0"), 0.05), (requantized("q4_0"), 0.5)] {
        let out = convert(&source, &options);
        let file = Checkpoint::open(out.path()).unwrap();
        let far = far(&logits(&file));
        assert!(far < limit && (limit < 1e-4 || far > 1e-4), "{far}");
    }
    let mut searched = requantized("q4_0");
    searched.search = true;
    let out = convert(&source, &searched);
    assert!(far(&logits(&Checkpoint::open(out.path()).unwrap())) < 0.5);

    // Of the fixtures alone a file has so many tokens and heads as a strict reading demands.
    for name in ["slm1/f32.slm", "slm1/q8_0.slm", "slm1/q4_0_tied.slm"] {
        for options in [dense(), requantized("q8_0")] {
            let out = convert(&open(name), &options);
            let file = open_strictly(&out);
            assert_eq!(file.tokenizer_bytes().len(), 28, "{name}");
            assert_eq!(file.checkpoint().config(), open(name).config(), "{name}");
        }
    }
}

#[test]
fn what_no_file_means_is_refused() {
    let refused = |source: &Checkpoint, options: &ConvertOptions, problems: &[&str]| {
        let error = ConvertPlan::new(source, options).map(drop).unwrap_err().to_string();
        assert!(problems.iter().all(|problem| error.contains(problem)), "{problems:?}: {error}");
    };
    refused(&bundled("tiny-bf16"), &slm1("q8_0"), &["an SLM1 file", "qk_norm"]);
    refused(&open("families/llama/hf"), &slm1("q8_0"), &["scaling", "an SLM1 file"]);
    refused(&open("families/mistral/hf"), &slm1("q4_0"), &["sliding_window"]);
    refused(&open("families/mixtral/hf"), &slm1("q4_0"), &["an SLM1 file"]);
    refused(&open("mlx/llama-untied-bias-b4-g64-f16"), &requantized("q8_0"), &["an SLM1 file", "bias"]);
    refused(&open("mlx/llama-mixed_3_6"), &slm1("q8_0"), &["as it is in an SLM1 file", "requantize"]);
    refused(&open("uqff/f8q8"), &slm1("keep"), &["an SLM1 file"]);
    refused(&open("convert/odd_small"), &requantized("4"), &["q4_0 and q8_0"]);
    refused(&open("convert/odd_small"), &requantized("q4_k"), &["q4_k"]);
}
