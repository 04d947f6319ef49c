//! Rules, roles and fall-backs, seen in plans.

use super::common::{bundled, Source};
use candle_quant::QuantFormat;
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Role, Rule, Spec, Target};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;

/// What each tensor becomes, and by which rule.
fn planned(source: &Source, recipe: Recipe) -> BTreeMap<String, (String, String)> {
    let plan = ConvertPlan::new(&source.open(), &ConvertOptions::mlx(recipe)).unwrap();
    plan.tensors().map(|tensor| (tensor.name.clone(), (tensor.to.clone(), tensor.rule.clone()))).collect()
}

fn spec(text: &str) -> Spec {
    text.parse().unwrap()
}

/// One tensor of every kind.
fn zoo() -> Source {
    let layer = |index: usize, name: &str| format!("model.layers.{index}.{name}.weight");
    let mut source = Source::new()
        .with_config(r#"{"num_hidden_layers": 2, "tie_word_embeddings": false}"#)
        .random("model.embed_tokens.weight", &[32, 64])
        .random("lm_head.weight", &[32, 64])
        .random("model.norm.weight", &[64])
        .random("model.visual.patch_embed.weight", &[32, 64])
        .random("model.audio_tower.proj.weight", &[32, 64])
        .random("model.conv.weight", &[4, 8, 64])
        .random("model.table", &[32, 64]);
    for index in 0..2 {
        for (name, shape) in [
            ("self_attn.q_proj", [64, 64]),
            ("self_attn.v_proj", [32, 64]),
            ("mlp.down_proj", [64, 64]),
            ("mlp.gate", [32, 64]),
            ("mlp.tiny_proj", [8, 64]),
        ] {
            source = source.random(&layer(index, name), &shape);
        }
    }
    source.finish()
}

#[test]
fn the_safe_defaults() {
    let planned = planned(&zoo(), Recipe::safe(spec("4")));
    for (name, to, rule) in [
        ("model.embed_tokens.weight", "affine 4-bit g64", "format"),
        ("lm_head.weight", "affine 5-bit g64", "default: lm-head"),
        ("model.norm.weight", "F32", "not a matrix"),
        ("model.visual.patch_embed.weight", "F32", "default: vision"),
        ("model.audio_tower.proj.weight", "F32", "default: audio"),
        ("model.conv.weight", "F32", "default: conv"),
        ("model.layers.0.mlp.gate.weight", "F32", "default: router"),
        ("model.layers.0.mlp.tiny_proj.weight", "F32", "default: small"),
        ("model.layers.0.self_attn.v_proj.weight", "affine 4-bit g64", "format"),
        ("model.table", "F32", "format"),
    ] {
        assert_eq!(planned[name], (to.to_owned(), rule.to_owned()), "{name}");
    }
}

#[test]
fn an_embedding_that_is_the_head_is_treated_as_one() {
    let source = Source::new().random("model.embed_tokens.weight", &[32, 64]).finish();
    assert_eq!(planned(&source, Recipe::safe(spec("4")))["model.embed_tokens.weight"].0, "affine 5-bit g64");
    // A head that the model does not use is left out: mlx-lm does not load a checkpoint with it.
    let source = Source::new()
        .with_config(r#"{"tie_word_embeddings": true}"#)
        .random("model.embed_tokens.weight", &[32, 64])
        .random("lm_head.weight", &[32, 64])
        .finish();
    let plan = ConvertPlan::new(&source.open(), &ConvertOptions::mlx(Recipe::safe(spec("4")))).unwrap();
    assert_eq!(plan.tensors().count(), 1);
    assert!(plan.notes()[0].contains("`lm_head.weight` is left out"), "{:?}", plan.notes());
    assert_eq!(ConvertPlan::new(&source.open(), &ConvertOptions::dense()).unwrap().tensors().count(), 2);
}

#[test]
fn the_first_rule_that_matches_decides() {
    let text = r#"
        format = "3"
        [[rule]]
        role = "down"
        layers = "1-7"
        format = "8"
        [[rule]]
        regex = "mlp\\.(down|gate)"
        layers = [0, "5-6"]
        format = "mxfp8"
        [[rule]]
        tensors = "*.[qv]_proj"
        format = "bf16"
    "#;
    let recipe = Recipe::from_toml("mine.toml", text).unwrap();
    let found = planned(&zoo(), recipe.clone());
    for (name, to, rule) in [
        ("model.layers.0.mlp.down_proj.weight", "mxfp8", "rule 2 of mine.toml"),
        ("model.layers.1.mlp.down_proj.weight", "affine 8-bit g64", "rule 1 of mine.toml"),
        ("model.layers.0.mlp.gate.weight", "mxfp8", "rule 2 of mine.toml"),
        ("model.layers.1.mlp.gate.weight", "F32", "default: router"),
        ("model.layers.1.self_attn.v_proj.weight", "BF16", "rule 3 of mine.toml"),
        ("lm_head.weight", "affine 4-bit g64", "default: lm-head"),
        ("model.embed_tokens.weight", "affine 3-bit g64", "format"),
    ] {
        assert_eq!(found[name], (to.to_owned(), rule.to_owned()), "{name}");
    }
    let first = [Rule::tensors("model.layers.1.*", spec("6")).unwrap(), Rule::role(Role::LmHead, Spec::Keep)];
    let found = planned(&zoo(), recipe.with_rules_first(first));
    assert_eq!(found["model.layers.1.mlp.down_proj.weight"].0, "affine 6-bit g64");
    assert_eq!(found["lm_head.weight"], ("F32".to_owned(), "role lm-head".to_owned()));
    let bare = Recipe::from_toml("bare.toml", "format = \"4\"\ndefaults = false").unwrap();
    assert_eq!(planned(&zoo(), bare)["model.layers.1.mlp.gate.weight"].0, "affine 4-bit g64");
}

#[test]
fn recipes_that_are_none_are_refused() {
    for (text, expected) in [
        ("format = 4", "invalid type"),
        ("format = \"7\"", "affine:BITS[:gGROUP]"),
        ("formats = \"4\"", "unknown field `formats`"),
        ("format = \"4\"\n[[rule]]\nrole = \"heads\"\nformat = \"4\"", "rule 1: role: expected one of embed"),
        (
            "format = \"4\"\n[[rule]]\nlayers = \"a-3\"\nformat = \"4\"",
            "rule 1: layers: expected numbers and ranges",
        ),
        (
            "format = \"4\"\n[[rule]]\nregex = \"(\"\nformat = \"4\"",
            "rule 1: regex: expected a regular expression",
        ),
        ("format = \"4\"\n[[rule]]\ntensors = \"[\"\nformat = \"4\"", "rule 1: tensors: expected a glob"),
        ("format = \"4\"\n[[rule]]\nrole = \"v\"", "missing field `format`"),
    ] {
        let error = Recipe::from_toml("mine.toml", text).unwrap_err().to_string();
        assert!(error.contains("recipe mine.toml") && error.contains(expected), "{error}");
    }
    let error = Recipe::named("mixed_1_2", spec("4")).unwrap_err().to_string();
    assert!(error.contains("uniform, mixed_2_6"), "{error}");
    let error = Recipe::named("mixed_2_6", spec("nvfp4")).unwrap_err().to_string();
    assert!(error.contains("expected an affine one, found nvfp4"), "{error}");
}

/// A program can ask for what no command line can.
#[test]
fn formats_that_are_only_read_are_refused_by_the_plan() {
    let symmetric = Spec::Packed(QuantFormat::symmetric(4, 64).unwrap());
    let source = bundled("tiny-bf16");
    for target in [Target::Mlx, Target::Uqff, Target::Ollama] {
        let mut options = ConvertOptions::mlx(Recipe::named("uniform", symmetric).unwrap());
        options.target = target;
        let error = ConvertPlan::new(&source, &options).map(|_| ()).unwrap_err().to_string();
        for part in [".weight`", "symmetric 4-bit g64", "affine:BITS"] {
            assert!(error.contains(part), "{target:?}: {part} in {error}");
        }
    }
}

#[test]
fn what_does_not_fit_falls_back_and_is_counted() {
    let source = Source::new()
        .random("a.weight", &[32, 96])
        .random("b.weight", &[32, 80])
        .random("c.weight", &[32, 128])
        .random("d.weight", &[2, 16, 64])
        .random("e.table", &[32, 64])
        .with_bytes("f.weight_map", "I32", &[32, 64], &[0; 32 * 64 * 4])
        .finish();
    let mut options = ConvertOptions::mlx(Recipe::named("uniform", spec("4")).unwrap());
    options.recipe = Recipe::from_toml("x", "format = \"4\"\ndefaults = false").unwrap();
    let plan = ConvertPlan::new(&source.open(), &options).unwrap();
    let found: BTreeMap<_, _> = plan
        .tensors()
        .map(|t| (t.name.as_str(), (t.to.as_str(), t.fallback.as_deref().unwrap_or(""))))
        .collect();
    let expected = BTreeMap::from([
        ("a.weight", ("affine 4-bit g32", "rows of 96 are no whole number of groups of 64")),
        ("b.weight", ("F32", "rows of 80 are no whole number of groups of 64")),
        ("c.weight", ("affine 4-bit g64", "")),
        ("d.weight", ("F32", "more than two dimensions, and no experts")),
        ("e.table", ("F32", "a parameter, not the weight of a module")),
        ("f.weight_map", ("I32", "not float numbers")),
    ]);
    assert_eq!(found, expected);
    assert_eq!(plan.fallbacks(), 5);
    options.strict = true;
    let error = ConvertPlan::new(&source.open(), &options).unwrap_err().to_string();
    for part in ["`a.weight`", "what the rule `format` says", "rows of 96", "5 tensors fall back"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    // mlx-lm keeps such matrices.
    let mlx = planned(&source, Recipe::named("uniform", spec("4")).unwrap());
    assert_eq!(mlx["a.weight"].0, "F32");
}

#[test]
fn a_plan_reads_no_weights_and_adds_up() {
    // The data is a hole of 40 GB.
    let folder = tempfile::tempdir().unwrap();
    let (n, k) = (100_000u64, 100_096u64);
    let info =
        |begin: u64| json!({"dtype": "BF16", "shape": [n, k], "data_offsets": [begin, begin + n * k * 2]});
    let header = json!({"a.up_proj.weight": info(0), "b.up_proj.weight": info(n * k * 2)}).to_string();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + 2 * n * k * 2).unwrap();
    let source = candle_quant::Checkpoint::open(folder.path()).unwrap();
    let plan = ConvertPlan::new(&source, &ConvertOptions::mlx(Recipe::safe(spec("4")))).unwrap();
    assert_eq!(plan.source_bytes(), 2 * n * k * 2);
    assert_eq!(plan.bytes(), 2 * n * k * 9 / 16);
    assert_eq!(plan.bits_per_weight(), 4.5);
    // Each is larger than 5 GB.
    let files: Vec<_> = plan.files().map(|(file, _)| file).collect();
    assert_eq!(files, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    assert!(plan.disk_bytes() > plan.bytes() && plan.disk_bytes() < plan.bytes() + 2000);
    assert!(plan.peak_memory() < 500 << 20);
}

#[test]
fn shards_hold_what_they_may_and_whole_weights() {
    let mut options = ConvertOptions::mlx(Recipe::safe(spec("4")));
    options.max_shard_size = 200_000;
    let plan = ConvertPlan::new(&bundled("tiny-bf16"), &options).unwrap();
    let mut sizes = BTreeMap::<&str, u64>::new();
    for tensor in plan.tensors() {
        *sizes.entry(&tensor.file).or_default() += tensor.bytes;
    }
    assert!(sizes.len() > 4 && sizes.values().all(|size| *size <= 200_000), "{sizes:?}");
    assert_eq!(sizes.len(), plan.files().count());
}

#[test]
fn a_source_without_tensors_is_refused() {
    let source = Source::new().finish();
    let error = ConvertPlan::new(&source.open(), &ConvertOptions::dense()).unwrap_err().to_string();
    assert!(error.contains("no tensors"), "{error}");
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    // An expert of the source, stacked, would have the name of another tensor.
    let source = Source::new()
        .random("l.0.mlp.experts.0.up_proj.weight", &[32, 64])
        .random("l.0.mlp.switch_mlp.up_proj.weight", &[1, 32, 64])
        .finish();
    let error = ConvertPlan::new(&source.open(), &ConvertOptions::mlx(Recipe::safe(spec("4"))))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`l.0.mlp.switch_mlp.up_proj.weight`") && error.contains("two of this name"),
        "{error}"
    );
}

#[test]
fn layers_count_upwards() {
    let text = "format = \"4\"\n[[rule]]\nlayers = \"8-3\"\nformat = \"8\"";
    let error = Recipe::from_toml("mine.toml", text).unwrap_err().to_string();
    assert!(
        error.contains("rule 1: layers: expected numbers and ranges") && error.contains("`8-3`"),
        "{error}"
    );
}

/// Nobody notices a misspelt rule in a plan of a thousand tensors.
#[test]
fn rules_that_no_tensor_matches_are_told_of() {
    let text = "format = \"4\"\n[[rule]]\ntensors = \"*.down_porj\"\nformat = \"8\"\n[[rule]]\nrole = \"v\"\nformat = \"8\"";
    let recipe = Recipe::from_toml("mine.toml", text).unwrap();
    let plan = ConvertPlan::new(&zoo().open(), &ConvertOptions::mlx(recipe)).unwrap();
    let notes: Vec<_> = plan.notes().iter().filter(|note| note.contains("rule")).collect();
    assert_eq!(notes, ["rule 1 of mine.toml decides about no tensor"]);
}

#[test]
fn packed_weights_that_stay_are_told_of() {
    let plan = ConvertPlan::new(&bundled("tiny"), &ConvertOptions::mlx(Recipe::safe(spec("8")))).unwrap();
    let note = plan.notes().iter().find(|note| note.contains("--requantize")).unwrap();
    assert_eq!(note, "22 packed weights stay as they are; --requantize packs them anew");
    // That is what was asked for.
    let plan = ConvertPlan::new(&bundled("tiny"), &ConvertOptions::mlx(Recipe::safe(Spec::Keep))).unwrap();
    assert!(!plan.notes().iter().any(|note| note.contains("--requantize")));
}

#[test]
fn formats_that_mlx_does_not_have_are_noted() {
    let noted = |format| {
        let options = ConvertOptions::mlx(Recipe::safe(spec(format)));
        let plan = ConvertPlan::new(&bundled("tiny-bf16"), &options).unwrap();
        plan.notes().iter().any(|note| *note == format!("candle-quant reads {format}; MLX and mlx-lm do not"))
    };
    assert!(noted("nf4") && noted("mxint8"));
    assert!(!noted("mxfp4"));
}

#[test]
fn a_source_without_a_tokenizer_is_told_of() {
    let noted = |source: &Source| {
        let plan = ConvertPlan::new(&source.open(), &ConvertOptions::mlx(Recipe::safe(spec("4")))).unwrap();
        plan.notes().iter().any(|note| note == "no tokenizer is written: there is none beside the weights")
    };
    let source = Source::new().random("a.weight", &[32, 64]).finish();
    assert!(noted(&source));
    fs::write(source.folder.path().join("vocab.json"), "{}").unwrap();
    assert!(!noted(&source));
}

/// Per-module entries stand beside these keys in the config.
#[test]
fn modules_have_no_names_of_config_keys() {
    let source = Source::new().random("bits.weight", &[32, 64]).random("a.weight", &[32, 64]).finish();
    let recipe =
        Recipe::from_toml("x", "format = \"4\"\n[[rule]]\ntensors = \"bits\"\nformat = \"8\"").unwrap();
    let error = ConvertPlan::new(&source.open(), &ConvertOptions::mlx(recipe)).unwrap_err().to_string();
    assert!(error.contains("`bits`") && error.contains("a key of the config"), "{error}");
}
