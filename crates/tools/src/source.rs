//! The tensors of a checkpoint, read as the model of its config knows them.

use candle_quant::checkpoint::{module_of, Checkpoint, Weight};
use candle_quant::Result;
use candle_quant_models::Config;

/// A checkpoint, and the model that its config describes, if it describes one that is known.
pub(crate) struct Source<'c> {
    pub checkpoint: &'c Checkpoint,
    model: Option<Config>,
}

impl<'c> Source<'c> {
    pub(crate) fn new(checkpoint: &'c Checkpoint) -> Self {
        Self::with_model(checkpoint, Config::from_json(checkpoint.config()).ok())
    }

    /// A checkpoint of a model that the caller has read from its config.
    pub(crate) fn with_model(checkpoint: &'c Checkpoint, model: Option<Config>) -> Self {
        Self { checkpoint, model }
    }

    /// Whether the model has layers of linear attention.
    pub(crate) fn has_linear_attention(&self) -> bool {
        self.model.as_ref().is_some_and(|model| model.linear.is_some())
    }

    /// K of a tensor, as the model knows it.
    pub(crate) fn in_features(&self, tensor: &str) -> Option<usize> {
        self.model.as_ref()?.in_features(module_of(tensor).unwrap_or(tensor))
    }

    /// A tensor, with the K that the model knows.
    pub(crate) fn tensor(&self, name: &str) -> Result<Weight> {
        self.checkpoint.tensor(name, self.in_features(name))
    }
}
