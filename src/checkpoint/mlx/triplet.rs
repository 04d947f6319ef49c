//! How one module of an MLX checkpoint is stored: dense, or packed in which format.
//!
//! Packed words and scales alone fix only the product of bits and group size. What decides between the
//! candidates is, in this order: the module's own entry in the config, the number of input features
//! that the model knows, the byte-sized scales that affine formats do not have, and the top level of the
//! config.

use super::config::{Override, Quantization};
use crate::checkpoint::file::{StoredTensor, Tensors, Warnings};
use crate::checkpoint::weight::{tensor_of, GlobalScale, GlobalScaleMeaning};
use crate::{format::Scale, Error, QuantFormat, Result};
use safetensors::Dtype;

/// The tensors of one packed module, checked against each other.
pub(super) struct Triplet<'a> {
    module: &'a str,
    pub weight: &'a StoredTensor,
    pub scales: &'a StoredTensor,
    pub biases: Option<&'a StoredTensor>,
    /// The largest magnitude of the tensor (of each expert), not yet a multiplier.
    global_scale: Option<&'a StoredTensor>,
    /// All dimensions but the last.
    rows: &'a [usize],
    /// 32-bit words of a row.
    words: usize,
    /// Scales of a row.
    groups: usize,
    /// Whether scales are bytes, and not floats.
    byte_scales: bool,
}

impl<'a> Triplet<'a> {
    /// The packed tensors of `module`; `None` if it has no scales, that is, if it is not packed.
    pub(super) fn find(tensors: &'a Tensors, module: &'a str) -> Result<Option<Self>> {
        let get = |suffix: &str| tensors.get(&tensor_of(module, suffix));
        let Some(scales) = get("scales") else {
            return Ok(None);
        };
        let Some(weight) = get("weight") else {
            return Err(wrong(module, "scales", scales, "a packed weight beside the scales", "no weight"));
        };
        if weight.dtype() != Dtype::U32 {
            return Err(wrong(
                module,
                "weight",
                weight,
                "U32 words, as there are scales beside them",
                format!("{:?}", weight.dtype()),
            ));
        }
        let ([rows @ .., words], [scale_rows @ .., groups]) = (weight.dims(), scales.dims()) else {
            return Err(wrong(module, "weight", weight, "shapes of two or more dimensions", "a scalar"));
        };
        if rows.is_empty() || rows.contains(&0) || *words == 0 || *groups == 0 {
            return Err(wrong(
                module,
                "weight",
                weight,
                "two or more dimensions, none of them zero",
                format!("weight {:?}, scales {:?}", weight.dims(), scales.dims()),
            ));
        }
        if rows != scale_rows {
            return Err(wrong(
                module,
                "scales",
                scales,
                format!("the leading dimensions {rows:?} of the weight"),
                format!("{scale_rows:?}"),
            ));
        }
        let triplet = Self {
            module,
            weight,
            scales,
            biases: get("biases"),
            global_scale: get("global_scale"),
            rows,
            words: *words,
            groups: *groups,
            byte_scales: has_byte_scales(module, scales)?,
        };
        triplet.check_biases()?;
        Ok(Some(triplet))
    }

    /// Biases lie beside float scales, and are of the same shape.
    fn check_biases(&self) -> Result<()> {
        let (scales, byte_scales) = (self.scales, self.byte_scales);
        let Some(biases) = self.biases else { return Ok(()) };
        let expected = if byte_scales {
            format!("no biases beside {:?} scales", scales.dtype())
        } else if biases.dims() != scales.dims() {
            format!("the shape {:?} of the scales", scales.dims())
        } else if !is_affine_dtype(biases.dtype()) {
            "F16, BF16 or F32".into()
        } else {
            return Ok(());
        };
        let found = format!("{:?} {:?}", biases.dtype(), biases.dims());
        Err(wrong(self.module, "biases", biases, expected, found))
    }

    /// Float scales come without biases only if the config names a format that has none: MLX has no such format.
    fn check_missing_biases(&self, config: &Quantization) -> Result<()> {
        let named = match config.overrides.get(self.module) {
            Some(Override::Packed(format)) => Some(*format),
            Some(Override::Dense) | None => config.top,
        };
        let has_none = named.is_some_and(|format| !format.scale().is_byte() && !format.has_biases());
        if self.byte_scales || self.biases.is_some() || has_none {
            return Ok(());
        }
        let expected = format!("biases beside {:?} scales", self.scales.dtype());
        Err(wrong(self.module, "scales", self.scales, expected, "none"))
    }

    /// Decides the format. `in_features` is K as the model knows it.
    pub(super) fn resolve(
        &self,
        config: &Quantization,
        in_features: Option<usize>,
        warnings: &Warnings,
    ) -> Result<QuantFormat> {
        self.check_missing_biases(config)?;
        let format = match config.overrides.get(self.module) {
            Some(Override::Dense) => {
                return Err(self.wrong(
                    "no scales, as the config says that this module is not quantized (`false`)",
                    "packed tensors",
                    "remove the entry from config.json, or fetch files of one revision",
                ));
            }
            Some(&Override::Packed(format)) => self.check_override(format, in_features, config.top)?,
            None => match in_features {
                Some(k) => self.by_shape(k, config.top)?,
                None => self.without_in_features(config.top)?,
            },
        };
        self.check_scale_dtype(format)?;
        self.check_global_scale(format)?;
        if !config.overrides.contains_key(self.module) {
            self.compare_with_top(config.top, format, warnings);
        }
        Ok(format)
    }

    /// The logical shape `[.., N, K]` in the resolved format.
    pub(super) fn dims(&self, format: QuantFormat) -> Vec<usize> {
        let mut dims = self.rows.to_vec();
        dims.push(self.k(format));
        dims
    }

    /// The largest magnitude of the tensor, or of each expert.
    pub(super) fn global_scale(&self) -> Option<GlobalScale> {
        let tensor = self.global_scale?.clone();
        Some(GlobalScale { name: "global_scale", tensor, meaning: GlobalScaleMeaning::Absmax })
    }

    /// Elements of a row. Saturates for formats that do not fit.
    fn k(&self, format: QuantFormat) -> usize {
        self.groups.saturating_mul(format.group_size())
    }

    /// Whether words and groups of a row belong to the same K in this format.
    fn fits(&self, format: QuantFormat) -> bool {
        format.words_per_row(self.k(format)).is_ok_and(|words| words == self.words)
    }

    fn check_override(
        &self,
        format: QuantFormat,
        in_features: Option<usize>,
        top: Option<QuantFormat>,
    ) -> Result<QuantFormat> {
        let float_scales = !format.scale().is_byte();
        if float_scales == self.byte_scales {
            let expected = match (float_scales, format.has_biases()) {
                (true, true) => "float scales and biases",
                (true, false) => "float scales",
                (false, _) => "U8 scales",
            };
            return Err(self.wrong(
                format!("{expected} for the {format} of its entry in the config (no mode means affine)"),
                self.shapes(),
                "correct the entry in config.json",
            ));
        }
        if let Some(biases) = self.biases.filter(|_| !format.has_biases()) {
            let expected = format!("no biases, as {format} of its entry in the config has none");
            return Err(wrong(self.module, "biases", biases, expected, "biases"));
        }
        if self.fits(format) && in_features.is_none_or(|k| k == self.k(format)) {
            return Ok(format);
        }
        Err(self.wrong(
            format!("shapes of the {format} of its entry in the config{}", with_k(in_features)),
            self.shapes(),
            format!("correct the entry in config.json; {}", self.candidates_text(top)),
        ))
    }

    /// The one format in which rows of K elements have these words and groups.
    fn by_shape(&self, k: usize, top: Option<QuantFormat>) -> Result<QuantFormat> {
        self.candidates(top).into_iter().find(|format| self.k(*format) == k).ok_or_else(|| {
            self.wrong(
                format!("shapes of a quantized weight{}", with_k(Some(k))),
                self.shapes(),
                format!("check the model's dimensions in config.json; {}", self.candidates_text(top)),
            )
        })
    }

    fn without_in_features(&self, top: Option<QuantFormat>) -> Result<QuantFormat> {
        if self.byte_scales {
            // Words per scale are 2, 4 and 8 in the three formats of MLX, so there is at most one.
            return self.candidates(top).first().copied().ok_or_else(|| {
                self.wrong(
                    "shapes of mxfp4, nvfp4 or mxfp8, or of the format that the config names",
                    self.shapes(),
                    "fetch or convert the file again",
                )
            });
        }
        let candidates = self.candidates(top);
        match (top, candidates.as_slice()) {
            (Some(format), _) if candidates.contains(&format) => Ok(format),
            // Writers that mix widths keep the size of groups, and readers take the width from shapes.
            (Some(format), _) => {
                let is_alike = |other: &QuantFormat| {
                    other.group_size() == format.group_size() && other.has_biases() == format.has_biases()
                };
                let alike = candidates.into_iter().find(is_alike);
                alike.ok_or_else(|| {
                    self.wrong(
                        format!("shapes of the {format} that the config names, or of one with its groups"),
                        self.shapes(),
                        format!("give the number of input features; {}", self.candidates_text(top)),
                    )
                })
            }
            (None, [only]) => Ok(*only),
            (None, _) => Err(self.wrong(
                "a quantization object in config.json, or a known number of input features",
                self.shapes(),
                format!("give the number of input features; {}", self.candidates_text(top)),
            )),
        }
    }

    /// Bytes that call themselves E4M3 or E8M0 have to be what the format reads them as.
    fn check_scale_dtype(&self, format: QuantFormat) -> Result<()> {
        let contradicts = match format.scale() {
            Scale::E8m0 => self.scales.dtype() == Dtype::F8_E4M3,
            Scale::E4m3 => self.scales.dtype() == Dtype::F8_E8M0,
            Scale::Float => !is_affine_dtype(self.scales.dtype()),
            Scale::SuperBlock => true,
        };
        if !contradicts {
            return Ok(());
        }
        Err(wrong(
            self.module,
            "scales",
            self.scales,
            format!("{:?} scales for {format}", format.scale()),
            format!("{:?}", self.scales.dtype()),
        ))
    }

    fn check_global_scale(&self, format: QuantFormat) -> Result<()> {
        let Some(global_scale) = self.global_scale else {
            return Ok(());
        };
        let dims = global_scale.dims();
        let one_each = matches!(self.rows, [experts, _] if dims == [*experts]);
        if format == QuantFormat::NVFP4
            && global_scale.dtype() == Dtype::F32
            && (dims.is_empty() || dims == [1] || one_each)
        {
            return Ok(());
        }
        Err(wrong(
            self.module,
            "global_scale",
            global_scale,
            "F32, one value or one for each expert, on an nvfp4 weight",
            format!("{:?} {dims:?} on a {format} weight {:?}", global_scale.dtype(), self.weight.dims()),
        ))
    }

    /// Warns where the shapes were decisive against the top level, once for each pair of formats.
    fn compare_with_top(&self, top: Option<QuantFormat>, format: QuantFormat, warnings: &Warnings) {
        let file = self.weight.path().display();
        match top {
            Some(top) if top == format => {}
            Some(top) => warnings.once(
                format!("{top} against {format}"),
                format!(
                    "{file}: config.json says {top}, the shapes of `{}` say {format}: the shapes win, here and in modules alike",
                    self.module
                ),
            ),
            None => warnings.once(
                "no quantization object".into(),
                format!(
                    "{file}: packed weights without a quantization object in config.json: formats are taken from shapes (`{}`: {format})",
                    self.module
                ),
            ),
        }
    }

    /// All formats of MLX, and the one that the config names, that have such scales and this ratio of words to scales.
    /// No two of them have the same K: where MLX has one of the K of the named one, that is meant.
    fn candidates(&self, top: Option<QuantFormat>) -> Vec<QuantFormat> {
        let has_parts = |format: QuantFormat| {
            format.scale().is_byte() == self.byte_scales && format.has_biases() == self.biases.is_some()
        };
        let mut all = QuantFormat::mlx();
        all.retain(|format| has_parts(*format) && self.fits(*format));
        if let Some(top) = top.filter(|top| has_parts(*top) && self.fits(*top)) {
            match all.iter_mut().find(|format| self.k(**format) == self.k(top)) {
                Some(same_k) => *same_k = top,
                None => all.push(top),
            }
        }
        all
    }

    fn candidates_text(&self, top: Option<QuantFormat>) -> String {
        let each: Vec<_> = self
            .candidates(top)
            .into_iter()
            .map(|format| format!("{format} (K = {})", self.k(format)))
            .collect();
        match each.is_empty() {
            true => "the shapes fit no format".into(),
            false => format!("the shapes fit {}", each.join(", ")),
        }
    }

    fn shapes(&self) -> String {
        format!(
            "weight U32 {:?} and scales {:?} {:?}",
            self.weight.dims(),
            self.scales.dtype(),
            self.scales.dims()
        )
    }

    fn wrong(
        &self,
        expected: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Tensor {
            file: self.weight.path().into(),
            tensor: self.module.to_owned(),
            expected: expected.into(),
            found: found.into(),
            remedy: remedy.into(),
        }
    }
}

fn is_affine_dtype(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32)
}

#[allow(clippy::wildcard_enum_match_arm, reason = "files have dtypes that nothing here reads")]
fn has_byte_scales(module: &str, scales: &StoredTensor) -> Result<bool> {
    match scales.dtype() {
        Dtype::U8 | Dtype::F8_E4M3 | Dtype::F8_E8M0 => Ok(true),
        dtype if is_affine_dtype(dtype) => Ok(false),
        other => {
            let expected = "F16, BF16 or F32, or U8 for scales that are bytes";
            Err(wrong(module, "scales", scales, expected, format!("{other:?}")))
        }
    }
}

fn with_k(in_features: Option<usize>) -> String {
    in_features.map_or_else(String::new, |k| format!(" with K = {k}"))
}

/// An error about one tensor of a module.
fn wrong(
    module: &str,
    suffix: &str,
    tensor: &StoredTensor,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> Error {
    Error::Tensor {
        file: tensor.path().into(),
        tensor: tensor_of(module, suffix),
        expected: expected.into(),
        found: found.into(),
        remedy: "the file is not a valid MLX checkpoint: fetch or convert it again".into(),
    }
}
