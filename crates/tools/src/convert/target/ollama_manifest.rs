//! What a store of Ollama says of a model: its manifest, and what Ollama knows of it.

use super::ollama::label;
use candle_quant::QuantFormat;
use serde::Serialize;
use serde_json::Value;

const DOCKER: &str = "application/vnd.docker";
const IMAGE: &str = "application/vnd.ollama.image";

/// The version of Ollama that the importer demands for such models.
const REQUIRES: &str = "0.19.0";

/// A blob as manifests list it.
#[derive(Serialize)]
pub(in crate::convert) struct ManifestLayer {
    #[serde(rename = "mediaType")]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl ManifestLayer {
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
pub(in crate::convert) fn manifest(
    config: &ManifestLayer,
    layers: &[ManifestLayer],
) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Manifest<'a> {
        #[serde(rename = "schemaVersion")]
        schema_version: u8,
        #[serde(rename = "mediaType")]
        media_type: String,
        config: &'a ManifestLayer,
        layers: &'a [ManifestLayer],
    }
    let media_type = format!("{DOCKER}.distribution.manifest.v2+json");
    let manifest = Manifest { schema_version: 2, media_type, config, layers };
    Ok(serde_json::to_string(&manifest)? + "\n")
}

/// The text of what Ollama knows of the model: which of its prompt formats it has, told by its architecture.
pub(in crate::convert) fn model(config: &Value, top: Option<QuantFormat>) -> serde_json::Result<String> {
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
        file_type: top.map(label).unwrap_or_default(),
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
