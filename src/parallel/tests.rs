//! Plans against what ranks read.

use super::plan::{shared_bytes, Plan, PlannedTensor, Split};
use crate::checkpoint::reads;
use crate::models::{Config, Model};
use crate::{Checkpoint, VarBuilder};
use candle_core::{DType, Device};
use std::path::Path;

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

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
    ] {
        let checkpoint = open(name);
        for ranks in [1, 2, 3, 4, 8] {
            let plan = Plan::new(&checkpoint, ranks).unwrap();
            let opened = checkpoint.clone();
            let devices = vec![Device::Cpu; ranks];
            let read = crate::parallel::run(&devices, move |rank| {
                reads::take();
                let config = Config::from_json(opened.config())?;
                Model::new(&config, VarBuilder::sharded(&opened, &rank, DType::F32))?;
                Ok(reads::take().iter().map(|(_, range)| range.len() as u64).sum::<u64>())
            });
            assert_eq!(read.unwrap(), plan.rank_bytes(), "{name} over {ranks}");
            let matrices = plan.tensors().iter().filter(|tensor| tensor.name.ends_with(".weight"));
            for tensor in matrices.filter(|tensor| tensor.split != Split::Whole) {
                // A global scale serves every part.
                let extra = tensor.rank_bytes.iter().sum::<u64>() - tensor.stored_bytes;
                assert!(tensor.replicated.is_some() || extra <= 4 * ranks as u64, "{name}: {tensor:?}");
            }
        }
    }
}

fn split_of<'p>(plan: &'p Plan, name: &str) -> &'p PlannedTensor {
    plan.tensors().iter().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn what_is_split_and_what_is_not() {
    // 4 query heads on 2 key heads of 32 elements, 256 inner elements, groups of 64.
    let checkpoint = open("tests/fixtures/mlx/qwen3-affine-b4-g64");
    let plan = Plan::new(&checkpoint, 2).unwrap();
    plan.require_split().unwrap();
    let norms = plan.tensors().iter().filter(|tensor| tensor.split == Split::Whole);
    assert_eq!(plan.replicated_bytes(), norms.map(|norm| norm.stored_bytes).sum::<u64>());
    assert_eq!(plan.communication().elements(), 5 * 128 + 256);
    assert_eq!(
        split_of(&plan, "model.layers.0.self_attn.k_proj.weight").split,
        Split::Rows(vec![0..32, 32..64])
    );
    let down = split_of(&plan, "model.layers.0.mlp.down_proj.weight");
    assert_eq!(down.split, Split::Columns(vec![0..128, 128..256]));
    assert_eq!(down.rank_bytes, [down.stored_bytes / 2; 2]);

    let plan = Plan::new(&checkpoint, 4).unwrap();
    let output = split_of(&plan, "model.layers.1.self_attn.o_proj.weight");
    assert_eq!(output.split, Split::Columns(vec![0..64, 0..64, 64..128, 64..128]));
    assert_eq!(output.replicated.as_deref(), Some("groups of 64 in the inputs of two ranks are on both"));
    let keys = split_of(&plan, "model.layers.1.self_attn.v_proj.weight");
    assert_eq!(keys.split, Split::Rows(vec![0..32, 0..32, 32..64, 32..64]));
    assert_eq!(keys.replicated.as_deref(), Some("2 key heads are fewer than the 4 ranks"));
    let error = plan.require_split().unwrap_err().to_string();
    assert!(error.contains("plan for 4 ranks") && error.contains("self_attn.k_proj.weight"), "{error}");
    assert!(error.contains("and 5 more") && error.contains("2 key heads are fewer"), "{error}");

    let plan = Plan::new(&checkpoint, 8).unwrap();
    let query = split_of(&plan, "model.layers.0.self_attn.q_proj.weight");
    assert_eq!(query.split, Split::Whole);
    let why = "4 query heads on 2 key heads are too few for 8 ranks";
    assert_eq!(query.replicated.as_deref(), Some(why));
    assert_eq!(plan.communication().all_reduces, 2 + 1);

    let plan = Plan::new(&checkpoint, 3).unwrap();
    let up = split_of(&plan, "model.layers.0.mlp.up_proj.weight");
    assert_eq!(up.split, Split::Rows(vec![0..128, 128..192, 192..256]));
    assert_eq!(
        split_of(&plan, "model.embed_tokens.weight").split,
        Split::Rows(vec![0..86, 86..171, 171..256])
    );

    // Of HQQ, the nibbles of a byte belong to both halves of the rows.
    for (ranks, expected) in [(2, "every rank needs all of its bytes"), (3, "bytes that several ranks need")]
    {
        let hqq = Plan::new(&open("tests/fixtures/uqff/hqq4"), ranks).unwrap();
        let why = split_of(&hqq, "model.layers.0.mlp.up_proj.weight").replicated.as_ref().unwrap();
        assert!(why.starts_with(expected), "{why}");
    }
    assert_eq!((shared_bytes(100, &[100]), shared_bytes(100, &[54, 54])), (None, None));
}

#[test]
fn what_can_not_be_planned() {
    let checkpoint = open("tests/fixtures/mlx/qwen3moe-affine-b4-g64");
    let error = Plan::new(&checkpoint, 2).unwrap_err().to_string();
    assert!(error.contains("a model with experts over 2 ranks is not supported"), "{error}");
    assert!(Plan::new(&checkpoint, 0).unwrap_err().to_string().contains("at least one"));
    Plan::new(&checkpoint, 1).unwrap().require_split().unwrap();
}
