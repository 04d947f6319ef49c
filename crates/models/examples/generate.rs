//! Text from a quantized model; without arguments, a story from the bundled one.
//!
//! `cargo run --release --example generate -- --model DIR --prompt "Once upon a time"`. The command `candle-quant generate`
//! has more options: sampling, seeds, several devices.

use candle_core::{DType, Device};
use candle_quant::Checkpoint;
use candle_quant_models::{generate, Model};
use clap::Parser;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Text from a quantized model; without arguments, a story from the bundled one.
#[derive(Parser)]
struct Args {
    /// A checkpoint: a folder, a file, or a name, of an Ollama store or of the Hugging Face hub.
    #[arg(long, default_value = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny"))]
    model: PathBuf,
    /// The text to continue.
    #[arg(long, default_value = "Once upon a time")]
    prompt: String,
    /// The most tokens to generate.
    #[arg(short = 'n', long, default_value_t = 300)]
    sample_len: usize,
}

fn main() -> anyhow::Result<()> {
    let Args { model, prompt, sample_len } = Args::parse();
    let device = Device::cuda_if_available(0)?;
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let checkpoint = Checkpoint::open(&model)?;
    let mut model = Model::load(&checkpoint, dtype, &device)?;
    let tokenizer = generate::load_tokenizer(&checkpoint)?;
    let stop_tokens = generate::stop_tokens(&checkpoint)?;
    let params = generate::Params { sample_len, stop_tokens, ..Default::default() };

    let mut stdout = io::stdout().lock();
    write!(stdout, "{prompt}")?;
    let mut written = Ok(());
    let done = generate::generate(&mut model, &tokenizer, &prompt, &params, |text| {
        written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        match written {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    match written.and_then(|()| writeln!(stdout)) {
        // Whoever read the text has gone, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
        result => result?,
    }
    eprintln!("\nprompt: {} tokens, {:.1} tokens/s", done.prompt_tokens, done.prompt_rate());
    eprintln!("decode: {} tokens, {:.1} tokens/s", done.decode_tokens, done.decode_rate());
    eprintln!("weights: {}", model.summary());
    Ok(())
}
