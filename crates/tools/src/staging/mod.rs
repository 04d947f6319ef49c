//! How everything that is written comes to its place: files and folders appear under their names when they are complete,
//! and nothing is lost that this crate has not written.
//!
//! ```text
//! disk        renames, exchanges, what is synced to the disk
//!    ▼
//! manifest    candle-quant.json: what was written into a folder, and may be removed from it
//! lock        the process that writes
//!    ▼
//! partial     OUT.partial, in which an output is built
//!    ▼
//! file        one file
//! folder      a folder; one that is there already changes places with it
//! ```
//! Each knows those above it in this drawing.
//!
//! # Rules
//! * A folder is replaced only if all in it is listed in its manifest, and is as it was written. It changes places with
//!   the new one by one rename where the system can, and only listed files are removed then.
//! * Links, pipes and devices are neither replaced nor written through: the last part of a path and what is in an output
//!   have to be regular files and folders.
//! * One process at a time writes an output. It holds a lock that ends with it, so that what a killed process has left is
//!   taken over by the next one.

mod disk;
mod file;
mod folder;
mod lock;
mod manifest;
mod partial;

pub use disk::available_space;
pub(crate) use disk::{create, identity, io, is_there, kind_of, plain, sync_folder, write_synced};
pub use file::{check_file, write_file};
pub(crate) use folder::{check_folder, put_folder, recover_folder, write_folder};
pub(crate) use manifest::{is_whole, remove_listed, Manifest, MANIFEST};
pub(crate) use partial::Partial;
