//! Images, audio, and transformers of diffusion.

use super::transformers::models::*;
use super::Family;
use crate::{input, parse, tokens, Run};
use candle::{DType, Device, Module, Result, Tensor};
use serde_json::json;

/// Features of three texts and two images.
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
            let texts = model.get_text_features(&Tensor::cat(&texts, 0)?)?;
            Tensor::cat(&[texts, model.get_image_features(&input(&[2, 3, 32, 32], step))?], 0)
        }))
    })
    .with_optional(&["vision_model.embeddings.class_embedding"])
}

/// Scores of classes.
pub fn vit() -> Family {
    let config = json!({
        "hidden_act": "gelu", "image_size": 32, "patch_size": 8, "num_channels": 3, "qkv_bias": true,
    });
    Family::new(config, |config, vb| {
        let model = vit::Model::new(&parse(config)?, 10, vb)?;
        Ok(Box::new(move |step| model.forward(&input(&[2, 3, 32, 32], step))))
    })
}

/// Hidden states of an image, position by position.
pub fn siglip() -> Family {
    let config = json!({ "image_size": 32, "patch_size": 8, "hidden_act": "gelu_pytorch_tanh" });
    Family::new(config, |config, vb| {
        let model = siglip::VisionModel::new(&parse(config)?, false, vb)?;
        Ok(Box::new(move |step| model.forward(&input(&[1, 3, 32, 32], step))))
    })
    .with_copied(&[("position_embedding.weight", "scaled as an image")])
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
                &Tensor::zeros((1, 4, 3), DType::F32, &Device::Cpu)?,
                &Tensor::new(&[1. - step as f32 / 4.], &Device::Cpu)?,
                &input(&[1, 64], step),
                Some(&Tensor::new(&[3.5f32], &Device::Cpu)?),
            )
        });
        Ok(run)
    })
}

/// One step of a noisy image of 2x4 patches, which five vectors describe.
pub fn z_image() -> Family {
    let config = json!({
        "dim": 192, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 64,
        "axes_dims": [16, 16, 16], "axes_lens": [64, 16, 16], "use_accelerated_attn": false,
    });
    Family::new(config, |config, vb| {
        let model = z_image::transformer::ZImageTransformer2DModel::new(&parse(config)?, vb)?;
        Ok(Box::new(move |step| {
            let mask = Tensor::ones((1, 5), DType::U8, &Device::Cpu)?;
            let time = Tensor::new(&[step as f32 / 4.], &Device::Cpu)?;
            model.forward(&input(&[1, 16, 1, 4, 8], step), &time, &input(&[1, 5, 64], step), &mask)
        }))
    })
    .with_copied(&[("t_embedder.mlp.0.weight", "asked for its dtype")])
}

/// The U-Net: a block of convolutions with attention to five vectors, and one without.
pub fn stable_diffusion() -> Family {
    Family::new(json!({}), |_, vb| {
        use stable_diffusion::unet_2d::*;
        let block = |out_channels, use_cross_attn| BlockConfig {
            out_channels,
            use_cross_attn,
            attention_head_dim: 4,
        };
        let config = UNet2DConditionModelConfig {
            blocks: vec![block(64, Some(1)), block(128, None)],
            layers_per_block: 1,
            norm_num_groups: 8,
            cross_attention_dim: 128,
            use_linear_projection: true,
            ..Default::default()
        };
        let model = UNet2DConditionModel::new(vb, 4, 4, false, config)?;
        Ok(Box::new(move |step| {
            model.forward(&input(&[1, 4, 8, 8], step), 900. - 300. * step as f64, &input(&[1, 5, 128], step))
        }))
    })
}
