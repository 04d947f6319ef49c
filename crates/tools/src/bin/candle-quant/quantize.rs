//! `--quantize`: dense weights are quantized while they are loaded.

use super::convert::tell_progress;
use super::progress::Progress;
use super::terminal;
use anyhow::{Context, Result};
use candle_quant::{Checkpoint, QuantFormat, VarBuilder};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec};
use candle_quant_tools::quantized::{CacheEvent, QuantizedCache};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

#[derive(clap::Args, Debug)]
pub struct QuantizeOptions {
    /// Quantize dense weights while they are loaded, to what `convert` would make of them: a format (4, mxfp4, ..), with the
    /// output head in the next wider one and routers as they are, or a recipe: a TOML file, or a topology of mistral.rs (.yml, .yaml).
    #[arg(long, value_name = "FORMAT|FILE")]
    quantize: Option<String>,
    /// Keep what --quantize makes, as a checkpoint of MLX in $CANDLE_QUANT_CACHE/quantized, and open that the next time
    /// [default folder: ~/.cache/candle-quant/quantized].
    #[arg(long, requires = "quantize")]
    cache: bool,
}

/// The formats of weights that are to be quantized, by their modules.
#[derive(Clone, Default)]
pub struct Formats(Option<Arc<BTreeMap<String, QuantFormat>>>);

impl QuantizeOptions {
    /// The checkpoint to load, and what becomes of its weights.
    pub fn apply(&self, checkpoint: Checkpoint) -> Result<(Checkpoint, Formats)> {
        let Some(what) = &self.quantize else { return Ok((checkpoint, Formats(None))) };
        let recipe = match what.parse::<Spec>() {
            Ok(format) => Recipe::safe(format),
            Err(error) => {
                let text = fs::read_to_string(what)
                    .with_context(|| format!("--quantize: {what}: no file; as a format: {error}"))?;
                Recipe::from_text(what, &text)?
            }
        };
        let plan = ConvertPlan::new(&checkpoint, &ConvertOptions::mlx(recipe))?;
        let formats = plan.formats();
        if formats.is_empty() {
            terminal::say(
                "--quantize changes nothing: no weight of the checkpoint is dense that the recipe packs",
            );
        }
        if self.cache && !formats.is_empty() {
            return Ok((cached(&plan)?, Formats(None)));
        }
        Ok((checkpoint, Formats(Some(Arc::new(formats)))))
    }
}

/// What the plan makes, from the cache.
fn cached(plan: &ConvertPlan) -> Result<Checkpoint> {
    let progress = Progress::new("tensors", false, false);
    let opened = QuantizedCache::from_env()?.open(plan, &|event| match event {
        CacheEvent::Found { folder } => {
            terminal::say(&format!("opens {}, which was quantized before", folder.display()));
        }
        CacheEvent::Waiting => terminal::say("another process quantizes into the cache, which is waited for"),
        CacheEvent::Begun { folder } => {
            terminal::say(&format!("quantizes into {}", folder.display()));
            progress.plan(plan.tensors().count(), plan.source_bytes());
        }
        CacheEvent::Progress(event) => tell_progress(&progress, &event),
        _ => {}
    });
    progress.finish();
    Ok(opened?)
}

impl Formats {
    /// A builder that quantizes as these say.
    pub fn apply<'v>(&self, vb: VarBuilder<'v>) -> VarBuilder<'v> {
        match self.0.clone() {
            None => vb,
            Some(formats) => vb.quantize_with(move |module| formats.get(module).copied()),
        }
    }
}
