//! The files beside the weights: config.json, whose text is kept as it is but for the quantization, and those that are
//! copied.

use super::plan::ConvertPlan;
use super::published::PublishedPlan;
use crate::convert::output::Job;
use crate::convert::recipe::{Role, Spec};
use crate::convert::target::{
    bitsandbytes_config, mxfp4_config, of_bitsandbytes, quantization_config, Target,
};
use crate::staging::MANIFEST;
use candle_quant::checkpoint::{module_of, with_masked_literals, CheckpointKind, SidecarFiles};
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::{published_fields, MlxLm, EXPERT_BLOCKS};
use safetensors::Dtype;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{fmt, fs};

/// What says how weights are quantized. Both are written, and those of the source are dropped.
const QUANTIZATION: [&str; 2] = ["quantization", "quantization_config"];

/// What the reader of GGUF files says of columns in an order that no output has.
const TILED: &str = "linear_out_proj_is_tiled";

/// Files that describe the quantization, or the files, of the source.
const OF_THE_SOURCE: [&str; 6] = [
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "uqff_report.json",
    MANIFEST,
];

impl ConvertPlan {
    /// The text of config.json; `None` if the source has none and there is nothing to say.
    pub(in crate::convert) fn config_json(&self) -> Result<Option<String>> {
        if !self.target.kind().has_config() {
            return Ok(None);
        }
        let path = self.source.sidecar_files().path("config.json");
        // What a file says itself is what its tensors were read by. Beside it may be the config of another model.
        let path = path.filter(|_| !self.describes_itself());
        let mut text = match &path {
            Some(path) => {
                fs::read_to_string(path).map_err(|error| Error::Io { path: path.clone(), error })?
            }
            None if self.source.config().is_object() => self.source.config().to_string(),
            None => "{}".to_owned(),
        };
        let described = self.top_format().filter(|_| self.target.kind().describes_formats());
        let quantization = described.map(|top| self.quantization(top)).transpose()?;
        if path.is_none() && quantization.is_none() && text == "{}" {
            return Ok(None);
        }
        let wrong = |error: serde_json::Error| {
            let path = path.clone().unwrap_or_default();
            Error::file(&path, format!("malformed JSON: {error}"), "correct it or fetch it again")
        };
        let added = match (self.target, &self.published) {
            (_, Some(published)) => {
                if published.is_text() {
                    text = text_alone(text).map_err(wrong)?;
                }
                self.of_transformers(published)?
            }
            (Target::Mlx, None) => match MlxLm::of(self.source.config()).larger {
                Some(larger) => {
                    let inner = rewrite(&text, None, self.published()).map_err(wrong)?;
                    text = self.within_larger(larger, &inner);
                    Vec::new()
                }
                None => self.published(),
            },
            (
                Target::Dense
                | Target::Uqff
                | Target::Ollama
                | Target::Gguf
                | Target::Slm1
                | Target::HuggingFace,
                None,
            ) => Vec::new(),
        };
        rewrite(&text, quantization.as_deref(), added).map(Some).map_err(wrong)
    }

    /// What transformers looks for: its class, the dtype, and beside the text of a larger model what is stated of both.
    fn of_transformers(&self, published: &PublishedPlan) -> Result<Vec<Added>> {
        const TYPE: [&str; 2] = ["dtype", "torch_dtype"];
        let stated = |config: &Value, key: &str| config.get(key).filter(|value| !value.is_null()).cloned();
        let config = self.source.config();
        let text = config.get("text_config").filter(|_| published.is_text());
        let mut fields: Vec<(&str, Value)> = Vec::new();
        if let Some(text) = text {
            let of_both = ["tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"];
            let is_missing = |key: &&str| *key == "tie_word_embeddings" || stated(text, key).is_none();
            let of_both = of_both.into_iter().filter(is_missing);
            fields.extend(of_both.filter_map(|key| Some((key, stated(config, key)?))));
        }
        if let Some(top) = self.top {
            fields.push(("quantization_config", self.compressed_tensors(top)?));
        }
        let written = text.unwrap_or(config);
        if published.is_text() && stated(written, "architectures").is_none() {
            fields.push(("architectures", json!([published.class()])));
        }
        if let Some(dtype) = self.dtype_name() {
            let known: Vec<_> = TYPE.into_iter().filter(|key| stated(written, key).is_some()).collect();
            let keys = if known.is_empty() { vec!["torch_dtype"] } else { known };
            let differs = |key: &&str| written.get(*key).and_then(Value::as_str) != Some(dtype);
            fields.extend(keys.into_iter().filter(differs).map(|key| (key, dtype.into())));
        }
        let of = |(key, value): (&str, _)| Added { object: None, key: key.into(), value };
        Ok(fields.into_iter().map(of).collect())
    }

    /// The config of a larger model, of which `inner` describes the text, with what programs look for at its top.
    fn within_larger(&self, model_type: &str, inner: &str) -> String {
        let config = self.source.config();
        let of_both =
            ["tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"];
        let stated = of_both.into_iter().filter_map(|key| Some((key, config.get(key)?)));
        let fields = std::iter::once(format!("\"model_type\": {}", json!(model_type)))
            .chain(stated.map(|(key, value)| format!("{}: {value}", json!(key))));
        let fields: Vec<_> = fields.chain([format!("\"text_config\": {}", inner.trim_end())]).collect();
        format!("{{{}}}", fields.join(", "))
    }

    /// What compressed-tensors says of the weights, transformers of experts in MXFP4, or bitsandbytes.
    fn compressed_tensors(&self, top: Spec) -> Result<Value> {
        if self.jobs().any(|job| job.format().is_some() && job.planned.name.ends_with(EXPERT_BLOCKS)) {
            return Ok(mxfp4_config());
        }
        let module = |job: &Job| module_of(&job.planned.name).unwrap_or(&job.planned.name).to_owned();
        let packed: BTreeMap<_, _> =
            self.jobs().filter_map(|job| Some((module(job), job.becomes()?))).collect();
        let is_dense = |job: &&Job| {
            let planned = &job.planned;
            job.format().is_none() && planned.role != Role::Embed && matches!(*planned.shape, [_, _])
        };
        let mut dense: Vec<_> = self.jobs().filter(is_dense).map(module).collect();
        // A head that is the embedding is a linear layer as well.
        const HEAD: &str = "lm_head";
        if !packed.contains_key(HEAD) && !dense.iter().any(|module| module == HEAD) {
            dense.push(HEAD.to_owned());
        }
        Ok(match of_bitsandbytes(self.jobs())? {
            Some((weight, format)) => bitsandbytes_config(format, &weight.outputs, dense),
            None => quantization_config(top, &packed, dense),
        })
    }

    /// The dtype of most of the dense elements that are written.
    fn dtype_name(&self) -> Option<&'static str> {
        const NAMES: [(Dtype, &str); 3] =
            [(Dtype::F16, "float16"), (Dtype::BF16, "bfloat16"), (Dtype::F32, "float32")];
        let mut counts = BTreeMap::<&str, u64>::new();
        for output in self.jobs().filter(|job| job.format().is_none()).flat_map(|job| &job.outputs) {
            let Some((_, name)) = NAMES.into_iter().find(|(dtype, _)| *dtype == output.dtype) else {
                continue;
            };
            let count = counts.entry(name).or_default();
            *count = count.saturating_add(output.bytes);
        }
        counts.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(name, _)| name)
    }

    /// What mlx-lm reads under other names, at the top, and in the object of the text.
    fn published(&self) -> Vec<Added> {
        let of = |config: &Value| published_fields(config).into_iter().collect::<Vec<_>>();
        let config = self.source.config();
        let top = of(config).into_iter().map(|(key, value)| Added { object: None, key, value });
        let text = config.get("text_config").map(of).unwrap_or_default();
        top.chain(text.into_iter().map(|(key, value)| Added { object: Some("text_config"), key, value }))
            .collect()
    }

    /// What the config says of the format: one for all, and one for each module that has another.
    fn quantization(&self, top: QuantFormat) -> Result<String> {
        let mut object = describe(top);
        for job in self.jobs() {
            let module = module_of(&job.planned.name).unwrap_or(&job.planned.name);
            let has_global_scale = job.outputs.iter().any(|output| output.name.ends_with(".global_scale"));
            match job.format() {
                Some(format) if format != top || has_global_scale => {
                    let mut entry = describe(format);
                    if has_global_scale {
                        entry.insert("global_scale".into(), true.into());
                    }
                    if object.insert(module.to_owned(), entry.into()).is_some() {
                        let found = "a key of the config that is needed for another purpose";
                        return Err(Error::mismatch(format!("`{module}`"), "the path of a module", found));
                    }
                }
                _ => {}
            }
        }
        Ok(Value::from(object).to_string())
    }

    /// Whether the source has a config in the file of its weights.
    fn describes_itself(&self) -> bool {
        matches!(self.source.kind(), CheckpointKind::Gguf | CheckpointKind::Slm1)
    }

    /// Files that are copied: tokenizer, chat template, generation settings and the like. Of the folder that a single file
    /// happens to lie in, those that are read with it, and no others.
    pub(in crate::convert) fn copied_files(&self) -> Result<Vec<(String, PathBuf)>> {
        let (files, kind) = (self.source.sidecar_files().all()?.into_iter(), self.target.kind());
        let is_single_file = self.describes_itself() && self.source.path().is_file();
        let belongs = |name: &str| !is_single_file || SidecarFiles::is_companion(name);
        Ok(files.filter(|(name, _)| is_copied(name) && belongs(name) && kind.copies(name)).collect())
    }
}

fn is_copied(name: &str) -> bool {
    let wanted =
        [".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"].iter().any(|end| name.ends_with(end))
            || ["LICENSE", "NOTICE"].iter().any(|start| name.starts_with(start));
    let plain = !name.starts_with('.') && !name.contains(['/', '\\']);
    wanted && plain && !name.ends_with(".index.json") && !OF_THE_SOURCE.contains(&name)
}

fn describe(format: QuantFormat) -> Map<String, Value> {
    let mut object = Map::new();
    object.insert("group_size".into(), format.group_size().into());
    object.insert("bits".into(), format.bits().into());
    object.insert("mode".into(), format.mode().into());
    object
}

/// A field that the source does not have, or as null.
struct Added {
    /// The object that it is in, if not at the top.
    object: Option<&'static str>,
    key: String,
    value: Value,
}

/// What a config says of the text of a larger model; all of it, if it is of no such model.
fn text_alone(text: String) -> serde_json::Result<String> {
    let masked = with_masked_literals(&text);
    let entries: Entries = serde_json::from_str(&masked)?;
    let alone = entries.0.iter().find(|(key, value)| key == "text_config" && value.get().starts_with('{'));
    let Some((_, value)) = alone else { return Ok(text) };
    let start = value.get().as_ptr().addr() - masked.as_ptr().addr();
    Ok(text.get(start..start + value.get().len()).unwrap_or_default().to_owned())
}

/// The object `text` with other quantization entries and more fields. All else is the text as it was, in its order.
fn rewrite(text: &str, quantization: Option<&str>, added: Vec<Added>) -> serde_json::Result<String> {
    let masked = with_masked_literals(text);
    let entries: Entries = serde_json::from_str(&masked)?;
    let is_added = |key: &str| added.iter().any(|field| field.object.is_none() && field.key == key);
    let is_dropped = |key: &str| QUANTIZATION.contains(&key) || ["compression_config", TILED].contains(&key);
    let is_kept = |key: &str| !is_dropped(key) && !is_added(key);
    if quantization.is_none() && added.is_empty() && entries.0.iter().all(|(key, _)| is_kept(key)) {
        return Ok(text.to_owned());
    }
    // A value is where it was before the literals were masked.
    let written = |value: &RawValue| {
        let start = value.get().as_ptr().addr() - masked.as_ptr().addr();
        text.get(start..start + value.get().len()).unwrap_or_default().to_owned()
    };
    let mut lines: Vec<_> = entries
        .0
        .iter()
        .filter(|(key, _)| is_kept(key))
        .map(|(key, value)| (json!(key).to_string(), with_fields(written(value), key, &added)))
        .collect();
    let at_top = added.iter().filter(|field| field.object.is_none());
    lines.extend(at_top.map(|field| (json!(field.key).to_string(), field.value.to_string())));
    if let Some(quantization) = quantization {
        let value: Value = serde_json::from_str(quantization)?;
        let pretty = format!("{value:#}").replace('\n', "\n  ");
        lines.extend(QUANTIZATION.map(|key| (json!(key).to_string(), pretty.clone())));
    }
    let lines: Vec<_> = lines.iter().map(|(key, value)| format!("  {key}: {value}")).collect();
    Ok(format!("{{\n{}\n}}\n", lines.join(",\n")))
}

/// The text of the object under `key` with the fields that it gets, which the last of two of a name decides.
fn with_fields(text: String, key: &str, added: &[Added]) -> String {
    let fields: Vec<_> = added
        .iter()
        .filter(|field| field.object == Some(key))
        .map(|field| format!("{}: {}", json!(field.key), field.value))
        .collect();
    match text.trim_end().strip_suffix('}') {
        Some(inner) if !fields.is_empty() => format!("{}, {}}}", inner.trim_end(), fields.join(", ")),
        _ => text,
    }
}

/// The entries of a JSON object in their order, values as they are written.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Entries<'de>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_quantization_of_a_config_changes() {
        let text = r#"{"z": 1e-06, "quantization": {"bits": 2}, "a": {"x": [1.0, 2]}, "big": 12345678901234567890123}"#;
        let rewrite = |text: &str, quantization| rewrite(text, quantization, Vec::new());
        let written = rewrite(text, Some(r#"{"bits":4}"#)).unwrap();
        let expected = "{\n  \"z\": 1e-06,\n  \"a\": {\"x\": [1.0, 2]},\n  \"big\": 12345678901234567890123,\n  \
                        \"quantization\": {\n    \"bits\": 4\n  },\n  \"quantization_config\": {\n    \"bits\": 4\n  }\n}\n";
        assert_eq!(written, expected);
        assert_eq!(rewrite(r#"{"quantization_config": 1, "a": 2}"#, None).unwrap(), "{\n  \"a\": 2\n}\n");
        // As Python writes them.
        let text = r#"{"a": [0.0, Infinity], "quantization": NaN, "b": NaN, "c": "NaN", "d": -Infinity}"#;
        let kept = "{\n  \"a\": [0.0, Infinity],\n  \"b\": NaN,\n  \"c\": \"NaN\",\n  \"d\": -Infinity\n}\n";
        assert_eq!(rewrite(text, None).unwrap(), kept);
        assert_eq!(rewrite(r#"{"a": Infinity}"#, None).unwrap(), r#"{"a": Infinity}"#);
        assert!(rewrite("[1]", None).unwrap_err().to_string().contains("a JSON object"));
    }

    #[test]
    fn fields_are_added_at_the_top_and_in_an_object() {
        let added = |object, key: &str| Added { object, key: key.into(), value: 1.into() };
        let fields = || vec![added(None, "theta"), added(Some("text_config"), "inner")];
        let text = r#"{"text_config": {"x": 1e4}, "theta": null, "z": {}}"#;
        let expected = "{\n  \"text_config\": {\"x\": 1e4, \"inner\": 1},\n  \"z\": {},\n  \"theta\": 1\n}\n";
        assert_eq!(rewrite(text, None, fields()).unwrap(), expected);
    }

    #[test]
    fn weights_indices_and_the_quantization_of_others_are_not_copied() {
        for name in ["tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "LICENSE"] {
            assert!(is_copied(name), "{name}");
        }
        let others = [
            "model.safetensors",
            "model.safetensors.index.json",
            "config.json",
            ".gitattributes",
            "README.md",
        ];
        for name in others.into_iter().chain(OF_THE_SOURCE) {
            assert!(!is_copied(name), "{name}");
        }
    }
}
