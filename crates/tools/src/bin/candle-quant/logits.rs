//! The `logits` subcommand.

use super::adapters::AdapterOptions;
use super::model::parse_dtype;
use super::names;
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_quant::{ActivationPrecision, Error, VarBuilder};
use candle_quant_models::{Config, Model, ModelOptions};
use candle_quant_tools::staging::{check_file, write_file};
use std::collections::HashMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Options {
    /// The checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
    path: PathBuf,
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', required = true)]
    tokens: Vec<u32>,
    /// The file to write: `tokens` U32 [T] and `logits` F32 [T, vocabulary].
    #[arg(long)]
    out: PathBuf,
    /// Precision of activations: f32, f16 or bf16.
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    dtype: DType,
    /// Digits of activations in integer matmuls: exact, 16 or 8 bits; fewer take less time
    /// [default: exact, or what CANDLE_QUANT_ACTIVATIONS says].
    #[arg(long)]
    activations: Option<ActivationPrecision>,
    /// The most tokens, be it more or less than the model is made for [default: what its config states].
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    #[command(flatten)]
    adapters: AdapterOptions,
}

/// Tokens that are computed at once.
const CHUNK: usize = 256;

pub fn run(options: &Options) -> Result<()> {
    check_file(&options.out)?;
    if let Some(activations) = options.activations {
        activations.set();
    }
    let device = Device::Cpu;
    let checkpoint = names::open(&options.path)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let vb = VarBuilder::from_checkpoint(&checkpoint, options.dtype, &device);
    let model = ModelOptions { context: options.context, ..Default::default() };
    let adapters = options.adapters.open()?;
    let mut model = Model::with_options(&config, vb, model)?;
    adapters.add_to(&model)?;
    let (needed, context) = (options.tokens.len(), model.context());
    if needed > context {
        return Err(Error::OutOfContext { needed, context }.into());
    }
    model.expect_tokens(needed);
    let mut logits: Vec<f32> = Vec::new();
    for chunk in options.tokens.chunks(CHUNK) {
        let ids = Tensor::new(chunk, &device)?.unsqueeze(0)?;
        let of_chunk = model.forward(&ids, model.cached_tokens())?.to_dtype(DType::F32)?;
        logits.extend(of_chunk.flatten_all()?.to_vec1::<f32>()?);
    }
    let tokens = Tensor::new(options.tokens.as_slice(), &device)?;
    let logits = Tensor::from_vec(logits, (needed, config.vocab_size), &device)?;
    let tensors = HashMap::from([("tokens", tokens), ("logits", logits)]);
    Ok(write_file(&options.out, &safetensors::serialize(&tensors, None)?)?)
}
