//! The `list` subcommand.

use super::terminal;
use anyhow::Result;
use candle_quant::checkpoint::{module_of, HubCache, HubOptions, OllamaStore};
use candle_quant::{Checkpoint, WeightSummary};
use candle_quant_models::Config;
use candle_quant_tools::quantized::QuantizedCache;
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(after_help = "\
Sizes are those of the files of weights. Of the cache of the hub, models are listed that are completely there. \
Models that were kept with --cache have no names but their paths.")]
pub struct Options {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A model that can be opened by its name, or path.
struct Entry {
    name: String,
    source: &'static str,
    path: PathBuf,
    /// What is told of it, or why nothing is.
    facts: Result<Facts, String>,
}

struct Facts {
    kind: String,
    bytes: u64,
    bits_per_weight: Option<f64>,
}

pub fn run(options: &Options) -> Result<()> {
    let mut entries = Vec::new();
    for model in HubCache::at(HubOptions::from_env().cache).models()? {
        entries.push(Entry::new(model.name.to_string(), "hub", model.path));
    }
    for store in OllamaStore::usual()? {
        for name in store.models()? {
            if let Some(path) = store.manifest(&name)? {
                entries.push(Entry::new(name.to_string(), "ollama", path));
            }
        }
    }
    // Where there is no home, there is none.
    if let Ok(cache) = QuantizedCache::from_env() {
        let models = cache.models()?;
        entries
            .extend(models.into_iter().map(|path| Entry::new(path.display().to_string(), "quantized", path)));
    }
    let mut stdout = terminal::stdout(options.json);
    match options.json {
        true => {
            let entries: Vec<_> = entries.iter().map(Entry::json).collect();
            writeln!(stdout, "{:#}", json!(entries))?;
        }
        false => print(&mut stdout, &entries)?,
    }
    Ok(stdout.flush()?)
}

impl Entry {
    fn new(name: String, source: &'static str, path: PathBuf) -> Self {
        let facts = Checkpoint::open(&path).and_then(|checkpoint| Facts::of(&checkpoint));
        Self { name, source, path, facts: facts.map_err(|error| error.to_string()) }
    }

    fn json(&self) -> serde_json::Value {
        let facts = self.facts.as_ref();
        json!({
            "name": self.name,
            "source": self.source,
            "path": self.path.to_string_lossy(),
            "kind": facts.map(|facts| &facts.kind).ok(),
            "bytes": facts.map(|facts| facts.bytes).ok(),
            "bits_per_weight": facts.ok().and_then(|facts| facts.bits_per_weight),
            "error": self.facts.as_ref().err(),
        })
    }
}

impl Facts {
    /// From headers alone.
    fn of(checkpoint: &Checkpoint) -> candle_quant::Result<Self> {
        let model = Config::from_checkpoint(checkpoint).ok();
        let mut summary = WeightSummary::default();
        for name in checkpoint.tensor_names() {
            let in_features =
                model.as_ref().and_then(|model| model.in_features(module_of(name).unwrap_or(name)));
            let weight = checkpoint.tensor(name, in_features)?;
            if weight.dims().len() > 1 {
                let elements = weight.dims().iter().map(|&dim| dim as u64).product();
                summary.add(weight.format_name(), elements, weight.size_in_bytes() as u64);
            }
        }
        let has_weights = summary.formats().next().is_some();
        let size = |file: &PathBuf| std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        Ok(Self {
            kind: checkpoint.kind().to_string(),
            bytes: checkpoint.weight_files().iter().map(size).sum(),
            bits_per_weight: has_weights.then(|| summary.bits_per_weight()),
        })
    }
}

fn print(out: &mut impl Write, entries: &[Entry]) -> io::Result<()> {
    let width = entries.iter().map(|entry| entry.name.chars().count()).max().unwrap_or(0).min(60);
    for Entry { name, source, facts, .. } in entries {
        match facts {
            Ok(Facts { kind, bytes, bits_per_weight }) => {
                let size = format!("{:.1} MB", *bytes as f64 / 1e6);
                let bits = bits_per_weight.map_or("-".to_owned(), |bits| format!("{bits:.2} bits"));
                writeln!(out, "{name:<width$}  {size:>12}  {bits:>10}  {kind} ({source})")?;
            }
            Err(error) => writeln!(out, "{name:<width$}  {error} ({source})")?,
        }
    }
    if entries.is_empty() {
        writeln!(out, "no models, neither in the cache of the hub nor in a store of Ollama; `candle-quant pull` fetches one")?;
    }
    Ok(())
}
