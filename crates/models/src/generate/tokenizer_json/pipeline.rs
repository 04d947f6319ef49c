//! What happens to a text before and after its tokens: normalizer, pre-tokenizer, post-processor, decoder.

use super::pattern;
use base64::prelude::{Engine, BASE64_STANDARD};
use serde_json::{Map, Value};

/// By how much replacements may make a text longer, one after the other.
const MAX_GROWTH: u64 = 4096;

/// The most tokens that are added to a text.
const MAX_ADDED: usize = 4096;

/// The most patterns of a section.
const MAX_PATTERNS: usize = 64;

/// The most characters that a decoder takes from an end of a token.
const MAX_STRIP: u64 = 4096;

/// Looks through a section.
pub(super) fn check(name: &str, section: &Value) -> Result<(), String> {
    let mut stages = Stages { growth: 1, patterns: 0 };
    stages.visit(section)?;
    match name {
        "post_processor" => visit_objects(section, &mut check_template),
        _ => Ok(()),
    }
}

struct Stages {
    growth: u64,
    patterns: usize,
}

impl Stages {
    fn visit(&mut self, section: &Value) -> Result<(), String> {
        visit_objects(section, &mut |stage| self.stage(stage))
    }

    fn stage(&mut self, stage: &Map<String, Value>) -> Result<(), String> {
        let text = |key: &str| stage.get(key).and_then(Value::as_str);
        // Where the pattern is empty, there is one more between all characters.
        for added in ["content", "prepend", "replacement", "suffix", "prefix"].into_iter().filter_map(text) {
            self.growth = self.growth.saturating_mul(added.len().max(1) as u64);
        }
        if self.growth > MAX_GROWTH {
            return Err(format!(
                "text would grow to {} times its length; at most {MAX_GROWTH} is allowed",
                self.growth
            ));
        }
        if let Some(pattern) = stage.get("pattern") {
            self.patterns += 1;
            if self.patterns > MAX_PATTERNS {
                return Err(format!("more than {MAX_PATTERNS} patterns"));
            }
            for kind in ["Regex", "String"] {
                pattern.get(kind).and_then(Value::as_str).map_or(Ok(()), pattern::check)?;
            }
        }
        if let Some(charsmap) = text("precompiled_charsmap") {
            check_charsmap(charsmap).map_err(|problem| format!("`precompiled_charsmap` {problem}"))?;
        }
        let number = |key: &str| stage.get(key).and_then(Value::as_u64);
        match (text("type"), number("length"), number("start").max(number("stop"))) {
            (Some("FixedLength"), Some(0), _) => Err("`length` is 0, expected 1 or more".into()),
            (Some("Strip"), _, Some(most)) if most > MAX_STRIP => {
                let end = if number("start") == Some(most) { "start" } else { "stop" };
                Err(format!("`{end}` is {most}, expected {MAX_STRIP} at most"))
            }
            _ => Ok(()),
        }
    }
}

/// Hands all objects, and those inside of them, to `take`.
fn visit_objects(
    value: &Value,
    take: &mut impl FnMut(&Map<String, Value>) -> Result<(), String>,
) -> Result<(), String> {
    match value {
        Value::Object(object) => {
            take(object)?;
            object.values().try_for_each(|value| visit_objects(value, take))
        }
        Value::Array(values) => values.iter().try_for_each(|value| visit_objects(value, take)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

/// A template of tokens around the text: each has to be described, and they are few.
fn check_template(stage: &Map<String, Value>) -> Result<(), String> {
    if stage.get("type").and_then(Value::as_str) != Some("TemplateProcessing") {
        return Ok(());
    }
    let mut added = 0usize;
    for template in ["single", "pair"].into_iter().filter_map(|key| stage.get(key)?.as_array()) {
        for piece in template {
            let Some(id) = piece.get("SpecialToken").and_then(|token| token.get("id")?.as_str()) else {
                continue;
            };
            let token = stage.get("special_tokens").and_then(|tokens| tokens.get(id));
            let ids = token.and_then(|token| token.get("ids")?.as_array());
            let ids = ids.ok_or_else(|| format!("`{id}` is not among the `special_tokens`"))?;
            added = added.saturating_add(ids.len());
        }
    }
    match added <= MAX_ADDED {
        true => Ok(()),
        false => Err(format!("{added} tokens would be added to each text; at most {MAX_ADDED} are allowed")),
    }
}

/// The table in front of a map of characters: its size in bytes, and as many bytes.
fn check_charsmap(text: &str) -> Result<(), String> {
    let bytes = BASE64_STANDARD.decode(text).map_err(|error| format!("is not base64: {error}"))?;
    let Some((size, rest)) = bytes.split_first_chunk() else {
        return Err("has no table".into());
    };
    match u32::from_le_bytes(*size) as usize {
        0..4 => Err("has an empty table".into()),
        size if size > rest.len() => {
            Err(format!("has a table of {size} bytes, and {} are there", rest.len()))
        }
        _ => Ok(()),
    }
}
