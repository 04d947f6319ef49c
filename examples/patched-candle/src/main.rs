//! A story from candle-transformers' own Qwen3, on the 4-bit weights of the bundled model.

use anyhow::{Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::LoadedAs;
use candle_quant::{Checkpoint, VarBuilder};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::qwen3::{Config, ModelForCausalLM};
use clap::Parser;
use std::path::PathBuf;
use tokenizers::Tokenizer;

/// A text from candle-transformers' own Qwen3, on weights as they are packed.
#[derive(Parser)]
struct Args {
    /// A checkpoint of a Qwen3 model.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/tiny"))]
    model: PathBuf,
    /// The text to continue.
    #[arg(long, default_value = "Once upon a time")]
    prompt: String,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let checkpoint = Checkpoint::open(&args.model)?;
    let config: Config = serde_json::from_value(checkpoint.config().clone())?;
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
    // candle_nn's own builder. The patched layers take packed weights from it.
    let mut model = ModelForCausalLM::new(&config, vb.dense())?;

    let file = checkpoint.tokenizer_file().ok_or_else(|| Error::msg("there is no tokenizer.json"))?;
    let tokenizer = Tokenizer::from_file(file).map_err(Error::msg)?;
    let mut tokens = tokenizer.encode(args.prompt, true).map_err(Error::msg)?.get_ids().to_vec();
    let mut sampler = LogitsProcessor::new(0, None, None);
    let mut position = 0;
    for _ in 0..100 {
        let ids = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits = model.forward(&ids, position)?.flatten_all()?;
        position = tokens.len();
        tokens.push(sampler.sample(&logits)?);
    }
    println!("{}", tokenizer.decode(&tokens, true).map_err(Error::msg)?);
    let count = |form| vb.loaded().values().filter(|loaded| **loaded == form).count();
    let [packed, dequantized] = [LoadedAs::Packed, LoadedAs::Dequantized].map(count);
    eprintln!("{packed} weights packed, {dequantized} dequantized");
    Ok(())
}
