//! What files say of a weight's format. It may be wrong.

use crate::checkpoint::file::Metadata;
use crate::QuantFormat;
use serde_json::Value;
use std::fmt;

/// A type and a group size as text, each of which may be missing.
#[derive(Debug, Default)]
pub(super) struct Stated {
    quant_type: Option<String>,
    group_size: Option<String>,
}

impl Stated {
    /// What the header of a blob says of its tensor `key`: an entry of its own, or one for all tensors.
    pub(super) fn of_tensor(key: &str, metadata: &Metadata) -> Self {
        let get = |what: &str| metadata.get(&format!("{key}.{what}")).or_else(|| metadata.get(what)).cloned();
        Self { quant_type: get("quant_type"), group_size: get("group_size") }
    }

    /// What `model_index.json` says of the whole model.
    pub(super) fn of_model_index(index: &Value) -> Self {
        Self {
            quant_type: index.get("quantization").and_then(Value::as_str).map(str::to_owned),
            group_size: index.get("group_size").and_then(Value::as_u64).map(|size| size.to_string()),
        }
    }

    /// Mode and bits of the type; `None` if there is none, or an unknown one. `fp4` and `fp8` are old names of
    /// affine types.
    fn mode_and_bits(&self) -> Option<(&'static str, usize)> {
        match self.quant_type.as_deref()?.trim().to_ascii_lowercase().as_str() {
            "int4" | "q4" | "fp4" => Some(("affine", 4)),
            "int8" | "q8" | "fp8" => Some(("affine", 8)),
            "nvfp4" => Some(("nvfp4", 4)),
            "mxfp4" => Some(("mxfp4", 4)),
            "mxfp8" => Some(("mxfp8", 8)),
            _ => None,
        }
    }

    fn group_size(&self) -> Option<usize> {
        self.group_size.as_deref()?.trim().parse().ok()
    }

    /// Why a part of it says nothing, if so.
    pub(super) fn oddity(&self) -> Option<String> {
        let type_is_unknown = self.quant_type.is_some() && self.mode_and_bits().is_none();
        let group_is_odd = self.group_size.is_some() && self.group_size().is_none();
        match (type_is_unknown, group_is_odd) {
            (false, false) => None,
            (true, _) => Some(format!("the type of {self} is unknown")),
            (false, true) => Some(format!("the group size of {self} is no number")),
        }
    }

    /// Whether it can be meant to say this. What says nothing allows everything.
    pub(super) fn allows(&self, format: QuantFormat) -> bool {
        let type_fits = match (self.mode_and_bits(), &self.quant_type) {
            (Some(stated), _) => stated == (format.mode(), format.bits()),
            (None, None) => true,
            // Nothing is known of an unknown type, so its group size means nothing either.
            (None, Some(_)) => return true,
        };
        type_fits && self.group_size().is_none_or(|size| size == format.group_size())
    }
}

impl fmt::Display for Stated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.quant_type, &self.group_size) {
            (Some(quant_type), Some(size)) => write!(f, "{quant_type:?} with group size {size:?}"),
            (Some(quant_type), None) => write!(f, "{quant_type:?}"),
            (None, Some(size)) => write!(f, "group size {size:?}"),
            (None, None) => f.write_str("nothing"),
        }
    }
}

/// What the quantization object of `config.json` says of the module, if it is a format that Ollama has.
pub(super) fn entry_of_config(config: &Value, module: &str) -> Option<QuantFormat> {
    let entry = |key: &str| config.get(key)?.get(module)?.as_object();
    let entry = entry("quantization").or_else(|| entry("quantization_config"))?;
    let number =
        |key: &str, default: u64| entry.get(key).map_or(Some(default), Value::as_u64)?.try_into().ok();
    match entry.get("mode").map_or(Some("affine"), Value::as_str)? {
        "affine" => QuantFormat::affine(number("bits", 4)?, number("group_size", 64)?).ok(),
        mode => QuantFormat::mlx().into_iter().find(|format| format.mode() == mode),
    }
}
