//! The `inspect` subcommand.

use super::memory::{self, MemoryOptions};
use super::size::megabytes;
use super::{names, terminal};
use anyhow::{bail, Result};
use candle_quant::checkpoint::{natural_order, Weight};
use candle_quant::{Checkpoint, WeightSummary};
use candle_quant_models::sharding::{Footprint, ShardPlan, Workload};
use candle_quant_models::Config;
use candle_quant_tools::provenance::{provenance, Statement};
use candle_quant_tools::verify::unrounded_activations;
use serde_json::{json, Value};
use std::io::{self, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Options {
    /// A checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
    path: PathBuf,
    /// List every tensor.
    #[arg(long)]
    tensors: bool,
    #[command(flatten)]
    memory: MemoryOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Unreadable tensors that are reported by default: in a damaged file they are many and alike.
const MAX_FAILURES: usize = 5;

/// One tensor; a quantized weight is one.
struct Entry {
    name: String,
    format: String,
    dims: Vec<usize>,
    bytes: u64,
}

impl Entry {
    fn new(name: &str, weight: &Weight) -> Self {
        Self {
            name: name.to_string(),
            format: weight.format_name(),
            dims: weight.dims().to_vec(),
            bytes: weight.size_in_bytes() as u64,
        }
    }
}

/// What there is to tell about a checkpoint.
struct Report {
    kind: String,
    architecture: Option<String>,
    /// What it says of where it comes from.
    provenance: Vec<Statement>,
    /// What its model needs, if there is one for it.
    memory: Option<(Workload, Footprint)>,
    /// Weights of two or more dimensions: what quantization is about.
    weights: Vec<Entry>,
    /// Norms, biases and the like.
    others: Vec<Entry>,
    odd: Vec<String>,
    /// Why tensors can't be read, one by one.
    failures: Vec<String>,
}

pub fn run(options: &Options) -> Result<()> {
    let report = Report::new(&names::open(&options.path)?, &options.memory);
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => writeln!(stdout, "{:#}", report.json(options.tensors))?,
        false => report.print(&mut stdout, options.tensors)?,
    }
    stdout.flush()?;
    match report.failures.len() {
        0 if report.weights.is_empty() && report.others.is_empty() => {
            bail!("{}: there are no tensors in it; is the download complete?", options.path.display())
        }
        0 => Ok(()),
        count => bail!("{}: {count} of its tensors can't be read", options.path.display()),
    }
}

impl Report {
    fn new(checkpoint: &Checkpoint, memory: &MemoryOptions) -> Self {
        let config = checkpoint.config();
        let model = Config::from_checkpoint(checkpoint);
        let mut report = Self {
            kind: checkpoint.kind().to_string(),
            architecture: architecture(config),
            provenance: Vec::new(),
            memory: None,
            weights: Vec::new(),
            others: Vec::new(),
            odd: Vec::new(),
            failures: Vec::new(),
        };
        let mut names: Vec<&str> = checkpoint.tensor_names().collect();
        names.sort_by(|a, b| natural_order(a, b));
        for name in names {
            let module = name.strip_suffix(".weight").unwrap_or(name);
            let in_features = model.as_ref().ok().and_then(|model| model.in_features(module));
            match checkpoint.tensor(name, in_features) {
                Ok(weight) => report.add(Entry::new(name, &weight)),
                Err(error) => report.failures.push(error.to_string()),
            }
        }
        report.odd.extend(checkpoint.warnings());
        report.odd.extend(unrounded_activations(checkpoint));
        match provenance(checkpoint) {
            Ok(statements) => report.provenance = statements,
            Err(error) => report.odd.push(format!("where it comes from is not known: {error}")),
        }
        match model {
            Err(error) => report.odd.push(format!("this crate has no model for it: {error}")),
            // What can't be read has been told, and what it needs is not known.
            Ok(_) if report.failures.is_empty() => match needs(checkpoint, memory) {
                Ok(needs) => report.memory = needs,
                Err(error) => report.odd.push(format!("what memory it needs is not known: {error}")),
            },
            Ok(_) => {}
        }
        report
    }

    fn add(&mut self, entry: Entry) {
        match entry.dims.len() {
            0 | 1 => self.others.push(entry),
            _ => self.weights.push(entry),
        }
    }

    fn summary(&self) -> WeightSummary {
        let mut summary = WeightSummary::default();
        for weight in &self.weights {
            let elements = weight.dims.iter().map(|&dim| dim as u64).product();
            summary.add(&weight.format, elements, weight.bytes);
        }
        summary
    }

    fn other_bytes(&self) -> u64 {
        self.others.iter().map(|tensor| tensor.bytes).sum()
    }

    fn print(&self, out: &mut impl Write, tensors: bool) -> io::Result<()> {
        let summary = self.summary();
        writeln!(out, "kind: {}", self.kind)?;
        writeln!(out, "architecture: {}", self.architecture.as_deref().unwrap_or("unknown"))?;
        for Statement { about, text, from, .. } in &self.provenance {
            writeln!(out, "{about}: {text} ({from})")?;
        }
        match self.weights.is_empty() {
            true => writeln!(out, "weights: none, of two or more dimensions")?,
            false => writeln!(out, "weights:")?,
        }
        for (format, share) in summary.formats() {
            let (count, millions) = (share.count, share.elements as f64 / 1e6);
            writeln!(
                out,
                "  {count:>5} x {format:<20} {millions:>12.3} M elements {:>14}",
                megabytes(share.bytes)
            )?;
        }
        if !self.weights.is_empty() {
            writeln!(out, "bits per weight: {:.3}", summary.bits_per_weight())?;
        }
        writeln!(
            out,
            "size: {} of weights, {} of {} other tensors",
            megabytes(summary.size_in_bytes()),
            megabytes(self.other_bytes()),
            self.others.len()
        )?;
        if let Some((workload, footprint)) = &self.memory {
            writeln!(out, "memory for {}: {}", memory::purpose(workload), memory::line(footprint))?;
        }
        let shown = if tensors { self.failures.len() } else { MAX_FAILURES };
        for note in self.odd.iter().chain(self.failures.iter().take(shown)) {
            writeln!(out, "note: {note}")?;
        }
        if let Some(more @ 1..) = self.failures.len().checked_sub(shown) {
            writeln!(out, "note: and {more} more that can't be read; --tensors names them all")?;
        }
        if tensors {
            for Entry { name, format, dims, bytes } in self.weights.iter().chain(&self.others) {
                writeln!(out, "{name}  {format}  {dims:?}  {bytes} bytes")?;
            }
        }
        Ok(())
    }

    fn json(&self, tensors: bool) -> Value {
        let summary = self.summary();
        let formats: serde_json::Map<_, _> = summary
            .formats()
            .map(|(format, share)| {
                let share = json!({"count": share.count, "elements": share.elements, "bytes": share.bytes});
                (format.to_string(), share)
            })
            .collect();
        let mut report = json!({
            "kind": self.kind,
            "architecture": self.architecture,
            "provenance": self.provenance,
            "memory": self.memory.as_ref().map(|(workload, footprint)| memory::workload_json(workload, &[*footprint])),
            "formats": formats,
            "bits_per_weight": (!self.weights.is_empty()).then(|| summary.bits_per_weight()),
            "weight_bytes": summary.size_in_bytes(),
            "other_bytes": self.other_bytes(),
            "notes": self.odd.iter().chain(&self.failures).collect::<Vec<_>>(),
        });
        if tensors {
            let all = self.weights.iter().chain(&self.others);
            report["tensors"] = all
                .map(|tensor| {
                    json!({"name": tensor.name, "format": tensor.format, "dims": tensor.dims, "bytes": tensor.bytes})
                })
                .collect();
        }
        report
    }
}

/// What the whole model needs, and for what.
fn needs(
    checkpoint: &Checkpoint,
    memory: &MemoryOptions,
) -> candle_quant::Result<Option<(Workload, Footprint)>> {
    let (plan, workload) = (ShardPlan::new(checkpoint, 1)?, memory.workload(checkpoint)?);
    let footprints = plan.footprints(&workload, |_| None);
    Ok(footprints.first().map(|footprint| (workload, *footprint)))
}

fn architecture(config: &Value) -> Option<String> {
    let class = config.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    let model_type = config.get("model_type").and_then(Value::as_str);
    match (class, model_type) {
        (Some(class), Some(model_type)) => Some(format!("{class} ({model_type})")),
        (one, other) => one.or(other).map(str::to_string),
    }
}
