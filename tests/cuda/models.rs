//! Whole models, against the logits of mlx-lm.

use crate::common::{distance, open, reference, FIXTURES};
use crate::device;
use candle_core::{DType, Device, Tensor};
use candle_quant_models::Model;

/// With experts, in fp32: rounding to 16 bits makes some tokens choose others.
#[test]
fn logits_of_experts_are_those_of_mlx_lm() {
    let Some(device) = device() else { return };
    for name in ["qwen3moe-affine-b4-g64", "qwen3moe-nvfp4-global_scale"] {
        let (tokens, expected) = reference(name);
        let tokens = tokens.to_device(&device).unwrap();
        let mut model = Model::load(&open(name), DType::F32, &device).unwrap();
        let logits = model.forward(&tokens, 0).unwrap().to_device(&Device::Cpu).unwrap();
        let distance = distance(&logits, &expected);
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
    }
}

/// In one piece, and the second half token by token.
#[test]
fn logits_are_those_of_mlx_lm() {
    let Some(device) = device() else { return };
    for name in FIXTURES {
        let (tokens, expected) = reference(name);
        let tokens = tokens.to_device(&device).unwrap();
        let len = tokens.dim(1).unwrap();
        let on_cpu = |logits: &Tensor| logits.to_device(&Device::Cpu).unwrap();
        let mut model = Model::load(&open(name), DType::F32, &device).unwrap();
        let distance_of_f32 = distance(&on_cpu(&model.forward(&tokens, 0).unwrap()), &expected);
        assert!(
            distance_of_f32.max <= 3e-4 && distance_of_f32.other_argmax == 0,
            "{name}: {distance_of_f32:?}"
        );
        // Attention rounds its scores to the dtype of the activations here.
        for (dtype, bound) in [(DType::F16, 0.006), (DType::BF16, 0.05)] {
            let mut model = Model::load(&open(name), dtype, &device).unwrap();
            let mut pieces = vec![model.forward(&tokens.narrow(1, 0, len / 2).unwrap(), 0).unwrap()];
            for offset in len / 2..len {
                pieces.push(model.forward(&tokens.narrow(1, offset, 1).unwrap(), offset).unwrap());
            }
            let distance = distance(&on_cpu(&Tensor::cat(&pieces, 1).unwrap()), &expected);
            assert!(distance.rms <= bound, "{name} {dtype:?}: {distance:?}");
        }
    }
}
