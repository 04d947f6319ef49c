//! How formats are written: `affine 4-bit g64`, and `affine:4:g64` without blanks.

use super::{Bits, QuantFormat, Scale, ZeroPoint};
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The group size of affine and symmetric formats for which none is given.
const DEFAULT_GROUP_SIZE: usize = 64;

impl QuantFormat {
    /// What [`QuantFormat::from_str`] reads, but for those that are [only read](QuantFormat::only_read).
    pub fn grammar() -> String {
        let names = Self::names().join(", ");
        let affine = "affine:BITS[:gGROUP] (BITS 1, 2, 3, 4, 5, 6 or 8; GROUP 32, 64 or 128)";
        format!("{affine}, a width alone (4, q4, int4, 4bit, afq4), {names}")
    }

    /// The names of the formats without parameters.
    pub(crate) fn names() -> [&'static str; Self::NAMED.len()] {
        Self::NAMED.map(|(name, _)| name)
    }

    /// The name of the format's family, MLX's word where MLX has it: `affine`, `mxfp4`, `nvfp4`, `mxfp8`; or `symmetric`, `fp8`,
    /// or GGML's name in lower case.
    pub fn mode(self) -> &'static str {
        if let Some((name, _)) = Self::GGML.iter().find(|(_, format)| *format == self) {
            return name;
        }
        match self.zero_point() {
            ZeroPoint::Bias => "affine",
            ZeroPoint::Midpoint => "symmetric",
            ZeroPoint::None if self.is_fp8() => "fp8",
            ZeroPoint::None => {
                let named = Self::NAMED.iter().find(|(_, format)| *format == self);
                named.map_or("unnamed", |(name, _)| name)
            }
        }
    }

    fn is_fp8(self) -> bool {
        Self::fp8_opt(self.group_size()) == Some(self)
    }

    /// The format without parameters that has this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMED.iter().chain(&Self::GGML).find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    /// Bits of the codes, if they are integers whose format has a width and a group size.
    fn integer_bits(self) -> Option<Bits> {
        match (self.scale(), self.zero_point()) {
            (Scale::Float, ZeroPoint::Bias | ZeroPoint::Midpoint) => self.element().uint(),
            _ => None,
        }
    }
}

/// `affine 4-bit g64`; with `{:#}` `affine:4:g64`. Formats without parameters are their names.
impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mode, group_size) = (self.mode(), self.group_size());
        match self.integer_bits() {
            Some(bits) if f.alternate() => write!(f, "{mode}:{}:g{group_size}", bits.get()),
            Some(bits) => write!(f, "{mode} {}-bit g{group_size}", bits.get()),
            None if self.is_fp8() && f.alternate() => write!(f, "{mode}:g{group_size}"),
            None if self.is_fp8() => write!(f, "{mode} g{group_size}"),
            None => f.write_str(mode),
        }
    }
}

impl FromStr for QuantFormat {
    type Err = Error;

    /// Reads both forms that are written, in upper or lower case; without a group size it is 64, and a width alone
    /// (`4`, `q4`, `int4`, `4bit`, `afq4`) is an affine format.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::mismatch("format", Self::grammar(), format!("`{text}`"));
        let lower = text.trim().to_ascii_lowercase();
        let mut words = lower.split([':', ' ']);
        let first = words.next().unwrap_or_default();
        let format = match Self::named(first) {
            Some(format) => format,
            None if first == "fp8" => {
                let group =
                    words.next().and_then(|group| number(group.strip_prefix('g')?)).ok_or_else(wrong)?;
                Self::fp8_opt(group).ok_or_else(wrong)?
            }
            None => {
                let of: fn(usize, usize) -> Option<Self> = match first {
                    "symmetric" => Self::symmetric_opt,
                    _ => Self::affine_opt,
                };
                let bits = match first {
                    "affine" | "symmetric" => {
                        let bits = words.next().ok_or_else(wrong)?;
                        bits.strip_suffix("-bit").unwrap_or(bits)
                    }
                    alias => ["q", "int", "afq"]
                        .into_iter()
                        .find_map(|prefix| alias.strip_prefix(prefix))
                        .or_else(|| alias.strip_suffix("bit"))
                        .unwrap_or(alias),
                };
                let group_size = match words.next() {
                    None => DEFAULT_GROUP_SIZE,
                    Some(group) => number(group.strip_prefix('g').unwrap_or_default()).ok_or_else(wrong)?,
                };
                number(bits).and_then(|bits| of(bits, group_size)).ok_or_else(wrong)?
            }
        };
        match words.next() {
            None => Ok(format),
            Some(_) => Err(wrong()),
        }
    }
}

/// A number of digits only: `parse` also takes a sign.
fn number(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_read_as_it_is_written() {
        for format in QuantFormat::all().into_iter().chain(QuantFormat::only_read()) {
            assert_eq!(format.to_string().parse::<QuantFormat>().unwrap(), format);
            assert_eq!(format!("{format:#}").parse::<QuantFormat>().unwrap(), format);
        }
    }

    #[test]
    fn what_is_no_format_is_refused_with_the_grammar() {
        for text in
            ["", "7", "affine", "affine:4:64", "affine 7-bit g64", "4:g", "mxfp4:g32", "unnamed", "+4"]
        {
            let error = text.parse::<QuantFormat>().unwrap_err().to_string();
            assert!(
                error.contains("affine:BITS[:gGROUP]") && error.contains(&format!("`{text}`")),
                "{error}"
            );
        }
    }
}
