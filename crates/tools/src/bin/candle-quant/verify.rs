//! The `verify` subcommand.

use super::{names, terminal, WRONG};
use anyhow::Result;
use candle_quant_tools::verify::{verify, VerifyReport};
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0 nothing is wrong; 2 something is, or PATH can't be opened.")]
pub struct Options {
    /// A checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
    path: PathBuf,
    /// Count warnings as errors.
    #[arg(long)]
    strict: bool,
    /// Print all findings, not only the worst.
    #[arg(long)]
    all: bool,
    /// Print JSON, with all findings.
    #[arg(long)]
    json: bool,
}

/// Findings that are printed by default: in a damaged file they are many and alike.
const MAX_FINDINGS: usize = 20;

pub fn run(options: &Options) -> Result<ExitCode> {
    let report = match names::open(&options.path) {
        Ok(checkpoint) => verify(&checkpoint),
        Err(error) => VerifyReport::not_opened(&error),
    };
    let passed = report.passed(options.strict);
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => {
            let mut json = json!(report);
            json["passed"] = passed.into();
            writeln!(stdout, "{json:#}")?;
        }
        false => print(&mut stdout, &report, options.all)?,
    }
    stdout.flush()?;
    Ok(if passed { ExitCode::SUCCESS } else { WRONG.into() })
}

fn print(out: &mut impl Write, report: &VerifyReport, all: bool) -> io::Result<()> {
    let shown = if all { usize::MAX } else { MAX_FINDINGS };
    for finding in report.findings.iter().take(shown) {
        writeln!(out, "{finding}")?;
    }
    if let Some(more @ 1..) = report.findings.len().checked_sub(shown) {
        writeln!(out, "and {more} more; --all prints them")?;
    }
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    writeln!(out, "{report}")
}
