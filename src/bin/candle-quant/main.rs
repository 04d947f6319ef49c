//! `candle-quant`: look into quantized checkpoints, run them, write down their logits.

mod generate;
mod inspect;
mod logits;

use clap::{Parser, Subcommand};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

/// Quantized checkpoints on candle.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Tell what a checkpoint is made of.
    Inspect(inspect::Options),
    /// Continue a text.
    Generate {
        /// The checkpoint's directory.
        path: PathBuf,
        #[command(flatten)]
        options: generate::Options,
    },
    /// Write the logits of given tokens to a safetensors file, to compare with other frameworks.
    Logits(logits::Options),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, and are no failure. A closed pipe is none either.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let result = match &cli.command {
        Command::Inspect(options) => inspect::run(options),
        Command::Generate { path, options } => generate::run(path, options),
        Command::Logits(options) => logits::run(options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let message = format!("{error:#}");
            let line = message.lines().map(str::trim).collect::<Vec<_>>().join(" ");
            eprintln!("candle-quant: {line}");
            ExitCode::FAILURE
        }
    }
}

/// Whether whoever read our output has gone, as `head` does.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io_error =
        |cause: &(dyn std::error::Error + 'static)| cause.downcast_ref::<io::Error>().map(io::Error::kind);
    error.chain().filter_map(io_error).any(|kind| kind == io::ErrorKind::BrokenPipe)
}
