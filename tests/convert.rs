//! `convert`: what it plans, what it writes, and what it says was lost.

#[path = "common/convert.rs"]
mod common;
#[path = "convert/memory.rs"]
mod memory;
#[path = "convert/mlx.rs"]
mod mlx;
#[path = "common/numpy.rs"]
mod numpy;
#[path = "convert/ollama.rs"]
mod ollama;
#[path = "convert/output.rs"]
mod output;
#[path = "convert/overwrite.rs"]
mod overwrite;
#[path = "convert/plan.rs"]
mod plan;
#[path = "convert/quality.rs"]
mod quality;
#[path = "convert/quantized.rs"]
mod quantized;
#[path = "convert/repack.rs"]
mod repack;
#[path = "convert/resume.rs"]
mod resume;
#[path = "convert/search.rs"]
mod search;
#[path = "convert/target.rs"]
mod target;
#[path = "convert/uqff.rs"]
mod uqff;
