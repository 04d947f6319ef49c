//! Text from a checkpoint, on the command line: shared by the `generate` subcommand and the example.

use super::terminal;
use anyhow::{bail, Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::{self, ExpertSplit, Launch, Rank, RankInfo, Secret};
use candle_quant::{ActivationPrecision, Checkpoint, KvFormat, VarBuilder, WeightSummary};
use candle_quant_models::generate::{self, Finish, Generated, Params, Sampler, Sampling};
use candle_quant_models::{CacheOptions, Config, Model, ModelOptions};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;
use tokenizers::Tokenizer;

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
    /// Compute with this many ranks, each with its part of the weights: on GPUs if there are as many, else as
    /// threads on the CPU.
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Be one rank of those that torchrun, srun or mpirun has started, with a GPU of its own.
    #[arg(long, conflicts_with_all = ["ranks", "cpu"])]
    distributed: bool,
    /// What ranks have of a model's experts: a part `inside` each, or whole ones, shared out `across` the ranks.
    #[arg(long, default_value_t, value_name = "SPLIT")]
    experts: ExpertSplit,
    /// Precision of activations: f32, f16 or bf16 [default: f32 on the CPU, else bf16].
    #[arg(long, value_parser = parse_dtype)]
    dtype: Option<DType>,
    /// Digits of activations in integer matmuls on the CPU: exact, 16 or 8 bits; fewer take less time
    /// [default: exact, or what CANDLE_QUANT_ACTIVATIONS says].
    #[arg(long)]
    activations: Option<ActivationPrecision>,
    /// How the KV cache holds keys and values: f32, f16, bf16, 8bit or 4bit, one for both or KEYS,VALUES [default: as
    /// activations]. On the CPU.
    #[arg(long, value_name = "FORMAT[,FORMAT]", value_parser = parse_cache)]
    kv_cache: Option<(KvFormat, KvFormat)>,
    /// The most tokens of prompt and text, be it more or less than the model is made for [default: what its config states].
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// The most tokens of prompt and text that the KV cache may hold [default: as many as memory allows].
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<usize>,
}

/// Formats of keys and values.
fn parse_cache(text: &str) -> candle_quant::Result<(KvFormat, KvFormat)> {
    match text.split_once(',') {
        Some((keys, values)) => Ok((keys.parse()?, values.parse()?)),
        None => text.parse().map(|both| (both, both)),
    }
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

/// What every rank works with.
#[derive(Clone)]
struct Work {
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    prompt: String,
    params: Params,
    dtype: DType,
    experts: ExpertSplit,
    model: ModelOptions,
}

/// What a rank has to tell in the end.
struct Outcome {
    generated: Generated,
    weights: WeightSummary,
    /// Whether the text could be written.
    written: io::Result<()>,
}

/// Streams the text to stdout, and what it took to stderr.
pub fn run(path: &Path, options: &Options) -> Result<()> {
    if let Some(activations) = options.activations {
        activations.set();
    }
    let devices = if options.distributed { Vec::new() } else { devices(options)? };
    let info = options.distributed.then(rank_info).transpose()?;
    let on_cpu = !options.distributed && devices.iter().all(Device::is_cpu);
    let checkpoint = Checkpoint::open(path)?;
    let sampling = Sampling { temperature: options.temperature, top_k: options.top_k, top_p: options.top_p };
    // Refused before anything is loaded or printed.
    let sampler = Sampler::new(sampling, options.seed)?;
    let work = Work {
        tokenizer: generate::load_tokenizer(&checkpoint)?,
        prompt: options.prompt.clone(),
        params: Params {
            sample_len: options.sample_len,
            sampling,
            seed: Some(sampler.seed()),
            stop_tokens: generate::stop_tokens(&checkpoint)?,
            ..Params::default()
        },
        experts: options.experts,
        model: ModelOptions { cache: cache_options(options), context: options.context },
        dtype: options.dtype.unwrap_or(if on_cpu { DType::F32 } else { DType::BF16 }),
        checkpoint,
    };
    let ranks = info.as_ref().map_or(devices.len(), |(info, _)| info.world_size());
    let outcome = match (&info, devices.as_slice()) {
        (Some((info, secret)), _) => {
            let outcome = Launch::default().distributed(info, secret, |rank| work.run_as(&rank))?;
            if info.rank() > 0 {
                return Ok(());
            }
            outcome
        }
        (None, [device]) => {
            let vb = VarBuilder::from_checkpoint(&work.checkpoint, work.dtype, device);
            let config = Config::from_checkpoint(&work.checkpoint)?;
            work.run(Model::with_options(&config, vb, work.model)?, None)?
        }
        (None, devices) => {
            let outcome = parallel::run(devices, move |rank| work.run_as(&rank))?;
            outcome.into_iter().next().context("no rank")?
        }
    };
    let Outcome { generated, weights, written } = outcome;
    match written {
        // Whoever read the text has gone, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
        result => result?,
    }
    report(&generated, &weights, ranks)?;
    Ok(())
}

fn cache_options(options: &Options) -> CacheOptions {
    let (keys, values) = options.kv_cache.unzip();
    CacheOptions { keys, values, max_tokens: options.max_tokens }
}

/// What the launcher says.
fn rank_info() -> Result<(RankInfo, Secret)> {
    if !cfg!(feature = "nccl") {
        bail!("--distributed: this program was built without NCCL; build it with `--features cli,nccl`");
    }
    Ok((RankInfo::from_env()?, Secret::from_env()?))
}

/// One device for each rank.
fn devices(options: &Options) -> Result<Vec<Device>> {
    let gpus = |count: usize| (0..count).map(Device::new_cuda).collect::<candle_core::Result<_>>();
    Ok(match options.ranks {
        0 => bail!("--ranks: expected at least 1, found 0"),
        1 if !options.cpu => vec![Device::cuda_if_available(0)?],
        count if !options.cpu => gpus(count).unwrap_or_else(|_| vec![Device::Cpu; count]),
        count => vec![Device::Cpu; count],
    })
}

impl Work {
    /// As one rank of several, all of which draw with the seed of the first.
    fn run_as(&self, rank: &Rank) -> candle_quant::Result<Outcome> {
        let config = Config::from_checkpoint(&self.checkpoint)?;
        let vb = VarBuilder::sharded(&self.checkpoint, rank, self.dtype).split_experts(self.experts);
        let model = Model::with_options(&config, vb, self.model)?;
        let seed = self.params.seed.unwrap_or_default();
        let seed = rank.broadcast(&Tensor::new(seed.cast_signed(), &Device::Cpu)?, 0)?.to_scalar::<i64>()?;
        let params = Params { seed: Some(seed.cast_unsigned()), ..self.params.clone() };
        Self { params, ..self.clone() }.run(model, Some(rank))
    }

    /// Generates the text; the first rank writes it.
    fn run(&self, mut model: Model, rank: Option<&Rank>) -> candle_quant::Result<Outcome> {
        let writes = rank.is_none_or(|rank| rank.index() == 0);
        let write = |text: &str| if writes { terminal::generated(text) } else { Ok(()) };
        let mut written = write(&self.prompt);
        let mut failure = None;
        let (tokenizer, params) = (&self.tokenizer, &self.params);
        let generated = generate::generate(&mut model, tokenizer, &self.prompt, params, |text| {
            if written.is_ok() {
                written = write(text);
            }
            let go_on = rank.map_or(Ok(written.is_ok()), |rank| as_the_first(rank, written.is_ok()));
            match go_on {
                Ok(true) => ControlFlow::Continue(()),
                Ok(false) => ControlFlow::Break(()),
                Err(error) => {
                    failure = Some(error);
                    ControlFlow::Break(())
                }
            }
        });
        if generated.is_err() && written.is_ok() {
            // The text so far has been written.
            let _ = write("\n");
        }
        let generated = generated?;
        if let Some(error) = failure {
            return Err(error);
        }
        let written = written.and_then(|()| write("\n"));
        Ok(Outcome { generated, weights: model.summary(), written })
    }
}

/// What the first rank says: all ranks go on, or none.
fn as_the_first(rank: &Rank, go_on: bool) -> candle_quant::Result<bool> {
    let answer = rank.broadcast(&Tensor::new(u8::from(go_on), &Device::Cpu)?, 0)?;
    Ok(answer.to_scalar::<u8>()? != 0)
}

fn report(generated: &Generated, weights: &WeightSummary, ranks: usize) -> io::Result<()> {
    let ended = match generated.finish {
        Finish::Stop => "end of text",
        _ => "sample length reached",
    };
    let mut stderr = terminal::stderr(false);
    writeln!(stderr)?;
    writeln!(stderr, "prompt: {} tokens, {:.1} tokens/s", generated.prompt_tokens, generated.prompt_rate())?;
    writeln!(stderr, "decode: {} tokens, {:.1} tokens/s", generated.decode_tokens, generated.decode_rate())?;
    let of = if ranks > 1 { format!("weights of the first of {ranks} ranks") } else { "weights".to_string() };
    writeln!(stderr, "{of}: {weights}, {:.2} MB", weights.size_in_bytes() as f64 / 1e6)?;
    writeln!(stderr, "{ended}; --seed {} repeats this run", generated.seed)
}
