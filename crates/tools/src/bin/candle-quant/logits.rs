//! The `logits` subcommand.

use super::generate::parse_dtype;
use anyhow::{bail, Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_quant::{ActivationPrecision, Checkpoint};
use candle_quant_models::Model;
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
}

pub fn run(options: &Options) -> Result<()> {
    check_replaceable(&options.out)?;
    if let Some(activations) = options.activations {
        activations.set();
    }
    let device = Device::Cpu;
    let mut model = Model::load(&Checkpoint::open(&options.path)?, options.dtype, &device)?;
    let tokens = Tensor::new(options.tokens.as_slice(), &device)?;
    let logits = model.forward(&tokens.unsqueeze(0)?, 0)?.squeeze(0)?.to_dtype(DType::F32)?;
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
