//! GGUF checkpoints: files written by candle's own writer, and by one of ours where candle's can't.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;

mod architectures;
mod block_models;
mod blocks;
mod chat;
mod experts;
mod linear;
mod models;
mod mutations;
mod parts;
mod random_blocks;
mod rules;
mod sentencepiece;
mod source;
mod tokenizer;
mod values;
mod writer;
