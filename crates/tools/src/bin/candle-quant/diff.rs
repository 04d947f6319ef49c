//! The `diff` subcommand.

use super::{names, terminal, WRONG};
use anyhow::{bail, Context, Result};
use candle_quant_tools::diff::{self, Comparison, Diff, Outcome};
use serde_json::json;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(clap::Args)]
#[command(after_help = "\
Exit codes: 0 equal; 1 different; 2 a checkpoint can't be read, or no number of one was compared with one of the other.

Experts are compared whatever their layout: one by one, in stacks, with gate and up projections together.

Packed weights are dequantized. The relative RMS is that of the difference, over that of A. A NaN is equal to a NaN, \
an infinity to that of its sign, and neither to anything else, whatever the tolerance.")]
pub struct Options {
    /// The checkpoint to compare with: a directory, a file, which may be one of dense tensors, or the name of a model of the
    /// Hugging Face hub or of Ollama.
    a: PathBuf,
    /// The checkpoint that is compared; of any kind too.
    b: PathBuf,
    /// Leave out tensors that only one side has.
    #[arg(long)]
    common: bool,
    /// Relative RMS up to which a tensor counts as equal.
    #[arg(long, default_value_t = 0., value_parser = parse_tolerance)]
    tolerance: f64,
    /// Print all tensors, not only the worst that differ.
    #[arg(long)]
    all: bool,
    /// Print JSON, with all tensors.
    #[arg(long)]
    json: bool,
}

/// Tensors that are printed by default.
const MAX_TENSORS: usize = 20;

fn parse_tolerance(text: &str) -> Result<f64, String> {
    let tolerance = text.parse::<f64>().ok().filter(|tolerance| tolerance.is_finite() && *tolerance >= 0.);
    tolerance.ok_or_else(|| "expected a finite number, zero or above".to_string())
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let open = |path: &Path| names::open(path).context("nothing was compared");
    let (a, b) = (open(&options.a)?, open(&options.b)?);
    let diff =
        diff::diff(&a, &b, &diff::DiffOptions { tolerance: options.tolerance, common: options.common });
    if diff.tensors.is_empty() {
        bail!("{} and {} have no tensor in common", options.a.display(), options.b.display());
    }
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => {
            let mut json = json!(diff);
            json["equal"] = diff.equal().into();
            writeln!(stdout, "{json:#}")?;
        }
        false => print(&mut stdout, &diff, options.all)?,
    }
    stdout.flush()?;
    let is_compared = diff.compared_share > 0. || diff.tensors.iter().all(|tensor| tensor.equal);
    Ok(match (diff.readable() && is_compared, diff.equal()) {
        (false, _) => WRONG.into(),
        (true, false) => ExitCode::FAILURE,
        (true, true) => ExitCode::SUCCESS,
    })
}

fn print(out: &mut impl Write, diff: &Diff, all: bool) -> io::Result<()> {
    let different = diff.tensors.iter().filter(|tensor| !tensor.equal).count();
    let shown = if all { diff.tensors.len() } else { different.min(MAX_TENSORS) };
    if shown > 0 {
        writeln!(out, "{:>12} {:>12}  tensor", "relative RMS", "largest")?;
    }
    for Comparison { name, outcome, .. } in diff.tensors.iter().take(shown) {
        let (numbers, note) = match outcome {
            Outcome::Values { relative_rms, max_abs, not_finite, a, b } => {
                let formats = if a == b { a.clone() } else { format!("{a}, {b}") };
                let note = match not_finite {
                    0 => formats,
                    count => format!("{formats}; {count} NaN or infinite on one side"),
                };
                (format!("{relative_rms:>12.4e} {max_abs:>12.4e}"), note)
            }
            Outcome::OnlyInA => (dashes(), "only in the first".to_string()),
            Outcome::OnlyInB => (dashes(), "only in the second".to_string()),
            Outcome::Shapes { a, b } => (dashes(), format!("shapes {a:?}, {b:?}")),
            Outcome::Unreadable { message } => (dashes(), format!("unreadable: {message}")),
            other => (dashes(), format!("{other:?}")),
        };
        writeln!(out, "{numbers}  {name}  ({note})")?;
    }
    if !all && different > shown {
        writeln!(out, "and {} more; --all prints them", different - shown)?;
    }
    let share = diff.compared_share * 100.;
    // Nothing but all of them is 100 %.
    let share = if share < 100. { share.min(99.99) } else { share };
    writeln!(
        out,
        "{different} of {} tensors differ; {share:.2} % of all weights were compared",
        diff.tensors.len()
    )
}

fn dashes() -> String {
    format!("{:>12} {:>12}", "-", "-")
}
