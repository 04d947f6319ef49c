//! What templates call that Python has and Jinja has not: `json.dumps`, `strftime`, and methods of strings.

use jiff::ZonedDateTime;
use minijinja::value::{from_args, Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;
use std::fmt::Write;

/// Nested values, at most: those of a conversation are far from it.
const MAX_DEPTH: usize = 200;

/// `json.dumps` as transformers calls it: no characters are escaped that JSON allows.
pub(super) fn tojson(state: &State, value: &Value, rest: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let rest = rest.into_values();
    let (positional, kwargs) = from_args::<(&[Value], Kwargs)>(&rest)?;
    let given = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => kwargs.get(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    };
    let ensure_ascii = given(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = match given(1, "indent")? {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            // Python takes what is negative for 0.
            None => " ".repeat(usize::try_from(i64::try_from(indent)?.max(0)).unwrap_or(0).min(80)),
        }),
    };
    let separators = given(2, "separators")?;
    let sort_keys = given(3, "sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let (comma, colon) = match &separators {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
    };
    let mut json = Json { text: String::new(), ensure_ascii, sort_keys, indent, comma, colon, state };
    json.value(value, 0)?;
    Ok(Value::from(json.text))
}

struct Json<'a> {
    text: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    comma: String,
    colon: String,
    state: &'a State<'a, 'a>,
}

impl Json<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        // One unit, and what the text comes to: a value may appear in itself a thousand times.
        self.state.consume_fuel(1 + (depth as u64) / 16)?;
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "a value is nested too deep for JSON"));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => write!(self.text, "{value}").unwrap_or_default(),
            ValueKind::Number => {
                let number = f64::try_from(value.clone())?;
                self.text.push_str(&float(number));
            }
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.checked();
                self.items('[', ']', items, depth, |json, item| json.value(&item, depth + 1))?;
            }
            ValueKind::Map => {
                let pair = |key: Result<Value, Error>| {
                    let key = key?;
                    let item = value.get_item(&key)?;
                    Ok((self::key(&key)?, item))
                };
                let mut pairs = value.try_iter()?.checked().map(pair).collect::<Result<Vec<_>, Error>>()?;
                if self.sort_keys {
                    pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.items('{', '}', pairs.into_iter().map(Ok), depth, |json, (key, item)| {
                    json.string(&key)?;
                    json.push(&json.colon.clone())?;
                    json.value(&item, depth + 1)
                })?;
            }
            kind => {
                let problem = format!("a value of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, problem));
            }
        }
        Ok(())
    }

    fn items<T>(
        &mut self,
        open: char,
        close: char,
        items: impl Iterator<Item = Result<T, Error>>,
        depth: usize,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(open);
        let mut is_empty = true;
        for item in items {
            if !is_empty {
                self.push(&self.comma.clone())?;
            }
            is_empty = false;
            self.new_line(depth + 1)?;
            write(self, item?)?;
        }
        if !is_empty {
            self.new_line(depth)?;
        }
        self.text.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) -> Result<(), Error> {
        if let Some(indent) = self.indent.clone() {
            self.text.push('\n');
            (0..depth).try_for_each(|_| self.push(&indent))?;
        }
        Ok(())
    }

    /// A separator or an indent, which the template chooses: as long as it likes, as often as there are items.
    fn push(&mut self, separator: &str) -> Result<(), Error> {
        self.state.consume_fuel(separator.len() as u64 / 64)?;
        self.text.push_str(separator);
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.state.consume_fuel(text.len() as u64 / 64)?;
        self.text.push('"');
        for char in text.chars() {
            match char {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                char if char < ' ' || (self.ensure_ascii && char > '~') => {
                    for unit in char.encode_utf16(&mut [0; 2]) {
                        write!(self.text, "\\u{unit:04x}").unwrap_or_default();
                    }
                }
                char => self.text.push(char),
            }
        }
        self.text.push('"');
        Ok(())
    }
}

/// A key of an object, as a string.
fn key(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number if key.is_integer() => key.to_string(),
        ValueKind::Number => float(f64::try_from(key.clone())?),
        _ => return Err(Error::new(ErrorKind::BadSerialization, "keys must be strings, numbers or none")),
    })
}

/// A float as Python writes it.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0. { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let text = format!("{number:?}");
    match text.split_once('e') {
        // The same digits and thresholds, but for the exponent: 1e+16, 1e-05.
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// The time now, in the zone of the machine.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(format, &ZonedDateTime::now())
}

fn strftime(format: &str, time: &ZonedDateTime) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, time)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

pub(super) fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(Raised))
}

/// Marks the error of a template that refuses a conversation.
#[derive(Debug)]
pub(super) struct Raised;

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

/// Methods of Python's strings, lists and dicts.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    let whole = |parts: [&str; 3]| Value::from(minijinja::value::Tuple::from(parts.map(Value::from)));
    Ok(match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.split_once(separator) {
                Some((before, after)) => whole([before, separator, after]),
                None => whole([text, "", ""]),
            }
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.rsplit_once(separator) {
                Some((before, after)) => whole([before, separator, after]),
                None => whole(["", "", text]),
            }
        }
        "rsplit" if !args.is_empty() => {
            let (separator, most): (&str, Option<i64>) = from_args(args)?;
            let count = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            let mut parts: Vec<&str> = text.rsplitn(count.saturating_add(1), separator).collect();
            parts.reverse();
            parts.into_iter().map(Value::from).collect()
        }
        _ => return pycompat::unknown_method_callback(state, value, name, args),
    })
}

/// Writes a value as Python's `str` does.
pub(super) fn write(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match text_of_float(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    }
}

/// The filter `string`.
pub(super) fn string(value: &Value) -> String {
    text_of_float(value).unwrap_or_else(|| value.to_string())
}

/// `str` of a float; `None` if the value is none.
fn text_of_float(value: &Value) -> Option<String> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    Some(match f64::try_from(value.clone()).ok()? {
        number if number.is_nan() => "nan".to_owned(),
        number if number.is_infinite() => if number > 0. { "inf" } else { "-inf" }.to_owned(),
        number => float(number),
    })
}

/// Whether Jinja can iterate over a value.
pub(super) fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// Whether Jinja takes a value for a sequence: it has a length and can be indexed.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_those_of_python() {
        for (number, expected) in [
            (0., "0.0"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (1e-4, "0.0001"),
            (1e300, "1e+300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(float(number), expected);
        }
    }

    #[test]
    fn dates_are_those_of_strftime() {
        let time = "2024-07-06T15:04:05[UTC]".parse::<ZonedDateTime>().unwrap();
        for (format, expected) in [
            ("%d %b %Y", "06 Jul 2024"),
            ("%Y-%m-%d", "2024-07-06"),
            ("%B %d, %Y", "July 06, 2024"),
            ("%A %H:%M:%S %j %y", "Saturday 15:04:05 188 24"),
        ] {
            assert_eq!(strftime(format, &time).unwrap(), expected);
        }
        assert!(strftime("%", &time).is_err());
    }
}
