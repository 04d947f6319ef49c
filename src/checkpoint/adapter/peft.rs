//! PEFT's `adapter_model.safetensors`.

use super::config::{shown, whole, Config};
use super::parts::{by_module, Role, Stated};
use super::StoredLora;
use crate::checkpoint::file::Tensors;
use crate::Result;
use regex::{Regex, RegexBuilder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// What names of tensors begin with: PEFT's own two wrappers of the model.
pub(super) const PREFIX: &str = "base_model.model.";

/// Settings that say how an adapter was trained, or which modules it is for, which the tensors say as well.
const WITHOUT_EFFECT: [&str; 20] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    // A and B are stored in the same way whatever the order of the weight is.
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "velora_config",
];

/// Settings that are read.
const READ: [&str; 7] =
    ["bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "use_dora", "use_rslora"];

/// Ways to begin a training that leave the weights of the model as they are.
const INITS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// Patterns that are no plain names, and what one may take. Whoever wrote the file decides how many there are.
const MOST_PATTERNS: usize = 64;
const PATTERN_BYTES: usize = 1 << 20;

pub(super) fn read(config: &Config, file: &Path, tensors: &Tensors) -> Result<BTreeMap<String, StoredLora>> {
    refuse_what_is_not_computed(config)?;
    let settings = config.settings();
    let (rank, alpha) = (config.rank(settings, "r")?, config.number(settings, "lora_alpha")?);
    let (is_dora, is_rs) = (config.flag("use_dora")?, config.flag("use_rslora")?);
    let ranks = Patterns::new(config, "rank_pattern", config.rank_pattern())?;
    let alphas = Patterns::new(config, "alpha_pattern", config.alpha_pattern())?;
    let expected = "`base_model.model.MODULE.lora_A.weight`, `lora_B.weight` or `lora_magnitude_vector` of a linear layer";
    let complete = |(module, parts): (String, super::parts::Parts)| {
        let rank = match ranks.of(&module) {
            None => rank,
            Some(rank) => whole(rank).ok_or_else(|| config.wrong(format!("`rank_pattern` has {rank}")))?,
        };
        let alpha = alphas.of(&module).unwrap_or(alpha);
        let scale = alpha / if is_rs { (rank as f64).sqrt() } else { rank as f64 };
        let lora = parts.complete(file, &module, &Stated { rank, scale, is_dora }, false)?;
        Ok((module, lora))
    };
    by_module(file, tensors, expected, role)?.into_iter().map(complete).collect()
}

fn refuse_what_is_not_computed(config: &Config) -> Result<()> {
    match config.get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        _ => return Err(config.unsupported(format!("`peft_type` is {}", shown(config.get("peft_type"))))),
    }
    match config.get("bias") {
        None => {}
        Some(Value::String(bias)) if bias == "none" => {}
        Some(other) => return Err(config.unsupported(format!("`bias` is {other}: biases were trained"))),
    }
    match config.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => {}
        Some(Value::String(init)) if INITS.contains(&init.as_str()) => {}
        Some(other) => {
            let what =
                format!("`init_lora_weights` is {other}: the training began with other weights of the model");
            return Err(config.unsupported(what));
        }
    }
    let says_nothing = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(members) => members.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
    };
    let is_known = |key: &str| WITHOUT_EFFECT.contains(&key) || READ.contains(&key);
    match config.settings().iter().find(|(key, value)| !is_known(key) && !says_nothing(value)) {
        Some((key, value)) => Err(config.unsupported(format!("`{key}` is {value}"))),
        None => Ok(()),
    }
}

/// The module of a tensor, and what it is there. Between these may stand the name of the adapter.
fn role(name: &str) -> Option<(&str, Role)> {
    let name = name.strip_prefix(PREFIX)?;
    let of = |role: Role, key: &str| {
        let (module, rest) = name.split_once(key)?;
        let parts: Vec<&str> = rest.split('.').filter(|part| !part.is_empty()).collect();
        let is_complete = match (parts.as_slice(), role) {
            ([] | [_], Role::Magnitude) => true,
            (["weight"], Role::A | Role::B) => true,
            ([adapter, "weight"], _) => *adapter != "weight",
            _ => false,
        };
        (is_complete && !module.is_empty()).then_some((module, role))
    };
    of(Role::A, ".lora_A.")
        .or_else(|| of(Role::B, ".lora_B."))
        .or_else(|| of(Role::Magnitude, ".lora_magnitude_vector"))
}

/// Numbers by names of modules: names, ends of names, or regular expressions for them.
struct Patterns<'a> {
    /// With their places in the file.
    names: BTreeMap<&'a str, (usize, f64)>,
    patterns: Vec<(usize, Regex, f64)>,
}

impl<'a> Patterns<'a> {
    fn new(config: &Config, key: &str, members: &'a [(String, f64)]) -> Result<Self> {
        let (mut names, mut patterns) = (BTreeMap::new(), Vec::new());
        for (place, (name, number)) in members.iter().enumerate() {
            if !number.is_finite() {
                return Err(config.wrong(format!("`{key}` has {number} for `{name}`")));
            }
            // A dot is taken as itself: no two modules differ in a dot alone.
            if name.chars().all(|char| char.is_ascii_alphanumeric() || matches!(char, '_' | '-' | '.')) {
                names.entry(name.as_str()).or_insert((place, *number));
                continue;
            }
            let pattern = format!(r"^(?:.*\.)?(?:{name})$");
            let pattern = RegexBuilder::new(&pattern).size_limit(PATTERN_BYTES).build();
            let pattern = pattern.map_err(|_| config.unsupported(format!("`{key}` has `{name}`")))?;
            patterns.push((place, pattern, *number));
            if patterns.len() > MOST_PATTERNS {
                return Err(config.unsupported(format!("`{key}` has more than {MOST_PATTERNS} expressions")));
            }
        }
        Ok(Self { names, patterns })
    }

    /// The number of the first that fits.
    fn of(&self, module: &str) -> Option<f64> {
        let ends = module.match_indices('.').filter_map(|(dot, _)| module.get(dot + 1..));
        let named = ends.chain([module]).filter_map(|end| self.names.get(end).copied());
        let matching = self.patterns.iter().filter(|(_, pattern, _)| pattern.is_match(module));
        let matching = matching.map(|(place, _, number)| (*place, *number));
        named.chain(matching).min_by_key(|(place, _)| *place).map(|(_, number)| number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_module_and_role() {
        for (name, expected) in [
            (
                "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
                Some(("model.layers.0.mlp.up_proj", Role::A)),
            ),
            ("base_model.model.lm_head.lora_B.weight", Some(("lm_head", Role::B))),
            ("base_model.model.lm_head.lora_B.mine.weight", Some(("lm_head", Role::B))),
            ("base_model.model.q.lora_magnitude_vector", Some(("q", Role::Magnitude))),
            ("base_model.model.q.lora_magnitude_vector.weight", Some(("q", Role::Magnitude))),
            ("base_model.model.q.lora_magnitude_vector.mine.weight", Some(("q", Role::Magnitude))),
            ("model.q.lora_A.weight", None),
            ("base_model.model.q.lora_A.bias", None),
            ("base_model.model.q.lora_B.mine.bias", None),
            ("base_model.model.q.lora_embedding_A", None),
            ("base_model.model.q.weight", None),
            ("base_model.model..lora_A.weight", None),
            ("base_model.model.lora_A.weight", None),
        ] {
            assert_eq!(role(name), expected, "{name}");
        }
    }
}
