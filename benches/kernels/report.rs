//! Records: a line of JSON and a line of CSV each, written at once.

use serde::Serialize;
use std::fs::{create_dir_all, File};
use std::io::{Result, Write};
use std::path::Path;

/// One measurement, one floor, or one failure. The peers' scripts write the same fields.
#[derive(Default, Serialize)]
pub struct Record {
    /// device, floor, product, experts or failure.
    pub kind: &'static str,
    /// cuBLAS, candle, candle-quant.
    pub library: String,
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub m: Option<usize>,
    /// Of experts, where n is inside one, k hidden, and m tokens: how many, and how many a token has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// Microseconds of one launch: median, and where a tenth and nine tenths of the replays are below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p10: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p90: Option<f64>,
    /// Weights, scales, x and y of one launch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
    /// Of the read bandwidth measured in this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_of_read: Option<f64>,
    /// L2, relative, against f64 on the same weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
    /// The same in units of what rounding the exact product costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_over_rounding: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launches: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<usize>,
    /// Why there is no measurement; the name of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

const COLUMNS: [&str; 19] = [
    "kind",
    "library",
    "name",
    "dtype",
    "n",
    "k",
    "m",
    "experts",
    "top_k",
    "us",
    "p10",
    "p90",
    "bytes",
    "gb_per_s",
    "share_of_read",
    "error",
    "error_over_rounding",
    "launches",
    "copies",
];

pub struct Report {
    json: File,
    csv: File,
}

impl Report {
    pub fn new(folder: &Path) -> Result<Self> {
        create_dir_all(folder)?;
        let mut csv = File::create(folder.join("kernels.csv"))?;
        writeln!(csv, "{}", COLUMNS.join(","))?;
        Ok(Self { json: File::create(folder.join("kernels.jsonl"))?, csv })
    }

    pub fn write(&mut self, record: &Record) -> Result<()> {
        let value = serde_json::to_value(record)?;
        writeln!(self.json, "{value}")?;
        let cell = |column: &&'static str| match &value[*column] {
            serde_json::Value::Null => String::new(),
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        writeln!(self.csv, "{}", COLUMNS.iter().map(cell).collect::<Vec<_>>().join(","))
    }
}
