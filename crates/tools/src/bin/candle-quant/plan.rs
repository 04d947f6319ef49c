//! The `plan` subcommand.

use super::memory::{self, MemoryOptions};
use super::size::{self, megabytes};
use super::{names, terminal};
use anyhow::Result;
use candle_quant::parallel::ExpertSplit;
use candle_quant::Checkpoint;
use candle_quant_models::sharding::{Footprint, ShardPlan, ShardedTensor, Split, Workload};
use candle_quant_tools::convert::Target;
use candle_quant_tools::fit::{fits, formats, has_dense_matrices, Fit};
use serde_json::{json, Value};
use std::io::{self, Write};
use std::ops::Range;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Options {
    /// A checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
    path: PathBuf,
    /// How many ranks compute the model together.
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// What ranks have of a model's experts: a part `inside` each, or whole ones, shared out `across` the ranks.
    #[arg(long, default_value_t, value_name = "SPLIT")]
    experts: ExpertSplit,
    /// How much memory each device has, such as 8GB: which formats fit is told, too, of weights that are dense now.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    #[command(flatten)]
    workload: MemoryOptions,
    /// Fail if some matrix, or a part of one, is on more than one rank.
    #[arg(long)]
    strict: bool,
    /// Print JSON, with every tensor.
    #[arg(long)]
    json: bool,
}

/// What is told.
struct Report {
    plan: ShardPlan,
    workload: Workload,
    footprints: Vec<Footprint>,
    /// The memory of a device, and what fits into it.
    fits: Option<(u64, Vec<Fit>)>,
    notes: Vec<String>,
}

pub fn run(options: &Options) -> Result<()> {
    let report = Report::new(&names::open(&options.path)?, options)?;
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => writeln!(stdout, "{:#}", report.json())?,
        false => report.print(&mut stdout, options)?,
    }
    stdout.flush()?;
    if options.strict {
        report.plan.require_split()?;
    }
    Ok(())
}

impl Report {
    fn new(checkpoint: &Checkpoint, options: &Options) -> Result<Self> {
        let plan = ShardPlan::with_experts(checkpoint, options.ranks, options.experts)?;
        let workload = options.workload.workload(checkpoint)?;
        let footprints = plan.footprints(&workload, |_| None);
        let mut notes = Vec::new();
        let fits = match options.memory {
            None => None,
            Some(memory) => {
                let of = |formats: &[_]| fits(checkpoint, Target::Mlx, formats, &plan, &workload);
                let fits = match of(&formats(Target::Mlx)) {
                    Ok(fits) if has_dense_matrices(&plan) => fits,
                    Ok(_) => {
                        notes.push(
                            "its matrices are packed already; `convert --requantize` packs them anew".into(),
                        );
                        of(&[])?
                    }
                    Err(error) => {
                        notes.push(format!("it can't be converted as it is: {error}"));
                        of(&[])?
                    }
                };
                Some((memory, fits))
            }
        };
        Ok(Self { plan, workload, footprints, fits, notes })
    }

    fn print(&self, out: &mut impl Write, options: &Options) -> io::Result<()> {
        let plan = &self.plan;
        writeln!(out, "stored: {}", megabytes(plan.stored_bytes()))?;
        if plan.ranks() > 1 {
            self.print_ranks(out)?;
        }
        if let Some(largest) = plan.largest() {
            let bytes = largest.rank_bytes.iter().max().copied().unwrap_or(0);
            writeln!(out, "largest part: {} of {}", megabytes(bytes), largest.name)?;
        }
        for tensor in plan.tensors() {
            if let Some(why) = &tensor.replicated {
                let extra = tensor.rank_bytes.iter().sum::<u64>().saturating_sub(tensor.stored_bytes);
                writeln!(out, "replicated: {}, {}: {why}", tensor.name, megabytes(extra))?;
            }
        }
        writeln!(out, "memory for {}:", memory::purpose(&self.workload))?;
        for (rank, footprint) in self.footprints.iter().enumerate() {
            let rank = if plan.ranks() > 1 { format!("rank {rank}: ") } else { String::new() };
            writeln!(out, "  {rank}{}", memory::line(footprint))?;
        }
        if let Some((available, fits)) = &self.fits {
            let each = if options.ranks > 1 { " of each rank" } else { "" };
            writeln!(out, "formats for {}{each}:", megabytes(*available))?;
            memory::table(out, fits, *available)?;
            self.advise(out, options, *available, fits)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))
    }

    /// What each of several ranks loads, and what they send each other.
    fn print_ranks(&self, out: &mut impl Write) -> io::Result<()> {
        for (rank, bytes) in self.plan.rank_bytes().into_iter().enumerate() {
            writeln!(out, "rank {rank}: {}", megabytes(bytes))?;
        }
        writeln!(out, "on more than one rank: {}", megabytes(self.plan.replicated_bytes()))?;
        let communication = self.plan.communication();
        writeln!(
            out,
            "for each token: {} sums of {} elements, {} logits gathered; {} kB in f32",
            communication.all_reduces,
            communication.hidden_size,
            communication.gathered_logits,
            communication.elements() as f64 * 4. / 1e3
        )?;
        Ok(())
    }

    /// What to do next.
    fn advise(&self, out: &mut impl Write, options: &Options, memory: u64, fits: &[Fit]) -> io::Result<()> {
        let (path, context) = (options.path.display(), self.workload.context);
        match memory::widest(fits, memory) {
            Some(widest) if self.plan.ranks() == 1 => writeln!(
                out,
                "the widest that fits is {0}: candle-quant convert {path} -o OUT --fit {memory} --context {context}",
                widest.format
            ),
            Some(widest) => writeln!(
                out,
                "the widest that fits is {0}: candle-quant convert {path} -o OUT --format {0}",
                widest.format
            ),
            None if fits.iter().any(|fit| fit.fits(memory)) => Ok(()),
            None => {
                let cache = if self.workload.cache.keys.is_none() { ", --kv-cache 8bit" } else { "" };
                writeln!(out, "none fits: a shorter --context{cache} or more --ranks need less")
            }
        }
    }

    fn json(&self) -> Value {
        let plan = &self.plan;
        let communication = plan.communication();
        json!({
            "ranks": plan.ranks(),
            "experts": plan.experts().to_string(),
            "stored_bytes": plan.stored_bytes(),
            "rank_bytes": plan.rank_bytes(),
            "replicated_bytes": plan.replicated_bytes(),
            "communication": {
                "all_reduces": communication.all_reduces,
                "hidden_size": communication.hidden_size,
                "gathered_logits": communication.gathered_logits,
                "elements": communication.elements(),
            },
            "largest": plan.largest().map(|tensor| &tensor.name),
            "memory": memory::workload_json(&self.workload, &self.footprints),
            "fits": self.fits.as_ref().map(|(memory, fits)| memory::table_json(fits, *memory)),
            "notes": self.notes,
            "tensors": plan.tensors().iter().map(tensor_json).collect::<Vec<_>>(),
        })
    }
}

fn tensor_json(tensor: &ShardedTensor) -> Value {
    let range = |range: &Range<usize>| json!([range.start, range.end]);
    let ranges = |ranges: &[Range<usize>]| ranges.iter().map(range).collect::<Vec<_>>();
    let (split, ranges) = match &tensor.split {
        Split::Rows(rows) => ("rows", ranges(rows)),
        Split::Columns(columns) => ("columns", ranges(columns)),
        Split::Segments(runs) => ("segments", runs.iter().map(|runs| json!(ranges(runs))).collect()),
        Split::Experts(experts) => ("experts", ranges(experts)),
        Split::One(_) => ("one", Vec::new()),
        _ => ("whole", Vec::new()),
    };
    json!({
        "name": tensor.name,
        "format": tensor.format,
        "split": split,
        "ranges": ranges,
        "stored_bytes": tensor.stored_bytes,
        "rank_bytes": tensor.rank_bytes,
        "replicated": tensor.replicated,
    })
}
