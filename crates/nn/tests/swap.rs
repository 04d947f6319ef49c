//! A model written for candle_nn runs with this crate in its place, on packed weights, without a changed line.

use candle_core::{DType, Device, Module, Tensor};
use candle_quant_nn::{dense_copies, Checkpoint, LoadedAs, VarBuilder};
use std::path::PathBuf;

mod original {
    use candle_nn::{embedding, linear, linear_no_bias, Embedding, Linear, VarBuilder};

    include!("../../../tests/layers/port/llama.rs");
}

mod swapped {
    // What the line of Cargo.toml does.
    use candle_quant_nn as candle_nn;

    use candle_nn::{embedding, linear, linear_no_bias, Embedding, Linear, VarBuilder};

    include!("../../../tests/layers/port/llama.rs");
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/mlx")).join(name)
}

fn config<T: serde::de::DeserializeOwned>(checkpoint: &Checkpoint) -> T {
    serde_json::from_value(checkpoint.config().clone()).unwrap()
}

fn logits(logits: candle_core::Result<Tensor>) -> Vec<f32> {
    logits.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
}

fn ids() -> Tensor {
    Tensor::new(&[[1u32, 2, 3, 5, 8, 13, 21]], &Device::Cpu).unwrap()
}

/// The norm of the differences to `expected`, relative to the norm of that.
fn distance(expected: &[f32], found: &[f32]) -> f64 {
    let square = |sum: f64, value: f32| sum + f64::from(value).powi(2);
    let differences = expected.iter().zip(found).map(|(expected, found)| expected - found);
    (differences.fold(0., square) / expected.iter().copied().fold(0., square)).sqrt()
}

/// How many weights were loaded packed, and how many dequantized.
fn forms(vb: &VarBuilder) -> (usize, usize) {
    let loaded = vb.loaded();
    let count = |form| loaded.values().filter(|loaded| **loaded == form).count();
    (count(LoadedAs::Packed), count(LoadedAs::Dequantized))
}

#[test]
fn a_model_of_candle_nn_runs_packed() {
    for (name, packed_weights) in [
        ("llama-untied-bias-b4-g64-f16", 16),
        ("llama-untied-mxfp4", 16),
        // The embedding is the output head too: one weight less.
        ("qwen3-affine-b4-g64", 15),
        ("qwen3-nvfp4", 15),
    ] {
        let folder = fixture(name);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        let dense = original::Model::new(&config(&checkpoint), vb.dense()).unwrap();
        let expected = logits(dense.forward(&ids()));

        // As candle's own examples open files. A builder that renames is another way to the same weights.
        let files = [folder.join("model.safetensors")];
        // SAFETY: fixtures do not change.
        let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu) }.unwrap();
        let renamed = vb.clone().rename_f(|name| name.trim_start_matches("outer.").to_owned());
        for (what, vb) in [("files", vb), ("renamed", renamed.pp("outer"))] {
            let packed = swapped::Model::new(&config(&checkpoint), vb.clone()).unwrap();
            assert_eq!(forms(&vb), (packed_weights, 0), "{name}, {what}");
            let relative = distance(&expected, &logits(packed.forward(&ids())));
            assert!(relative < 1e-5, "{name}, {what}: {relative:e}");
        }
    }
    assert_eq!(dense_copies(), 0);
}
