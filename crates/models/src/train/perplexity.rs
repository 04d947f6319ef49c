//! How well a model predicts texts.

use super::batches::Batch;
use super::data::prepared;
use super::gradients::loss_sum;
use super::Sequence;
use crate::Model;
use candle_quant::Result;

/// e to the mean cross entropy of all tokens that count, with the adapters that are switched on: 1 if the model knows each
/// before it comes. `batch` sequences go through the model together; those that are longer than its context are split.
///
/// # Errors
/// If no token counts, one is outside of the vocabulary, or the model is one rank's part of another.
pub fn perplexity(model: &Model, sequences: &[Sequence], batch: usize) -> Result<f64> {
    of_prepared(model, &prepared(model, sequences, model.context())?, batch)
}

/// As [`perplexity`], of sequences that fit the model.
pub(super) fn of_prepared(model: &Model, sequences: &[Sequence], batch: usize) -> Result<f64> {
    let (mut sum, mut count) = (0., 0);
    for sequences in sequences.chunks(batch.max(1)) {
        let batch = Batch::new(&sequences.iter().collect::<Vec<_>>(), model.device())?;
        sum += loss_sum(model, &batch)?;
        count += batch.targets.len();
    }
    Ok((sum / count as f64).exp())
}
