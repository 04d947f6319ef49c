//! Models of the Hugging Face hub: fetched from a server that speaks as it does, and found in a cache that Python wrote.
#![cfg(feature = "hub")]

#[path = "../common/checkpoint.rs"]
mod checkpoint;
mod errors;
mod layout;
mod server;
mod transfers;

use candle_quant::checkpoint::{locate, Checkpoint, HubName, HubOptions};
use candle_quant::Result;
use server::Server;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// The bundled model.
pub fn bundled() -> Vec<(&'static str, Vec<u8>)> {
    let dir = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("assets/tiny");
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        .map(|name| (name, fs::read(dir.join(name)).unwrap()))
        .into()
}

/// A server with the bundled model, and what nobody needs.
pub fn bundled_server() -> Server {
    let bundled = bundled();
    let mut files: Vec<(&str, &[u8])> = bundled.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
    files.extend([
        ("README.md", &b"# a model"[..]),
        ("pytorch_model.bin", &b"x"[..]),
        ("onnx/model.onnx", &b"x"[..]),
    ]);
    Server::new(&files)
}

/// A cache of its own, and options for a server.
pub fn cache(server: &Server) -> (TempDir, HubOptions) {
    let dir = tempfile::tempdir().unwrap();
    let mut options = HubOptions::new(dir.path().join("hub"));
    options.endpoint = format!("{}/", server.url);
    options.stalled = Duration::from_millis(300);
    (dir, options)
}

pub fn pull(name: &str, options: &HubOptions) -> Result<PathBuf> {
    HubName::parse(name)?.pull(options)
}

pub fn open(name: &str, options: &HubOptions) -> Result<Checkpoint> {
    Checkpoint::open(locate(name, options)?)
}

/// The folder of the repository in the cache.
pub fn repo(options: &HubOptions) -> PathBuf {
    options.cache.join("models--org--model")
}

/// All files below a folder that are files and no links, by name.
pub fn files_below(dir: &Path) -> Vec<String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => {
                files.extend(files_below(&entry.path()).into_iter().map(|file| format!("{name}/{file}")));
            }
            kind if kind.is_file() => files.push(name),
            _ => {}
        }
    }
    files.sort();
    files
}
