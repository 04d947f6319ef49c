//! Small checkpoints of all families (`tests/fixtures/families`), by the tools that write them.

use candle_quant::Checkpoint;
use std::path::{Path, PathBuf};

/// The folders `<family>/<container>`, with their names.
pub fn folders() -> Vec<(String, PathBuf)> {
    let below = |path: &Path| {
        let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        let mut folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
        folders.sort();
        folders
    };
    let root = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families");
    let named = |path: PathBuf| (path.strip_prefix(&root).unwrap().display().to_string(), path);
    below(&root).iter().flat_map(|family| below(family)).map(named).collect()
}

/// The checkpoint of a folder.
pub fn open(folder: &Path) -> candle_quant::Result<Checkpoint> {
    let gguf = folder.join("model.gguf");
    Checkpoint::open(if gguf.is_file() { &gguf } else { folder })
}

/// The file of the logits that are expected of a folder: its own, or those of the same weights in another container.
pub fn reference_of(folder: &Path) -> PathBuf {
    let own = folder.join("refs.safetensors");
    if own.is_file() {
        own
    } else {
        folder.with_file_name("hf").join("refs.safetensors")
    }
}
