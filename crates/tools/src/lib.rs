//! Makes and examines quantized checkpoints: what the `candle-quant` command line does, as a library.
//!
//! | room | what it does |
//! |---|---|
//! | [`mod@convert`] | quantizes a checkpoint, or writes a packed one in another way: a plan, little memory, a report of what is lost |
//! | [`mod@importance`] | how much the columns of weights count, by what layers are given |
//! | [`mod@verify`] | what is wrong with a checkpoint |
//! | [`mod@diff`] | how far two checkpoints are apart |
//! | [`mod@fit`] | in which formats a model fits into memory |
//! | [`mod@quantized`] | models that were quantized once, and are opened again |
//! | [`mod@provenance`] | where a checkpoint comes from, as it says itself |
//! | [`mod@bench`] | how fast a model runs here |
//! | [`mod@staging`] | files and folders that are there as a whole, or as they were |
//! | [`mod@patch_candle`] | a candle-nn whose layers know of packed weights |
//!
//! The binary `candle-quant` (feature `cli`, on by default) has these as commands, beside `inspect`, `plan`, `generate`,
//! `chat` and `logits`.

pub mod bench;
mod chunks;
pub mod convert;
pub mod diff;
pub mod fit;
pub mod importance;
pub mod patch_candle;
pub mod provenance;
pub mod quantized;
mod sha256;
mod source;
pub mod staging;
pub mod verify;
