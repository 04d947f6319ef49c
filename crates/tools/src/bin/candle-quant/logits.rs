//! The `logits` subcommand.

use super::generate::parse_dtype;
use anyhow::{bail, Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_quant::{ActivationPrecision, Checkpoint, Error, VarBuilder};
use candle_quant_models::{Config, Model, ModelOptions};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

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
    /// The most tokens, be it more or less than the model is made for [default: what its config states].
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
}

/// Tokens that are computed at once.
const CHUNK: usize = 256;

pub fn run(options: &Options) -> Result<()> {
    check_replaceable(&options.out)?;
    if let Some(activations) = options.activations {
        activations.set();
    }
    let device = Device::Cpu;
    let checkpoint = Checkpoint::open(&options.path)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let vb = VarBuilder::from_checkpoint(&checkpoint, options.dtype, &device);
    let model = ModelOptions { context: options.context, ..Default::default() };
    let mut model = Model::with_options(&config, vb, model)?;
    let (needed, context) = (options.tokens.len(), model.context());
    if needed > context {
        return Err(Error::OutOfContext { needed, context }.into());
    }
    let mut logits: Vec<f32> = Vec::new();
    for chunk in options.tokens.chunks(CHUNK) {
        let ids = Tensor::new(chunk, &device)?.unsqueeze(0)?;
        let of_chunk = model.forward(&ids, model.cached_tokens())?.to_dtype(DType::F32)?;
        logits.extend(of_chunk.flatten_all()?.to_vec1::<f32>()?);
    }
    let tokens = Tensor::new(options.tokens.as_slice(), &device)?;
    let logits = Tensor::from_vec(logits, (needed, config.vocab_size), &device)?;
    save(HashMap::from([("tokens", tokens), ("logits", logits)]), &options.out)
}

/// A file that is there already is replaced, a link, pipe or device is not.
fn check_replaceable(path: &Path) -> Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|there| !there.is_file()) {
        bail!("{}: it is there already, and no regular file; give another output", path.display());
    }
    Ok(())
}

/// Writes beside the file and moves it into place, so that a failure leaves nothing and harms nothing.
fn save(tensors: HashMap<&str, Tensor>, path: &Path) -> Result<()> {
    check_replaceable(path)?;
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.part", std::process::id()));
    let part = PathBuf::from(part);
    let bytes = safetensors::serialize(&tensors, None)?;
    fs::write(&part, bytes)
        .and_then(|()| fs::rename(&part, path))
        .inspect_err(|_| drop(fs::remove_file(&part)))
        .with_context(|| path.display().to_string())
}
