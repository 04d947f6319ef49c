//! Ollama's stores.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/ollama.rs"]
mod ollama;

mod chat;
mod formats;
mod mutations;
mod parts;
mod rules;
mod stores;
