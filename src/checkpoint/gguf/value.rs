//! Values of a file's metadata for whoever writes one.

use super::metadata::{Array, Type, Value};

/// A value of the metadata of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GgufValue {
    /// A whole number of 32 bits, as sizes and ids are.
    U32(u32),
    /// A whole number of 64 bits.
    I64(i64),
    /// A number.
    F32(f32),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// Values of one type: its number, how many there are, and their bytes.
    Array {
        /// The number of the type.
        item: u32,
        /// How many there are.
        len: usize,
        /// Their bytes, as the file has them.
        bytes: Vec<u8>,
    },
}

impl GgufValue {
    /// Texts.
    pub fn texts(texts: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        let (mut len, mut bytes) = (0, Vec::new());
        for text in texts {
            Self::append_text(text.as_ref(), &mut bytes);
            len += 1;
        }
        Self::Array { item: Type::TEXT.0, len, bytes }
    }

    /// Whole numbers of 32 bits, with a sign.
    pub fn integers(numbers: &[i32]) -> Self {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Self::Array { item: 5, len: numbers.len(), bytes }
    }

    /// Numbers.
    pub fn numbers(numbers: &[f32]) -> Self {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Self::Array { item: 6, len: numbers.len(), bytes }
    }

    /// Yes or no, several times.
    pub fn flags(flags: &[bool]) -> Self {
        let bytes = flags.iter().map(|flag| u8::from(*flag)).collect();
        Self::Array { item: Type::BOOL.0, len: flags.len(), bytes }
    }

    /// Appends the value as a file has it: the number of its type, and its bytes.
    pub fn append(&self, to: &mut Vec<u8>) {
        let kind = |kind: u32, to: &mut Vec<u8>| to.extend(kind.to_le_bytes());
        match self {
            Self::U32(number) => {
                kind(4, to);
                to.extend(number.to_le_bytes());
            }
            Self::I64(number) => {
                kind(11, to);
                to.extend(number.to_le_bytes());
            }
            Self::F32(number) => {
                kind(6, to);
                to.extend(number.to_le_bytes());
            }
            Self::Bool(is) => {
                kind(Type::BOOL.0, to);
                to.push(u8::from(*is));
            }
            Self::Text(text) => {
                kind(Type::TEXT.0, to);
                Self::append_text(text, to);
            }
            Self::Array { item, len, bytes } => {
                kind(Type::ARRAY.0, to);
                kind(*item, to);
                to.extend((*len as u64).to_le_bytes());
                to.extend_from_slice(bytes);
            }
        }
    }

    /// Appends a text as files have it, keys and names of tensors, too: its length in 64 bits, and its bytes.
    pub fn append_text(text: &str, to: &mut Vec<u8>) {
        to.extend((text.len() as u64).to_le_bytes());
        to.extend_from_slice(text.as_bytes());
    }

    /// As the reader has it.
    pub(super) fn read(&self) -> Value {
        let of = |kind: u32, bytes: &[u8]| Type(kind).value(bytes).unwrap_or(Value::Float(f64::NAN));
        match self {
            Self::U32(number) => of(4, &number.to_le_bytes()),
            Self::I64(number) => of(11, &number.to_le_bytes()),
            Self::F32(number) => of(6, &number.to_le_bytes()),
            Self::Bool(is) => Value::Bool(*is),
            Self::Text(text) => Value::Text(text.clone()),
            Self::Array { item, len, bytes } => {
                Value::Array(Array { item: Type(*item), len: *len, bytes: bytes.clone() })
            }
        }
    }

    /// What the reader has, to be written again: whole numbers in 32 bits where they fit.
    pub(super) fn of_read(value: &Value) -> Self {
        match value {
            Value::Integer(number) => match u32::try_from(*number) {
                Ok(number) => Self::U32(number),
                Err(_) => Self::I64(i64::try_from(*number).unwrap_or(i64::MAX)),
            },
            Value::Float(number) => Self::F32(*number as f32),
            Value::Bool(is) => Self::Bool(*is),
            Value::Text(text) => Self::Text(text.clone()),
            Value::Array(Array { item, len, bytes }) => {
                Self::Array { item: item.0, len: *len, bytes: bytes.clone() }
            }
        }
    }
}
