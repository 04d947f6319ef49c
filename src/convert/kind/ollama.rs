//! Models of an Ollama store: a blob for each tensor or group of experts, named by a manifest. The bytes are those of
//! Ollama's importer, of which some are MLX's and some its own.

use super::{Experts, Kind};
use crate::convert::job::Job;
use crate::convert::plan::{Plan, Shard};
use crate::convert::quality::WrittenFile;
use crate::convert::shard::{Output, Style};
use crate::convert::Options;
use crate::format::{Bits, Element};
use crate::{QuantFormat, Result};
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{json, Value};
use std::collections::{BTreeMap, HashMap};

const DOCKER: &str = "application/vnd.docker";
const IMAGE: &str = "application/vnd.ollama.image";

/// The version of Ollama that the importer demands for such models.
const REQUIRES: &str = "0.19.0";

/// A model of Ollama.
#[derive(Debug)]
pub(super) struct Ollama;

impl Kind for Ollama {
    fn name(&self) -> &'static str {
        "an Ollama store"
    }

    fn recipe(&self) -> &'static str {
        "ollama"
    }

    fn check(&self, format: QuantFormat) -> std::result::Result<(), &'static str> {
        match format.element() {
            Element::Uint(Bits::Four | Bits::Eight) | Element::E2m1 | Element::E4m3 => Ok(()),
            Element::Uint(Bits::One | Bits::Two | Bits::Three | Bits::Five | Bits::Six) => {
                Err("affine formats of 4 and 8 bits (int4, int8), nvfp4, mxfp4 and mxfp8")
            }
        }
    }

    fn experts(&self) -> Experts {
        Experts::OfSource
    }

    fn needs_config(&self) -> bool {
        true
    }

    fn copies(&self, name: &str) -> bool {
        name.ends_with(".json")
    }

    fn published(&self, file: &WrittenFile) -> String {
        format!("blobs/sha256-{}", file.sha256)
    }

    fn packed(&self, name: &str, dims: &[usize], format: QuantFormat, scales: Dtype) -> Result<Vec<Output>> {
        Output::packed(dims, format, scales, |part| match part {
            "scales" => format!("{name}.scale"),
            "biases" => format!("{name}.bias"),
            _ => name.to_owned(),
        })
    }

    fn shards(&self, jobs: Vec<Job>, _: Option<QuantFormat>, _: &Options) -> Result<Vec<Shard>> {
        let (mut layers, mut groups) = (Vec::new(), BTreeMap::<String, Vec<Job>>::new());
        for job in jobs {
            match group_of(&job) {
                Some(group) => groups.entry(group.to_owned()).or_default().push(job),
                None => layers.push((job.planned.name.clone(), vec![job])),
            }
        }
        layers.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (group, jobs) in groups {
            // A blob has one type only.
            match jobs.iter().all(|job| job.format() == jobs.first().and_then(Job::format)) {
                true => layers.push((group, jobs)),
                false => layers.extend(jobs.into_iter().map(|job| (job.planned.name.clone(), vec![job]))),
            }
        }
        Ok(layers.into_iter().enumerate().map(|(index, (layer, jobs))| blob(index, layer, jobs)).collect())
    }

    fn companions(&self, _: &Plan) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

/// The group of experts that a stack belongs to, if it was made of single ones; stacks of the source stay alone.
fn group_of(job: &Job) -> Option<&str> {
    let (group, _) = job.planned.name.strip_suffix(".weight")?.rsplit_once('.')?;
    Some(group).filter(|group| job.is_stacked && group.ends_with(".experts"))
}

fn blob(index: usize, layer: String, jobs: Vec<Job>) -> Shard {
    let file = format!("layer-{:05}", index + 1);
    let mut shard = match jobs.first().and_then(Job::format) {
        None => {
            let order = |a: &Output, b: &Output| a.name.cmp(&b.name);
            Shard::new(file, jobs, Vec::new(), order, None, Style::Common)
        }
        Some(format) => {
            let metadata =
                json!({"quant_type": label(format), "group_size": format.group_size().to_string()});
            let names = jobs.iter().flat_map(|job| &job.outputs).map(|output| output.name.clone()).collect();
            let places: HashMap<_, _> = hash_order(names).into_iter().zip(0..).collect();
            let order = |a: &Output, b: &Output| places.get(&a.name).cmp(&places.get(&b.name));
            Shard::new(file, jobs, Vec::new(), order, Some(metadata), Style::Mlx)
        }
    };
    for job in &mut shard.jobs {
        job.planned.file.clone_from(&layer);
    }
    shard.layer = layer;
    shard
}

/// Ollama's word for a format.
fn label(format: QuantFormat) -> String {
    match format.element() {
        Element::Uint(bits) => format!("int{}", bits.get()),
        Element::E2m1 | Element::E4m3 => format.mode().to_owned(),
    }
}

/// Names in the order in which MLX writes the bytes of arrays: that of libstdc++'s `unordered_map` into which they were
/// put one after another by name. A new one comes before all of its bucket, or before all if its bucket is empty.
fn hash_order(mut names: Vec<String>) -> Vec<String> {
    // Enough for as many names, and a group of experts has nine.
    const BUCKETS: u64 = 13;
    names.sort();
    let mut ordered: Vec<(u64, String)> = Vec::new();
    for name in names {
        let bucket = murmur(name.as_bytes()) % BUCKETS;
        let at = ordered.iter().position(|(other, _)| *other == bucket).unwrap_or(0);
        ordered.insert(at, (bucket, name));
    }
    ordered.into_iter().map(|(_, name)| name).collect()
}

/// The hash of strings of libstdc++ on 64-bit machines, MurmurHash64A.
fn murmur(bytes: &[u8]) -> u64 {
    const MULTIPLIER: u64 = 0xC6A4_A793_5BD1_E995;
    const SEED: u64 = 0xC70F_6907;
    let shift = |value: u64| value ^ value >> 47;
    let mut hash = SEED ^ (bytes.len() as u64).wrapping_mul(MULTIPLIER);
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let mixed = shift(u64::from_le_bytes(*word).wrapping_mul(MULTIPLIER)).wrapping_mul(MULTIPLIER);
        hash = (hash ^ mixed).wrapping_mul(MULTIPLIER);
    }
    if !rest.is_empty() {
        let word = rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        hash = (hash ^ word).wrapping_mul(MULTIPLIER);
    }
    shift(shift(hash).wrapping_mul(MULTIPLIER))
}

/// A blob as manifests list it.
#[derive(Serialize)]
pub(in crate::convert) struct Layer {
    #[serde(rename = "mediaType")]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl Layer {
    /// A blob of tensors, called as the tensor or group.
    pub(in crate::convert) fn tensor(name: &str, sha256: &str, size: u64) -> Self {
        Self::new(format!("{IMAGE}.tensor"), sha256, size, Some(name.to_owned()))
    }

    /// A JSON file of the source.
    pub(in crate::convert) fn json(name: &str, sha256: &str, size: u64) -> Self {
        Self::new(format!("{IMAGE}.json"), sha256, size, Some(name.to_owned()))
    }

    /// What Ollama knows of the model.
    pub(in crate::convert) fn config(sha256: &str, size: u64) -> Self {
        Self::new(format!("{DOCKER}.container.image.v1+json"), sha256, size, None)
    }

    fn new(media_type: String, sha256: &str, size: u64, name: Option<String>) -> Self {
        Self { media_type, digest: format!("sha256:{sha256}"), size, name }
    }
}

/// The text of a manifest.
pub(in crate::convert) fn manifest(config: &Layer, layers: &[Layer]) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Manifest<'a> {
        #[serde(rename = "schemaVersion")]
        schema_version: u8,
        #[serde(rename = "mediaType")]
        media_type: String,
        config: &'a Layer,
        layers: &'a [Layer],
    }
    let media_type = format!("{DOCKER}.distribution.manifest.v2+json");
    let manifest = Manifest { schema_version: 2, media_type, config, layers };
    Ok(serde_json::to_string(&manifest)? + "\n")
}

/// The text of what Ollama knows of the model: which of its prompt formats it has, told by its architecture.
pub(in crate::convert) fn config(plan: &Plan) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Config {
        model_format: &'static str,
        model_family: &'static str,
        model_families: Option<Vec<String>>,
        model_type: &'static str,
        file_type: String,
        #[serde(skip_serializing_if = "str::is_empty")]
        renderer: &'static str,
        #[serde(skip_serializing_if = "str::is_empty")]
        parser: &'static str,
        requires: &'static str,
        capabilities: Vec<&'static str>,
        architecture: &'static str,
        os: &'static str,
    }
    let config = plan.source.config();
    let (renderer, parser) = prompt_formats(config);
    let mut capabilities = vec!["completion"];
    for (key, capability) in [("vision_config", "vision"), ("audio_config", "audio")] {
        capabilities.extend(config.get(key).filter(|value| value.is_object()).map(|_| capability));
    }
    match parser {
        "" => {}
        "qwen3" => capabilities.push("tools"),
        _ => capabilities.extend(["tools", "thinking"]),
    }
    let config = Config {
        model_format: "safetensors",
        model_family: "",
        model_families: None,
        model_type: "",
        file_type: plan.top.map(label).unwrap_or_default(),
        renderer,
        parser,
        requires: REQUIRES,
        capabilities,
        architecture: "",
        os: "",
    };
    serde_json::to_string(&config)
}

/// Ollama's names of what writes prompts and reads answers of an architecture; empty if it has none.
fn prompt_formats(config: &Value) -> (&'static str, &'static str) {
    const KNOWN: [(&str, (&str, &str)); 10] = [
        ("laguna", ("laguna", "laguna")),
        ("gptoss", ("harmony", "harmony")),
        ("gpt_oss", ("harmony", "harmony")),
        ("glm4", ("glm-4.7", "glm-4.7")),
        ("glm-4", ("glm-4.7", "glm-4.7")),
        ("deepseek", ("deepseek3", "deepseek3")),
        ("gemma4", ("gemma4", "gemma4")),
        ("qwen3_5", ("qwen3.5", "qwen3.5")),
        ("qwen3next", ("qwen3.5", "qwen3.5")),
        ("qwen3", ("qwen3-coder", "qwen3")),
    ];
    let architectures = config.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let words = architectures.chain(config.get("model_type")).filter_map(Value::as_str);
    let known = |word: &str| {
        let word = word.to_lowercase();
        KNOWN.iter().find_map(|(part, formats)| word.contains(part).then_some(*formats))
    };
    words.into_iter().find_map(known).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by `std::hash<std::string>` of libstdc++.
    #[test]
    fn hashes_are_those_of_libstdcxx() {
        let hashes = [
            ("", 0x553E_9390_1E46_2A6E),
            ("a", 0x454D_DEE4_88C1_ED6B),
            ("lm_head.", 0x9AEC_CD45_B65E_6DDD),
            ("lm_head.weight", 0x2164_1C74_66AF_AB3D),
            ("model.layers.0.mlp.down_proj.weight.scale", 0xB8C0_9DAF_603A_AF17),
        ];
        for (text, hash) in hashes {
            assert_eq!(murmur(text.as_bytes()), hash, "{text}");
        }
    }
}
