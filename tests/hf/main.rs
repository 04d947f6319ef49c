//! Checkpoints in the layouts of Hugging Face.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/hf.rs"]
mod hf;

mod awq_memory;
mod column_order;
mod filled;
mod flat_blocks;
mod float8_rules;
mod gpt_oss;
mod hqq;
mod integer_rules;
mod integers;
mod layouts;
mod mutations;
mod peers;
mod rules;
mod settings_beside;
