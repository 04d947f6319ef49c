//! The tokenizer inside the file.

use crate::checkpoint::rejected;
use crate::common::{bundled, byte_tokenizer};
use crate::writer::{f32_tensor, path, write, File, ARRAY, U32};
use candle_quant::{Checkpoint, Result};
use candle_quant_models::generate::load_tokenizer;
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, RunOptions};
use serde_json::Value;
use std::fs;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer};

/// The `tokenizer.json` of the bundled model: byte-level BPE, cut as GPT-2 does.
fn original() -> (Tokenizer, Value) {
    let path = bundled("tiny-bf16").tokenizer_file().unwrap();
    let json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    (Tokenizer::from_file(path).unwrap(), json)
}

/// A file with that tokenizer.
fn file(pre: &str) -> File {
    let (_, json) = original();
    let mut tokens: Vec<(u64, String)> = json["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (id.as_u64().unwrap(), token.clone()))
        .collect();
    tokens.sort();
    let tokens: Vec<String> = tokens.into_iter().map(|(_, token)| token).collect();
    let merges: Vec<String> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()))
        .collect();
    let kinds: Vec<u8> =
        (0..tokens.len()).flat_map(|id| if id == 0 { 3i32 } else { 1 }.to_le_bytes()).collect();
    File::llama()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", &tokens)
        .texts("tokenizer.ggml.merges", &merges)
        .array("tokenizer.ggml.token_type", 5, tokens.len() as u64, &kinds)
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 0)
}

fn tokenizer(file: &File) -> Result<Tokenizer> {
    let dir = write(&file.bytes());
    load_tokenizer(&Checkpoint::open(path(&dir)).unwrap())
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

#[test]
fn a_conversion_writes_it_beside_the_weights() {
    let mut file = file("gpt-2");
    file.tensors = vec![f32_tensor("output_norm.weight", &[64], &[1.; 64])];
    let dir = write(&file.bytes());
    let plan = ConvertPlan::new(&Checkpoint::open(path(&dir)).unwrap(), &ConvertOptions::dense()).unwrap();
    let out = dir.path().join("out");
    convert::convert(&plan, &out, &RunOptions::default(), &|_| ()).unwrap();
    let written = load_tokenizer(&Checkpoint::open(&out).unwrap()).unwrap();
    let text = "Once upon a time, a cat.";
    assert_eq!(encode(&written, text), encode(&original().0, text));
}

#[test]
fn it_encodes_as_the_original() {
    let (original, _) = original();
    let text = fs::read_to_string(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/heldout.txt")).unwrap();
    let text = format!("{text}<|endoftext|>It's 1234 o'clock,  is it?\n\n");
    let built = tokenizer(&file("gpt-2")).unwrap();
    let ids = encode(&built, &text);
    assert!(ids.contains(&0) && ids.len() > 1000);
    assert_eq!(ids, encode(&original, &text));
    assert_eq!(built.decode(&ids, true).unwrap(), original.decode(&ids, true).unwrap());
}

/// The pieces that a text is cut into, with letters for bytes.
fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let mut cut = PreTokenizedString::from(text);
    tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut cut).unwrap();
    let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(piece, ..)| piece.to_owned()).collect()
}

/// Of every name that is known (`tests/peers/llama_cpp_pieces.py`).
#[test]
fn text_is_cut_as_llama_cpp_does() {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/gguf/pieces.json")).unwrap();
    let text = fixture["text"].as_str().unwrap();
    for (pre, expected) in fixture["pieces"].as_object().unwrap() {
        let expected: Vec<&str> =
            expected.as_array().unwrap().iter().map(|piece| piece.as_str().unwrap()).collect();
        assert_eq!(pieces(&tokenizer(&file(pre)).unwrap(), text), expected, "{pre}");
    }
}

/// As the published patterns of GPT-4o say, and llama.cpp does not.
#[test]
fn marks_stay_with_their_letters() {
    for pre in ["gpt-4o", "tekken", "deepseek-v3", "qwen35"] {
        let built = tokenizer(&file(pre)).unwrap();
        assert_eq!(pieces(&built, "देवनागरी देव").len(), 2, "{pre}");
    }
}

/// What llama.cpp adds to these kinds: a token in front, and whole words before merges.
#[test]
fn some_start_with_their_token() {
    let plain = encode(&tokenizer(&file("gpt-2")).unwrap(), "once");
    for pre in ["llama-bpe", "tekken"] {
        let built = tokenizer(&file(pre)).unwrap();
        assert_eq!(encode(&built, "once"), [&[0], &plain[..]].concat(), "{pre}");
        let without = tokenizer(&file(pre).bool("tokenizer.ggml.add_bos_token", 0)).unwrap();
        assert_eq!(encode(&without, "once"), plain, "{pre}");
    }
    for pre in ["glm4", "gpt-4o", "deepseek-v3", "smollm", "qwen35", "command-r"] {
        assert_eq!(encode(&tokenizer(&file(pre)).unwrap(), "once"), plain, "{pre}");
    }
}

/// They are part of what a model says: `<think>` of Qwen 3 is one. Special ones are left out of texts.
#[test]
fn tokens_that_a_text_may_have_are_shown() {
    let mut file = file("qwen2");
    for (key, _, values) in &mut file.values {
        if key == b"tokenizer.ggml.token_type" {
            // Behind the type and the count: the second and third token.
            let last = values.len();
            let types: Vec<u8> = [3i32, 4, 5].iter().flat_map(|kind| kind.to_le_bytes()).collect();
            let start = 12;
            assert!(last > start + types.len());
            values[start..start + types.len()].copy_from_slice(&types);
        }
    }
    let built = tokenizer(&file).unwrap();
    let (_, json) = original();
    let text =
        |id| json["model"]["vocab"].as_object().unwrap().iter().find(|(_, at)| **at == id).unwrap().0.clone();
    let (shown, unused) = (text(1), text(2));
    assert_eq!(built.decode(&[0, 1, 2], true).unwrap(), shown);
    assert_eq!(built.decode(&[0, 1, 2], false).unwrap(), format!("{}{shown}{unused}", text(0)));
    assert_eq!(encode(&built, &shown), [1]);
}

/// Those of Qwen and Cohere, as transformers builds them; others leave text as it is.
#[test]
fn some_compose_characters() {
    let [composed, apart] = ["caf\u{e9}", "cafe\u{301}"];
    for (pre, composes) in [
        ("qwen2", true),
        ("qwen35", true),
        ("command-r", true),
        ("gpt-2", false),
        ("llama-bpe", false),
        ("gpt-4o", false),
        ("tekken", false),
        ("deepseek-v3", false),
    ] {
        let built = tokenizer(&file(pre)).unwrap();
        assert_eq!(encode(&built, composed) == encode(&built, apart), composes, "{pre}");
    }
}

#[test]
fn a_tokenizer_file_beside_the_weights_wins() {
    let dir = write(&file("gpt-2").bytes());
    byte_tokenizer().save(dir.path().join("tokenizer.json"), false).unwrap();
    let checkpoint = Checkpoint::open(path(&dir)).unwrap();
    assert_eq!(load_tokenizer(&checkpoint).unwrap().get_vocab_size(true), 256);
}

#[test]
fn what_can_not_be_built_is_named() {
    let beside = "put the tokenizer.json of the original model beside the file";
    let pre = |pre: &str| tokenizer(&file(pre));
    rejected(pre("kimi-k2"), &["model.gguf", "the pre-tokenizer `kimi-k2`", beside]);
    let with = |key: &str, kind, bytes| {
        let mut file = file("gpt-2");
        file.values.retain(|(name, _, _)| name != format!("tokenizer.ggml.{key}").as_bytes());
        tokenizer(&file.value(&format!("tokenizer.ggml.{key}"), kind, bytes))
    };
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    rejected(with("model", 8, text("bert")), &["a tokenizer of model `bert`", beside]);
    rejected(with("model", U32, vec![0; 4]), &["`tokenizer.ggml.model` is 0", "a string"]);
    rejected(with("tokens", 6, vec![0; 4]), &["`tokenizer.ggml.tokens` is of another type"]);
    rejected(with("tokens", U32, vec![0; 4]), &["the tokenizer in it is damaged", beside]);
    let one_merge = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &text("no-such token")].concat();
    rejected(with("merges", ARRAY, one_merge), &["the tokenizer in it is damaged", beside]);
    let mut unnamed = file("gpt-2");
    unnamed.values.retain(|(name, _, _)| name != b"tokenizer.ggml.pre");
    rejected(tokenizer(&unnamed), &["a tokenizer without a named pre-tokenizer", beside]);
    rejected(tokenizer(&File::llama()), &["there is no tokenizer.json", "model.gguf"]);
}

/// Each element is a value of its own in memory, whatever it takes in the file.
#[test]
fn vocabularies_without_end_are_refused() {
    let count = (1u64 << 21) + 1;
    let file = file("gpt-2").array("tokenizer.ggml.token_type", 0, count, &vec![1; count as usize]);
    let mut file = file;
    // The one that was there before.
    let first = file.values.iter().position(|(key, ..)| key == b"tokenizer.ggml.token_type").unwrap();
    file.values.remove(first);
    rejected(tokenizer(&file), &["a tokenizer of more than 2097152 tokens and merges"]);
}
