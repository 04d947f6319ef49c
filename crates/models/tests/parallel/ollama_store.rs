//! Models of GGUF files in a store of Ollama, as its `create` writes them (server/create.go and types/model/config.go of
//! commit fb30760996).

use serde_json::{json, Value};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MANIFESTS: &str = "manifests/registry.ollama.ai/library";

/// A store in a folder of its own.
pub struct Store(TempDir);

impl Store {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("blobs")).unwrap();
        fs::create_dir_all(folder.path().join(MANIFESTS)).unwrap();
        Self(folder)
    }

    pub fn root(&self) -> &Path {
        self.0.path()
    }

    /// Adds a model of a Modelfile with `FROM file`, a template and parameters; where its manifest is.
    pub fn create(&self, model: &str, file: &Path) -> PathBuf {
        let mut config = json!({
            "model_format": "gguf", "model_family": model, "model_families": [model], "model_type": "75.2K",
            "file_type": "BF16", "architecture": "amd64", "os": "linux",
        })
        .to_string();
        config.push('\n');
        let image = |kind: &str| format!("application/vnd.ollama.image.{kind}");
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": self.blob("application/vnd.docker.container.image.v1+json", config.as_bytes()),
            "layers": [
                self.blob(&image("model"), &fs::read(file).unwrap()),
                self.blob(&image("template"), b"{{ .Prompt }}"),
                self.blob(&image("params"), b"{\"stop\":[\"</s>\"]}\n"),
            ],
        });
        let path = self.root().join(MANIFESTS).join(model).join("latest");
        fs::create_dir(path.parent().unwrap()).unwrap();
        fs::write(&path, manifest.to_string() + "\n").unwrap();
        path
    }

    fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(self.root().join(format!("blobs/sha256-{hex}")), bytes).unwrap();
        json!({"mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len()})
    }
}
