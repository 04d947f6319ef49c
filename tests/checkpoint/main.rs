//! Checkpoints of MLX: their files, configurations and rules.

#[path = "../common/checkpoint.rs"]
mod checkpoint;

mod config;
mod files;
mod mlx;
mod rules;
