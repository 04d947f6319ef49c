//! What to measure: the command line.

use crate::shapes::{Shape, QWEN3, TINY};
use clap::{Parser, ValueEnum};
use std::path::PathBuf;

/// Times whole models on the CPU, beside candle's.
#[derive(Parser)]
pub struct Options {
    /// Which models: 0.6b, 1.7b.
    #[arg(long = "shapes", value_delimiter = ',', default_values = ["0.6b", "1.7b"], value_parser = shape)]
    shapes: Vec<Shape>,
    /// Bits of weights: 4 (affine in groups of 64, and Q4_K), 8 (affine in groups of 64, and Q8_0).
    #[arg(long, value_delimiter = ',', default_values = ["4", "8"], value_parser = bits)]
    pub bits: Vec<usize>,
    /// What of a model is measured.
    #[arg(long, value_delimiter = ',', default_values = ["load", "decode", "prefill", "forward", "batch", "sampling"])]
    pub parts: Vec<Part>,
    /// Only these libraries.
    #[arg(long, value_delimiter = ',', default_values = ["candle-quant", "candle"])]
    pub libraries: Vec<Library>,
    /// Tokens of context behind which steps are timed, ascending.
    #[arg(long, value_delimiter = ',', default_values = ["16", "1024", "8192"])]
    pub contexts: Vec<usize>,
    /// Tokens of prompts.
    #[arg(long, value_delimiter = ',', default_values = ["128", "512", "2048"])]
    pub prompts: Vec<usize>,
    /// Tokens of one forward, and sequences of a batch.
    #[arg(long, value_delimiter = ',', default_values = ["1", "2", "4", "8", "16"])]
    pub tokens: Vec<usize>,
    /// Tokens of a prompt computed at once.
    #[arg(long, default_value_t = 256)]
    pub chunk: usize,
    /// Rounds of each measurement; of prefills longer than 1024 tokens at most three.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Steps of a round of decode.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// Where the checkpoints are made, and found the next time.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("candle-quant-bench-decode"))]
    pub files: PathBuf,
    /// Writes a line of JSON for each figure.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Prints lines of JSON instead of the table, and waits for a line of input before each round: for a program that
    /// measures something else in between.
    #[arg(long)]
    pub paced: bool,
    /// Only makes the checkpoints, with a GGUF file of mixed types (as Q4_K_M) as well, and prints their paths as JSON.
    #[arg(long)]
    pub make: bool,
    /// Loads this file, computes a prompt of --prompts tokens, and prints times and peak memory.
    #[arg(long, hide = true)]
    pub child: Option<PathBuf>,
    #[arg(long, hide = true)]
    bench: bool, // cargo bench says so
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    Load,
    Memory,
    Decode,
    Prefill,
    Forward,
    Batch,
    Sampling,
}

impl Part {
    /// Whether models have to be loaded in this process.
    pub fn needs_models(self) -> bool {
        matches!(self, Self::Decode | Self::Prefill | Self::Forward | Self::Batch)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Library {
    CandleQuant,
    Candle,
}

fn shape(name: &str) -> Result<Shape, String> {
    QWEN3.into_iter().find(|shape| shape.name == name).ok_or_else(|| "expected 0.6b or 1.7b".to_string())
}

fn bits(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|bits| [4, 8].contains(bits)).ok_or_else(|| "expected 4 or 8".to_string())
}

impl Options {
    /// `cargo test --benches` only wants to know whether it runs: then everything is tiny, and nothing is kept.
    pub fn for_tests(mut self) -> Self {
        if !self.bench && self.child.is_none() {
            self.shapes = vec![TINY];
            self.parts.push(Part::Memory);
            self.contexts = vec![4, 12];
            self.prompts = vec![8, 20];
            self.tokens = vec![1, 2];
            self.chunk = 8;
            self.rounds = 2;
            self.steps = 2;
        }
        self
    }

    pub fn shapes(&self) -> Vec<Shape> {
        self.shapes.clone()
    }

    pub fn wants(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    pub fn library(&self, library: Library) -> bool {
        self.libraries.contains(&library)
    }

    /// The size of the buffer whose reading is timed: far larger than caches.
    pub fn bandwidth_bytes(&self) -> usize {
        if self.bench {
            1 << 30
        } else {
            1 << 20
        }
    }

    /// The vocabulary that is sampled from.
    pub fn sampled_vocabulary(&self) -> usize {
        self.shapes.iter().map(|shape| shape.vocabulary).max().unwrap_or(1)
    }
}
