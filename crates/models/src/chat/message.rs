//! What a template sees: messages, and variables beside them.

use candle_quant::{Error, Result};
use minijinja::value::{Serde, Value};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// The names under which the reasoning of a message is passed; the first is the one that most templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// One turn of a conversation: a role, a content, and whatever else a template reads (`tool_calls`, say). In JSON it is an
/// object, whose keys keep their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Message(Vec<(String, Value)>);

impl Message {
    /// A message of text. Roles are `system`, `user` and `assistant`; a template may know others.
    pub fn new(role: &str, content: &str) -> Self {
        Self(vec![("role".into(), role.into()), ("content".into(), content.into())])
    }

    /// The same message with one more text, such as the `reasoning_content` of an answer.
    pub fn with(mut self, name: &str, text: &str) -> Self {
        self.0.retain(|(key, _)| key != name);
        self.0.push((name.to_owned(), text.into()));
        self
    }

    /// A text of the message; `None` if there is none of that name, or it is no text.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name)?.1.as_str()
    }

    /// As templates see it: nulls are left out, and a reasoning has all its names, as in transformers.
    pub(super) fn value(&self) -> Value {
        let given = |name: &str| {
            let field = self.0.iter().find(|(key, value)| key == name && !value.is_none());
            field.map(|(_, value)| value.clone())
        };
        let reasoning = REASONING.into_iter().find_map(given);
        let mut fields: Vec<(String, Value)> = Vec::with_capacity(self.0.len() + 2);
        if let Some(reasoning) = &reasoning {
            fields.push(("thinking".into(), given("thinking").unwrap_or_else(|| reasoning.clone())));
        }
        let rest = self.0.iter().filter(|(key, value)| key != "thinking" && !value.is_none());
        fields.extend(rest.cloned());
        if let Some(reasoning) = reasoning {
            match fields.iter_mut().find(|(key, _)| key == "reasoning_content") {
                Some((_, value)) => *value = reasoning,
                None => fields.push(("reasoning_content".into(), reasoning)),
            }
        }
        Value::from_pairs(fields)
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Message;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a message, which is an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message, A::Error> {
                let mut fields: Vec<(String, Value)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    match fields.iter_mut().find(|(known, _)| *known == key) {
                        Some((_, last)) => *last = value,
                        None => fields.push((key, value)),
                    }
                }
                Ok(Message(fields))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// What a template sees beside the messages: `add_generation_prompt`, `tools`, and whatever it knows of its own, such as
/// `enable_thinking`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Variables(pub(super) BTreeMap<String, Value>);

impl Variables {
    /// `add_generation_prompt` alone: the text ends where the model's answer begins.
    pub fn generation_prompt() -> Self {
        Self::default().with("add_generation_prompt", true)
    }

    /// These variables and one more, which replaces one of the same name.
    pub fn with(mut self, name: &str, value: impl Serialize) -> Self {
        self.0.insert(name.to_owned(), Value::from(Serde(value)));
        self
    }

    /// As [`with`](Self::with), of a text in JSON: the keys of objects keep their order.
    ///
    /// # Errors
    /// If it is not JSON.
    pub fn with_json(mut self, name: &str, json: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(json).map_err(|error| {
            Error::mismatch(format!("variable `{name}` of a chat template"), "JSON", error.to_string())
        })?;
        self.0.insert(name.to_owned(), value);
        Ok(self)
    }
}
