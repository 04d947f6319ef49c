//! Builders that know tensors by other names than their source.

use super::VarBuilder;
use candle_nn::var_builder::Renamer;

impl<'a> VarBuilder<'a> {
    /// A builder that gives `rename` of a name to this one, which puts its own path before it, as candle_nn's does.
    ///
    /// Layers of [`nn`](crate::nn) receive packed weights from it; those of [`parallel`](crate::parallel) load weights
    /// whole and dequantized before they take their slices.
    pub fn rename_f<F: Fn(&str) -> String + Sync + Send + 'static>(self, rename: F) -> Self {
        let inner = self.dense().rename_f(rename);
        self.renamed(inner)
    }

    /// As [`rename_f`](VarBuilder::rename_f), by a [`Renamer`].
    pub fn rename<R: Renamer + Send + Sync + 'a>(self, renamer: R) -> Self {
        let inner = self.dense().rename(renamer);
        self.renamed(inner)
    }

    /// Without the checkpoint, whose names are other ones.
    fn renamed(self, inner: candle_nn::VarBuilder<'a>) -> Self {
        Self { inner, checkpoint: None, ..self }
    }
}
