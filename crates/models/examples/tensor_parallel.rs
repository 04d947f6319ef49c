//! A model over several ranks, as a program of its own would do it; without arguments, the bundled one over two.
//!
//! `cargo run --release --example tensor_parallel -- --model DIR --ranks 4`
//!
//! `torchrun --no-python --nproc-per-node 4 target/release/examples/tensor_parallel --model DIR --distributed`

use candle_core::{DType, Device};
use candle_quant::{parallel, Checkpoint, VarBuilder};
use candle_quant_models::generate;
use candle_quant_models::{Config, Model};
use clap::Parser;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// A model over several ranks; without arguments, the bundled one over two.
#[derive(Parser)]
struct Args {
    /// A checkpoint directory with config.json and tokenizer.json.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny"))]
    model: PathBuf,
    /// The text to continue.
    #[arg(long, default_value = "Once upon a time")]
    prompt: String,
    /// How many ranks compute it.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Be one rank of those that a launcher has started.
    #[arg(long)]
    distributed: bool,
}

fn main() -> anyhow::Result<()> {
    let Args { model, prompt, ranks, distributed } = Args::parse();
    let checkpoint = Checkpoint::open(model)?;
    let work = move |rank: parallel::Rank| {
        let config = Config::from_checkpoint(&checkpoint)?;
        // The only line that differs from a model that is alone.
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32);
        let mut model = Model::new(&config, vb)?;
        let tokenizer = generate::load_tokenizer(&checkpoint)?;
        // All ranks draw the same tokens: they have the same logits and the same seed.
        let params = generate::Params { seed: Some(1), sample_len: 100, ..Default::default() };
        let text =
            generate::generate(&mut model, &tokenizer, &prompt, &params, |_| ControlFlow::Continue(()))?;
        if rank.index() == 0 {
            println!("{prompt}{}", text.text);
        }
        Ok(())
    };
    if distributed {
        let (info, secret) = (parallel::RankInfo::from_env()?, parallel::Secret::from_env()?);
        parallel::Launch::default().distributed(&info, &secret, work)?;
    } else {
        // GPUs would be `Device::new_cuda(0)?`, `Device::new_cuda(1)?` and so on.
        parallel::run(&vec![Device::Cpu; ranks], work)?;
    }
    Ok(())
}
