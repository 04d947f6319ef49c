//! Models that were split into several files, and models in directories.

use crate::checkpoint::{folder_of, rejected};
use crate::writer::{f32_tensor, File};
use candle_core::{DType, Device};
use candle_quant::checkpoint::CheckpointKind;
use candle_quant::{Checkpoint, Result};
use tempfile::TempDir;

/// Part `number` (from 0) of `count`, with one tensor; the first has the metadata.
fn part(number: u32, count: u32) -> File {
    let base = match number {
        0 => File::llama().u32("split.tensors.count", count),
        _ => File { values: vec![], ..File::llama() },
    };
    let name = format!("blk.{number}.ffn_norm.weight");
    base.u32("split.no", number).u32("split.count", count).tensor(f32_tensor(&name, &[1], &[number as f32]))
}

fn folder(parts: &[(&str, File)]) -> TempDir {
    let files: Vec<_> = parts.iter().map(|(name, file)| (*name, file.bytes())).collect();
    let files: Vec<_> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    folder_of(&files)
}

const NAMES: [&str; 3] = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"];

fn three() -> [(&'static str, File); 3] {
    [0, 1, 2].map(|number| (NAMES[number as usize], part(number, 3)))
}

#[test]
fn any_part_opens_the_whole_model() {
    let dir = folder(&three());
    let opened = NAMES.iter().map(|name| dir.path().join(name)).chain([dir.path().to_owned()]);
    for path in opened {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.config()["model_type"], "llama");
        assert_eq!(checkpoint.tensor_names().count(), 3);
        for layer in 0..3 {
            let name = format!("model.layers.{layer}.post_attention_layernorm.weight");
            let tensor = checkpoint.dense(&name).unwrap().load(DType::F32, &Device::Cpu).unwrap();
            assert_eq!(tensor.to_vec1::<f32>().unwrap(), [layer as f32]);
        }
    }
}

fn open(parts: &[(&str, File)]) -> Result<Checkpoint> {
    let dir = folder(parts);
    Checkpoint::open(dir.path().join(parts[0].0))
}

#[test]
fn divisors_of_frequencies_may_be_in_any_part() {
    let [first, second, (name, third)] = three();
    let (_, mut counted) = first;
    counted.values.retain(|(key, _, _)| key != b"split.tensors.count");
    let wrong = third.tensor(f32_tensor("rope_freqs.weight", &[16], &[3.; 16]));
    let parts = [(NAMES[0], counted), second, (name, wrong)];
    rejected(open(&parts), &["`rope_freqs.weight`", "llama 3's scaling"]);
}

#[test]
fn parts_have_to_be_complete_and_of_one_model() {
    let [first, second, third] = three();
    rejected(open(&[first.clone(), third.clone()]), &[NAMES[1], "this part of 3 is missing", "fetch"]);
    let again = (NAMES[2], part(1, 3));
    rejected(open(&[first.clone(), second.clone(), again]), &[NAMES[2], "expected part 2", "found part 1"]);
    let of_four = (NAMES[2], part(2, 4));
    rejected(open(&[first.clone(), second.clone(), of_four]), &[NAMES[2], "of 3", "of 4"]);
    let alone = ("model.gguf", part(0, 3));
    rejected(open(&[alone]), &["model.gguf", "a part of 3 files", "-of-00003.gguf"]);
    let more = (NAMES[2], part(2, 3).tensor(f32_tensor("output_norm.weight", &[1], &[0.])));
    rejected(open(&[first.clone(), second.clone(), more]), &["tensors in all parts", "found 4"]);
    let twice = File { tensors: part(0, 3).tensors, ..part(2, 3) };
    rejected(open(&[first, second, (NAMES[2], twice)]), &["`blk.0.ffn_norm.weight`", "found several"]);
}

#[test]
fn the_one_model_of_a_directory_is_opened() {
    let file = |value| File::llama().tensor(f32_tensor("output_norm.weight", &[1], &[value]));
    let dir = folder(&[("a.gguf", file(1.)), ("mmproj-a.gguf", File::of("clip"))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::Gguf);
    assert!(checkpoint.contains("model.norm.weight"));
    let dir = folder(&[("a.gguf", file(1.)), ("b.gguf", file(2.))]);
    rejected(Checkpoint::open(dir.path()), &["2 GGUF models", "a.gguf", "b.gguf", "the path of one"]);
    // Beside safetensors they are something else.
    let safetensors = crate::checkpoint::file(&[("x", "F32", &[1])]);
    let gguf = file(1.).bytes();
    let files = [("model.safetensors", &safetensors[..]), ("a.gguf", &gguf), ("b.gguf", &gguf)];
    let dir = folder_of(&files);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().kind(), CheckpointKind::Dense);
}
