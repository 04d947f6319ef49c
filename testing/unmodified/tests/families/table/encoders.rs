//! Encoders of text, and decoders that look at what they encode.

use super::transformers::models::*;
use super::Family;
use crate::{decoder, parse, tokens};
use candle::{DType, Device, Tensor};
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

pub fn distilbert() -> Family {
    let config = json!({
        "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "activation": "gelu", "initializer_range": 0.02,
        "pad_token_id": 0, "model_type": "distilbert",
    });
    Family::new(config, |config, vb| {
        let model = distilbert::DistilBertModel::load(vb, &parse(config)?)?;
        let mask = Tensor::zeros((7, 7), DType::U8, &Device::Cpu)?; // 1: not to be seen
        Ok(Box::new(move |step| model.forward(&tokens(step..step + 7)?, &mask)))
    })
}

/// Fills in words: the output layer is the embedding.
pub fn modernbert() -> Family {
    let config = json!({
        "pad_token_id": 0, "global_attn_every_n_layers": 2, "global_rope_theta": 160000.0, "local_attention": 4,
        "local_rope_theta": 10000.0,
    });
    Family::new(config, |config, vb| {
        let model = modernbert::ModernBertForMaskedLM::load(vb, &parse(config)?)?;
        let mask = Tensor::ones((1, 7), DType::U32, &Device::Cpu)?;
        Ok(Box::new(move |step| model.forward(&tokens(step..step + 7)?, &mask)))
    })
    .with_read_dense(&[("tok_embeddings.weight", "asked for as a tensor, too, for the output layer")])
}

pub fn xlm_roberta() -> Family {
    let config = json!({
        "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "position_embedding_type": "absolute",
        "hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": 0,
    });
    Family::new(config, |config, vb| {
        let model = xlm_roberta::XLMRobertaForMaskedLM::new(&parse(config)?, vb)?;
        let mask = Tensor::ones((1, 7), DType::F32, &Device::Cpu)?;
        Ok(Box::new(move |step| {
            let ids = tokens(step..step + 7)?;
            model.forward(&ids, &mask, &ids.zeros_like()?, None, None, None)
        }))
    })
    .with_copied(&[("word_embeddings.weight", "multiplied by the model itself, for logits")])
}

/// Attends to relative positions, of which it has an embedding.
pub fn debertav2() -> Family {
    let config = json!({
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 0,
        "initializer_range": 0.02, "layer_norm_eps": 1e-7, "relative_attention": true, "max_relative_positions": -1,
        "pad_token_id": 0, "position_biased_input": false, "pos_att_type": "p2c|c2p", "position_buckets": 16,
        "share_att_key": true, "norm_rel_ebd": "layer_norm",
    });
    Family::new(config, |config, vb| {
        let model = debertav2::DebertaV2Model::load(vb, &parse(config)?)?;
        Ok(Box::new(move |step| model.forward(&tokens(step..step + 7)?, None, None)))
    })
    .with_copied(&[("rel_embeddings.weight", "normalized as a tensor, no layer")])
}

/// It has linear layers of its own, of tensors that it asks for by name.
pub fn t5() -> Family {
    let config = json!({
        "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
        "dropout_rate": 0.0, "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": true, "is_encoder_decoder": true, "pad_token_id": 0, "eos_token_id": 1,
    });
    Family::new(config, |config, vb| {
        let mut model = t5::T5ForConditionalGeneration::load(vb, &parse(config)?)?;
        let encoded = model.encode(&tokens(20..27)?)?;
        decoder(move |ids, _| model.decode(ids, &encoded))
    })
    .with_optional(&["shared.weight"])
    .with_read_dense(&[
        ("Attention.q.weight", T5),
        ("Attention.k.weight", T5),
        ("Attention.v.weight", T5),
        ("Attention.o.weight", T5),
        ("wi_0.weight", T5),
        ("wi_1.weight", T5),
        ("wo.weight", T5),
    ])
    .with_copied(&[("shared.weight", "multiplied by the model itself, for logits")])
}

const T5: &str = "a linear layer of its own";

pub fn marian() -> Family {
    let config = json!({
        "encoder_layers": 2, "encoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_layers": 2,
        "decoder_ffn_dim": 128, "decoder_attention_heads": 4, "use_cache": true, "is_encoder_decoder": true,
        "activation_function": "swish", "d_model": 64, "decoder_start_token_id": 1, "scale_embedding": true,
        "pad_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2, "share_encoder_decoder_embeddings": true,
    });
    Family::new(config, |config, vb| {
        let mut model = marian::MTModel::new(&parse(config)?, vb)?;
        let encoded = model.encoder().forward(&tokens(20..27)?, 0)?;
        decoder(move |ids, position| model.decode(ids, &encoded, position))
    })
}
