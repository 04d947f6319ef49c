//! Where a checkpoint comes from, as far as it says so itself.
//!
//! | statement | said by |
//! |---|---|
//! | repository, revision | where it lies in the cache of the Hugging Face hub |
//! | producer, source, recipe | `candle-quant.json` beside it, ModelOpt's `hf_quant_config.json`, the config, the files of the weights |
//! | version | the config and the files, of the formats and libraries that they were written with |

use crate::staging::{Manifest, MANIFEST};
use candle_quant::checkpoint::HubName;
use candle_quant::{Checkpoint, Result};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Something that a checkpoint says of where it comes from. Nobody has checked it, and it may be any text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Statement {
    /// What it is about: `producer`, `source`, `revision`, ..
    pub about: String,
    /// What is said.
    pub text: String,
    /// Where: a file beside the weights, `path`, or `weights`.
    pub from: String,
}

/// Keys of a config, and what they are about.
const CONFIG: [(&str, &str); 8] = [
    ("/_name_or_path", "source"),
    ("/transformers_version", "transformers"),
    ("/quantization_config/quant_method", "method"),
    ("/quantization_config/producer/name", "producer"),
    ("/quantization_config/producer/version", "producer version"),
    ("/quantization_config/version", "method version"),
    ("/quantization_config/quant_algo", "recipe"),
    ("/quantization_config/format", "recipe"),
];

/// Of ModelOpt.
const HF_QUANT_CONFIG: [(&str, &str); 3] = [
    ("/producer/name", "producer"),
    ("/producer/version", "producer version"),
    ("/quantization/quant_algo", "recipe"),
];

/// Keys of a GGUF file's metadata. Those of other files are few, and all are told.
const GGUF: [(&str, &str); 14] = [
    ("general.name", "name"),
    ("general.version", "version"),
    ("general.author", "author"),
    ("general.organization", "organization"),
    ("general.quantized_by", "quantized by"),
    ("general.file_type", "file type"),
    ("general.quantization_version", "quantization version"),
    ("general.license", "license"),
    ("general.source.url", "source"),
    ("general.source.repo_url", "source"),
    ("general.source.huggingface.repository", "source"),
    ("general.base_model.0.repo_url", "base model"),
    ("quantize.imatrix.dataset", "calibration"),
    ("quantize.imatrix.file", "importance matrix"),
];

/// All that a checkpoint says of where it comes from.
///
/// ```
/// use candle_quant::Checkpoint;
/// use candle_quant_tools::provenance::provenance;
///
/// let statements = provenance(&Checkpoint::open("assets/tiny")?)?;
/// let format = statements.iter().find(|statement| statement.about == "format").expect("one");
/// assert_eq!((&*format.text, &*format.from), ("mlx", "weights"));
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// If a file that says something can't be read.
pub fn provenance(checkpoint: &Checkpoint) -> Result<Vec<Statement>> {
    let mut all = Vec::new();
    let mut say = |about: &str, text: &str, from: &str| {
        let statement = Statement { about: about.to_owned(), text: text.to_owned(), from: from.to_owned() };
        if !text.is_empty() && !all.contains(&statement) {
            all.push(statement);
        }
    };
    if let Some(name) = HubName::of_snapshot(checkpoint.path()) {
        say("repository", &name.repo(), "path");
        say("revision", name.revision(), "path");
    }
    if let Some(manifest) = manifest(checkpoint)? {
        say("producer", &manifest.written_by, MANIFEST);
        say("source", &manifest.source, MANIFEST);
        say("recipe", &manifest.recipe, MANIFEST);
    }
    let of_modelopt = checkpoint.read_json("hf_quant_config.json")?.unwrap_or_default();
    for (json, file, keys) in [
        (checkpoint.config(), "config.json", &CONFIG[..]),
        (&of_modelopt, "hf_quant_config.json", &HF_QUANT_CONFIG),
    ] {
        for (key, about) in keys {
            match json.pointer(key) {
                Some(Value::String(text)) => say(about, text, file),
                Some(Value::Number(number)) => say(about, &number.to_string(), file),
                _ => {}
            }
        }
    }
    let metadata = checkpoint.metadata()?;
    for (about, text) in stated(&metadata) {
        say(about, text, "weights");
    }
    Ok(all)
}

fn manifest(checkpoint: &Checkpoint) -> Result<Option<Manifest>> {
    let json = checkpoint.read_json(MANIFEST)?;
    Ok(json.and_then(|json| serde_json::from_value(json).ok()))
}

/// What files say of themselves that is of interest.
fn stated(metadata: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
    let is_gguf = metadata.contains_key("general.architecture");
    match is_gguf {
        true => GGUF.iter().filter_map(|(key, about)| Some((*about, metadata.get(*key)?.as_str()))).collect(),
        false => metadata.iter().map(|(key, text)| (key.as_str(), text.as_str())).collect(),
    }
}
