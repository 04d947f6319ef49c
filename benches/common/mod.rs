//! Times with criterion, and one table of medians.

use candle_core::{Error, Result, Tensor};
use criterion::Criterion;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// A table, filled while what it tells of is timed.
pub struct Bench {
    criterion: Criterion,
    table: String,
}

impl Bench {
    /// `measured`: about how long each is timed.
    pub fn new(columns: &[&str], measured: Duration) -> Self {
        let criterion = Criterion::default()
            .sample_size(10)
            .warm_up_time(measured / 5)
            .measurement_time(measured)
            .configure_from_args();
        let mut bench = Self { criterion, table: String::new() };
        bench.heading(columns);
        bench
    }

    /// Begins a table.
    pub fn heading(&mut self, columns: &[&str]) {
        if !self.table.is_empty() {
            self.table += "\n";
        }
        self.row(columns);
        self.row(&vec!["---"; columns.len()]);
    }

    pub fn row(&mut self, cells: &[impl AsRef<str>]) {
        for cell in cells {
            self.table += "| ";
            self.table += cell.as_ref();
            self.table += " ";
        }
        self.table += "|\n";
    }

    /// The median in milliseconds; none if it is filtered out.
    pub fn time(&mut self, id: &str, mut compute: impl FnMut() -> Result<Tensor>) -> Option<f64> {
        let mut samples = Vec::new();
        self.criterion.bench_function(id, |bencher| {
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                for _ in 0..iterations {
                    black_box(compute()).expect("a result");
                }
                let elapsed = start.elapsed();
                samples.push(elapsed / iterations as u32);
                elapsed
            });
        });
        samples.sort();
        samples.get(samples.len() / 2).map(|median| median.as_secs_f64() * 1e3)
    }

    /// Prints the table, and writes it to the file that `CANDLE_QUANT_BENCH_OUT` names.
    pub fn finish(self) -> Result<()> {
        self.criterion.final_summary();
        println!("\n{}", self.table);
        match std::env::var("CANDLE_QUANT_BENCH_OUT") {
            Ok(path) => {
                std::fs::write(&path, self.table).map_err(|error| Error::Msg(format!("{path}: {error}")))
            }
            Err(_) => Ok(()),
        }
    }
}
