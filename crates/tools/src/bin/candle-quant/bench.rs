//! The `bench` subcommand.

mod print;

use super::model::LoadOptions;
use super::{size, terminal};
use anyhow::{Context, Result};
use candle_quant_tools::bench::{bench, BenchEvent, BenchOptions};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// More threads than any machine has.
const MOST_THREADS: i64 = 4096;

#[derive(clap::Args)]
#[command(after_help = "\
What is measured: each test once to warm up, then --repetitions times; mean and deviation (of a sample) are of those. \
Tokens are random, and none is drawn. Tests of more tokens than the context are left out. A step of decode reads its weights and its part of the KV cache: \"GB/s\" is how \
fast, \"of memory\" the share of what all threads reach that only read memory.

Keys of --json, all of them always there: schema (1), version; model: path, kind, model_type, formats (how many weights), \
bits_per_weight, weight_bytes; machine: cpu, threads, instruction_set, device; settings: dtype, activations, \
kv_cache_keys, kv_cache_values, context, prefill_chunk, repetitions; load_seconds; peak_memory_bytes; read_bandwidth: \
bytes_per_second, rounds, buffer_bytes; prefill, a list: tokens, tokens_per_second (mean, deviation), first_token_seconds \
(mean, deviation), seconds; decode, a list: depth, tokens, tokens_per_second, seconds, weight_bytes_per_step, \
cache_bytes_per_step, bytes_per_second, share_of_bandwidth; matmuls, a list: n, k, format, count, m, seconds (mean, \
deviation), bytes, bytes_per_second, flops_per_second; left_out, a list: test, tokens, depth; notes.")]
pub struct Options {
    /// The checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
    path: PathBuf,
    #[command(flatten)]
    load: LoadOptions,
    /// Tokens of prompts; 0 for no prompts.
    #[arg(short, long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "128,512,2048")]
    prompts: Vec<usize>,
    /// Tokens in the KV cache before the decoded ones.
    #[arg(short, long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "0,512,4096,16384")]
    depths: Vec<usize>,
    /// Tokens to decode at each depth; 0 for none.
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = BenchOptions::default().decode_tokens)]
    decode: usize,
    /// How often each is measured.
    #[arg(short, long, value_name = "COUNT", default_value_t = BenchOptions::default().repetitions)]
    repetitions: usize,
    /// Measure the matmuls alone: each shape and format of weights with 1, 8 and 512 rows of activations.
    #[arg(long, conflicts_with_all = ["prompts", "depths", "decode"])]
    ops: bool,
    /// Threads to compute with [default: as many as the CPU has, or what RAYON_NUM_THREADS says].
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=MOST_THREADS))]
    threads: Option<u16>,
    /// Tokens of a prompt that are computed at once.
    #[arg(long, value_name = "TOKENS", default_value_t = BenchOptions::default().prefill_chunk)]
    prefill_chunk: usize,
    /// How much memory is read to measure its bandwidth: more than caches hold.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "1GiB")]
    bandwidth_buffer: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let what = bench_options(options)?;
    what.validate()?;
    if let Some(threads) = options.threads {
        // candle's own matmuls ask the environment; no thread is there yet that could read it meanwhile.
        std::env::set_var("RAYON_NUM_THREADS", threads.to_string());
        rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global().context("--threads")?;
    }
    let checkpoint = options.load.open(&options.path)?;
    let device = options.load.device();
    let loader = options.load.loader(checkpoint, device.is_cpu())?;
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    // What is measured; there is nothing to count.
    bar.set_style(ProgressStyle::with_template("{wide_msg}")?);
    let report = bench(&loader.checkpoint, || loader.load(&device), &what, &mut |event| {
        bar.set_message(describe(event, what.repetitions));
        bar.tick();
    });
    bar.finish_and_clear();
    let report = report?;
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => writeln!(stdout, "{:#}", json!(report))?,
        false => print::report(&mut stdout, &report)?,
    }
    Ok(stdout.flush()?)
}

fn bench_options(options: &Options) -> Result<BenchOptions> {
    let what = match options.ops {
        true => BenchOptions::matmuls(),
        false => BenchOptions {
            // As llama-bench has it: no tokens are no test.
            prompts: options.prompts.iter().copied().filter(|tokens| *tokens > 0).collect(),
            depths: if options.decode == 0 { Vec::new() } else { options.depths.clone() },
            decode_tokens: options.decode,
            ..BenchOptions::default()
        },
    };
    let bandwidth_bytes = usize::try_from(options.bandwidth_buffer).context("--bandwidth-buffer")?;
    Ok(BenchOptions {
        repetitions: options.repetitions,
        prefill_chunk: options.prefill_chunk,
        bandwidth_bytes,
        ..what
    })
}

fn describe(event: BenchEvent, repetitions: usize) -> String {
    match event {
        BenchEvent::Load => "loading".to_owned(),
        BenchEvent::Text { text, repetition: 0 } => format!("{text}: warming up"),
        BenchEvent::Text { text, repetition } => format!("{text}: {repetition} of {repetitions}"),
        BenchEvent::Matmul { n, k, m } => format!("matmul of {m} rows with {n} x {k}"),
        BenchEvent::Bandwidth => "reading memory".to_owned(),
        _ => String::new(),
    }
}
