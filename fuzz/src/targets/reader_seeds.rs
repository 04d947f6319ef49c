//! What fuzzing of the readers begins with: the test fixtures.

use super::Seeds;
use crate::writer::{f32_tensor, tensor, File};
use crate::Bundle;
use candle_quant::checkpoint::block_types;
use std::fs;
use std::path::{Path, PathBuf};

/// Larger inputs would only be slow.
const MAX_SEED: usize = 600_000;

/// The seeds of one reader.
pub(super) fn seeds(target: &str) -> Seeds {
    let mut seeds: Seeds = match target {
        "ollama" => directories("ollama").into_iter().flat_map(|store| models(&store)).collect(),
        "gguf" => gguf(),
        "slm1" => files("slm1"),
        "adapter" => of_kind("adapters"),
        // Whose rows alternate.
        "uqff" => of_kind("uqff").into_iter().chain(one("families/gpt_oss/uqff")).collect(),
        kind => of_kind(kind),
    };
    seeds.retain(|(_, bundle)| bundle.encode().len() <= MAX_SEED);
    seeds
}

/// One for each directory of `tests/fixtures/KIND`.
fn of_kind(kind: &str) -> Seeds {
    directories(kind).into_iter().map(|path| (name_of(&path), directory(&path))).collect()
}

/// That of one directory in `tests/fixtures`.
fn one(name: &str) -> Seeds {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name);
    vec![(name.replace('/', "-"), directory(&path))]
}

/// The directories of `tests/fixtures/KIND`.
fn directories(kind: &str) -> Vec<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(kind);
    let entries = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// The files in `tests/fixtures/KIND`, each a checkpoint.
fn files(kind: &str) -> Seeds {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(kind);
    let all = Bundle::read(&path, "", |name| !name.contains("expect")).expect("fixtures");
    let alone = |(name, content): (String, Vec<u8>)| {
        let name = name.replace('/', "-");
        (name.clone(), Bundle { open: name.clone(), files: vec![(name, content)] })
    };
    all.files.into_iter().map(alone).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A checkpoint's directory, without what the tests expect of it.
fn directory(path: &Path) -> Bundle {
    let belongs = |name: &str| !name.contains("expect") && !name.starts_with("refs");
    Bundle::read(path, "", belongs).expect("fixtures")
}

/// One file for each type of blocks, as the tests write them.
fn gguf() -> Seeds {
    let seed = |(type_id, name, elements, bytes): (u32, &str, usize, usize)| {
        let weight = |name: &str, n: usize, k: usize| {
            let data = (0..n * k / elements * bytes).map(|i| (i % 61) as u8).collect();
            tensor(name, &[n as u64, k as u64], type_id, data)
        };
        let file = File::of("llama")
            .u32("llama.attention.head_count", 4)
            .u32("llama.attention.head_count_kv", 2)
            .u32("llama.embedding_length", 256)
            .u32("llama.feed_forward_length", 256)
            .u32("llama.block_count", 1)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .texts("tokenizer.ggml.tokens", &["a", "b", "c"])
            .bool("tokenizer.ggml.add_bos_token", 1)
            .tensor(weight("token_embd.weight", 8, 256))
            .tensor(weight("blk.0.attn_q.weight", 256, 256))
            .tensor(weight("blk.0.ffn_down.weight", 256, 256))
            .tensor(f32_tensor("blk.0.attn_norm.weight", &[256], &[1.0; 256]));
        let files = vec![("model.gguf".to_owned(), file.bytes())];
        (name.to_lowercase(), Bundle { open: "model.gguf".to_owned(), files })
    };
    // Of types without blocks only the halves are weights that are small enough.
    let is_seed = |&(_, name, elements, _): &(u32, &str, usize, usize)| elements > 1 || name.ends_with("F16");
    block_types().into_iter().filter(is_seed).map(seed).collect()
}

/// A manifest without its largest layers: what is left of the model is read all the same.
fn smaller(manifest: Vec<u8>) -> Vec<u8> {
    const LARGE: u64 = 40_000;
    let Ok(mut json) = serde_json::from_slice::<serde_json::Value>(&manifest) else {
        return manifest;
    };
    let size = |layer: &serde_json::Value| layer["size"].as_u64().unwrap_or(0);
    match json["layers"].as_array_mut() {
        Some(layers) if layers.iter().map(size).sum::<u64>() > 10 * LARGE => {
            layers.retain(|layer| size(layer) < LARGE);
            json.to_string().into_bytes()
        }
        _ => manifest,
    }
}

/// Every model of an Ollama store, with its blobs.
fn models(store: &Path) -> Seeds {
    let manifests = Bundle::read(&store.join("manifests"), "", |_| true).expect("manifests");
    let model = |(name, manifest): (String, Vec<u8>)| {
        let manifest = smaller(manifest);
        let text = String::from_utf8_lossy(&manifest).into_owned();
        let is_blob =
            |path: &str| path.strip_prefix("blobs/sha256-").is_some_and(|digest| text.contains(digest));
        let open = format!("manifests/{name}");
        let mut bundle = Bundle::read(store, &open, is_blob).expect("blobs");
        bundle.files.insert(0, (open.clone(), manifest));
        (format!("{}-{}", name_of(store), name.replace('/', "-")), bundle)
    };
    manifests.files.into_iter().map(model).collect()
}
