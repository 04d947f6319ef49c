//! Fine-tunes a quantized model on stories of another world: the bundled one learns of ships and lighthouses.
//!
//! `cargo run --release --example qlora` takes less than a minute on two cores. Saved with `--out DIR`, a training that was
//! interrupted goes on with `--resume`.

use anyhow::{anyhow, Context, Result};
use candle_core::{DType, Device};
use candle_quant::nn::LoraConfig;
use candle_quant::Checkpoint;
use candle_quant_models::generate::{self, load_tokenizer};
use candle_quant_models::train::{
    finetune, Dataset, Options, Progress, Report, SaveOptions, Schedule, Sequence,
};
use candle_quant_models::Model;
use clap::Parser;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// Fine-tunes a quantized model on texts, with low-rank adapters.
#[derive(Parser)]
struct Args {
    /// A checkpoint with a tokenizer.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny"))]
    model: PathBuf,
    /// Texts to learn from, separated by blank lines.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/crates/models/examples/qlora/stories.txt"))]
    text: PathBuf,
    /// Texts to judge by, likewise.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/crates/models/examples/qlora/heldout.txt"))]
    held_out: PathBuf,
    /// Steps of the optimizer.
    #[arg(long, default_value_t = 180)]
    steps: usize,
    /// Rank of the adapters.
    #[arg(long, default_value_t = 16)]
    rank: usize,
    /// The highest learning rate.
    #[arg(long, default_value_t = 1e-2)]
    lr: f64,
    /// Texts that go through the model together.
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Batches of a step.
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// Decides the first numbers of the adapters and the order of texts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Modules that learn: their names, globs over their paths, or `all-linear`.
    #[arg(long, value_delimiter = ',', default_value = "all-linear")]
    targets: Vec<String>,
    /// Where the adapter is written, with what `--resume` needs.
    #[arg(long, default_value = "target/qlora")]
    out: PathBuf,
    /// Steps between two times that it is written; without it, it is at the end.
    #[arg(long)]
    save_every: Option<usize>,
    /// Go on from what is in the folder of `--out`.
    #[arg(long)]
    resume: bool,
    /// Threads to compute with; all without it. The numbers are the same.
    #[arg(long)]
    threads: Option<usize>,
    /// The beginning of a story that is told before and after.
    #[arg(long, default_value = "The keeper of the lighthouse")]
    prompt: String,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(threads) = args.threads {
        // candle's matmul asks for it here.
        std::env::set_var("RAYON_NUM_THREADS", threads.to_string());
    }
    let checkpoint = Checkpoint::open(&args.model)?;
    let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu)?;
    let tokenizer = load_tokenizer(&checkpoint)?;
    let data = Dataset {
        training: sequences(&checkpoint, &tokenizer, &args.text)?,
        held_out: sequences(&checkpoint, &tokenizer, &args.held_out)?,
    };
    println!("{} texts to learn from, {} to judge by", data.training.len(), data.held_out.len());
    println!("\nbefore:\n{}\n", story(&checkpoint, &mut model, &tokenizer, &args.prompt)?);

    let rank = args.rank;
    let options = Options {
        lora: LoraConfig { rank, alpha: rank as f64, rs_lora: false, dora: false },
        targets: args.targets,
        steps: args.steps,
        batch: args.batch,
        accumulation: args.accumulation,
        schedule: Schedule { learning_rate: args.lr, warm_up: (args.steps / 10).max(1), floor: 0.05 },
        seed: args.seed,
        resume: args.resume.then(|| args.out.clone()),
        save: Some(SaveOptions { folder: args.out.clone(), every: args.save_every }),
        ..Default::default()
    };
    let report = finetune(&model, &data, &options, |progress| {
        print(progress);
        ControlFlow::Continue(())
    })?;
    summarize(&report);
    println!("\nafter:\n{}\n", story(&checkpoint, &mut model, &tokenizer, &args.prompt)?);
    println!("wrote {}", args.out.display());
    Ok(())
}

/// The tokens of each text, between the tokens that begin and end one, if the model has such.
fn sequences(checkpoint: &Checkpoint, tokenizer: &Tokenizer, path: &Path) -> Result<Vec<Sequence>> {
    let special = |name: &str| checkpoint.config()[name].as_u64().map(|id| id as u32);
    let (begin, end) = (special("bos_token_id"), special("eos_token_id"));
    let texts = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let paragraphs = texts.split("\n\n").map(str::trim).filter(|text| !text.is_empty());
    paragraphs
        .map(|text| {
            let encoding = tokenizer.encode(text, false).map_err(|error| anyhow!("{text:?}: {error}"))?;
            let tokens = begin.into_iter().chain(encoding.get_ids().iter().copied()).chain(end);
            Ok(Sequence::new(tokens.collect::<Vec<_>>()))
        })
        .collect()
}

/// What the model makes of a beginning.
fn story(checkpoint: &Checkpoint, model: &mut Model, tokenizer: &Tokenizer, prompt: &str) -> Result<String> {
    model.clear_kv_cache();
    let stop_tokens = generate::stop_tokens(checkpoint)?;
    let params = generate::Params { sample_len: 160, stop_tokens, ..Default::default() };
    let mut story = prompt.to_owned();
    generate::generate(model, tokenizer, prompt, &params, |text| {
        story.push_str(text);
        ControlFlow::Continue(())
    })?;
    Ok(story)
}

fn print(progress: &Progress) {
    if progress.step % 10 == 1 || progress.step == progress.steps {
        println!(
            "step {:4} of {}  loss {:.4}  gradients {:.3}  rate {:.1e}  {:.0} tokens/s",
            progress.step,
            progress.steps,
            progress.loss,
            progress.gradient_norm,
            progress.learning_rate,
            progress.tokens as f64 / progress.duration.as_secs_f64()
        );
    }
}

fn summarize(report: &Report) {
    let seconds = report.duration.as_secs_f64();
    let rate = report.tokens as f64 / seconds;
    println!("{} steps, {} tokens, {seconds:.1} s, {rate:.0} tokens/s", report.losses.len(), report.tokens);
    if let (Some(before), Some(after)) = (report.held_out_before, report.held_out_after) {
        println!("held-out perplexity: {before:.3} before, {after:.3} after");
    }
}
