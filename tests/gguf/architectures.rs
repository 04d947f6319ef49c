//! What the metadata of each architecture becomes. (Whole models, by llama.cpp's converter, are in the tests of families.)

use crate::checkpoint::rejected;
use crate::linear::linear;
use crate::writer::{f32_tensor, tensor, File, ARRAY, BOOL, F32, TEXT, U32};
use candle_quant_models::Config;
use serde_json::{json, Value};

const FILE: &str = "model.gguf";

/// All keys that some architecture of experts demands, and no others do harm with.
const EXPERTS: [(&str, u32); 7] = [
    ("expert_count", 64),
    ("expert_used_count", 2),
    ("expert_feed_forward_length", 32),
    ("expert_shared_count", 1),
    ("leading_dense_block_count", 1),
    ("interleave_moe_layer_step", 1),
    ("attention.kv_lora_rank", 32),
];

/// A model of two layers, hidden 64, two heads of 32, one of them for keys.
pub fn dense(name: &str) -> File {
    let sizes = [
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("embedding_length", 64),
        ("feed_forward_length", 64),
        ("block_count", 2),
        ("context_length", 128),
    ];
    let file =
        sizes.into_iter().fold(File::of(name), |file, (key, size)| file.u32(&format!("{name}.{key}"), size));
    let numbers = ["attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"];
    let file = numbers.iter().fold(file, |file, key| file.f32(&format!("{name}.{key}"), 1e-5));
    file.tensor(f32_tensor("token_embd.weight", &[8, 64], &[0.; 512]))
}

fn phi3() -> File {
    dense("phi3").u32("phi3.attention.sliding_window", 0)
}

fn gemma3() -> File {
    dense("gemma3").f32("gemma3.rope.freq_base", 1e6)
}

/// The same with experts.
fn sparse(name: &str) -> File {
    EXPERTS.into_iter().fold(dense(name), |file, (key, size)| file.u32(&format!("{name}.{key}"), size))
}

/// DeepSeek's, as older converters wrote them.
fn latents() -> File {
    sparse("deepseek2")
        .u32("deepseek2.attention.key_length", 48)
        .u32("deepseek2.attention.value_length", 32)
        .u32("deepseek2.rope.dimension_count", 16)
}

/// With another value of a key, or without one.
pub fn with(mut file: File, key: &str, value: Option<(u32, Vec<u8>)>) -> File {
    file.values.retain(|(name, _, _)| name != key.as_bytes());
    match value {
        None => file,
        Some((kind, bytes)) => file.value(key, kind, bytes),
    }
}

fn text(text: &str) -> Option<(u32, Vec<u8>)> {
    Some((TEXT, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()))
}

pub fn number(number: u32) -> Option<(u32, Vec<u8>)> {
    Some((U32, number.to_le_bytes().to_vec()))
}

fn flags(flags: &[u8]) -> Vec<u8> {
    [&BOOL.to_le_bytes()[..], &(flags.len() as u64).to_le_bytes(), flags].concat()
}

fn config(file: &File) -> Value {
    file.open().unwrap().config().clone()
}

fn read(file: &File) -> Config {
    Config::from_json(&config(file)).unwrap()
}

/// Of each architecture a file that is complete, and the model type that it is of.
fn all() -> Vec<(File, &'static str)> {
    let scaled = |file: File, name: &str| file.f32(&format!("{name}.logit_scale"), 0.5);
    let window = |file: File, name: &str| file.u32(&format!("{name}.attention.sliding_window"), 8);
    let shared = "qwen2moe.expert_shared_feed_forward_length";
    let scores = "deepseek2.expert_gating_func";
    vec![
        (dense("chatglm"), "glm"),
        (window(scaled(dense("cohere2"), "cohere2"), "cohere2"), "cohere2"),
        (scaled(dense("command-r"), "command-r"), "cohere"),
        (latents(), "deepseek_v2"),
        (latents().u32(scores, 1), "deepseek_v2"),
        (latents().u32(scores, 2), "deepseek_v3"),
        (dense("ernie4_5"), "ernie4_5"),
        (sparse("ernie4_5-moe"), "ernie4_5_moe"),
        (dense("exaone4"), "exaone4"),
        (dense("gemma"), "gemma"),
        (dense("gemma2"), "gemma2"),
        (gemma3(), "gemma3_text"),
        (dense("glm4"), "glm4"),
        (sparse("glm4moe"), "glm4_moe"),
        (scaled(dense("granite"), "granite"), "granite"),
        (scaled(sparse("granitemoe"), "granitemoe"), "granitemoe"),
        (dense("hunyuan-dense"), "hunyuan_v1_dense"),
        (sparse("llama4"), "llama4_text"),
        (dense("mistral3"), "ministral3"),
        (dense("nemotron"), "nemotron"),
        (dense("olmo"), "olmo"),
        (dense("olmo2"), "olmo2"),
        (window(dense("olmo2"), "olmo2"), "olmo3"),
        (sparse("olmoe"), "olmoe"),
        (dense("phi2"), "phi"),
        (phi3(), "phi3"),
        (sparse("qwen2moe").u32(shared, 64), "qwen2_moe"),
        (linear(dense("qwen35"), "qwen35"), "qwen3_5_text"),
        (linear(sparse("qwen35moe"), "qwen35moe"), "qwen3_5_moe_text"),
        (linear(sparse("qwen3next"), "qwen3next"), "qwen3_next"),
        (dense("seed_oss"), "seed_oss"),
        (dense("smollm3"), "smollm3"),
        (dense("stablelm"), "stablelm"),
        (dense("starcoder2"), "starcoder2"),
    ]
}

#[test]
fn every_architecture_is_a_model_type() {
    for (file, model_type) in all() {
        assert_eq!(config(&file)["model_type"], model_type);
        let config = read(&file);
        let eps = if model_type == "olmo" { 1e-5 } else { config.norm_eps };
        assert_eq!(
            (config.norm_eps, config.vocab_size, config.num_hidden_layers),
            (eps, 8, 2),
            "{model_type}"
        );
        assert_eq!(config.norm_eps as f32, 1e-5, "{model_type}");
    }
}

/// Each key, of another type or gone: an error that names the file and the key, or a model all the same.
#[test]
fn damaged_values_are_named() {
    let (mut wrong, mut refused) = (0, 0);
    for (file, model_type) in all() {
        for (key, kind, _) in file.values.clone() {
            let key = String::from_utf8(key).unwrap();
            if key.starts_with("general.") {
                continue;
            }
            let other = if kind == U32 { Some((F32, vec![0; 4])) } else { text("much") };
            // Some keys are those of other architectures.
            if let Err(error) = with(file.clone(), &key, other).open() {
                let error = error.to_string();
                assert!(
                    error.contains(FILE) && error.contains(&key) && error.contains("expected"),
                    "{error}"
                );
                wrong += 1;
            }
            let absent = with(file.clone(), &key, None);
            for changed in
                [absent, with(file.clone(), &key, number(0)), with(file.clone(), &key, number(u32::MAX))]
            {
                match changed.open().and_then(|checkpoint| Config::from_checkpoint(&checkpoint)) {
                    Ok(_) => {}
                    Err(error) => {
                        let error = error.to_string();
                        assert!(error.contains(FILE) && error.contains('`'), "{model_type} {key}: {error}");
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(wrong > 200 && refused > 200, "{wrong} {refused}");
}

#[test]
fn demanded_values_are_demanded() {
    for (file, key) in [
        (with(dense("phi2"), "phi2.attention.layer_norm_epsilon", None), "phi2.attention.layer_norm_epsilon"),
        (
            with(dense("glm4"), "glm4.attention.layer_norm_rms_epsilon", None),
            "glm4.attention.layer_norm_rms_epsilon",
        ),
        (sparse("qwen2moe"), "qwen2moe.expert_shared_feed_forward_length"),
        (dense("gemma3"), "gemma3.rope.freq_base"),
        (dense("command-r"), "command-r.logit_scale"),
        (dense("granite"), "granite.logit_scale"),
        (with(sparse("olmoe"), "olmoe.expert_count", None), "olmoe.expert_count"),
        (with(sparse("glm4moe"), "glm4moe.expert_used_count", None), "glm4moe.expert_used_count"),
        (with(latents(), "deepseek2.attention.kv_lora_rank", number(0)), "deepseek2.attention.kv_lora_rank"),
        (with(latents(), "deepseek2.rope.dimension_count", None), "deepseek2.rope.dimension_count"),
        (with(latents(), "deepseek2.attention.value_length", number(0)), "deepseek2.attention.value_length"),
        (with(latents(), "deepseek2.attention.key_length", number(16)), "deepseek2.attention.key_length"),
    ] {
        rejected(file.open(), &[FILE, &format!("`{key}` is"), "expected"]);
    }
}

#[test]
fn what_models_differ_in_is_no_guess() {
    // StableLM's converter writes no base of the rope.
    let long = with(dense("stablelm"), "stablelm.context_length", number(16384));
    rejected(
        long.open(),
        &[FILE, "`stablelm.rope.freq_base` is missing", "models differ", "gguf-new-metadata"],
    );
    assert_eq!(config(&long.f32("stablelm.rope.freq_base", 1e6))["rope_theta"], 1e6);
    // Early ones of Phi 3 no window.
    rejected(dense("phi3").open(), &[FILE, "`phi3.attention.sliding_window` is missing (0 is none)"]);
    // Those of DeepSeek no groups, and for a while not what makes scores.
    let groups = |experts| with(latents(), "deepseek2.expert_count", number(experts)).u32(SCORES, 2);
    const SCORES: &str = "deepseek2.expert_gating_func";
    for (experts, count, chosen) in [(64, 1, 1), (160, 8, 3), (256, 8, 4), (384, 1, 1)] {
        let config = config(&groups(experts));
        assert_eq!((&config["n_group"], &config["topk_group"]), (&count.into(), &chosen.into()), "{experts}");
    }
    rejected(groups(128).open(), &[FILE, "`deepseek2.expert_group_count` is missing", "128 experts"]);
    let stated =
        groups(128).u32("deepseek2.expert_group_count", 4).u32("deepseek2.expert_group_used_count", 2);
    assert_eq!(config(&stated)["topk_group"], 2);
    rejected(
        groups(128).u32("deepseek2.expert_group_count", 4).open(),
        &["expert_group_used_count` is missing"],
    );
    let corrected = latents().tensor(f32_tensor("blk.1.exp_probs_b.bias", &[64], &[0.; 64]));
    rejected(corrected.open(), &[FILE, "`deepseek2.expert_gating_func` is missing"]);
    let yarn = latents().text("deepseek2.rope.scaling.type", "yarn").f32("deepseek2.rope.scaling.factor", 4.);
    rejected(yarn.open(), &[FILE, "`deepseek2.rope.scaling.yarn_log_multiplier` is missing"]);
    let yarn = yarn.f32("deepseek2.rope.scaling.yarn_log_multiplier", 0.0707);
    assert_eq!(config(&yarn)["rope_scaling"]["mscale_all_dim"], 0.0707 * 10.);
}

#[test]
fn what_models_here_do_not_have_is_refused() {
    let sections: Vec<u8> = [8i32, 12, 12, 0].iter().flat_map(|size| size.to_le_bytes()).collect();
    for (file, parts) in [
        (dense("qwen2").u32("qwen2.expert_count", 8), ["`qwen2.expert_count` is 8", "no experts"]),
        (
            dense("glm4").array("glm4.rope.dimension_sections", 5, 4, &sections),
            ["dimension_sections` is", "images"],
        ),
        (
            dense("granite").f32("granite.logit_scale", 1.).bool("granite.rope.scaling.finetuned", 0),
            ["`granite.rope.scaling.finetuned` is false", "without positions"],
        ),
        (
            sparse("granitemoe")
                .f32("granitemoe.logit_scale", 1.)
                .u32("granitemoe.expert_shared_feed_forward_length", 8),
            ["expert_shared_feed_forward_length` is 8", "all tokens use"],
        ),
        (sparse("glm4moe").u32("glm4moe.expert_gating_func", 1), ["expert_gating_func` is 1", "expected 2"]),
        (sparse("olmoe").u32("olmoe.expert_gating_func", 2), ["expert_gating_func` is 2", "expected 1"]),
        (latents().bool("deepseek2.expert_weights_norm", 1), ["expert_weights_norm` is true", "softmax"]),
        (
            latents().f32("deepseek2.attention.temperature_scale", 0.1),
            ["temperature_scale` is given", "grow"],
        ),
        (phi3().f32("phi3.rope.scaling.attn_factor", 1.2), ["attn_factor` is given", "`none`"]),
        (
            gemma3().f32("gemma3.rope.local.freq_base", 1e4),
            ["`gemma3.rope.local.freq_base`", "Ollama's converter"],
        ),
        (
            dense("mistral3").f32("mistral3.rope.scaling_beta", 0.1),
            ["`mistral3.rope.scaling_beta`", "llama.cpp's"],
        ),
        (
            sparse("llama4").u32("llama4.attention.chunk_size", 8192),
            ["`llama4.attention.chunk_size`", "Ollama's converter"],
        ),
        (sparse("llama4").u32("llama4.attention.sliding_window", 0), ["sliding_window` is 0", "chunks"]),
        (
            linear(dense("qwen35"), "qwen35").array("qwen35.attention.recurrent_layers", BOOL, 2, &[1, 0]),
            ["recurrent_layers` is given", "interval"],
        ),
        (
            with(linear(dense("qwen35"), "qwen35"), "qwen35.ssm.inner_size", number(25)),
            ["`qwen35.ssm.inner_size`", "a multiple of the 6 heads"],
        ),
        (
            linear(sparse("qwen3next"), "qwen3next").tensor(f32_tensor(
                "blk.0.ssm_in.weight",
                &[1, 64],
                &[0.; 64],
            )),
            ["`blk.0.ssm_in.weight`", "in one projection"],
        ),
        (
            linear(dense("qwen35"), "qwen35").tensor(f32_tensor("blk.0.ssm_dt.bias", &[5], &[0.; 5])),
            ["`blk.0.ssm_dt.bias`", "6 rows, as the heads"],
        ),
    ] {
        rejected(file.open(), &[&[FILE], &parts[..]].concat());
    }
    let ones = dense("hunyuan-dense").u32("hunyuan-dense.expert_count", 1);
    assert_eq!(read(&ones).moe, None);
}

/// Of what files do not say llama.cpp has one value for all.
#[test]
fn llama_4_has_the_chunks_of_llama_cpp() {
    let of = |experts: u32| read(&with(sparse("llama4"), "llama4.expert_count", number(experts)));
    let config = of(16);
    assert_eq!((config.sliding_window, config.chunked_window), (Some(8192), true));
    let growth = config.query_growth.unwrap();
    assert_eq!((growth.beta, growth.period, growth.first), (0.1, 8192, 1));
    assert!(config.qk_norm.is_some() && of(128).qk_norm.is_none());
}

#[test]
fn layers_are_counted_without_those_behind_them() {
    let further = |count| sparse("glm4moe").u32("glm4moe.nextn_predict_layers", count);
    assert_eq!(config(&further(1))["num_hidden_layers"], 1);
    rejected(further(2).open(), &[FILE, "`glm4moe.nextn_predict_layers` is 2", "less than the 2"]);
}

#[test]
fn sliding_layers_are_a_number_or_a_list() {
    let file = || dense("exaone4").u32("exaone4.attention.sliding_window", 8);
    let key = "exaone4.attention.sliding_window_pattern";
    assert_eq!(read(&file().u32(key, 2)).sliding_layers, [true, false]);
    let listed = |list: &[u8]| file().value(key, ARRAY, flags(list));
    assert_eq!(read(&listed(&[0, 1])).sliding_layers, [false, true]);
    for wrong in [&[1][..], &[1, 0, 1], &[1, 2]] {
        rejected(listed(wrong).open(), &[FILE, &format!("`{key}` is an array"), "each of up to 4096 layers"]);
    }
    let many = with(listed(&[1; 5000]), "exaone4.block_count", number(5000));
    rejected(many.open(), &[FILE, key, "4096 layers"]);
    // Gemma 3 has none without a window.
    assert_eq!(read(&gemma3()).sliding_layers, [false, false]);
    let gemma = gemma3().u32("gemma3.attention.sliding_window", 8);
    assert_eq!(read(&gemma).sliding_layers, [true, true]);
    rejected(with(gemma3(), "gemma3.block_count", number(1 << 30)).open(), &[FILE, "4096 layers"]);
}

#[test]
fn gemma_divides_scores_by_its_layers() {
    for (name, layers, expected) in
        [("gemma2", 26, 16), ("gemma2", 46, 32), ("gemma3", 34, 16), ("gemma3", 62, 32)]
    {
        let file = if name == "gemma3" { gemma3() } else { dense(name) };
        let file = with(file, &format!("{name}.block_count"), number(layers));
        let file = file.u32(&format!("{name}.attention.key_length"), 16);
        assert_eq!(config(&file)["query_pre_attn_scalar"], expected, "{name} {layers}");
    }
    assert_eq!(config(&dense("gemma2"))["query_pre_attn_scalar"], 32);
}

#[test]
fn long_rope_has_both_lists() {
    let list = |name: &str| f32_tensor(&format!("rope_factors_{name}.weight"), &[16], &[1.5; 16]);
    rejected(phi3().tensor(list("long")).open(), &[FILE, "`rope_factors_short.weight` is missing"]);
    rejected(phi3().tensor(list("short")).open(), &[FILE, "`rope_factors_long.weight` is missing"]);
    let file = phi3()
        .f32("phi3.rope.scaling.attn_factor", 1.25)
        .u32("phi3.rope.scaling.original_context_length", 64)
        .tensor(list("short"))
        .tensor(list("long"));
    let scaling = config(&file)["rope_scaling"].clone();
    let factors = vec![1.5; 16];
    let expected = json!({"rope_type": "longrope", "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 64, "attention_factor": 1.25});
    assert_eq!(scaling, expected);
    assert!(file.open().unwrap().tensor_names().all(|name| !name.contains("rope")));
    // A list of another length is an error of the model.
    let short = f32_tensor("rope_factors_short.weight", &[15], &[1.; 15]);
    let checkpoint = phi3()
        .u32("phi3.rope.scaling.original_context_length", 64)
        .tensor(short)
        .tensor(list("long"))
        .open()
        .unwrap();
    rejected(Config::from_checkpoint(&checkpoint), &["`short_factor`", "16 numbers"]);
    let wrong = f32_tensor("rope_factors_short.weight", &[16], &[1.; 16]);
    let halves = crate::writer::Tensor { type_id: 1, data: vec![0; 32], ..wrong };
    rejected(phi3().tensor(halves).open(), &["`rope_factors_short.weight`", "F32", "F16"]);
}

#[test]
fn shares_of_heads_that_turn_are_exact() {
    for (head_dim, rotated) in [(44, 30), (80, 32), (96, 48), (128, 64), (46, 26), (64, 64)] {
        let file = dense("phi2")
            .u32("phi2.attention.key_length", head_dim)
            .u32("phi2.rope.dimension_count", rotated);
        assert_eq!(read(&file).rope.rotary_dim, rotated as usize);
    }
    // Without a word of it all of a head turns.
    assert_eq!(read(&dense("phi2")).rope.rotary_dim, 32);
}

/// Codes of sums, from which nothing can be subtracted.
#[test]
fn norms_in_blocks_that_are_sums_are_refused() {
    let norm = |type_id, bytes| tensor("blk.0.attn_norm.weight", &[64], type_id, vec![0; bytes]);
    let weight = |norm| {
        let checkpoint = dense("gemma").tensor(norm).open().unwrap();
        checkpoint.weight("model.layers.0.input_layernorm", None).map(|_| ())
    };
    weight(norm(0, 256)).unwrap();
    rejected(weight(norm(8, 68)), &["model.layers.0.input_layernorm.weight"]);
}
