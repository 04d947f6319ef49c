//! Checkpoints of MLX: their files, configurations and rules. Of every kind: parts of weights, and names that are not stored.

#[path = "../common/checkpoint.rs"]
mod checkpoint;

mod adapters;
mod config;
mod files;
mod mlx;
mod rules;
mod slices;
mod views;
