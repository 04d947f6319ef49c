//! What to measure: the command line, and the shapes of real models.

use crate::experts::{Block, Tokens};
use candle_core::DType;
use clap::{Parser, ValueEnum};
use serde::Deserialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Times every format's product on a GPU, beside cuBLAS and candle's own quantized products.
#[derive(Parser)]
pub struct Options {
    /// Where kernels.jsonl and kernels.csv go.
    #[arg(long, default_value = "target/bench-kernels")]
    pub out: PathBuf,
    /// Stop after this many seconds; what comes first is most wanted.
    #[arg(long, default_value_t = 240)]
    pub seconds: u64,
    /// Only contenders whose name contains one of these.
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only these shapes: 4096x14336,..
    #[arg(long, value_delimiter = ',', value_parser = parse_shape)]
    pub shapes: Vec<(usize, usize)>,
    /// Only these experts, hidden x inner x experts x those of a token: 4096x14336x8x2,..
    #[arg(long, value_delimiter = ',', value_parser = parse_block)]
    pub experts: Vec<Block>,
    /// Only these numbers of rows of x, or of tokens: with --experts both of as many sequences and of one.
    #[arg(long, value_delimiter = ',')]
    pub rows: Vec<usize>,
    /// The first for everything, the others for one row of x.
    #[arg(long, value_delimiter = ',', default_values = ["bf16", "f16"])]
    pub dtypes: Vec<Activations>,
    /// Timed replays of each graph.
    #[arg(long, default_value_t = 20)]
    pub replays: usize,
    /// Bytes of weights that a graph goes through at least; 0: four times the second-level cache.
    #[arg(long, default_value_t = 0)]
    pub cold_bytes: usize,
    #[arg(long, hide = true)]
    bench: bool, // cargo bench says so
}

fn parse_shape(text: &str) -> Result<(usize, usize), String> {
    parse_sizes(text).map(|[n, k]| (n, k)).ok_or_else(|| format!("expected NxK, found {text}"))
}

fn parse_block(text: &str) -> Result<Block, String> {
    match parse_sizes(text) {
        Some([hidden, inner, experts, top_k]) => Ok(Block { hidden, inner, experts, top_k, clamped: false }),
        None => Err(format!("expected hidden x inner x experts x those of a token, found {text}")),
    }
}

fn parse_sizes<const SIZES: usize>(text: &str) -> Option<[usize; SIZES]> {
    let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok()).collect();
    sizes?.try_into().ok()
}

/// The dtype of activations, products, scales and biases.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Activations {
    F16,
    Bf16,
}

impl Activations {
    pub fn dtype(self) -> DType {
        match self {
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

#[derive(Deserialize)]
struct Shapes {
    rows_of_x: Vec<usize>,
    shapes: Vec<NamedShape>,
    tokens_of_decode: Vec<usize>,
    tokens_of_prefill: Vec<usize>,
    experts: Vec<Block>,
}

#[derive(Deserialize)]
struct NamedShape {
    n: usize,
    k: usize,
    /// Measured for every number of rows first.
    #[serde(default)]
    key: bool,
}

/// What to measure in one go.
pub struct Stage {
    pub work: Work,
    pub dtypes: Vec<Activations>,
}

pub enum Work {
    /// Shapes of weights, and numbers of rows of x.
    Products(Vec<(usize, usize)>, Vec<usize>),
    Experts(Vec<Block>, Vec<Tokens>),
}

impl Work {
    /// Two bytes for each of so many weights are enough for the largest: dense weights, and packed ones of all
    /// experts of a block.
    pub fn most_weights(&self) -> usize {
        let most = match self {
            Self::Products(shapes, _) => shapes.iter().map(|(n, k)| n * k).max(),
            Self::Experts(blocks, _) => blocks.iter().map(|block| block.weights() / 2).max(),
        };
        most.unwrap_or(0)
    }
}

impl Options {
    /// Everything to measure, most wanted first.
    pub fn stages(&self) -> serde_json::Result<Vec<Stage>> {
        let all: Shapes = serde_json::from_str(include_str!("../shapes.json"))?;
        let asked = |m: &&usize| self.rows.is_empty() || self.rows.contains(m);
        let (decode, prefill) = (&all.tokens_of_decode, &all.tokens_of_prefill);
        let (decode, prefill) = match self.experts.is_empty() || self.rows.is_empty() {
            true => (
                decode.iter().filter(asked).copied().collect(),
                prefill.iter().filter(asked).copied().collect(),
            ),
            false => (self.rows.clone(), self.rows.clone()),
        };
        let decode: Vec<_> = decode.into_iter().map(Tokens::Decode).collect();
        let prefill: Vec<_> = prefill.into_iter().map(Tokens::Prefill).collect();
        // The kernels differ in nothing but how they read x and write y.
        let one_dtype = &self.dtypes[..self.dtypes.len().min(1)];
        let stage = |work, dtypes: &[_]| Stage { work, dtypes: dtypes.to_vec() };
        if !self.shapes.is_empty() || !self.experts.is_empty() {
            let rows = if self.rows.is_empty() { all.rows_of_x } else { self.rows.clone() };
            return Ok(vec![
                stage(Work::Products(self.shapes.clone(), rows), &self.dtypes),
                stage(Work::Experts(self.experts.clone(), [decode, prefill].concat()), one_dtype),
            ]);
        }
        let (key, others): (Vec<_>, Vec<_>) = all.shapes.iter().partition(|shape| shape.key);
        let products = |shapes: &[&NamedShape], rows: &[usize]| {
            let shapes = shapes.iter().map(|shape| (shape.n, shape.k)).collect();
            let rows = rows.iter().filter(|m| all.rows_of_x.contains(m)).filter(asked).copied().collect();
            Work::Products(shapes, rows)
        };
        Ok(vec![
            stage(products(&key, &[1]), &self.dtypes),
            stage(Work::Experts(all.experts.clone(), decode), one_dtype),
            stage(products(&key, &[8, 16]), one_dtype),
            stage(Work::Experts(all.experts.clone(), prefill), one_dtype),
            stage(products(&key, &[64, 2048]), one_dtype),
            stage(products(&others, &[1]), one_dtype),
            stage(products(&key, &[2, 4, 512]), one_dtype),
            stage(products(&others, &[8, 16, 2, 4, 64, 256, 512, 2048]), one_dtype),
        ])
    }

    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part))
    }
}

/// The time that is left.
pub struct Deadline(Instant);

impl Deadline {
    pub fn after(seconds: u64) -> Self {
        Self(Instant::now() + Duration::from_secs(seconds))
    }

    pub fn passed(&self) -> bool {
        Instant::now() >= self.0
    }
}
