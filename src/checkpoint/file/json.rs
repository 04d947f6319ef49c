//! JSON as Python writes it: with `NaN`, `Infinity` and `-Infinity`, which are JSON5 and no JSON.

use std::borrow::Cow;
use std::ops::Range;

const LITERALS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Text in which these literals are strings of the same letters: read as anything else than what needs a number they
/// do no harm, and where a number is needed, the error shows them.
pub(in crate::checkpoint) fn with_strings(text: &str) -> Cow<'_, str> {
    replaced(text, |literal| format!("\"{literal}\""))
}

/// Text in which these literals are strings that are as long: everything is where it was.
pub fn with_masked_literals(text: &str) -> Cow<'_, str> {
    replaced(text, |literal| format!("\"{}\"", "_".repeat(literal.len() - 2)))
}

fn replaced(text: &str, with: impl Fn(&str) -> String) -> Cow<'_, str> {
    let (mut written, mut end) = (String::new(), 0);
    for literal in literals(text) {
        let parts = (text.get(end..literal.start), text.get(literal.clone()));
        if let (Some(before), Some(literal)) = parts {
            written += before;
            written += &with(literal);
        }
        end = literal.end;
    }
    match text.get(end..) {
        Some(rest) if end > 0 => (written + rest).into(),
        _ => text.into(),
    }
}

/// Where values are literals: outside of strings, and before what ends a value.
fn literals(text: &str) -> Vec<Range<usize>> {
    let (mut found, mut in_string, mut at) = (Vec::new(), false, 0);
    while let Some(rest) = text.as_bytes().get(at..).filter(|rest| !rest.is_empty()) {
        let literal = LITERALS.iter().find(|literal| !in_string && rest.starts_with(literal.as_bytes()));
        at += match (rest, literal) {
            (_, Some(literal)) => {
                let after = rest.get(literal.len()..).unwrap_or_default().trim_ascii_start();
                if matches!(after.first(), None | Some(b',' | b']' | b'}')) {
                    found.push(at..at + literal.len());
                }
                literal.len()
            }
            // Whatever is escaped ends no string.
            ([b'\\', ..], _) if in_string => 2,
            ([byte, ..], _) => {
                in_string ^= *byte == b'"';
                1
            }
            ([], _) => break,
        };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    #[test]
    fn literals_are_found_where_values_are() {
        for (text, expected) in [
            ("NaN", json!("NaN")),
            ("[Infinity]", json!(["Infinity"])),
            (r#"{"a": -Infinity , "b":[NaN,NaN]}"#, json!({"a": "-Infinity", "b": ["NaN", "NaN"]})),
            (r#"{"a": "NaN, Infinity", "NaN": 1}"#, json!({"a": "NaN, Infinity", "NaN": 1})),
            (r#"["\"NaN", "\\", NaN, "ä Infinity,"]"#, json!(["\"NaN", "\\", "NaN", "ä Infinity,"])),
        ] {
            assert_eq!(serde_json::from_str::<Value>(&with_strings(text)).unwrap(), expected, "{text}");
            assert_eq!(with_masked_literals(text).len(), text.len());
            assert!(serde_json::from_str::<Value>(&with_masked_literals(text)).is_ok(), "{text}");
        }
        let text = r#"{"a": "NaN", "b": "\u004e", "c": 1e5, "d": null}"#;
        assert!(matches!(with_strings(text), Cow::Borrowed(same) if same == text));
    }

    #[test]
    fn what_is_malformed_stays_malformed() {
        for text in [
            "nan",
            "+Infinity",
            "--Infinity",
            "-NaN",
            "1NaN",
            "NaNNaN",
            "Infinity1",
            "{NaN: 1}",
            r#"{"a": 1, NaN: 1}"#,
            "[NaN",
            r#"["NaN]"#,
            r#""\"#,
            "[NaN NaN]",
        ] {
            assert!(serde_json::from_str::<Value>(&with_strings(text)).is_err(), "{text}");
            assert!(serde_json::from_str::<Value>(&with_masked_literals(text)).is_err(), "{text}");
        }
    }
}
