//! Checked access to the fields of a `config.json` object.

use candle_quant::{Error, Result};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// No size in any model's config is larger; products of two of these fit 64 bits.
const MAX_SIZE: usize = 1 << 24;

/// Whether `number` is finite and above zero in f32, in which models compute with it.
pub(super) fn is_positive(number: f64) -> bool {
    let number = number as f32;
    number.is_finite() && number > 0.
}

/// What [`is_positive`] demands.
pub(super) const POSITIVE: &str = "a finite number above zero, in f32";

/// An object of a config, and under which key of the file it stands.
///
/// Errors don't name the file: who knows its path adds it.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    value: &'a Value,
    key: Option<&'static str>,
    asked: Option<&'a Asked>,
}

/// The keys that were asked for.
#[derive(Default)]
pub(super) struct Asked(RefCell<BTreeSet<String>>);

impl Asked {
    pub fn contains(&self, key: &str) -> bool {
        self.0.borrow().contains(key)
    }
}

impl<'a> Fields<'a> {
    /// The whole file.
    pub fn new(value: &'a Value) -> Self {
        Self { value, key: None, asked: None }
    }

    /// The object under `key`.
    pub fn under(key: &'static str, value: &'a Value) -> Self {
        Self { value, key: Some(key), asked: None }
    }

    /// The same, which note in `asked` what is asked of them.
    pub fn noting(self, asked: &'a Asked) -> Self {
        Self { asked: Some(asked), ..self }
    }

    fn stored(self, key: &str) -> Option<&'a Value> {
        if let Some(Asked(asked)) = self.asked {
            asked.borrow_mut().insert(key.to_owned());
        }
        self.value.get(key)
    }

    /// The value of `key`; JSON's null counts as absent.
    pub fn get(self, key: &str) -> Option<&'a Value> {
        self.stored(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there, be it null.
    pub fn has(self, key: &str) -> bool {
        self.stored(key).is_some()
    }

    /// Counts keys as asked for that have no effect.
    pub fn ignore(self, keys: &[&str]) {
        for key in keys {
            let _ = self.stored(key);
        }
    }

    /// The object of `key`, if present.
    pub fn object(self, key: &'static str) -> Result<Option<Self>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.is_object() {
            true => Ok(Some(Self::under(key, value))),
            false => Err(self.error(key, "an object", value)),
        }
    }

    /// A list of numbers, if present.
    pub fn numbers(self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let all = value.as_array().and_then(|all| all.iter().map(Value::as_f64).collect::<Option<Vec<_>>>());
        all.map(Some).ok_or_else(|| self.error(key, "a list of numbers", value))
    }

    /// A size from 1 to [`MAX_SIZE`], if present.
    pub fn size(self, key: &str) -> Result<Option<usize>> {
        self.integer(key, 1)
    }

    /// An index from 0 to [`MAX_SIZE`], if present.
    pub fn index(self, key: &str) -> Result<Option<usize>> {
        self.integer(key, 0)
    }

    fn integer(self, key: &str, least: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
            Some(number) if (least..=MAX_SIZE).contains(&number) => Ok(Some(number)),
            _ => Err(self.error(key, format!("an integer from {least} to {MAX_SIZE}"), value)),
        }
    }

    /// A list of indices; empty if absent.
    pub fn indices(self, key: &str) -> Result<Vec<usize>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let index = |value: &Value| value.as_u64().and_then(|index| usize::try_from(index).ok());
        let all = value.as_array().and_then(|all| all.iter().map(index).collect::<Option<Vec<_>>>());
        all.ok_or_else(|| self.error(key, "a list of layers", value))
    }

    /// A size that has to be there.
    pub fn required_size(self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| Error::mismatch(self.what(key), "an integer", "nothing"))
    }

    /// A number that is finite and above zero in f32, if present.
    pub fn positive(self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if is_positive(number) => Ok(Some(number)),
            _ => Err(self.error(key, POSITIVE, value)),
        }
    }

    /// A number that has to be there.
    pub fn required_positive(self, key: &str) -> Result<f64> {
        self.positive(key)?.ok_or_else(|| Error::mismatch(self.what(key), "a number", "nothing"))
    }

    /// True or false, if present.
    pub fn flag(self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error(key, "true or false", value))
    }

    /// A string, if present.
    pub fn text(self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.error(key, "a string", value))
    }

    pub fn error(self, key: &str, expected: impl Into<String>, found: &Value) -> Error {
        Error::mismatch(self.what(key), expected, found.to_string())
    }

    fn what(self, key: &str) -> String {
        match self.key {
            Some(object) => format!("{object}: `{key}`"),
            None => format!("`{key}`"),
        }
    }
}
