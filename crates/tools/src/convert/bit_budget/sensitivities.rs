//! What each weight loses in each of several formats, in memory and in a file.

use crate::convert::options::ConvertOptions;
use crate::convert::recipe::Spec;
use crate::source::fingerprint;
use crate::staging::{io, write_file};
use candle_quant::checkpoint::Checkpoint;
use candle_quant::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// What weights lose in formats, as [`BitAllocation::measure`](super::BitAllocation::measure) finds it. It can be kept
/// in a file, for other numbers of bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sensitivities {
    /// The SHA-256 of the names, sizes and times of the files of the source.
    source: String,
    settings: Settings,
    /// By weight and format, the RMS of the errors over that of the source.
    relative_rms: BTreeMap<String, BTreeMap<String, f64>>,
}

/// The options that the errors depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Settings {
    target: String,
    dtype: Option<String>,
    search: bool,
    /// The digest of the statistics by which columns count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    statistics: Option<String>,
}

impl Settings {
    pub(super) fn of(options: &ConvertOptions) -> Self {
        let target = format!("{:?}", options.target).to_lowercase();
        let dtype = options.dtype.map(|dtype| dtype.as_str().to_owned());
        let statistics = options.statistics.as_ref().map(|statistics| statistics.digest());
        Self { target, dtype, search: options.search, statistics }
    }

    /// In words.
    fn describe(&self) -> String {
        let dtype = self.dtype.as_deref().unwrap_or("none");
        let by =
            self.statistics.as_ref().map_or_else(String::new, |digest| format!(", statistics {digest:.16}"));
        format!("{}, dtype {dtype}, search {}{by}", self.target, self.search)
    }
}

impl Sensitivities {
    /// None yet.
    pub(super) fn new(source: &Checkpoint, settings: Settings) -> Result<Self> {
        Ok(Self { source: fingerprint(source)?, settings, relative_rms: BTreeMap::new() })
    }

    pub(super) fn insert(&mut self, weight: &str, format: Spec, relative_rms: f64) {
        self.relative_rms.entry(weight.to_owned()).or_default().insert(format.to_string(), relative_rms);
    }

    /// What a weight loses in a format, if that was measured: the RMS of the errors over that of the source.
    pub fn relative_rms(&self, weight: &str, format: Spec) -> Option<f64> {
        self.relative_rms.get(weight)?.get(&format.to_string()).copied()
    }

    /// As [`Self::relative_rms`], of what has been measured if all is well.
    pub(super) fn required(&self, weight: &str, format: Spec) -> Result<f64> {
        self.relative_rms(weight, format).ok_or_else(|| {
            let known = self.relative_rms.get(weight).into_iter().flat_map(BTreeMap::keys);
            let known: Vec<_> = known.map(String::as_str).collect();
            let found = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let expected = format!("what `{weight}` loses as {format}");
            Error::mismatch("sensitivities", expected, format!("{found}; measure anew"))
        })
    }

    /// Whether they are those of this source and of such a conversion.
    pub(super) fn check(&self, source: &Checkpoint, settings: &Settings) -> Result<()> {
        if self.source != fingerprint(source)? {
            let expected = format!("those of {} as it is now", source.path().display());
            return Err(Error::mismatch("sensitivities", expected, "those of another source; measure anew"));
        }
        if self.settings != *settings {
            let found = format!("{}; measure anew", self.settings.describe());
            return Err(Error::mismatch("sensitivities", settings.describe(), found));
        }
        Ok(())
    }

    /// Those in a file; `None` if there is none.
    ///
    /// # Errors
    /// If it can't be read, or is none of [`Sensitivities::write`].
    pub fn read(path: impl AsRef<Path>) -> Result<Option<Self>> {
        let path = path.as_ref();
        let text = match fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(io(path))?,
        };
        let wrong = |problem: String| {
            Error::file(path, format!("no sensitivities: {problem}"), "remove it, or give another file")
        };
        let read: Self = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let mut all = read.relative_rms.values().flat_map(BTreeMap::values);
        match all.find(|error| !(error.is_finite() && **error >= 0.)) {
            Some(error) => Err(wrong(format!("an error of {error}"))),
            None => Ok(Some(read)),
        }
    }

    /// Writes them to a file, which appears when it is complete.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| Error::file(path, error.to_string(), "report this"))?;
        write_file(path, format!("{text}\n").as_bytes())
    }
}
