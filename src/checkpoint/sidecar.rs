//! The files that lie beside the weights: config, tokenizer and the like.

use super::file::{is_plain_file_name, open_file, read_json, Opening};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What belongs to weights of any kind: what is read here, and what makes the folder a whole checkpoint for others.
const COMPANIONS: [&str; 22] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "quant_config.json",
    "quantize_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "uqff_report.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
];

/// Where the files that belong to the weights are: config, tokenizer and the like.
#[derive(Debug)]
#[non_exhaustive]
pub enum SidecarFiles {
    /// In a directory, under their names.
    Directory(PathBuf),
    /// In files of other names.
    Files(BTreeMap<String, PathBuf>),
}

impl SidecarFiles {
    /// Whether a file of this name is one that weights of any kind have beside them: a config, or a file of a tokenizer or
    /// processor. Other files of a folder may have nothing to do with weights that are a single file.
    pub fn is_companion(name: &str) -> bool {
        COMPANIONS.contains(&name)
    }

    /// All of them by name; of a directory every file in it.
    pub fn all(&self) -> Result<BTreeMap<String, PathBuf>> {
        let dir = match self {
            Self::Files(files) => return Ok(files.clone()),
            Self::Directory(dir) if dir.as_os_str().is_empty() => Path::new("."),
            Self::Directory(dir) => dir,
        };
        let failed = |error| Error::Io { path: dir.to_owned(), error };
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // Asked of the path, not of the entry: files of the Hugging Face cache are links.
            if let (Ok(name), true) = (entry.file_name().into_string(), entry.path().is_file()) {
                files.insert(name, entry.path());
            }
        }
        Ok(files)
    }

    /// Where the file called `name` is, if there is one. A name that would lead out of the folder is none.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        match self {
            Self::Directory(dir) => {
                Some(dir.join(name)).filter(|path| is_plain_file_name(name) && path.is_file())
            }
            Self::Files(files) => files.get(name).cloned(),
        }
    }

    /// The content of the text file called `name`, of at most `most` bytes; `None` if there is none.
    pub(super) fn text(&self, name: &str, most: usize) -> Result<Option<String>> {
        let Some(path) = self.path(name) else { return Ok(None) };
        let mut bytes = Vec::new();
        let read = open_file(&path)?.take((most as u64).saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| Error::Io { path: path.clone(), error })?;
        if bytes.len() > most {
            return Err(Error::file(&path, format!("more than {most} bytes"), "fetch it again"));
        }
        let no_text = |error| Error::file(&path, format!("not UTF-8: {error}"), "fetch it again");
        String::from_utf8(bytes).map(Some).map_err(no_text)
    }

    /// The content of the JSON file called `name`; `None` if there is none.
    pub(super) fn json(&self, name: &str, opening: &Opening) -> Result<Option<Value>> {
        match self.path(name) {
            Some(path) => read_json(&path, opening),
            None => Ok(None),
        }
    }

    /// `config.json`; null if there is none.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub(super) fn config(&self, opening: &Opening) -> Result<Value> {
        let config = self.json("config.json", opening)?.unwrap_or_default();
        match (&config, self.path("config.json")) {
            (Value::Object(_) | Value::Null, _) | (_, None) => Ok(config),
            (_, Some(path)) => Err(Error::File {
                path,
                problem: "not a JSON object".into(),
                remedy: "fetch it again".into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_lead_out_of_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("model");
        std::fs::create_dir(&inside).unwrap();
        for dir in [folder.path(), &inside] {
            std::fs::write(dir.join("config.json"), "{}").unwrap();
        }
        let files = SidecarFiles::Directory(inside.clone());
        assert_eq!(files.path("config.json"), Some(inside.join("config.json")));
        let absolute = folder.path().join("config.json");
        for name in ["../config.json", "./config.json", absolute.to_str().unwrap(), "", ".", ".."] {
            assert_eq!(files.path(name), None, "{name}");
        }
    }
}
