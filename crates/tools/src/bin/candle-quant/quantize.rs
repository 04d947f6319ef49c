//! `--quantize`: dense weights are quantized while they are loaded.

use super::terminal;
use anyhow::{Context, Result};
use candle_quant::{Checkpoint, QuantFormat, VarBuilder};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Spec};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

#[derive(clap::Args, Debug)]
pub struct QuantizeOptions {
    /// Quantize dense weights while they are loaded, to what `convert` would make of them: a format (4, mxfp4, ..), with the
    /// output head in the next wider one and routers as they are, or a recipe: a TOML file, or a topology of mistral.rs (.yml, .yaml).
    #[arg(long, value_name = "FORMAT|FILE")]
    quantize: Option<String>,
}

/// The formats of weights that are to be quantized, by their modules.
#[derive(Clone, Default)]
pub struct Formats(Option<Arc<BTreeMap<String, QuantFormat>>>);

impl QuantizeOptions {
    /// What becomes of the weights of a checkpoint.
    pub fn formats(&self, checkpoint: &Checkpoint) -> Result<Formats> {
        let Some(what) = &self.quantize else { return Ok(Formats(None)) };
        let recipe = match what.parse::<Spec>() {
            Ok(format) => Recipe::safe(format),
            Err(error) => {
                let text = fs::read_to_string(what)
                    .with_context(|| format!("--quantize: {what}: no file; as a format: {error}"))?;
                Recipe::from_text(what, &text)?
            }
        };
        let formats = ConvertPlan::new(checkpoint, &ConvertOptions::mlx(recipe))?.formats();
        if formats.is_empty() {
            terminal::say(
                "--quantize changes nothing: no weight of the checkpoint is dense that the recipe packs",
            );
        }
        Ok(Formats(Some(Arc::new(formats))))
    }
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
