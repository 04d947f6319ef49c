//! Whole models, and the text that they generate.

#[path = "../../../../tests/common/mod.rs"]
mod common;

mod drop_in;
mod generate;
mod logits;
