//! The Qwen3 architecture from differentiable basic ops: candle's fused RMSNorm and RoPE have no gradient.

use anyhow::Result;
use candle_core::{DType, Device, Module, Tensor, Var, D};
use candle_nn::{Linear, VarBuilder, VarMap};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Model dimensions, named as in `config.json`.
#[derive(Debug, Clone)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub max_position_embeddings: usize,
}

impl Config {
    /// About 1.9 M parameters; every quantization group size divides every K.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 640,
            hidden_size: 256,
            intermediate_size: 512,
            num_hidden_layers: 3,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 64,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            max_position_embeddings: 512,
        }
    }

    /// Every parameter's name in a Hugging Face checkpoint and its shape.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let q = self.num_attention_heads * self.head_dim;
        let kv = self.num_key_value_heads * self.head_dim;
        let mut all = vec![("model.embed_tokens.weight".to_string(), vec![self.vocab_size, hidden])];
        for layer in 0..self.num_hidden_layers {
            for (name, shape) in [
                ("input_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![q, hidden]),
                ("self_attn.k_proj", vec![kv, hidden]),
                ("self_attn.v_proj", vec![kv, hidden]),
                ("self_attn.o_proj", vec![hidden, q]),
                ("self_attn.q_norm", vec![self.head_dim]),
                ("self_attn.k_norm", vec![self.head_dim]),
                ("post_attention_layernorm", vec![hidden]),
                ("mlp.gate_proj", vec![inner, hidden]),
                ("mlp.up_proj", vec![inner, hidden]),
                ("mlp.down_proj", vec![hidden, inner]),
            ] {
                all.push((format!("model.layers.{layer}.{name}.weight"), shape));
            }
        }
        all.push(("model.norm.weight".to_string(), vec![hidden]));
        all
    }

    /// Trainable f32 parameters drawn from `seed` (candle's own CPU generator cannot be seeded).
    pub fn init(&self, seed: u64, device: &Device) -> Result<VarMap> {
        let mut rng = StdRng::seed_from_u64(seed);
        let vars = VarMap::new();
        for (name, shape) in self.parameters() {
            let tensor = match shape.as_slice() {
                [n] => Tensor::ones(*n, DType::F32, device)?,
                dims => {
                    let fan_in = dims[dims.len() - 1] as f64;
                    // Layers that write to the residual stream start small, so that depth does not add up.
                    let std = if name.contains("embed_tokens") {
                        0.04
                    } else if name.contains("o_proj") || name.contains("down_proj") {
                        (fan_in * 2.0 * self.num_hidden_layers as f64).sqrt().recip()
                    } else {
                        fan_in.sqrt().recip()
                    };
                    let count = dims.iter().product();
                    let values: Vec<f32> = (0..count).map(|_| (normal(&mut rng) * std) as f32).collect();
                    Tensor::from_vec(values, dims, device)?
                }
            };
            let mut data = vars.data().lock().map_err(|_| anyhow::anyhow!("poisoned lock"))?;
            data.insert(name, Var::from_tensor(&tensor)?);
        }
        Ok(vars)
    }
}

/// A standard normal value (Box-Muller).
fn normal(rng: &mut StdRng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    fn new(size: usize, eps: f64, vb: VarBuilder) -> candle_core::Result<Self> {
        let weight = vb.get(size, "weight")?;
        Ok(Self { weight, eps })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?.sqrt()?.recip()?;
        x.broadcast_mul(&scale)?.broadcast_mul(&self.weight)
    }
}

fn linear(k: usize, n: usize, vb: VarBuilder) -> candle_core::Result<Linear> {
    Ok(Linear::new(vb.get((n, k), "weight")?, None))
}

/// Rotation angles and causal mask, shared by all layers.
pub struct Positions {
    /// `[T, head_dim]`, the half repeated.
    cos: Tensor,
    sin: Tensor,
    /// `[T, T]`, zero where a row may look, a large negative number elsewhere.
    mask: Tensor,
}

impl Positions {
    pub fn new(cfg: &Config, len: usize, device: &Device) -> Result<Self> {
        let half = cfg.head_dim / 2;
        let angle = |t: usize, i: usize| {
            let frequency = cfg.rope_theta.powf(-((i % half) as f64) / half as f64);
            t as f64 * frequency
        };
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..len * cfg.head_dim)
                .map(|at| f(angle(at / cfg.head_dim, at % cfg.head_dim)) as f32)
                .collect();
            Tensor::from_vec(values, (len, cfg.head_dim), device)
        };
        let mask: Vec<f32> = (0..len * len).map(|at| if at % len > at / len { -1e9 } else { 0.0 }).collect();
        Ok(Self {
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
            mask: Tensor::from_vec(mask, (len, len), device)?,
        })
    }

    /// Rotates `x` `[B, heads, T, head_dim]` (half-split pairing: element i with i + head_dim / 2).
    fn rotate(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let half = x.dim(D::Minus1)? / 2;
        let first = x.narrow(D::Minus1, 0, half)?;
        let second = x.narrow(D::Minus1, half, half)?;
        let turned = Tensor::cat(&[second.neg()?, first], D::Minus1)?;
        x.broadcast_mul(&self.cos)? + turned.broadcast_mul(&self.sin)?
    }
}

struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Attention {
    fn new(cfg: &Config, vb: VarBuilder) -> candle_core::Result<Self> {
        let q = cfg.num_attention_heads * cfg.head_dim;
        let kv = cfg.num_key_value_heads * cfg.head_dim;
        Ok(Self {
            q_proj: linear(cfg.hidden_size, q, vb.pp("q_proj"))?,
            k_proj: linear(cfg.hidden_size, kv, vb.pp("k_proj"))?,
            v_proj: linear(cfg.hidden_size, kv, vb.pp("v_proj"))?,
            o_proj: linear(q, cfg.hidden_size, vb.pp("o_proj"))?,
            q_norm: RmsNorm::new(cfg.head_dim, cfg.rms_norm_eps, vb.pp("q_norm"))?,
            k_norm: RmsNorm::new(cfg.head_dim, cfg.rms_norm_eps, vb.pp("k_norm"))?,
            heads: cfg.num_attention_heads,
            kv_heads: cfg.num_key_value_heads,
            head_dim: cfg.head_dim,
        })
    }

    fn forward(&self, x: &Tensor, positions: &Positions) -> candle_core::Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        let split = |x: Tensor, heads: usize| x.reshape((batch, len, heads, self.head_dim));
        let q = split(self.q_proj.forward(x)?, self.heads)?;
        let k = split(self.k_proj.forward(x)?, self.kv_heads)?;
        let v = split(self.v_proj.forward(x)?, self.kv_heads)?.transpose(1, 2)?.contiguous()?;
        // The softmax scale goes into q, which is smaller than the scores.
        let q =
            (self.q_norm.forward(&q)?.transpose(1, 2)?.contiguous()? * (self.head_dim as f64).powf(-0.5))?;
        let k = self.k_norm.forward(&k)?.transpose(1, 2)?.contiguous()?;
        let (q, k) = (positions.rotate(&q)?, positions.rotate(&k)?);
        // The query heads that share a key/value head become extra rows of one product.
        let rows = self.heads / self.kv_heads;
        let q = q.reshape((batch, self.kv_heads, rows * len, self.head_dim))?;
        let scores = q.matmul(&k.t()?)?.reshape((batch, self.heads, len, len))?;
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(&positions.mask)?, D::Minus1)?;
        let y = weights
            .reshape((batch, self.kv_heads, rows * len, len))?
            .matmul(&v)?
            .reshape((batch, self.heads, len, self.head_dim))?
            .transpose(1, 2)?
            .reshape((batch, len, self.heads * self.head_dim))?;
        self.o_proj.forward(&y)
    }
}

struct Layer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Layer {
    fn new(cfg: &Config, vb: VarBuilder) -> candle_core::Result<Self> {
        let (hidden, inner, eps) = (cfg.hidden_size, cfg.intermediate_size, cfg.rms_norm_eps);
        let mlp = vb.pp("mlp");
        Ok(Self {
            input_layernorm: RmsNorm::new(hidden, eps, vb.pp("input_layernorm"))?,
            self_attn: Attention::new(cfg, vb.pp("self_attn"))?,
            post_attention_layernorm: RmsNorm::new(hidden, eps, vb.pp("post_attention_layernorm"))?,
            gate_proj: linear(hidden, inner, mlp.pp("gate_proj"))?,
            up_proj: linear(hidden, inner, mlp.pp("up_proj"))?,
            down_proj: linear(inner, hidden, mlp.pp("down_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor, positions: &Positions) -> candle_core::Result<Tensor> {
        let x = (x + self.self_attn.forward(&self.input_layernorm.forward(x)?, positions)?)?;
        let h = self.post_attention_layernorm.forward(&x)?;
        let h = (self.gate_proj.forward(&h)?.silu()? * self.up_proj.forward(&h)?)?;
        x + self.down_proj.forward(&h)?
    }
}

/// The whole model; the embedding is also the output head.
pub struct Model {
    embed_tokens: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
}

impl Model {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let vb = vb.pp("model");
        let layers = (0..cfg.num_hidden_layers)
            .map(|i| Layer::new(cfg, vb.pp("layers").pp(i)))
            .collect::<candle_core::Result<_>>()?;
        Ok(Self {
            embed_tokens: vb.get((cfg.vocab_size, cfg.hidden_size), "embed_tokens.weight")?,
            layers,
            norm: RmsNorm::new(cfg.hidden_size, cfg.rms_norm_eps, vb.pp("norm"))?,
        })
    }

    /// Logits `[B, T, vocab]` of the token after each of `tokens` `[B, T]`.
    pub fn forward(&self, tokens: &Tensor, positions: &Positions) -> Result<Tensor> {
        let (batch, len) = tokens.dims2()?;
        let mut x = self.embed_tokens.index_select(&tokens.flatten_all()?, 0)?.reshape((batch, len, ()))?;
        for layer in &self.layers {
            x = layer.forward(&x, positions)?;
        }
        let x = self.norm.forward(&x)?;
        Ok(Linear::new(self.embed_tokens.clone(), None).forward(&x)?)
    }
}
