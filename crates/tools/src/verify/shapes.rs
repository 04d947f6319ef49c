//! Names and shapes against those of the model that the config describes.

use super::report::{Finding, Severity};
use candle_core::{DType, Device};
use candle_quant::Checkpoint;
use candle_quant_models::{Config, Expected};
use std::collections::{BTreeMap, BTreeSet};

/// The tensors the model has, and what the checkpoint has instead.
pub(super) struct Inventory {
    expected: BTreeMap<String, Expected>,
    layers: usize,
    absent_layers: Option<(usize, usize)>,
}

impl Inventory {
    pub(super) fn new(model: &Config, checkpoint: &Checkpoint) -> Self {
        let (expected, absent_layers) = model.inventory(checkpoint.tensor_names());
        Self { expected, layers: model.num_hidden_layers, absent_layers }
    }

    /// A tensor of the checkpoint against that of the model.
    pub(super) fn check(&self, name: &str, dims: &[usize]) -> Option<Finding> {
        let expected = self.expected.get(name)?;
        (expected.dims != dims).then(|| {
            let message = format!("shape {dims:?}; the model of config.json has {:?}", expected.dims);
            Finding::error(name, message)
        })
    }

    /// What the model has and the checkpoint has not, and the other way round.
    pub(super) fn absent(&self, checkpoint: &Checkpoint) -> Vec<Finding> {
        let (mut findings, mut used) = (Vec::new(), BTreeSet::new());
        for (name, expected) in &self.expected {
            let answering = checkpoint.answering(name);
            if answering.is_empty() && expected.required {
                findings.push(Finding::error(name, "missing; the model of config.json needs it"));
            }
            // Rows of a fused projection are seen as the model sees them.
            if !answering.is_empty() && !checkpoint.contains(name) {
                findings.extend(seen(checkpoint, name, &expected.dims));
            }
            used.extend(answering);
        }
        if let Some((count, first)) = self.absent_layers {
            let message = format!(
                "{count} of {} layers have no tensors at all, layer {first} the first of them",
                self.layers
            );
            findings.push(Finding { severity: Severity::Error, tensor: None, message });
        }
        let mut unknown = Vec::new();
        for name in checkpoint.tensor_names().filter(|name| !used.contains(*name)) {
            let module = name.strip_suffix(".bias").map(|module| format!("{module}.weight"));
            match module.is_some_and(|weight| self.expected.contains_key(&weight) || used.contains(&weight)) {
                // The loader takes one of zeros for none.
                true if is_zero(checkpoint, name) => {}
                // Left out, the results would be wrong; the loader refuses it too.
                true => findings.push(Finding::error(name, "a bias, which config.json says there is not")),
                false => unknown.push(name),
            }
        }
        if let Some(first) = unknown.first() {
            findings.push(Finding::warning(format!(
                "{} tensors that the model of config.json does not use, `{first}` among them",
                unknown.len()
            )));
        }
        findings
    }
}

/// What is wrong with what the tensors that answer for one make of it.
fn seen(checkpoint: &Checkpoint, name: &str, dims: &[usize]) -> Option<Finding> {
    match checkpoint.tensor(name, dims.last().copied()) {
        Ok(weight) if weight.dims() == dims => None,
        Ok(weight) => {
            let message = format!("shape {:?}; the model of config.json has {dims:?}", weight.dims());
            Some(Finding::error(name, message))
        }
        Err(error) => Some(Finding::from_error(Some(name), &error)),
    }
}

/// Whether all numbers of a dense tensor are zero.
fn is_zero(checkpoint: &Checkpoint, name: &str) -> bool {
    let numbers = || {
        let dense = checkpoint.dense(name)?.load(DType::F32, &Device::Cpu)?;
        dense.flatten_all()?.to_vec1::<f32>()
    };
    numbers().is_ok_and(|numbers| numbers.iter().all(|number| *number == 0.))
}
