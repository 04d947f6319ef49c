//! Trains the small language model under `assets/` from nothing, on stories of its own grammar.
//!
//! ```text
//! cargo run --release --example train_tiny
//! ```
//!
//! writes, under `target/tiny` (or `--out`), `tiny-bf16/` (a Hugging Face checkpoint), `tiny/` (the same in
//! 4 bits, as mlx-lm writes it) and `heldout.txt` (stories that were not trained on, one a paragraph,
//! separated by blank lines). Takes about ten minutes on two cores; the same machine gives the same weights
//! every time. With glibc a third of the time goes into giving memory back and taking it again; this avoids it:
//!
//! ```text
//! export MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=8000000000
//! ```

mod export;
mod model;
mod plots;
mod quantize;
mod stories;
mod tokenizer;
mod train;

use anyhow::{ensure, Context, Result};
use candle_core::{DType, Device, Tensor, D};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::{Path, PathBuf};
use std::time::Instant;
use stories::Stories;
use tokenizers::Tokenizer;

#[derive(Parser)]
#[command(about = "Train the bundled story model")]
struct Args {
    /// Folder to write to; it must not hold a trained model yet.
    #[arg(long, default_value = "target/tiny")]
    out: PathBuf,
    /// Training steps of the first cycle.
    #[arg(long, default_value_t = 900)]
    steps: usize,
    /// Training steps of the second cycle, at half the learning rate.
    #[arg(long, default_value_t = 400)]
    more_steps: usize,
    /// Skip the first cycle: start from this bf16 checkpoint.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Rows per step.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens per row.
    #[arg(long, default_value_t = 256)]
    context: usize,
    /// Highest learning rate.
    #[arg(long, default_value_t = 3e-3)]
    learning_rate: f64,
    /// Seed of the initial weights and of the stories.
    #[arg(long, default_value_t = 299_792_458)]
    seed: u64,
    /// Number of held-out stories.
    #[arg(long, default_value_t = 80)]
    held_out: usize,
    /// Do not train, only quantize this bf16 checkpoint.
    #[arg(long, value_name = "DIR")]
    quantize: Option<PathBuf>,
    /// Print this many stories of the grammar and stop.
    #[arg(long)]
    tell: Option<usize>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(count) = args.tell {
        let mut stories = Stories::new(args.seed);
        for _ in 0..count {
            println!("{}\n", stories.tell()?);
        }
        return Ok(());
    }
    let quantized = args.out.join("tiny");
    refuse_to_overwrite(&quantized)?;
    if let Some(source) = &args.quantize {
        quantize::quantize_checkpoint(source, &quantized)?;
        println!("wrote {}", quantized.display());
        return Ok(());
    }
    let folder = args.out.join("tiny-bf16");
    refuse_to_overwrite(&folder)?;
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    // The training threads share the cores; a matrix product that splits further would only get in their way.
    std::env::set_var("RAYON_NUM_THREADS", "1");

    let cfg = model::Config::tiny();
    // Streams of their own for the held-out stories and the tokenizer's text.
    let held_out = tell(args.seed ^ 0xA5A5, args.held_out)?;
    let tokenizer = tokenizer::train(&tell(args.seed ^ 0x5A5A, 4000)?, cfg.vocab_size)?;
    let end = tokenizer::end_of_text(&tokenizer)?;
    let lengths = held_out
        .iter()
        .map(|story| Ok(tokenizer::encode(&tokenizer, story)?.len()))
        .collect::<Result<Vec<_>>>()?;
    let (tokens, longest) = (lengths.iter().sum::<usize>(), lengths.iter().max().copied().unwrap_or(0));
    let bytes: usize = held_out.iter().map(String::len).sum();
    println!(
        "{} held-out stories: {tokens} tokens, {:.2} bytes per token, longest {longest} tokens",
        held_out.len(),
        bytes as f64 / tokens as f64
    );

    let mut vars = cfg.init(args.seed, &Device::Cpu)?;
    let parameters: usize = cfg.parameters().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    println!("{parameters} parameters, {cfg:?}");
    let run = train::Schedule {
        steps: args.steps,
        batch: args.batch,
        context: args.context,
        learning_rate: args.learning_rate,
        seed: args.seed,
    };
    let start = Instant::now();
    if let Some(folder) = &args.from {
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        for (name, tensor) in tensors {
            vars.set_one(name, tensor.to_dtype(DType::F32)?)?;
        }
    } else {
        train::train(&cfg, &vars, &tokenizer, &held_out, &run)?;
    }
    let second = train::Schedule {
        steps: args.more_steps,
        learning_rate: args.learning_rate / 2.0,
        seed: args.seed + 1,
        ..run
    };
    train::train(&cfg, &vars, &tokenizer, &held_out, &second)?;
    println!("trained in {:.0} s", start.elapsed().as_secs_f64());
    let loss = train::held_out_loss(&cfg, &vars, &tokenizer, &held_out)?;
    println!("held-out loss {loss:.4}, perplexity {:.3}", loss.exp());

    export::save_bf16(&cfg, &vars, end, &folder)?;
    tokenizer::save(&tokenizer, &folder, cfg.max_position_embeddings)?;
    std::fs::write(args.out.join("heldout.txt"), held_out.join("\n\n") + "\n")?;
    quantize::quantize_checkpoint(&folder, &quantized)?;
    println!("wrote {} and {}\n", folder.display(), quantized.display());
    for seed in 0..3 {
        println!("{}\n", sample(&cfg, &vars, &tokenizer, seed)?);
    }
    Ok(())
}

fn refuse_to_overwrite(folder: &Path) -> Result<()> {
    let path = folder.join("model.safetensors");
    ensure!(!path.exists(), "{} exists already; remove it or choose another --out", path.display());
    Ok(())
}

fn tell(seed: u64, count: usize) -> Result<Vec<String>> {
    let mut stories = Stories::new(seed);
    (0..count).map(|_| stories.tell()).collect()
}

/// A story of the model's own (no cache: this is a check, not a way to generate).
fn sample(cfg: &model::Config, vars: &VarMap, tokenizer: &Tokenizer, seed: u64) -> Result<String> {
    const TEMPERATURE: f64 = 0.8;
    let device = Device::Cpu;
    let model = model::Model::new(cfg, VarBuilder::from_varmap(vars, DType::F32, &device))?;
    let end = tokenizer::end_of_text(tokenizer)?;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut ids = vec![end];
    while ids.len() < 256 {
        let positions = model::Positions::new(cfg, ids.len(), &device)?;
        let inputs = Tensor::new(ids.as_slice(), &device)?.unsqueeze(0)?;
        let logits = model.forward(&inputs, &positions)?.squeeze(0)?.get(ids.len() - 1)?;
        let probabilities: Vec<f32> =
            candle_nn::ops::softmax(&(logits / TEMPERATURE)?, D::Minus1)?.to_vec1()?;
        let mut left = rng.random::<f32>();
        let next = probabilities.iter().position(|p| {
            left -= p;
            left <= 0.0
        });
        let next = next.unwrap_or(probabilities.len() - 1) as u32;
        if next == end {
            break;
        }
        ids.push(next);
    }
    tokenizer::decode(tokenizer, &ids)
}
