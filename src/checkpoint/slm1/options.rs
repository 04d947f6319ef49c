//! How an SLM1 file is opened, and what is learnt besides its weights.

use crate::checkpoint::file::Reads;

/// How an SLM1 file is opened. The default is what [`Checkpoint::open`](crate::Checkpoint::open) uses: lenient,
/// the checksum not zero.
#[derive(Clone, Debug, Default)]
pub struct Slm1Options {
    /// Refuses what leaves no doubt about the numbers but is not as published: other model types, unknown flags,
    /// tensors that are not the model's, odd offsets, bytes behind the last tensor, grouped heads, values that are
    /// not finite. A strict reading also needs a function for the checksum.
    pub strict: bool,
    /// What is done about the checksum in the file.
    pub checksum: ChecksumPolicy,
    /// Which elements share a byte in 4-bit tensors.
    pub nibbles: NibbleOrder,
    /// How the bytes of weights are read.
    pub reads: Reads,
}

/// What is done about the checksum of an SLM1 file, whose algorithm is not published.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum ChecksumPolicy {
    /// It must not be zero, which no valid file has. This verifies nothing.
    #[default]
    NonZero,
    /// Nothing.
    Ignore,
    /// It has to be what this function makes of the whole file with zeros in place of the checksum.
    Verify(fn(&[u8]) -> u64),
}

/// Which elements share a byte in 4-bit tensors. The published text does not quite say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NibbleOrder {
    /// Elements 2i (low) and 2i + 1 (high) of a row.
    #[default]
    Pairs,
    /// Elements i (low) and i + n/2 (high) of a block of n.
    HalfBlock,
}

/// Whether a file was found to be what its checksum says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verification {
    /// Nothing was compared with the content.
    Unverified,
    /// The function of [`ChecksumPolicy::Verify`] agrees.
    Verified,
}

/// The kind of a tokenizer section, by its first four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenizerKind {
    /// One token for each byte, and four special ones.
    Btok,
    /// Byte-pair encoding.
    Bpe1,
    /// Something else.
    Unknown([u8; 4]),
}
