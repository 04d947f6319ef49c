//! What memory a model needs: options that say for what, and tables of the answer.

use super::model::{parse_cache, parse_dtype};
use super::size::megabytes;
use candle_core::DType;
use candle_quant::{Checkpoint, KvFormat};
use candle_quant_models::sharding::{Footprint, Workload};
use candle_quant_models::{CacheOptions, Config};
use candle_quant_tools::convert::Spec;
use candle_quant_tools::fit::Fit;
use serde_json::{json, Value};
use std::io::{self, Write};

/// The context without an option, if the model is made for so much.
const CONTEXT: usize = 8192;

// (A doc comment here would replace that of the command.)
#[derive(clap::Args)]
pub struct MemoryOptions {
    /// Memory is told for texts of so many tokens [default: 8192, or fewer if the model is made for fewer].
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// .. and activations of this precision, which dense weights get, too: f32, f16 or bf16 [default: that of `generate`].
    #[arg(long, value_parser = parse_dtype)]
    dtype: Option<DType>,
    /// .. and keys and values in this format, as for `generate`.
    #[arg(long, value_name = "FORMAT[,FORMAT]", value_parser = parse_cache)]
    kv_cache: Option<(KvFormat, KvFormat)>,
    /// .. on the CPU, even if this program was built for GPUs.
    #[arg(long)]
    cpu: bool,
}

impl MemoryOptions {
    /// Of the defaults of `generate`.
    pub fn of(context: Option<usize>, cpu: bool) -> Self {
        Self { context, cpu, dtype: None, kv_cache: None }
    }

    /// What a checkpoint's model is loaded for.
    pub fn workload(&self, checkpoint: &Checkpoint) -> candle_quant::Result<Workload> {
        let context = match self.context {
            Some(context) => context,
            None => Config::from_checkpoint(checkpoint)?.context().min(CONTEXT),
        };
        let workload = match cfg!(feature = "cuda") && !self.cpu {
            true => Workload::on_gpu(self.dtype.unwrap_or(DType::BF16), context),
            false => Workload::on_cpu(self.dtype.unwrap_or(DType::F32), context),
        };
        let (keys, values) = self.kv_cache.unzip();
        let cache = CacheOptions { keys, values, max_tokens: None };
        cache.validate(workload.is_on_cpu, workload.dtype)?;
        Ok(Workload { cache, ..workload })
    }
}

/// What a rank needs, in a line.
pub fn line(footprint: &Footprint) -> String {
    let Footprint { weights, cache, workspace, .. } = *footprint;
    let [weights, cache, workspace, total] = [weights, cache, workspace, footprint.total()].map(megabytes);
    format!("{weights} of weights, {cache} of KV cache, {workspace} to compute: {total}")
}

/// For which text that is.
pub fn purpose(workload: &Workload) -> String {
    let (keys, values) = workload.cache.formats(workload.dtype);
    let cache = if keys == values { keys.to_string() } else { format!("{keys},{values}") };
    let place = if workload.is_on_cpu { "" } else { " on a GPU" };
    let (tokens, dtype) = (workload.context, workload.dtype.as_str());
    format!("{tokens} tokens{place}, {dtype} activations, KV cache in {cache}")
}

pub fn footprint_json(footprint: &Footprint) -> Value {
    json!({
        "weights": footprint.weights,
        "cache": footprint.cache,
        "workspace": footprint.workspace,
        "total": footprint.total(),
    })
}

/// For what, and what each rank needs.
pub fn workload_json(workload: &Workload, footprints: &[Footprint]) -> Value {
    let (keys, values) = workload.cache.formats(workload.dtype);
    json!({
        "context": workload.context,
        "device": if workload.is_on_cpu { "cpu" } else { "gpu" },
        "dtype": workload.dtype.as_str(),
        "kv_cache_keys": keys.to_string(),
        "kv_cache_values": values.to_string(),
        "ranks": footprints.iter().map(footprint_json).collect::<Vec<_>>(),
    })
}

/// The widest format that fits, of those that are packed.
pub fn widest(fits: &[Fit], memory: u64) -> Option<&Fit> {
    fits.iter().find(|fit| fit.format != Spec::Keep && fit.fits(memory))
}

fn name(format: Spec) -> String {
    if format == Spec::Keep {
        "as stored".to_owned()
    } else {
        format.to_string()
    }
}

/// What each format needs on the rank that needs most, and whether there is so much.
pub fn table(out: &mut impl Write, fits: &[Fit], memory: u64) -> io::Result<()> {
    writeln!(
        out,
        "{:<14} {:>6} {:>14} {:>14} {:>14} {:>14}",
        "format", "bits", "weights", "KV cache", "to compute", "all"
    )?;
    for fit in fits {
        let largest = fit.largest();
        let [weights, cache, workspace, total] =
            [largest.weights, largest.cache, largest.workspace, largest.total()].map(megabytes);
        let verdict = if fit.fits(memory) { "fits" } else { "too much" };
        writeln!(
            out,
            "{:<14} {:>6.3} {weights:>14} {cache:>14} {workspace:>14} {total:>14}  {verdict}",
            name(fit.format),
            fit.bits_per_weight
        )?;
    }
    Ok(())
}

pub fn table_json(fits: &[Fit], memory: u64) -> Value {
    let row = |fit: &Fit| {
        json!({
            "format": name(fit.format),
            "bits_per_weight": fit.bits_per_weight,
            "ranks": fit.footprints.iter().map(footprint_json).collect::<Vec<_>>(),
            "fits": fit.fits(memory),
        })
    };
    json!({
        "memory": memory,
        "formats": fits.iter().map(row).collect::<Vec<_>>(),
        "widest": widest(fits, memory).map(|fit| name(fit.format)),
    })
}
