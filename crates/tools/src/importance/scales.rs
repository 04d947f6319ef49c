//! By what the columns of weights are multiplied before they are packed.

use candle_quant::{Error, Result};
use candle_quant_models::ScaledInput;
use std::collections::BTreeMap;

/// For what modules of a model are given, by what the columns are multiplied that it is multiplied by; what makes it is divided by
/// the same, so that the model computes the same.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColumnScales(BTreeMap<ScaledInput, Vec<Vec<f32>>>);

impl ColumnScales {
    /// Sets the scales of an input: one row of them, or one for each expert.
    ///
    /// # Errors
    /// If they are none, or one is not finite or not above zero.
    pub fn insert(&mut self, input: ScaledInput, scales: Vec<Vec<f32>>) -> Result<()> {
        let is_wrong = |scale: &&f32| !(scale.is_finite() && **scale > 0.);
        let wrong = scales.iter().flatten().find(is_wrong);
        if let Some(found) = wrong.map(f32::to_string).or(scales.is_empty().then(|| "none".to_owned())) {
            return Err(Error::mismatch(format!("scales of {input}"), "finite numbers above zero", found));
        }
        self.0.insert(input, scales);
        Ok(())
    }

    /// Those of an input.
    pub fn get(&self, input: ScaledInput) -> Option<&[Vec<f32>]> {
        self.0.get(&input).map(Vec::as_slice)
    }

    /// All inputs that are scaled.
    pub fn inputs(&self) -> impl Iterator<Item = ScaledInput> + '_ {
        self.0.keys().copied()
    }
}
