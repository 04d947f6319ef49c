//! The `convert` subcommand.

mod choose;
mod conversion;
mod fit;
mod importance;
mod parse;
mod print;

use super::progress::Progress;
use super::{names, size, terminal};
use anyhow::{Context, Result};
use candle_core::DType;
use candle_quant::checkpoint::{OpenOptions, Reads};
use candle_quant::{Checkpoint, Error};
use candle_quant_tools::convert::{
    self, ConvertEvent, ConvertPlan, ConvertReport, Role, RunOptions, Spec, Target,
};
use candle_quant_tools::staging::{available_space, check_file, write_file};
use conversion::{conversion, is_open};
use parse::{parse_bits, parse_limit, parse_role, parse_spec, parse_tensors};
use serde_json::json;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The exit codes beside 0.
pub const USAGE: u8 = 1;
const BAD_INPUT: u8 = 2;
const QUALITY: u8 = 3;
const IO: u8 = 4;

#[derive(clap::Args)]
#[command(after_help = "\
Formats: affine:BITS[:gGROUP] with 1, 2, 3, 4, 5, 6 or 8 bits and groups of 32, 64 (default) or 128, or the width \
alone (4, q4, int4, 4bit, afq4); mxfp4, mxfp8, nvfp4, mxint8, nf4, fp4; with --to gguf and uqff q4_0, q4_1, q5_0, q5_1, \
q8_0, q2_k, q3_k, q4_k, q5_k, q6_k; with --to uqff hqq4, hqq8, fp8, f8q8; with --to slm1 q4_0, q8_0; f16, bf16, f32; keep.

Roles: embed, lm-head, router, experts, v, down, attn, mlp, vision, audio, norm, conv, other.

Recipes: safe, uniform (what mlx-lm does: everything alike, but what a family has its own idea of), mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6 (those of \
mlx-lm), mistralrs, ollama, llmcompressor (what these programs do), or a TOML file: format = \"4\", then any number of [[rule]] with tensors (glob), regex, layers (\"0-8\"), role, and \
format; the first that matches decides; or a topology of mistral.rs (.yml, .yaml; what it does not name stays). Without a recipe it is safe: the output head gets the next wider \
format; routers, norms, vision, audio and small tensors are kept; or with --to uqff mistralrs, with --to ollama ollama, with --to hf llmcompressor. \
Without a format, too, packed weights are written as they are, and nothing else is packed.

Exit codes: 0 done; 1 wrong usage, or OUT exists; 2 SRC can't be converted; 3 --max-rrmse exceeded; 4 a file can't \
be read or written.")]
pub struct Options {
    /// The checkpoint: a directory, a file, or the name of a model of Ollama or of the Hugging Face hub.
    source: PathBuf,
    /// The folder to create, or the store of Ollama to add to.
    #[arg(short, long, required_unless_present_any = ["dry_run", "compare"])]
    out: Option<PathBuf>,
    /// What to write [default: mlx; with --dequantize the numbers under the names that they have].
    #[arg(long, value_enum)]
    to: Option<To>,
    /// What the model is called in the store of Ollama: [[HOST/]NAMESPACE/]MODEL[:TAG].
    #[arg(long)]
    name: Option<String>,
    /// What tensors become; with --to uqff several types, each in files of its own that share all else.
    #[arg(long, value_name = "SPEC[,..]", value_delimiter = ',', value_parser = parse_spec, group = "what")]
    format: Vec<Spec>,
    /// Bits of an affine format.
    #[arg(long, group = "what")]
    bits: Option<usize>,
    /// Group size of the affine format, with --bits or a mixed recipe [default: 64].
    #[arg(long, value_name = "SIZE", conflicts_with = "format")]
    group_size: Option<usize>,
    /// Choose a format for each weight, so that all matrices together have at most BITS per weight and nearly as many:
    /// step by step the format that saves most squared error for a byte, of errors that are measured first.
    #[arg(long, value_name = "BITS", value_parser = parse_bits, group = "what")]
    target_bpw: Option<f64>,
    /// Choose the widest format with which the model runs in this much memory, such as 8GB: weights, KV cache and what it
    /// takes to compute, as `plan --memory` tells them.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, group = "what", conflicts_with_all = ["recipe", "group_size"])]
    fit: Option<u64>,
    /// The longest text, in tokens, for which the model has to fit [default: 8192, or fewer if it is made for fewer].
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// What --target-bpw chooses from [default: affine formats from 3 bits on], or --fit [default: those of `plan --memory`].
    #[arg(long, value_name = "SPEC,..", value_delimiter = ',', value_parser = parse_spec)]
    candidates: Vec<Spec>,
    /// Keep what --target-bpw measures in a file, or take it from there if it is there already.
    #[arg(long, value_name = "FILE")]
    sensitivities: Option<PathBuf>,
    /// Look for codes and scales of a smaller squared error, group by group (slower; no longer the bytes of the
    /// program whose format it is).
    #[arg(long)]
    search: bool,
    /// Run the model on this text, and let the squared errors of --search and --target-bpw count by what layers are given
    /// there. Texts are separated by blank lines; give some that are like what the model is for.
    #[arg(long, value_name = "TEXT")]
    calibrate: Option<PathBuf>,
    /// Keep what --calibrate finds in a file, from which it goes on if it was interrupted, and what --awq finds in FILE.awq; or take it
    /// from there.
    #[arg(long, value_name = "FILE")]
    statistics: Option<PathBuf>,
    /// Take an importance matrix of llama.cpp (.dat or .gguf) instead.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["statistics", "dequantize"])]
    imatrix: Option<PathBuf>,
    /// Let the columns of a weight make up for what those before them lose, as GPTQ does, by the text of --calibrate (much
    /// slower; with --search scales are searched for, too).
    #[arg(long, requires = "calibrate")]
    feedback: bool,
    /// Multiply the columns of weights that are given large numbers before they are packed, and divide what makes these numbers
    /// by the same, as AWQ does: by as much as outputs lose least for the text of --calibrate.
    #[arg(long, requires = "calibrate")]
    awq: bool,
    /// A recipe by name, a TOML file, or a topology of mistral.rs.
    #[arg(long, value_name = "NAME|FILE")]
    recipe: Option<String>,
    /// Also write what becomes of each tensor to a file, as a recipe.
    #[arg(long, value_name = "FILE")]
    save_recipe: Option<PathBuf>,
    /// What tensors of a role become, before the rules of the recipe; may be repeated.
    #[arg(long, value_name = "ROLE=SPEC", value_parser = parse_role)]
    role: Vec<(Role, Spec)>,
    /// What the tensors become whose names match, before all other rules; may be repeated.
    #[arg(long, value_name = "GLOB=SPEC", value_parser = parse_tensors)]
    tensors: Vec<(String, Spec)>,
    /// Round all float numbers to f16, bf16 or f32 first, and so the scales [default: as in SRC].
    #[arg(long, value_parser = super::model::parse_dtype)]
    dtype: Option<DType>,
    /// Dequantize what is packed already, and pack it anew.
    #[arg(long)]
    requantize: bool,
    /// Write dense elements: dequantize what is packed.
    #[arg(long, conflicts_with_all = [
        "format", "bits", "target_bpw", "fit", "group_size", "recipe", "save_recipe", "role", "tensors", "requantize", "search",
        "calibrate", "statistics", "feedback", "awq"
    ])]
    dequantize: bool,
    /// Refuse if a tensor can't become what its rule says.
    #[arg(long)]
    strict: bool,
    /// The size of a file of weights, such as 500MB or 4GiB.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "5GB")]
    max_shard_size: u64,
    /// Print the plan, made from headers (with --target-bpw also from what is measured; to files where integers have zeros or none, also
    /// from their scales), and write no output.
    #[arg(long, conflicts_with = "resume")]
    dry_run: bool,
    /// Tell what each of these formats would lose, with the safe defaults, and write nothing.
    #[arg(long, value_name = "SPEC,..", value_delimiter = ',', value_parser = parse_spec, conflicts_with_all = [
        "out", "format", "bits", "target_bpw", "fit", "group_size", "recipe", "save_recipe", "dequantize", "dry_run", "resume",
        "overwrite", "allow_nonfinite", "max_rrmse", "report"
    ])]
    compare: Vec<Spec>,
    /// Pack on the CPU even if there is a GPU; the bytes are the same.
    #[arg(long)]
    cpu: bool,
    /// Print JSON: the plan, the report, or the comparison.
    #[arg(long)]
    json: bool,
    /// Refuse to begin anew. Without it, what was interrupted is taken up if SRC and options are the same, and else
    /// replaced.
    #[arg(long)]
    resume: bool,
    /// Replace OUT if all in it is listed in its candle-quant.json, as an earlier conversion wrote it; it stays until the new
    /// one is complete.
    #[arg(long, conflicts_with = "dry_run")]
    overwrite: bool,
    /// Accept NaN and infinities in SRC; in packed tensors they become zero.
    #[arg(long)]
    allow_nonfinite: bool,
    /// Make no output if a tensor has a larger error, relative to the RMS of its numbers.
    #[arg(long, value_name = "LIMIT", value_parser = parse_limit)]
    max_rrmse: Option<f64>,
    /// Also write the report, as JSON, to a file.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Tell nothing while converting.
    #[arg(short, long)]
    quiet: bool,
    /// Tell the progress on stderr as lines of JSON.
    #[arg(long, conflicts_with = "quiet")]
    json_progress: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum To {
    /// A checkpoint of MLX.
    Mlx,
    /// A model of mistral.rs: affine formats of 2, 3, 4, 6 and 8 bits, mxfp4, q4_0 to q8_0, q2_k to q6_k, hqq4, hqq8, fp8, f8q8.
    Uqff,
    /// A model in a store of Ollama: affine formats of 4 and 8 bits, nvfp4, mxfp4 and mxfp8.
    Ollama,
    /// A checkpoint of transformers, as models are published: names, experts, config. Dense (--dequantize), or packed as
    /// compressed-tensors: affine formats of 4 and 8 bits, mxfp4, mxfp8, nvfp4.
    Hf,
    /// A GGUF file of llama.cpp, OUT/model.gguf, with metadata and tokenizer: q4_0 to q8_0, q2_k to q6_k, mxfp4, nvfp4, or dense
    /// (--dequantize).
    Gguf,
    /// An SLM1 file, OUT/model.slm, of a model of the llama family: q4_0, q8_0, or dense (--dequantize). The checksum in it is a
    /// placeholder, since its algorithm is not published.
    Slm1,
}

impl Options {
    fn target(&self) -> Target {
        self.to.unwrap_or(To::Mlx).target()
    }
}

impl To {
    fn target(self) -> Target {
        match self {
            Self::Mlx => Target::Mlx,
            Self::Uqff => Target::Uqff,
            Self::Ollama => Target::Ollama,
            Self::Hf => Target::HuggingFace,
            Self::Gguf => Target::Gguf,
            Self::Slm1 => Target::Slm1,
        }
    }
}

/// Runs the command; an error comes with its exit code.
pub fn run(options: &Options) -> Result<(), (anyhow::Error, u8)> {
    let usage = |error| (error, USAGE);
    let bad_input = |error: Error| (error.into(), BAD_INPUT);
    if !options.compare.is_empty() {
        return compare(options);
    }
    let mut conversion = conversion(options, None).map_err(usage)?;
    if let (Some(out), false) = (&options.out, options.dry_run) {
        convert::check_output(out, &conversion, &run_options(options)).map_err(|error| match error {
            Error::Io { .. } => (error.into(), IO),
            _ => (error.into(), USAGE),
        })?;
    }
    if let Some(path) = &options.save_recipe {
        check_writable(path).map_err(|error| (error, IO))?;
    }
    let source = open(&options.source).map_err(bad_input)?;
    let text = importance::add(options, &source, &mut conversion)?;
    if let Some(bits) = options.target_bpw {
        conversion.recipe = choose::choose(options, &source, &conversion, bits)?;
    }
    if let Some(memory) = options.fit {
        conversion.recipe = fit::choose(options, &source, memory).map_err(|error| (error, BAD_INPUT))?;
    }
    let plan = importance::plan(options, &source, &mut conversion, text.as_deref())?;
    // A dense model in another layout is what --to hf, gguf and slm1 are for.
    if is_open(options) && !plan.packs() && !matches!(options.to, Some(To::Hf | To::Gguf | To::Slm1)) {
        let problem = "what are the tensors to become, of which none is packed? Give --format, --bits, --target-bpw, --fit, --recipe or --dequantize";
        return Err((anyhow::anyhow!(problem), USAGE));
    }
    if let Some(path) = &options.save_recipe {
        let recipe = plan.recipe_toml().map_err(bad_input)?;
        write_file(path, recipe.as_bytes())
            .with_context(|| cannot_write(path))
            .map_err(|error| (error, IO))?;
    }
    match &options.out {
        Some(out) if !options.dry_run => write(options, &plan, out),
        _ => print_plan(options, &plan).map_err(|error| (error.into(), IO)),
    }
}

/// The exit code of an error that is none of usage.
fn code(error: &Error) -> u8 {
    match error {
        Error::Quality { .. } => QUALITY,
        Error::Io { .. } => IO,
        _ => BAD_INPUT,
    }
}

/// The progress of a conversion, which goes through so many tensors and bytes of them.
fn progress(options: &Options, tensors: usize, bytes: u64) -> Progress {
    let progress = Progress::new("tensors", options.quiet, options.json_progress);
    progress.plan(tensors, bytes);
    progress
}

pub fn tell_progress(progress: &Progress, event: &ConvertEvent) {
    match *event {
        ConvertEvent::Skipped { bytes, tensors } => progress.skip(tensors, bytes),
        ConvertEvent::Advanced { tensor, bytes } => progress.advance(tensor, bytes),
        ConvertEvent::Finished { tensor } => progress.finish_one(tensor),
        _ => {}
    }
}

/// A source that shrinks meanwhile is an error.
fn open(source: &Path) -> Result<Checkpoint, Error> {
    Checkpoint::open_with(
        names::locate(source)?,
        OpenOptions { reads: Reads::Positioned, ..Default::default() },
    )
}

/// Measures one format after the other.
fn compare(options: &Options) -> Result<(), (anyhow::Error, u8)> {
    let bad_input = |error: Error| (error.into(), BAD_INPUT);
    let source = open(&options.source).map_err(bad_input)?;
    let mut reports = Vec::new();
    for format in &options.compare {
        let mut conversion = conversion(options, Some(*format)).map_err(|error| (error, USAGE))?;
        let text = importance::add(options, &source, &mut conversion)?;
        let plan = importance::plan(options, &source, &mut conversion, text.as_deref())?;
        let progress = progress(options, plan.tensors().count(), plan.source_bytes());
        let report = convert::measure(&plan, &|event| tell_progress(&progress, &event));
        progress.finish();
        reports.push((*format, report.map_err(bad_input)?));
    }
    let mut stdout = terminal::stdout(options.json);
    let printed = match options.json {
        true => writeln!(stdout, "{:#}", print::comparison_json(&reports)),
        false => print::comparison(&mut stdout, &reports),
    };
    printed.and_then(|()| stdout.flush()).map_err(|error| (error.into(), IO))
}

fn run_options(options: &Options) -> RunOptions {
    RunOptions {
        resume: options.resume,
        overwrite: options.overwrite,
        allow_nonfinite: options.allow_nonfinite,
        max_relative_rms: options.max_rrmse,
    }
}

fn write(options: &Options, plan: &ConvertPlan, out: &Path) -> Result<(), (anyhow::Error, u8)> {
    if let Some(path) = &options.report {
        check_writable(path).map_err(|error| (error, IO))?;
    }
    let progress = progress(options, plan.tensors().count(), plan.source_bytes());
    let measured = Mutex::new(None);
    let result = convert::convert(plan, out, &run_options(options), &|event| {
        if let ConvertEvent::Measured { report } = event {
            *measured.lock().unwrap_or_else(PoisonError::into_inner) = Some(report.clone());
        }
        tell_progress(&progress, &event);
    });
    progress.finish();
    // What is lost is reported too if it is too much.
    let report = match &result {
        Ok(report) => Some(report.clone()),
        Err(Error::Quality { .. }) => measured.into_inner().unwrap_or_else(PoisonError::into_inner),
        Err(_) => None,
    };
    if let Some(report) = &report {
        tell(options, plan, out, report, result.is_ok()).map_err(|error| (error, IO))?;
    }
    result.map(|_| ()).map_err(|error| {
        let code = code(&error);
        (error.into(), code)
    })
}

/// The report, in the file and on stdout; there as JSON only, if no output was made.
fn tell(
    options: &Options,
    plan: &ConvertPlan,
    out: &Path,
    report: &ConvertReport,
    is_made: bool,
) -> Result<()> {
    if let Some(path) = &options.report {
        write_file(path, format!("{:#}\n", json!(report)).as_bytes()).with_context(|| cannot_write(path))?;
    }
    let mut stdout = terminal::stdout(options.json);
    match (options.json, is_made && !options.quiet) {
        (true, _) => writeln!(stdout, "{:#}", json!(report))?,
        (false, true) => print::report(&mut stdout, plan, report, out)?,
        (false, false) => {}
    }
    Ok(stdout.flush()?)
}

/// Before the work: that a file can't be written is not to be learnt after it. Nothing changes by that.
fn check_writable(path: &Path) -> Result<()> {
    check_file(path).with_context(|| cannot_write(path))
}

fn cannot_write(path: &Path) -> String {
    format!("{}: can't be written", path.display())
}

fn print_plan(options: &Options, plan: &ConvertPlan) -> io::Result<()> {
    let available = options.out.as_deref().and_then(available_space);
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => writeln!(stdout, "{:#}", print::plan_json(plan, available))?,
        false => print::plan(&mut stdout, plan, available)?,
    }
    stdout.flush()
}
