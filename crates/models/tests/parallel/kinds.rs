//! Every kind of checkpoint over several ranks: the logits are those of one.

use crate::common::{bundled, distance};
use crate::families_of::folders;
use candle_core::{DType, Device, Tensor};
use candle_quant::parallel::{run, ExpertSplit};
use candle_quant::{Checkpoint, QuantFormat, VarBuilder};
use candle_quant_models::{Config, Model};
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

/// A model over 2, 3, 4 and 8 ranks against itself alone, its experts split in both ways; `quantize` as for [`VarBuilder::quantize_to`]. The largest
/// distance.
fn check(name: &str, checkpoint: &Checkpoint, quantize: Option<QuantFormat>, bound: f64) {
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
    for (ranks, split) in
        [2, 3, 4, 8].into_iter().flat_map(|ranks| splits.iter().map(move |split| (ranks, *split)))
    {
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
    assert_eq!(folders.len(), 26);
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

#[test]
fn families_as_their_tools_write_them() {
    for (name, path) in folders() {
        check(&name, &Checkpoint::open(path).unwrap(), None, 3e-4);
    }
}
