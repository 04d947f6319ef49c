//! The `logits` subcommand.

use super::generate::parse_dtype;
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_quant::{ActivationPrecision, Checkpoint};
use candle_quant_models::Model;
use candle_quant_tools::staging::{check_file, write_file};
use std::collections::HashMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Options {
    /// The checkpoint's directory.
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
}

pub fn run(options: &Options) -> Result<()> {
    check_file(&options.out)?;
    if let Some(activations) = options.activations {
        activations.set();
    }
    let device = Device::Cpu;
    let mut model = Model::load(&Checkpoint::open(&options.path)?, options.dtype, &device)?;
    let tokens = Tensor::new(options.tokens.as_slice(), &device)?;
    let logits = model.forward(&tokens.unsqueeze(0)?, 0)?.squeeze(0)?.to_dtype(DType::F32)?;
    let tensors = HashMap::from([("tokens", tokens), ("logits", logits)]);
    Ok(write_file(&options.out, &safetensors::serialize(&tensors, None)?)?)
}
