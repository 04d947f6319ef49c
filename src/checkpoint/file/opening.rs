//! One opening of a checkpoint: what it may still cost, and what is odd about it.

use super::data::Reads;
use super::warnings::Warnings;
use crate::{Error, Result};
use std::cell::Cell;
use std::path::Path;

/// What it may cost to open a checkpoint. Whoever wrote the files decides how many tensors they list, and how much text:
/// beyond this, opening is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes of all headers, indices and configs together.
    pub bytes: u64,
    /// What these list together. A tensor of a header or an index counts as 1, a value of a config as 4, a tensor or
    /// a key of a GGUF file as 32.
    pub entries: u64,
}

impl Default for Budget {
    /// 256 MiB and 2^21 entries.
    fn default() -> Self {
        Self { bytes: 256 << 20, entries: 1 << 21 }
    }
}

/// How a checkpoint is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// What its headers and configs may cost.
    pub budget: Budget,
    /// How the bytes of weights are read.
    pub reads: Reads,
    /// What layers compute with weights in blocks of GGML's types.
    pub ggml: GgmlKernels,
}

/// What computes with weights in blocks of GGML's types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GgmlKernels {
    /// This crate: blocks are brought into its formats, and activations are not rounded. A type that has no kernels on a
    /// device is candle's there.
    #[default]
    Own,
    /// candle, which rounds activations to 8 bits; what it does not know, this crate.
    Candle,
}

/// What a value of JSON weighs in [`Budget::entries`], and a key or a tensor of GGUF.
pub(super) const JSON_VALUE: u64 = 4;
pub(in crate::checkpoint) const GGUF_ENTRY: u64 = 32;

/// What is known of a checkpoint while it is opened, beside its content.
#[derive(Default)]
pub(in crate::checkpoint) struct Opening {
    pub warnings: Warnings,
    pub reads: Reads,
    ggml: GgmlKernels,
    budget: Budget,
    spent_bytes: Cell<u64>,
    spent_entries: Cell<u64>,
}

impl Opening {
    pub(in crate::checkpoint) fn with(OpenOptions { budget, reads, ggml }: OpenOptions) -> Self {
        Self { budget, reads, ggml, ..Self::default() }
    }

    /// How another one is made that may cost as much.
    pub(in crate::checkpoint) fn options(&self) -> OpenOptions {
        OpenOptions { budget: self.budget, reads: self.reads, ggml: self.ggml }
    }

    /// How many bytes may still be read.
    pub(in crate::checkpoint) fn bytes_left(&self) -> u64 {
        self.budget.bytes.saturating_sub(self.spent_bytes.get())
    }

    /// Counts bytes of a file that are about to be read.
    pub(in crate::checkpoint) fn spend_bytes(&self, path: &Path, bytes: u64) -> Result<()> {
        let all = self.spent_bytes.get().saturating_add(bytes);
        self.spent_bytes.set(all);
        self.check(path, all, self.budget.bytes, "bytes of headers and configs")
    }

    /// Counts things that a file lists, which weigh so much each.
    pub(in crate::checkpoint) fn spend_entries(&self, path: &Path, count: u64, weight: u64) -> Result<()> {
        let all = self.spent_entries.get().saturating_add(count.saturating_mul(weight));
        self.spent_entries.set(all);
        self.check(path, all, self.budget.entries, "entries in headers and configs")
    }

    /// How many entries of weight 1 may still come.
    pub(in crate::checkpoint) fn entries_left(&self) -> u64 {
        self.budget.entries.saturating_sub(self.spent_entries.get())
    }

    fn check(&self, path: &Path, all: u64, most: u64, what: &str) -> Result<()> {
        if all <= most {
            return Ok(());
        }
        Err(Error::file(
            path,
            format!("with this file the checkpoint has {all} or more {what}, and the budget is {most}"),
            "fetch it again from a source that you trust, or give a larger budget with Checkpoint::open_with",
        ))
    }
}
