//! What it costs to open a large checkpoint, and to load its weights.
//!
//! `cargo bench --bench loading` writes its files into a temporary directory, reads them once so that they are
//! in the page cache, and prints medians:
//!
//! * opening, and opening and resolving every tensor, of 8 shards with 10,000 tensors and an index, in
//!   milliseconds of CPU time (of this thread: opening is done on one);
//! * loading all weights of one file, beside reading that file from start to end into a buffer.
//!
//! With `CANDLE_QUANT_BENCH_MB=N` the file has N megabytes instead of 512.

use candle_core::{Device, Result};
use candle_quant::checkpoint::{Checkpoint, Weight};
use serde_json::{json, Map};
use std::fs::{self, File};
use std::hint::black_box;
use std::io::Read;
use std::time::Instant;

#[path = "common/files.rs"]
mod files;
use files::{median, packed, write, Stored, CONFIG};

const SHARDS: usize = 8;
/// Stored tensors of the large checkpoint: 3,330 packed weights of three each, and ten norms.
const TENSORS: usize = 10_000;
const NORMS: usize = 10;

const RUNS: usize = 9;

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it runs.
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let megabytes = match std::env::var("CANDLE_QUANT_BENCH_MB") {
        Ok(text) => text.parse().expect("CANDLE_QUANT_BENCH_MB: a number"),
        Err(_) if is_bench => 512,
        Err(_) => 8,
    };
    let runs = if is_bench { RUNS } else { 1 };
    opening(runs)?;
    loading(runs, megabytes)
}

fn opening(runs: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let per_shard = TENSORS / SHARDS;
    let mut all: Vec<Stored> = (0..(TENSORS - NORMS) / 3)
        .flat_map(|i| packed(&format!("model.layers.{}.mlp.experts.{}.up_proj", i / 64, i % 64), 8, 128))
        .collect();
    all.extend((0..NORMS).map(|i| (format!("model.layers.{i}.norm.weight"), "BF16", vec![128], 256)));
    assert_eq!(all.len(), TENSORS);
    let mut weight_map = Map::new();
    for (i, tensors) in all.chunks(per_shard).enumerate() {
        let file = format!("model-{:05}-of-{SHARDS:05}.safetensors", i + 1);
        write(&folder.path().join(&file), tensors)?;
        weight_map.extend(tensors.iter().map(|tensor| (tensor.0.clone(), json!(file))));
    }
    let index = json!({"weight_map": weight_map}).to_string();
    fs::write(folder.path().join("model.safetensors.index.json"), index)?;
    fs::write(folder.path().join("config.json"), CONFIG)?;

    let open = median(runs, || {
        let start = Cpu::now();
        black_box(Checkpoint::open(folder.path())?);
        Ok(start.milliseconds())
    })?;
    let list = median(runs, || {
        let start = Cpu::now();
        let checkpoint = Checkpoint::open(folder.path())?;
        let mut weights = 0;
        for name in checkpoint.tensor_names() {
            black_box(checkpoint.tensor(name, None)?);
            weights += 1;
        }
        assert_eq!(weights, (TENSORS - NORMS) / 3 + NORMS);
        Ok(start.milliseconds())
    })?;
    println!(
        "{TENSORS} tensors in {SHARDS} shards: open {open:.1} ms, open and list {list:.1} ms of CPU time"
    );
    Ok(())
}

fn loading(runs: usize, megabytes: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (n, k) = (4096, 4096);
    let one: usize = packed("", n, k).iter().map(|tensor| tensor.3).sum();
    let count = (megabytes * 1_000_000).div_ceil(one).max(1);
    let tensors: Vec<Stored> = (0..count).flat_map(|i| packed(&format!("layers.{i}.proj"), n, k)).collect();
    let path = folder.path().join("model.safetensors");
    let size = write(&path, &tensors)?;
    fs::write(folder.path().join("config.json"), CONFIG)?;
    let gigabytes = size as f64 / 1e9;

    let mut buffer = vec![0; 1 << 20];
    let mut read = || {
        let start = Instant::now();
        let mut file = File::open(&path)?;
        while file.read(&mut buffer)? > 0 {
            black_box(&buffer);
        }
        Ok(start.elapsed().as_secs_f64())
    };
    read()?;
    let reading = median(runs, read)?;
    let loading = median(runs, || {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(folder.path())?;
        for module in checkpoint.modules() {
            match checkpoint.weight(&module, None)? {
                // One at a time, so that the benchmark needs no more memory than one has.
                Weight::Packed(weight) => drop(black_box(weight.load(&Device::Cpu)?)),
                other => unreachable!("{other:?}"),
            }
        }
        Ok(start.elapsed().as_secs_f64())
    })?;
    println!(
        "{count} weights, {gigabytes:.3} GB in the page cache: loaded at {:.2} GB/s, read at {:.2} GB/s ({:.2} x the time)",
        gigabytes / loading,
        gigabytes / reading,
        loading / reading
    );
    Ok(())
}

/// Time that this thread spent on a CPU; where the system does not tell, time.
struct Cpu {
    nanoseconds: Option<u64>,
    wall: Instant,
}

impl Cpu {
    fn now() -> Self {
        Self { nanoseconds: Self::nanoseconds(), wall: Instant::now() }
    }

    fn nanoseconds() -> Option<u64> {
        fs::read_to_string("/proc/thread-self/schedstat").ok()?.split_whitespace().next()?.parse().ok()
    }

    fn milliseconds(&self) -> f64 {
        match (self.nanoseconds, Self::nanoseconds()) {
            (Some(start), Some(end)) => (end - start) as f64 / 1e6,
            _ => self.wall.elapsed().as_secs_f64() * 1e3,
        }
    }
}
