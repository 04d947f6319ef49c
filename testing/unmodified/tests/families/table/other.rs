//! An encoder of text, one of images, audio, and a diffusion transformer.

use super::transformers::models::*;
use super::Family;
use crate::{input, parse, tokens, Run};
use candle::{Device, Result, Tensor};
use serde_json::json;

pub fn bert() -> Family {
    let config = json!({
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "type_vocab_size": 2, "initializer_range": 0.02,
        "layer_norm_eps": 1e-12, "pad_token_id": 0, "model_type": "bert",
    });
    Family::new(config, |config, vb| {
        let model = bert::BertModel::load(vb, &parse(config)?)?;
        Ok(Box::new(move |step| {
            let ids = tokens(step..step + 7)?;
            model.forward(&ids, &ids.zeros_like()?, None)
        }))
    })
}

/// What it says about two images and three texts.
pub fn clip() -> Family {
    Family::new(json!({}), |_, vb| {
        let config = clip::ClipConfig {
            text_config: clip::text_model::ClipTextConfig {
                vocab_size: 101,
                embed_dim: 64,
                activation: clip::text_model::Activation::QuickGelu,
                intermediate_size: 128,
                max_position_embeddings: 16,
                pad_with: None,
                num_hidden_layers: 2,
                num_attention_heads: 4,
                projection_dim: 64,
            },
            vision_config: clip::vision_model::ClipVisionConfig {
                embed_dim: 128,
                activation: clip::text_model::Activation::QuickGelu,
                intermediate_size: 128,
                num_hidden_layers: 2,
                num_attention_heads: 4,
                projection_dim: 64,
                num_channels: 3,
                image_size: 32,
                patch_size: 8,
            },
            logit_scale_init_value: 2.6592,
            image_size: 32,
        };
        let model = clip::ClipModel::new(vb, &config)?;
        Ok(Box::new(move |step| {
            let texts =
                (0..3).map(|text| tokens(step + text..step + text + 7)).collect::<Result<Vec<_>>>()?;
            Ok(model.forward(&input(&[2, 3, 32, 32], step), &Tensor::cat(&texts, 0)?)?.0)
        }))
    })
    .with_optional(&["vision_model.embeddings.class_embedding"])
}

/// Hears something, and writes more of a text in each step.
pub fn whisper() -> Family {
    let config = json!({
        "num_mel_bins": 16, "max_source_positions": 24, "d_model": 64, "encoder_attention_heads": 4,
        "encoder_layers": 2, "decoder_attention_heads": 4, "decoder_layers": 2, "max_target_positions": 16,
    });
    Family::new(config, |config, vb| {
        let mut model = whisper::model::Whisper::load(&vb, parse(config)?)?;
        let heard = model.encoder.forward(&input(&[1, 16, 48], 0), true)?;
        Ok(Box::new(move |step| {
            let hidden = model.decoder.forward(&tokens(0..5 + step)?, &heard, step == 0)?;
            model.decoder.final_linear(&hidden)
        }))
    })
    .with_read_dense(&[("decoder.embed_positions.weight", "rows of a tensor, no layer")])
    .with_copied(&[("decoder.embed_tokens.weight", "multiplied by the model itself, for logits")])
}

/// One step of a noisy image of 2x3 patches, which four tokens describe.
pub fn flux() -> Family {
    Family::new(json!({}), |_, vb| {
        let config = flux::model::Config {
            in_channels: 64,
            vec_in_dim: 64,
            context_in_dim: 128,
            hidden_size: 64,
            mlp_ratio: 2.0,
            num_heads: 2,
            depth: 2,
            depth_single_blocks: 2,
            axes_dim: vec![8, 12, 12],
            theta: 10_000,
            qkv_bias: true,
            guidance_embed: true,
        };
        let model = flux::model::Flux::new(&config, vb)?;
        let run: Run = Box::new(move |step| {
            let places: Vec<_> =
                (0..6u32).flat_map(|index| [0., (index / 3) as f32, (index % 3) as f32]).collect();
            flux::WithForward::forward(
                &model,
                &input(&[1, 6, 64], step),
                &Tensor::from_vec(places, (1, 6, 3), &Device::Cpu)?,
                &input(&[1, 4, 128], step),
                &Tensor::zeros((1, 4, 3), candle::DType::F32, &Device::Cpu)?,
                &Tensor::new(&[1. - step as f32 / 4.], &Device::Cpu)?,
                &input(&[1, 64], step),
                Some(&Tensor::new(&[3.5f32], &Device::Cpu)?),
            )
        });
        Ok(run)
    })
}
