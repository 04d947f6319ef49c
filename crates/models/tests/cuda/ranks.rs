//! Models over several devices that speak through NCCL: the logits are those of the CPU alone.
#![cfg(feature = "nccl")]

use crate::common::{distance, open, reference};
use crate::gpu::nth_device;
use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::{run, ExpertSplit};
use candle_quant::VarBuilder;
use candle_quant_models::{Config, Model};

/// A prompt, and tokens after it.
fn check(name: &str, ranks: usize, how: ExpertSplit) {
    let devices: Option<Vec<Device>> = (0..ranks).map(nth_device).collect();
    let Some(devices) = devices else { return };
    let (tokens, expected) = reference(name);
    let (tokens, expected) = (tokens.narrow(1, 0, 12).unwrap(), expected.narrow(0, 0, 12).unwrap());
    let checkpoint = open(name);
    let of_ranks = run(&devices, move |rank| {
        let tokens = tokens.to_device(rank.device())?;
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32).split_experts(how);
        let mut model = Model::new(&Config::from_json(checkpoint.config())?, vb)?;
        let mut logits = vec![model.forward(&tokens.narrow(1, 0, 10)?, 0)?];
        for offset in 10..12 {
            logits.push(model.forward(&tokens.narrow(1, offset, 1)?, offset)?);
        }
        Ok(Tensor::cat(&logits, 1)?.to_device(&Device::Cpu)?)
    });
    let of_ranks = of_ranks.unwrap();
    assert_eq!(of_ranks.len(), ranks);
    for logits in of_ranks {
        let distance = distance(&logits, &expected);
        let what = format!("{name} over {ranks} {how}");
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{what}: {distance:?}");
    }
}

#[test]
fn dense_models() {
    for (name, ranks) in [("qwen3-affine-b4-g64", 2), ("llama-mixed-custom", 3), ("qwen3-nvfp4", 4)] {
        check(name, ranks, ExpertSplit::Inside);
    }
}

#[test]
fn models_with_experts() {
    for how in [ExpertSplit::Inside, ExpertSplit::Across] {
        check("qwen3moe-affine-b4-g64", 2, how);
        check("qwen3moe-nvfp4-global_scale", 3, how);
    }
}
