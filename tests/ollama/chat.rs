//! Prompts and parameters of a model, which are layers of their own.

use crate::ollama::{Model, INT4};
use candle_quant::checkpoint::Checkpoint;
use candle_quant_models::chat::{Message, Template, Variables};
use candle_quant_models::generate::{Params, Sampling};
use serde_json::json;
use std::fs;

fn model() -> Model {
    Model::of(&json!({}), &json!({"quant_type": "int4", "group_size": "64"}), &INT4)
}

#[test]
fn a_template_of_go_is_an_error_that_says_so() {
    let mut model = model();
    assert!(Template::from_checkpoint(&model.open().unwrap()).unwrap().is_none());
    model.add("template", None, b"{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}");
    let checkpoint = model.open().unwrap();
    let file = checkpoint.ollama_layer("template").unwrap();
    assert!(fs::read_to_string(file).unwrap().starts_with("{{ if .System }}"));
    let error = Template::from_checkpoint(&checkpoint).unwrap_err().to_string();
    let expected =
        "a chat template of Ollama, which is one of Go's text/template, is not supported; use the model's";
    assert!(error.contains(expected) && error.contains(file.to_str().unwrap()), "{error}");
}

#[test]
fn the_template_of_the_source_comes_first() {
    let mut model = model();
    model.add("template", None, b"{{ .Prompt }}");
    let config = json!({"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<s>"});
    model.add("json", Some("tokenizer_config.json"), config.to_string().as_bytes());
    let template = Template::from_checkpoint(&model.open().unwrap()).unwrap().unwrap();
    assert_eq!(template.render(&[Message::new("user", "Hi")], &Variables::default()).unwrap(), "<s>Hi");
}

#[test]
fn parameters_are_those_of_the_layer() {
    let with = |json: &str| {
        let mut model = model();
        model.add("params", None, json.as_bytes());
        let checkpoint: Checkpoint = model.open().unwrap();
        Params::from_checkpoint(&checkpoint)
    };
    let json = r#"{"stop": ["<|im_end|>", "User:"], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0,
        "repeat_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 0.5, "num_ctx": 4096}"#;
    let params = with(json).unwrap();
    assert_eq!(params.stop_strings, ["<|im_end|>", "User:"]);
    let expected = Sampling {
        temperature: 0.6,
        top_k: Some(20),
        top_p: Some(0.95),
        min_p: None,
        repetition_penalty: 1.1,
        presence_penalty: 1.5,
        frequency_penalty: 0.5,
    };
    assert_eq!(params.sampling, expected);
    let many = format!("[{}0]", "0,".repeat(1 << 20));
    assert!(with(&many).unwrap_err().to_string().contains("the budget is"));
    assert_eq!(with(r#"{"stop": "x"}"#).unwrap().stop_strings, ["x"]);
    for (json, expected) in [
        (r#"{"stop": [1]}"#, "`stop`: expected a list of texts, found [1]"),
        (r#"{"stop": 1}"#, "`stop`: expected texts, found 1"),
        (r#"{"temperature": []}"#, "`temperature`: expected a number, found []"),
        ("{", "malformed JSON"),
    ] {
        let error = with(json).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("blobs/sha256-"), "{error}");
    }
}
