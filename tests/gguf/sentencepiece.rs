//! Tokenizers of sentencepiece, `llama` in the file, against llama.cpp and sentencepiece (`tests/peers/llama_cpp_sentencepiece.py`).

use crate::checkpoint::rejected;
use crate::writer::{path, write, File};
use candle_quant::{Checkpoint, Result};
use candle_quant_models::generate::load_tokenizer;
use serde_json::Value;
use tokenizers::Tokenizer;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/gguf/sentencepiece.json")).unwrap()
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn file() -> File {
    let fixture = fixture();
    let tokens = texts(&fixture["tokens"]);
    let scores = fixture["scores"].as_array().unwrap().iter();
    let scores: Vec<u8> = scores.flat_map(|score| (score.as_f64().unwrap() as f32).to_le_bytes()).collect();
    let types = fixture["types"].as_array().unwrap().iter();
    let types: Vec<u8> = types.flat_map(|kind| (kind.as_i64().unwrap() as i32).to_le_bytes()).collect();
    let count = tokens.len() as u64;
    File::llama()
        .text("tokenizer.ggml.model", "llama")
        .text("tokenizer.ggml.pre", "default")
        .texts("tokenizer.ggml.tokens", &tokens)
        .array("tokenizer.ggml.scores", 6, count, &scores)
        .array("tokenizer.ggml.token_type", 5, count, &types)
}

fn without(key: &str) -> File {
    let mut file = file();
    file.values.retain(|(name, ..)| name != format!("tokenizer.ggml.{key}").as_bytes());
    file
}

fn tokenizer(file: &File) -> Result<Tokenizer> {
    let dir = write(&file.bytes());
    load_tokenizer(&Checkpoint::open(path(&dir)).unwrap())
}

fn kinds() -> [(&'static str, File); 3] {
    let flag = |file: File, key: &str, is| file.bool(&format!("tokenizer.ggml.{key}"), is);
    let no_prefix = flag(flag(flag(file(), "add_space_prefix", 0), "add_bos_token", 0), "add_eos_token", 1);
    [("prefix", file()), ("no prefix", no_prefix), ("Phi-3", file().text("general.name", "Phi 3 of Phi-3"))]
}

#[test]
fn texts_are_encoded_as_llama_cpp_does() {
    let fixture = fixture();
    for (kind, file) in kinds() {
        let built = tokenizer(&file).unwrap();
        let expected = fixture["encoded"][kind].as_array().unwrap();
        for (text, expected) in texts(&fixture["texts"]).iter().zip(expected) {
            let ids = serde_json::json!(built.encode(text.as_str(), true).unwrap().get_ids());
            assert_eq!(&ids, expected, "{kind}: {text:?}");
        }
    }
}

/// Without special tokens. With a prefix, what follows a token that is found before has one, too, as with the published tokenizers.
#[test]
fn texts_come_back() {
    for (kind, file) in &kinds()[..2] {
        let built = tokenizer(file).unwrap();
        for text in texts(&fixture()["texts"]) {
            let special = ["</s>", "<s>", "<unk>", "<|user|>"];
            if *kind == "prefix" && special.iter().chain(&["   "]).any(|token| text.contains(token)) {
                continue;
            }
            let shown = special.iter().fold(text.clone(), |text, token| text.replace(token, ""));
            let ids = built.encode(text.as_str(), true).unwrap();
            assert_eq!(built.decode(ids.get_ids(), true).unwrap(), shown.replace('\u{2581}', " "), "{kind}");
        }
    }
}

#[test]
fn what_is_wrong_is_named() {
    let beside = "put the tokenizer.json of the original model beside the file";
    for key in ["tokens", "scores", "token_type"] {
        let problem = format!("the tokenizer in it is damaged: `tokenizer.ggml.{key}` is missing");
        rejected(tokenizer(&without(key)), &["model.gguf", &problem, beside]);
    }
    let short = without("scores").array("tokenizer.ggml.scores", 6, 1, &[0; 4]);
    rejected(tokenizer(&short), &["`tokenizer.ggml.scores` has 1 elements for 604 tokens", beside]);
    let far = file().u32("tokenizer.ggml.bos_token_id", 604);
    rejected(tokenizer(&far), &["`add_bos_token`, but no token 604", beside]);
}

/// Tokens of one letter each way: as many ways to cut as letters, for each of them.
#[test]
fn ways_to_cut_without_end_are_refused() {
    // Every sequence of two letters, up to a length, so that every cut of each is known.
    let mut tokens = vec!["<unk>".to_owned()];
    for length in 1..=18u32 {
        tokens.extend(
            (0..1u32 << length)
                .map(|bits| (0..length).map(|at| if bits >> at & 1 == 1 { 'b' } else { 'a' }).collect()),
        );
    }
    let count = tokens.len();
    let file = File::llama()
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .array("tokenizer.ggml.scores", 6, count as u64, &vec![0; 4 * count])
        .array("tokenizer.ggml.token_type", 5, count as u64, &[1, 0, 0, 0].repeat(count));
    rejected(tokenizer(&file), &["its tokens can be cut in more than 4194304 ways"]);
}
