//! How much of a model is in which format.

use super::LayerWeight;
use std::collections::BTreeMap;
use std::fmt;

/// Weights counted by format, for reports: `29 x affine 4-bit g64, 2 x F32; 4.52 bits per weight`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightSummary {
    formats: BTreeMap<String, FormatShare>,
}

/// The weights of one format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FormatShare {
    /// How many weights.
    pub count: usize,
    /// Their logical elements together.
    pub elements: u64,
    /// The bytes they occupy.
    pub bytes: u64,
}

impl WeightSummary {
    /// Counts one weight under the name of its format.
    pub fn add(&mut self, format: impl Into<String>, elements: u64, bytes: u64) {
        let share = self.formats.entry(format.into()).or_default();
        share.count += 1;
        share.elements = share.elements.saturating_add(elements);
        share.bytes = share.bytes.saturating_add(bytes);
    }

    /// The formats and their shares, by name.
    pub fn formats(&self) -> impl Iterator<Item = (&str, FormatShare)> {
        self.formats.iter().map(|(name, share)| (name.as_str(), *share))
    }

    /// Bytes of all weights.
    pub fn size_in_bytes(&self) -> u64 {
        self.formats.values().map(|share| share.bytes).sum()
    }

    /// Logical elements of all weights.
    pub fn elements(&self) -> u64 {
        self.formats.values().map(|share| share.elements).sum()
    }

    /// Stored bits per logical element, scales and biases included; 0 if there are no weights.
    pub fn bits_per_weight(&self) -> f64 {
        match self.elements() {
            0 => 0.,
            elements => self.size_in_bytes() as f64 * 8. / elements as f64,
        }
    }
}

impl FromIterator<LayerWeight> for WeightSummary {
    fn from_iter<I: IntoIterator<Item = LayerWeight>>(weights: I) -> Self {
        let mut summary = Self::default();
        for weight in weights {
            let elements = weight.dims().iter().map(|&dim| dim as u64).product();
            summary.add(weight.format_name(), elements, weight.size_in_bytes() as u64);
        }
        summary
    }
}

impl fmt::Display for WeightSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, share)) in self.formats.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{} x {name}", share.count)?;
        }
        write!(f, "; {:.2} bits per weight", self.bits_per_weight())
    }
}
