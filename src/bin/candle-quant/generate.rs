//! Text from a checkpoint, on the command line: shared by the `generate` subcommand and the example.

use anyhow::Result;
use candle_core::{DType, Device};
use candle_quant::generate::{self, Finish, Generated, Params, Sampler, Sampling};
use candle_quant::models::Model;
use candle_quant::Checkpoint;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

// Named as those of candle's examples. (A doc comment here would replace that of the command.)
#[derive(clap::Args, Debug)]
pub struct Options {
    /// The text to continue.
    #[arg(long, default_value = "Once upon a time")]
    prompt: String,
    /// The most tokens to generate.
    #[arg(short = 'n', long, default_value_t = 300)]
    sample_len: usize,
    /// Divides the logits before sampling; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f64,
    /// Sample only among the most likely tokens whose probabilities sum to this.
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Sample only among this many most likely tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Repeat the run that reported this seed; every run differs otherwise.
    #[arg(long)]
    seed: Option<u64>,
    /// Run on the CPU even if there is a GPU.
    #[arg(long)]
    cpu: bool,
    /// Precision of activations: f32, f16 or bf16 [default: f32 on the CPU, else bf16].
    #[arg(long, value_parser = parse_dtype)]
    dtype: Option<DType>,
}

/// The precisions activations can have.
pub fn parse_dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        _ => Err("expected f32, f16 or bf16".to_string()),
    }
}

/// Streams the text to stdout, and what it took to stderr.
pub fn run(path: &Path, options: &Options) -> Result<()> {
    let device = match options.cpu {
        true => Device::Cpu,
        false => Device::cuda_if_available(0)?,
    };
    let dtype = options.dtype.unwrap_or(if device.is_cpu() { DType::F32 } else { DType::BF16 });
    let checkpoint = Checkpoint::open(path)?;
    let tokenizer = generate::load_tokenizer(&checkpoint)?;
    let params = Params {
        sample_len: options.sample_len,
        sampling: Sampling { temperature: options.temperature, top_k: options.top_k, top_p: options.top_p },
        seed: options.seed,
        stop_tokens: generate::stop_tokens(&checkpoint)?,
        ..Params::default()
    };
    // Refused before anything is loaded or printed.
    Sampler::new(params.sampling, params.seed)?;
    let mut model = Model::load(&checkpoint, dtype, &device)?;

    let mut stdout = io::stdout().lock();
    let mut written = write_now(&mut stdout, &options.prompt);
    let generated = generate::generate(&mut model, &tokenizer, &options.prompt, &params, |text| {
        if written.is_ok() {
            written = write_now(&mut stdout, text);
        }
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
    report(&generated, &model)?;
    Ok(())
}

fn write_now(stdout: &mut impl Write, text: &str) -> io::Result<()> {
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn report(generated: &Generated, model: &Model) -> io::Result<()> {
    let summary = model.summary();
    let ended = match generated.finish {
        Finish::Stop => "end of text",
        _ => "sample length reached",
    };
    let mut stderr = io::stderr().lock();
    writeln!(stderr)?;
    writeln!(stderr, "prompt: {} tokens, {:.1} tokens/s", generated.prompt_tokens, generated.prompt_rate())?;
    writeln!(stderr, "decode: {} tokens, {:.1} tokens/s", generated.decode_tokens, generated.decode_rate())?;
    writeln!(stderr, "weights: {summary}, {:.2} MB", summary.size_in_bytes() as f64 / 1e6)?;
    writeln!(stderr, "{ended}; --seed {} repeats this run", generated.seed)
}
