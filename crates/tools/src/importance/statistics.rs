//! The statistics of all modules of a model.

use super::columns::{ColumnSums, ColumnWeights};
use super::names::{given_the_same, within_decoder};
use crate::sha256;
use candle_quant::{Error, Result};
use std::collections::BTreeMap;

/// What the modules of a model are given, by their paths: for each column the sum of squares.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    modules: BTreeMap<String, ColumnSums>,
    /// Full names by those within the decoder.
    names: BTreeMap<String, String>,
    /// What they are of, for reports: a file or a text.
    origin: String,
}

impl Statistics {
    pub(super) fn new(origin: impl Into<String>, modules: BTreeMap<String, ColumnSums>) -> Self {
        let within = |name: &String| (within_decoder(name).to_owned(), name.clone());
        let names = modules.keys().map(within).collect();
        Self { modules, names, origin: origin.into() }
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

    /// How much the columns of a weight count, which may be called otherwise in another layout; `None` if there are no
    /// statistics of it. `tied` says that the embedding is the head.
    ///
    /// # Errors
    /// If the statistics are of a weight of other dimensions.
    pub(crate) fn columns(&self, module: &str, dims: &[usize], tied: bool) -> Result<Option<ColumnWeights>> {
        let within = within_decoder(module);
        let mut names = given_the_same(within);
        if tied && within == "embed_tokens" {
            names.push(("lm_head".to_owned(), None));
        }
        let found = names.into_iter().find_map(|(name, expert)| {
            let name = self.names.get(&name)?;
            Some((name, self.modules.get(name)?.weights(expert)?))
        });
        match found {
            Some((_, columns)) if columns.fit(dims) => Ok(Some(columns)),
            Some((name, columns)) => {
                let [rows, k] = columns.dims();
                let expected = format!("statistics of a weight {dims:?}, as the model has it");
                let found =
                    format!("{rows} rows of {k} columns of `{name}`; they are those of another model");
                Err(Error::mismatch(format!("{}: `{module}`", self.origin), expected, found))
            }
            None => Ok(None),
        }
    }
}
