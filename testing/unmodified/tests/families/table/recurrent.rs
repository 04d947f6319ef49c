//! Decoders of text with a state besides attention, or in its place.

use super::transformers::models::*;
use super::Family;
use crate::{decoder, parse};
use candle::{DType, Device, Result, Tensor};
use serde_json::json;

/// Takes one token at a time.
pub fn mamba() -> Family {
    let config = json!({ "d_model": 64, "n_layer": 2, "pad_vocab_size_multiple": 8 });
    Family::new(config, |config, vb| {
        let config = parse(config)?;
        let model = mamba::Model::new(&config, vb)?;
        let mut state = mamba::State::new(1, &config, DType::F32, &Device::Cpu)?;
        decoder(move |ids, _| {
            let tokens = ids.squeeze(0)?.chunk(ids.elem_count(), 0)?;
            Tensor::stack(
                &tokens.iter().map(|token| model.forward(token, &mut state)).collect::<Result<Vec<_>>>()?,
                1,
            )
        })
    })
}

pub fn mamba2() -> Family {
    let config = json!({
        "num_hidden_layers": 2, "state_size": 16, "head_dim": 32, "expand": 2, "n_groups": 1, "pad_vocab_size_multiple": 16,
    });
    Family::new(config, |config, vb| {
        let config = parse(config)?;
        let model = mamba2::Model::new(&config, vb)?;
        let mut state = mamba2::State::new(1, &config, DType::F32, &Device::Cpu)?;
        decoder(move |ids, position| match position {
            0 => model.forward_prefill(ids, &mut state, 4),
            _ => model.forward(&ids.squeeze(0)?, &mut state)?.unsqueeze(1),
        })
    })
}

/// One layer of each kind.
pub fn recurrent_gemma() -> Family {
    let config = json!({
        "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 32, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "partial_rotary_factor": 0.5, "block_types": ["recurrent", "attention"],
    });
    Family::new(config, |config, vb| {
        let mut model = recurrent_gemma::Model::new(&parse(config)?, vb)?;
        decoder(move |ids, position| model.forward(ids, position))
    })
}

/// One layer of each kind.
pub fn lfm2() -> Family {
    let config = json!({
        "layer_types": ["conv", "full_attention"], "tie_embedding": true, "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 0.5,
    });
    Family::new(config, |config, vb| {
        let config = parse::<lfm2::Lfm2Config>(config)?.into_config(false);
        let mut cache = lfm2::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        let model = lfm2::Model::new(&config, vb)?;
        decoder(move |ids, position| model.forward(ids, position, &mut cache))
    })
}
