//! Chat templates, and the conversations that they are given.

use super::{content, repository, Seeds};
use crate::Bundle;
use candle_quant_models::chat::{Message, Template, Variables};
use serde_json::{json, Value};

const TEMPLATE: &str = "chat_template.jinja";
const MESSAGES: &str = "messages.json";

/// Published templates, and what their authors did not think of.
pub(super) fn seeds(_: &str) -> Seeds {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who wrote \"Dubliners\"?"},
        {"role": "assistant", "content": "<think>\nJoyce.\n</think>\n\nJames Joyce."},
        {"role": "user", "content": "When?"},
    ])
    .to_string();
    let published = String::from_utf8(repository("tests/fixtures/chat/templates.jsonl")).expect("UTF-8");
    let published = published.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).ok()?;
        Some((line["template"].as_str()?.to_owned(), line["source"].as_str()?.to_owned()))
    });
    let hostile = [
        "{{ messages | tojson(indent=4) }}{{ messages * 3 }}",
        "{% for a in range(99) %}{% for b in range(99) %}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ n }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ '%s' % messages }}{{ messages[0].content.split(' ') | join('-') | upper }}{{ strftime_now('%Y') }}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns, ns.x %}{% endfor %}{{ ns.x }}",
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ [1, [2, [3]]] | string }}",
    ];
    let hostile =
        hostile.iter().enumerate().map(|(number, text)| (format!("hostile-{number}"), (*text).to_owned()));
    let seed = |(name, source): (String, String)| {
        (name, super::bundle([(TEMPLATE, source.as_bytes()), (MESSAGES, messages.as_bytes())]))
    };
    published.chain(hostile).map(seed).collect()
}

pub(super) fn run(bundle: &Bundle) -> bool {
    let source = String::from_utf8_lossy(content(bundle, TEMPLATE));
    let Ok(template) = Template::new(&source) else { return false };
    let messages: Vec<Message> = serde_json::from_slice(content(bundle, MESSAGES)).unwrap_or_default();
    let variables = Variables::generation_prompt().with("bos_token", "<s>").with("eos_token", "</s>");
    match template.render(&messages, &variables) {
        Ok(text) => text.len() <= 32 << 20,
        Err(error) => {
            let error = error.to_string();
            assert!(!error.contains("panics"), "{error}");
            false
        }
    }
}
