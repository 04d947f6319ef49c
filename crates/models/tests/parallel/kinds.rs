//! Every kind of checkpoint over several ranks: the logits are those of one.

use crate::common::{bundled, distance, reference_in};
use crate::families_of::{self, folders, reference_of};
use crate::ollama_store::Store;
use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::{run, ExpertSplit};
use candle_quant::{Checkpoint, QuantFormat, VarBuilder};
use candle_quant_models::{families, Config, Family, Model};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}

fn files(folder: &str) -> Vec<PathBuf> {
    entries(&Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(folder))
}

fn tokens(config: &Config) -> Tensor {
    let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % config.vocab_size as u32).collect();
    Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

/// A model over 2, 3, 4 and 8 ranks against itself alone, its experts split in both ways; `quantize` as for
/// [`VarBuilder::quantize_to`].
fn check(name: &str, checkpoint: &Checkpoint, quantize: Option<QuantFormat>, bound: f64) {
    check_over(&[2, 3, 4, 8], name, checkpoint, quantize, bound);
}

fn check_over(
    ranks: &[usize],
    name: &str,
    checkpoint: &Checkpoint,
    quantize: Option<QuantFormat>,
    bound: f64,
) {
    let config = Config::from_json(checkpoint.config()).unwrap();
    let tokens = tokens(&config);
    let splits = match config.moe {
        Some(_) => &[ExpertSplit::Inside, ExpertSplit::Across][..],
        None => &[ExpertSplit::Inside],
    };
    let of = move |vb: VarBuilder| match quantize {
        Some(format) => Model::new(&config, vb.quantize_to(format)),
        None => Model::new(&config, vb),
    };
    let vb = VarBuilder::from_checkpoint(checkpoint, DType::F32, &Device::Cpu);
    let alone = of(vb).unwrap().forward(&tokens, 0).unwrap();
    for (ranks, split) in ranks.iter().flat_map(|ranks| splits.iter().map(move |split| (*ranks, *split))) {
        let (checkpoint, tokens, of) = (checkpoint.clone(), tokens.clone(), of.clone());
        let logits = run(&vec![Device::Cpu; ranks], move |rank| {
            let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32);
            let mut model = of(vb.split_experts(split))?;
            Ok(model.forward(&tokens, 0)?)
        });
        for logits in logits.unwrap() {
            let distance = distance(&logits, &alone);
            assert!(distance.max <= bound, "{name} over {ranks} {split}: {distance:?}");
            assert!(bound > 3e-4 || distance.other_argmax == 0, "{name} over {ranks} {split}: {distance:?}");
        }
    }
}

#[test]
fn checkpoints_of_other_tools() {
    let folders = files("hf");
    assert_eq!(folders.len(), 46);
    for folder in folders {
        check(&folder.display().to_string(), &Checkpoint::open(&folder).unwrap(), None, 3e-4);
    }
}

#[test]
fn uqff_files() {
    let mut models = Vec::new();
    for folder in files("uqff") {
        let Ok(checkpoint) = Checkpoint::open(&folder) else { continue };
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        if Model::load(&checkpoint, DType::F32, &Device::Cpu).is_err() {
            continue;
        }
        check(&name, &checkpoint, None, 3e-4);
        models.push(name);
    }
    let expected =
        ["afq4", "afq8", "f8q8", "fp8", "frommlx6", "hqq4", "moe_afq4", "mxfp4", "odd_afq4", "q4k", "q8_0"];
    assert!(expected.iter().all(|name| models.iter().any(|model| model == name)), "{models:?}");
}

#[test]
fn slm1_files() {
    let mut count = 0;
    for file in files("slm1").into_iter().filter(|file| file.extension().is_some_and(|end| end == "slm")) {
        check(&file.display().to_string(), &Checkpoint::open(&file).unwrap(), None, 3e-4);
        count += 1;
    }
    assert_eq!(count, 5);
}

#[test]
fn experts_of_ollama() {
    let store = |name: &str| files("ollama").into_iter().find(|path| path.ends_with(name)).unwrap();
    let moe = |name: &str| store(name).join("manifests/registry.ollama.ai/library/tiny-moe");
    let models: Vec<_> = ["current", "v0.16", "v0.21"].iter().flat_map(|name| entries(&moe(name))).collect();
    for model in &models {
        check(&model.display().to_string(), &Checkpoint::open(model).unwrap(), None, 3e-4);
    }
    assert_eq!(models.len(), 4);
}

/// Dense weights that are quantized while loading are so in slices of whole groups.
#[test]
fn weights_quantized_while_loading() {
    let source = bundled("tiny-bf16");
    for format in [QuantFormat::affine(4, 64).unwrap(), QuantFormat::MXFP8] {
        check("tiny-bf16", &source, Some(format), 3e-4);
    }
    check("tiny-bf16", &source, None, 3e-4);
    check("tiny", &bundled("tiny"), None, 3e-4);
}

/// With their logits, which are those of the tools: what ran is written in `docs/models.md`.
#[test]
fn families_as_their_tools_write_them() {
    let mut ran: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let store = Store::new();
    std::env::set_var("OLLAMA_MODELS", store.root());
    for (name, path) in folders() {
        let checkpoint = families_of::open(&path).unwrap();
        check(&name, &checkpoint, None, 3e-4);
        let (tokens, expected) = reference_in(&reference_of(&path));
        let mut model = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
        let logits = model.forward(&tokens, 0).unwrap();
        let distance = distance(&logits, &expected);
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
        let config = checkpoint.config();
        let types = [&config["model_type"], &config["text_config"]["model_type"]].map(Value::as_str);
        let (family, container) = name.split_once('/').unwrap();
        let (family, _) = family.split_once('-').unwrap_or((family, ""));
        // That of the text, if the model has more parts.
        let is_named = types.contains(&Some(family));
        assert!(
            is_named
                || container == "gguf" && types.contains(&ARE_LLAMA.contains(&family).then_some("llama")),
            "{name}: {types:?}"
        );
        let containers = ran.entry(family.to_owned()).or_default();
        containers.insert(container.to_owned());
        if container == "gguf" {
            check_in_store(&store, &name, &path.join("model.gguf"), &tokens, &logits);
            containers.insert("ollama".to_owned());
        }
    }
    let row = |family: &Family| {
        let of = ran.get(family.model_type).cloned().unwrap_or_default();
        let cells = CONTAINERS.map(|(folder, _)| if of.contains(folder) { "yes" } else { "" });
        format!("| `{}` | {} | {} |\n", family.model_type, family.models, cells.join(" | "))
    };
    let titles = CONTAINERS.map(|(_, title)| title).join(" | ");
    let lines = "---|".repeat(CONTAINERS.len());
    let table = format!("| `model_type` | models | {titles} |\n|---|---|{lines}\n");
    let rows: String = families().iter().map(row).collect();
    let text = format!("{MODELS_HEAD}{table}{rows}");
    let file = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("docs/models.md");
    if std::env::var_os("CANDLE_QUANT_WRITE_DOCS").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(written == text, "docs/models.md is not what ran: set CANDLE_QUANT_WRITE_DOCS=1 to write it");
}

/// A file in a store of Ollama, by the model's name and by the path of its manifest: the same logits, also of two ranks.
fn check_in_store(store: &Store, name: &str, file: &Path, tokens: &Tensor, expected: &Tensor) {
    let model = name.replace('/', "-");
    let manifest = store.create(&model, file);
    let bits = |logits: &Tensor| -> Vec<u32> {
        let numbers = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        numbers.into_iter().map(f32::to_bits).collect()
    };
    for path in [Path::new(&model), &manifest] {
        let checkpoint = Checkpoint::open(path).unwrap();
        let logits = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap().forward(tokens, 0).unwrap();
        assert!(bits(&logits) == bits(expected), "{}", path.display());
        if path == manifest {
            check_over(&[2], &model, &checkpoint, None, 3e-4);
        }
    }
}

/// Families whose GGUF files are called llama.
const ARE_LLAMA: [&str; 2] = ["internlm3", "mistral"];

const CONTAINERS: [(&str, &str); 6] = [
    ("hf", "Hugging Face, BF16"),
    ("mlx-affine4", "MLX, affine 4 bit"),
    ("mlx-mxfp4", "MLX, mxfp4"),
    ("gguf", "GGUF"),
    ("uqff", "UQFF"),
    ("ollama", "GGUF in an Ollama store"),
];

const MODELS_HEAD: &str = "\
# Families of models

A test writes this table (`families_as_their_tools_write_them` in `crates/models/tests/parallel/kinds.rs`), of what it has run:
for each `yes` a small checkpoint that transformers 5.23, mlx-lm 0.32.2, llama.cpp's own converter or mistral.rs 0.9.5 wrote. In
f32, logits are within 3e-4 standard deviations of those of transformers or mlx-lm, and so are those of 2, 3, 4 and 8 ranks.
Where the two differ, transformers decides; [report.json](../tests/fixtures/families/report.json) says where.
A store of Ollama is one as its `create` makes it of the GGUF file. What `convert --to ollama` writes, as its importer of
safetensors does, is compared with MLX checkpoints of the same weights for all families but `gpt_oss` and `llama4_text`, whose
experts in columns it refuses to pack.
[formats.md](formats.md) has the formats that weights may be stored in; they do not depend on the family.

";
