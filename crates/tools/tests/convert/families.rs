//! Every family of models becomes what mlx-lm makes of it, tensor by tensor.

use super::common::{convert, json_file, tensors, Out, Source};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::Weight;
use candle_quant::Checkpoint;
use candle_quant_models::{Config, MlxLm, Model};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe, Target};
use candle_quant_tools::diff::{diff, DiffOptions};
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, iter};

/// What mlx-lm drops when it loads it, and so does its own conversion; other programs need it.
const KEPT: &str = "e_score_correction_bias";

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(folder)
}

/// The folders of models that mlx-lm has quantized.
fn families() -> Vec<PathBuf> {
    let folders = ["families", "convert/layouts"].map(|folder| fs::read_dir(fixtures(folder)).unwrap());
    let folders = folders.into_iter().flatten().map(|entry| entry.unwrap().path());
    folders.filter(|folder| folder.join("mlx-affine4").is_dir()).collect()
}

fn uniform(format: &str) -> ConvertOptions {
    let mut options = ConvertOptions::mlx(Recipe::named("uniform", format.parse().unwrap()).unwrap());
    options.strict = true;
    options
}

#[test]
fn every_family_becomes_what_mlx_lm_makes_of_it() {
    let families = families();
    assert!(families.len() >= 33 + 3);
    for family in families {
        let source = Checkpoint::open(family.join("hf")).unwrap();
        for (kind, format) in [("mlx-affine4", "4:g32"), ("mlx-mxfp4", "mxfp4")] {
            let case = format!("{} {kind}", family.display());
            let mut options = uniform(format);
            // Rows of 16 elements are no whole groups: mlx-lm leaves them dense, which is what is not to be without a word.
            if family.ends_with("qwen3_5_moe_text") {
                let error = ConvertPlan::new(&source, &options).map(|_| ()).unwrap_err().to_string();
                assert!(error.contains("down_proj") && error.contains("rows of 16"), "{error}");
                options.strict = false;
            }
            let out = convert(&source, &options);
            let mut found = tensors(out.path());
            found.retain(|name, _| !name.ends_with(KEPT) || name.contains("gate."));
            let mut expected = tensors(family.join(kind));
            expected.retain(|name, _| !["tokens", "logits_f32"].contains(&name.as_str()));
            let names = found.keys().chain(expected.keys());
            let wrong: Vec<_> = names.filter(|name| found.get(*name) != expected.get(*name)).collect();
            assert_eq!(wrong, Vec::<&String>::new(), "{case}");
            let [ours, theirs] =
                [out.path(), family.join(kind)].map(|path| json_file(path.join("config.json")));
            assert_eq!(ours["model_type"], theirs["model_type"], "{case}");
            assert_eq!(ours["text_config"]["model_type"], theirs["text_config"]["model_type"], "{case}");
            let (ours, theirs) = (&ours["quantization"], &theirs["quantization"]);
            for (path, theirs) in theirs.as_object().unwrap() {
                let ours = &ours[path];
                let same = |key: &str| ours[key] == theirs[key];
                assert!(ours == theirs || same("bits") && same("group_size"), "{case}: {path}");
            }
        }
    }
}

/// As newer versions of transformers write it: the text below `model`, the head at the top.
#[test]
fn the_text_of_a_larger_model_gets_the_names_of_mlx_lm() {
    let family = fixtures("families/qwen3_5_text");
    let config = json_file(family.join("hf/config.json"));
    let nested = json!({"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": true});
    let mut source = Source::new().with_config(&nested.to_string());
    for (name, (dtype, shape, bytes)) in tensors(family.join("hf")) {
        if let Some(rest) = name.strip_prefix("model.") {
            source = source.with_bytes(&format!("model.language_model.{rest}"), &dtype, &shape, &bytes);
        }
    }
    let source = source.random("model.visual.patch_embed.proj.weight", &[4, 32]).finish();
    let out = convert(&source.open(), &uniform("4:g32"));
    let (mut found, mut expected) = (tensors(out.path()), tensors(family.join("mlx-affine4")));
    assert!(found.remove("model.visual.patch_embed.proj.weight").is_some());
    expected.retain(|name, _| !["tokens", "logits_f32"].contains(&name.as_str()));
    assert!(found == expected, "{:?}", found.keys().zip(expected.keys()).find(|(a, b)| a != b));
    let written = json_file(out.path().join("config.json"));
    assert_eq!(written["text_config"]["full_attention_interval"], 3);
    assert_eq!(written["text_config"]["text_config"], Value::Null);
}

/// Those of a text alone are what others call them, too: rules of the kind `v` are for layers, wherever they stand.
#[test]
fn mixed_recipes_count_the_layers_of_larger_models() {
    let source = Checkpoint::open(fixtures("families/qwen3_5_text/hf")).unwrap();
    let options = ConvertOptions::mlx(Recipe::named("mixed_2_6", "2:g32".parse().unwrap()).unwrap());
    let plan = ConvertPlan::new(&source, &options).unwrap();
    let of = |module: &str| {
        let name = format!("language_model.model.layers.{module}.weight");
        plan.tensors().find(|tensor| tensor.name == name).unwrap().to.clone()
    };
    // Of three layers, none is in the first eighth, and the last one in the last.
    assert_eq!(
        [of("0.mlp.down_proj"), of("1.mlp.down_proj"), of("2.mlp.down_proj")].map(|to| to[7..8].to_owned()),
        ["2", "2", "6"]
    );
}

/// Names and shapes, in which other containers differ: what is one projection there, or two stacks, is not in mlx-lm.
#[test]
fn gguf_files_become_models_of_mlx_lm() {
    let mut compared = 0;
    for family in families().into_iter().filter(|family| family.join("gguf").is_dir()) {
        let source = Checkpoint::open(family.join("gguf/model.gguf")).unwrap();
        let name = family.file_name().unwrap().to_str().unwrap();
        // llama.cpp has no layers of another kind there, and a window makes Mistral of the first.
        let layer = match name {
            "qwen3_moe" => "layers.0.mlp.",
            "qwen3_next" => "layers.1.mlp.",
            _ => "none",
        };
        let mut options = uniform("4:g32");
        (options.strict, options.dtype) = (false, Some(DType::BF16));
        let out = convert(&source, &options);
        let forms = |folder: &Path| {
            let of = |(name, (_, shape, _)): (String, (String, Vec<usize>, Vec<u8>))| (name, shape);
            let mut forms: BTreeMap<_, _> = tensors(folder).into_iter().map(of).collect();
            forms.retain(|name, _| !name.contains(layer) && !name.ends_with(KEPT));
            forms.retain(|name, _| !["tokens", "logits_f32"].contains(&name.as_str()));
            forms
        };
        assert_eq!(forms(&out.path()), forms(&family.join("mlx-affine4")), "{name}");
        let [ours, theirs] =
            [out.path(), family.join("mlx-affine4")].map(|path| json_file(path.join("config.json")));
        if !["internlm3", "mistral"].contains(&name) {
            assert_eq!(ours["model_type"], theirs["model_type"], "{name}");
        }
        if layer == "none" {
            let published = Checkpoint::open(family.join("hf")).unwrap();
            let found = diff(&source, &published, &DiffOptions { tolerance: 1e-6, common: false });
            assert!(found.equal() && found.compared_share == 1., "{name}: {:?}", found.tensors.first());
        }
        compared += 1;
    }
    assert!(compared >= 40, "{compared}");
}

/// The fields that are added for mlx-lm change nothing for others.
#[test]
fn the_config_of_an_output_means_what_that_of_the_source_means() {
    for family in families() {
        let source = Checkpoint::open(family.join("hf")).unwrap();
        // As the files say it: norms of some are stored in another way.
        let Ok(expected) = Config::from_json(source.config()) else { continue };
        let mut options = uniform("4:g32");
        options.strict = false;
        let out = convert(&source, &options);
        let written = Checkpoint::open(out.path()).unwrap();
        assert_eq!(Config::from_json(written.config()).unwrap(), expected, "{}", family.display());
        // Nothing is left to say.
        let again = convert(&written, &ConvertOptions::mlx(Recipe::safe("keep".parse().unwrap())));
        let [first, second] =
            [&out, &again].map(|out| fs::read_to_string(out.path().join("config.json")).unwrap());
        assert_eq!(
            first.split_whitespace().collect::<String>(),
            second.split_whitespace().collect::<String>()
        );
    }
}

/// Ollama's importer takes every architecture: what it stores has the logits of an MLX checkpoint of the same recipe. But
/// experts that are stored in columns it packs the wrong way.
#[test]
fn stores_of_ollama_have_the_logits_of_mlx_checkpoints() {
    const IN_COLUMNS: [&str; 3] = ["gpt_oss", "llama4", "llama4_text"];
    let families = families();
    assert_eq!(
        families.iter().filter(|family| IN_COLUMNS.iter().any(|name| family.ends_with(name))).count(),
        4
    );
    for family in families {
        let source = Checkpoint::open(family.join("hf")).unwrap();
        let recipe = || Target::Ollama.usual_recipe("int4".parse().unwrap());
        let options = ConvertOptions::ollama(recipe(), "m").unwrap();
        if IN_COLUMNS.iter().any(|name| family.ends_with(name)) {
            let error = ConvertPlan::new(&source, &options).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("experts.") && error.contains("stored in columns"), "{error}");
            continue;
        }
        let store = convert(&source, &options);
        let mlx = convert(&source, &ConvertOptions::mlx(recipe()));
        let tokens = Tensor::new(&[[5u32, 42, 79, 20, 57, 94, 35, 72]], &Device::Cpu).unwrap();
        let logits = [&store, &mlx].map(|out| {
            let model = Model::load(&Checkpoint::open(out.path()).unwrap(), DType::F32, &Device::Cpu);
            model.unwrap_or_else(|error| panic!("{}: {error}", family.display())).forward(&tokens, 0).unwrap()
        });
        let [found, expected] = logits.map(|logits| logits.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        assert!(found == expected && found.iter().all(|logit| logit.is_finite()), "{}", family.display());
    }
}

/// Norms of GGUF files are sums, and linear attention is in an order of their own.
#[test]
fn gguf_files_are_converted_as_what_they_were_made_of() {
    let family = |family: &str| fixtures("families").join(family);
    for name in ["gemma2", "nemotron"] {
        let source = Checkpoint::open(family(name).join("gguf/model.gguf")).unwrap();
        let out = convert(&source, &uniform("4:g32"));
        let norms = [out.path(), family(name).join("mlx-affine4")].map(|path| {
            let norm = Checkpoint::open(path).unwrap().dense("model.norm.weight").unwrap();
            norm.load(DType::BF16, &Device::Cpu)
                .unwrap()
                .to_dtype(DType::F32)
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        });
        assert_eq!(norms[0], norms[1], "{name}");
    }
    // Stacks get mlx-lm's names, if they are not packed, too.
    for name in ["mixtral", "granitemoe", "deepseek_v3"] {
        let source = Checkpoint::open(family(name).join("gguf/model.gguf")).unwrap();
        let out = convert(&source, &ConvertOptions::mlx(Recipe::safe("keep".parse().unwrap())));
        let stacks: BTreeSet<_> =
            tensors(out.path()).into_keys().filter(|name| name.contains("_mlp.")).collect();
        let all = |end: &str| stacks.iter().filter(|name| name.ends_with(end)).count();
        let counts = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"].map(all);
        assert!(
            counts[0] > 0 && counts == [counts[0]; 3] && stacks.len() == 3 * counts[0],
            "{name}: {stacks:?}"
        );
        assert!(!tensors(out.path()).keys().any(|name| name.contains(".experts.")), "{name}");
    }
}

/// Tensors of which both sides have the same numbers, or nearly: what the converter computes is rounded.
fn assert_same(name: &str, a: &Checkpoint, b: &Checkpoint) {
    // llama.cpp has no layers of another kind there.
    let is_other = |tensor: &str| name == "qwen3_next" && tensor.contains(".1.mlp.");
    let found = diff(a, b, &DiffOptions { tolerance: 1e-6, common: false });
    let wrong: Vec<_> =
        found.tensors.iter().filter(|tensor| !tensor.equal && !is_other(&tensor.name)).collect();
    assert!(wrong.is_empty(), "{name}: {wrong:?}");
    assert!(
        found.tensors.iter().filter(|tensor| tensor.name.contains(".linear_attn.")).count() >= 5,
        "{name}"
    );
}

#[test]
fn linear_attention_of_gguf_files_becomes_that_of_the_published_model() {
    for name in ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"] {
        let family = fixtures("families").join(name);
        let [gguf, published] =
            ["gguf/model.gguf", "hf"].map(|source| Checkpoint::open(family.join(source)).unwrap());
        assert_same(name, &gguf, &published);
        let mut dense = ConvertOptions::mlx(Recipe::safe("keep".parse().unwrap()));
        dense.dtype = Some(DType::F32);
        let mut packed = uniform("4:g32");
        packed.strict = false;
        // Routers are F32 in GGUF files.
        packed.dtype = Some(DType::BF16);
        for (options, is_dense) in [(dense, true), (packed, false)] {
            // The second of the published model is what mlx-lm makes of it, byte for byte.
            let [of_gguf, expected] = [&gguf, &published].map(|source| convert(source, &options));
            let open = |out: &Out| Checkpoint::open(out.path()).unwrap();
            assert_same(name, &open(&of_gguf), &open(&expected));
            let config = |checkpoint: &Checkpoint| Config::from_json(checkpoint.config()).unwrap();
            assert_eq!(config(&open(&of_gguf)), config(&gguf), "{name}");
            if is_dense {
                assert_same(name, &gguf, &open(&of_gguf));
            }
            let names = |out: &Out| {
                let names: BTreeSet<_> = open(out).tensor_names().map(str::to_owned).collect();
                names.into_iter().filter(|tensor| !tensor.contains(".1.mlp.")).collect::<Vec<_>>()
            };
            assert_eq!(names(&of_gguf), names(&expected), "{name}");
        }
    }
}

/// Blocks across heads can't be moved: what is arranged otherwise is dequantized, and the plan says so.
#[test]
fn columns_in_tiles_become_those_of_the_published_model() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("tiled.gguf");
    let family = fixtures("families/qwen3_5_text");
    super::tiled::with_blocks_of_two_heads(&family.join("gguf/model.gguf"), &path);
    let tiled = Checkpoint::open(&path).unwrap();
    let published = Checkpoint::open(family.join("hf")).unwrap();
    const NAME: &str = "model.layers.0.linear_attn.out_proj.weight";
    // mlx-lm has this text as a part of a larger model.
    let name_in = |target| match target {
        Target::Mlx => format!("language_model.{NAME}"),
        _ => NAME.to_owned(),
    };
    let numbers = |checkpoint: &Checkpoint, name: &str| {
        let weight = checkpoint.tensor(name, None).unwrap();
        weight.to_dense(DType::F32, &Device::Cpu).unwrap().to_vec2::<f32>().unwrap()
    };
    // Two heads of keys, each with two of values of 16 columns: 0 2 1 3 in the file.
    let expected: Vec<Vec<f32>> = numbers(&tiled, NAME)
        .iter()
        .map(|row| [0, 2, 1, 3].iter().flat_map(|head| row[16 * head..16 * head + 16].to_vec()).collect())
        .collect();
    for (target, requantize) in
        [(Target::Mlx, false), (Target::HuggingFace, false), (Target::Dense, false), (Target::Mlx, true)]
    {
        let mut options = uniform("8:g32");
        (options.target, options.strict) = (target, false);
        options.dequantize = target == Target::HuggingFace || target == Target::Dense;
        options.requantize = requantize;
        options.dtype = Some(DType::F32);
        let plan = ConvertPlan::new(&tiled, &options).unwrap();
        let planned = plan.tensors().find(|tensor| tensor.name == name_in(target)).unwrap();
        let reason = "packed already, and arranged otherwise: --requantize packs it anew";
        let is_said = planned.fallback.as_deref() == Some(reason);
        assert_eq!(is_said, target == Target::Mlx && !requantize, "{planned:?}");
        let written = convert(&tiled, &options);
        let written = Checkpoint::open(written.path()).unwrap();
        assert_eq!(written.config().get("linear_out_proj_is_tiled"), None);
        assert_eq!(numbers(&written, &name_in(target)) == expected, !requantize, "{target:?}");
        let found = diff(&published, &written, &DiffOptions { tolerance: 0.02, common: false });
        assert!(found.equal() && found.compared_share == 1., "{target:?}: {:?}", found.tensors.first());
    }
    // Columns in two orders are compared in one.
    let found = diff(&published, &tiled, &DiffOptions { tolerance: 0.02, common: false });
    assert!(found.equal() && found.compared_share == 1., "{:?}", found.tensors.first());
}

/// No matrix but what chooses experts, and norms, stays dense, whatever the recipe.
#[test]
fn experts_of_every_family_are_packed_in_every_output() {
    for family in families() {
        let source = Checkpoint::open(family.join("hf")).unwrap();
        let recipe = |name| Recipe::named(name, "4:g32".parse().unwrap()).unwrap();
        let mlx = [ConvertOptions::mlx(recipe("safe")), ConvertOptions::mlx(recipe("mixed_4_6"))];
        for options in mlx.into_iter().chain(iter::once(ConvertOptions::uqff(recipe("mistralrs")))) {
            let plan = ConvertPlan::new(&source, &options).unwrap();
            let is_expert =
                |name: &str| [".experts.", ".switch_mlp.", "_linear."].iter().any(|part| name.contains(part));
            let dense: Vec<_> = plan
                .tensors()
                // Rows of 16 elements are no whole groups in any format.
                .filter(|tensor| tensor.shape.last() != Some(&16))
                .filter(|tensor| {
                    is_expert(&tensor.name) && !tensor.name.ends_with("bias") && tensor.to.contains("16")
                })
                .map(|tensor| &tensor.name)
                .collect();
            assert_eq!(dense, Vec::<&String>::new(), "{} {:?}", family.display(), options.target);
        }
    }
}

/// Packed experts of mlx-lm's gpt-oss become smaller ones, under their names.
#[test]
fn experts_that_are_packed_become_smaller() {
    let source = Checkpoint::open(fixtures("mlx/gptoss-mxfp4-mlxlm")).unwrap();
    let mut options = uniform("2:g128");
    options.requantize = true;
    options.strict = false;
    let plan = ConvertPlan::new(&source, &options).unwrap();
    assert!(plan.bytes() < plan.source_bytes(), "{} of {}", plan.bytes(), plan.source_bytes());
    let experts: Vec<_> = plan.tensors().filter(|tensor| tensor.shape.len() == 3).collect();
    assert!(!experts.is_empty());
    for tensor in experts {
        assert!(tensor.name.contains(".mlp.experts.") && tensor.to == "affine 2-bit g128", "{tensor:?}");
    }
}

/// Of what mlx-lm has turned already, norms get their sums once.
#[test]
fn what_is_arranged_already_stays_so() {
    for family in ["convert/layouts/qwen3_next", "families/qwen3_5_text"] {
        let source = Checkpoint::open(fixtures(family).join("hf")).unwrap();
        let dense = convert(&source, &ConvertOptions::mlx(Recipe::safe("bf16".parse().unwrap())));
        let found = convert(&Checkpoint::open(dense.path()).unwrap(), &uniform("4:g32"));
        let expected = convert(&source, &uniform("4:g32"));
        assert!(tensors(found.path()) == tensors(expected.path()), "{family}");
    }
}

/// Weights of modules, whose rows are rows though they may be as many as columns.
#[test]
fn experts_that_mlx_lm_has_written_are_not_turned() {
    let source = Checkpoint::open(fixtures("mlx/gptoss-mxfp4-mlxlm")).unwrap();
    let name = "model.layers.0.mlp.experts.down_proj.weight";
    let dims = source.tensor(name, None).unwrap().dims().to_vec();
    assert_eq!(dims[1], dims[2]);
    let numbers = |checkpoint: &Checkpoint| match checkpoint.tensor(name, None).unwrap() {
        Weight::Packed(packed) => packed.load(&Device::Cpu).unwrap().dequantize(DType::F32).unwrap(),
        other => other.to_dense(DType::F32, &Device::Cpu).unwrap(),
    };
    let numbers =
        |checkpoint: &Checkpoint| numbers(checkpoint).flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (expected, dense) = (numbers(&source), convert(&source, &ConvertOptions::dense()));
    let dense = Checkpoint::open(dense.path()).unwrap();
    assert_eq!(numbers(&dense), expected);
    let mut options = uniform("mxfp4");
    (options.requantize, options.strict) = (true, false);
    let packed = convert(&dense, &options);
    assert_eq!(numbers(&Checkpoint::open(packed.path()).unwrap()), expected);
}

/// What mistral.rs wrote of a family, its experts in stacks and perhaps in turn, is a model like others when it is dense.
#[test]
fn dequantized_uqff_files_are_models_with_the_same_logits() {
    let folders = fs::read_dir(fixtures("families")).unwrap().map(|entry| entry.unwrap().path().join("uqff"));
    let folders: Vec<_> = folders.filter(|folder| folder.is_dir()).collect();
    assert!(folders.len() >= 26);
    let mut options = ConvertOptions::dense();
    options.dtype = Some(DType::F32);
    for folder in folders {
        let refs = candle_core::safetensors::load(folder.join("refs.safetensors"), &Device::Cpu).unwrap();
        let tokens = refs["tokens"].to_dtype(DType::U32).unwrap().unsqueeze(0).unwrap();
        let out = convert(&Checkpoint::open(&folder).unwrap(), &options);
        let dense = Checkpoint::open(out.path()).unwrap();
        // mlx-lm reads them, too.
        let stack = MlxLm::of(dense.config()).stack;
        let is_expert = |name: &&str| name.ends_with("_proj.weight") && name.contains(".experts.");
        let others: Vec<_> = dense.tensor_names().filter(is_expert).filter(|_| stack != "experts").collect();
        assert_eq!(others, Vec::<&str>::new(), "{}", folder.display());
        let logits = Model::load(&dense, DType::F32, &Device::Cpu).unwrap().forward(&tokens, 0).unwrap();
        let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (found, expected) = (numbers(&logits), numbers(&refs["logits_f32"]));
        let mean = expected.iter().sum::<f32>() / expected.len() as f32;
        let variance = expected.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / expected.len() as f32;
        let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
        assert_eq!(found.len(), expected.len());
        assert!(far <= 3e-4 * variance.sqrt(), "{}: {far} of {}", folder.display(), variance.sqrt());
    }
}
