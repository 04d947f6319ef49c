//! What several ranks cost that one does not.
//!
//! `cargo bench --bench parallel` prints, for ranks that are threads on the CPU:
//!
//! * of a step of a decode of the bundled model over 2 ranks, the share of time that is spent in collectives: from
//!   when the last rank has come to one until all have left it. (Waiting for a rank that still computes is not the
//!   collective's.) After a warm-up; medians of several runs, and the quickest;
//! * what 1, 2 and 4 ranks read of a file, over its size, and the time it takes with the file in the page cache.
//!   What ranks read is what their plan says, which the tests count.
//!
//! With `CANDLE_QUANT_BENCH_MB=N` the file has about N megabytes instead of 256.

use candle_core::{DType, Device, Result, Tensor};
use candle_quant::parallel::{run, Collective, Rank};
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::sharding::ShardPlan;
use candle_quant_models::{Config, Model};
use serde_json::json;
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

#[path = "../../../benches/common/files.rs"]
mod files;
use files::{median, packed, write, Stored, CONFIG};

const RUNS: usize = 9;
/// Tokens of the prompt, steps before timed ones, and those.
const PROMPT: usize = 16;
const WARM_UP: usize = 100;
const STEPS: usize = 200;

fn main() -> Result<()> {
    // `cargo test --benches` only wants to know whether it runs.
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let megabytes = match std::env::var("CANDLE_QUANT_BENCH_MB") {
        Ok(text) => text.parse().expect("CANDLE_QUANT_BENCH_MB: a number"),
        Err(_) if is_bench => 256,
        Err(_) => 8,
    };
    let (runs, steps) = if is_bench { (RUNS, STEPS) } else { (1, 2) };
    decoding(runs, steps)?;
    loading(runs, megabytes)
}

/// When a rank came to a collective, and when it left.
type Visit = (Instant, Instant);

/// A rank that notes when it came to each collective, and when it left.
#[derive(Debug)]
struct Timed {
    rank: Rank,
    times: Mutex<Vec<Visit>>,
}

impl Timed {
    fn time<T>(&self, operation: impl FnOnce(&Rank) -> T) -> T {
        let start = Instant::now();
        let result = operation(&self.rank);
        self.times.lock().unwrap_or_else(PoisonError::into_inner).push((start, Instant::now()));
        result
    }

    fn take(&self) -> Vec<Visit> {
        std::mem::take(&mut self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Collective for Timed {
    fn index(&self) -> usize {
        self.rank.index()
    }

    fn world_size(&self) -> usize {
        self.rank.world_size()
    }

    fn all_reduce_sum(&self, x: &Tensor) -> candle_quant::Result<Tensor> {
        self.time(|rank| rank.all_reduce_sum(x))
    }

    fn all_gather(&self, x: &Tensor, dim: usize) -> candle_quant::Result<Tensor> {
        self.time(|rank| rank.all_gather(x, dim))
    }

    fn reduce_scatter(&self, x: &Tensor, dim: usize) -> candle_quant::Result<Tensor> {
        self.time(|rank| rank.reduce_scatter(x, dim))
    }

    fn broadcast(&self, x: &Tensor, root: usize) -> candle_quant::Result<Tensor> {
        self.time(|rank| rank.broadcast(x, root))
    }

    fn barrier(&self) -> candle_quant::Result<()> {
        self.time(Rank::barrier)
    }
}

/// Decodes; the time of all steps, and when this rank was in collectives.
fn decode(checkpoint: &Checkpoint, rank: Rank, steps: usize) -> candle_quant::Result<Decoded> {
    let device = rank.device().clone();
    let timed = Arc::new(Timed { rank, times: Mutex::default() });
    let vb = VarBuilder::sharded(checkpoint, &Rank::new(&device, timed.clone()), DType::F32);
    let mut model = Model::new(&Config::from_json(checkpoint.config())?, vb)?;
    model.forward(&Tensor::ones((1, PROMPT), DType::U32, &device)?, 0)?;
    let mut step = |offset: usize| {
        let token = Tensor::new(&[[1u32 + offset as u32 % 50]], &device)?;
        model.forward_last(&token, offset).map(drop)
    };
    // Ranks that have just been woken may share a core for some milliseconds.
    (PROMPT..PROMPT + WARM_UP).try_for_each(&mut step)?;
    timed.rank.barrier()?;
    timed.take();
    let start = Instant::now();
    (PROMPT + WARM_UP..PROMPT + WARM_UP + steps).try_for_each(&mut step)?;
    Ok(Decoded { elapsed: start.elapsed(), collectives: timed.take() })
}

struct Decoded {
    elapsed: Duration,
    collectives: Vec<Visit>,
}

fn decoding(runs: usize, steps: usize) -> Result<()> {
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    let checkpoint = Checkpoint::open(path)?;
    let (mut shares, mut of_step, mut of_two) = (Vec::new(), Vec::new(), Vec::new());
    let mut count = 0;
    let alone = median(runs, || {
        let opened = checkpoint.clone();
        let alone = run(&[Device::Cpu], move |rank| decode(&opened, rank, steps))?;
        Ok(alone[0].elapsed.as_secs_f64() / steps as f64)
    })?;
    for _ in 0..runs {
        let opened = checkpoint.clone();
        let ranks = run(&[Device::Cpu, Device::Cpu], move |rank| decode(&opened, rank, steps))?;
        let [first, second] = ranks.as_slice() else { unreachable!() };
        count = first.collectives.len() / steps;
        let both = first.collectives.iter().zip(&second.collectives);
        let overhead = |(one, other): (&Visit, &Visit)| one.1.max(other.1) - one.0.max(other.0);
        let overhead: Duration = both.map(overhead).sum();
        shares.push(overhead.as_secs_f64() / first.elapsed.as_secs_f64());
        of_step.push(overhead.as_secs_f64() / steps as f64);
        of_two.push(first.elapsed.as_secs_f64() / steps as f64);
    }
    for times in [&mut shares, &mut of_step, &mut of_two] {
        times.sort_by(f64::total_cmp);
    }
    println!(
        "a step of {path}: {:.3} ms alone, {:.3} ms over 2 ranks; {count} collectives take {:.1} us of it, {:.1} % \
         (the quickest {:.1} %)",
        alone * 1e3,
        of_two[runs / 2] * 1e3,
        of_step[runs / 2] * 1e6,
        shares[runs / 2] * 1e2,
        shares[0] * 1e2,
    );
    Ok(())
}

/// A llama of layers of about 25 MB.
fn loading(runs: usize, megabytes: usize) -> Result<()> {
    let (hidden, inner, vocabulary) = (2048, 6144, 8192);
    let layers = (megabytes / 25).max(1);
    let norm = |name: String| (name, "F32", vec![hidden], hidden * 4);
    let mut tensors: Vec<Stored> = packed("model.embed_tokens", vocabulary, hidden).into();
    tensors.push(norm("model.norm.weight".into()));
    for layer in 0..layers {
        let name = |name: &str| format!("model.layers.{layer}.{name}");
        for projection in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            tensors.extend(packed(&name(&format!("self_attn.{projection}")), hidden, hidden));
        }
        for (projection, n, k) in
            [("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)]
        {
            tensors.extend(packed(&name(&format!("mlp.{projection}")), n, k));
        }
        tensors.extend(
            ["input_layernorm", "post_attention_layernorm"].map(|n| norm(name(&format!("{n}.weight")))),
        );
    }
    let mut config: serde_json::Value = serde_json::from_str(CONFIG).map_err(candle_core::Error::wrap)?;
    for (name, value) in [
        ("model_type", json!("llama")),
        ("vocab_size", vocabulary.into()),
        ("hidden_size", hidden.into()),
        ("intermediate_size", inner.into()),
        ("num_hidden_layers", layers.into()),
        ("num_attention_heads", 16.into()),
        ("tie_word_embeddings", true.into()),
    ] {
        config[name] = value;
    }
    let folder = tempfile::tempdir()?;
    let size = write(&folder.path().join("model.safetensors"), &tensors)?;
    fs::write(folder.path().join("config.json"), config.to_string())?;
    let checkpoint = Checkpoint::open(folder.path())?;
    let load = |ranks: usize| {
        let opened = checkpoint.clone();
        let start = Instant::now();
        run(&vec![Device::Cpu; ranks], move |rank| {
            let config = Config::from_json(opened.config())?;
            Model::new(&config, VarBuilder::sharded(&opened, &rank, DType::F32)).map(drop)
        })?;
        Ok(start.elapsed().as_secs_f64())
    };
    load(1)?;
    let alone = median(runs, || load(1))?;
    for ranks in [1, 2, 4] {
        let read = ShardPlan::new(&checkpoint, ranks)?.rank_bytes().iter().sum::<u64>();
        let time = median(runs, || load(ranks))?;
        println!(
            "{ranks} ranks load {:.3} GB in {:.0} ms ({:.2} x the time of one) and read {:.4} x the file",
            size as f64 / 1e9,
            time * 1e3,
            time / alone,
            read as f64 / size as f64,
        );
    }
    Ok(())
}
