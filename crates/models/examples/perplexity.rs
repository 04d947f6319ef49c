//! What each format costs and keeps: the bundled bf16 model, quantized in memory, on held-out stories.
//!
//! `cargo run --release --example perplexity`; with `--as-stored --model OUT` of a model that is packed already.

use anyhow::{anyhow, bail, Context, Result};
use candle_core::{DType, Device, Tensor, D};
use candle_quant::checkpoint::CheckpointKind;
use candle_quant::{Checkpoint, QuantFormat, VarBuilder};
use candle_quant_models::generate::load_tokenizer;
use candle_quant_models::{Config, Model};
use clap::Parser;
use std::path::PathBuf;
use std::time::Instant;

/// What each format costs and keeps: a dense model, quantized in memory, on held-out texts.
#[derive(Parser)]
struct Args {
    /// A dense checkpoint with a tokenizer.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny-bf16"))]
    model: PathBuf,
    /// Texts, separated by blank lines; each is judged by itself.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/heldout.txt"))]
    text: PathBuf,
    /// Judge the model as it is stored, packed or not, and nothing else.
    #[arg(long)]
    as_stored: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let device = Device::Cpu;
    let checkpoint = Checkpoint::open(&args.model)?;
    if args.as_stored {
        let mut model = Model::load(&checkpoint, DType::F32, &device)?;
        let (perplexity, _) = perplexity(&mut model, &tokenize(&checkpoint, &args)?)?;
        println!("{perplexity:.4}");
        return Ok(());
    }
    if checkpoint.kind() != CheckpointKind::Dense {
        bail!("{}: quantized already; give the dense checkpoint that it was made of", args.model.display());
    }
    let config = Config::from_checkpoint(&checkpoint)?;
    let texts = tokenize(&checkpoint, &args)?;

    println!("| format | bits per weight | MB | perplexity | prefill tokens/s | decode tokens/s |");
    println!("|---|---|---|---|---|---|");
    let affine = [8, 6, 5, 4, 3, 2, 1].map(|bits| QuantFormat::affine(bits, 64).unwrap());
    let others =
        [QuantFormat::MXFP8, QuantFormat::MXINT8, QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::NF4];
    let packed = affine.into_iter().chain(others);
    for format in std::iter::once(None).chain(packed.map(Some)) {
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &device);
        let vb = match format {
            Some(format) => vb.quantize_to(format),
            None => vb,
        };
        let mut model = Model::new(&config, vb)?;
        let summary = model.summary();
        // The dense model computes in f32 on weights that the file has in 16 bits.
        let (name, bits) = match format {
            Some(format) => (format.to_string(), summary.bits_per_weight()),
            None => ("bf16".to_string(), 16.),
        };
        let megabytes = summary.elements() as f64 * bits / 8e6;
        let (perplexity, prefill) = perplexity(&mut model, &texts)?;
        let decode = decode_rate(&mut model, &texts)?;
        println!("| {name} | {bits:.2} | {megabytes:.2} | {perplexity:.4} | {prefill:.0} | {decode:.0} |");
    }
    Ok(())
}

/// The tokens of each text, between the tokens that begin and end one, if the model has such.
fn tokenize(checkpoint: &Checkpoint, args: &Args) -> Result<Vec<Vec<u32>>> {
    let tokenizer = load_tokenizer(checkpoint)?;
    let special = |name: &str| checkpoint.config()[name].as_u64().map(|id| id as u32);
    let (begin, end) = (special("bos_token_id"), special("eos_token_id"));
    let texts = std::fs::read_to_string(&args.text).with_context(|| args.text.display().to_string())?;
    let paragraphs = texts.split("\n\n").map(str::trim).filter(|text| !text.is_empty());
    paragraphs
        .map(|text| {
            let encoding = tokenizer.encode(text, false).map_err(|error| anyhow!("{text:?}: {error}"))?;
            Ok(begin.into_iter().chain(encoding.get_ids().iter().copied()).chain(end).collect())
        })
        .collect()
}

/// exp of the mean negative log-likelihood of each token after its text's first, and tokens per second.
fn perplexity(model: &mut Model, texts: &[Vec<u32>]) -> Result<(f64, f64)> {
    let start = Instant::now();
    let (mut sum, mut count) = (0., 0);
    for text in texts.iter().filter(|text| text.len() > 1) {
        let tokens = Tensor::new(text.as_slice(), model.device())?;
        let (len, inputs) = (text.len() - 1, tokens.narrow(0, 0, text.len() - 1)?);
        model.clear_kv_cache();
        let logits = model.forward(&inputs.unsqueeze(0)?, 0)?.squeeze(0)?;
        let targets = tokens.narrow(0, 1, len)?.unsqueeze(1)?.contiguous()?;
        let likelihoods = candle_nn::ops::log_softmax(&logits, D::Minus1)?.gather(&targets, 1)?;
        sum -= likelihoods.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        count += len;
    }
    Ok(((sum / count as f64).exp(), count as f64 / start.elapsed().as_secs_f64()))
}

/// Tokens per second, one by one, through the first texts.
fn decode_rate(model: &mut Model, texts: &[Vec<u32>]) -> Result<f64> {
    const TEXTS: usize = 2;
    let start = Instant::now();
    let mut count = 0;
    for text in texts.iter().take(TEXTS) {
        model.clear_kv_cache();
        for (offset, token) in text.iter().enumerate() {
            model.forward_last(&Tensor::new(&[[*token]], model.device())?, offset)?;
            count += 1;
        }
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
