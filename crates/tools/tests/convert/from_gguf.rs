//! `convert` of a GGUF file that lies among files of others: what comes out has all that belongs to it, and nothing else.

use super::common::{bundled_path, convert, files, json_file, Out};
use candle_core::{DType, Device};
use candle_quant::Checkpoint;
use candle_quant_models::chat::{Message, Template, Variables};
use candle_quant_models::generate::{self, Params};
use candle_quant_models::Model;
use candle_quant_tools::convert::{ConvertOptions, Recipe, Spec};
use serde_json::{json, Value};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use tempfile::TempDir;

const TEMPLATE: &str =
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}";
const TEXT: &str = "Once upon a time, a cat's 12 friends\n";

/// A GGUF file of the bundled model, with a chat template, in a folder of other things.
fn downloads() -> (TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    fs::create_dir(&source).unwrap();
    for (name, bytes) in files(bundled_path("tiny-bf16")) {
        fs::write(source.join(name), bytes).unwrap();
    }
    let config = source.join("tokenizer_config.json");
    let mut json = json_file(&config);
    json["chat_template"] = TEMPLATE.into();
    fs::write(config, json.to_string()).unwrap();
    let generation = source.join("generation_config.json");
    let mut json = json_file(&generation);
    for (name, value) in sampling().as_object().unwrap() {
        json[name] = value.clone();
    }
    fs::write(generation, json.to_string()).unwrap();
    let mut options = ConvertOptions::gguf(Recipe::safe(Spec::Keep));
    options.dequantize = true;
    let gguf = convert(&Checkpoint::open(&source).unwrap(), &options);
    let downloads = tempfile::tempdir().unwrap();
    let file = downloads.path().join("some-model.gguf");
    fs::copy(gguf.path().join("model.gguf"), &file).unwrap();
    for (name, text) in [
        ("setup.py", "import os"),
        ("requirements.txt", "numpy"),
        ("LICENSE", "of something else"),
        ("package.json", "{}"),
        ("report.jinja", "{{ x }}"),
        ("config.json", r#"{"model_type": "of another model", "hidden_size": 1}"#),
    ] {
        fs::write(downloads.path().join(name), text).unwrap();
    }
    let checkpoint = Checkpoint::open(&file).unwrap();
    (downloads, checkpoint)
}

/// How the model's text is sampled.
fn sampling() -> Value {
    json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.5})
}

fn targets() -> [(&'static str, ConvertOptions); 4] {
    let packed = || Recipe::safe("afq4".parse().unwrap());
    [
        ("dense", ConvertOptions::dense()),
        ("MLX", ConvertOptions::mlx(packed())),
        ("Hugging Face", ConvertOptions::hugging_face(Recipe::safe("mxfp4".parse().unwrap()))),
        ("UQFF", ConvertOptions::uqff(packed())),
    ]
}

fn ids(checkpoint: &Checkpoint, text: &str) -> Vec<u32> {
    let tokenizer = generate::load_tokenizer(checkpoint).unwrap();
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

fn prompt(checkpoint: &Checkpoint) -> String {
    let template = Template::from_checkpoint(checkpoint).unwrap().unwrap();
    template.render(&[Message::new("user", TEXT)], &Variables::default()).unwrap()
}

fn generated(checkpoint: &Checkpoint) -> Vec<u32> {
    let mut params = Params::from_checkpoint(checkpoint).unwrap();
    (params.sampling.temperature, params.sample_len) = (0., 40);
    let tokenizer = generate::load_tokenizer(checkpoint).unwrap();
    let mut model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    let go_on = |_: &str| ControlFlow::Continue(());
    generate::generate(&mut model, &tokenizer, TEXT, &params, go_on).unwrap().tokens
}

fn json_of(out: &Out, name: &str) -> Value {
    json_file(out.path().join(name))
}

#[test]
fn the_output_has_what_belongs_to_it_and_no_more() {
    let (_downloads, file) = downloads();
    for (target, options) in targets() {
        let out = convert(&file, &options);
        let written: Vec<_> = files(out.path())
            .into_keys()
            .filter(|name| ![".safetensors", ".uqff"].iter().any(|end| name.ends_with(end)))
            .filter(|name| !["candle-quant.json", "model.safetensors.index.json"].contains(&name.as_str()))
            .filter(|name| name != "uqff_report.json")
            .collect();
        let expected = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
        assert_eq!(written, expected, "{target}");
        let config = json_of(&out, "config.json");
        assert_eq!(config["hidden_size"], file.config()["hidden_size"], "{target}");
        let tokenizer = json_of(&out, "tokenizer_config.json");
        let end = "<|endoftext|>";
        let stated = json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
            "bos_token": end, "eos_token": end, "pad_token": end, "chat_template": TEMPLATE});
        assert_eq!(tokenizer, stated, "{target}");
        let generation = json_of(&out, "generation_config.json");
        let mut stated = sampling();
        for id in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            stated[id] = 0.into();
        }
        assert_eq!(generation, stated, "{target}");
    }
}

#[test]
fn the_output_runs_as_the_file() {
    let (_downloads, file) = downloads();
    let text = fs::read_to_string(bundled_path("heldout.txt")).unwrap();
    for (target, options) in targets() {
        let out = convert(&file, &options);
        let written = Checkpoint::open(out.path()).unwrap();
        assert_eq!(ids(&written, &text), ids(&file, &text), "{target}");
        assert_eq!(prompt(&written), prompt(&file), "{target}");
        assert_eq!(prompt(&written), format!("<|endoftext|>{TEXT}<|endoftext|>"), "{target}");
        assert_eq!(generate::stop_tokens(&written).unwrap(), [0], "{target}");
        let [sampled, stated] =
            [&written, &file].map(|checkpoint| Params::from_checkpoint(checkpoint).unwrap().sampling);
        assert_eq!((&sampled, stated.top_k, stated.temperature), (&stated, Some(20), 0.6), "{target}");
        let tokens = generated(&written);
        match target {
            "dense" => assert_eq!(tokens, generated(&file)),
            _ => assert!(!tokens.is_empty(), "{target}"),
        }
    }
}

/// What a user has put beside the file is what `run` takes, and so it is what the output has.
#[test]
fn companions_beside_the_file_come_first() {
    let (downloads, file) = downloads();
    let beside = |name: &str, text: &str| fs::write(downloads.path().join(name), text).unwrap();
    let mut other = json_file(bundled_path("tiny-bf16").join("tokenizer.json"));
    other["added_tokens"][0]["special"] = false.into();
    beside("tokenizer.json", &other.to_string());
    beside("chat_template.jinja", "beside{{ bos_token }}");
    beside("generation_config.json", r#"{"eos_token_id": [0, 7]}"#);
    let options = ConvertOptions::dense();
    let out = convert(&file, &options);
    assert_eq!(json_of(&out, "tokenizer.json"), other);
    assert_eq!(json_of(&out, "generation_config.json"), json!({"eos_token_id": [0, 7]}));
    // The template beside is the only one: a second one would be another for some programs.
    assert_eq!(json_of(&out, "tokenizer_config.json")["chat_template"], Value::Null);
    assert_eq!(json_of(&out, "tokenizer_config.json")["eos_token"], "<|endoftext|>");
    assert_eq!(prompt(&Checkpoint::open(out.path()).unwrap()), "beside<|endoftext|>");
    beside("tokenizer_config.json", r#"{"bos_token": "<s>"}"#);
    let out = convert(&file, &options);
    assert_eq!(json_of(&out, "tokenizer_config.json"), json!({"bos_token": "<s>"}));
    assert!(!out.path().join("setup.py").exists());
}

/// A folder is a model as a whole, whatever its weights are in.
#[test]
fn of_a_folder_everything_is_copied() {
    let (downloads, _) = downloads();
    let folder = Checkpoint::open(downloads.path()).unwrap();
    let out = convert(&folder, &ConvertOptions::dense());
    for name in ["setup.py", "LICENSE", "tokenizer.json", "tokenizer_config.json"] {
        assert!(out.path().join(name).exists(), "{name}");
    }
    assert_eq!(json_of(&out, "config.json")["hidden_size"], folder.config()["hidden_size"]);
}

/// Without a template, or with several of them.
#[test]
fn templates_are_written_as_the_file_has_them() {
    use super::gguf_writer::{f32_tensor, path, write, File};
    let file = || {
        File::llama()
            .texts("tokenizer.ggml.tokens", &["<s>", "</s>"])
            .u32("tokenizer.ggml.bos_token_id", 0)
            .u32("tokenizer.ggml.eos_token_id", 1)
            .tensor(f32_tensor("output_norm.weight", &[64], &[1.; 64]))
    };
    let converted = |file: File| {
        let dir = write(&file.bytes());
        convert(&Checkpoint::open(path(&dir)).unwrap(), &ConvertOptions::dense())
    };
    let out = converted(file());
    assert!(!out.path().join("tokenizer_config.json").exists(), "a tokenizer that is not named is none");
    let several =
        file().text("tokenizer.chat_template", "usual").text("tokenizer.chat_template.tool_use", "tools");
    let out = converted(several);
    let written = json_of(&out, "tokenizer_config.json");
    let templates =
        json!([{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "tools"}]);
    assert_eq!((&written["chat_template"], &written["bos_token"]), (&templates, &json!("<s>")));
    let checkpoint = Checkpoint::open(Path::new(&out.path())).unwrap();
    let template = Template::from_checkpoint(&checkpoint).unwrap().unwrap();
    assert_eq!(template.render(&[], &Variables::default().with("tools", ["x"])).unwrap(), "tools");
}
