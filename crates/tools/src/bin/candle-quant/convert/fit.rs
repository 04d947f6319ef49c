//! `--fit`: the widest format with which the model runs in so much memory.

use super::conversion::with_rules;
use super::Options;
use crate::memory::{widest, MemoryOptions};
use crate::size::megabytes;
use anyhow::{bail, Result};
use candle_quant::Checkpoint;
use candle_quant_models::sharding::ShardPlan;
use candle_quant_tools::convert::Recipe;
use candle_quant_tools::fit::{fits, formats, has_dense_matrices};

/// The recipe of the conversion with that format.
pub fn choose(options: &Options, source: &Checkpoint, memory: u64) -> Result<Recipe> {
    let plan = ShardPlan::new(source, 1)?;
    if !has_dense_matrices(&plan) {
        bail!("--fit: the matrices of {} are packed already", options.source.display());
    }
    let workload = MemoryOptions::of(options.context, options.cpu).workload(source)?;
    let target = options.target();
    let candidates = if options.candidates.is_empty() { formats(target) } else { options.candidates.clone() };
    let fits = fits(source, target, &candidates, &plan, &workload)?;
    match (widest(&fits, memory), fits.last()) {
        (Some(widest), _) => with_rules(options, target.usual_recipe(widest.format)),
        (None, Some(least)) => bail!(
            "--fit: no format fits into {} for {} tokens: with {} the model needs {}; a shorter --context needs less",
            megabytes(memory),
            workload.context,
            least.format,
            megabytes(least.largest().total()),
        ),
        (None, None) => bail!("--fit: no format to choose from"),
    }
}
