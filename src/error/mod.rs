//! The crate's error: what was wrong, where, what was expected instead, and how to go on.

mod untrusted;

pub use untrusted::Untrusted;

use std::fmt;
use std::path::{Path, PathBuf};

/// Shorthand for results of this crate's loaders and constructors.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong while opening a checkpoint or building a quantized tensor.
///
/// Layers return [`candle_core::Result`] as candle's own do; `?` converts from this type.
///
/// Names and numbers in it may come from a file. Whatever it says is shown as [`Untrusted`] text, in one line.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    Io {
        /// The file or directory that was asked for.
        path: PathBuf,
        /// The operating system's answer.
        error: std::io::Error,
    },
    /// A file as a whole is malformed or of a kind that is not supported.
    File {
        /// The offending file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What the user can do about it.
        remedy: String,
    },
    /// One tensor (or quantized module) of a file contradicts its format.
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
    /// A model of the Hugging Face hub can't be had: there is none of this name, or it can't be fetched.
    Hub {
        /// The name, as it was given.
        name: String,
        /// What is wrong.
        problem: String,
        /// What the user can do about it.
        remedy: String,
    },
    /// An argument in memory has the wrong shape, dtype or value.
    Mismatch {
        /// The argument, for example `scales of an affine 4-bit g64 weight`.
        what: String,
        /// What was required.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Something this crate does not do.
    Unsupported {
        /// What was asked for.
        what: String,
        /// What the user can do instead.
        remedy: String,
    },
    /// A text is longer than its KV cache allows.
    OutOfCache {
        /// The tokens that the sequence would have.
        needed: usize,
        /// The most that it may have.
        max_tokens: usize,
    },
    /// A text is longer than its model is made for.
    OutOfContext {
        /// The tokens that the text would have.
        needed: usize,
        /// The most that the model's config states, or that it was told.
        context: usize,
    },
    /// A conversion loses more than it may.
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
    Rank {
        /// The rank that caused it, which need not be the one that returns this.
        rank: usize,
        /// What happened there.
        problem: String,
    },
    /// An error of candle itself (device, allocation, shape).
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

    /// An [`Error::Hub`] from anything printable.
    pub(crate) fn hub(
        name: impl fmt::Display,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Hub { name: name.to_string(), problem: problem.into(), remedy: remedy.into() }
    }

    /// A [`Error::Mismatch`] from anything printable.
    pub fn mismatch(what: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Mismatch { what: what.into(), expected: expected.into(), found: found.into() }
    }

    /// All that there is to say, as it came.
    fn message(&self) -> String {
        match self {
            Self::Io { path, error } => format!("{}: {error}", path.display()),
            Self::File { path, problem, remedy } => format!("{}: {problem}; {remedy}", path.display()),
            Self::Hub { name, problem, remedy } => format!("{name}: {problem}; {remedy}"),
            Self::Tensor { file, tensor, expected, found, remedy } => {
                format!("{}: `{tensor}`: expected {expected}, found {found}; {remedy}", file.display())
            }
            Self::Mismatch { what, expected, found } => format!("{what}: expected {expected}, found {found}"),
            Self::Unsupported { what, remedy } => format!("{what} is not supported; {remedy}"),
            Self::OutOfCache { needed, max_tokens } => format!(
                "{needed} tokens, but the KV cache holds at most {max_tokens} of a sequence; clear it and begin with less text, \
                 or give it a larger `max_tokens`"
            ),
            Self::OutOfContext { needed, context } => format!(
                "{needed} tokens, but the model is made for texts of at most {context}; give it less, or allow more with \
                 `context` (on the command line --context), which it may not understand"
            ),
            Self::Quality { tensor, format, relative_rms, limit, worse } => format!(
                "`{tensor}` as {format}: relative RMS error {relative_rms:.4}, {worse} tensors above the limit {limit}; \
                 give them wider formats, or resume with a higher limit"
            ),
            Self::Rank { rank, problem } => format!("rank {rank}: {problem}"),
            Self::Candle(error) => without_backtrace(error),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Untrusted::new(&self.message()).fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Candle(error) => error.source(),
            _ => None,
        }
    }
}

/// What an error of candle says, in one line. With `RUST_BACKTRACE` set it would add a stack of calls, which tells
/// whoever gave a bad file nothing.
fn without_backtrace(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => without_backtrace(inner),
        candle_core::Error::Context { inner, context } => format!("{context}: {}", without_backtrace(inner)),
        candle_core::Error::WithPath { inner, path } => {
            format!("{}: {}", path.display(), without_backtrace(inner))
        }
        other => other.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" "),
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
            // As `wrap` does, without a stack of calls.
            other => candle_core::Error::Wrapped(Box::new(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_file_says_is_escaped() {
        let bad = || "a\u{1b}[2J\u{202e}\nb".to_owned();
        let path = || PathBuf::from(bad());
        let io = || std::io::Error::other(bad());
        for error in [
            Error::Io { path: path(), error: io() },
            Error::file(&path(), bad(), bad()),
            Error::tensor(&path(), bad(), bad(), bad(), bad()),
            Error::hub(bad(), bad(), bad()),
            Error::mismatch(bad(), bad(), bad()),
            Error::Unsupported { what: bad(), remedy: bad() },
            Error::Quality { tensor: bad(), format: bad(), relative_rms: 0., limit: 0., worse: 1 },
            Error::Rank { rank: 1, problem: bad() },
            Error::Candle(candle_core::Error::Msg(bad())),
            Error::Candle(Error::mismatch(bad(), bad(), bad()).into()),
        ] {
            let shown = error.to_string();
            assert!(shown.contains(r"a\u001b[2J\u202e"), "{error:?}: {shown}");
            assert!(!shown.contains(['\u{1b}', '\u{202e}', '\n']), "{error:?}: {shown}");
        }
    }

    #[test]
    fn errors_of_candle_come_without_a_stack_of_calls() {
        let inner = candle_core::Error::Msg("too large".into());
        let with_backtrace = candle_core::Error::WithBacktrace {
            inner: Box::new(inner),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        };
        let error = Error::from(with_backtrace.context("a part").with_path("a/file"));
        assert_eq!(error.to_string(), "a/file: a part: too large");
    }
}
