// A Llama or Qwen3 as one writes it for candle, without a cache. `port.rs` includes this text twice: the layers and
// `VarBuilder` are those of the `use` line above the `include!`.

use candle_core::{DType, Module, Result, Tensor, D};
use candle_nn::{ops::softmax_last_dim, rotary_emb::rope, RmsNorm};
use candle_transformers::utils::repeat_kv;
use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f32,
    #[serde(default)]
    pub attention_bias: bool,
    #[serde(default)]
    pub mlp_bias: bool,
    pub tie_word_embeddings: bool,
}

fn projection(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    if bias {
        linear(in_dim, out_dim, vb)
    } else {
        linear_no_bias(in_dim, out_dim, vb)
    }
}

fn norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new(vb.get(size, "weight")?, eps))
}

#[derive(Clone, Debug)]
pub struct Attention {
    pub q_proj: Linear,
    pub k_proj: Linear,
    pub v_proj: Linear,
    pub o_proj: Linear,
    /// Qwen3 has them.
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    cos: Tensor,
    sin: Tensor,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Attention {
    fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (hidden, head_dim, bias) = (config.hidden_size, config.head_dim, config.attention_bias);
        let head_norm = |name: &str| match vb.contains_tensor(&format!("{name}.weight")) {
            true => norm(head_dim, config.rms_norm_eps, vb.pp(name)).map(Some),
            false => Ok(None),
        };
        let frequency = |i: usize| config.rope_theta.powf(-((2 * i) as f32) / head_dim as f32);
        let frequencies: Vec<f32> = (0..head_dim / 2).map(frequency).collect();
        let frequencies = Tensor::new(frequencies, vb.device())?.unsqueeze(0)?;
        let positions = Tensor::arange(0f32, config.max_position_embeddings as f32, vb.device())?;
        let angles = positions.unsqueeze(1)?.matmul(&frequencies)?;
        Ok(Self {
            q_proj: projection(hidden, heads * head_dim, bias, vb.pp("q_proj"))?,
            k_proj: projection(hidden, kv_heads * head_dim, bias, vb.pp("k_proj"))?,
            v_proj: projection(hidden, kv_heads * head_dim, bias, vb.pp("v_proj"))?,
            o_proj: projection(heads * head_dim, hidden, bias, vb.pp("o_proj"))?,
            q_norm: head_norm("q_norm")?,
            k_norm: head_norm("k_norm")?,
            cos: angles.cos()?.to_dtype(vb.dtype())?,
            sin: angles.sin()?.to_dtype(vb.dtype())?,
            heads,
            kv_heads,
            head_dim,
        })
    }

    /// `[B, T, heads * head_dim]` to `[B, heads, T, head_dim]`.
    fn split(&self, x: Tensor, heads: usize) -> Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        x.reshape((batch, len, heads, self.head_dim))?.transpose(1, 2)?.contiguous()
    }

    fn turn(&self, x: Tensor, norm: Option<&RmsNorm>) -> Result<Tensor> {
        let x = match norm {
            Some(norm) => x.apply(norm)?,
            None => x,
        };
        rope(&x, &self.cos, &self.sin)
    }
}

impl Module for Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (_, len, _) = x.dims3()?;
        let q = self.turn(self.split(x.apply(&self.q_proj)?, self.heads)?, self.q_norm.as_ref())?;
        let k = self.turn(self.split(x.apply(&self.k_proj)?, self.kv_heads)?, self.k_norm.as_ref())?;
        let v = self.split(x.apply(&self.v_proj)?, self.kv_heads)?;
        let groups = self.heads / self.kv_heads;
        let (k, v) = (repeat_kv(k, groups)?, repeat_kv(v, groups)?);

        let scores = (q.matmul(&k.t()?)? / (self.head_dim as f64).sqrt())?;
        let past = Tensor::tril2(len, DType::U8, x.device())?.broadcast_as(scores.shape())?;
        let scores = past.where_cond(&scores, &(scores.zeros_like()? + f64::NEG_INFINITY)?)?;
        let y = softmax_last_dim(&scores)?.matmul(&v)?;
        y.transpose(1, 2)?.flatten_from(D::Minus2)?.apply(&self.o_proj)
    }
}

#[derive(Clone, Debug)]
pub struct Mlp {
    pub gate_proj: Linear,
    pub up_proj: Linear,
    pub down_proj: Linear,
}

impl Mlp {
    fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        Ok(Self {
            gate_proj: projection(hidden, inner, bias, vb.pp("gate_proj"))?,
            up_proj: projection(hidden, inner, bias, vb.pp("up_proj"))?,
            down_proj: projection(inner, hidden, bias, vb.pp("down_proj"))?,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (x.apply(&self.gate_proj)?.silu()? * x.apply(&self.up_proj)?)?.apply(&self.down_proj)
    }
}

#[derive(Clone, Debug)]
pub struct Layer {
    input_layernorm: RmsNorm,
    pub self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    pub mlp: Mlp,
}

impl Layer {
    fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        let norm = |name| norm(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::new(config, vb.pp("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, vb.pp("mlp"))?,
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + x.apply(&self.input_layernorm)?.apply(&self.self_attn)?)?;
        &x + x.apply(&self.post_attention_layernorm)?.apply(&self.mlp)?
    }
}

#[derive(Clone, Debug)]
pub struct Model {
    pub embed_tokens: Embedding,
    pub layers: Vec<Layer>,
    norm: RmsNorm,
    pub lm_head: Linear,
}

impl Model {
    pub fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        let (root, vb) = (vb.clone(), vb.pp("model"));
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let embed_tokens = embedding(vocabulary, hidden, vb.pp("embed_tokens"))?;
        let lm_head = if config.tie_word_embeddings {
            Linear::new(embed_tokens.embeddings().clone(), None)
        } else {
            linear_no_bias(hidden, vocabulary, root.pp("lm_head"))?
        };
        let layer = |i| Layer::new(config, vb.pp("layers").pp(i));
        Ok(Self {
            embed_tokens,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            norm: norm(hidden, config.rms_norm_eps, vb.pp("norm"))?,
            lm_head,
        })
    }
}

impl Module for Model {
    /// Ids `[B, T]` to logits `[B, T, vocabulary]`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = ids.apply(&self.embed_tokens)?;
        let x = self.layers.iter().try_fold(x, |x, layer| x.apply(layer))?;
        x.apply(&self.norm)?.apply(&self.lm_head)
    }
}
