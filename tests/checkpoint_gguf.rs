//! GGUF checkpoints: files written by candle's own writer, and by one of ours where candle's can't.

mod common;
#[path = "common/checkpoint.rs"]
mod files;
#[path = "common/packed.rs"]
mod packed;

#[path = "gguf/experts.rs"]
mod experts;
#[path = "gguf/models.rs"]
mod models;
#[path = "gguf/mutations.rs"]
mod mutations;
#[path = "gguf/parts.rs"]
mod parts;
#[path = "gguf/rules.rs"]
mod rules;
#[path = "gguf/source.rs"]
mod source;
#[path = "gguf/tokenizer.rs"]
mod tokenizer;
#[path = "gguf/values.rs"]
mod values;
#[path = "gguf/writer.rs"]
mod writer;
