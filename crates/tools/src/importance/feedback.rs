//! How the columns of weights make up for each other, by sums of products of what layers are given.

use super::products::products;
use super::text::CalibrationText;
use candle_quant::checkpoint::module_of;
use candle_quant::format::ErrorFeedback;
use candle_quant::nn::AdapterSlot;
use candle_quant::{Checkpoint, Error, Result};
use candle_quant_models::{Config, ModuleInput};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Runs the model of a checkpoint on a text once for some weights at a time, as many as memory allows.
#[derive(Clone, Debug)]
pub(crate) struct Feedback {
    source: Checkpoint,
    config: Config,
    text: Arc<CalibrationText>,
}

/// What the matrices of one weight make up for: one for each, or one for all.
pub(crate) type OfMatrices = Vec<Arc<ErrorFeedback>>;

/// A weight whose columns are to make up for each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToFeed<'a> {
    pub name: &'a str,
    pub dims: &'a [usize],
    /// By what its columns are multiplied, so that what it is given is divided: those of each matrix, or of all; none if they are
    /// not scaled.
    pub scales: &'a [Vec<f32>],
}

impl Feedback {
    /// The most memory that sums of products may take, unless one weight takes more. The model runs once for each part.
    pub const MOST_BYTES: u64 = 4 << 30;

    /// # Errors
    /// If the checkpoint has no model that is known.
    pub fn new(source: &Checkpoint, text: Arc<CalibrationText>) -> Result<Self> {
        Ok(Self { source: source.clone(), config: Config::from_checkpoint(source)?, text })
    }

    /// Bytes that the sums for a weight of these dimensions take, with what is made of them.
    pub fn bytes(dims: &[usize]) -> u64 {
        let [stack @ .., _, k] = dims else { return 0 };
        let matrices = stack.iter().fold(1u64, |product, dim| product.saturating_mul(*dim as u64));
        (*k as u64).saturating_mul(*k as u64).saturating_mul(12).saturating_mul(matrices)
    }

    /// What the matrices of each of some weights make up for; nothing where the model has no such layer.
    ///
    /// # Errors
    /// If the model can't run, or gives layers numbers that are not finite.
    pub fn of(&self, weights: &[ToFeed]) -> Result<Vec<OfMatrices>> {
        let plan = |slots: &[AdapterSlot]| {
            // Projections that are given the same have one sum: the first by name.
            let mut known = BTreeMap::<ModuleInput, &AdapterSlot>::new();
            for slot in slots {
                if let Some(input) = self.config.input_of(slot.module()) {
                    let first = known.entry(input).or_insert(slot);
                    *first = if slot.module() < first.module() { slot } else { first };
                }
            }
            let places: Vec<_> = weights.iter().map(|weight| self.places(weight, &known)).collect();
            let wanted = places.iter().zip(weights).flat_map(|(places, weight)| {
                let k = weight.dims.last().copied().unwrap_or_default();
                places.iter().map(move |(module, expert)| (module.clone(), *expert, k))
            });
            (wanted.collect(), places)
        };
        let (products, places) = products(&self.source, &self.text, plan)?;
        let (mut factors, mut found) = (BTreeMap::<_, Arc<ErrorFeedback>>::new(), Vec::new());
        for (weight, places) in weights.iter().zip(places.unwrap_or_default()) {
            let mut of_matrices = OfMatrices::new();
            for (matrix, place) in places.iter().enumerate() {
                let Some(products) = products.get(place) else { continue };
                let own =
                    if weight.scales.len() == 1 { weight.scales.first() } else { weight.scales.get(matrix) };
                // What is given to several is scaled for all of them, or for none.
                let feedback = match factors.get(place) {
                    Some(feedback) => feedback.clone(),
                    None => Arc::new(of_scaled(place, products, own)?),
                };
                factors.insert(place.clone(), feedback.clone());
                of_matrices.push(feedback);
            }
            found.push(of_matrices);
        }
        Ok(found)
    }

    /// The modules and experts that see what the matrices of a weight are given.
    fn places(&self, weight: &ToFeed, known: &BTreeMap<ModuleInput, &AdapterSlot>) -> Vec<(String, usize)> {
        let Some(input) = self.config.input_of(module_of(weight.name).unwrap_or(weight.name)) else {
            return Vec::new();
        };
        let stack = ModuleInput { expert: None, ..input };
        let Some(slot) = known.get(&input).or_else(|| known.get(&stack)) else { return Vec::new() };
        let (experts, k) = match *slot.dims() {
            [experts, _, k] => (experts, k),
            [.., k] => (1, k),
            [] => return Vec::new(),
        };
        if weight.dims.last() != Some(&k) {
            return Vec::new();
        }
        let all = input.expert.map_or(0..experts, |expert| expert..expert.saturating_add(1));
        all.map(|expert| (slot.module().to_owned(), expert)).collect()
    }
}

/// Sums of products of what is divided by scales.
fn of_scaled(
    (module, _): &(String, usize),
    products: &[f64],
    scales: Option<&Vec<f32>>,
) -> Result<ErrorFeedback> {
    let (k, mut products) = (products.len().isqrt(), products.to_vec());
    if let Some(scales) = scales {
        for (row, scale) in products.chunks_exact_mut(k.max(1)).zip(scales) {
            for (product, other) in row.iter_mut().zip(scales) {
                *product /= f64::from(*scale) * f64::from(*other);
            }
        }
    }
    ErrorFeedback::new(products, k)
        .map_err(|error| Error::mismatch(format!("`{module}`"), "inputs that make sums", error.to_string()))
}
