//! The `generate` subcommand: text from a checkpoint.

use super::model::{LoadOptions, Loader};
use super::sampling::SamplingOptions;
use super::{device, terminal};
use anyhow::{bail, Context, Result};
use candle_core::{Device, Tensor};
use candle_quant::parallel::{self, ExpertSplit, Launch, Rank, RankInfo, Secret, MOST_RANKS_OF_A_PROCESS};
use candle_quant::{Checkpoint, VarBuilder, WeightSummary};
use candle_quant_models::chat::{Message, Template, Variables};
use candle_quant_models::generate::{self, Event, Finish, Generated, Params, Sampler, Session};
use candle_quant_models::Model;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;
use tokenizers::Tokenizer;

// Named as those of candle's examples. (A doc comment here would replace that of the command.)
#[derive(clap::Args, Debug)]
pub struct Options {
    /// The text to continue or, if the model has a chat template, to answer.
    #[arg(long, default_value = "Once upon a time")]
    prompt: String,
    /// Continue the prompt as it is, also if there is a chat template.
    #[arg(long)]
    raw: bool,
    /// The system prompt, for a model with a chat template.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// The most tokens to generate.
    #[arg(short = 'n', long, default_value_t = 300)]
    sample_len: usize,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    load: LoadOptions,
    /// Compute with this many ranks, each with its part of the weights: on GPUs if there are as many, else as
    /// threads on the CPU.
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Be one rank of those that torchrun, srun or mpirun has started, with a GPU of its own.
    #[arg(long, conflicts_with_all = ["ranks", "cpu"])]
    distributed: bool,
    /// After how many seconds of silence a rank of `--distributed` counts as failed; what the first rank is told counts.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, requires = "distributed")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    heartbeat_timeout: u64,
    /// What ranks have of a model's experts: a part `inside` each, or whole ones, shared out `across` the ranks.
    #[arg(long, default_value_t, value_name = "SPLIT")]
    experts: ExpertSplit,
    /// The most tokens of prompt and text that the KV cache may hold [default: as many as memory allows].
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<usize>,
}

/// What every rank works with.
#[derive(Clone)]
struct Work {
    loader: Loader,
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: Params,
    experts: ExpertSplit,
}

/// What the model reads.
#[derive(Clone)]
enum Prompt {
    Raw(String),
    /// Written by the chat template.
    Chat(String),
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
    // Refused before anything is fetched.
    let ranks = ranks(options)?;
    let info = options.distributed.then(rank_info).transpose()?;
    let checkpoint = options.load.open(path)?;
    let devices = if options.distributed { Vec::new() } else { device::all(ranks, options.load.cpu) };
    let on_cpu = !options.distributed && devices.iter().all(Device::is_cpu);
    let params = options.sampling.apply(Params::from_checkpoint(&checkpoint)?);
    // Refused before anything is loaded or printed.
    let sampler = Sampler::new(params.sampling, params.seed)?;
    let work = Work {
        tokenizer: generate::load_tokenizer(&checkpoint)?,
        prompt: prompt(&checkpoint, options)?,
        params: Params { sample_len: options.sample_len, seed: Some(sampler.seed()), ..params },
        experts: options.experts,
        loader: {
            let mut loader = options.load.loader(checkpoint, on_cpu)?;
            loader.options.cache.max_tokens = options.max_tokens;
            loader
        },
    };
    let by_template = if matches!(work.prompt, Prompt::Chat(_)) { " by the chat template" } else { "" };
    let ranks = info.as_ref().map_or(devices.len(), |(info, _)| info.world_size());
    let outcome = match (&info, devices.as_slice()) {
        (Some((info, secret)), _) => {
            let launch = Launch::default().heartbeat_timeout(Duration::from_secs(options.heartbeat_timeout));
            let outcome = launch.distributed(info, secret, |rank| work.run_as(&rank))?;
            if info.rank() > 0 {
                return Ok(());
            }
            outcome
        }
        (None, [device]) => work.run(work.loader.load(device)?, None)?,
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
    report(&generated, &weights, ranks, by_template)?;
    Ok(())
}

/// The prompt by the chat template, if there is one.
fn prompt(checkpoint: &Checkpoint, options: &Options) -> Result<Prompt> {
    let template = match options.raw {
        true => None,
        false => Template::from_checkpoint(checkpoint).context("--raw continues the prompt as it is")?,
    };
    let Some(template) = template else {
        if options.system.is_some() {
            bail!("--system: {} has no chat template", checkpoint.path().display());
        }
        return Ok(Prompt::Raw(options.prompt.clone()));
    };
    let system = options.system.iter().map(|text| Message::new("system", text));
    let messages: Vec<_> = system.chain([Message::new("user", &options.prompt)]).collect();
    Ok(Prompt::Chat(template.render(&messages, &Variables::generation_prompt())?))
}

/// What the launcher says.
fn rank_info() -> Result<(RankInfo, Secret)> {
    if !cfg!(feature = "nccl") {
        bail!("--distributed: this program was built without NCCL; build it with `--features cli,nccl`");
    }
    Ok((RankInfo::from_env()?, Secret::from_env()?))
}

/// How many ranks there are in this process.
fn ranks(options: &Options) -> Result<usize> {
    match options.ranks {
        count if (1..=MOST_RANKS_OF_A_PROCESS).contains(&count) => Ok(count),
        count => bail!("--ranks: expected 1 to {MOST_RANKS_OF_A_PROCESS}, found {count}"),
    }
}

impl Work {
    /// As one rank of several, all of which draw with the seed of the first.
    fn run_as(&self, rank: &Rank) -> candle_quant::Result<Outcome> {
        let vb = VarBuilder::sharded(&self.loader.checkpoint, rank, self.loader.dtype);
        let model = self.loader.load_from(vb.split_experts(self.experts))?;
        let seed = self.params.seed.unwrap_or_default();
        let seed = rank.broadcast(&Tensor::new(seed.cast_signed(), &Device::Cpu)?, 0)?.to_scalar::<i64>()?;
        let params = Params { seed: Some(seed.cast_unsigned()), ..self.params.clone() };
        Self { params, ..self.clone() }.run(model, Some(rank))
    }

    /// Generates the text; the first rank writes it.
    fn run(&self, mut model: Model, rank: Option<&Rank>) -> candle_quant::Result<Outcome> {
        let writes = rank.is_none_or(|rank| rank.index() == 0);
        let write = |text: &str| if writes { terminal::generated(text) } else { Ok(()) };
        let (tokenizer, params) = (&self.tokenizer, &self.params);
        let (mut written, prompt) = match &self.prompt {
            Prompt::Raw(text) => (write(text), generate::encode(tokenizer, text, true)?),
            Prompt::Chat(text) => (Ok(()), generate::encode(tokenizer, text, false)?),
        };
        let mut failure = None;
        let generated = Session::default().generate(&mut model, tokenizer, &prompt, params, |event| {
            let text = match event {
                Event::Text(text) if !text.is_empty() => text,
                _ => return ControlFlow::Continue(()),
            };
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

fn report(generated: &Generated, weights: &WeightSummary, ranks: usize, by_template: &str) -> io::Result<()> {
    let ended = match generated.finish {
        Finish::Stop | Finish::StopString => "end of text",
        _ => "sample length reached",
    };
    let mut stderr = terminal::stderr(false);
    writeln!(stderr)?;
    let (tokens, rate) = (generated.prompt_tokens, generated.prompt_rate());
    writeln!(stderr, "prompt: {tokens} tokens{by_template}, {rate:.1} tokens/s")?;
    let (tokens, rate) = (generated.decode_tokens, generated.decode_rate());
    write!(stderr, "decode: {tokens} tokens, {rate:.1} tokens/s")?;
    match generated.guessed_tokens {
        0 => writeln!(stderr)?,
        guesses => writeln!(stderr, "; {} of {guesses} guesses were right", generated.right_guesses)?,
    }
    let of = if ranks > 1 { format!("weights of the first of {ranks} ranks") } else { "weights".to_string() };
    writeln!(stderr, "{of}: {weights}, {:.2} MB", weights.size_in_bytes() as f64 / 1e6)?;
    writeln!(stderr, "{ended}; --seed {} repeats this run", generated.seed)
}
