//! How much the columns of weights count, and which of them make up for others.

use crate::convert::options::ConvertOptions;
use crate::convert::output::{Columns, SourcePart, SourceTensor, View};
use crate::convert::recipe::Role;
use crate::importance::StatisticsOfInputs;
use candle_quant::checkpoint::module_of;
use candle_quant::{Error, Result};
use candle_quant_models::Config;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What options say of the columns of weights, and for which weights they do.
pub(super) struct Importance<'a> {
    options: &'a ConvertOptions,
    /// The model, if it is a known one.
    config: Option<&'a Config>,
    statistics: Option<StatisticsOfInputs<'a>>,
    /// What has statistics, and what has none.
    known: RefCell<BTreeSet<String>>,
    unknown: RefCell<BTreeSet<String>>,
    /// What is quantized without feedback where it is asked for.
    unfed: RefCell<BTreeSet<String>>,
}

impl<'a> Importance<'a> {
    pub fn new(options: &'a ConvertOptions, config: Option<&'a Config>) -> Self {
        let of_config = |config| Some(options.statistics.as_deref()?.by_inputs(config));
        let (known, unknown, unfed) = Default::default();
        Self { options, config, statistics: config.and_then(of_config), known, unknown, unfed }
    }

    /// Forgets which weights there were.
    pub fn forget(&self) {
        self.known.borrow_mut().clear();
        self.unknown.borrow_mut().clear();
        self.unfed.borrow_mut().clear();
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
        // Rows of an embedding are looked up, also where it is the head: columns that made up for others would make them worse.
        let wants = self.options.feedback.as_ref().filter(|_| !roles.contains(&Role::Embed));
        let without = || {
            if wants.is_some() {
                self.unfed.borrow_mut().insert(source.name.clone());
            }
        };
        if roles.iter().any(is_elsewhere) || source.parts.iter().any(is_moved) {
            without();
            return Ok((None, None));
        }
        let module = module_of(&source.name).unwrap_or(&source.name);
        let columns = match &self.options.statistics {
            Some(_) => {
                let of_inputs = self.statistics.as_ref();
                let columns =
                    of_inputs.map(|known| known.columns(module, &source.dims, tied)).transpose()?.flatten();
                let names = if columns.is_some() { &self.known } else { &self.unknown };
                names.borrow_mut().insert(source.name.clone());
                columns
            }
            None => None,
        };
        // What the model computes otherwise than it is stored is given nothing by itself.
        let text = match self.config.and_then(|config| config.input_of(module)) {
            Some(_) => wants,
            None => {
                without();
                None
            }
        };
        Ok((columns.map(Columns::new), text.map(|text| text.digest().into())))
    }

    /// What is odd about the statistics, and which weights there is no feedback for.
    ///
    /// # Errors
    /// If nothing that is packed has any.
    pub fn notes(&self) -> Result<Vec<String>> {
        let (known, unknown, unfed) = (self.known.borrow(), self.unknown.borrow(), self.unfed.borrow());
        let mut notes = Vec::new();
        if let (Some(statistics), Some(first)) = (&self.options.statistics, unknown.first()) {
            if known.is_empty() {
                let expected = "statistics of the weights of this model";
                let found = format!("none of `{first}` or any other; they are those of another model");
                return Err(Error::mismatch(statistics.origin(), expected, found));
            }
            let count = unknown.len();
            notes.push(format!(
                "no statistics of {count} packed weights, whose columns count alike: `{first}` among them"
            ));
        }
        if let Some(first) = unfed.first() {
            notes.push(format!(
                "{} packed weights are quantized without feedback, since the model has no layer that multiplies by them as they \
                 are stored: `{first}` among them",
                unfed.len()
            ));
        }
        Ok(notes)
    }
}
