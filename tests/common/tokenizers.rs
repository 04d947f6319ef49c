//! Files beside weights: tokenizers of all kinds, and what else is read before text is generated.

use candle_quant::Checkpoint;
use candle_quant_models::generate::{load_tokenizer, TextStream};
use serde_json::{json, Map, Value};
use std::fs;

/// Tokenizers of all kinds, small.
pub fn tokenizers() -> Vec<Value> {
    let tiny =
        fs::read_to_string(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny/tokenizer.json")).unwrap();
    let special = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let letters: Vec<_> = ('a'..='z').map(String::from).collect();
    let scored: Vec<_> = std::iter::once(json!(["<unk>", 0.0]))
        .chain(["\u{2581}", "\u{2581}the", "on", "ti", "me"].map(|token| json!([token, -1.5])))
        .chain(letters.iter().map(|letter| json!([letter, -3.0])))
        .collect();
    let pieces: Map<_, _> = ["[UNK]", "[CLS]", "[SEP]", "##ce", "on", "##e"]
        .into_iter()
        .map(String::from)
        .chain(letters.iter().cloned())
        .zip(0..)
        .map(|(token, id)| (token, json!(id)))
        .collect();
    let template = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]},
            "[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}}});
    // A table of 256 units without any replacement.
    let charsmap = format!("AAQA{}AAA=", "AAAA".repeat(341));
    let padding = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]"});
    let truncation = json!({"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0});
    vec![
        serde_json::from_str(&tiny).unwrap(),
        json!({"version": "1.0", "truncation": truncation, "padding": padding,
            "added_tokens": [special(0, "<unk>")],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": charsmap},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
            "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
            "post_processor": null,
            "decoder": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
            "model": {"type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": false}}),
        json!({"version": "1.0", "truncation": null, "padding": padding,
            "added_tokens": [special(1, "[CLS]"), special(2, "[SEP]")],
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": template,
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": pieces}}),
        json!({"version": "1.0", "truncation": truncation, "padding": null, "added_tokens": [],
            "normalizer": {"type": "Prepend", "prepend": "\u{2581}"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 4},
                {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false},
                {"type": "Punctuation", "behavior": "Isolated"}, {"type": "Digits", "individual_digits": true}]},
            "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 1}, {"type": "CTC", "pad_token": "a",
                "word_delimiter_token": "|", "cleanup": true}]},
            "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": pieces}}),
    ]
}

/// The files, as they should be.
pub fn companions() -> Vec<(&'static str, Value)> {
    let tokens = json!({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>"});
    let config = json!({"tokenizer_class": "X", "model_max_length": 1e30, "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"0": {"content": "<s>", "special": true}}});
    let others = [
        ("generation_config.json", json!({"eos_token_id": [1, 2], "temperature": 0.7, "top_p": 0.9})),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", tokens),
    ];
    tokenizers().into_iter().map(|tokenizer| ("tokenizer.json", tokenizer)).chain(others).collect()
}

/// Does what generating text would do with the tokenizer. An error is one, a panic is none.
pub fn use_all(checkpoint: &Checkpoint) -> candle_quant::Result<()> {
    let tokenizer = load_tokenizer(checkpoint)?;
    let ids: Vec<u32> = (0..40).chain([u32::MAX]).collect();
    let mut stream = TextStream::new(&tokenizer, &ids[..3])?;
    for id in ids {
        stream.push(id)?;
    }
    stream.finish().map(|_| ())
}
