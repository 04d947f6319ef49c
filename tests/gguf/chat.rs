//! Chat templates in the metadata.

use crate::checkpoint::rejected;
use crate::writer::{path, write, File};
use candle_quant::{Checkpoint, Result};
use candle_quant_models::chat::{Message, Template, Variables};
use candle_quant_models::generate::Params;

fn template(file: &File) -> Result<Option<Template>> {
    let dir = write(&file.bytes());
    Template::from_checkpoint(&Checkpoint::open(path(&dir)).unwrap())
}

fn render(file: &File, variables: &Variables) -> String {
    template(file).unwrap().unwrap().render(&[Message::new("user", "Hi")], variables).unwrap()
}

#[test]
fn templates_and_their_tokens_are_in_the_metadata() {
    let plain = Variables::default();
    assert!(template(&File::llama()).unwrap().is_none());
    let file = File::llama()
        .text(
            "tokenizer.chat_template",
            "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
        )
        .text("tokenizer.chat_template.tool_use", "tools")
        .texts("tokenizer.chat_templates", &["tool_use"])
        .texts("tokenizer.ggml.tokens", &["<s>", "</s>"])
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 1)
        .u32("tokenizer.ggml.padding_token_id", 2);
    assert_eq!(render(&file, &plain), "<s>Hi</s>");
    assert_eq!(render(&file, &plain.clone().with("tools", ["x"])), "tools");
    let error = template(&File::llama().u32("tokenizer.chat_template", 1)).unwrap_err().to_string();
    assert!(error.contains("`tokenizer.chat_template` is 1, expected a string"), "{error}");
}

#[test]
fn files_beside_it_come_first() {
    let dir = write(&File::llama().text("tokenizer.chat_template", "inside").bytes());
    std::fs::write(dir.path().join("chat_template.jinja"), "beside").unwrap();
    let template = Template::from_checkpoint(&Checkpoint::open(path(&dir)).unwrap()).unwrap().unwrap();
    assert_eq!(template.render(&[], &Variables::default()).unwrap(), "beside");
}

/// As the published `generation_config.json`, of which converters keep these.
#[test]
fn sampling_is_what_the_file_says() {
    let params = |file: &File| {
        let dir = write(&file.bytes());
        Params::from_checkpoint(&Checkpoint::open(path(&dir)).unwrap())
    };
    let number = |file: File, key: &str, number: f32| file.value(key, 6, number.to_le_bytes().to_vec());
    let file = number(File::llama(), "general.sampling.temp", 0.6).u32("general.sampling.top_k", 20);
    let sampling = params(&number(file, "general.sampling.penalty_repeat", 1.5)).unwrap().sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.repetition_penalty), (0.6, Some(20), 1.5));
    assert_eq!(params(&File::llama()).unwrap().sampling, Params::default().sampling);
    let hot = File::llama().text("general.sampling.temp", "hot");
    rejected(params(&hot), &["model.gguf", "`general.sampling.temp`: expected a number, found \"hot\""]);
}
