//! `adapter_config.json`, and how its settings are read.

use super::AdapterFormat;
use crate::checkpoint::file::{read_json, Opening};
use crate::{Error, Result};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use std::fmt;
use std::path::{Path, PathBuf};

/// The settings of an adapter, and where they are.
pub(super) struct Config {
    pub path: PathBuf,
    settings: Settings,
}

#[derive(Deserialize)]
struct Settings {
    rank_pattern: Option<InOrder>,
    alpha_pattern: Option<InOrder>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// The members of an object in the order of the file, of which the first that fits counts.
pub(super) struct InOrder(pub Vec<(String, f64)>);

impl<'de> Deserialize<'de> for InOrder {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = InOrder;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of numbers by names of modules")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<InOrder, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(InOrder(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

impl Config {
    pub fn read(path: &Path, opening: &Opening) -> Result<Self> {
        match read_json(path, opening)? {
            Some(settings) => Ok(Self { path: path.to_owned(), settings }),
            None => {
                let remedy = "name the directory that an adapter was saved to, by PEFT or mlx-lm";
                Err(Error::file(path, "there is no such file", remedy))
            }
        }
    }

    pub fn format(&self) -> Result<AdapterFormat> {
        let has = |key| self.get(key).is_some();
        match (has("peft_type"), has("lora_parameters") || has("fine_tune_type")) {
            (true, _) => Ok(AdapterFormat::Peft),
            (false, true) => Ok(AdapterFormat::MlxLm),
            (false, false) => {
                Err(self.wrong("neither `peft_type` nor `lora_parameters` says whose adapter it is"))
            }
        }
    }

    pub fn rank_pattern(&self) -> &[(String, f64)] {
        self.settings.rank_pattern.as_ref().map_or(&[], |members| &members.0)
    }

    pub fn alpha_pattern(&self) -> &[(String, f64)] {
        self.settings.alpha_pattern.as_ref().map_or(&[], |members| &members.0)
    }

    /// All settings but the patterns.
    pub fn settings(&self) -> &Map<String, Value> {
        &self.settings.others
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.settings.others.get(key).filter(|value| !value.is_null())
    }

    /// A flag that is off if nothing is said.
    pub fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(format!("`{key}` is {other}, expected true or false"))),
        }
    }

    /// A finite number of an object of the config.
    pub fn number(&self, object: &Map<String, Value>, key: &str) -> Result<f64> {
        let number = object.get(key).and_then(Value::as_f64).filter(|number| number.is_finite());
        number.ok_or_else(|| self.wrong(format!("`{key}` is {}, expected a number", shown(object.get(key)))))
    }

    /// A rank of an object of the config.
    pub fn rank(&self, object: &Map<String, Value>, key: &str) -> Result<usize> {
        let rank = object.get(key).and_then(Value::as_f64).and_then(whole);
        rank.ok_or_else(|| {
            self.wrong(format!("`{key}` is {}, expected a rank of 1 or more", shown(object.get(key))))
        })
    }

    pub fn wrong(&self, problem: impl Into<String>) -> Error {
        Error::file(&self.path, problem, "correct the file or write the adapter again")
    }

    pub fn unsupported(&self, what: impl fmt::Display) -> Error {
        let remedy = "merge the adapter into the model with the tool that trained it, and convert that";
        Error::file(&self.path, format!("{what}, which is not computed here"), remedy)
    }
}

/// A number as a rank.
pub(super) fn whole(number: f64) -> Option<usize> {
    (number.fract() == 0. && (1. ..=1e9).contains(&number)).then_some(number as usize)
}

pub(super) fn shown(value: Option<&Value>) -> String {
    value.map_or("missing".to_string(), Value::to_string)
}
