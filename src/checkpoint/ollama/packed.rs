//! How one packed weight is stored, and in which format.
//!
//! Words and scales alone fix the floating-point formats, and the product of bits and group size of an affine one.
//! What files say of the format may be wrong, so shapes are decisive wherever K is known from the model. Where it
//! is not, all that is said has to leave one reading.

use super::stated::Stated;
use super::tensors::BlobTensor;
use crate::checkpoint::file::{StoredTensor, Warnings};
use crate::{format::Scale, Error, QuantFormat, Result};
use safetensors::Dtype;

/// A packed weight whose parts fit each other.
pub(super) struct Packed<'a> {
    name: &'a str,
    entry: &'a BlobTensor,
    pub scales: &'a StoredTensor,
    pub biases: Option<&'a StoredTensor>,
    /// All dimensions but the last.
    rows: &'a [usize],
    /// 32-bit words of a row.
    words: usize,
    /// Scales of a row.
    groups: usize,
    /// What each scale is.
    scale_kind: Scales,
}

/// What a scale's dtype says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scales {
    Floats,
    Bytes,
    /// Bytes whose meaning is stated.
    BytesOf(Scale),
}

/// What may decide between the readings that shapes leave.
pub(super) struct Evidence<'a> {
    /// K as the model knows it.
    pub in_features: Option<usize>,
    /// K of weights of this name, by the config.
    pub usual_in_features: Option<usize>,
    /// The module's own entry in the config.
    pub config: Option<QuantFormat>,
    /// What is said of the whole model.
    pub model_index: &'a Stated,
}

impl<'a> Packed<'a> {
    /// The packed weight `name`; `None` if it is not packed.
    ///
    /// # Errors
    /// If it is and parts are missing, or don't fit each other.
    #[allow(clippy::wildcard_enum_match_arm, reason = "files have dtypes that nothing here reads")]
    pub(super) fn of(name: &'a str, entry: &'a BlobTensor) -> Result<Option<Self>> {
        let wrong = |expected: &str, found: String| Err(entry.layer.tensor_error(name, expected, found));
        let dtype = entry.stored.dtype();
        let Some(scales) = &entry.parts.scales else {
            return match dtype {
                Dtype::U32 => wrong("scales beside U32 words", "none".into()),
                _ => Ok(None),
            };
        };
        let scale_kind = match scales.dtype() {
            Dtype::U8 => Scales::Bytes,
            Dtype::F8_E4M3 => Scales::BytesOf(Scale::E4m3),
            Dtype::F8_E8M0 => Scales::BytesOf(Scale::E8m0),
            Dtype::F16 | Dtype::BF16 | Dtype::F32 => Scales::Floats,
            other => return wrong("scales in F16, BF16, F32 or U8", format!("{other:?}")),
        };
        let shapes = || {
            let biases = entry.parts.biases.as_ref().map(|biases| format!(" and biases {:?}", biases.dims()));
            let (stored, scales, biases) = (entry.stored.dims(), scales.dims(), biases.unwrap_or_default());
            format!("{dtype:?} {stored:?} with scales {scales:?}{biases}")
        };
        let ([rows @ .., last], [scale_rows @ .., groups]) = (entry.stored.dims(), scales.dims()) else {
            return wrong("two or more dimensions", shapes());
        };
        if rows.is_empty() || rows.contains(&0) || *last == 0 || *groups == 0 {
            return wrong("two or more dimensions, none of them zero", shapes());
        }
        if rows != scale_rows {
            return wrong("the same leading dimensions of words and scales", shapes());
        }
        let words = match dtype {
            Dtype::U8 if last % 4 != 0 => return wrong("rows of whole 32-bit words", shapes()),
            Dtype::U8 => last / 4,
            _ => *last,
        };
        let biases = entry.parts.biases.as_ref();
        match (scale_kind, biases) {
            (Scales::Floats, None) => {
                return wrong("biases beside float scales", format!("{:?} scales alone", scales.dtype()));
            }
            (Scales::Floats, Some(biases)) if biases.dims() != scales.dims() => {
                return wrong("the same shape of scales and biases", shapes());
            }
            (Scales::Floats, Some(biases))
                if !matches!(biases.dtype(), Dtype::F16 | Dtype::BF16 | Dtype::F32) =>
            {
                return wrong("biases in F16, BF16 or F32", format!("{:?}", biases.dtype()));
            }
            (Scales::Bytes | Scales::BytesOf(_), Some(_)) => {
                return wrong("no biases beside scales that are bytes", shapes());
            }
            _ => {}
        }
        Ok(Some(Self { name, entry, scales, biases, rows, words, groups: *groups, scale_kind }))
    }

    pub(super) fn words(&self) -> &'a StoredTensor {
        &self.entry.stored
    }

    /// The logical shape `[.., N, K]` in the resolved format.
    pub(super) fn dims(&self, format: QuantFormat) -> Vec<usize> {
        let mut dims = self.rows.to_vec();
        dims.push(self.k(format));
        dims
    }

    /// Decides the format.
    pub(super) fn resolve(&self, evidence: &Evidence<'_>, warnings: &Warnings) -> Result<QuantFormat> {
        let readings = self.readings();
        let format = match (readings.as_slice(), evidence.in_features) {
            ([], _) => {
                let expected = match self.scale_kind {
                    Scales::Floats => "shapes of an affine format",
                    Scales::Bytes | Scales::BytesOf(_) => {
                        "2 (nvfp4), 4 (mxfp4) or 8 (mxfp8) words for each scale"
                    }
                };
                return Err(self.wrong(expected, self.shapes()));
            }
            (readings, Some(k)) => self.with_k(readings, k).ok_or_else(|| {
                self.unclear(
                    &format!("shapes with K = {k}"),
                    readings,
                    "check the model's dimensions in config.json",
                )
            })?,
            ([only], None) => *only,
            (several, None) => self.by_evidence(several, evidence)?,
        };
        self.compare(format, evidence, warnings)?;
        Ok(format)
    }

    /// The one reading that all evidence leaves. That a blob's metadata is wrong is known to happen where the
    /// config has an entry for the module, so the entry is believed.
    fn by_evidence(&self, readings: &[QuantFormat], evidence: &Evidence<'_>) -> Result<QuantFormat> {
        let only = |stated: &Stated| {
            let mut allowed = readings.iter().copied().filter(|format| stated.allows(*format));
            allowed.next().filter(|_| allowed.next().is_none())
        };
        let entry = evidence.config.filter(|format| readings.contains(format));
        let stated = entry.or_else(|| only(&self.entry.stated));
        let usual = evidence.usual_in_features.and_then(|k| self.with_k(readings, k));
        match (stated, usual) {
            (Some(stated), Some(usual)) if stated != usual => None,
            (Some(format), _) | (None, Some(format)) => Some(format),
            (None, None) => only(evidence.model_index),
        }
        .ok_or_else(|| {
            self.unclear("one reading of the shapes", readings, "give the number of input features")
        })
    }

    /// Compares the format with what files say of it. Byte scales leave no doubt about the format, and no writer
    /// is known that misnames it: a contradiction there is damage.
    fn compare(&self, format: QuantFormat, evidence: &Evidence<'_>, warnings: &Warnings) -> Result<()> {
        let stated = &self.entry.stated;
        let file = self.entry.stored.path().display();
        let warn = |said: String| {
            warnings.once(
                format!("{} in {}", self.name, self.entry.layer.label),
                format!(
                    "{file}: `{}`: {said}; the shapes say {format} (K = {}) and win",
                    self.name,
                    self.k(format)
                ),
            );
        };
        if !stated.allows(format) {
            if self.scale_kind != Scales::Floats {
                let expected = format!("metadata of {format}, as the shapes say");
                return Err(self.wrong(&expected, format!("{stated}, {}", self.shapes())));
            }
            warn(format!("the blob's metadata says {stated}"));
        } else if let Some(oddity) = stated.oddity() {
            warn(oddity);
        }
        if let Some(entry) = evidence.config.filter(|entry| *entry != format) {
            warn(format!("config.json says {entry}"));
        }
        Ok(())
    }

    /// The multiplier of all scales, or one for each matrix of a stack.
    ///
    /// # Errors
    /// If it is no such thing. Reads its values.
    pub(super) fn global_scale(&self, format: QuantFormat) -> Result<Option<&'a StoredTensor>> {
        let Some(tensor) = &self.entry.parts.global_scale else {
            return Ok(None);
        };
        let count = tensor.dims().iter().try_fold(1usize, |product, dim| product.checked_mul(*dim));
        let one_each = matches!(self.rows, [experts, _] if count == Some(*experts));
        if format != QuantFormat::NVFP4 || tensor.dtype() != Dtype::F32 || !(count == Some(1) || one_each) {
            let found = format!("{:?} {:?} on {format}", tensor.dtype(), tensor.dims());
            return Err(
                self.wrong("a global scale in F32, one value or one for each expert, on nvfp4", found)
            );
        }
        let values = tensor.read::<f32>()?;
        match values.iter().find(|value| !value.is_finite() || **value <= 0.0) {
            Some(value) => Err(self.wrong("a global scale above zero", value.to_string())),
            None => Ok(Some(tensor)),
        }
    }

    /// All formats that have this ratio of words to scales. No two of them have the same K.
    fn readings(&self) -> Vec<QuantFormat> {
        let fits_scales = |format: &QuantFormat| match self.scale_kind {
            Scales::Floats => format.has_biases(),
            Scales::Bytes => !format.has_biases(),
            Scales::BytesOf(kind) => format.scale() == kind,
        };
        let mut all = QuantFormat::mlx();
        all.retain(|format| {
            fits_scales(format)
                && format.words_per_row(self.k(*format)).is_ok_and(|words| words == self.words)
        });
        all
    }

    /// Elements of a row. Saturates for formats that do not fit.
    fn k(&self, format: QuantFormat) -> usize {
        self.groups.saturating_mul(format.group_size())
    }

    fn with_k(&self, readings: &[QuantFormat], k: usize) -> Option<QuantFormat> {
        readings.iter().copied().find(|format| self.k(*format) == k)
    }

    fn shapes(&self) -> String {
        let (words, scales) = (&self.entry.stored, self.scales);
        format!("{:?} {:?} with scales {:?} {:?}", words.dtype(), words.dims(), scales.dtype(), scales.dims())
    }

    fn wrong(&self, expected: &str, found: String) -> Error {
        self.entry.layer.tensor_error(self.name, expected, found)
    }

    /// An error that lists the readings.
    fn unclear(&self, expected: &str, readings: &[QuantFormat], remedy: &str) -> Error {
        let each: Vec<_> =
            readings.iter().map(|format| format!("{format} (K = {})", self.k(*format))).collect();
        let found = format!(
            "{}, which fit {}; the metadata says {}",
            self.shapes(),
            each.join(", "),
            self.entry.stated
        );
        let path = self.entry.stored.path();
        self.entry.layer.explain(Error::tensor(path, self.name, expected, found, remedy))
    }
}
