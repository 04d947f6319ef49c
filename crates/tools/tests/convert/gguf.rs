//! `convert --to gguf`: files that llama.cpp's converter and quantizers would have written, read by candle's reader of them.

use super::common::{bundled, bundled_path, convert, json_file, tensors, Out};
use super::families_of;
use candle_core::quantized::{gguf_file, GgmlDType};
use candle_core::{safetensors, DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind};
use candle_quant_models::generate::stored_tokenizer;
use candle_quant_models::Model;
use candle_quant_tools::convert::{
    self, ConvertEvent, ConvertOptions, ConvertPlan, Recipe, RunOptions, Spec, Target,
};
use candle_quant_tools::verify;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokenizers::Tokenizer;

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(folder)
}

fn gguf(format: &str) -> ConvertOptions {
    ConvertOptions::gguf(Target::Gguf.usual_recipe(format.parse().unwrap()))
}

/// Everything as it is, what is packed as numbers.
fn dense() -> ConvertOptions {
    let mut options = ConvertOptions::gguf(Recipe::safe(Spec::Keep));
    options.dequantize = true;
    options
}

/// Type, shape and bytes of each tensor, and all values but arrays, as texts.
struct File {
    tensors: BTreeMap<String, (GgmlDType, Vec<usize>, Vec<u8>)>,
    values: BTreeMap<String, String>,
}

impl File {
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let content = gguf_file::Content::read(&mut std::io::Cursor::new(&bytes)).unwrap();
        let tensor = |(name, info): (&String, &gguf_file::TensorInfo)| {
            let elements = info.shape.elem_count();
            let size = elements / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
            let start = (content.tensor_data_offset + info.offset) as usize;
            let stored = (info.ggml_dtype, info.shape.dims().to_vec(), bytes[start..start + size].to_vec());
            (name.clone(), stored)
        };
        let tensors = content.tensor_infos.iter().map(tensor).collect();
        let values =
            content.metadata.iter().filter(|(_, value)| !matches!(value, gguf_file::Value::Array(_)));
        Self { tensors, values: values.map(|(key, value)| (key.clone(), format!("{value:?}"))).collect() }
    }

    fn of(out: &Out) -> Self {
        Self::read(&out.path().join("model.gguf"))
    }
}

fn logits(checkpoint: &Checkpoint, tokens: &Tensor) -> Vec<f32> {
    let logits = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap().forward(tokens, 0).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference, in standard deviations of what is expected.
fn far(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let mean = expected.iter().sum::<f32>() / expected.len() as f32;
    let variance = expected.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / expected.len() as f32;
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max) / variance.sqrt()
}

/// Families of which GGUF files are read, but not written.
const REFUSED: [&str; 5] = ["deepseek_v2", "deepseek_v3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"];

/// What llama.cpp's converter has written is written again: every tensor, and every value that says something of the model.
#[test]
fn files_of_llama_cpp_are_written_as_they_are() {
    let mut refused = Vec::new();
    let mut count = 0;
    for (name, folder) in families_of::folders().into_iter().filter(|(name, _)| name.ends_with("/gguf")) {
        let source = families_of::open(&folder).unwrap();
        let family = name.trim_end_matches("/gguf");
        if let Err(error) = ConvertPlan::new(&source, &dense()) {
            refused.push(format!("{family}: {error}"));
            continue;
        }
        let out = convert(&source, &dense());
        let (found, expected) = (File::of(&out), File::read(&folder.join("model.gguf")));
        let names = |file: &File| file.tensors.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected), "{family}");
        for (tensor, expected) in &expected.tensors {
            let found = &found.tensors[tensor];
            assert_eq!((found.0, &found.1), (expected.0, &expected.1), "{family} {tensor}");
            // Factors of llama 3 are computed in F32 there.
            let is_same = found.2 == expected.2 || tensor == "rope_freqs.weight";
            assert!(is_same, "{family} {tensor}");
        }
        for (key, value) in &expected.values {
            assert_eq!(found.values.get(key), Some(value), "{family} {key}");
        }
        count += 1;
    }
    assert_eq!(count, 39);
    let names: Vec<_> = refused.iter().map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!(names, REFUSED, "{refused:#?}");
}

/// Names, rows, sums and stacks are those of llama.cpp's converter, and a reader computes what transformers computes.
#[test]
fn published_models_become_what_llama_cpp_makes_of_them() {
    let mut refused = Vec::new();
    for (name, folder) in families_of::folders().into_iter().filter(|(name, _)| name.ends_with("/hf")) {
        let family = name.trim_end_matches("/hf");
        let source = families_of::open(&folder).unwrap();
        if let Err(error) = ConvertPlan::new(&source, &dense()) {
            refused.push(format!("{family}: {error}"));
            continue;
        }
        let out = convert(&source, &dense());
        let written = Checkpoint::open(out.path()).unwrap();
        assert_eq!(written.kind(), CheckpointKind::Gguf);
        let report = verify::verify(&written);
        let theirs = folder.with_file_name("gguf").join("model.gguf");
        assert!(report.passed(true), "{family}: {report} {:?}", report.findings);
        let refs = safetensors::load(families_of::reference_of(&folder), &Device::Cpu).unwrap();
        let tokens = refs["tokens"].to_dtype(DType::U32).unwrap().reshape((1, ())).unwrap();
        let expected: Vec<f32> = refs["logits_f32"].flatten_all().unwrap().to_vec1().unwrap();
        let off = far(&logits(&written, &tokens), &expected);
        assert!(off <= 3e-4, "{family}: {off}");
        if theirs.is_file() && !CHANGED.contains(&family) {
            let (found, expected) = (File::of(&out), File::read(&theirs));
            for (tensor, expected) in expected.tensors.iter().filter(|(name, _)| !name.starts_with("rope_")) {
                assert_eq!(found.tensors.get(tensor), Some(expected), "{family} {tensor}");
            }
        }
    }
    let names: Vec<_> = refused.iter().map(|line| line.split(':').next().unwrap()).collect();
    let mut expected: Vec<_> = REFUSED.iter().chain(&WITHOUT_KEYS).copied().collect();
    expected.sort_unstable();
    assert_eq!(names, expected, "{refused:#?}");
}

/// Families that GGUF has not, and fixtures of which it has no key for what is made otherwise than in published models.
const WITHOUT_KEYS: [&str; 9] = [
    "gemma2",
    "gemma3_text",
    "helium",
    "internlm3",
    "llama4_text",
    "llama4_text-dense",
    "qwen3_moe",
    "smollm3",
    "stablelm-parallel",
];

/// Families whose GGUF fixture has experts in a layer that is dense in the published one, or was made of fused projections.
const CHANGED: [&str; 3] = ["glm", "qwen2_moe", "qwen3_moe"];

/// Fixtures of which GGUF files do not say what they have, with the values of published models, for which they say nothing: logits
/// are those of transformers with such configs (`COMMON` in `tests/peers/families.py`).
#[test]
fn what_published_models_have_in_common_is_written() {
    for (family, what, changes) in [
        (
            "gemma2",
            "attention_scale",
            json!({"rope_parameters": {"rope_theta": 1e4}, "query_pre_attn_scalar": 32}),
        ),
        ("gemma3_text", "attention_scale", json!({"query_pre_attn_scalar": 32})),
        (
            "llama4_text",
            "QueryGrowth",
            json!({"attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192}),
        ),
        ("smollm3", "rotated_layers", json!({"no_rope_layers": [1, 1, 1]})),
    ] {
        let [of_hf, of_gguf] = ["hf", "gguf"].map(|kind| fixtures("families").join(family).join(kind));
        let error = ConvertPlan::new(&Checkpoint::open(&of_hf).unwrap(), &dense()).map(drop).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        let folder = tempfile::tempdir().unwrap();
        fs::copy(of_hf.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let mut config = json_file(of_hf.join("config.json"));
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        is_written_as(&Checkpoint::open(folder.path()).unwrap(), &of_gguf);
    }
    // Without the dense layer of the published fixture.
    for family in ["qwen2_moe", "qwen3_moe"] {
        let folder = fixtures("families").join(family).join("gguf");
        let mut options = ConvertOptions::hugging_face(Recipe::safe(Spec::Keep));
        options.dequantize = true;
        let published = convert(&families_of::open(&folder).unwrap(), &options);
        is_written_as(&Checkpoint::open(published.path()).unwrap(), &folder);
    }
}

fn is_written_as(source: &Checkpoint, folder: &Path) {
    let out = convert(source, &dense());
    let (found, expected) = (File::of(&out), File::read(&folder.join("model.gguf")));
    assert!(found.tensors == expected.tensors, "{}", folder.display());
    let refs = safetensors::load(families_of::reference_of(folder), &Device::Cpu).unwrap();
    let tokens = refs["tokens"].to_dtype(DType::U32).unwrap().reshape((1, ())).unwrap();
    let expected: Vec<f32> = refs["logits_f32"].flatten_all().unwrap().to_vec1().unwrap();
    let off = far(&logits(&Checkpoint::open(out.path()).unwrap(), &tokens), &expected);
    assert!(off <= 3e-4, "{}: {off}", folder.display());
}

fn tokens() -> Tensor {
    Tensor::new(&[[5u32, 142, 79, 420, 57, 594, 35, 72]], &Device::Cpu).unwrap()
}

/// The bundled model in every type: what is read is what was measured, the tokenizer is that of the source, blocks stay what they
/// are from GGUF to GGUF.
#[test]
fn the_bundled_model_comes_back_in_every_type() {
    let source = bundled("tiny-bf16");
    for (format, head, limit) in [
        ("q8_0", "Q8_0", 0.006),
        ("q4_0", "Q8_0", 0.1),
        ("q4_k", "Q6K", 0.08),
        ("q6_k", "Q8_0", 0.02),
        ("mxfp4", "Q8_0", 0.13),
        ("nvfp4", "Q8_0", 0.11),
    ] {
        for search in [false, true] {
            let mut options = gguf(format);
            (options.search, options.strict) = (search, true);
            let plan = ConvertPlan::new(&source, &options).unwrap();
            assert_eq!(plan.files().map(|(file, _)| file).collect::<Vec<_>>(), ["model.gguf"]);
            let out = convert(&source, &options);
            let report = convert::measure(&plan, &|_| ()).unwrap();
            assert!(report.tensors[0].relative_rms < limit, "{format}: {:?}", report.tensors[0]);
            assert_eq!(plan.disk_bytes(), fs::metadata(out.path().join("model.gguf")).unwrap().len());
            let written = Checkpoint::open(out.path()).unwrap();
            let mut numbers = ConvertOptions::dense();
            numbers.dtype = Some(DType::F32);
            let of_numbers = convert(&written, &numbers);
            let dense_source = Checkpoint::open(of_numbers.path()).unwrap();
            let off = far(&logits(&written, &tokens()), &logits(&dense_source, &tokens()));
            assert!(off <= 3e-4, "{format}: {off}");
            if !matches!(format, "mxfp4" | "nvfp4") {
                let file = File::of(&out);
                assert_eq!(format!("{:?}", file.tensors["token_embd.weight"].0), head, "{format}");
                let kept = convert(&written, &ConvertOptions::gguf(Recipe::safe(Spec::Keep)));
                assert!(File::of(&kept).tensors == file.tensors, "{format}");
            }
        }
    }
}

#[test]
fn the_tokenizer_of_the_source_is_in_the_file() {
    let out = convert(&bundled("tiny-bf16"), &gguf("q8_0"));
    // Alone, without the files beside it.
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("alone.gguf");
    fs::copy(out.path().join("model.gguf"), &alone).unwrap();
    let stored = stored_tokenizer(&Checkpoint::open(&alone).unwrap()).unwrap().unwrap();
    let published = Tokenizer::from_file(bundled_path("tiny-bf16").join("tokenizer.json")).unwrap();
    for text in ["Once upon a time, there's 1234 of them.\n\n  Two  spaces", "<|endoftext|>Grüße 漢字", ""]
    {
        let [ours, theirs] = [&stored, &published].map(|tokenizer| tokenizer.encode(text, false).unwrap());
        assert_eq!(ours.get_ids(), theirs.get_ids(), "{text}");
        assert_eq!(
            stored.decode(ours.get_ids(), true).unwrap(),
            published.decode(theirs.get_ids(), true).unwrap()
        );
    }
    let values = File::of(&out).values;
    assert_eq!(values["tokenizer.ggml.eos_token_id"], "U32(0)");
    assert_eq!(values["tokenizer.ggml.pre"], r#"String("gpt-2")"#);
    assert_eq!(values["general.file_type"], "U32(7)");
}

/// Codes and scales of MXFP4 and NVFP4 are MLX's, there and back.
#[test]
fn small_floats_keep_their_codes() {
    let source = bundled("tiny-bf16");
    for format in ["mxfp4", "nvfp4"] {
        let recipe = |format: &str| Recipe::named("uniform", format.parse().unwrap()).unwrap();
        let mlx = convert(&source, &ConvertOptions::mlx(recipe(format)));
        let file =
            convert(&Checkpoint::open(mlx.path()).unwrap(), &ConvertOptions::gguf(Recipe::safe(Spec::Keep)));
        let back =
            convert(&Checkpoint::open(file.path()).unwrap(), &ConvertOptions::mlx(Recipe::safe(Spec::Keep)));
        let packed = |out: &Out| {
            let mut found = tensors(out.path());
            found.retain(|_, (dtype, ..)| dtype != "F32" && dtype != "BF16");
            found
        };
        assert!(packed(&mlx).len() > 20 && packed(&mlx) == packed(&back), "{format}");
    }
}

/// What multiplies all scales of a weight is a tensor beside its blocks, one number or one for each expert.
#[test]
fn global_scales_of_nvfp4_lie_beside_the_blocks() {
    for (folder, multiplied) in [
        ("mlx/qwen3-nvfp4", "blk.0.attn_q.scale"),
        ("mlx/qwen3moe-nvfp4-global_scale", "blk.0.ffn_down_exps.scale"),
        ("hf/modelopt-nvfp4", "blk.0.attn_q.scale"),
        ("hf/ct-nvfp4", "blk.0.attn_q.scale"),
    ] {
        let source = Checkpoint::open(fixtures(folder)).unwrap();
        let text = "format = \"keep\"\n[[rule]]\nrole = \"router\"\nformat = \"f32\"";
        let mut options = ConvertOptions::gguf(Recipe::from_toml("a recipe", text).unwrap());
        options.requantize = true;
        let out = convert(&source, &options);
        let bytes = fs::read(out.path().join("model.gguf")).unwrap();
        let has = bytes.windows(multiplied.len()).any(|window| window == multiplied.as_bytes());
        assert_eq!(has, folder != "mlx/qwen3-nvfp4", "{folder}");
        let file = Checkpoint::open(out.path()).unwrap();
        let tokens = Tensor::new(&[[1u32, 50, 3, 61, 28]], &Device::Cpu).unwrap();
        // A router of 8 bits is dequantized.
        let far = far(&logits(&file, &tokens), &logits(&source, &tokens));
        assert!(far < 1e-5, "{folder}: {far}");
    }
}

#[test]
fn what_gguf_has_no_type_for_is_refused_with_a_way_on() {
    let refused = |source: &Checkpoint, options: &ConvertOptions| {
        ConvertPlan::new(source, options).map(drop).unwrap_err().to_string()
    };
    let affine = bundled("tiny");
    let error = refused(&affine, &ConvertOptions::gguf(Recipe::safe(Spec::Keep)));
    assert!(
        error.contains("affine 4-bit g64") && error.contains("a GGUF file") && error.contains("requantize"),
        "{error}"
    );
    let mut requantized = gguf("q4_k");
    requantized.requantize = true;
    convert(&affine, &requantized);
    let error = refused(&bundled("tiny-bf16"), &gguf("4"));
    assert!(error.contains("affine 4-bit g64") && error.contains("q4_0 to q8_0"), "{error}");
    for target in [ConvertOptions::mlx, ConvertOptions::hugging_face] {
        for format in ["q4_k", "q8_0"] {
            let error = refused(&bundled("tiny-bf16"), &target(Recipe::safe(format.parse().unwrap())));
            assert!(error.contains("quantizing"), "{error}");
        }
    }
}

/// Rows of 64 are no super-blocks: Q8_0, or with `strict` an error.
#[test]
fn rows_that_are_no_super_blocks_become_q8_0() {
    let source = Checkpoint::open(fixtures("families/llama/hf")).unwrap();
    let text = "format = \"q4_k\"\nfallback = \"fit\"\ndefaults = false";
    let mut options = ConvertOptions::gguf(Recipe::from_toml("a recipe", text).unwrap());
    let plan = ConvertPlan::new(&source, &options).unwrap();
    let of = |name: &str| plan.tensors().find(|tensor| tensor.name == name).unwrap();
    let query = of("model.layers.0.self_attn.q_proj.weight");
    assert_eq!((query.to.as_str(), query.fallback.is_some()), ("q8_0", true));
    options.strict = true;
    let error = ConvertPlan::new(&source, &options).map(drop).unwrap_err().to_string();
    assert!(error.contains("rows of 64 are no whole number of groups of 256"), "{error}");
}

/// A conversion that dies leaves no file, and the next one writes the same bytes.
#[test]
fn what_is_interrupted_is_taken_up() {
    let plan = ConvertPlan::new(&bundled("tiny-bf16"), &gguf("q4_0")).unwrap();
    let expected = fs::read(convert(&bundled("tiny-bf16"), &gguf("q4_0")).path().join("model.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let finished = AtomicUsize::new(0);
    let progress = |event: ConvertEvent| {
        if matches!(event, ConvertEvent::Finished { .. }) && finished.fetch_add(1, Ordering::Relaxed) == 7 {
            panic!("interrupted");
        }
    };
    let died =
        catch_unwind(AssertUnwindSafe(|| convert::convert(&plan, &out, &RunOptions::default(), &progress)));
    assert!(died.is_err() && !out.exists());
    let options = RunOptions { resume: true, ..RunOptions::default() };
    convert::convert(&plan, &out, &options, &|_| ()).unwrap();
    assert!(fs::read(out.join("model.gguf")).unwrap() == expected);
}
