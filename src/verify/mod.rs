//! Reads a whole checkpoint and tells what is wrong with it.
//!
//! Opening a checkpoint proves that its files fit together; of the weights nothing is read then.
//! [`verify`] reads every tensor once, and finds what a model would find late or never: numbers that are not
//! finite, shapes that are not those of the config's model, tensors that are missing, files that changed
//! since their digests were taken.
//!
//! ```
//! use candle_quant::{verify, Checkpoint};
//!
//! let report = verify::verify(&Checkpoint::open("assets/tiny")?);
//! assert!(report.passed(true), "{report}");
//! assert_eq!(report.tensors, 35);
//! # Ok::<(), candle_quant::Error>(())
//! ```
//!
//! One tensor is in memory at a time, in its format; decoded it is only in pieces.

mod digests;
mod shapes;
mod values;

pub use digests::{sha256, verify_digest, verify_digests};

use crate::checkpoint::{natural_order, Checkpoint};
use crate::models::Config;
use crate::source::Source;
use crate::Error;
use rayon::prelude::*;
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// How bad a [`Finding`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Severity {
    /// The checkpoint can't be used, or gives senseless results.
    Error,
    /// Odd, but without doubt about the numbers.
    Warning,
}

/// One thing that is wrong or odd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The tensor, or module of a packed weight, unless it concerns the whole checkpoint.
    pub tensor: Option<String>,
    /// What is wrong.
    pub message: String,
}

/// What [`verify`] found.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// What the checkpoint was recognised as; `None` if it could not be opened.
    pub kind: Option<String>,
    /// How many tensors were read; a quantized weight counts as one.
    pub tensors: usize,
    /// Their bytes in the files.
    pub bytes: u64,
    /// How many files were compared with their SHA-256.
    pub digests: usize,
    /// Why shapes were not compared with a model's; `None` if they were.
    pub shapes_unchecked: Option<String>,
    /// What is wrong or odd, worst first, tensors in natural order.
    pub findings: Vec<Finding>,
}

impl Finding {
    fn error(tensor: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, tensor: Some(tensor.into()), message: message.into() }
    }

    fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, tensor: None, message: message.into() }
    }

    /// What the loader says of `tensor`.
    fn from_error(tensor: Option<&str>, error: &Error) -> Self {
        let (tensor, message) = match error {
            Error::Tensor { file, tensor, expected, found, remedy } => {
                let message = format!("{}: expected {expected}, found {found}; {remedy}", file.display());
                (Some(tensor.as_str()), message)
            }
            other => (tensor, other.to_string()),
        };
        Self { severity: Severity::Error, tensor: tensor.map(str::to_owned), message }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        match &self.tensor {
            Some(tensor) => write!(f, "{severity}: `{tensor}`: {}", self.message),
            None => write!(f, "{severity}: {}", self.message),
        }
    }
}

impl VerifyReport {
    /// Whether nothing is wrong; if `strict`, nothing is odd either.
    pub fn passed(&self, strict: bool) -> bool {
        self.errors() == 0 && !(strict && self.warnings() > 0)
    }

    /// How many findings are errors.
    pub fn errors(&self) -> usize {
        self.count(Severity::Error)
    }

    /// How many findings are warnings.
    pub fn warnings(&self) -> usize {
        self.count(Severity::Warning)
    }

    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    fn sort(&mut self) {
        let tensor = |finding: &Finding| finding.tensor.clone().unwrap_or_default();
        self.findings.sort_by(|a, b| a.severity.cmp(&b.severity).then(natural_order(&tensor(a), &tensor(b))));
    }
}

/// A summary of one line; the findings are not in it.
impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(kind) = &self.kind else {
            return write!(f, "not a checkpoint that can be opened");
        };
        let megabytes = self.bytes as f64 / 1e6;
        write!(f, "{kind}: {} tensors, {megabytes:.3} MB, ", self.tensors)?;
        match (self.errors(), self.warnings()) {
            (0, 0) => write!(f, "nothing wrong")?,
            (errors, warnings) => write!(f, "{errors} errors, {warnings} warnings")?,
        }
        if self.digests > 0 {
            write!(f, "; {} SHA-256 digests compared", self.digests)?;
        }
        match &self.shapes_unchecked {
            Some(reason) => write!(f, "; shapes compared with no model: {reason}"),
            None => write!(f, "; shapes compared with the config"),
        }
    }
}

/// As [`verify`], for a path; that it can't be opened is a finding.
pub fn verify_path(path: impl AsRef<Path>) -> VerifyReport {
    match Checkpoint::open(path) {
        Ok(checkpoint) => verify(&checkpoint),
        Err(error) => VerifyReport {
            kind: None,
            tensors: 0,
            bytes: 0,
            digests: 0,
            shapes_unchecked: Some("it can't be opened".into()),
            findings: vec![Finding::from_error(None, &error)],
        },
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
    let digests = checkpoint.digests();
    let wrong = digests.par_iter().filter_map(|digest| verify_digest(digest).err()).collect::<Vec<_>>();
    findings.extend(wrong.iter().map(|error| Finding::from_error(None, error)));
    findings.extend(checkpoint.warnings().into_iter().map(Finding::warning));
    let kind = Some(checkpoint.kind().to_string());
    let digests = digests.len();
    let mut report = VerifyReport { kind, tensors, bytes, digests, shapes_unchecked: model.err(), findings };
    report.sort();
    report
}

/// The model of the config, or why there is none to compare with. A config of a known model that can't be
/// read is a finding.
fn model(checkpoint: &Checkpoint, findings: &mut Vec<Finding>) -> Result<Config, String> {
    let config = checkpoint.config();
    if config.get("model_type").is_none_or(serde_json::Value::is_null) {
        return Err("no config names one".into());
    }
    Config::from_checkpoint(checkpoint).map_err(|error| {
        if !matches!(error, Error::Unsupported { .. }) {
            findings.push(Finding::from_error(None, &error));
        }
        error.to_string()
    })
}
