//! What plans say of some checkpoints. Whether ranks read just that: `plans.rs`.

use crate::ranks::SPLITS;
use candle_quant::parallel::ExpertSplit;
use candle_quant::Checkpoint;
use candle_quant_models::sharding::{ShardPlan, ShardedTensor, Split};
use std::path::Path;

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(Path::new(env!("CANDLE_QUANT_REPOSITORY")).join(name)).unwrap()
}

fn split_of<'p>(plan: &'p ShardPlan, name: &str) -> &'p ShardedTensor {
    plan.tensors().iter().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn what_is_split_and_what_is_not() {
    // 4 query heads on 2 key heads of 32 elements, 256 inner elements, groups of 64.
    let checkpoint = open("tests/fixtures/mlx/qwen3-affine-b4-g64");
    let plan = ShardPlan::new(&checkpoint, 2).unwrap();
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

    let plan = ShardPlan::new(&checkpoint, 4).unwrap();
    let output = split_of(&plan, "model.layers.1.self_attn.o_proj.weight");
    assert_eq!(output.split, Split::Columns(vec![0..64, 0..64, 64..128, 64..128]));
    assert_eq!(output.replicated.as_deref(), Some("groups of 64 in the inputs of two ranks are on both"));
    let keys = split_of(&plan, "model.layers.1.self_attn.v_proj.weight");
    assert_eq!(keys.split, Split::Rows(vec![0..32, 0..32, 32..64, 32..64]));
    assert_eq!(keys.replicated.as_deref(), Some("2 key heads are fewer than the 4 ranks"));
    let error = plan.require_split().unwrap_err().to_string();
    assert!(error.contains("plan for 4 ranks") && error.contains("self_attn.k_proj.weight"), "{error}");
    assert!(error.contains("and 5 more") && error.contains("2 key heads are fewer"), "{error}");

    let plan = ShardPlan::new(&checkpoint, 8).unwrap();
    let query = split_of(&plan, "model.layers.0.self_attn.q_proj.weight");
    assert_eq!(query.split, Split::Whole);
    let why = "4 query heads on 2 key heads are too few for 8 ranks";
    assert_eq!(query.replicated.as_deref(), Some(why));
    assert_eq!(plan.communication().all_reduces, 2 + 1);

    let plan = ShardPlan::new(&checkpoint, 3).unwrap();
    let up = split_of(&plan, "model.layers.0.mlp.up_proj.weight");
    assert_eq!(up.split, Split::Rows(vec![0..128, 128..192, 192..256]));
    assert_eq!(
        split_of(&plan, "model.embed_tokens.weight").split,
        Split::Rows(vec![0..86, 86..171, 171..256])
    );

    // Of HQQ, the nibbles of a byte belong to both halves of the rows.
    for (ranks, expected) in [(2, "every rank needs all of its bytes"), (3, "bytes that several ranks need")]
    {
        let hqq = ShardPlan::new(&open("tests/fixtures/uqff/hqq4"), ranks).unwrap();
        let why = split_of(&hqq, "model.layers.0.mlp.up_proj.weight").replicated.as_ref().unwrap();
        assert!(why.starts_with(expected), "{why}");
    }
}

#[test]
fn what_ranks_have_of_experts() {
    let path = |projection: &str| format!("model.layers.1.mlp.switch_mlp.{projection}.weight");
    // 8 experts of 128 inner elements, groups of 64; 4 query heads on 2 key heads.
    let checkpoint = open("tests/fixtures/mlx/qwen3moe-affine-b4-g64");
    let plan = |ranks, split| ShardPlan::with_experts(&checkpoint, ranks, split).unwrap();
    for split in SPLITS {
        let plan = plan(2, split);
        plan.require_split().unwrap();
        assert_eq!((plan.experts(), plan.communication().all_reduces), (split, 2 * 2 + 1));
        let whole = plan.tensors().iter().filter(|tensor| tensor.split == Split::Whole);
        assert_eq!(plan.replicated_bytes(), whole.map(|tensor| tensor.stored_bytes).sum::<u64>());
        assert_eq!(split_of(&plan, "model.layers.1.mlp.gate.weight").split, Split::Whole);
        let down = split_of(&plan, &path("down_proj"));
        assert_eq!(down.rank_bytes, [down.stored_bytes / 2; 2]);
    }
    let inside = plan(2, ExpertSplit::Inside);
    assert_eq!(split_of(&inside, &path("up_proj")).split, Split::Rows(vec![0..64, 64..128]));
    assert_eq!(split_of(&inside, &path("down_proj")).split, Split::Columns(vec![0..64, 64..128]));
    let across = plan(3, ExpertSplit::Across);
    for projection in ["gate_proj", "up_proj", "down_proj"] {
        assert_eq!(split_of(&across, &path(projection)).split, Split::Experts(vec![0..3, 3..6, 6..8]));
    }
    // Two groups for four ranks.
    let inside = plan(4, ExpertSplit::Inside);
    let down = split_of(&inside, &path("down_proj"));
    assert_eq!(down.split, Split::Columns(vec![0..64, 0..64, 64..128, 64..128]));
    assert_eq!(down.replicated.as_deref(), Some("groups of 64 in the inputs of two ranks are on both"));
    assert!(inside.require_split().is_err());
    // More ranks than experts, or than elements inside them.
    for (split, ranks, why) in
        [(ExpertSplit::Across, 9, "experts"), (ExpertSplit::Inside, 129, "inner elements")]
    {
        let plan = plan(ranks, split);
        let gate = split_of(&plan, &path("gate_proj"));
        assert_eq!(gate.split, Split::Whole);
        assert_eq!(gate.replicated, Some(format!("fewer {why} than the {ranks} ranks")));
        assert!(plan.require_split().unwrap_err().to_string().contains("every matrix split"));
        // Nothing is summed after attention and experts, which are whole.
        assert_eq!(plan.communication().all_reduces, 1);
    }

    // gpt-oss: biases, of which those of the outputs are added once, and sinks.
    let checkpoint = open("tests/fixtures/mlx/gptoss-mxfp4-hf");
    let plan = |split| ShardPlan::with_experts(&checkpoint, 2, split).unwrap();
    let split_of_one =
        |split, name: &str| split_of(&plan(split), &format!("model.layers.0.{name}")).split.clone();
    let inside = |name| split_of_one(ExpertSplit::Inside, name);
    assert_eq!(inside("mlp.experts.up_proj.bias"), Split::Rows(vec![0..64, 64..128]));
    assert_eq!(inside("mlp.experts.down_proj.bias"), Split::One(0));
    assert_eq!(inside("self_attn.sinks"), Split::Rows(vec![0..2, 2..4]));
    let across = |name| split_of_one(ExpertSplit::Across, name);
    assert_eq!(across("mlp.experts.down_proj.bias"), Split::Experts(vec![0..2, 2..4]));
    assert_eq!(across("mlp.router.bias"), Split::Whole);
    plan(ExpertSplit::Inside).require_split().unwrap();
    plan(ExpertSplit::Across).require_split().unwrap();
}

#[test]
fn what_can_not_be_planned() {
    let checkpoint = open("tests/fixtures/mlx/qwen3moe-affine-b4-g64");
    // Of the largest number, not even the bytes of each rank would fit into memory.
    for ranks in [0, usize::MAX] {
        let error = ShardPlan::new(&checkpoint, ranks).unwrap_err().to_string();
        assert!(error.contains(&format!("ranks: expected 1 to 65536, found {ranks}")), "{error}");
    }
    ShardPlan::new(&checkpoint, 1).unwrap().require_split().unwrap();
}
