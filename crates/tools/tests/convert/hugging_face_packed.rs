//! `--to hf` of what is packed already, and of experts that are packed in a way of their own.

use super::common::{convert, json_file, tensors, tensors_of, Stored};
use super::families_of::open;
use super::hugging_face::{dense, distance, keep, logits, reference};
use candle_core::{DType, Device};
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Target};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(folder)
}

fn of_format(format: &str) -> ConvertOptions {
    ConvertOptions::hugging_face(Target::HuggingFace.usual_recipe(format.parse().unwrap()))
}

/// The tensors of experts' weights in MXFP4.
fn blocks(stored: &BTreeMap<String, Stored>) -> BTreeMap<&str, &Stored> {
    let is_one = |name: &&String| name.ends_with("_blocks") || name.ends_with("_scales");
    stored.keys().filter(is_one).map(|name| (name.as_str(), &stored[name])).collect()
}

/// Codes and scales as they are, of experts as well, which are a stack in the source.
#[test]
fn what_is_packed_in_these_formats_stays_so() {
    for family in ["llama", "mixtral"] {
        let folder = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families").join(family);
        let source = open(&folder.join("mlx-mxfp4")).unwrap();
        let out = convert(&source, &ConvertOptions::hugging_face(keep()));
        let written = Checkpoint::open(out.path()).unwrap();
        let packed = written
            .tensor_names()
            .filter(|name| written.tensor(name, None).unwrap().format_name() == "mxfp4");
        assert!(packed.count() > 8);
        let dense = convert(&source, &dense(Some(DType::F32)));
        let dense = Checkpoint::open(dense.path()).unwrap();
        assert!(dense.tensor_names().eq(written.tensor_names()));
        let numbers = |checkpoint: &Checkpoint, name: &str| -> Vec<f32> {
            let weight = checkpoint.tensor(name, None).unwrap();
            weight.to_dense(DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        for name in written.tensor_names() {
            assert!(numbers(&written, name) == numbers(&dense, name), "{family}: {name}");
        }
    }
}

/// As openai/gpt-oss-20b has them, byte for byte, from that form and from MLX's.
#[test]
fn experts_of_gpt_oss_stay_in_blocks() {
    let folder = fixtures("mlx/gptoss-mxfp4-hf");
    let published = tensors_of(&folder.join("model.safetensors"));
    let source = Checkpoint::open(&folder).unwrap();
    let mlx = convert(&source, &ConvertOptions::mlx(keep()));
    for source in [source, Checkpoint::open(mlx.path()).unwrap()] {
        let out = convert(&source, &ConvertOptions::hugging_face(keep()));
        assert!(tensors(out.path()) == published, "{}", source.kind());
        let [found, expected] =
            [out.path(), folder.clone()].map(|folder| json_file(folder.join("config.json")));
        assert_eq!(found["quantization_config"], expected["quantization_config"]);
        assert_eq!(Checkpoint::open(out.path()).unwrap().kind().to_string(), "Hugging Face mxfp4");
    }
    // Another model, all of whose matrices mlx-lm has packed.
    let source = Checkpoint::open(fixtures("mlx/gptoss-mxfp4-mlxlm")).unwrap();
    let out = convert(&source, &ConvertOptions::hugging_face(keep()));
    let stored = tensors(out.path());
    let forms = |tensors: &BTreeMap<String, Stored>| -> Vec<(String, String, Vec<usize>)> {
        let form =
            |(name, (dtype, shape, _)): (&String, &Stored)| (name.clone(), dtype.clone(), shape.clone());
        tensors.iter().map(form).collect()
    };
    assert_eq!(forms(&stored), forms(&published));
    let tokens = reference(&fixtures("mlx/gptoss-mxfp4-mlxlm")).0;
    let (before, after) = (logits(&source, &tokens), logits(&Checkpoint::open(out.path()).unwrap(), &tokens));
    // Routers of 8 bits are rounded to BF16.
    assert!(distance(&after, &before) < 0.05, "{}", distance(&after, &before));
    let plan = ConvertPlan::new(&source, &ConvertOptions::hugging_face(keep())).unwrap();
    let router = plan.tensors().find(|tensor| tensor.name.ends_with("0.mlp.router.weight")).unwrap();
    assert!(router.fallback.as_ref().is_some_and(|why| why.contains("no experts, of which")), "{router:?}");
}

/// From every other container, and of numbers: what is decoded is what was packed.
#[test]
fn experts_of_gpt_oss_become_blocks() {
    let exact = || {
        let mut options = ConvertOptions::hugging_face(keep());
        options.dtype = Some(DType::F32);
        options
    };
    for (container, options) in
        [("hf", of_format("mxfp4")), ("mlx-mxfp4", exact()), ("uqff", exact()), ("gguf", of_format("mxfp4"))]
    {
        let folder = fixtures("families/gpt_oss").join(container);
        let source = open(&folder).unwrap();
        let out = convert(&source, &options);
        let stored = tensors(out.path());
        assert_eq!(blocks(&stored).len(), 8, "{container}");
        let packed = stored.values().filter(|(dtype, ..)| dtype == "U8").count();
        assert_eq!(packed, 8, "{container}");
        let (written, (tokens, _)) = (Checkpoint::open(out.path()).unwrap(), reference(&folder));
        let read = convert(&written, &dense(Some(DType::F32)));
        let [before, packed, read] =
            [&source, &written, &Checkpoint::open(read.path()).unwrap()].map(|model| logits(model, &tokens));
        assert!(distance(&packed, &read) < 3e-5, "{container}: {}", distance(&packed, &read));
        let bound = if container.starts_with("hf") || container == "gguf" { 2. } else { 3e-5 };
        assert!(distance(&packed, &before) < bound, "{container}: {}", distance(&packed, &before));
    }
    // transformers has no other packed experts of this family.
    let source = open(&fixtures("families/gpt_oss/hf")).unwrap();
    let plan = ConvertPlan::new(&source, &of_format("4:g32")).unwrap();
    let of = |end: &str| plan.tensors().find(|tensor| tensor.name.ends_with(end)).unwrap();
    assert_eq!(of("0.self_attn.q_proj.weight").to, "affine 4-bit g32");
    let experts = of("0.mlp.experts.down_proj");
    assert_eq!(experts.to, "BF16");
    assert_eq!(experts.fallback.as_deref(), Some("experts that transformers has packed in mxfp4 alone"));
}

/// What stays dense is said, and is an error if nothing may.
#[test]
fn experts_without_a_packed_form_are_told() {
    for (family, format, reason, count) in [
        ("granitemoe", "4:g32", "experts of which transformers loads no packed form", 2),
        ("granitemoe", "mxfp4", "experts of which transformers loads no packed form", 2),
        ("gpt_oss", "8:g32", "experts that transformers has packed in mxfp4 alone", 4),
    ] {
        let source = open(&fixtures("families").join(family).join("hf")).unwrap();
        let mut options = of_format(format);
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let told = plan.tensors().filter(|tensor| tensor.fallback.as_deref() == Some(reason));
        assert_eq!((told.count(), plan.fallbacks()), (count, count), "{family} {format}");
        options.strict = true;
        let error = ConvertPlan::new(&source, &options).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("experts"), "{error}");
    }
}

/// Codes and scales of compressed-tensors' symmetric integers, as they are; scales of rows stand once for each group.
#[test]
fn symmetric_integers_stay_as_they_are() {
    for (name, is_same) in
        [("ct-int4-g32", true), ("ct-int4-g128-f32", true), ("ct-int8-channel", false), ("ct-w8a8", false)]
    {
        let source = Checkpoint::open(fixtures("hf").join(name)).unwrap();
        let out = convert(&source, &ConvertOptions::hugging_face(keep()));
        let before = tensors_of(&fixtures("hf").join(name).join("model.safetensors"));
        let after = tensors(out.path());
        if is_same {
            assert!(before == after, "{name}");
        }
        let written = Checkpoint::open(out.path()).unwrap();
        let mut packed = Vec::new();
        for tensor in source.tensor_names() {
            let [found, expected] = [&written, &source].map(|checkpoint| {
                let weight = checkpoint.tensor(tensor, None).unwrap();
                packed.push(weight.format_name().starts_with("symmetric"));
                let numbers = weight.to_dense(DType::F32, &Device::Cpu).unwrap();
                numbers.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            });
            assert!(found == expected, "{name}: {tensor}");
        }
        assert!(packed.chunks(2).all(|both| both[0] == both[1]), "{name}");
        assert_eq!(packed.iter().filter(|packed| **packed).count(), 12, "{name}");
    }
}

/// Of a model with packed weights transformers makes other experts than of one without.
#[test]
fn experts_are_modules_where_weights_are_packed() {
    for (family, block) in
        [("llama4_text", "model.layers.1.feed_forward"), ("qwen3_5_moe_text", "model.layers.0.mlp")]
    {
        let folder = fixtures("families").join(family).join("hf");
        let source = open(&folder).unwrap();
        let recipe = |format: &str| Target::HuggingFace.usual_recipe(format.parse().unwrap());
        let options = ConvertOptions::hugging_face(recipe("mxfp4"));
        let out = convert(&source, &options);
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let is_partial = |note: &String| note.contains("only some projections are packed");
        // Rows of down projections are no groups of the second.
        assert_eq!(plan.notes().iter().any(is_partial), family == "qwen3_5_moe_text", "{family}");
        let expert = format!("{block}.experts.1.gate_proj.weight_packed");
        assert!(tensors(out.path()).contains_key(&expert), "{expert}");
        // Nothing is packed, without the option that says so.
        let out = convert(&source, &ConvertOptions::hugging_face(recipe("keep")));
        assert!(tensors(out.path()).contains_key(&format!("{block}.experts.down_proj")), "{family}");
    }
}

#[test]
fn what_is_packed_is_dequantized_or_refused() {
    let folder = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures");
    let source = Checkpoint::open(folder.join("families/mixtral/mlx-affine4")).unwrap();
    let error = ConvertPlan::new(&source, &ConvertOptions::hugging_face(keep())).unwrap_err().to_string();
    assert!(error.contains("requantize or dequantize it"), "{error}");
    // Two stacks become one matrix, the rows of one its columns.
    let source = Checkpoint::open(folder.join("families/deepseek_v3/mlx-mxfp4")).unwrap();
    let recipe = Target::HuggingFace.usual_recipe("mxfp4".parse().unwrap());
    let mut options = ConvertOptions::hugging_face(recipe);
    let fallbacks = |options: &ConvertOptions| {
        let plan = ConvertPlan::new(&source, options).unwrap();
        let of = plan.tensors().find(|tensor| tensor.name.contains("kv_b_proj")).unwrap().fallback.clone();
        of.unwrap_or_default()
    };
    assert!(fallbacks(&options).contains("--requantize packs it anew"), "{}", fallbacks(&options));
    options.requantize = true;
    assert_eq!(fallbacks(&options), "");
}
