//! Plans against what ranks read.

use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::reads;
use candle_quant::parallel::{self, ExpertSplit};
use candle_quant::{Checkpoint, QuantFormat, VarBuilder};
use candle_quant_models::sharding::{ShardPlan, Split, Workload};
use candle_quant_models::{CacheOptions, Config, Model, ModelOptions};
use std::path::Path;

const EXPERTS: [&str; 5] = [
    "tests/fixtures/mlx/gptoss-mxfp4-hf",
    "tests/fixtures/mlx/gptoss-mxfp4-mlxlm",
    "tests/fixtures/mlx/qwen3moe-affine-b4-g64",
    "tests/fixtures/mlx/qwen3moe-nvfp4-global_scale",
    "tests/fixtures/uqff/moe_afq4",
];

/// Whose parts are split in ways of their own.
const FAMILIES: [&str; 15] = [
    "tests/fixtures/families/deepseek_v2/mlx-affine4",
    "tests/fixtures/families/deepseek_v3/mlx-affine4",
    "tests/fixtures/families/ernie4_5_moe/mlx-affine4",
    "tests/fixtures/families/glm4_moe/mlx-mxfp4",
    "tests/fixtures/families/gpt_oss/uqff",
    "tests/fixtures/families/granitemoe/hf",
    "tests/fixtures/families/llama4_text/mlx-affine4",
    "tests/fixtures/families/olmo2/mlx-affine4",
    "tests/fixtures/families/phi/mlx-affine4",
    "tests/fixtures/families/qwen2_moe/mlx-affine4",
    "tests/fixtures/families/qwen3_5_moe_text/hf",
    "tests/fixtures/families/qwen3_5_text/mlx-affine4",
    "tests/fixtures/families/qwen3_next/hf",
    "tests/fixtures/families/qwen3_next/mlx-mxfp4",
    "tests/fixtures/families/stablelm-parallel/mlx-affine4",
];

/// What a rank of a model reads is what the plan says, once, and no rank reads more than its share and what
/// is replicated.
#[test]
fn a_rank_reads_what_the_plan_says() {
    for name in [
        "assets/tiny",
        "assets/tiny-bf16",
        "tests/fixtures/mlx/llama-mixed-custom",
        "tests/fixtures/mlx/llama-untied-bias-b4-g64-f16",
        "tests/fixtures/mlx/qwen3-affine-b3-g64",
        "tests/fixtures/mlx/qwen3-affine-b5-g128",
        "tests/fixtures/mlx/qwen3-nvfp4",
        "tests/fixtures/hf/awq-g64",
        "tests/fixtures/uqff/hqq4",
        "tests/fixtures/uqff/q4k",
    ]
    .into_iter()
    .chain(EXPERTS)
    .chain(FAMILIES)
    {
        let checkpoint = Checkpoint::open(Path::new(env!("CANDLE_QUANT_REPOSITORY")).join(name)).unwrap();
        let cases = [1, 2, 3, 4, 8]
            .into_iter()
            .flat_map(|ranks| [ExpertSplit::Inside, ExpertSplit::Across].map(|split| (ranks, split)));
        let has_experts = Config::from_checkpoint(&checkpoint).unwrap().moe.is_some();
        for (ranks, split) in cases.filter(|(_, split)| has_experts || *split == ExpertSplit::Inside) {
            let plan = ShardPlan::with_experts(&checkpoint, ranks, split).unwrap();
            let opened = checkpoint.clone();
            let devices = vec![Device::Cpu; ranks];
            let read = parallel::run(&devices, move |rank| {
                reads::take();
                let config = Config::from_json(opened.config())?;
                let vb = VarBuilder::sharded(&opened, &rank, DType::F32);
                Model::new(&config, vb.split_experts(split))?;
                Ok(reads::take().iter().map(|(_, range)| range.len() as u64).sum::<u64>())
            });
            assert_eq!(read.unwrap(), plan.rank_bytes(), "{name} over {ranks} {split}");
            let matrices = plan.tensors().iter().filter(|tensor| tensor.name.ends_with(".weight"));
            for tensor in matrices.filter(|tensor| tensor.split != Split::Whole) {
                // A global scale serves every part of its matrix; there are 8 or fewer in these stacks.
                let extra = tensor.rank_bytes.iter().sum::<u64>() - tensor.stored_bytes;
                assert!(tensor.replicated.is_some() || extra <= 8 * 4 * ranks as u64, "{name}: {tensor:?}");
            }
        }
    }
}

/// What a rank holds of weights, and of keys and values behind a text, is what the footprint says.
#[test]
fn a_rank_holds_what_the_footprint_says() {
    let formats = ["f16", "8bit"].map(|name| name.parse().ok());
    let caches =
        [CacheOptions::default(), CacheOptions { keys: formats[0], values: formats[1], max_tokens: None }];
    for name in [
        "assets/tiny",
        "assets/tiny-bf16",
        "tests/fixtures/mlx/llama-untied-bias-b4-g64-f16",
        "tests/fixtures/uqff/q4k",
        "tests/fixtures/uqff/q8_0",
        "tests/fixtures/hf/fp8-128x128",
        "tests/fixtures/hf/ct-int4-asym-g64",
        "tests/fixtures/hf/ct-w8a8",
        "tests/fixtures/hf/gptq-b4-g128",
        "tests/fixtures/hf/gptq-b3-g32",
        "tests/fixtures/hf/gptq-act-order-v2-b3-g64",
        "tests/fixtures/hf/ct-act-order-int4-g32",
        "tests/fixtures/hf/bnb-nf4-nested",
        "tests/fixtures/hf/bnb-int8",
    ]
    .into_iter()
    .chain(EXPERTS)
    .chain(FAMILIES)
    {
        let checkpoint = Checkpoint::open(Path::new(env!("CANDLE_QUANT_REPOSITORY")).join(name)).unwrap();
        let has_experts = Config::from_checkpoint(&checkpoint).unwrap().moe.is_some();
        for (ranks, split, cache) in [
            (1, ExpertSplit::Inside, caches[0]),
            (1, ExpertSplit::Inside, caches[1]),
            (2, ExpertSplit::Inside, caches[0]),
            (2, ExpertSplit::Across, caches[1]),
        ] {
            if split == ExpertSplit::Across && !has_experts {
                continue;
            }
            for format in [None, Some(QuantFormat::MXFP4), Some(QuantFormat::affine(8, 32).unwrap())] {
                let plan = ShardPlan::with_experts(&checkpoint, ranks, split).unwrap();
                let tokens = 70;
                let workload = Workload { cache, ..Workload::on_cpu(DType::F32, tokens) };
                // As `convert` and `--quantize` have it: norms and biases stay.
                let footprints = plan.footprints(&workload, |_| format);
                let opened = checkpoint.clone();
                let held = parallel::run(&vec![Device::Cpu; ranks], move |rank| {
                    let config = Config::from_json(opened.config())?;
                    let vb = VarBuilder::sharded(&opened, &rank, DType::F32).split_experts(split);
                    let vb = vb.quantize_with(move |_| format);
                    let options = ModelOptions { cache, context: Some(tokens) };
                    let mut model = Model::with_options(&config, vb, options)?;
                    model.forward(&Tensor::zeros((1, tokens), DType::U32, &Device::Cpu)?, 0)?;
                    Ok((model.summary().size_in_bytes(), model.cache_size_in_bytes()))
                });
                for (rank, (weights, cache)) in held.unwrap().into_iter().enumerate() {
                    let others = plan.tensors().iter().filter(|tensor| {
                        let is_norm = tensor.name.contains("norm");
                        is_norm || ["bias", "sinks", "A_log"].iter().any(|end| tensor.name.ends_with(end))
                    });
                    let others: u64 = others.map(|tensor| 4 * tensor.rank_elements[rank]).sum();
                    let what = format!("{name}, {format:?}, rank {rank} of {ranks} {split}");
                    assert_eq!(footprints[rank].weights, weights + others, "{what}");
                    assert_eq!(footprints[rank].cache, cache, "{what}");
                }
            }
        }
    }
}
