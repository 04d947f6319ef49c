//! Damaged files: an error or other numbers, never a panic, and the same each time.

use crate::writer::{f32_tensor, open, tensor, File};
use candle_core::{DType, Device};
use candle_quant::checkpoint::block_types;
use candle_quant_models::generate::{load_tokenizer, stop_tokens};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rayon::prelude::*;

const FILES: u64 = 20_000;

fn whole() -> File {
    let tokens: Vec<String> = ('a'..='p').map(String::from).chain(["ab".into()]).collect();
    let file = File::llama()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "llama-bpe")
        .texts("tokenizer.ggml.tokens", &tokens)
        .texts("tokenizer.ggml.merges", &["a b"])
        .u32("tokenizer.ggml.eos_token_id", 3)
        .u32("split.count", 1)
        .tensor(tensor("blk.0.attn_q.weight", &[4, 64], 39, vec![0x77; 8 * 17]))
        .tensor(tensor("blk.0.attn_k.weight", &[2, 64], 40, vec![0x35; 2 * 36]))
        .tensor(f32_tensor("blk.0.attn_k.scale", &[1], &[0.5]))
        .tensor(f32_tensor("output_norm.weight", &[8], &[1.; 8]))
        .tensor(f32_tensor("rope_freqs.weight", &[16], &[1.; 16]));
    // One block of every type that is read.
    block_types().into_iter().fold(file, |file, (id, _, elements, bytes)| {
        let name = format!("blk.{id}.ffn_down.weight");
        file.tensor(tensor(&name, &[1, elements as u64], id, vec![0x35; bytes]))
    })
}

/// Opens a file and reads everything in it; what came of it in words.
fn read(bytes: &[u8]) -> Vec<String> {
    let checkpoint = match open(bytes) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return vec![told(&error.to_string())],
    };
    let mut results = vec![checkpoint.config().to_string()];
    for name in checkpoint.tensor_names() {
        results.push(
            match checkpoint.tensor(name, None).and_then(|weight| weight.to_dense(DType::F32, &Device::Cpu)) {
                Ok(tensor) => format!("{name} {:?}", tensor.dims()),
                Err(error) => format!("{name}: error {}", told(&error.to_string())),
            },
        );
    }
    results.push(format!(
        "{:?}",
        load_tokenizer(&checkpoint).map(drop).map_err(|error| told(&error.to_string()))
    ));
    results.push(format!("{:?}", stop_tokens(&checkpoint).map_err(|error| told(&error.to_string()))));
    results
}

/// What an error says after the name of the file, whose path is another one each time.
fn told(message: &str) -> String {
    let (_, rest) = message.rsplit_once("model.gguf").unwrap_or_else(|| panic!("no file in: {message}"));
    rest.to_owned()
}

#[test]
fn damaged_files_are_errors_or_other_numbers() {
    let whole = whole().bytes();
    let intact = read(&whole);
    // The config, three other tensors, two lines about the tokenizer, and one line for each type.
    assert_eq!(intact.len(), 6 + block_types().len(), "{intact:?}");
    // candle has no numbers of type I8 (24).
    let errors: Vec<_> = intact.iter().filter(|result| result.contains("error")).collect();
    let of_type = |error: &&String| error.starts_with("model.layers.24.mlp.down_proj.weight: error");
    assert!(errors.len() == 1 && errors.iter().all(of_type), "{errors:?}");
    // How many are refused, and how many are other numbers.
    let damage = |number: u64| {
        let mut random = StdRng::seed_from_u64(number);
        let mut random = |below: usize| random.random_range(0..below);
        let mut bytes = whole.clone();
        for _ in 0..=random(3) {
            let at = random(bytes.len());
            match random(8) {
                0 => bytes.truncate(at.max(8)),
                1 => drop(bytes.splice(at..at, std::iter::repeat_n(0, random(40)))),
                2 => bytes[at] ^= 1 << random(8),
                3 => bytes[at] = 0xFF,
                // Counts, sizes and offsets are 8 bytes with many zeros.
                4 | 5 => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xFF),
                _ => bytes[at] = random(256) as u8,
            }
        }
        let results = read(&bytes);
        if number.is_multiple_of(16) {
            assert_eq!(read(&bytes), results, "file {number}");
        }
        match results.len() {
            1 => [1, 0],
            _ if results != intact => [0, 1],
            _ => [0, 0],
        }
    };
    let [refused, changed] =
        (0..FILES).into_par_iter().map(damage).reduce(|| [0; 2], |[a, b], [c, d]| [a + c, b + d]);
    // The suite would be worth nothing if all were refused at once, or none.
    assert!(refused > FILES / 4 && changed > FILES / 50, "{refused} refused, {changed} changed of {FILES}");
}
