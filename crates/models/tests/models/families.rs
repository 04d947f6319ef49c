//! Every family of the table, on small checkpoints that transformers, mlx-lm and llama.cpp's converter wrote: logits against those of
//! the first two.

use crate::common::{distance, reference_in};
use candle_core::{DType, Device};
use candle_quant::Checkpoint;
use candle_quant_models::Model;
use std::path::{Path, PathBuf};

/// The folders of fixtures: `<family>/<what>`.
fn fixtures() -> Vec<PathBuf> {
    let root = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/families");
    let folders = |path: &Path| {
        let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        let mut folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
        folders.sort();
        folders
    };
    folders(root.as_ref()).iter().flat_map(|family| folders(family)).collect()
}

#[test]
fn logits_are_those_of_transformers_and_mlx_lm() {
    let mut wrong = Vec::new();
    for folder in fixtures() {
        let name = folder.strip_prefix(env!("CANDLE_QUANT_REPOSITORY")).unwrap().display().to_string();
        let run = || -> candle_quant::Result<_> {
            let gguf = folder.join("model.gguf");
            let model = if gguf.is_file() { &gguf } else { &folder };
            let mut model = Model::load(&Checkpoint::open(model)?, DType::F32, &Device::Cpu)?;
            // A GGUF file has the weights of the folder beside it, and logits of its own only where the config differs.
            let beside =
                [folder.join("refs.safetensors"), folder.with_file_name("hf").join("refs.safetensors")];
            let refs = beside.iter().find(|refs| refs.is_file()).unwrap_or(&beside[0]);
            let (tokens, expected) = reference_in(refs);
            Ok(distance(&model.forward(&tokens, 0)?, &expected))
        };
        match run() {
            Ok(distance) if distance.max <= 3e-4 && distance.other_argmax == 0 => {}
            Ok(distance) => wrong.push(format!("{name}: {distance:?}")),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
