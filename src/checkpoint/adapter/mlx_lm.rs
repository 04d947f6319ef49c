//! mlx-lm's `adapters.safetensors`.

use super::config::{shown, Config};
use super::parts::{by_module, Role, Stated};
use super::StoredLora;
use crate::checkpoint::file::Tensors;
use crate::Result;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) fn read(config: &Config, file: &Path, tensors: &Tensors) -> Result<BTreeMap<String, StoredLora>> {
    let is_dora = match config.get("fine_tune_type") {
        None => false,
        Some(Value::String(kind)) if kind == "lora" => false,
        Some(Value::String(kind)) if kind == "dora" => true,
        Some(other) => return Err(config.unsupported(format!("`fine_tune_type` is {other}"))),
    };
    let Some(Value::Object(parameters)) = config.get("lora_parameters") else {
        let found = shown(config.settings().get("lora_parameters"));
        return Err(config.wrong(format!("`lora_parameters` is {found}, expected an object")));
    };
    let (rank, scale) = (config.rank(parameters, "rank")?, config.number(parameters, "scale")?);
    let stated = Stated { rank, scale, is_dora };
    let expected = "`MODULE.lora_a`, `MODULE.lora_b` or, of DoRA, `MODULE.m`";
    let complete = |(module, parts): (String, super::parts::Parts)| {
        let lora = parts.complete(file, &module, &stated, true)?;
        Ok((module, lora))
    };
    let modules = by_module(file, tensors, expected, |name| role(name, is_dora))?;
    modules.into_iter().map(complete).collect()
}

/// The module of a tensor, and what it is there.
fn role(name: &str, is_dora: bool) -> Option<(&str, Role)> {
    let (module, end) = name.rsplit_once('.')?;
    let role = match end {
        "lora_a" => Role::A,
        "lora_b" => Role::B,
        "m" if is_dora => Role::Magnitude,
        _ => return None,
    };
    (!module.is_empty()).then_some((module, role))
}
