//! Where a checkpoint has its chat template.

use super::template::{DEFAULT, MAX_SOURCE};
use super::Template;
use candle_quant::{Checkpoint, Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The names under which tokenizers have special tokens.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl Template {
    /// The template of a checkpoint, with the special tokens of its tokenizer; `None` if it has none.
    ///
    /// It is in the first of these that has one: `chat_template.jinja`, `tokenizer_config.json` (one, or several by
    /// name), `chat_template.json`, the metadata of a GGUF file. With tools, a template called `tool_use` is taken.
    ///
    /// # Errors
    /// If a file can't be read, the template is not Jinja, or is that of an Ollama model, which is not Jinja either.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let Some((file, templates)) = beside(checkpoint)? else { return stored(checkpoint) };
        let path = checkpoint.sidecar_files().path(file).unwrap_or_else(|| PathBuf::from(file));
        let template = Self::named(path, templates)?;
        Ok(Some(template.with_special_tokens(special_tokens(checkpoint)?)))
    }
}

type Templates = BTreeMap<String, String>;

/// The templates in a file beside the weights, and which one that is.
fn beside(checkpoint: &Checkpoint) -> Result<Option<(&'static str, Templates)>> {
    const JINJA: &str = "chat_template.jinja";
    if let Some(template) = checkpoint.read_text(JINJA, MAX_SOURCE)? {
        return Ok(Some((JINJA, BTreeMap::from([(DEFAULT.to_owned(), template)]))));
    }
    for file in ["tokenizer_config.json", "chat_template.json"] {
        let json = checkpoint.read_json(file)?.unwrap_or_default();
        let templates = match json.get("chat_template") {
            None | Some(Value::Null) => continue,
            Some(Value::String(template)) => BTreeMap::from([(DEFAULT.to_owned(), template.clone())]),
            Some(Value::Array(list)) => {
                let text = |entry: &Value, key| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                let named = |entry| Some((text(entry, "name")?, text(entry, "template")?));
                list.iter().map(named).collect::<Option<_>>().ok_or_else(|| wrong(checkpoint, file))?
            }
            Some(_) => return Err(wrong(checkpoint, file)),
        };
        if !templates.contains_key(DEFAULT) {
            return Err(wrong(checkpoint, file));
        }
        return Ok(Some((file, templates)));
    }
    Ok(None)
}

fn wrong(checkpoint: &Checkpoint, file: &str) -> Error {
    let path = checkpoint.sidecar_files().path(file).unwrap_or_else(|| PathBuf::from(file));
    let problem = "`chat_template` is neither a text nor a list of objects with `name` and `template`, one called `default`";
    Error::file(&path, problem, "fetch the file again")
}

/// The templates in the weights' own file.
fn stored(checkpoint: &Checkpoint) -> Result<Option<Template>> {
    let stored = checkpoint.stored_chat_templates()?.filter(|stored| stored.templates.contains_key(DEFAULT));
    if let Some(stored) = stored {
        let template = Template::named(stored.path, stored.templates)?;
        return Ok(Some(template.with_special_tokens(stored.special_tokens)));
    }
    match checkpoint.ollama_layer("template") {
        Some(path) => Err(Error::Unsupported {
            what: format!(
                "{}: a chat template of Ollama, which is one of Go's text/template,",
                path.display()
            ),
            remedy: "use the model's checkpoint from Hugging Face, or the bare prompt".into(),
        }),
        None => Ok(None),
    }
}

/// What the tokenizer's files say of special tokens; each a text, or an object with a `content`.
fn special_tokens(checkpoint: &Checkpoint) -> Result<BTreeMap<String, String>> {
    let mut tokens = BTreeMap::new();
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let json = checkpoint.read_json(file)?.unwrap_or_default();
        let own = json.get("extra_special_tokens").and_then(Value::as_object).into_iter().flatten();
        let named = SPECIAL_TOKENS.iter().filter_map(|name| Some((*name, json.get(name)?)));
        for (name, value) in named.chain(own.map(|(name, value)| (name.as_str(), value))) {
            let token = value.as_str().or_else(|| value.get("content")?.as_str());
            if let (Some(token), false) = (token, tokens.contains_key(name)) {
                tokens.insert(name.to_owned(), token.to_owned());
            }
        }
    }
    Ok(tokens)
}
