//! Reads a whole checkpoint and tells what is wrong with it.
//!
//! Opening a checkpoint proves that its files fit together; of the weights nothing is read then.
//! [`verify`] reads every tensor once, and finds what a model would find late or never: numbers that are not
//! finite, shapes that are not those of the config's model, tensors that are missing, files beside the weights that
//! can't be used, such as a tokenizer, files that changed since their digests were taken.
//!
//! ```
//! use candle_quant::Checkpoint;
//! use candle_quant_tools::verify;
//!
//! let report = verify::verify(&Checkpoint::open("assets/tiny")?);
//! assert!(report.passed(true), "{report}");
//! assert_eq!(report.tensors, 35);
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! One tensor is in memory at a time, in its format; dequantized it is only in pieces.

#![deny(clippy::wildcard_enum_match_arm)]

mod activations;
mod companions;
mod digests;
mod report;
mod shapes;
mod values;

pub use activations::unrounded_activations;
pub use digests::{verify_digest, verify_digests};
pub use report::{Finding, Severity, VerifyReport};

use crate::source::Source;
use candle_quant::checkpoint::Checkpoint;
use candle_quant_models::Config;
use rayon::prelude::*;
use std::path::Path;

/// As [`verify`], for a path; that it can't be opened is a finding.
pub fn verify_path(path: impl AsRef<Path>) -> VerifyReport {
    match Checkpoint::open(path) {
        Ok(checkpoint) => verify(&checkpoint),
        Err(error) => VerifyReport::not_opened(&error),
    }
}

/// Reads every tensor and compares it with what it should be.
pub fn verify(checkpoint: &Checkpoint) -> VerifyReport {
    let mut findings = Vec::new();
    let model = model(checkpoint, &mut findings);
    let inventory = model.as_ref().ok().map(|model| shapes::Inventory::new(model, checkpoint));
    let (mut tensors, mut bytes) = (0, 0);
    let source = Source::with_model(checkpoint, model.as_ref().ok().cloned());
    for name in checkpoint.tensor_names() {
        match source.tensor(name) {
            Ok(weight) => {
                if let Some(inventory) = &inventory {
                    findings.extend(inventory.check(name, weight.dims()));
                }
                findings.extend(values::check(name, &weight));
                tensors += 1;
                bytes += weight.size_in_bytes() as u64;
            }
            Err(error) => findings.push(Finding::from_error(Some(name), &error)),
        }
    }
    if tensors == 0 && findings.is_empty() {
        findings.push(Finding { severity: Severity::Error, tensor: None, message: "no tensors".into() });
    }
    if let Some(inventory) = &inventory {
        findings.extend(inventory.absent(checkpoint));
    }
    findings.extend(companions::check(checkpoint));
    let digests = checkpoint.digests();
    let wrong = digests.par_iter().filter_map(|digest| verify_digest(digest).err()).collect::<Vec<_>>();
    findings.extend(wrong.iter().map(|error| Finding::from_error(None, error)));
    findings.extend(checkpoint.warnings().into_iter().map(Finding::warning));
    let kind = Some(checkpoint.kind().to_string());
    let (digests, notes) = (digests.len(), unrounded_activations(checkpoint).into_iter().collect());
    let mut report =
        VerifyReport { kind, tensors, bytes, digests, shapes_unchecked: model.err(), findings, notes };
    report.sort();
    report
}

/// The model of the config, or why there is none to compare with. A config whose model nothing here computes is a finding,
/// too: what loads it refuses it.
fn model(checkpoint: &Checkpoint, findings: &mut Vec<Finding>) -> Result<Config, String> {
    let config = checkpoint.config();
    if config.get("model_type").is_none_or(serde_json::Value::is_null) {
        return Err("no config names one".into());
    }
    Config::from_checkpoint(checkpoint).map_err(|error| {
        findings.push(Finding::from_error(None, &error));
        "none is made of this config".into()
    })
}
