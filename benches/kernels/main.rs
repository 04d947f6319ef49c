//! `x * W^T` on a GPU: every format of this crate beside cuBLAS and candle's `QMatMul`, in one run.
//!
//! Every figure is of cold weights: a CUDA graph launches the product on one copy of the weights after the
//! other, together at least four times the second-level cache. The graph is replayed; events give the time
//! of each replay. Bandwidths are over all bytes: weights, scales, activations, products. The read bandwidth
//! that they are compared with is measured in the same run, and so are the baselines.
//!
//! ```sh
//! cargo bench --bench kernels --features cuda -- --seconds 120 --rows 1,8 --only cuBLAS,mxfp4
//! ```

mod accuracy;
mod arena;
mod contenders;
mod gpu;
mod options;
mod report;

use anyhow::Result;
use candle_core::Tensor;
use clap::Parser;
use contenders::{float_tensor, Contender, Pools};
use gpu::{Gpu, Timing};
use options::{Activations, Deadline, Options, Stage};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use report::{Record, Report};

/// How long a graph should take: long beside the launch of a graph, short beside the time there is.
const GRAPH_US: f64 = 3000.0;
const LAUNCHES: std::ops::RangeInclusive<usize> = 2..=100;
/// Above this a product is wrong; those with activations of 8 bits stay below.
const MOST_ERROR: f64 = 0.05;
const FLOOR_MEGABYTES: [usize; 8] = [2, 4, 9, 18, 35, 70, 140, 280];

struct Bench {
    options: Options,
    report: Report,
    /// Bytes per microsecond.
    read_bandwidth: Option<f64>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let deadline = Deadline::after(options.seconds);
    let stages = options.stages()?;
    let shapes = || stages.iter().flat_map(|stage| &stage.shapes);
    let most = shapes().map(|(n, k)| n * k).max().unwrap_or(0);
    let gpu = Gpu::new(most < 1 << 22)?;
    let cold_bytes = if options.cold_bytes > 0 { options.cold_bytes } else { 4 * gpu.l2_bytes()? };
    let pools = Pools::new(&gpu, cold_bytes, most, &options.dtypes)?;
    let mut bench = Bench { report: Report::new(&options.out)?, options, read_bandwidth: None };
    bench.record(Record {
        kind: "device",
        name: gpu.name()?,
        note: Some(format!("{} multiprocessors, cache {} bytes", gpu.multiprocessors()?, gpu.l2_bytes()?)),
        ..Record::default()
    })?;
    if let Err(error) = bench.floors(&gpu, &pools, cold_bytes) {
        bench.failure("floors", &error.to_string())?;
    }
    for stage in &stages {
        for shape in &stage.shapes {
            bench.shape(&gpu, &pools, stage, *shape, &deadline)?;
        }
    }
    if deadline.passed() {
        bench.failure("the rest", "the time was up; --seconds gives more")?;
    }
    Ok(())
}

impl Bench {
    fn record(&mut self, record: Record) -> Result<()> {
        Ok(self.report.write(&record)?)
    }

    fn failure(&mut self, name: &str, note: &str) -> Result<()> {
        println!("{name}: {note}");
        self.record(Record {
            kind: "failure",
            name: name.into(),
            note: Some(note.into()),
            ..Record::default()
        })
    }

    /// Reads and copies of several sizes, and launches of nothing.
    fn floors(&mut self, gpu: &Gpu, pools: &Pools, cold_bytes: usize) -> Result<()> {
        let floors = gpu.floors()?;
        let memory = pools.memory();
        let all = memory.elem_count() * 4 / 16 * 16;
        for bytes in FLOOR_MEGABYTES.into_iter().map(|megabytes| megabytes << 20).chain([all]) {
            let copies = (all / bytes).min(cold_bytes.div_ceil(bytes).max(2));
            if copies == 0 {
                continue;
            }
            let launches = launches_for(bytes as f64 / 4e6 + 2.0, copies);
            let timing = gpu.time(launches, self.options.replays, |i| {
                gpu.read(&floors, memory, i % copies * bytes, bytes)
            })?;
            let bandwidth = bytes as f64 / timing.median;
            self.read_bandwidth = Some(self.read_bandwidth.unwrap_or(0.0).max(bandwidth));
            self.floor("read", bytes, &timing)?;
        }
        let half = all / 32 * 16;
        let timing = gpu.time(4, self.options.replays, |_| gpu.copy(&floors, memory, half))?;
        self.floor("copy", 2 * half, &timing)?;
        let timing = gpu.time(200, self.options.replays, |_| gpu.empty(&floors))?;
        self.floor("empty launch", 0, &timing)
    }

    fn floor(&mut self, name: &str, bytes: usize, timing: &Timing) -> Result<()> {
        let bandwidth = bytes as f64 / timing.median;
        println!(
            "{name:14} {:8.1} MB {:9.2} us {:7.0} GB/s",
            bytes as f64 / 1e6,
            timing.median,
            bandwidth / 1e3
        );
        self.record(Record {
            kind: "floor",
            name: name.into(),
            bytes: Some(bytes),
            ..timed(timing, bandwidth)
        })
    }

    /// Every contender on one shape, unless the time is up.
    fn shape(
        &mut self,
        gpu: &Gpu,
        pools: &Pools,
        stage: &Stage,
        (n, k): (usize, usize),
        deadline: &Deadline,
    ) -> Result<()> {
        for dtype in stage.dtypes.iter().copied() {
            for entry in pools.contenders() {
                let name = entry.name();
                if deadline.passed() || stage.rows.is_empty() {
                    return Ok(());
                }
                if !self.options.wants(&name) {
                    continue;
                }
                let outcome = entry.make((n, k), dtype).map_err(anyhow::Error::from).and_then(|contender| {
                    stage.rows.iter().try_for_each(|m| self.product(gpu, &contender, (n, k, *m), dtype))
                });
                if let Err(error) = outcome {
                    self.failure(&format!("{name} {n}x{k}"), &error.to_string())?;
                }
            }
        }
        Ok(())
    }

    fn product(
        &mut self,
        gpu: &Gpu,
        contender: &Contender,
        (n, k, m): (usize, usize, usize),
        dtype: Activations,
    ) -> Result<()> {
        let x = activations(m, k, dtype)?.to_device(&gpu.device)?;
        let error = accuracy::of(contender, &x)?;
        // A launch that failed without a word is fast. NaN fails this too.
        anyhow::ensure!(error.relative < MOST_ERROR, "M = {m}: wrong products, error {}", error.relative);
        let bytes = contender.bytes + m * (n + k) * 2;
        let expected = 3.0 + bytes as f64 / 3e6 + (m * n * k) as f64 / 2e8;
        let copies = contender.copies.len();
        let timing = gpu.time(launches_for(expected, copies), self.options.replays, |i| {
            contender.copies[i % copies](&x).map(drop)
        })?;
        let bandwidth = bytes as f64 / timing.median;
        let share = self.read_bandwidth.map(|read| bandwidth / read);
        println!(
            "{n:6}x{k:<5} M={m:<4} {:4} {:12} {:18} {:9.2} us {:6.0} GB/s {:4.0} % of read, error {:.1e} ({:.3} of rounding)",
            dtype.dtype().as_str(),
            contender.library,
            contender.name,
            timing.median,
            bandwidth / 1e3,
            share.unwrap_or(f64::NAN) * 100.0,
            error.relative,
            error.over_rounding,
        );
        self.record(Record {
            kind: "product",
            library: contender.library.into(),
            name: contender.name.clone(),
            dtype: Some(dtype.dtype().as_str()),
            n: Some(n),
            k: Some(k),
            m: Some(m),
            bytes: Some(bytes),
            share_of_read: share,
            error: Some(error.relative),
            error_over_rounding: Some(error.over_rounding),
            copies: Some(copies),
            ..timed(&timing, bandwidth)
        })
    }
}

/// A record's fields that a timing gives; `bandwidth` in bytes per microsecond.
fn timed(timing: &Timing, bandwidth: f64) -> Record {
    Record {
        us: Some(timing.median),
        p10: Some(timing.p10),
        p90: Some(timing.p90),
        gb_per_s: Some(bandwidth / 1e3),
        launches: Some(timing.launches),
        ..Record::default()
    }
}

/// Enough launches of about `us` microseconds for a graph, and for every copy to be used.
fn launches_for(us: f64, copies: usize) -> usize {
    ((GRAPH_US / us) as usize).clamp(*LAUNCHES.start(), *LAUNCHES.end()).max(copies)
}

fn activations(m: usize, k: usize, dtype: Activations) -> Result<Tensor> {
    let mut rng = StdRng::seed_from_u64(3);
    let values: Vec<f32> = (0..m * k).map(|_| rng.random_range(-2.0f32..2.0)).collect();
    Ok(float_tensor(&values, dtype.dtype())?.reshape((m, k))?)
}
