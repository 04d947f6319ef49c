//! `candle-quant`: look into quantized checkpoints, check and compare them, run them.

mod adapters;
mod bench;
mod chat;
mod convert;
mod device;
mod diff;
mod generate;
mod inspect;
mod list;
mod logits;
mod memory;
mod model;
mod names;
mod patch_candle;
mod plan;
mod progress;
mod pull;
mod quantize;
mod sampling;
mod size;
mod terminal;
mod verify;
mod warnings;

use clap::{Parser, Subcommand};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit code of `verify` and `diff` when something is wrong; 1 says that checkpoints differ.
const WRONG: u8 = 2;

const EXIT_CODES: &str = "\
Exit codes: 0 success, 1 failure.
  verify: 0 nothing is wrong, 2 something is, or the checkpoint can't be opened.
  diff: 0 equal, 1 different, 2 a checkpoint can't be read.
  convert: 1 wrong usage, 2 bad input, 3 too much is lost, 4 a file can't be read or written.
  Wrong usage: 2 for verify and diff, else 1.";

/// Quantized checkpoints on candle.
#[derive(Parser)]
#[command(name = "candle-quant", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Tell what a checkpoint is made of.
    Inspect(inspect::Options),
    /// Read a checkpoint and tell what is wrong with it.
    Verify(verify::Options),
    /// Compare two checkpoints, number by number.
    Diff(diff::Options),
    /// Quantize a checkpoint.
    Convert(Box<convert::Options>),
    /// Continue a text.
    Generate {
        /// The checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
        path: PathBuf,
        #[command(flatten)]
        options: generate::Options,
    },
    /// Talk with a model.
    Chat(chat::Options),
    /// Measure how fast a model runs here.
    Bench(Box<bench::Options>),
    /// Fetch a model of the Hugging Face hub; the other commands do so too, if they are given its name.
    Pull(pull::Options),
    /// List the models that are there: in the cache of the Hugging Face hub, and in stores of Ollama.
    List(list::Options),
    /// Tell what a model, or each of several ranks of it, would load, and in which formats it fits into memory.
    Plan(plan::Options),
    /// Write the logits of given tokens to a safetensors file, to compare with other frameworks.
    Logits(logits::Options),
    /// Write a candle-nn for `[patch.crates-io]` whose layers run packed weights.
    PatchCandle(patch_candle::Options),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, and are no failure. A closed pipe is none either.
            let _ = error.print();
            let command = std::env::args().nth(1);
            let failure = match command.as_deref() {
                Some("verify" | "diff") => WRONG.into(),
                _ => ExitCode::FAILURE,
            };
            return if error.use_stderr() { failure } else { ExitCode::SUCCESS };
        }
    };
    let done = |()| ExitCode::SUCCESS;
    if matches!(
        cli.command,
        Command::Generate { .. } | Command::Chat(_) | Command::Bench(_) | Command::Logits(_)
    ) {
        warnings::show();
    }
    let (result, failure) = match &cli.command {
        Command::Inspect(options) => (inspect::run(options).map(done), ExitCode::FAILURE),
        Command::Verify(options) => (verify::run(options), WRONG.into()),
        Command::Diff(options) => (diff::run(options), WRONG.into()),
        Command::Generate { path, options } => (generate::run(path, options).map(done), ExitCode::FAILURE),
        Command::Chat(options) => (chat::run(options).map(done), ExitCode::FAILURE),
        Command::Pull(options) => (pull::run(options).map(done), ExitCode::FAILURE),
        Command::List(options) => (list::run(options).map(done), ExitCode::FAILURE),
        Command::Convert(options) => match convert::run(options) {
            Ok(()) => (Ok(ExitCode::SUCCESS), ExitCode::FAILURE),
            Err((error, code)) => (Err(error), code.into()),
        },
        Command::Bench(options) => (bench::run(options).map(done), ExitCode::FAILURE),
        Command::Plan(options) => (plan::run(options).map(done), ExitCode::FAILURE),
        Command::Logits(options) => (logits::run(options).map(done), ExitCode::FAILURE),
        Command::PatchCandle(options) => (patch_candle::run(options).map(done), ExitCode::FAILURE),
    };
    match result {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Errors of candle bring a stack of calls, ours do not.
            let error = match error.downcast::<candle_core::Error>() {
                Ok(error) => candle_quant::Error::from(error).into(),
                Err(error) => error,
            };
            let message = format!("{error:#}");
            terminal::say(&format!(
                "candle-quant: {}",
                message.lines().map(str::trim).collect::<Vec<_>>().join(" ")
            ));
            failure
        }
    }
}

/// Whether whoever read our output has gone, as `head` does.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io_error =
        |cause: &(dyn std::error::Error + 'static)| cause.downcast_ref::<io::Error>().map(io::Error::kind);
    error.chain().filter_map(io_error).any(|kind| kind == io::ErrorKind::BrokenPipe)
}
