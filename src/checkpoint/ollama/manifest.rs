//! The manifest of a model: a list of layers, each a blob with a meaning.

use super::store::{BlobDigest, ManifestFile, Store};
use crate::checkpoint::file::{read_json, Digest, Opening};
use crate::{Error, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

pub(super) const REMEDY: &str = "pull or create the model again";

/// A manifest whose layers are all there, each in a file of the size that is stated.
pub(super) struct Manifest {
    /// The model's name, for errors.
    pub model: String,
    pub path: PathBuf,
    /// What Ollama knows of the model, in JSON.
    pub config: Option<Layer>,
    pub layers: Vec<Layer>,
}

/// One blob of a model.
#[derive(Debug)]
pub(super) struct Layer {
    pub kind: LayerKind,
    /// The name that the manifest gives it, if any.
    pub name: Option<String>,
    /// What it is called in errors: layer and model.
    pub label: String,
    pub digest: BlobDigest,
    pub file: PathBuf,
}

/// What a layer is, by its media type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerKind {
    /// A safetensors file of one weight, or of a group of experts.
    Tensor,
    /// A JSON file of the source: `config.json`, `tokenizer.json`.
    Json,
    /// A model in a GGUF file.
    Gguf,
    /// A LoRA adapter to be applied to the model.
    Adapter,
    /// Prompts, licenses and whatever else is not needed to load weights.
    Other,
}

#[derive(Deserialize)]
struct RawManifest {
    config: Option<RawLayer>,
    layers: Option<Vec<RawLayer>>,
}

#[derive(Deserialize)]
struct RawLayer {
    #[serde(rename = "mediaType")]
    media_type: Option<String>,
    digest: Option<String>,
    size: Option<u64>,
    name: Option<String>,
}

/// The mark of a model that is not on this machine, in the config of a manifest.
#[derive(Deserialize)]
struct RemoteModel {
    remote_host: Option<String>,
}

impl Manifest {
    /// Reads a manifest and checks that its layers are there, and their sizes.
    pub(super) fn read(file: &ManifestFile, opening: &Opening) -> Result<Self> {
        let ManifestFile { store, name, path } = file;
        let model = name.to_string();
        let of_model = |error| with_place(error, &format!("model `{model}`"));
        let raw: RawManifest = read_json(path, opening)
            .map_err(of_model)?
            .ok_or_else(|| Error::file(path, format!("the manifest of model `{model}` is gone"), REMEDY))?;
        let layer = |raw| Layer::new(raw, &model, path, store);
        Ok(Self {
            config: raw.config.map(layer).transpose()?,
            layers: raw.layers.unwrap_or_default().into_iter().map(layer).collect::<Result<_>>()?,
            model: model.clone(),
            path: path.clone(),
        })
    }

    pub(super) fn layers_of(&self, kind: LayerKind) -> impl Iterator<Item = &Layer> {
        self.layers.iter().filter(move |layer| layer.kind == kind)
    }

    /// All blobs with the digests that the manifest states.
    pub(super) fn digests(&self) -> Vec<Digest> {
        let layers = self.config.iter().chain(&self.layers);
        layers.map(|layer| Digest::new(&layer.label, &layer.file, layer.digest.hex())).collect()
    }

    /// The host that runs the model, if that is all there is of it here.
    pub(super) fn remote_host(&self, opening: &Opening) -> Result<Option<String>> {
        let Some(config) = &self.config else {
            return Ok(None);
        };
        let remote: Option<RemoteModel> =
            read_json(&config.file, opening).map_err(|error| config.explain(error))?;
        Ok(remote.and_then(|remote| remote.remote_host).filter(|host| !host.is_empty()))
    }

    /// An error about the manifest itself.
    pub(super) fn error(&self, problem: &str) -> Error {
        Error::file(&self.path, format!("the manifest of model `{}` {problem}", self.model), REMEDY)
    }
}

impl Layer {
    fn new(raw: RawLayer, model: &str, manifest: &Path, store: &Store) -> Result<Self> {
        let media_type = raw.media_type.unwrap_or_default();
        let last = media_type.rsplit('.').next().unwrap_or_default();
        let kind = match media_type.strip_prefix("application/vnd.ollama.image.") {
            Some("tensor") => LayerKind::Tensor,
            Some("json") => LayerKind::Json,
            Some("model") => LayerKind::Gguf,
            Some("adapter") => LayerKind::Adapter,
            _ => {
                log::debug!("{}: a layer of type {media_type:?} is not needed", manifest.display());
                LayerKind::Other
            }
        };
        let label = format!("layer `{}` of model `{model}`", raw.name.as_deref().unwrap_or(last));
        let wrong = |problem: String| Error::file(manifest, format!("{label} {problem}"), REMEDY);
        let (Some(digest), Some(size)) = (raw.digest, raw.size) else {
            return Err(wrong("has no digest or no size".into()));
        };
        // Before any path is made of it.
        let digest = BlobDigest::parse(&digest).ok_or_else(|| {
            wrong(format!("has the digest {digest:?}, which is not `sha256:` and 64 hexadecimal digits"))
        })?;
        let place = place(&label, &digest);
        #[allow(clippy::wildcard_enum_match_arm, reason = "all other errors stay as they are")]
        let file = store.blob(&digest).map_err(|error| {
            let error = match error {
                Error::Io { path, error } if error.kind() == std::io::ErrorKind::NotFound => Error::file(
                    &path,
                    "this blob is missing",
                    "pull the model again, or copy the whole store",
                ),
                other => other,
            };
            with_place(error, &place)
        })?;
        let found = file.metadata().map_err(|error| Error::Io { path: file.clone(), error })?;
        if !found.is_file() || found.len() != size {
            let found = if found.is_file() { format!("{} bytes", found.len()) } else { "no file".into() };
            let problem = format!("{found}, the manifest states {size} bytes");
            return Err(with_place(Error::file(&file, problem, REMEDY), &place));
        }
        Ok(Self { kind, name: raw.name, label, digest, file })
    }

    /// An error about this layer, which it names.
    pub(super) fn explain(&self, error: Error) -> Error {
        with_place(error, &place(&self.label, &self.digest))
    }

    /// An error about a tensor of this layer.
    pub(super) fn tensor_error(
        &self,
        tensor: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        self.explain(Error::tensor(&self.file, tensor, expected, found, REMEDY))
    }
}

fn place(label: &str, digest: &BlobDigest) -> String {
    format!("{label}, sha256:{}", digest.hex())
}

/// The same error, with the place in the model where it occurred.
#[allow(clippy::wildcard_enum_match_arm, reason = "other errors name no file")]
fn with_place(error: Error, place: &str) -> Error {
    match error {
        Error::File { path, problem, remedy } => {
            Error::File { path, problem, remedy: format!("{remedy} ({place})") }
        }
        Error::Tensor { file, tensor, expected, found, remedy } => {
            Error::Tensor { file, tensor, expected, found, remedy: format!("{remedy} ({place})") }
        }
        Error::Io { path, error } => {
            Error::Io { path, error: std::io::Error::new(error.kind(), format!("{error} ({place})")) }
        }
        other => other,
    }
}
