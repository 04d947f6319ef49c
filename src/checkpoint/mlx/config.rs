//! The `quantization` object of a `config.json`: what it says of the whole checkpoint and of single
//! modules.

use crate::checkpoint::file::Warnings;
use crate::{Error, QuantFormat, Result};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, path::Path};

const REMEDY: &str = "correct the file or fetch it again";

/// What a config says about quantization; empty if it says nothing.
#[derive(Debug, Default)]
pub(super) struct Quantization {
    /// The format named at the top level, with missing numbers from the defaults of its mode.
    pub top: Option<QuantFormat>,
    /// What is said of single modules, by module path.
    pub overrides: BTreeMap<String, Override>,
}

/// What a config says of one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Override {
    /// `false`: not quantized.
    Dense,
    /// An object, complete by itself: nothing is inherited from the top level.
    Packed(QuantFormat),
}

/// Reads the quantization object of `config`, the content of the file at `path`. `is_module` says
/// whether the checkpoint has a module of that path.
pub(super) fn parse(
    config: &Value,
    path: &Path,
    is_module: impl Fn(&str) -> bool,
    warnings: &Warnings,
) -> Result<Quantization> {
    let Some((key, object)) = quantization_object(config) else {
        return Ok(Quantization::default());
    };
    let reader = Reader { path, warnings };
    let mut overrides = BTreeMap::new();
    let (mut no_modules, mut no_settings) = (Unknown::default(), Unknown::default());
    for (name, value) in object {
        match value {
            _ if FORMAT_KEYS.contains(&name.as_str()) => {}
            Value::Object(entry) if is_module(name) => {
                let format = reader.format(entry, &format!("{key}.{name}"))?;
                reader.warn_of_unknown_keys(entry, &format!("{key}.{name}"));
                overrides.insert(name.clone(), Override::Packed(format));
            }
            Value::Bool(false) if is_module(name) => {
                overrides.insert(name.clone(), Override::Dense);
            }
            // `true` asks for what the top level says.
            Value::Bool(true) if is_module(name) => {}
            Value::Object(_) | Value::Bool(_) => no_modules.add(name),
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => no_settings.add(name),
        }
    }
    reader.warn_of(key, &no_modules, "matches no module of the checkpoint and is ignored");
    reader.warn_of(key, &no_settings, IS_UNKNOWN);
    reader.warn_of_activations(object, key);
    let top = reader.format(object, key)?;
    Ok(Quantization { top: Some(top), overrides })
}

/// Keys with a meaning of their own, at the top level and in overrides.
const FORMAT_KEYS: [&str; 5] = ["group_size", "bits", "mode", "global_scale", "quantize_activations"];

/// The object that describes the quantization and the key it stands under. One with a `quant_method` is not MLX's.
fn quantization_object(config: &Value) -> Option<(&'static str, &Map<String, Value>)> {
    let object = |key| Some((key, config.get(key)?.as_object()?));
    object("quantization").or_else(|| object("quantization_config"))
}

const IS_UNKNOWN: &str = "is a key that is unknown and ignored";

/// Names that mean nothing.
#[derive(Default)]
struct Unknown<'a> {
    first: Option<&'a str>,
    count: usize,
}

impl<'a> Unknown<'a> {
    fn add(&mut self, name: &'a str) {
        self.first.get_or_insert(name);
        self.count += 1;
    }
}

struct Reader<'a> {
    path: &'a Path,
    warnings: &'a Warnings,
}

/// What MLX takes where nothing is said.
const AFFINE: QuantFormat = QuantFormat::affine_opt(4, 64).unwrap();

impl Reader<'_> {
    /// The format an object names. A missing mode is affine, missing numbers are the mode's defaults.
    fn format(&self, object: &Map<String, Value>, key: &str) -> Result<QuantFormat> {
        let mode = match object.get("mode") {
            None | Some(Value::Null) => "affine",
            Some(Value::String(mode)) => mode,
            Some(other) => {
                return Err(self.wrong(format!("`{key}.mode` is {other}, expected a string")));
            }
        };
        let default = match mode {
            "affine" => AFFINE,
            _ => QuantFormat::named(mode).ok_or_else(|| {
                let names = QuantFormat::names().join(", ");
                self.wrong(format!("`{key}.mode` is {mode:?}, expected one of affine, {names}"))
            })?,
        };
        let bits = self.number(object, key, "bits")?.unwrap_or(default.bits());
        let group_size = self.number(object, key, "group_size")?.unwrap_or(default.group_size());
        let format = match default {
            AFFINE => QuantFormat::affine_opt(bits, group_size),
            fixed => (bits == fixed.bits() && group_size == fixed.group_size()).then_some(fixed),
        };
        format.ok_or_else(|| {
            let exists = match default {
                AFFINE => "bits 1, 2, 3, 4, 5, 6 or 8 and group_size 32, 64 or 128".to_owned(),
                fixed => format!("bits {} and group_size {}", fixed.bits(), fixed.group_size()),
            };
            self.wrong(format!(
                "`{key}` is {mode} with bits {bits} and group_size {group_size}, expected {exists}"
            ))
        })
    }

    /// A positive whole number; `None` if absent or null.
    fn number(&self, object: &Map<String, Value>, key: &str, name: &str) -> Result<Option<usize>> {
        let value = match object.get(name) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        // Some writers make floats of all numbers: 4.0 is 4.
        let whole = value.as_u64().or_else(|| {
            let float = value.as_f64()?;
            (float.fract() == 0.0 && (1.0..1e9).contains(&float)).then_some(float as u64)
        });
        match whole.and_then(|number| usize::try_from(number).ok()) {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => Err(self.wrong(format!("`{key}.{name}` is {value}, expected a positive whole number"))),
        }
    }

    fn warn_of_unknown_keys(&self, object: &Map<String, Value>, key: &str) {
        let mut unknown = Unknown::default();
        object.keys().filter(|name| !FORMAT_KEYS.contains(&name.as_str())).for_each(|name| unknown.add(name));
        self.warn_of(key, &unknown, IS_UNKNOWN);
        self.warn_of_activations(object, key);
    }

    /// One warning for all names, however many there are.
    fn warn_of(&self, key: &str, unknown: &Unknown, what: &str) {
        let Some(first) = unknown.first else { return };
        let others = match unknown.count {
            1 => String::new(),
            count => format!("; so it is with {} more", count - 1),
        };
        self.warnings.add(format!("{}: `{key}.{first}` {what}{others}", self.path.display()));
    }

    fn warn_of_activations(&self, object: &Map<String, Value>, key: &str) {
        if object.get("quantize_activations") == Some(&Value::Bool(true)) {
            self.warnings.add(format!(
                "{}: `{key}.quantize_activations` asks for quantized activations; only the weights are quantized here",
                self.path.display()
            ));
        }
    }

    fn wrong(&self, problem: String) -> Error {
        Error::File { path: self.path.to_owned(), problem, remedy: REMEDY.into() }
    }
}
