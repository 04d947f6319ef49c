//! What a checkpoint says about how its text is to be generated.

use super::{stop_tokens, Params, Sampling};
use candle_quant::checkpoint::CheckpointKind;
use candle_quant::{Checkpoint, Error, Result};
use serde_json::{Map, Number, Value};
use std::path::{Path, PathBuf};

impl Params {
    /// What the checkpoint says: stop tokens, and of `generation_config.json` the temperature, `top_k`, `top_p`, `min_p` and
    /// the three penalties; if it says that `do_sample` is false, always the most likely token. Of a GGUF file first what its metadata
    /// say ([`stored_sampling`]), of an Ollama model last its parameters and stop strings. What none says is as by default.
    ///
    /// # Errors
    /// If a file can't be read, or a value has no meaning.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let mut params = Self { stop_tokens: stop_tokens(checkpoint)?, ..Self::default() };
        let stored = stored_sampling(checkpoint)?.into();
        let stored = Stated { path: checkpoint.path(), json: &stored };
        params.sampling = stored.sampling(params.sampling, "repetition_penalty")?;
        const FILE: &str = "generation_config.json";
        if let Some(json) = checkpoint.read_json(FILE)? {
            let path = checkpoint.sidecar_files().path(FILE).unwrap_or_else(|| PathBuf::from(FILE));
            let stated = Stated { path: &path, json: &json };
            params.sampling = stated.sampling(params.sampling, "repetition_penalty")?;
            if json.get("do_sample") == Some(&Value::Bool(false)) {
                params.sampling.temperature = 0.;
            }
        }
        if let (Some(path), Some(json)) =
            (checkpoint.ollama_layer("params"), checkpoint.read_ollama_json("params")?)
        {
            let stated = Stated { path, json: &json };
            params.sampling = stated.sampling(params.sampling, "repeat_penalty")?;
            params.stop_strings = stated.stop_strings()?;
        }
        Ok(params)
    }
}

/// Keys of a GGUF file for what `generation_config.json` says: llama.cpp's converter copies it.
pub const SAMPLING_KEYS: [(&str, &str); 5] = [
    ("general.sampling.temp", "temperature"),
    ("general.sampling.top_k", "top_k"),
    ("general.sampling.top_p", "top_p"),
    ("general.sampling.min_p", "min_p"),
    ("general.sampling.penalty_repeat", "repetition_penalty"),
];

/// What the metadata of a GGUF file say of sampling, by the names of `generation_config.json`; nothing for other kinds.
///
/// # Errors
/// If the file can't be read any more, or one of them is no number.
pub fn stored_sampling(checkpoint: &Checkpoint) -> Result<Map<String, Value>> {
    if checkpoint.kind() != CheckpointKind::Gguf {
        return Ok(Map::new());
    }
    let metadata = checkpoint.metadata()?;
    let mut stated = Map::new();
    for (key, name) in SAMPLING_KEYS {
        let Some(text) = metadata.get(key) else { continue };
        let number = serde_json::from_str::<Number>(text).map_err(|_| {
            let problem = format!("`{key}`: expected a number, found {text:?}");
            Error::file(checkpoint.path(), problem, "convert the model again")
        })?;
        stated.insert(name.to_owned(), number.into());
    }
    Ok(stated)
}

/// A file with parameters.
struct Stated<'a> {
    path: &'a Path,
    json: &'a Value,
}

impl Stated<'_> {
    /// `sampling` with what the file says in place of it.
    fn sampling(&self, sampling: Sampling, repetition_penalty: &str) -> Result<Sampling> {
        // What allows everything is the same as nothing.
        let top_k = match self.number("top_k")? {
            Some(k) if k.fract() != 0. => return Err(self.wrong("top_k", "a whole number")),
            Some(k) if k >= 1. => Some(k as usize),
            Some(_) => None,
            None => sampling.top_k,
        };
        let stated = Sampling {
            temperature: self.number("temperature")?.unwrap_or(sampling.temperature),
            top_k,
            top_p: self.number("top_p")?.map_or(sampling.top_p, |p| Some(p).filter(|p| *p != 1.)),
            min_p: self.number("min_p")?.map_or(sampling.min_p, |p| Some(p).filter(|p| *p != 0.)),
            repetition_penalty: self.number(repetition_penalty)?.unwrap_or(sampling.repetition_penalty),
            presence_penalty: self.number("presence_penalty")?.unwrap_or(sampling.presence_penalty),
            frequency_penalty: self.number("frequency_penalty")?.unwrap_or(sampling.frequency_penalty),
        };
        stated.validate().map_err(|error| Error::file(self.path, error.to_string(), REMEDY))?;
        Ok(stated)
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| self.wrong(key, "a number")),
        }
    }

    fn stop_strings(&self) -> Result<Vec<String>> {
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        match self.json.get("stop") {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(list)) => list
                .iter()
                .map(text)
                .collect::<Option<_>>()
                .ok_or_else(|| self.wrong("stop", "a list of texts")),
            Some(value) => text(value).map(|text| vec![text]).ok_or_else(|| self.wrong("stop", "texts")),
        }
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = self.json.get(key).map(Value::to_string).unwrap_or_default();
        Error::file(self.path, format!("`{key}`: expected {expected}, found {found}"), REMEDY)
    }
}

const REMEDY: &str = "correct the file";
