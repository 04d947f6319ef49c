//! `convert`: what it plans, what it writes, and what it says was lost.

mod bitsandbytes;
mod cache;
#[path = "../../../../tests/common/checkpoint.rs"]
mod checkpoint;
#[path = "../../../../tests/common/convert.rs"]
mod common;
mod exact;
mod families;
#[path = "../../../../tests/common/families.rs"]
mod families_of;
mod feedback;
mod fixtures;
mod from_gguf;
mod ggml_types;
mod gguf;
mod gguf_tokenizers;
#[path = "../../../../tests/gguf/writer.rs"]
#[allow(dead_code)] // Each test binary uses its part.
mod gguf_writer;
mod hugging_face;
mod hugging_face_packed;
mod importance;
mod integers;
mod loading;
mod memory;
mod mlx;
#[path = "../../../../tests/common/numpy.rs"]
mod numpy;
mod ollama;
mod output;
mod overwrite;
mod plan;
mod quality;
mod quantized;
mod repack;
mod resume;
mod scaling;
mod search;
mod shrinking;
mod slm1;
mod target;
#[path = "../../../../tests/common/tiled.rs"]
mod tiled;
mod topology;
mod uqff;
mod uqff_types;
mod verified;
