//! The key-value pairs in front of a GGUF file's tensors.

use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Array(Array),
}

/// The type of a value, or of the elements of an array, as the file numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type(pub u32);

impl Type {
    pub const FLOAT: Self = Self(6);
    pub const BOOL: Self = Self(7);
    pub const TEXT: Self = Self(8);
    pub const ARRAY: Self = Self(9);

    /// Bytes of a value; `None` for strings, arrays and unknown types.
    pub fn size(self) -> Option<usize> {
        match self.0 {
            0 | 1 | 7 => Some(1),
            2 | 3 => Some(2),
            4..=6 => Some(4),
            10..=12 => Some(8),
            _ => None,
        }
    }

    fn is_integer(self) -> bool {
        matches!(self.0, 0..=5 | 10 | 11)
    }

    /// The value in exactly [`size`](Type::size) bytes; `None` if it is none.
    pub fn value(self, bytes: &[u8]) -> Option<Value> {
        fn of<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
            bytes.try_into().ok()
        }
        Some(match self.0 {
            0 => Value::Integer(u8::from_le_bytes(of(bytes)?).into()),
            1 => Value::Integer(i8::from_le_bytes(of(bytes)?).into()),
            2 => Value::Integer(u16::from_le_bytes(of(bytes)?).into()),
            3 => Value::Integer(i16::from_le_bytes(of(bytes)?).into()),
            4 => Value::Integer(u32::from_le_bytes(of(bytes)?).into()),
            5 => Value::Integer(i32::from_le_bytes(of(bytes)?).into()),
            // The decimal that was written, not the binary fraction that it became: 1e-6 stays 1e-6.
            6 => Value::Float(f32::from_le_bytes(of(bytes)?).to_string().parse().ok()?),
            7 => match of(bytes)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                _ => return None,
            },
            10 => Value::Integer(u64::from_le_bytes(of(bytes)?).into()),
            11 => Value::Integer(i64::from_le_bytes(of(bytes)?).into()),
            12 => Value::Float(f64::from_le_bytes(of(bytes)?)),
            _ => return None,
        })
    }
}

/// Values of one type. Kept as in the file: vocabularies are long, and most arrays are never looked at.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array {
    pub item: Type,
    pub len: usize,
    pub bytes: Vec<u8>,
}

impl Array {
    /// The strings; `None` if it holds something else.
    pub fn texts(&self) -> Option<Vec<&str>> {
        if self.item != Type::TEXT {
            return None;
        }
        let (mut rest, mut texts) = (self.bytes.as_slice(), Vec::with_capacity(self.len));
        while let Some((len, tail)) = rest.split_first_chunk::<8>() {
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let (text, tail) = tail.split_at_checked(len)?;
            texts.push(std::str::from_utf8(text).ok()?);
            rest = tail;
        }
        Some(texts)
    }

    /// The integers; `None` if it holds something else.
    pub fn integers(&self) -> Option<impl Iterator<Item = i128> + '_> {
        let chunks = self.bytes.chunks_exact(self.item.size().filter(|_| self.item.is_integer())?);
        Some(chunks.filter_map(|bytes| match self.item.value(bytes) {
            Some(Value::Integer(value)) => Some(value),
            _ => None,
        }))
    }

    /// The numbers of 32 bits; `None` if it holds something else.
    pub fn floats(&self) -> Option<impl Iterator<Item = f32> + '_> {
        let numbers = || self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        (self.item == Type::FLOAT).then(numbers)
    }

    /// Yes or no of each element; `None` if it holds something else.
    pub fn flags(&self) -> Option<impl Iterator<Item = bool> + '_> {
        let size = self.item.size().filter(|_| self.item == Type::BOOL || self.item.is_integer())?;
        let flags = self.bytes.chunks_exact(size).map(|bytes| match self.item.value(bytes) {
            Some(Value::Bool(is)) => Some(is),
            Some(Value::Integer(number @ 0..=1)) => Some(number == 1),
            _ => None,
        });
        flags.collect::<Option<Vec<_>>>().map(Vec::into_iter)
    }
}

/// All values of a file by their keys, and which file that is.
#[derive(Debug)]
pub(super) struct Metadata {
    pub path: Box<Path>,
    pub values: BTreeMap<String, Value>,
}

impl Metadata {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// All short texts and numbers.
    pub fn texts(&self) -> BTreeMap<String, String> {
        const LONGEST: usize = 256;
        let text = |value: &Value| match value {
            Value::Integer(number) => Some(number.to_string()),
            Value::Float(number) => Some(number.to_string()),
            Value::Bool(is) => Some(is.to_string()),
            Value::Text(text) => Some(text).filter(|text| text.len() <= LONGEST).cloned(),
            Value::Array(_) => None,
        };
        self.values.iter().filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect()
    }

    /// A size or an id: a whole number of 32 bits. An array counts if all its elements are equal, for there
    /// are files that give sizes layer by layer.
    pub fn size(&self, key: &str) -> Result<Option<u32>> {
        let number = match self.get(key) {
            None => return Ok(None),
            Some(Value::Integer(number)) => *number,
            Some(Value::Array(array)) => {
                let mut numbers = array.integers().into_iter().flatten();
                let Some(first) = numbers.next() else { return Err(self.wrong(key, "a whole number")) };
                if !numbers.all(|other| other == first) {
                    return Err(Error::Unsupported {
                        what: format!("{}: `{key}` that differs from layer to layer", self.path.display()),
                        remedy: "use a model whose layers are alike".into(),
                    });
                }
                first
            }
            Some(_) => return Err(self.wrong(key, "a whole number")),
        };
        u32::try_from(number).map(Some).map_err(|_| self.wrong(key, "a whole number of 32 bits"))
    }

    /// Yes or no.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(is)) => Ok(Some(*is)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A number of any kind.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) if number.is_finite() => Ok(Some(*number)),
            Some(Value::Integer(number)) => Ok(Some(*number as f64)),
            Some(_) => Err(self.wrong(key, "a finite number")),
        }
    }

    pub fn wrong(&self, key: &str, expected: &str) -> Error {
        let problem = match self.get(key) {
            Some(Value::Text(text)) => format!("`{key}` is {text:?}, expected {expected}"),
            Some(Value::Array(array)) => {
                format!("`{key}` is an array of {} elements, expected {expected}", array.len)
            }
            Some(Value::Integer(value)) => format!("`{key}` is {value}, expected {expected}"),
            Some(Value::Float(value)) => format!("`{key}` is {value}, expected {expected}"),
            Some(Value::Bool(value)) => format!("`{key}` is {value}, expected {expected}"),
            None => format!("`{key}` is missing, expected {expected}"),
        };
        Error::file(&self.path, problem, "convert the model again")
    }

    /// A [`size`](Metadata::size) that has to be there.
    pub fn required_size(&self, key: &str) -> Result<u32> {
        self.size(key)?.ok_or_else(|| self.wrong(key, "a whole number"))
    }
}
