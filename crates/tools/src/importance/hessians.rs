//! Sums of products of what layers are given, by which the columns of a weight make up for each other.

use super::names::{given_the_same, within_decoder};
use super::observed::ObservedModel;
use super::text::CalibrationText;
use candle_core::{DType, Tensor};
use candle_quant::checkpoint::module_of;
use candle_quant::format::ErrorFeedback;
use candle_quant::nn::{AdapterSlot, LayerInput};
use candle_quant::{Checkpoint, Error, Result};
use candle_quant_models::Model;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Runs the model of a checkpoint on a text once for some weights at a time, as many as memory allows.
#[derive(Clone, Debug)]
pub(crate) struct Feedback {
    source: Checkpoint,
    text: Arc<CalibrationText>,
}

/// What the matrices of one weight make up for: one for each, or one for all.
pub(crate) type OfMatrices = Vec<Arc<ErrorFeedback>>;

/// A module and one of its experts, and the sums of products of what it is given.
type Products = BTreeMap<(String, usize), Vec<f64>>;

/// What a run is about: the sums, and for each weight where its own are.
#[derive(Default)]
struct Run {
    products: Products,
    places: Vec<Vec<(String, usize)>>,
}

impl Feedback {
    /// The most memory that sums of products may take, unless one weight takes more. The model runs once for each part.
    pub const MOST_BYTES: u64 = 4 << 30;

    pub fn new(source: &Checkpoint, text: Arc<CalibrationText>) -> Self {
        Self { source: source.clone(), text }
    }

    /// Bytes that the sums for a weight of these dimensions take, with what is made of them.
    pub fn bytes(dims: &[usize]) -> u64 {
        let [stack @ .., _, k] = dims else { return 0 };
        let matrices = stack.iter().fold(1u64, |product, dim| product.saturating_mul(*dim as u64));
        (*k as u64).saturating_mul(*k as u64).saturating_mul(12).saturating_mul(matrices)
    }

    /// For each of some weights, by name and dimensions, what its matrices make up for; none where the model has no such
    /// layer.
    ///
    /// # Errors
    /// If the model can't run, or gives layers numbers that are not finite.
    pub fn of(&self, weights: &[(&str, &[usize])]) -> Result<Vec<Option<OfMatrices>>> {
        let plan = |model: &Model| {
            let slots = model.adapters().slots();
            let known: BTreeMap<&str, &AdapterSlot> =
                slots.iter().map(|slot| (within_decoder(slot.module()), slot)).collect();
            let mut run = Run::default();
            for (name, dims) in weights {
                let names = given_the_same(within_decoder(module_of(name).unwrap_or(name)));
                // Projections that are given the same have one sum: the first by name.
                let found =
                    names.iter().filter_map(|(name, expert)| Some((known.get(name.as_str())?, expert)));
                let found = found.min_by_key(|(slot, _)| slot.module().to_owned());
                let k = dims.last().copied().unwrap_or_default();
                let mut places = Vec::new();
                if let Some((slot, expert)) = found.filter(|(slot, _)| slot.dims().last() == Some(&k)) {
                    let experts =
                        if slot.dims().len() == 3 { slot.dims().first().copied().unwrap_or(1) } else { 1 };
                    let all = expert.map_or(0..experts, |expert| expert..expert.saturating_add(1));
                    places.extend(all.map(|expert| (slot.module().to_owned(), expert)));
                }
                for place in &places {
                    run.products.entry(place.clone()).or_insert_with(|| vec![0.; k.saturating_mul(k)]);
                }
                run.places.push(places);
            }
            Ok(run)
        };
        let Run { products, places } = ObservedModel::new(&self.source, plan, add)?.run_all(&self.text)?;
        let mut factors = BTreeMap::new();
        for (place, products) in products {
            let k = products.len().isqrt();
            let feedback = ErrorFeedback::new(products, k).map_err(|error| {
                Error::mismatch(format!("`{}`", place.0), "inputs that make sums", error.to_string())
            })?;
            factors.insert(place, Arc::new(feedback));
        }
        let of_weight = |places: Vec<(String, usize)>| {
            let found: OfMatrices = places.iter().filter_map(|place| factors.get(place).cloned()).collect();
            Some(found).filter(|found| !found.is_empty())
        };
        Ok(places.into_iter().map(of_weight).collect())
    }
}

fn add(run: &mut Run, input: &LayerInput, rows: &Tensor) -> candle_core::Result<()> {
    let place = (input.module.to_owned(), input.expert.unwrap_or(0));
    let Some(sums) = run.products.get_mut(&place) else { return Ok(()) };
    // Products of one piece are summed in f32, pieces in f64.
    let products = rows.t()?.contiguous()?.matmul(&rows.contiguous()?)?.to_dtype(DType::F32)?;
    for (sum, product) in sums.iter_mut().zip(products.flatten_all()?.to_vec1::<f32>()?) {
        *sum += f64::from(product);
    }
    Ok(())
}
