//! `convert --to gguf`: tokenizers come back from the file as they were beside the weights.

use super::common::{bundled_path, convert, json_file};
use candle_quant::checkpoint::Checkpoint;
use candle_quant_models::generate::{load_tokenizer, stored_tokenizer};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Target};
use serde_json::{json, Value};
use std::collections::HashMap;
use std::fs;
use tempfile::TempDir;
use tokenizers::Tokenizer;

/// The bundled model with another tokenizer.
fn source(tokenizer: &Value) -> (TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = json_file(bundled_path("tiny-bf16").join("config.json"));
    // Ids of the bundled tokenizer.
    config
        .as_object_mut()
        .unwrap()
        .retain(|key, _| !["bos_token_id", "eos_token_id"].contains(&key.as_str()));
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let weights = "model.safetensors";
    fs::copy(bundled_path("tiny-bf16").join(weights), folder.path().join(weights)).unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

fn options() -> ConvertOptions {
    ConvertOptions::gguf(Target::Gguf.usual_recipe("q8_0".parse().unwrap()))
}

/// Its tokenizer from the file that it becomes, alone, and one more value of that file.
fn written(tokenizer: &Value) -> (Tokenizer, String) {
    let (_folder, checkpoint) = source(tokenizer);
    let out = convert(&checkpoint, &options());
    let alone = tempfile::tempdir().unwrap();
    let path = alone.path().join("alone.gguf");
    fs::copy(out.path().join("model.gguf"), &path).unwrap();
    let file = Checkpoint::open(&path).unwrap();
    let values = file.gguf_values().unwrap();
    let pre = format!("{:?}", values["tokenizer.ggml.pre"]);
    (stored_tokenizer(&file).unwrap().unwrap(), pre)
}

/// With steps that cut text, byte by byte behind them.
fn cut_by(steps: &[Value], use_regex: bool, normalizer: Value, ignores_merges: bool) -> Value {
    let mut tokenizer = json_file(bundled_path("tiny-bf16").join("tokenizer.json"));
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let steps: Vec<_> = steps.iter().cloned().chain([bytes]).collect();
    tokenizer["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
    tokenizer["normalizer"] = normalizer;
    tokenizer["model"]["ignore_merges"] = json!(ignores_merges);
    tokenizer
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

const TEXT: &str = "Hello'Ve WORLD 1234567 at 12:30,  it's WE'RE iPhone\n\n  foo\tbar\r\nna\u{ef}ve cafe\u{301} \u{4e2d}\u{6587} \u{967}\u{968} \u{bd} x=a+b*(c-d)/e; //!\n   ";

/// As the published files have them.
#[test]
fn words_are_cut_as_before() {
    let digits = json!({"type": "Digits", "individual_digits": true});
    let composed = json!({"type": "NFC"});
    let contractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
    let after = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let llama3 = format!("{contractions}{after}");
    let qwen2 = llama3.replace("{1,3}", "");
    let in_full = format!("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]){after}");
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
    let word = |end: &str| {
        format!(r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}")
    };
    let rest = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let gpt_4o = format!(r"{}|\p{{N}}{{1,3}}{rest}", word(&format!("{contractions}?")));
    let tekken = format!(r"{}|\p{{N}}{rest}", word(""));
    let deepseek_v3 = [
        split(r"\p{N}{1,3}"),
        split("[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"),
        split(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ),
    ];
    for (steps, use_regex, normalizer, ignores_merges, name) in [
        (vec![], true, Value::Null, false, "gpt-2"),
        (vec![digits.clone()], true, Value::Null, false, "smollm"),
        (vec![digits], true, composed.clone(), false, "command-r"),
        (vec![split(&qwen2)], false, composed.clone(), false, "qwen2"),
        (
            vec![split(&qwen2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"))],
            false,
            composed.clone(),
            false,
            "qwen35",
        ),
        (vec![split(&llama3)], false, Value::Null, true, "llama-bpe"),
        (vec![split(&in_full)], false, json!({"type": "Sequence", "normalizers": []}), false, "chatglm-bpe"),
        (vec![split(&gpt_4o)], false, Value::Null, false, "gpt-4o"),
        (vec![split(&tekken)], false, Value::Null, false, "tekken"),
        (deepseek_v3.to_vec(), false, Value::Null, false, "deepseek-v3"),
    ] {
        let published = cut_by(&steps, use_regex, normalizer, ignores_merges);
        let (built, pre) = written(&published);
        assert!(pre.contains(&format!("{name:?}")), "{name}: {pre}");
        let published = Tokenizer::from_bytes(published.to_string()).unwrap();
        let [ours, theirs] = [&built, &published].map(|tokenizer| tokenizer.encode(TEXT, false).unwrap());
        assert_eq!(ours.get_tokens(), theirs.get_tokens(), "{name}");
        assert_eq!(
            built.decode(ours.get_ids(), true).unwrap(),
            published.decode(ours.get_ids(), true).unwrap()
        );
    }
}

#[test]
fn what_llama_cpp_has_no_name_for_is_left_out_with_a_note() {
    for (steps, normalizer) in [
        (vec![split(r"\p{N}{1,4}")], Value::Null),
        (vec![json!({"type": "Digits", "individual_digits": false})], Value::Null),
        (
            vec![
                json!({"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Removed", "invert": false}),
            ],
            Value::Null,
        ),
        (vec![], json!({"type": "NFC"})),
        (vec![], json!({"type": "Lowercase"})),
    ] {
        let (_folder, checkpoint) = source(&cut_by(&steps, true, normalizer, false));
        let plan = ConvertPlan::new(&checkpoint, &options()).unwrap();
        let notes = plan.notes().join("\n");
        assert!(notes.contains("the GGUF file has no tokenizer"), "{steps:?}: {notes}");
    }
}

/// Tokens of `tests/fixtures/gguf/sentencepiece.json`, which say what llama.cpp makes of its texts.
#[test]
fn tokenizers_of_sentencepiece_come_back() {
    let fixture =
        json_file(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/gguf/sentencepiece.json"));
    let list = |key: &str| fixture[key].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let tokens: Vec<String> = list("tokens").iter().map(text).collect();
    let ids: HashMap<&str, usize> = tokens.iter().zip(0..).map(|(token, id)| (token.as_str(), id)).collect();
    // Scores of the training are 0, -1, -2 ... by the order of merges, below the characters.
    let mut merges = Vec::new();
    for (token, score) in tokens.iter().zip(list("scores")) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let cuts = cuts.filter(|(left, right)| ids.contains_key(left) && ids.contains_key(right));
        merges.extend(cuts.map(|(left, right)| (score.as_f64().unwrap(), left.to_owned(), right.to_owned())));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    let merges: Vec<_> = merges.into_iter().map(|(_, left, right)| [left, right]).collect();
    let added = tokens.iter().zip(list("types")).enumerate().filter_map(|(id, (token, kind))| {
        let kind = kind.as_u64().unwrap();
        ([2, 3, 4].contains(&kind)).then(|| {
            json!({"id": id, "content": token, "special": kind != 4, "normalized": false,
                "lstrip": false, "rstrip": false, "single_word": false})
        })
    });
    let replace =
        |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let space = "\u{2581}";
    for (kind, has_prefix) in [("prefix", true), ("no prefix", false)] {
        let prefix = has_prefix.then(|| json!({"type": "Prepend", "prepend": space}));
        let normalizers: Vec<_> = prefix.into_iter().chain([replace(" ", space)]).collect();
        let mark = |token: &str, id| json!({token: {"id": token, "ids": [id], "tokens": [token]}});
        let piece = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let sequence = json!({"Sequence": {"id": "A", "type_id": 0}});
        let (single, special) = match kind {
            "prefix" => (json!([piece("<s>"), sequence]), mark("<s>", 1)),
            _ => (json!([sequence, piece("</s>")]), mark("</s>", 2)),
        };
        let published = json!({
            "version": "1.0",
            "added_tokens": added.clone().collect::<Vec<_>>(),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "post_processor": {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special},
            "decoder": {"type": "Sequence", "decoders": [replace(space, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": ids, "merges": merges},
        });
        let (_folder, checkpoint) = source(&published);
        let beside = load_tokenizer(&checkpoint).unwrap();
        let (built, _) = written(&published);
        for (text, expected) in list("texts").iter().zip(fixture["encoded"][kind].as_array().unwrap()) {
            let text = text.as_str().unwrap();
            for tokenizer in [&beside, &built] {
                let ids = json!(tokenizer.encode(text, true).unwrap().get_ids());
                assert_eq!(&ids, expected, "{kind}: {text:?}");
            }
        }
    }
}
