//! The readers of checkpoints. An input is the files of one; its `open` is the path that is opened.

use super::folder_of;
use crate::Bundle;
use candle_quant::checkpoint::{natural_order, slm1, Weight};
use candle_quant::Checkpoint;
use candle_quant_models::chat::Template;
use candle_quant_models::{generate, Config};
use candle_quant_tools::{diff, verify};

/// Opens a checkpoint, reads and decodes all it has, and asks for things it may not have.
pub(super) fn run(bundle: &Bundle) -> bool {
    let folder = folder_of(bundle);
    let path = folder.path().join(&bundle.open);
    let strict = slm1::Slm1Options {
        strict: true,
        checksum: slm1::ChecksumPolicy::Verify(|_| 1),
        ..slm1::Slm1Options::default()
    };
    let _ = slm1::open(&path, &strict).is_ok();
    let Ok(checkpoint) = Checkpoint::open(&path) else {
        return false;
    };
    let _ = (checkpoint.kind(), checkpoint.path(), checkpoint.config(), format!("{checkpoint:?}"));
    let _ = (checkpoint.modules(), Config::from_json(checkpoint.config()));
    let _ = (generate::load_tokenizer(&checkpoint).is_ok(), generate::stop_tokens(&checkpoint).is_ok());
    let _ = (
        generate::Params::from_checkpoint(&checkpoint).is_ok(),
        Template::from_checkpoint(&checkpoint).is_ok(),
    );
    // Reads and decodes every tensor once.
    let report = verify::verify(&checkpoint);
    let _ = (report.passed(true), report.to_string());
    let mut names: Vec<String> = checkpoint.tensor_names().map(str::to_owned).collect();
    names.sort_by(|a, b| natural_order(a, b));
    names.push("model.layers.0.mlp.up_proj.weight".to_owned());
    names.push(String::new());
    for name in &names {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let _ = (checkpoint.contains(name), checkpoint.dense(name).is_ok());
        for in_features in [None, Some(0), Some(64), Some(128), Some(usize::MAX)] {
            for weight in [checkpoint.tensor(name, in_features), checkpoint.weight(module, in_features)] {
                match weight {
                    Ok(weight) => look_at(&weight),
                    Err(error) => drop(error.to_string()),
                }
            }
        }
    }
    let diff = diff::diff(&checkpoint, &checkpoint, &diff::DiffOptions::default());
    let _ = (diff.equal(), checkpoint.warnings());
    true
}

fn look_at(weight: &Weight) {
    let _ = (weight.dims(), weight.format_name(), format!("{weight:?}"));
    assert!(weight.size_in_bytes() < 1 << 40, "{weight:?} is larger than any input");
}
