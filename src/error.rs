//! The crate's error: what was wrong, where, what was expected instead, and how to go on.

use std::path::{Path, PathBuf};

/// Shorthand for results of this crate's loaders and constructors.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong while opening a checkpoint or building a quantized tensor.
///
/// Layers return [`candle_core::Result`] as candle's own do; `?` converts from this type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or directory that was asked for.
        path: PathBuf,
        /// The operating system's answer.
        error: std::io::Error,
    },
    /// A file as a whole is malformed or of a kind that is not supported.
    #[error("{}: {problem}; {remedy}", path.display())]
    File {
        /// The offending file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What the user can do about it.
        remedy: String,
    },
    /// One tensor (or quantized module) of a file contradicts its format.
    #[error("{}: `{tensor}`: expected {expected}, found {found}; {remedy}", file.display())]
    Tensor {
        /// The file that holds the tensor.
        file: Box<Path>,
        /// The tensor's name, or the module path of a quantized weight.
        tensor: String,
        /// What the format demands.
        expected: String,
        /// What is there.
        found: String,
        /// What the user can do about it.
        remedy: String,
    },
    /// An argument in memory has the wrong shape, dtype or value.
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch {
        /// The argument, for example `scales of an affine 4-bit g64 weight`.
        what: String,
        /// What was required.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Something this crate does not do.
    #[error("{what} is not supported; {remedy}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What the user can do instead.
        remedy: String,
    },
    /// A text is longer than its KV cache allows.
    #[error("{needed} tokens, but the KV cache holds at most {max_tokens} of a sequence; clear it and begin with less text, or give it a larger `max_tokens`")]
    OutOfCache {
        /// The tokens that the sequence would have.
        needed: usize,
        /// The most that it may have.
        max_tokens: usize,
    },
    /// A conversion loses more than it may.
    #[error("`{tensor}` as {format}: relative RMS error {relative_rms:.4}, {worse} tensors above the limit {limit}; give them wider formats, or resume with a higher limit")]
    Quality {
        /// The worst tensor.
        tensor: String,
        /// What it became.
        format: String,
        /// Its error, relative to the RMS of its numbers.
        relative_rms: f64,
        /// The limit.
        limit: f64,
        /// How many tensors are above it.
        worse: usize,
    },
    /// A rank of a tensor-parallel group ended in an error or a panic, or did not come where others waited.
    #[error("rank {rank}: {problem}")]
    Rank {
        /// The rank that caused it, which need not be the one that returns this.
        rank: usize,
        /// What happened there.
        problem: String,
    },
    /// An error of candle itself (device, allocation, shape).
    #[error(transparent)]
    Candle(candle_core::Error),
}

impl Error {
    /// An [`Error::Tensor`] from anything printable.
    pub fn tensor(
        file: &Path,
        tensor: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Tensor {
            file: file.into(),
            tensor: tensor.into(),
            expected: expected.into(),
            found: found.into(),
            remedy: remedy.into(),
        }
    }

    /// An [`Error::File`] from anything printable.
    pub fn file(path: &Path, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), problem: problem.into(), remedy: remedy.into() }
    }

    /// A [`Error::Mismatch`] from anything printable.
    pub fn mismatch(what: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Mismatch { what: what.into(), expected: expected.into(), found: found.into() }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle(error)
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            other => candle_core::Error::wrap(other),
        }
    }
}
