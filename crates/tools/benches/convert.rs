//! How fast weights are converted, quality measurement included.
//!
//! `cargo bench --bench convert` writes a model of BF16 weights into a temporary directory, reads it once so that it is
//! in the page cache, and prints, for every format, megabytes of BF16 source per second and core, medians:
//!
//! * measured: read, packed, dequantized again and compared; nothing is written;
//! * written: that, and files that are synced to the disk, read again for their SHA-256, and renamed.
//!
//! With `CANDLE_QUANT_BENCH_MB=N` the model has N megabytes instead of 256.

use candle_core::Result;
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use half::bf16;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fs;
use std::hint::black_box;
use std::time::Instant;

#[path = "../../../benches/common/files.rs"]
mod files;
use files::{median, write_block, Stored};

const FORMATS: [&str; 13] =
    ["1", "2", "3", "4", "4:g32", "4:g128", "5", "6", "8", "mxfp4", "mxfp8", "nvfp4", "f16"];

/// Rows and columns of a weight.
const SIZE: usize = 4096;

const RUNS: usize = 3;

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it runs.
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let megabytes: usize = match std::env::var("CANDLE_QUANT_BENCH_MB") {
        Ok(text) => text.parse().expect("CANDLE_QUANT_BENCH_MB: a number"),
        Err(_) if is_bench => 256,
        Err(_) => 1,
    };
    let (runs, formats) = if is_bench { (RUNS, &FORMATS[..]) } else { (1, &["4"][..]) };
    let folder = tempfile::tempdir()?;
    let rows = (megabytes * 1_000_000).div_ceil(2 * SIZE);
    let weight =
        |index, rows| (format!("layers.{index}.up_proj.weight"), "BF16", vec![rows, SIZE], 2 * rows * SIZE);
    let weights: Vec<Stored> =
        (0..rows).step_by(SIZE).map(|first| weight(first / SIZE, SIZE.min(rows - first))).collect();
    let source = folder.path().join("source");
    fs::create_dir(&source)?;
    let size = write_block(&source.join("model.safetensors"), &weights, &gaussian())?;
    fs::write(source.join("config.json"), "{}")?;
    black_box(fs::read(source.join("model.safetensors"))?.len());

    let pool = |threads| ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let pools = [pool(1), pool(all)];
    println!("{:.0} MB of BF16, MB/s for each core\n", size as f64 / 1e6);
    println!("| format | measured, 1 thread | measured, {all} threads | written, 1 thread | written, {all} threads |");
    println!("|---|---|---|---|---|");
    for format in formats {
        let recipe = Recipe::named("uniform", format.parse()?)?;
        let plan = ConvertPlan::new(&Checkpoint::open(&source)?, &ConvertOptions::mlx(recipe))?;
        let speed =
            |pool: &ThreadPool, work: &(dyn Fn() -> candle_quant::Result<()> + Sync)| -> Result<f64> {
                let seconds = median(runs, || {
                    let start = Instant::now();
                    pool.install(work)?;
                    Ok(start.elapsed().as_secs_f64())
                })?;
                Ok(size as f64 / 1e6 / seconds / pool.current_num_threads() as f64)
            };
        let measured = || convert::measure(&plan, &|_| ()).map(|report| drop(black_box(report)));
        let written = || {
            let out = folder.path().join("out");
            convert::convert(&plan, &out, &RunOptions::default(), &|_| ())?;
            fs::remove_dir_all(&out).map_err(|error| candle_quant::Error::Io { path: out, error })
        };
        let mut cells = vec![plan.tensors().next().map_or_else(String::new, |tensor| tensor.to.clone())];
        for work in [&measured as &(dyn Fn() -> candle_quant::Result<()> + Sync), &written] {
            for pool in &pools {
                cells.push(format!("{:.0}", speed(pool, work)?));
            }
        }
        println!("| {} |", cells.join(" | "));
    }
    Ok(())
}

/// A block of numbers as trained weights have them, the same in every run.
fn gaussian() -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let number = |_| bf16::from_f32((next() + next() + next() + next()) * 0.03).to_le_bytes();
    (0..1 << 20).flat_map(number).collect()
}
