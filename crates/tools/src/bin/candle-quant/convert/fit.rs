//! `--fit`: the widest format with which the model runs in so much memory.

use super::{open, Options, BAD_INPUT};
use crate::memory::{widest, workload};
use crate::size::megabytes;
use anyhow::{anyhow, Result};
use candle_quant_models::sharding::ShardPlan;
use candle_quant_tools::convert::Spec;
use candle_quant_tools::fit::{fits, formats, has_dense_matrices};

/// The format; an error comes with its exit code.
pub fn choose(options: &Options, memory: u64) -> Result<Spec, (anyhow::Error, u8)> {
    widest_that_fits(options, memory).map_err(|error| (error, BAD_INPUT))
}

fn widest_that_fits(options: &Options, memory: u64) -> Result<Spec> {
    let source = open(&options.source)?;
    let plan = ShardPlan::new(&source, 1)?;
    if !has_dense_matrices(&plan) {
        return Err(anyhow!("--fit: the matrices of {} are packed already", options.source.display()));
    }
    let workload = workload(&source, options.context, None, None)?;
    let target = options.to.target();
    let candidates = if options.candidates.is_empty() { formats(target) } else { options.candidates.clone() };
    let fits = fits(&source, target, &candidates, &plan, &workload)?;
    match (widest(&fits, memory), fits.last()) {
        (Some(widest), _) => Ok(widest.format),
        (None, Some(least)) => Err(anyhow!(
            "--fit: no format fits into {} for {} tokens: with {} the model needs {}; a shorter --context needs less",
            megabytes(memory),
            workload.context,
            least.format,
            megabytes(least.largest().total()),
        )),
        (None, None) => Err(anyhow!("--fit: no format to choose from")),
    }
}
