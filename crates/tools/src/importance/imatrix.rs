//! Importance matrices of llama.cpp: the old binary files, and GGUF files of `general.type` "imatrix".
//!
//! | | old (`.dat`) | GGUF |
//! |---|---|---|
//! | an entry | name, number of calls, values | `NAME.in_sum2` and `NAME.counts` |
//! | values | mean squares times the number of calls | sums of squares |
//! | experts | one after another in the values | one row and one count for each |

use super::columns::ColumnSums;
use super::statistics::Statistics;
use crate::staging::io;
use candle_core::{DType, Device};
use candle_quant::checkpoint::{module_of_gguf, Checkpoint};
use candle_quant::{Error, Result};
use candle_quant_models::Config;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

const SQUARES: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const REMEDY: &str = "make it again with llama-imatrix";

/// The statistics of an importance matrix of llama.cpp, for the model of a checkpoint, by whose names they get theirs.
///
/// # Errors
/// If the file can't be read, is malformed, or is of another model; if the names that llama.cpp has for this model are not
/// known.
pub fn read_imatrix(source: &Checkpoint, path: impl AsRef<Path>) -> Result<Statistics> {
    let path = path.as_ref();
    let entries = match is_gguf(path)? {
        true => gguf(path)?,
        false => Old { path, bytes: &fs::read(path).map_err(io(path))? }.entries()?,
    };
    let model_type = |config: &serde_json::Value| Some(config.get("model_type")?.as_str()?.to_owned());
    let config = source.config();
    let model_type = config.get("text_config").and_then(model_type).or_else(|| model_type(config));
    let experts = Config::from_json(config).ok().and_then(|config| config.moe).map(|moe| moe.experts);
    let mut modules = BTreeMap::new();
    for (name, Entry { counts, squares }) in entries {
        let Some(module) = module_of_gguf(model_type.as_deref().unwrap_or_default(), &name)? else {
            continue;
        };
        let of_experts = experts.filter(|_| name.contains("_exps."));
        // Old files do not say of how many experts the values are.
        let counts = match (counts.as_slice(), of_experts) {
            ([one], Some(experts)) if squares.len() % experts.max(1) == 0 => vec![*one; experts],
            _ => counts,
        };
        let columns = squares.len() / counts.len().max(1);
        let what = format!("{}: `{name}`", path.display());
        let sums = ColumnSums::of(&what, counts, squares, columns)?;
        if modules.insert(module.clone(), sums).is_some() {
            return Err(Error::mismatch(what, format!("one entry for `{module}`"), "two"));
        }
    }
    if modules.is_empty() {
        let problem = "an importance matrix without an entry for a weight of the model";
        return Err(Error::file(path, problem, "give one that was made with this model"));
    }
    Ok(Statistics::new(path.display().to_string(), modules))
}

/// What one weight is given.
struct Entry {
    counts: Vec<u64>,
    squares: Vec<f64>,
}

fn is_gguf(path: &Path) -> Result<bool> {
    let mut magic = [0; 4];
    match File::open(path).and_then(|mut file| file.read_exact(&mut magic)) {
        Ok(()) => Ok(magic == *b"GGUF"),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(io(path)(error)),
    }
}

fn gguf(path: &Path) -> Result<BTreeMap<String, Entry>> {
    let file = Checkpoint::open(path)?;
    let kind = file.metadata()?.remove("general.type");
    if kind.as_deref() != Some("imatrix") {
        let found = kind.map_or_else(|| "none".to_owned(), |kind| format!("{kind:?}"));
        let problem = format!("expected `general.type` \"imatrix\", found {found}");
        return Err(Error::file(path, problem, "give an importance matrix, not a model"));
    }
    let numbers = |tensor: &str| -> Result<Vec<f64>> {
        let stored = file.dense(tensor)?.load(DType::F64, &Device::Cpu)?;
        Ok(stored.flatten_all()?.to_vec1::<f64>()?)
    };
    let mut entries = BTreeMap::new();
    for tensor in file.tensor_names() {
        let Some(name) = tensor.strip_suffix(SQUARES) else {
            let module = tensor.strip_suffix(COUNTS);
            if module.is_none_or(|module| !file.contains(&format!("{module}{SQUARES}"))) {
                let expected = format!("names that end in {SQUARES} and {COUNTS}, in pairs");
                return Err(Error::tensor(path, tensor, expected, "this one", REMEDY));
            }
            continue;
        };
        let counts = numbers(&format!("{name}{COUNTS}"))?;
        if let Some(wrong) = counts.iter().find(|count| !(count.is_finite() && **count >= 0.)) {
            let expected = "counts, finite and not below zero";
            return Err(Error::tensor(path, format!("{name}{COUNTS}"), expected, wrong.to_string(), REMEDY));
        }
        let counts = counts.into_iter().map(|count| count.round() as u64).collect();
        entries.insert(name.to_owned(), Entry { counts, squares: numbers(tensor)? });
    }
    Ok(entries)
}

/// An old file, of which nothing is read beyond its end.
struct Old<'a> {
    path: &'a Path,
    bytes: &'a [u8],
}

impl<'a> Old<'a> {
    fn entries(mut self) -> Result<BTreeMap<String, Entry>> {
        let count = self.number("the number of entries")?;
        let mut entries = BTreeMap::new();
        for index in 0..count {
            let what = format!("entry {index} of {count}");
            let length = self.number(&what)?;
            let name = self.take(&what, length)?;
            let name =
                std::str::from_utf8(name).map_err(|_| self.wrong(&what, "a name in UTF-8"))?.to_owned();
            let what = format!("`{name}` ({what})");
            let (calls, values) = (self.number(&what)?, self.number(&what)?);
            if calls == 0 || values == 0 {
                return Err(self.wrong(&what, &format!("calls and values, found {calls} and {values}")));
            }
            let values = values.checked_mul(4).ok_or_else(|| self.wrong(&what, "values"))?;
            let values = self.take(&what, values)?;
            let value = |bytes: &[u8; 4]| f64::from(f32::from_le_bytes(*bytes));
            // Of experts that were not called, values are filled up: no mean says so here.
            let squares = values.as_chunks::<4>().0.iter().map(value).collect();
            if entries.insert(name, Entry { counts: vec![calls as u64], squares }).is_some() {
                return Err(self.wrong(&what, "each name once"));
            }
        }
        Ok(entries)
    }

    fn number(&mut self, what: &str) -> Result<usize> {
        let bytes = self.take(what, 4)?;
        let number = bytes.first_chunk().map(|bytes| i32::from_le_bytes(*bytes));
        number
            .and_then(|number| usize::try_from(number).ok())
            .ok_or_else(|| self.wrong(what, "a count that is not below zero"))
    }

    fn take(&mut self, what: &str, count: usize) -> Result<&'a [u8]> {
        match self.bytes.split_at_checked(count) {
            Some((taken, rest)) => {
                self.bytes = rest;
                Ok(taken)
            }
            None => Err(self.wrong(what, &format!("{count} bytes, of which {} are left", self.bytes.len()))),
        }
    }

    fn wrong(&self, what: &str, expected: &str) -> Error {
        let problem = format!("no importance matrix of llama.cpp: {what}: expected {expected}");
        Error::file(self.path, problem, REMEDY)
    }
}
