//! How much the columns of weights count, and which of them make up for others.

use crate::convert::options::ConvertOptions;
use crate::convert::output::{Columns, SourcePart, SourceTensor, View};
use crate::convert::recipe::Role;
use candle_quant::checkpoint::module_of;
use candle_quant::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What options say of the columns of weights, and for which weights they do.
pub(super) struct Importance<'a> {
    options: &'a ConvertOptions,
    /// What has statistics, and what has none.
    known: RefCell<BTreeSet<String>>,
    unknown: RefCell<BTreeSet<String>>,
}

impl<'a> Importance<'a> {
    pub fn new(options: &'a ConvertOptions) -> Self {
        Self { options, known: RefCell::default(), unknown: RefCell::default() }
    }

    /// Forgets which weights there were.
    pub fn forget(&self) {
        self.known.borrow_mut().clear();
        self.unknown.borrow_mut().clear();
    }

    /// How much the columns of a weight count, and the digest of the text by which they make up for what others lose, if
    /// that is asked for. `tied` says that the embedding is the head.
    pub fn of(
        &self,
        source: &SourceTensor,
        roles: &[Role],
        tied: bool,
    ) -> Result<(Option<Columns>, Option<Arc<str>>)> {
        let is_elsewhere = |role: &Role| matches!(role, Role::Vision | Role::Audio);
        let is_moved = |part: &SourcePart| matches!(part, SourcePart::Viewed(_, View::OfTiles { .. }));
        if roles.iter().any(is_elsewhere) || source.parts.iter().any(is_moved) {
            return Ok((None, None));
        }
        let module = module_of(&source.name).unwrap_or(&source.name);
        let columns = match &self.options.statistics {
            Some(statistics) => {
                let columns = statistics.columns(module, &source.dims, tied)?;
                let names = if columns.is_some() { &self.known } else { &self.unknown };
                names.borrow_mut().insert(source.name.clone());
                columns
            }
            None => None,
        };
        // Rows of an embedding are looked up, also where it is the head: columns that made up for others would make them worse.
        let text = self.options.feedback.as_ref().filter(|_| !roles.contains(&Role::Embed));
        Ok((columns.map(Columns::new), text.map(|text| text.digest().into())))
    }

    /// What is odd about the statistics.
    ///
    /// # Errors
    /// If nothing that is packed has any.
    pub fn note(&self) -> Result<Option<String>> {
        let (known, unknown) = (self.known.borrow(), self.unknown.borrow());
        let (Some(statistics), Some(first)) = (&self.options.statistics, unknown.first()) else {
            return Ok(None);
        };
        if known.is_empty() {
            let expected = "statistics of the weights of this model";
            let found = format!("none of `{first}` or any other; they are those of another model");
            return Err(Error::mismatch(statistics.origin(), expected, found));
        }
        let count = unknown.len();
        Ok(Some(format!(
            "no statistics of {count} packed weights, whose columns count alike: `{first}` among them"
        )))
    }
}
