//! Sums of products of what layers are given.

use super::observed::ObservedModel;
use super::text::CalibrationText;
use candle_core::{DType, Tensor};
use candle_quant::nn::{AdapterSlot, LayerInput};
use candle_quant::{Checkpoint, Result};
use candle_quant_models::Model;
use std::collections::BTreeMap;

/// For modules and experts of them the sums `[K, K]`, row after row.
pub(crate) type Products = BTreeMap<(String, usize), Vec<f64>>;

/// What a run is about: the sums, and what the caller makes of the model's layers.
struct Run<T> {
    products: Products,
    planned: Option<T>,
}

impl<T> Default for Run<T> {
    fn default() -> Self {
        Self { products: BTreeMap::new(), planned: None }
    }
}

/// Runs the model of a checkpoint on a text and sums products for some of its layers: `plan` sees all, and says for which
/// modules and experts, with K.
///
/// # Errors
/// If the model can't run.
pub(crate) fn products<T: Send + 'static>(
    source: &Checkpoint,
    text: &CalibrationText,
    plan: impl FnOnce(&[AdapterSlot]) -> (Vec<(String, usize, usize)>, T),
) -> Result<(Products, Option<T>)> {
    let begin = |model: &Model| {
        let (places, planned) = plan(&model.adapters().slots());
        let zeros = |k: usize| vec![0.; k.saturating_mul(k)];
        let products = places.into_iter().map(|(module, expert, k)| ((module, expert), zeros(k)));
        Ok(Run { products: products.collect(), planned: Some(planned) })
    };
    let Run { products, planned } = ObservedModel::new(source, begin, add)?.run_all(text)?;
    Ok((products, planned))
}

fn add<T>(run: &mut Run<T>, input: &LayerInput, rows: &Tensor) -> candle_core::Result<()> {
    let place = (input.module.to_owned(), input.expert.unwrap_or(0));
    let Some(sums) = run.products.get_mut(&place) else { return Ok(()) };
    // Products of one piece are summed in f32, pieces in f64.
    let products = rows.t()?.contiguous()?.matmul(&rows.contiguous()?)?.to_dtype(DType::F32)?;
    for (sum, product) in sums.iter_mut().zip(products.flatten_all()?.to_vec1::<f32>()?) {
        *sum += f64::from(product);
    }
    Ok(())
}
