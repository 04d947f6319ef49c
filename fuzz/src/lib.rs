//! What the fuzz targets and the soak test share.
//!
//! An input is a [`Bundle`]: the files of a checkpoint, written into a temporary directory, where
//! [`open_and_load_everything`] does with them all that a user could. Nothing may panic, whatever the bytes.
//! The targets differ by their seeds, one set for each reader.

mod bundle;
mod mutate;
mod seeds;

// The writer of the crate's own tests.
#[path = "../../tests/common/checkpoint.rs"]
mod checkpoint;
#[allow(dead_code)]
#[path = "../../tests/gguf/writer.rs"]
mod writer;

pub use bundle::Bundle;
pub use mutate::mutate;
pub use seeds::{seeds, TARGETS};

use candle_quant::checkpoint::{natural_order, slm1, Weight};
use candle_quant::Checkpoint;
use candle_quant_models::chat::Template;
use candle_quant_models::generate;
use candle_quant_models::Config;
use candle_quant_tools::{diff, verify};
use std::path::Path;

/// Runs one input: whether it could be opened.
pub fn run(bundle: &Bundle) -> bool {
    let folder = tempfile::tempdir().expect("a temporary directory");
    bundle.write(folder.path()).expect("files in it");
    open_and_load_everything(&folder.path().join(&bundle.open))
}

/// Opens a checkpoint, reads and decodes all it has, and asks for things it may not have.
pub fn open_and_load_everything(path: &Path) -> bool {
    let strict = slm1::Slm1Options {
        strict: true,
        checksum: slm1::ChecksumPolicy::Verify(|_| 1),
        ..slm1::Slm1Options::default()
    };
    let _ = slm1::open(path, &strict).is_ok();
    let Ok(checkpoint) = Checkpoint::open(path) else {
        return false;
    };
    let _ = (checkpoint.kind(), checkpoint.path(), checkpoint.config(), format!("{checkpoint:?}"));
    let _ = (checkpoint.modules(), Config::from_json(checkpoint.config()));
    let _ = (generate::load_tokenizer(&checkpoint).is_ok(), generate::stop_tokens(&checkpoint).is_ok());
    let _ = (
        generate::Params::from_checkpoint(&checkpoint).is_ok(),
        Template::from_checkpoint(&checkpoint).is_ok(),
    );
    // Reads and decodes every tensor once.
    let report = verify::verify(&checkpoint);
    let _ = (report.passed(true), report.to_string());
    let mut names: Vec<String> = checkpoint.tensor_names().map(str::to_owned).collect();
    names.sort_by(|a, b| natural_order(a, b));
    names.push("model.layers.0.mlp.up_proj.weight".to_owned());
    names.push(String::new());
    for name in &names {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let _ = (checkpoint.contains(name), checkpoint.dense(name).is_ok());
        for in_features in [None, Some(0), Some(64), Some(128), Some(usize::MAX)] {
            for weight in [checkpoint.tensor(name, in_features), checkpoint.weight(module, in_features)] {
                match weight {
                    Ok(weight) => look_at(&weight),
                    Err(error) => drop(error.to_string()),
                }
            }
        }
    }
    let diff = diff::diff(&checkpoint, &checkpoint, &diff::DiffOptions::default());
    let _ = (diff.equal(), checkpoint.warnings());
    true
}

fn look_at(weight: &Weight) {
    let _ = (weight.dims(), weight.format_name(), format!("{weight:?}"));
    assert!(weight.size_in_bytes() < 1 << 40, "{weight:?} is larger than any input");
}

/// A fuzz target and a mutator that keeps what an input is made of.
#[macro_export]
macro_rules! reader_target {
    () => {
        libfuzzer_sys::fuzz_target!(|input: &[u8]| {
            if let Some(bundle) = $crate::Bundle::decode(input) {
                $crate::run(&bundle);
            }
        });

        libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
            if let Some(mut bundle) = $crate::Bundle::decode(&data[..size]).filter(|_| seed % 4 != 0) {
                $crate::mutate(&mut bundle, u64::from(seed));
                let bytes = bundle.encode();
                if bytes.len() <= max_size {
                    data[..bytes.len()].copy_from_slice(&bytes);
                    return bytes.len();
                }
            }
            libfuzzer_sys::fuzzer_mutate(data, size, max_size)
        });
    };
}
