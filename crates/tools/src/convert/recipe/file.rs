//! Recipes in files.

use super::rules::{safe_defaults, Condition, Decision, Fallback, Recipe, Rule};
use candle_quant::{Error, Result};
use regex::Regex;
use serde::Deserialize;
use std::ops::RangeInclusive;
use std::path::Path;

impl Recipe {
    /// A recipe from the text of a file: of `.yml` and `.yaml` files a [topology](Recipe::from_topology), else
    /// [TOML](Recipe::from_toml).
    ///
    /// # Errors
    /// As of these.
    pub fn from_text(file: &str, text: &str) -> Result<Self> {
        let extension = Path::new(file).extension().unwrap_or_default();
        match ["yml", "yaml"].iter().any(|yaml| extension.eq_ignore_ascii_case(yaml)) {
            true => Self::from_topology(file, text),
            false => Self::from_toml(file, text),
        }
    }

    /// A recipe from the text of a TOML file; `file` is its name, for the plan.
    ///
    /// # Errors
    /// If it is malformed, or has keys that recipes do not have.
    pub fn from_toml(file: &str, text: &str) -> Result<Self> {
        let wrong = |problem: String| Error::mismatch(format!("recipe {file}"), "a recipe in TOML", problem);
        let parsed: RecipeFile = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let mut rules = Vec::with_capacity(parsed.rule.len());
        for (index, rule) in parsed.rule.into_iter().enumerate() {
            let number = index + 1;
            let rule = rule.build(format!("rule {number} of {file}"));
            rules.push(rule.map_err(|error| wrong(format!("rule {number}: {error}")))?);
        }
        if parsed.defaults {
            rules.extend(safe_defaults());
        }
        let format = parsed.format.parse().map_err(|error: Error| wrong(error.to_string()))?;
        Ok(Self { format, fallback: parsed.fallback, rules, choice: None })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeFile {
    format: String,
    #[serde(default)]
    fallback: Fallback,
    #[serde(default = "yes")]
    defaults: bool,
    #[serde(default)]
    rule: Vec<RuleInFile>,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleInFile {
    tensors: Option<String>,
    regex: Option<String>,
    layers: Option<Layers>,
    role: Option<String>,
    format: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Layers {
    One(usize),
    Range(String),
    Several(Vec<Layers>),
}

impl RuleInFile {
    fn build(self, label: String) -> Result<Rule> {
        let mut conditions = Vec::new();
        if let Some(glob) = &self.tensors {
            conditions.push(Condition::glob(glob)?);
        }
        if let Some(text) = &self.regex {
            let regex = Regex::new(text);
            conditions.push(Condition::Regex(regex.map_err(|error| {
                Error::mismatch("regex", "a regular expression", format!("`{text}`: {error}"))
            })?));
        }
        if let Some(layers) = &self.layers {
            conditions.push(Condition::Layers(layers.ranges()?));
        }
        if let Some(role) = &self.role {
            conditions.push(Condition::Role(role.parse()?));
        }
        Ok(Rule::new(label, conditions, Decision::To(self.format.parse()?)))
    }
}

impl Layers {
    fn ranges(&self) -> Result<Vec<RangeInclusive<usize>>> {
        let range = |layers: &Self| match layers {
            Self::One(layer) => Some(*layer..=*layer),
            Self::Range(text) => match text.split_once('-') {
                None => text.parse().ok().map(|layer| layer..=layer),
                Some((first, last)) => {
                    let range = first.trim().parse().ok()?..=last.trim().parse().ok()?;
                    (!range.is_empty()).then_some(range)
                }
            },
            Self::Several(_) => None,
        };
        let wrong = |layers: &Self| {
            let found = match layers {
                Self::Range(text) => format!("`{text}`"),
                Self::One(_) | Self::Several(_) => "something else".into(),
            };
            Error::mismatch("layers", "numbers and ranges, such as [\"0-8\", 31]", found)
        };
        match self {
            Self::Several(all) => {
                all.iter().map(|layers| range(layers).ok_or_else(|| wrong(layers))).collect()
            }
            Self::One(_) | Self::Range(_) => Ok(vec![range(self).ok_or_else(|| wrong(self))?]),
        }
    }
}
