//! The statistics of all modules of a model.

use super::columns::{ColumnSums, ColumnWeights};
use crate::sha256;
use candle_quant::{Error, Result};
use candle_quant_models::{Config, Given, ModuleInput, Role};
use std::collections::BTreeMap;

/// What the modules of a model are given, by their paths: for each column the sum of squares.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    modules: BTreeMap<String, ColumnSums>,
    /// What they are of, for reports: a file or a text.
    origin: String,
}

impl Statistics {
    pub(super) fn new(origin: impl Into<String>, modules: BTreeMap<String, ColumnSums>) -> Self {
        Self { modules, origin: origin.into() }
    }

    /// What a module is given.
    pub fn module(&self, module: &str) -> Option<&ColumnSums> {
        self.modules.get(module)
    }

    /// All modules, by their paths.
    pub fn modules(&self) -> impl Iterator<Item = (&str, &ColumnSums)> {
        self.modules.iter().map(|(name, sums)| (name.as_str(), sums))
    }

    /// What they are of.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The SHA-256 of all of them, in hexadecimal.
    pub fn digest(&self) -> String {
        let mut hasher = sha256::Hasher::default();
        for (name, sums) in &self.modules {
            hasher.update(format!("{name}\0{}\0{:?}\0", sums.columns(), sums.counts()));
            sums.squares().iter().for_each(|square| hasher.update(square.to_le_bytes()));
        }
        hasher.finish()
    }

    /// Them by what modules are given, as a model of this config knows it.
    pub(crate) fn by_inputs<'a>(&'a self, config: &'a Config) -> StatisticsOfInputs<'a> {
        let of_module = |name: &'a String| Some((config.input_of(name)?, name.as_str()));
        // Of modules that are given the same, the first.
        let modules = self.modules.keys().rev().filter_map(of_module).collect();
        StatisticsOfInputs { statistics: self, config, modules }
    }
}

/// Statistics of a model's inputs: they are found whatever a checkpoint calls its modules.
pub(crate) struct StatisticsOfInputs<'a> {
    statistics: &'a Statistics,
    config: &'a Config,
    modules: BTreeMap<ModuleInput, &'a str>,
}

impl StatisticsOfInputs<'_> {
    /// How much the columns of a weight count; `None` if there are no statistics of it. `tied` says that the embedding is the
    /// head.
    ///
    /// # Errors
    /// If the statistics are of a weight of other dimensions.
    pub fn columns(&self, module: &str, dims: &[usize], tied: bool) -> Result<Option<ColumnWeights>> {
        let input = match self.config.role(module) {
            Some(Role::Embedding) if tied => {
                Some(ModuleInput { layer: None, given: Given::Head, expert: None })
            }
            _ => self.config.input_of(module),
        };
        let Some(input) = input else { return Ok(None) };
        let stack = ModuleInput { expert: None, ..input };
        let found = match (self.modules.get(&input), input.expert) {
            (None, Some(expert)) => self.modules.get(&stack).map(|name| (*name, Some(expert))),
            (own, _) => own.map(|name| (*name, None)),
        };
        let columns = |(name, expert)| Some((name, self.statistics.modules.get(name)?.weights(expert)?));
        match found.and_then(columns) {
            Some((_, columns)) if columns.fit(dims) => Ok(Some(columns)),
            Some((name, columns)) => {
                let [rows, k] = columns.dims();
                let expected = format!("statistics of a weight {dims:?}, as the model has it");
                let found =
                    format!("{rows} rows of {k} columns of `{name}`; they are those of another model");
                let what = format!("{}: `{module}`", self.statistics.origin);
                Err(Error::mismatch(what, expected, found))
            }
            None => Ok(None),
        }
    }
}
