//! What to measure: the command line, and the shapes of real models.

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
    /// Only these numbers of rows of x.
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
    let parts = text.split_once('x').and_then(|(n, k)| Some((n.parse().ok()?, k.parse().ok()?)));
    parts.ok_or_else(|| format!("expected NxK, found {text}"))
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
}

#[derive(Deserialize)]
struct NamedShape {
    n: usize,
    k: usize,
    /// Measured for every number of rows first.
    #[serde(default)]
    key: bool,
}

/// Shapes, with what to measure on each in one go.
pub struct Stage {
    pub shapes: Vec<(usize, usize)>,
    pub rows: Vec<usize>,
    pub dtypes: Vec<Activations>,
}

impl Options {
    /// Everything to measure, most wanted first.
    pub fn stages(&self) -> serde_json::Result<Vec<Stage>> {
        let Shapes { rows_of_x, shapes } = serde_json::from_str(include_str!("../shapes.json"))?;
        if !self.shapes.is_empty() {
            let rows = if self.rows.is_empty() { rows_of_x } else { self.rows.clone() };
            return Ok(vec![Stage { shapes: self.shapes.clone(), rows, dtypes: self.dtypes.clone() }]);
        }
        let (key, others): (Vec<_>, Vec<_>) = shapes.iter().partition(|shape| shape.key);
        let sizes =
            |shapes: Vec<&NamedShape>| shapes.iter().map(|shape| (shape.n, shape.k)).collect::<Vec<_>>();
        let (key, others) = (sizes(key), sizes(others));
        let wanted = |rows: &[usize]| -> Vec<usize> {
            let chosen =
                |m: &&usize| rows_of_x.contains(m) && (self.rows.is_empty() || self.rows.contains(m));
            rows.iter().filter(chosen).copied().collect()
        };
        // The kernels differ in nothing but how they read x and write y.
        let one_dtype = &self.dtypes[..self.dtypes.len().min(1)];
        let order = [
            (&key, wanted(&[1]), &self.dtypes[..]),
            (&key, wanted(&[8, 16]), one_dtype),
            (&key, wanted(&[64, 2048]), one_dtype),
            (&others, wanted(&[1]), one_dtype),
            (&key, wanted(&[2, 4, 512]), one_dtype),
            (&others, wanted(&[8, 16, 2, 4, 64, 512, 2048]), one_dtype),
        ];
        let stage = |(shapes, rows, dtypes): (&Vec<_>, _, &[_])| Stage {
            shapes: shapes.clone(),
            rows,
            dtypes: dtypes.to_vec(),
        };
        Ok(order.into_iter().map(stage).collect())
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
