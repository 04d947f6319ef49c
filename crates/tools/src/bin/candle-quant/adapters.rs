//! Low-rank adapters that a model is run with.

use super::terminal;
use anyhow::{bail, Result};
use candle_quant::checkpoint::{AdapterFile, StoredLora};
use candle_quant_models::Model;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

// (A doc comment here would replace that of the command.)
#[derive(clap::Args, Debug)]
pub struct AdapterOptions {
    /// Apply the low-rank adapter in this directory, as PEFT or mlx-lm saved it; may be given several times, and with a
    /// name for messages.
    #[arg(long = "adapter", value_name = "[NAME=]DIR")]
    given: Vec<String>,
}

/// Adapters that are opened, in the order in which they were given.
#[derive(Clone, Default)]
pub struct OpenAdapters(Vec<(String, AdapterFile)>);

impl AdapterOptions {
    /// Opens all, and says of each in one line what it is.
    pub fn open(&self) -> Result<OpenAdapters> {
        let mut names = BTreeSet::new();
        let mut opened = Vec::new();
        for given in &self.given {
            let (name, dir) = name_and_dir(given);
            if !names.insert(name.clone()) {
                bail!("--adapter: two are called {name}; give one a name of its own, NAME=DIR");
            }
            let file = AdapterFile::open(&dir)?;
            terminal::say(&format!("adapter {name}: {}", description(&file)));
            opened.push((name, file));
        }
        Ok(OpenAdapters(opened))
    }
}

/// `NAME=DIR`, or a directory, whose own name is the adapter's.
fn name_and_dir(given: &str) -> (String, PathBuf) {
    let whole = Path::new(given);
    match given.split_once('=') {
        Some((name, dir)) if !name.is_empty() && !whole.exists() => (name.to_owned(), dir.into()),
        _ => {
            let name = whole.file_name().map(|name| name.to_string_lossy().into_owned());
            (name.unwrap_or_else(|| given.to_owned()), whole.to_owned())
        }
    }
}

fn description(file: &AdapterFile) -> String {
    let mut kinds = BTreeMap::<String, usize>::new();
    let kind = |lora: &StoredLora| if lora.is_dora() { "DoRA" } else { "LoRA" };
    for lora in file.loras().values() {
        *kinds.entry(format!("{} of rank {}", kind(lora), lora.rank())).or_default() += 1;
    }
    let kinds: Vec<_> = kinds.iter().map(|(kind, count)| format!("{kind} in {count} modules")).collect();
    format!("{}, by {}", kinds.join(", "), file.format())
}

impl OpenAdapters {
    /// Adds them to a model, or to one rank's part of it.
    pub fn add_to(&self, model: &Model) -> candle_quant::Result<()> {
        self.0.iter().try_for_each(|(name, file)| model.adapters().load(name, file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_called_as_their_directories_or_as_is_said() {
        for (given, name, dir) in [
            ("out/style", "style", "out/style"),
            ("out/style/", "style", "out/style/"),
            ("mine=out/style", "mine", "out/style"),
            ("mine=a=b", "mine", "a=b"),
            ("=out", "=out", "=out"),
            ("..", "..", ".."),
        ] {
            assert_eq!(name_and_dir(given), (name.to_owned(), PathBuf::from(dir)), "{given}");
        }
    }
}
