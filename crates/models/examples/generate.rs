//! Text from a quantized model; without arguments, a story from the bundled one.
//!
//! `cargo run --release --example generate -- --model DIR --prompt "Once upon a time"`

#[path = "../../tools/src/bin/candle-quant/generate.rs"]
mod generate;

use clap::Parser;
use std::path::PathBuf;

/// Text from a quantized model; without arguments, a story from the bundled one.
#[derive(Parser)]
struct Args {
    /// A checkpoint directory with config.json and tokenizer.json.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny"))]
    model: PathBuf,
    #[command(flatten)]
    options: generate::Options,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    generate::run(&args.model, &args.options)
}
