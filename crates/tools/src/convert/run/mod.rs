//! Carries a plan out: reads, quantizes, measures and writes, file by file, so that it can be resumed.

mod ahead;
mod blobs;
mod block;
mod convert;
mod destination;
mod distinct;
mod event;
mod journal;
mod options;
mod quality;
mod repack;
mod rows;
mod shard_file;
mod sidecars;
mod source_digest;
mod stored_files;
mod unfinished;
mod writer;

pub(super) use block::as_packed;
pub use convert::{convert, measure};
pub use destination::check_output;
pub(crate) use distinct::distinct_name;
pub use event::ConvertEvent;
pub(super) use journal::fingerprint;
pub use options::RunOptions;
pub use quality::{ConvertReport, Quality, WrittenFile};
pub(super) use shard_file::ShardFile;
pub(super) use writer::Writer;
