//! A rank needs little more memory than its part of the weights.
#![cfg(target_os = "linux")]

use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::ExpertSplit;
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::sharding::{ShardPlan, Workload};
use candle_quant_models::{Config, Model};
use serde_json::Value;
use std::path::Path;

#[path = "../../../tests/common/process.rs"]
mod process;
#[path = "../../../tests/common/zeros.rs"]
mod zeros;
use process::{measured, peak};
use zeros::{alone, llama, qwen3_moe, write};

/// Runs `test` in a process of its own that loads `rank` of `ranks`, against the plan.
fn check(test: &str, config: &Value, ranks: usize, rank: usize, how: ExpertSplit) {
    let load = |dir: &Path| {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let rank = alone(&Device::Cpu, rank, ranks);
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32).split_experts(how);
        let model = Model::new(&Config::from_json(checkpoint.config()).unwrap(), vb).unwrap();
        let plan = ShardPlan::with_experts(&checkpoint, ranks, how).unwrap();
        let (held, planned) = (model.summary().size_in_bytes(), plan.rank_bytes()[rank.index()]);
        // Norms are in the plan alone.
        assert!(held <= planned && held + (1 << 20) > planned, "{held} bytes held, {planned} planned");
    };
    if measured(load) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config);
    let plan = ShardPlan::with_experts(&Checkpoint::open(dir.path()).unwrap(), ranks, how).unwrap();
    let (stored, needed) = (plan.stored_bytes() as usize, plan.rank_bytes()[rank] as usize);
    let peak = peak(test, dir.path());
    let limit = needed + needed / 10 + (64 << 20);
    println!("{} MiB stored, {} MiB needed, peak {} MiB", stored >> 20, needed >> 20, peak >> 20);
    assert!(limit < stored, "too small a file to tell");
    assert!(peak > needed / 2, "the rank loaded nothing: {peak} bytes");
    assert!(peak <= limit, "peak resident set {peak} bytes, {needed} needed, limit {limit}");
}

#[test]
fn a_rank_of_a_dense_model() {
    check("a_rank_of_a_dense_model", &llama(), 2, 1, ExpertSplit::Inside);
}

#[test]
fn one_of_three_ranks() {
    check("one_of_three_ranks", &llama(), 3, 0, ExpertSplit::Inside);
}

#[test]
fn a_rank_with_parts_of_experts() {
    check("a_rank_with_parts_of_experts", &qwen3_moe(), 2, 1, ExpertSplit::Inside);
}

#[test]
fn a_rank_with_whole_experts() {
    check("a_rank_with_whole_experts", &qwen3_moe(), 2, 1, ExpertSplit::Across);
}

/// A prompt in chunks takes what the footprint says: no more, and not much less.
fn check_footprint(test: &str, config: &Value) {
    let tokens = 512;
    let run = |dir: &Path| {
        let mut model = Model::load(&Checkpoint::open(dir).unwrap(), DType::F32, &Device::Cpu).unwrap();
        for offset in (0..tokens).step_by(256) {
            let ids = Tensor::zeros((1, 256), DType::U32, &Device::Cpu).unwrap();
            model.forward_last(&ids, offset).unwrap();
        }
    };
    if measured(run) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config);
    let plan = ShardPlan::new(&Checkpoint::open(dir.path()).unwrap(), 1).unwrap();
    let footprint = plan.footprints(&Workload::on_cpu(DType::F32, tokens), |_| None)[0];
    let peak = peak(test, dir.path()) as u64;
    println!("{footprint:?}, peak {peak}");
    // The program itself is not counted.
    let program = 32 << 20;
    assert!(peak <= footprint.total() + program, "{peak} bytes, and {footprint:?}");
    assert!(peak >= footprint.total() - footprint.workspace / 2, "{peak} bytes, and {footprint:?}");
}

#[test]
fn a_prompt_takes_what_the_footprint_says() {
    check_footprint("a_prompt_takes_what_the_footprint_says", &llama());
}

#[test]
fn a_prompt_of_experts_takes_what_the_footprint_says() {
    check_footprint("a_prompt_of_experts_takes_what_the_footprint_says", &qwen3_moe());
}
