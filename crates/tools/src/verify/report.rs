//! What was found, in words and in numbers.

use candle_quant::checkpoint::natural_order;
use candle_quant::{Error, Untrusted};
use serde::Serialize;
use std::fmt;

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

/// What [`verify`](super::verify) found.
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
    /// What is computed otherwise than the checkpoint says, though nothing is wrong with it.
    pub notes: Vec<String>,
}

impl Finding {
    pub(super) fn error(tensor: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, tensor: Some(tensor.into()), message: message.into() }
    }

    pub(super) fn warning(message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, tensor: None, message: message.into() }
    }

    /// What the loader says of `tensor`.
    #[allow(clippy::wildcard_enum_match_arm, reason = "other errors name no tensor")]
    pub(super) fn from_error(tensor: Option<&str>, error: &Error) -> Self {
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
            Some(tensor) => {
                write!(f, "{severity}: `{}`: {}", Untrusted::new(tensor), Untrusted::new(&self.message))
            }
            None => write!(f, "{severity}: {}", Untrusted::new(&self.message)),
        }
    }
}

impl VerifyReport {
    /// The report of what can't be opened.
    pub fn not_opened(error: &Error) -> Self {
        Self {
            kind: None,
            tensors: 0,
            bytes: 0,
            digests: 0,
            shapes_unchecked: Some("it can't be opened".into()),
            findings: vec![Finding::from_error(None, error)],
            notes: Vec::new(),
        }
    }

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

    pub(super) fn sort(&mut self) {
        let tensor = |finding: &Finding| finding.tensor.clone().unwrap_or_default();
        self.findings.sort_by(|a, b| a.severity.cmp(&b.severity).then(natural_order(&tensor(a), &tensor(b))));
    }
}

/// A summary of one line; findings and notes are not in it.
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
