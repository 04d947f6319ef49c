//! The `plan` subcommand.

use super::size::megabytes;
use super::{names, terminal};
use anyhow::Result;
use candle_quant::parallel::ExpertSplit;
use candle_quant_models::sharding::{ShardPlan, ShardedTensor, Split};
use serde_json::{json, Value};
use std::io::{self, Write};
use std::ops::Range;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Options {
    /// A checkpoint's directory or file, or the name of a model of the Hugging Face hub or of Ollama.
    path: PathBuf,
    /// How many ranks compute the model together.
    #[arg(long)]
    ranks: usize,
    /// What ranks have of a model's experts: a part `inside` each, or whole ones, shared out `across` the ranks.
    #[arg(long, default_value_t, value_name = "SPLIT")]
    experts: ExpertSplit,
    /// Fail if some matrix, or a part of one, is on more than one rank.
    #[arg(long)]
    strict: bool,
    /// Print JSON, with every tensor.
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Options) -> Result<()> {
    let plan = ShardPlan::with_experts(&names::open(&options.path)?, options.ranks, options.experts)?;
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => writeln!(stdout, "{:#}", as_json(&plan))?,
        false => print(&plan, &mut stdout)?,
    }
    stdout.flush()?;
    if options.strict {
        plan.require_split()?;
    }
    Ok(())
}

fn print(plan: &ShardPlan, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "stored: {}", megabytes(plan.stored_bytes()))?;
    for (rank, bytes) in plan.rank_bytes().into_iter().enumerate() {
        writeln!(out, "rank {rank}: {}", megabytes(bytes))?;
    }
    writeln!(out, "on more than one rank: {}", megabytes(plan.replicated_bytes()))?;
    let communication = plan.communication();
    writeln!(
        out,
        "for each token: {} sums of {} elements, {} logits gathered; {} kB in f32",
        communication.all_reduces,
        communication.hidden_size,
        communication.gathered_logits,
        communication.elements() as f64 * 4. / 1e3
    )?;
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
    Ok(())
}

fn as_json(plan: &ShardPlan) -> Value {
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
        "tensors": plan.tensors().iter().map(tensor_json).collect::<Vec<_>>(),
    })
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
