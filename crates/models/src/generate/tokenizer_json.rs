//! A `tokenizer.json`, checked before the tokenizers crate sees it.
//!
//! Whoever wrote the file decides how much memory the crate takes, at loading and for each text, and where it panics. So
//! the sections are weighed first. What passes may still make the crate panic, which [`caught`](super::caught) turns into
//! an error; it takes no more memory than [`Weight::MOST`] says.

mod model;
mod pattern;
mod pipeline;

use model::Model;
use serde_json::value::RawValue;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Longer files are refused; those of large vocabularies have some 30 MB.
pub(super) const MAX_BYTES: usize = 48 << 20;

/// Longer descriptions of a normalizer, a decoder and the like are refused. Tables of characters have half a megabyte.
const MAX_SECTION_BYTES: usize = 4 << 20;
/// And those of more values, in all sections but the tokens.
const MAX_SECTION_VALUES: usize = 20_000;

/// What the crate would take in memory for a file, at most.
#[derive(Default)]
struct Weight(u64);

impl Weight {
    /// The most that a tokenizer may take.
    const MOST: u64 = 1 << 30;

    /// Bytes for each byte of the file: the crate holds several trees of its values at a time.
    const OF_BYTE: u64 = 6;
    /// Bytes for a token or a merge: its place in two trees and two maps.
    const OF_ENTRY: u64 = 300;
    /// Bytes for a node of a trie.
    const OF_NODE: u64 = 400;

    fn add(&mut self, count: usize, each: u64) -> Result<(), String> {
        self.0 = self.0.saturating_add((count as u64).saturating_mul(each));
        match self.0 <= Self::MOST {
            true => Ok(()),
            false => Err(format!(
                "its vocabulary would take {} MB of memory or more; at most {} are used",
                self.0 >> 20,
                Self::MOST >> 20
            )),
        }
    }
}

/// One of `added_tokens`.
#[derive(serde::Deserialize)]
struct AddedToken<'a> {
    #[serde(borrow)]
    content: Cow<'a, str>,
}

/// The text with what the generation of text needs, checked.
///
/// Padding and truncation are not: a prompt is as long as it is. Where the file asks for them, they are left out.
pub(super) fn checked(text: &str) -> Result<String, String> {
    let malformed = |error: serde_json::Error| format!("malformed JSON: {error}");
    let sections: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(text).map_err(malformed)?;
    let mut weight = Weight::default();
    weight.add(text.len(), Weight::OF_BYTE)?;
    let mut kept = String::with_capacity(text.len());
    let mut values = 0;
    for (name, section) in &sections {
        let in_section = |problem: String| format!("`{name}`: {problem}");
        let raw = section.get();
        match &**name {
            "version" => {}
            "model" => Model::check(raw, &mut weight).map_err(in_section)?,
            "added_tokens" => check_added(raw, &mut weight).map_err(in_section)?,
            "normalizer" | "pre_tokenizer" | "post_processor" | "decoder" => {
                values += raw.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count();
                if raw.len() > MAX_SECTION_BYTES || values > MAX_SECTION_VALUES {
                    return Err(in_section("more than any tokenizer has".into()));
                }
                let section: Value = serde_json::from_str(raw).map_err(malformed).map_err(in_section)?;
                pipeline::check(name, &section).map_err(in_section)?;
            }
            _ => continue,
        }
        let comma = if kept.is_empty() { "{" } else { "," };
        // To a text there is always room.
        let _ = write!(kept, "{comma}\"{name}\":{raw}");
    }
    if !sections.contains_key("model") {
        return Err("it has no `model`".into());
    }
    Ok(kept + "}")
}

fn check_added(raw: &str, weight: &mut Weight) -> Result<(), String> {
    let tokens: Option<Vec<AddedToken>> = serde_json::from_str(raw).map_err(|error| error.to_string())?;
    let tokens = tokens.unwrap_or_default();
    weight.add(tokens.len(), Weight::OF_ENTRY)?;
    weight.add(tokens.iter().map(|token| token.content.len()).sum(), Weight::OF_NODE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(change: impl FnOnce(&mut Value)) -> String {
        let mut tokenizer = json!({
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false}],
            "normalizer": null,
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": null,
            "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
        });
        assert!(checked(&tokenizer.to_string()).is_ok());
        change(&mut tokenizer);
        checked(&tokenizer.to_string()).unwrap_err()
    }

    #[test]
    fn padding_and_truncation_are_left_out() {
        let text = r#"{"truncation": {"max_length": 3}, "model": {"vocab": {}}, "padding": {"strategy": {"Fixed": 9}},
            "other": 1, "version": "1.0"}"#;
        assert_eq!(checked(text).unwrap(), r#"{"model":{"vocab": {}},"version":"1.0"}"#);
    }

    #[test]
    fn what_would_take_too_much_is_refused() {
        let vocabulary: Vec<_> =
            (0..3000).map(|index| json!([format!("{index}").repeat(300), 0.5])).collect();
        let error =
            refused(|json| json["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": vocabulary}));
        assert!(error.starts_with("`model`: its vocabulary would take"), "{error}");
        let error =
            refused(|json| json["added_tokens"] = json!([{"id": 1, "content": "x".repeat(3_000_000)}]));
        assert!(error.starts_with("`added_tokens`: its vocabulary would take"), "{error}");
        let many: Vec<_> = (0..30_000).map(|_| json!({"type": "NFC"})).collect();
        let error = refused(|json| json["normalizer"] = json!({"type": "Sequence", "normalizers": many}));
        assert_eq!(error, "`normalizer`: more than any tokenizer has");
    }

    #[test]
    fn what_would_grow_or_panic_is_refused() {
        let replace = |with: &str| json!({"type": "Replace", "pattern": {"String": "a"}, "content": with});
        let template = |count: usize| {
            let ids: Vec<_> = (0..count).collect();
            let tokens: Vec<_> = ids.iter().map(usize::to_string).collect();
            let piece = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
            json!({"type": "TemplateProcessing", "single": vec![piece; 3], "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": tokens}}})
        };
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        // A table of four billion units.
        let charsmap = |text: &str| json!({"type": "Precompiled", "precompiled_charsmap": text});
        for (section, value, message) in [
            ("normalizer", replace(&"b".repeat(5000)), "text would grow"),
            (
                "normalizer",
                json!({"type": "Sequence", "normalizers": vec![replace("bbbbbbbbbb"); 9]}),
                "text would grow",
            ),
            (
                "decoder",
                json!({"type": "Sequence", "decoders": vec![replace("bbbbbbbbbb"); 9]}),
                "text would grow",
            ),
            ("normalizer", json!({"type": "Prepend", "prepend": "b".repeat(5000)}), "text would grow"),
            (
                "normalizer",
                charsmap("/////w=="),
                "`precompiled_charsmap` has a table of 4294967295 bytes, and 0 are there",
            ),
            ("normalizer", charsmap("AAAAAA=="), "`precompiled_charsmap` has an empty table"),
            ("normalizer", charsmap("!"), "`precompiled_charsmap` is not base64"),
            ("post_processor", template(3000), "9000 tokens would be added"),
            (
                "post_processor",
                json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "special_tokens": {}}),
                "`x` is not among the `special_tokens`",
            ),
            ("pre_tokenizer", split(r"(?:(?:(?=a)a){1000}){1000}"), "repetitions"),
            ("pre_tokenizer", split(&"a".repeat(100_000)), "a pattern of 100000 bytes"),
            ("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), "`length` is 0"),
            (
                "decoder",
                json!({"type": "Strip", "content": " ", "start": 0, "stop": 1_000_000}),
                "`stop` is 1000000",
            ),
        ] {
            let error = refused(|json| json[section] = value.clone());
            assert!(
                error.starts_with(&format!("`{section}`: ")) && error.contains(message),
                "{value}: {error}"
            );
        }
        assert!(refused(|json| json["model"] = json!({"type": "BPE", "vocab": {"a": 1, "é": 2},
            "continuing_subword_prefix": "#", "merges": [["a", "é"]]}))
        .contains("does not begin with"));
    }

    #[test]
    fn usual_sections_pass() {
        let regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let tokenizer = json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        });
        checked(&tokenizer.to_string()).unwrap();
    }
}
