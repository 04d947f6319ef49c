//! `x * W^T` and blocks of experts on a GPU: every format of this crate beside cuBLAS and candle's `QMatMul`, in one
//! run.
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
mod contenders;
mod experts;
mod gpu;
mod options;
mod pools;
mod report;

use anyhow::Result;
use candle_core::Tensor;
use clap::Parser;
use contenders::{Contender, Kind};
use experts::{Block, Tokens};
use gpu::{Gpu, Timing};
use options::{Activations, Deadline, Options, Stage, Work};
use pools::{float_tensor, Pools, PERIOD_BYTES};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use report::{Record, Report};

/// How long a graph should take: long beside the launch of a graph, short beside the time there is.
const GRAPH_US: f64 = 3000.0;
const LAUNCHES: std::ops::RangeInclusive<usize> = 2..=100;
/// Above this a product is wrong; those with activations of 8 bits stay below.
const MOST_ERROR: f64 = 0.05;
const FLOOR_MEGABYTES: [usize; 8] = [2, 4, 9, 18, 35, 70, 140, 280];

struct Bench<'a> {
    options: Options,
    gpu: &'a Gpu,
    pools: &'a Pools<'a>,
    deadline: Deadline,
    report: Report,
    /// Bytes per microsecond.
    read_bandwidth: Option<f64>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let deadline = Deadline::after(options.seconds);
    let stages = options.stages()?;
    let most = stages.iter().map(|stage| stage.work.most_weights()).max().unwrap_or(0);
    let gpu = Gpu::new(most < 1 << 22)?;
    let cold_bytes = if options.cold_bytes > 0 { options.cold_bytes } else { 4 * gpu.l2_bytes()? };
    let pools = Pools::new(&gpu, cold_bytes, most, &options.dtypes)?;
    let report = Report::new(&options.out)?;
    let mut bench = Bench { options, gpu: &gpu, pools: &pools, deadline, report, read_bandwidth: None };
    bench.record(Record {
        kind: "device",
        name: gpu.name()?,
        note: Some(format!("{} multiprocessors, cache {} bytes", gpu.multiprocessors()?, gpu.l2_bytes()?)),
        ..Record::default()
    })?;
    if let Err(error) = bench.floors(cold_bytes) {
        bench.failure("floors", &error.to_string())?;
    }
    for Stage { work, dtypes } in &stages {
        match work {
            Work::Products(shapes, rows) => {
                for shape in shapes {
                    bench.products(*shape, rows, dtypes)?;
                }
            }
            Work::Experts(blocks, tokens) => {
                for block in blocks {
                    bench.experts(block, tokens, dtypes)?;
                }
            }
        }
    }
    if bench.deadline.passed() {
        bench.failure("the rest", "the time was up; --seconds gives more")?;
    }
    Ok(())
}

impl Bench<'_> {
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
    fn floors(&mut self, cold_bytes: usize) -> Result<()> {
        let gpu = self.gpu;
        let floors = gpu.floors()?;
        let memory = self.pools.memory();
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
        let half = all / 2 / PERIOD_BYTES * PERIOD_BYTES;
        if half > 0 {
            let timing = gpu.time(4, self.options.replays, |_| gpu.copy(&floors, memory, half))?;
            self.floor("copy", 2 * half, &timing)?;
        }
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
        let record = Record { kind: "floor", name: name.into(), bytes: Some(bytes), ..Record::default() };
        self.record(timed(record, timing, bandwidth))
    }

    /// Products with weights of one shape, unless the time is up.
    fn products(&mut self, (n, k): (usize, usize), rows: &[usize], dtypes: &[Activations]) -> Result<()> {
        for (dtype, kind) in self.wanted(dtypes, &contenders::KINDS) {
            if self.deadline.passed() || rows.is_empty() {
                return Ok(());
            }
            let measured =
                kind.make(self.pools, (n, k), dtype).map_err(anyhow::Error::from).and_then(|contender| {
                    rows.iter().try_for_each(|m| {
                        let bytes = contender.bytes + m * (n + k) * 2;
                        let record = Record {
                            kind: "product",
                            n: Some(n),
                            k: Some(k),
                            m: Some(*m),
                            bytes: Some(bytes),
                            dtype: Some(dtype.dtype().as_str()),
                            ..Record::default()
                        };
                        self.measure(&contender, &activations(&[*m, k], dtype)?, m * n * k, record)
                    })
                });
            if let Err(error) = measured {
                self.failure(&format!("{} {n}x{k}", kind.name()), &error.to_string())?;
            }
        }
        Ok(())
    }

    /// Blocks of experts, unless the time is up.
    fn experts(&mut self, block: &Block, calls: &[Tokens], dtypes: &[Activations]) -> Result<()> {
        let Block { hidden, inner, experts, top_k, .. } = *block;
        for (dtype, kind) in self.wanted(dtypes, &experts::KINDS) {
            for tokens in calls.iter().copied() {
                if self.deadline.passed() {
                    return Ok(());
                }
                let measured = block.make(kind, self.pools, tokens, dtype).map_err(anyhow::Error::from);
                let measured = measured.and_then(|contender| {
                    let Some(contender) = contender else { return Ok(()) };
                    let x = activations(&tokens.dims(hidden), dtype)?;
                    let record = Record {
                        kind: "experts",
                        n: Some(inner),
                        k: Some(hidden),
                        m: Some(tokens.count()),
                        experts: Some(experts),
                        top_k: Some(top_k),
                        bytes: Some(contender.bytes + 2 * x.elem_count() * 2),
                        dtype: Some(dtype.dtype().as_str()),
                        ..Record::default()
                    };
                    self.measure(&contender, &x, block.multiplications(tokens), record)
                });
                if let Err(error) = measured {
                    let name = format!("{} {inner}x{hidden}, {top_k} of {experts}", kind.name());
                    self.failure(&name, &error.to_string())?;
                }
            }
        }
        Ok(())
    }

    /// What the options leave of every kind, in every dtype.
    fn wanted(&self, dtypes: &[Activations], kinds: &[Kind]) -> Vec<(Activations, Kind)> {
        let kinds: Vec<_> = kinds.iter().filter(|kind| self.options.wants(&kind.name())).collect();
        dtypes.iter().flat_map(|dtype| kinds.iter().map(|kind| (*dtype, **kind))).collect()
    }

    /// Checks and times what `record` describes.
    fn measure(
        &mut self,
        contender: &Contender,
        x: &Tensor,
        multiplications: usize,
        record: Record,
    ) -> Result<()> {
        let x = x.to_device(&self.gpu.device)?;
        let error = accuracy::of(contender, &x)?;
        let Record { n: Some(n), k: Some(k), m: Some(m), bytes: Some(bytes), .. } = record else {
            anyhow::bail!("a record without sizes");
        };
        // A launch that failed without a word is fast. NaN fails this too.
        anyhow::ensure!(error.relative < MOST_ERROR, "M = {m}: wrong results, error {}", error.relative);
        let expected = 3.0 + bytes as f64 / 3e6 + multiplications as f64 / 2e8;
        let copies = contender.copies.len();
        let timing = self.gpu.time(launches_for(expected, copies), self.options.replays, |i| {
            (contender.copies[i % copies])(&x).map(drop)
        })?;
        let bandwidth = bytes as f64 / timing.median;
        let share = self.read_bandwidth.map(|read| bandwidth / read);
        let of = match (record.top_k, record.experts) {
            (Some(top_k), Some(experts)) => format!("{top_k} of {experts}"),
            _ => String::new(),
        };
        println!(
            "{n:6}x{k:<5} {of:8} M={m:<4} {:4} {:12} {:18} {:9.2} us {:6.0} GB/s {:4.0} % of read, error {:.1e} ({:.3} of rounding)",
            record.dtype.unwrap_or_default(),
            contender.library,
            contender.name,
            timing.median,
            bandwidth / 1e3,
            share.unwrap_or(f64::NAN) * 100.0,
            error.relative,
            error.over_rounding,
        );
        self.record(Record {
            library: contender.library.into(),
            name: contender.name.clone(),
            share_of_read: share,
            error: Some(error.relative),
            error_over_rounding: Some(error.over_rounding),
            copies: Some(copies),
            ..timed(record, &timing, bandwidth)
        })
    }
}

/// A record with what a timing gives; `bandwidth` in bytes per microsecond.
fn timed(record: Record, timing: &Timing, bandwidth: f64) -> Record {
    Record {
        us: Some(timing.median),
        p10: Some(timing.p10),
        p90: Some(timing.p90),
        gb_per_s: Some(bandwidth / 1e3),
        launches: Some(timing.launches),
        ..record
    }
}

/// Enough launches of about `us` microseconds for a graph, and for every copy to be used.
fn launches_for(us: f64, copies: usize) -> usize {
    ((GRAPH_US / us) as usize).clamp(*LAUNCHES.start(), *LAUNCHES.end()).max(copies)
}

fn activations(dims: &[usize], dtype: Activations) -> Result<Tensor> {
    let mut rng = StdRng::seed_from_u64(3);
    let values: Vec<f32> = (0..dims.iter().product()).map(|_| rng.random_range(-2.0f32..2.0)).collect();
    Ok(float_tensor(&values, dtype.dtype())?.reshape(dims)?)
}
