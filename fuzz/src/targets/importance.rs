//! What says how much columns count: importance matrices of llama.cpp, and the statistics that a conversion keeps.
//!
//! Whatever is accepted is of sums that are finite and not below zero, as many as it says.

use super::{folder_of, repository, Seeds};
use crate::Bundle;
use candle_quant::Checkpoint;
use candle_quant_tools::importance::{read_imatrix, CalibrationText, Collector, Statistics};
use std::path::Path;
use std::sync::OnceLock;

const FILE: &str = "importance";

/// The model that they are of.
fn source() -> &'static Checkpoint {
    static SOURCE: OnceLock<Checkpoint> = OnceLock::new();
    SOURCE.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families/qwen3_moe/hf");
        Checkpoint::open(path).expect("a checkpoint")
    })
}

/// Those of both forms.
pub(super) fn matrices(_: &str) -> Seeds {
    let seed = |form: &str| {
        let content = repository(&format!("tests/fixtures/importance/qwen3_moe.{form}"));
        (form.to_owned(), super::bundle([(FILE, &content)]))
    };
    ["dat", "gguf"].map(seed).into()
}

/// Those of a text of which half is done, and of a whole one.
pub(super) fn statistics(_: &str) -> Seeds {
    let folder = super::folder();
    let path = folder.path().join(FILE);
    let text = CalibrationText::of_tokens(vec![vec![1, 2, 3], vec![4, 5]]).expect("a text");
    let mut collector = Collector::new(source(), &text).expect("a model");
    let mut seed = |name: &str| {
        collector.advance().expect("a piece");
        collector.write(&path).expect("a file");
        let content = std::fs::read(&path).expect("what was written");
        (name.to_owned(), super::bundle([(FILE, &content)]))
    };
    vec![seed("half"), seed("whole")]
}

pub(super) fn run_matrix(bundle: &Bundle) -> bool {
    let folder = folder_of(bundle);
    is_sound(read_imatrix(source(), folder.path().join(FILE)))
}

pub(super) fn run_statistics(bundle: &Bundle) -> bool {
    let folder = folder_of(bundle);
    is_sound(Statistics::read(source(), folder.path().join(FILE)))
}

fn is_sound(read: candle_quant::Result<Statistics>) -> bool {
    let Ok(statistics) = read else { return false };
    for (module, sums) in statistics.modules() {
        assert_eq!(sums.squares().len(), sums.columns() * sums.counts().len(), "{module}");
        assert!(sums.squares().iter().all(|sum| sum.is_finite() && *sum >= 0.), "{module}");
    }
    true
}
