//! An unmodified candle-transformers model on the decoded checkpoint against ours on the packed one.

mod common;

use candle_core::{DType, Device, Tensor};
use candle_quant::models::Model;
use candle_quant::VarBuilder;
use candle_transformers::models::qwen3;
use common::{distance, open, reference};

/// candle's config from the checkpoint's, which leaves out what mlx-lm takes for granted.
fn candle_config(config: &serde_json::Value) -> qwen3::Config {
    let mut config = config.clone();
    for (key, value) in [
        ("attention_bias", false.into()),
        ("use_sliding_window", false.into()),
        ("max_window_layers", 2.into()),
        ("hidden_act", "silu".into()),
    ] {
        config[key] = value;
    }
    serde_json::from_value(config).unwrap()
}

#[test]
fn candle_transformers_qwen3_is_the_oracle() {
    for name in ["qwen3-affine-b4-g64-sharded", "qwen3-affine-b3-g64", "qwen3-nvfp4", "qwen3-mxfp8"] {
        let checkpoint = open(name);
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        let config = candle_config(checkpoint.config());
        let mut oracle = qwen3::ModelForCausalLM::new(&config, vb.dense()).unwrap();
        let mut ours = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();

        let (tokens, _) = reference(name);
        let (mut expected, mut found) = (vec![], vec![]);
        for offset in 0..tokens.dim(1).unwrap() {
            let token = tokens.narrow(1, offset, 1).unwrap();
            expected.push(oracle.forward(&token, offset).unwrap());
            found.push(ours.forward(&token, offset).unwrap());
        }
        let distance = distance(&Tensor::cat(&found, 1).unwrap(), &Tensor::cat(&expected, 1).unwrap());
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
    }
}
