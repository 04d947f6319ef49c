//! Chat templates: what transformers makes of published ones, where checkpoints have them, and bounds.

use candle_quant::{Checkpoint, Error};
use candle_quant_models::chat::{Message, Template, Variables};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A line of the fixture, which `tests/peers/chat_templates.py` writes.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Conversation {
        conversation: String,
        messages: Vec<Message>,
    },
    Template {
        template: String,
        source: String,
        special_tokens: BTreeMap<String, String>,
        rendered: Vec<Option<Rendered>>,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Rendered {
    Text(String),
    /// What the template raises.
    Error(String),
}

fn variables(line: &str) -> Variables {
    // Not through serde_json's values, which sort keys: templates write tools as they are.
    #[derive(Deserialize)]
    struct Raw<'a> {
        #[serde(borrow)]
        variables: BTreeMap<&'a str, &'a serde_json::value::RawValue>,
    }
    let raw: Raw = serde_json::from_str(line).unwrap();
    let with = |all: Variables, (name, json): (_, &serde_json::value::RawValue)| {
        all.with_json(name, json.get()).unwrap()
    };
    raw.variables.into_iter().fold(Variables::default(), with)
}

#[test]
fn published_templates_write_what_transformers_writes() {
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/chat/templates.jsonl");
    let text = fs::read_to_string(path).unwrap();
    let today = Template::new("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    let today = || today.render(&[], &Variables::default()).unwrap();
    let (mut conversations, mut templates, mut compared, mut wrong) = (Vec::new(), 0, 0, Vec::new());
    for line in text.lines() {
        match serde_json::from_str(line).unwrap() {
            Line::Conversation { conversation, messages, .. } => {
                conversations.push((conversation, messages, variables(line)));
            }
            Line::Template { template: name, source, special_tokens, rendered } => {
                let template = Template::new(&source).unwrap();
                templates += 1;
                assert_eq!(rendered.len(), conversations.len());
                for ((conversation, messages, variables), expected) in conversations.iter().zip(rendered) {
                    let tokens = special_tokens.iter();
                    let variables =
                        tokens.fold(variables.clone(), |all, (name, token)| all.with(name, token));
                    let before = today();
                    let found = template.render(messages, &variables);
                    let is_right = match (&expected, &found) {
                        (Some(Rendered::Text(expected)), Ok(found)) => {
                            // The day may have ended meanwhile.
                            [before, today()].iter().any(|today| *found == expected.replace("@TODAY@", today))
                        }
                        (Some(Rendered::Error(expected)), Err(error)) => {
                            error.to_string().contains(&format!("refuses the conversation: {expected}"))
                        }
                        (Some(_), _) => false,
                        (None, _) => continue,
                    };
                    compared += 1;
                    if !is_right {
                        let expected = match expected {
                            Some(Rendered::Text(text)) => format!("{text:?}"),
                            Some(Rendered::Error(error)) => format!("the error {error:?}"),
                            None => String::new(),
                        };
                        wrong.push(format!("{name}, {conversation}: {found:?}\n  instead of {expected}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {compared}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(templates >= 19 && compared >= 240, "{templates} templates, {compared} texts");
}

/// With texts of 2 kB in each of 300 messages.
#[test]
fn published_templates_write_long_conversations() {
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/chat/templates.jsonl");
    let content = "All work and no play. ".repeat(90);
    let message = |index: usize| Message::new(["user", "assistant"][index % 2], &content);
    let messages: Vec<_> = (0..301).map(message).collect();
    for line in fs::read_to_string(path).unwrap().lines() {
        if let Line::Template { template, source, special_tokens, .. } = serde_json::from_str(line).unwrap() {
            if template == "smolvlm" {
                // It is for lists of parts, and goes through a text letter by letter.
                continue;
            }
            let tokens = special_tokens.iter();
            let variables =
                tokens.fold(Variables::generation_prompt(), |all, (name, token)| all.with(name, token));
            let rendered = Template::new(&source).unwrap().render(&messages, &variables);
            let rendered = rendered.unwrap_or_else(|error| panic!("{template}: {error}"));
            assert_eq!(rendered.matches(content.trim()).count(), 301, "{template}");
        }
    }
}

fn render(source: &str) -> Result<String, Error> {
    let messages = [Message::new("user", "Hello"), Message::new("assistant", "äöü \"<&>\"\n")];
    Template::new(source)?.render(&messages, &Variables::generation_prompt())
}

#[test]
fn templates_have_what_transformers_gives_them() {
    for (source, expected) in [
        ("{% if true %}\n  a\n{% endif %}\nb\n", "  a\nb"),
        ("{{ messages[1].content | tojson }}", r#""äöü \"<&>\"\n""#),
        ("{{ messages[1].content | tojson(ensure_ascii=true) }}", r#""\u00e4\u00f6\u00fc \"<&>\"\n""#),
        ("{{ {'b': [1, 2.5, none], 'a': {}} | tojson }}", r#"{"b": [1, 2.5, null], "a": {}}"#),
        ("{{ {'b': 1, 'a': []} | tojson(sort_keys=true, separators=(',', ':')) }}", r#"{"a":[],"b":1}"#),
        ("{{ {'b': [1], 'a': {}} | tojson(indent=2) }}", "{\n  \"b\": [\n    1\n  ],\n  \"a\": {}\n}"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}", "12"),
        ("{% set ns = namespace(n=0) %}{% for x in [1, 2] %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "3"),
        ("a{%- generation -%} {{ messages[0].role }} {%- endgeneration %}b", "auserb"),
        ("{{ tools is none }} {{ bos_token is defined }} {{ add_generation_prompt }} {{ none }}", "True False True None"),
        ("{{ ['a', 1.0, true, none] }} {{ ('a',) }} {{ {'a': 'b'} }}", "['a', 1.0, True, None] ('a',) {'a': 'b'}"),
        ("{{ 'x' is sequence }} {{ {} is sequence }} {{ 1 is sequence }} {{ 'x' is iterable }} {{ none is iterable }}", "True True False True False"),
        ("{{ ' a'.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'ab'.startswith(('x', 'a')) }}", "abTrue"),
        ("{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'a=b=c'.partition('=')[2] }}", "bc ab b=c"),
        ("{{ 'a=b=c'.rpartition('=')[0] }} {{ 'a b c'.rsplit(' ', 1) }}", "a=b ['a b', 'c']"),
        ("{{ 1.5e-7 }} {{ 1e16 | string }} {{ 2.0 }} {{ 1 }}", "1.5e-07 1e+16 2.0 1"),
        ("{% for k, v in {'x': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "x1a2"),
        ("{{ {'items': 1}['items'] }} {{ {'items': 1}.get('keys', 'no') }}", "1 no"),
        ("{{ messages | length }}\r\n{{ messages[-1]['role'] }}", "2\nassistant"),
    ] {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }
}

#[test]
fn reasoning_has_all_its_names_and_nulls_are_absent() {
    let template = Template::new("{{ messages[0].keys() | list }}{{ messages[0].thinking }}").unwrap();
    let render = |json: &str| {
        let messages: Vec<Message> = serde_json::from_str(json).unwrap();
        template.render(&messages, &Variables::default()).unwrap()
    };
    assert_eq!(render(r#"[{"role": "a", "content": null}]"#), "['role']");
    let all = "['thinking', 'role', 'reasoning_content']x";
    assert_eq!(render(r#"[{"role": "a", "reasoning_content": "x"}]"#), all);
    assert_eq!(
        render(r#"[{"role": "a", "reasoning": "x"}]"#),
        "['thinking', 'role', 'reasoning', 'reasoning_content']x"
    );
    assert_eq!(render(r#"[{"role": "a", "thinking": "x", "reasoning_content": "y"}]"#), all);
    let message = Message::new("assistant", "4").with("reasoning_content", "easy");
    let json = serde_json::to_string(&message).unwrap();
    assert_eq!(json, r#"{"role":"assistant","content":"4","reasoning_content":"easy"}"#);
    assert_eq!(serde_json::from_str::<Message>(&json).unwrap(), message);
    assert_eq!((message.get("content"), message.get("name")), (Some("4"), None));
    assert!(serde_json::from_str::<Message>("[]").is_err());
}

#[test]
fn hostile_templates_end_with_an_error() {
    let deep =
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let nested = format!("{{% set ns.x = {}ns.x{} %}}", "[".repeat(100), "]".repeat(100));
    let deeper = deep.replace("{% set ns.x = [ns.x] %}", &nested);
    let straight = format!("{{% set x = [] %}}{}", "{% set x = [[[[[[[[[x]]]]]]]]] %}".repeat(1900))
        + "{{ x | tojson }}";
    let (deep_json, deep_text) = (format!("{deep}{{{{ ns.x | tojson }}}}"), format!("{deep}{{{{ ns.x }}}}"));
    let own = [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "runs for too long"),
        ("{{ 'x' * 10 ** 12 }}", "the chat template"),
        ("{% set x = 'x' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}", "the chat template"),
        ("{{ range(10 ** 10) | list }}", "the chat template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template"),
        ("{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}", "the chat template"),
        ("{{ range(80000) | tojson(separators=('x' * 1000000, ':')) }}", "runs for too long"),
        ("{{ range(80000) | tojson(indent='x' * 1000000) }}", "runs for too long"),
        ("{% set ns = namespace(x=1) %}{% for i in range(150) %}{% set ns.x = {i: ns.x} %}{% endfor %}{{ ns.x | tojson(separators=(',', 'x' * 10000000)) }}", "runs for too long"),
        (deep_json.as_str(), "the chat template"),
        (deep_text.as_str(), "the chat template"),
        (deeper.as_str(), "the chat template"),
        (straight.as_str(), "nested too deep"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate; change the messages"),
        ("{{ unknown.member }}", "the chat template fails: "),
        ("{{ [1].append(2) }}", "the chat template fails: "),
    ];
    for (source, expected) in own {
        let start = Instant::now();
        let error = render(source).unwrap_err().to_string();
        assert!(error.contains(expected), "{source}: {error}");
        assert!(start.elapsed() < Duration::from_secs(60), "{source}: {:?}", start.elapsed());
    }
    for source in ["{% if %}", "{{", "{% include 'x' %}", "{{ 'x' | no_filter }}{% endfor %}"] {
        let error = Template::new(source).unwrap_err().to_string();
        assert!(error.contains("chat template: the chat template can't be read"), "{source}: {error}");
    }
    let endless = "{% set ns = namespace(x='a') %}{% set ns.x = ns, ns.x %}{{ ns.x }}";
    let error = Template::new(endless).unwrap_err().to_string();
    assert!(error.contains("uses the namespace `ns` for more than its attributes"), "{error}");
    assert!(Template::new(&"x".repeat(2 << 20)).unwrap_err().to_string().contains("more than 65536"));
    let nested = format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(Template::new(&format!("{{{{ {nested} }}}}")).is_err());
}

/// A copy of the bundled model with these files beside it.
fn model_with(files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    let assets = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("assets/tiny");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(assets.join(file), folder.path().join(file)).unwrap();
    }
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn template_of(files: &[(&str, &str)]) -> candle_quant::Result<Option<Template>> {
    Template::from_checkpoint(&Checkpoint::open(model_with(files).path())?)
}

#[test]
fn templates_are_found_where_transformers_finds_them() {
    let text = |files: &[(&str, &str)], variables: &Variables| {
        let template = template_of(files).unwrap()?;
        Some(template.render(&[Message::new("user", "Hi")], variables).unwrap())
    };
    let plain = Variables::default();
    assert_eq!(text(&[], &plain), None);
    let config = (
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<s>"}, "chat_template": "c{{ bos_token }}{{ eos_token }}"}"#,
    );
    let map = ("special_tokens_map.json", r#"{"bos_token": "no", "eos_token": "</s>"}"#);
    let jinja = ("chat_template.jinja", "j{{ bos_token }}");
    let json = ("chat_template.json", r#"{"chat_template": "k"}"#);
    assert_eq!(text(&[config, map, json], &plain).unwrap(), "c<s></s>");
    assert_eq!(text(&[config, json, jinja], &plain).unwrap(), "j<s>");
    assert_eq!(text(&[json], &plain).unwrap(), "k");
    assert_eq!(text(&[("tokenizer_config.json", r#"{"chat_template": null}"#)], &plain), None);
    let list =
        r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#;
    let list = ("tokenizer_config.json", list);
    assert_eq!(text(&[list], &plain).unwrap(), "d");
    assert_eq!(text(&[list], &Variables::default().with("tools", ["x"])).unwrap(), "t");
    let with_image =
        r#"{"chat_template": "{{ image_token }}", "extra_special_tokens": {"image_token": "<image>"}}"#;
    assert_eq!(text(&[("tokenizer_config.json", with_image)], &plain).unwrap(), "<image>");
}

#[test]
fn files_that_hold_no_template_say_so() {
    for (file, text, expected) in [
        ("tokenizer_config.json", r#"{"chat_template": 5}"#, "`chat_template` is neither a text nor a list"),
        (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "other", "template": ""}]}"#,
            "one called `default`",
        ),
        ("tokenizer_config.json", r#"{"chat_template": ["x"]}"#, "`chat_template` is neither"),
        ("tokenizer_config.json", r#"{"chat_template""#, "malformed JSON"),
        ("chat_template.jinja", "{% for %}", "the chat template can't be read"),
    ] {
        let error = template_of(&[(file, text)]).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(expected), "{file}: {error}");
    }
    let folder = model_with(&[]);
    fs::write(folder.path().join("chat_template.jinja"), [0xff, 0xfe]).unwrap();
    let error = Template::from_checkpoint(&Checkpoint::open(folder.path()).unwrap()).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja") && error.contains("UTF-8"), "{error}");
    let long = " ".repeat((1 << 16) + 1);
    let error = template_of(&[("chat_template.jinja", &long)]).unwrap_err().to_string();
    assert!(error.contains("more than 65536 bytes"), "{error}");
}
