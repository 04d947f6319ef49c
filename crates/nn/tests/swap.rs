//! A model written for candle_nn runs with this crate in its place, on packed weights, without a changed line.

use candle_core::{DType, Device, Module, Tensor};
use candle_quant::{Checkpoint, VarBuilder};

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

#[test]
fn a_model_of_candle_nn_runs_packed() {
    let fixtures = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/mlx/");
    for name in ["llama-untied-bias-b4-g64-f16", "llama-untied-mxfp4", "qwen3-affine-b4-g64", "qwen3-nvfp4"] {
        let checkpoint = Checkpoint::open(format!("{fixtures}{name}")).unwrap();
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        let config = || serde_json::to_value(checkpoint.config()).unwrap();
        let dense =
            original::Model::new(&serde_json::from_value(config()).unwrap(), vb.clone().dense()).unwrap();
        let packed = swapped::Model::new(&serde_json::from_value(config()).unwrap(), vb).unwrap();
        assert!(packed.embed_tokens.embeddings().quantized().is_some(), "{name}");

        let ids = Tensor::new(&[[1u32, 2, 3, 5, 8, 13, 21]], &Device::Cpu).unwrap();
        let logits = |logits: Tensor| logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (dense, packed) = (logits(dense.forward(&ids).unwrap()), logits(packed.forward(&ids).unwrap()));
        let square = |sum: f64, value: f32| sum + f64::from(value).powi(2);
        let differences = dense.iter().zip(&packed).map(|(dense, packed)| dense - packed);
        let relative = (differences.fold(0., square) / dense.iter().copied().fold(0., square)).sqrt();
        assert!(relative < 1e-5, "{name}: {relative:e}");
    }
}
