//! A rank needs little more memory of its device than its part of the weights, and a gradient little more than a scratch. On
//! the pretend driver, for the memory of a GPU is not this program's alone.

use crate::device;
use crate::expected::KINDS;
use crate::packed::random;
use crate::process::{measured, peak_with};
use crate::zeros::{alone, llama, qwen3_moe, write};
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{DType, Device, Tensor, Var};
use candle_quant::ops::{prefill_attention, AttentionOptions};
use candle_quant::parallel::ExpertSplit;
use candle_quant::{Checkpoint, DeviceKvCache, KvCacheConfig, KvFormat, VarBuilder};
use candle_quant_models::sharding::ShardPlan;
use candle_quant_models::{Config, Model};
use serde_json::Value;
use std::sync::Arc;

/// What the pretend driver takes for the memory of each device: whoever allocates more, if only for a moment, fails.
const MEMORY: &str = "PRETEND_CUDA_MEMORY";
/// In the name of a device of the pretend driver.
const PRETENDED: &str = "pretend GPU";

fn context(device: &Device) -> Arc<CudaContext> {
    device.as_cuda_device().unwrap().cuda_stream().context().clone()
}

fn used(device: &Device) -> usize {
    device.synchronize().unwrap();
    let (free, all) = context(device).mem_get_info().unwrap();
    all - free
}

/// Loads `rank` of `ranks` on a device that has room for its part of the plan and a tenth more.
fn check(test: &str, config: &Value, ranks: usize, rank: usize, how: ExpertSplit) {
    let is_measured = measured(|dir| {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let device = device().unwrap();
        let before = used(&device);
        let vb = VarBuilder::sharded(&checkpoint, &alone(&device, rank, ranks), DType::F32);
        let config = Config::from_json(checkpoint.config()).unwrap();
        let model = Model::new(&config, vb.split_experts(how)).unwrap();
        let (held, taken) = (model.summary().size_in_bytes(), used(&device) - before);
        println!("{held} bytes of weights, {taken} bytes of the device");
        assert!(taken as u64 >= held);
    });
    let is_pretended = |device| context(&device).name().unwrap().contains(PRETENDED);
    if is_measured || !device().is_some_and(is_pretended) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config);
    let plan = ShardPlan::with_experts(&Checkpoint::open(dir.path()).unwrap(), ranks, how).unwrap();
    let needed = plan.rank_bytes()[rank] as usize;
    let limit = needed + needed / 10;
    assert!(limit + (64 << 20) < plan.stored_bytes() as usize, "too small a file to tell");
    peak_with(test, dir.path(), &[(MEMORY, limit.to_string())]);
}

#[test]
fn a_rank_of_a_dense_model() {
    check("memory::a_rank_of_a_dense_model", &llama(), 2, 1, ExpertSplit::Inside);
}

#[test]
fn one_of_four_ranks() {
    check("memory::one_of_four_ranks", &llama(), 4, 2, ExpertSplit::Inside);
}

#[test]
fn a_rank_with_parts_of_experts() {
    check("memory::a_rank_with_parts_of_experts", &qwen3_moe(), 2, 0, ExpertSplit::Inside);
}

#[test]
fn a_rank_with_whole_experts() {
    check("memory::a_rank_with_whole_experts", &qwen3_moe(), 2, 1, ExpertSplit::Across);
}

/// The weight is not dequantized as a whole: dense, it would be more than the device has.
#[test]
fn a_gradient_needs_a_scratch() {
    const MIB: usize = 1 << 20;
    // 144 MiB in f32. The scratch takes two times 32.
    let (n, k, m) = (288, 131_072, 1);
    let is_measured = measured(|_| {
        let device = device().unwrap();
        let weight = random(&[n, k], KINDS[0], DType::F16, 160).to_device(&device).unwrap();
        let x = Var::from_tensor(&Tensor::ones((m, k), DType::F32, &device).unwrap()).unwrap();
        let y = weight.matmul(&x, None).unwrap();
        let gradients = y.backward().unwrap();
        assert_eq!(gradients.get(&x).unwrap().dims(), [m, k]);
    });
    let is_pretended = |device| context(&device).name().unwrap().contains(PRETENDED);
    if is_measured || !device().is_some_and(is_pretended) {
        return;
    }
    // Codes, scales and biases; x, its gradient and zeros.
    let limit = n * k / 2 + n * k / 64 * 4 + 4 * m * k * 4 + 64 * MIB + 16 * MIB;
    assert!(limit < n * k * 4);
    let dir = tempfile::tempdir().unwrap();
    peak_with("memory::a_gradient_needs_a_scratch", dir.path(), &[(MEMORY, limit.to_string())]);
}

/// Neither scores nor masks are in memory: those of this prompt would be more than the device has.
#[test]
fn attention_of_a_prompt_needs_its_cache() {
    const MIB: usize = 1 << 20;
    let (tokens, heads, head_dim, pieces) = (768, 4, 64, 4);
    let is_measured = measured(|_| {
        let device = device().unwrap();
        let format = KvFormat::F16;
        let config = KvCacheConfig { keys: format, values: format, ..KvCacheConfig::new(1, head_dim) };
        let mut cache = DeviceKvCache::new(config).unwrap();
        let ones = |heads| Tensor::ones((1, tokens, heads, head_dim), DType::F16, &device).unwrap();
        let (q, k) = (ones(heads), ones(1));
        for piece in 1..=pieces {
            let y = prefill_attention(&q, &k, &k, &mut cache, AttentionOptions::default()).unwrap();
            assert_eq!(y.expect("a kernel").dims(), [1, tokens, heads * head_dim]);
            assert_eq!(cache.len(), piece * tokens);
        }
    });
    let is_pretended = |device| context(&device).name().unwrap().contains(PRETENDED);
    if is_measured || !device().is_some_and(is_pretended) {
        return;
    }
    let limit = 8 * MIB;
    // Those of the last piece, of 16 bits and 32.
    assert!(limit < heads * tokens * pieces * tokens * 2 && limit < tokens * pieces * tokens * 4);
    let dir = tempfile::tempdir().unwrap();
    peak_with("memory::attention_of_a_prompt_needs_its_cache", dir.path(), &[(MEMORY, limit.to_string())]);
}
