//! GGUF files of the same shapes, for candle and llama.cpp: random blocks, written by candle's writer.

use crate::files::SPREAD;
use crate::shapes::{Shape, Weight};
use anyhow::Result;
use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::f16;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// Which types the weights of a file have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// All are Q4_K.
    Q4K,
    /// As llama.cpp's Q4_K_M: the embedding, and of some layers `attn_v` and `ffn_down`, are Q6_K.
    Q4KM,
    /// All are Q8_0.
    Q8,
}

impl Mix {
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4K => "Q4_K",
            Self::Q4KM => "Q4_K_M",
            Self::Q8 => "Q8_0",
        }
    }

    /// `general.file_type`, which tools show.
    fn file_type(self) -> u32 {
        match self {
            Self::Q4K => 14, // Q4_K_S
            Self::Q4KM => 15,
            Self::Q8 => 7,
        }
    }

    fn dtype(self, name: &str, layers: usize) -> GgmlDType {
        match self {
            Self::Q8 => GgmlDType::Q8_0,
            Self::Q4K => GgmlDType::Q4K,
            Self::Q4KM => {
                let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
                // The first and the last eighth of the layers, and every third in between.
                let of_more = |layer: usize| {
                    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
                };
                let mixed = name.contains("attn_v") || name.contains("ffn_down");
                match layer {
                    None => GgmlDType::Q6K,
                    Some(layer) if mixed && of_more(layer) => GgmlDType::Q6K,
                    Some(_) => GgmlDType::Q4K,
                }
            }
        }
    }
}

pub fn write(path: &Path, shape: &Shape, mix: Mix) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(2);
    let mut tensors = Vec::new();
    for weight in shape.weights() {
        let tensor = tensor(&weight, mix.dtype(&weight.gguf, shape.layers), &mut rng)?;
        tensors.push((weight.gguf, tensor));
    }
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let text = |text: &str| Value::String(text.to_string());
    let number = |number: usize| Value::U32(number as u32);
    let metadata = [
        ("general.architecture", text("qwen3")),
        ("general.name", text(shape.name)),
        ("general.file_type", Value::U32(mix.file_type())),
        // candle's: the dtype of tables of angles. F32.
        ("general.dtype", Value::U32(0)),
        ("qwen3.block_count", number(shape.layers)),
        ("qwen3.context_length", number(shape.context)),
        ("qwen3.embedding_length", number(shape.hidden)),
        ("qwen3.feed_forward_length", number(shape.inner)),
        ("qwen3.attention.head_count", number(shape.heads)),
        ("qwen3.attention.head_count_kv", number(shape.kv_heads)),
        ("qwen3.attention.key_length", number(shape.head_dim)),
        ("qwen3.attention.value_length", number(shape.head_dim)),
        ("qwen3.attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
        ("qwen3.rope.freq_base", Value::F32(1e6)),
        ("qwen3.vocab_size", number(shape.vocabulary)),
        // llama.cpp loads files without tokens if they say so.
        ("tokenizer.ggml.model", text("none")),
    ];
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(())
}

fn tensor(weight: &Weight, dtype: GgmlDType, rng: &mut StdRng) -> Result<QTensor> {
    let Some(k) = weight.k else {
        let ones = Tensor::ones(weight.n, candle_core::DType::F32, &Device::Cpu)?;
        return Ok(QTensor::quantize(&ones, GgmlDType::F32)?);
    };
    let mut data = vec![0; weight.n * k / dtype.block_size() * dtype.type_size()];
    rng.fill_bytes(&mut data);
    for block in data.chunks_exact_mut(dtype.type_size()) {
        let vary = rng.random_range(0.5f32..1.5);
        // Standard deviations of uniform codes, and of those times uniform scales.
        match dtype {
            GgmlDType::Q8_0 => put(block, 0, SPREAD / 73.9 * vary),
            GgmlDType::Q4K => {
                // Eight pairs of a scale and a minimum, of 6 bits, in 12 bytes. All minimums equal their scales, and
                // are worth 7.5 codes, so that the mean is 0.
                let step = SPREAD / (4.6 * 36.4) * vary;
                put(block, 0, step);
                put(block, 2, step * 7.5);
                for at in 4..8 {
                    block[at + 4] = block[at];
                    block[at + 8] = (block[at + 8] & 15) * 17;
                }
            }
            GgmlDType::Q6K => put(block, block.len() - 2, SPREAD / (18.5 * 73.9) * vary),
            other => anyhow::bail!("no random blocks of {other:?}"),
        }
    }
    Ok(qtensor_from_ggml(dtype, &data, vec![weight.n, k], &Device::Cpu)?)
}

fn put(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}
