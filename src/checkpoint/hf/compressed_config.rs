//! What the config says of compressed-tensors: a format, and what weights have in each group of modules.

use super::compressed::{IntegerScheme, Scheme, PACKED_BITS};
use super::config::{Object, Source};
use super::fp8::Blocks;
use crate::{QuantFormat, Result};
use serde_json::Value;

impl Source {
    pub(super) fn compressed_tensors(&self, object: &Object) -> Result<Vec<Scheme>> {
        let top = object.get("format").and_then(Value::as_str);
        if let Some(sparsity) = object.get("sparsity_config").and_then(|sparsity| sparsity.get("format")) {
            if sparsity != "dense" {
                return Err(self.unsupported(format!("compressed-tensors with sparsity format {sparsity}")));
            }
        }
        self.check_transforms(object)?;
        let Some(Value::Object(groups)) = object.get("config_groups") else {
            return Err(self.wrong("`config_groups` is missing or no object".into()));
        };
        let mut schemes = Vec::new();
        for (name, group) in groups {
            let weights = match group.get("weights") {
                Some(Value::Object(weights)) => weights,
                None | Some(Value::Null) if group.is_object() => continue,
                _ => return Err(self.wrong(format!("`config_groups.{name}` does not describe weights"))),
            };
            let format = group.get("format").and_then(Value::as_str).or(top);
            let scheme = self.scheme(name, format, weights)?;
            if !schemes.contains(&scheme) {
                schemes.push(scheme);
            }
        }
        match schemes.is_empty() {
            true => Err(self.wrong("`config_groups` names no format of weights".into())),
            false => Ok(schemes),
        }
    }

    /// Refuses rotations of what layers are given or give, which weights alone don't undo. Queries and keys that are rotated
    /// alike have the same products.
    fn check_transforms(&self, object: &Object) -> Result<()> {
        let groups = match object.get("transform_config") {
            None | Some(Value::Null) => None,
            Some(Value::Object(transforms)) => transforms.get("config_groups"),
            Some(_) => return Err(self.wrong("`transform_config` is no object".into())),
        };
        let groups = match groups {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Object(groups)) => groups,
            Some(_) => return Err(self.wrong("`transform_config.config_groups` is no object".into())),
        };
        for (name, group) in groups {
            let Some(Value::Array(applied)) = group.get("apply") else {
                let problem =
                    format!("`transform_config.config_groups.{name}` does not say where it applies");
                return Err(self.wrong(problem));
            };
            let locations = || applied.iter().map(|at| at.get("location").unwrap_or(&Value::Null));
            let has = |location: &str| locations().any(|at| at == location);
            let of_attention = has("q_attn") && has("k_cache");
            let other = locations().find(|at| match at.as_str() {
                Some("weight_input" | "weight_output") => false,
                Some("q_attn" | "k_cache") => !of_attention,
                _ => true,
            });
            if let Some(location) = other {
                let what =
                    format!("compressed-tensors with transform_config `{name}` at location {location}");
                return Err(self.unsupported(what));
            }
        }
        Ok(())
    }

    /// What one of compressed-tensors' groups of modules has.
    fn scheme(&self, name: &str, format: Option<&str>, weights: &Object) -> Result<Scheme> {
        let bits = self.number(weights, "num_bits")?;
        let strategy = weights.get("strategy").and_then(Value::as_str);
        // Of rows it is -1 or null.
        let group_size = match strategy {
            Some("channel" | "tensor") => None,
            _ => self.number(weights, "group_size")?,
        };
        let kind = weights.get("type").and_then(Value::as_str);
        let found = || {
            let keys = ["num_bits", "type", "group_size", "strategy", "symmetric"];
            let shown = keys.map(|key| format!("{key} {}", weights.get(key).unwrap_or(&Value::Null)));
            format!("`config_groups.{name}.weights` has {}", shown.join(", "))
        };
        let float = |format: QuantFormat| {
            let fits = bits.is_none_or(|bits| bits == format.bits())
                && group_size.is_none_or(|size| size == format.group_size())
                && kind.is_none_or(|kind| kind == "float");
            let wrong = || self.wrong(format!("{}, expected those of {format}", found()));
            fits.then_some(Scheme::Floats(format)).ok_or_else(wrong)
        };
        match format {
            Some("nvfp4-pack-quantized") => float(QuantFormat::NVFP4),
            Some("mxfp4-pack-quantized") => float(QuantFormat::MXFP4),
            Some("mxfp8-quantized") => {
                let size = Some((1, QuantFormat::MXFP8.group_size()));
                float(QuantFormat::MXFP8).map(|_| Scheme::Float8(Blocks { size, exponents: true }))
            }
            Some(integers @ ("pack-quantized" | "int-quantized")) => {
                let packed = integers == "pack-quantized";
                let symmetric = weights.get("symmetric") != Some(&Value::Bool(false));
                let of_rows = matches!(strategy, Some("channel" | "tensor"));
                let of_groups = group_size.is_some_and(|size| size % 32 == 0);
                let bits = match (packed, bits) {
                    (true, bits) => bits.filter(|bits| PACKED_BITS.contains(bits)),
                    // Whatever their range, each is a byte.
                    (false, bits) => bits.filter(|bits| *bits <= 8).map(|_| 8),
                };
                match bits.filter(|_| (of_rows || of_groups) && kind.is_none_or(|kind| kind == "int")) {
                    Some(bits) => {
                        // By weight it says only how the tool went on.
                        let order = weights.get("actorder").and_then(Value::as_str);
                        let is_ordered = matches!(order, Some("group" | "dynamic"));
                        let scheme = IntegerScheme { bits, packed, symmetric, group_size, is_ordered };
                        Ok(Scheme::Integers(scheme))
                    }
                    None => {
                        let bits = if packed { "2, 3, 4, 5, 6 or 8" } else { "8 or fewer" };
                        let read = format!(
                            "num_bits {bits}, type int, group_size a multiple of 32 or strategy channel or tensor"
                        );
                        Err(self.unsupported(format!("{integers} that is not {read}: {}", found())))
                    }
                }
            }
            Some(floats @ ("float-quantized" | "naive-quantized")) => {
                let size = match strategy {
                    Some("tensor" | "channel") => Some(None),
                    Some("block") => {
                        Some(Some(self.sides("block_structure", weights.get("block_structure"))?))
                    }
                    _ => None,
                };
                let fits = bits == Some(8) && kind == Some("float");
                match size.filter(|_| fits) {
                    Some(size) => Ok(Scheme::Float8(Blocks { size, exponents: false })),
                    None => {
                        let read = "num_bits 8, type float, strategy tensor, channel or block";
                        Err(self.unsupported(format!("{floats} that is not {read}: {}", found())))
                    }
                }
            }
            other => {
                let other = other.map_or("null".into(), |other| format!("{other:?}"));
                Err(self.unsupported(format!("compressed-tensors with format {other}")))
            }
        }
    }
}
