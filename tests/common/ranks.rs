//! Models over several ranks against themselves as one.
#![allow(dead_code)] // each test binary uses its own part

use crate::common::distance;
use crate::packed::bits;
use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::{run, ExpertSplit};
use candle_quant::{Checkpoint, Result, VarBuilder};
use candle_quant_models::{Config, Model};
use serde_json::Value;
use std::collections::HashMap;
use tempfile::TempDir;

pub const RANKS: [usize; 5] = [1, 2, 3, 4, 8];
pub const SPLITS: [ExpertSplit; 2] = [ExpertSplit::Inside, ExpertSplit::Across];

/// A checkpoint of these tensors.
pub fn written(tensors: &HashMap<String, Tensor>, config: &Value) -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(tensors, dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

/// A prompt and then token by token, as in generation: the logits of all positions.
pub fn logits(model: &mut Model, tokens: &Tensor) -> Result<Tensor> {
    let len = tokens.dim(1)?;
    let mut parts = vec![model.forward(&tokens.narrow(1, 0, len - 4)?, 0)?];
    for offset in len - 4..len {
        parts.push(model.forward(&tokens.narrow(1, offset, 1)?, offset)?);
    }
    Ok(Tensor::cat(&parts, 1)?)
}

/// The logits of all ranks.
pub fn over(
    checkpoint: &Checkpoint,
    ranks: usize,
    how: ExpertSplit,
    tokens: &Tensor,
    dtype: DType,
) -> Vec<Tensor> {
    let (checkpoint, tokens) = (checkpoint.clone(), tokens.clone());
    let of_rank = run(&vec![Device::Cpu; ranks], move |rank| {
        let config = Config::from_json(checkpoint.config())?;
        let vb = VarBuilder::sharded(&checkpoint, &rank, dtype).split_experts(how);
        logits(&mut Model::new(&config, vb)?, &tokens)
    });
    of_rank.unwrap()
}

/// Compares all ranks with one, experts split in both ways; returns the logits of that.
pub fn check(name: &str, checkpoint: &Checkpoint, tokens: &Tensor) -> Tensor {
    let mut alone = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    let alone = logits(&mut alone, tokens).unwrap();
    let has_experts = Config::from_json(checkpoint.config()).unwrap().moe.is_some();
    let splits = if has_experts { &SPLITS[..] } else { &SPLITS[..1] };
    for (ranks, how) in RANKS.into_iter().flat_map(|ranks| splits.iter().map(move |how| (ranks, *how))) {
        let of_ranks = over(checkpoint, ranks, how, tokens, DType::F32);
        assert_eq!(of_ranks.len(), ranks);
        for logits in &of_ranks {
            assert_eq!(bits(logits), bits(&of_ranks[0]), "{name} over {ranks} {how}: ranks differ");
        }
        let distance = distance(&of_ranks[0], &alone);
        assert!(
            distance.max <= 3e-4 && distance.other_argmax == 0,
            "{name} over {ranks} {how}: {distance:?}"
        );
        if ranks == 1 {
            assert_eq!(bits(&of_ranks[0]), bits(&alone), "{name} {how}");
        }
    }
    alone
}
