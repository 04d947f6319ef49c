//! How a plan is carried out.

/// How a plan is carried out.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Refuse to begin anew where a conversion with another plan was interrupted.
    pub resume: bool,
    /// Replace an output of an earlier conversion, in which nothing was added or changed since. It stays until the new one
    /// is complete.
    pub overwrite: bool,
    /// Accept NaN and infinities. In packed tensors they become zero.
    pub allow_nonfinite: bool,
    /// The largest relative RMS error of a tensor with which the output is made.
    pub max_relative_rms: Option<f64>,
}
