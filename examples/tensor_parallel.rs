//! A model over several ranks, as a program of its own would do it; without arguments, the bundled one over two.
//!
//! `cargo run --release --example tensor_parallel -- --model DIR --ranks 4`

use candle_core::{DType, Device};
use candle_quant::models::{Config, Model};
use candle_quant::{generate, parallel, Checkpoint, VarBuilder};
use clap::Parser;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// A model over several ranks; without arguments, the bundled one over two.
#[derive(Parser)]
struct Args {
    /// A checkpoint directory with config.json and tokenizer.json.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny"))]
    model: PathBuf,
    /// The text to continue.
    #[arg(long, default_value = "Once upon a time")]
    prompt: String,
    /// How many ranks compute it.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
}

fn main() -> anyhow::Result<()> {
    let Args { model, prompt, ranks } = Args::parse();
    let checkpoint = Checkpoint::open(model)?;
    let plan = parallel::Plan::new(&checkpoint, ranks)?;
    println!("each rank loads {:?} of {} bytes", plan.rank_bytes(), plan.stored_bytes());

    // GPUs would be `Device::new_cuda(0)?`, `Device::new_cuda(1)?` and so on.
    let devices = vec![Device::Cpu; ranks];
    let texts = parallel::run(&devices, move |rank| {
        let config = Config::from_json(checkpoint.config())?;
        // The only line that differs from a model that is alone.
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32);
        let mut model = Model::new(&config, vb)?;
        let tokenizer = generate::load_tokenizer(&checkpoint)?;
        // All ranks draw the same tokens: they have the same logits and the same seed.
        let params = generate::Params { seed: Some(1), sample_len: 100, ..Default::default() };
        let text =
            generate::generate(&mut model, &tokenizer, &prompt, &params, |_| ControlFlow::Continue(()))?;
        Ok(format!("{prompt}{}", text.text))
    })?;
    if let Some(text) = texts.first() {
        println!("{text}");
    }
    Ok(())
}
