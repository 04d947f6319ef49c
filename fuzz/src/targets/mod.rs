//! What is fuzzed.

mod adapter;
mod connection;
mod importance;
mod name;
mod output;
mod reader;
mod reader_seeds;
mod template;
mod tokenizer;

use crate::Bundle;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Inputs to begin with, by name.
pub type Seeds = Vec<(String, Bundle)>;

/// Something that takes files.
#[derive(Clone, Copy)]
pub struct Target {
    /// As in `fuzz_targets`.
    pub name: &'static str,
    seeds: fn(&str) -> Seeds,
    run: fn(&Bundle) -> bool,
}

const fn target(name: &'static str, seeds: fn(&str) -> Seeds, run: fn(&Bundle) -> bool) -> Target {
    Target { name, seeds, run }
}

/// All of them: the readers of checkpoints; then what lies beside weights, what other processes say, and what a conversion
/// is given beside a model, and finds where it writes.
pub const TARGETS: [Target; 15] = [
    target("mlx", reader_seeds::seeds, reader::run),
    target("hf", reader_seeds::seeds, reader::run),
    target("uqff", reader_seeds::seeds, reader::run),
    target("ollama", reader_seeds::seeds, reader::run),
    target("gguf", reader_seeds::seeds, reader::run),
    target("slm1", reader_seeds::seeds, reader::run),
    target("adapter", reader_seeds::seeds, adapter::run),
    target("tokenizer", tokenizer::seeds, tokenizer::run),
    target("template", template::seeds, template::run),
    target("name", name::seeds, name::run),
    target("connection", connection::seeds, connection::run),
    target("imatrix", importance::matrices, importance::run_matrix),
    target("statistics", importance::statistics, importance::run_statistics),
    target("manifest", output::manifests, output::run),
    target("journal", output::journals, output::run),
];

impl Target {
    /// The target of a name.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(name: &str) -> Self {
        TARGETS.into_iter().find(|target| target.name == name).expect("a target")
    }

    /// What fuzzing begins with, in the order of their names.
    pub fn seeds(&self) -> Seeds {
        let mut seeds = (self.seeds)(self.name);
        seeds.sort_by(|a, b| a.0.cmp(&b.0));
        seeds
    }

    /// Runs one input: whether it was accepted.
    ///
    /// # Panics
    /// If what it is given to does not keep a promise.
    pub fn run(&self, bundle: &Bundle) -> bool {
        (self.run)(bundle)
    }
}

/// A folder that vanishes with this; in memory, if the system has such folders: outputs wait for the disk.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("a temporary folder")
}

/// A folder with these files.
fn folder_of(bundle: &Bundle) -> TempDir {
    let folder = folder();
    bundle.write(folder.path()).expect("files in it");
    folder
}

/// The content of one file of an input, empty if it has none.
fn content<'b>(bundle: &'b Bundle, name: &str) -> &'b [u8] {
    bundle.files.iter().find(|file| file.0 == name).map_or(&[], |file| &file.1)
}

fn bundle<const N: usize>(files: [(&str, &[u8]); N]) -> Bundle {
    let files = files.map(|(name, content)| (name.to_owned(), content.to_owned()));
    Bundle { open: String::new(), files: files.into() }
}

/// A file of the repository.
fn repository(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A checkpoint of one tensor, without anything beside it.
fn smallest() -> (String, Vec<u8>) {
    let header = r#"{"norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    ("model.safetensors".to_owned(), crate::checkpoint::raw_file(header, &[0; 8]))
}
