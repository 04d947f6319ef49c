//! Models with experts: what a GGUF file computes is what safetensors do, alone and over several ranks.

use crate::common::distance;
use crate::models::{config, logits, logits_over};
use crate::source::sparse;
use candle_core::quantized::GgmlDType;
use candle_core::Tensor;
use candle_quant::parallel::ExpertSplit;
use candle_quant_models::sharding::{ShardPlan, ShardedTensor, Split};

const MODELS: [&str; 3] = ["mixtral", "qwen3_moe", "gpt_oss"];
const SPLITS: [ExpertSplit; 2] = [ExpertSplit::Inside, ExpertSplit::Across];

/// Stacks of a type, and all other matrices as numbers.
fn stacks_of(dtype: GgmlDType) -> impl Fn(&Tensor) -> GgmlDType {
    move |tensor| if tensor.rank() == 3 { dtype } else { GgmlDType::F16 }
}

/// Names and config of each family are those of its other files.
#[test]
fn plain_models_compute_what_safetensors_do() {
    for model in MODELS {
        let source = sparse(model, 128, 192);
        let (_dir, expected) = source.safetensors();
        for dtype in [GgmlDType::F32, GgmlDType::F16] {
            let (_dir, gguf) = source.gguf(dtype, &[]);
            assert_eq!(gguf.warnings(), Vec::<String>::new(), "{model}");
            assert_eq!(config(&gguf), config(&expected), "{model}");
            let distance = distance(&logits(&gguf), &logits(&expected));
            assert!(distance.max < 3e-4, "{model} {dtype:?}: {distance:?}");
        }
    }
}

#[test]
fn stacks_of_ggml_types_over_ranks() {
    use GgmlDType::{Q4K, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    for (model, dtype, hidden, inner) in [
        ("mixtral", Q8_0, 128, 192),
        ("mixtral", Q4_1, 128, 192),
        ("qwen3_moe", Q4_0, 128, 192),
        ("qwen3_moe", Q5_0, 128, 192),
        ("qwen3_moe", Q4K, 256, 512),
        ("gpt_oss", Q5_1, 128, 192),
    ] {
        let (_dir, gguf) = sparse(model, hidden, inner).gguf_of(stacks_of(dtype), &[]);
        let alone = logits(&gguf);
        let mut cut = 0;
        for (ranks, how) in [2, 4, 8].into_iter().flat_map(|ranks| SPLITS.map(|how| (ranks, how))) {
            let plan = ShardPlan::with_experts(&gguf, ranks, how).unwrap();
            let down = |tensor: &&ShardedTensor| tensor.name.ends_with("experts.down_proj.weight");
            let down = plan.tensors().iter().find(down).unwrap();
            assert_eq!(down.format, format!("ggml {dtype:?}"));
            let is_cut = down.replicated.as_ref().is_some_and(|why| why.starts_with("groups of "));
            cut += usize::from(is_cut);
            let distance = distance(&logits_over(&gguf, ranks, how), &alone);
            assert!(distance.max < 3e-4, "{model} {dtype:?} over {ranks} {how}: {distance:?}");
            match how {
                ExpertSplit::Across if ranks > 6 => {
                    let why = "fewer experts than the 8 ranks";
                    assert_eq!((&down.split, down.replicated.as_deref()), (&Split::Whole, Some(why)));
                }
                ExpertSplit::Across => assert_eq!(down.replicated, None),
                _ => assert!(matches!(down.split, Split::Columns(_))),
            }
        }
        assert!((1..3).contains(&cut), "{model} {dtype:?}: {cut} of 3 splits inside of experts");
    }
}
