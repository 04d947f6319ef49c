//! Packed layers in candle_nn's place on a CUDA device, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the test says so and passes, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

#[path = "../../../tests/common/gpu.rs"]
mod gpu;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_quant_nn::{dense_copies, embedding, linear_no_bias, Linear, LoadedAs, VarBuilder};

mod model {
    // What the line of Cargo.toml does.
    use candle_quant_nn as candle_nn;

    use candle_nn::{embedding, linear, linear_no_bias, Embedding, Linear, VarBuilder};

    include!("../../../tests/layers/port/llama.rs");
}

const FIXTURES: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/mlx/");

fn open(name: &str, device: &Device) -> Result<VarBuilder<'static>> {
    let file = format!("{FIXTURES}{name}/model.safetensors");
    // SAFETY: fixtures do not change.
    unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, device) }
}

/// An embedding, its tied head, and a layer on both.
fn outputs(name: &str, device: &Device) -> Result<[Vec<f32>; 3]> {
    let vb = open(name, device)?;
    let (vocabulary, hidden) =
        (vb.checkpoint().unwrap().config()["vocab_size"].as_u64().unwrap() as usize, 128);
    let table = embedding(vocabulary, hidden, vb.pp("model.embed_tokens"))?;
    let weight = table.embeddings().clone();
    assert!(weight.device().same_device(device) && weight.dims() == [vocabulary, hidden], "{weight:?}");
    for computed in [weight.sqr(), weight.sum_all(), weight.t()?.contiguous()] {
        assert!(computed.is_err(), "{name}: {computed:?}");
    }
    let head = Linear::new(weight, None);
    let up = linear_no_bias(hidden, 256, vb.pp("model.layers.0.mlp.up_proj"))?;
    let rows = table.forward(&Tensor::new(&[[1u32, 5, 21]], device)?)?;
    let [logits, y] = [head.forward(&rows)?, up.forward(&rows)?];
    assert!(vb.loaded().values().all(|form| *form == LoadedAs::Packed), "{:?}", vb.loaded());
    assert_eq!(dense_copies(), 0);
    let flat = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    Ok([flat(&rows)?, flat(&logits)?, flat(&y)?])
}

#[test]
fn layers_are_packed_on_a_device() -> Result<()> {
    let Some(device) = gpu::device() else { return Ok(()) };
    for name in ["qwen3-affine-b4-g64", "qwen3-nvfp4"] {
        let (expected, found) = (outputs(name, &Device::Cpu)?, outputs(name, &device)?);
        assert_eq!(expected[0], found[0], "{name}: rows of the embedding");
        for (expected, found) in expected.iter().zip(&found).skip(1) {
            let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            assert!(largest > 0.);
            for (expected, found) in expected.iter().zip(found) {
                assert!((expected - found).abs() <= 1e-5 * largest, "{name}: {expected} and {found}");
            }
        }
    }
    // Whoever computes with the tensor of a layer gets a copy, on the device.
    let layer = linear_no_bias(128, 256, open("qwen3-nvfp4", &device)?.pp("model.layers.0.mlp.up_proj"))?;
    let dense = open("qwen3-nvfp4", &Device::Cpu)?.get((256, 128), "model.layers.0.mlp.up_proj.weight")?;
    assert!(layer.weight().device().same_device(&device));
    let copy = layer.weight().to_device(&Device::Cpu)?;
    assert_eq!(copy.to_vec2::<f32>()?, dense.to_vec2::<f32>()?);
    assert_eq!(dense_copies(), 1);
    Ok(())
}

/// Of a prompt, by a model that was written for candle_nn. Every matrix stays packed.
fn logits(vb: &VarBuilder) -> Result<Vec<f32>> {
    let config = vb.checkpoint().unwrap().config().clone();
    let model = model::Model::new(&serde_json::from_value(config).unwrap(), vb.clone())?;
    let is_packed = |(name, form): (String, LoadedAs)| name.ends_with("norm") || form == LoadedAs::Packed;
    assert!(vb.loaded().into_iter().all(is_packed), "{:?}", vb.loaded());
    let ids = Tensor::new(&[[1u32, 2, 3, 5, 8, 13, 21]], vb.device())?;
    model.forward(&ids)?.flatten_all()?.to_vec1()
}

#[test]
fn a_model_of_candle_nn_runs_packed_on_a_device() -> Result<()> {
    let Some(device) = gpu::device() else { return Ok(()) };
    for name in ["qwen3-affine-b4-g64", "llama-untied-mxfp4"] {
        let vb = open(name, &Device::Cpu)?;
        let expected = logits(&vb)?;
        // One that was opened for the CPU can be sent to a device.
        for vb in [open(name, &device)?, vb.set_device(device.clone())] {
            let squares = |values: &mut dyn Iterator<Item = f32>| {
                values.map(|value| f64::from(value).powi(2)).sum::<f64>()
            };
            let found = logits(&vb)?;
            let difference =
                squares(&mut expected.iter().zip(&found).map(|(expected, found)| expected - found));
            let relative = (difference / squares(&mut expected.iter().copied())).sqrt();
            assert!(relative < 1e-5, "{name}: {relative:e}");
        }
    }
    Ok(())
}
