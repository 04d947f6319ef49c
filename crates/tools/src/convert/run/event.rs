//! What callers are told while a conversion runs.

use super::quality::ConvertReport;

/// What happens during a conversion.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ConvertEvent<'a> {
    /// A file was finished by the conversion that is resumed.
    Skipped {
        /// Bytes of its tensors in the source.
        bytes: u64,
        /// How many tensors it has.
        tensors: usize,
    },
    /// A part of a tensor is written.
    Advanced {
        /// The tensor.
        tensor: &'a str,
        /// Bytes of the part in the source.
        bytes: u64,
    },
    /// A tensor is written.
    Finished {
        /// The tensor.
        tensor: &'a str,
    },
    /// All is written, and it is still to be decided whether it becomes the output.
    Measured {
        /// What was lost.
        report: &'a ConvertReport,
    },
}
