//! Damaged files: an error or other numbers, never a panic, and the same each time.

use crate::{fixture_bytes, open};
use candle_core::{DType, Device};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rayon::prelude::*;

const FILES: u64 = 20_000;

/// Opens a file and reads everything in it; what came of it in words.
fn read(bytes: &[u8]) -> Vec<String> {
    let file = match open(bytes) {
        Ok(file) => file,
        Err(error) => return vec![told(&error.to_string())],
    };
    let checkpoint = file.checkpoint();
    let mut results = vec![checkpoint.config().to_string(), format!("{:?}", file.tokenizer_kind())];
    for name in checkpoint.tensor_names() {
        let tensor =
            checkpoint.tensor(name, None).and_then(|weight| weight.to_dense(DType::F32, &Device::Cpu));
        let sum =
            |tensor: candle_core::Tensor| tensor.sum_all().unwrap().to_scalar::<f32>().unwrap().to_bits();
        results.push(format!("{name} {:?}", tensor.map(sum).map_err(|error| told(&error.to_string()))));
    }
    results
}

/// What an error says after the name of the file, whose path is another one each time.
fn told(message: &str) -> String {
    let (_, rest) = message.rsplit_once("model.slm").unwrap_or_else(|| panic!("no file in: {message}"));
    rest.to_owned()
}

#[test]
fn damaged_files_are_errors_or_other_numbers() {
    let wholes = ["f32", "q8_0", "q4_0", "q4_0_gqa_b32"].map(fixture_bytes);
    let intact = wholes.each_ref().map(|bytes| read(bytes));
    assert!(intact.iter().all(|results| results.len() >= 14), "{intact:?}");
    // How many are refused, and how many are other numbers.
    let damage = |number: u64| {
        let mut random = StdRng::seed_from_u64(number);
        let mut random = |below: usize| random.random_range(0..below);
        // The last is large, and seldom.
        let which = if number.is_multiple_of(50) { 3 } else { number as usize % 3 };
        let mut bytes = wholes[which].clone();
        // Header, tokenizer and directory, or anywhere.
        let front = if random(4) == 0 { bytes.len() } else { 960 };
        for _ in 0..=random(2) {
            let at = random(front.min(bytes.len()));
            match random(8) {
                0 if random(4) == 0 => bytes.truncate(at.max(8)),
                1 if random(4) == 0 => drop(bytes.splice(at..at, std::iter::repeat_n(0, random(70)))),
                2 => bytes[at] = 0xFF,
                3 => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xFF),
                4 => bytes[at] = 0,
                5 => bytes[at] = random(256) as u8,
                _ => bytes[at] ^= 1 << random(8),
            }
        }
        let results = read(&bytes);
        if number.is_multiple_of(16) {
            assert_eq!(read(&bytes), results, "file {number}");
        }
        match results.len() {
            1 => [1, 0],
            _ if results != intact[which] => [0, 1],
            _ => [0, 0],
        }
    };
    let [refused, changed] =
        (0..FILES).into_par_iter().map(damage).reduce(|| [0; 2], |[a, b], [c, d]| [a + c, b + d]);
    // The suite would be worth nothing if all were refused at once, or none.
    assert!(refused > FILES / 4 && changed > FILES / 50, "{refused} refused, {changed} changed of {FILES}");
}
