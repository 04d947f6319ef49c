//! What `config.json` or `hf_quant_config.json` say of the quantization.

use super::compressed::{IntegerScheme, Scheme, PACKED_BITS};
use super::fp8::Blocks;
use super::gptq;
use crate::checkpoint::file::Opening;
use crate::checkpoint::kind::QuantMethod;
use crate::checkpoint::sidecar::SidecarFiles;
use crate::{Error, QuantFormat, Result};
use serde_json::{Map, Value};
use std::path::PathBuf;

type Object = Map<String, Value>;

const REMEDY: &str = "correct the file or fetch it again";
const OTHER: &str = "use another quantization of the model, for example one written by mlx_lm.convert";

/// How a checkpoint is quantized, with what the tensors alone don't say.
#[derive(Debug)]
pub(in crate::checkpoint) enum Method {
    Mxfp4,
    Mxfp8(Blocks),
    ModelOpt,
    /// What the config names.
    CompressedTensors(Vec<Scheme>),
    Fp8(Blocks),
    Awq(AwqConfig),
    Gptq(GptqConfig),
    BitsAndBytes,
    Hqq,
}

/// What is expected of all modules; `None` where each may differ.
#[derive(Debug)]
pub(in crate::checkpoint) struct GptqConfig {
    pub bits: Option<usize>,
    pub group_size: Option<usize>,
    /// Whether zeros are in the middle.
    pub symmetric: bool,
    /// Whether zeros are stored less one.
    pub zeros_less_one: bool,
    /// Whether all modules tell the groups of their columns.
    pub is_ordered: bool,
}

#[derive(Debug)]
pub(in crate::checkpoint) struct AwqConfig {
    pub version: AwqVersion,
    pub group_size: Option<usize>,
    /// Whether there are zeros; without them codes are symmetric.
    pub zero_point: bool,
}

/// AutoAWQ's layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum AwqVersion {
    Gemm,
    Gemv,
    GemvFast,
}

impl Method {
    pub(super) fn name(&self) -> QuantMethod {
        match self {
            Self::Mxfp4 => QuantMethod::Mxfp4,
            Self::Mxfp8(_) => QuantMethod::Mxfp8,
            Self::ModelOpt => QuantMethod::ModelOpt,
            Self::CompressedTensors(_) => QuantMethod::CompressedTensors,
            Self::Fp8(_) => QuantMethod::Fp8,
            Self::Awq(_) => QuantMethod::Awq,
            Self::Gptq(_) => QuantMethod::Gptq,
            Self::BitsAndBytes => QuantMethod::BitsAndBytes,
            Self::Hqq => QuantMethod::Hqq,
        }
    }
}

/// The method that a checkpoint names, if it is not MLX's.
///
/// # Errors
/// If it is one that is not read.
pub(in crate::checkpoint) fn find_method(
    config: &Value,
    sidecars: &SidecarFiles,
    opening: &Opening,
) -> Result<Option<Method>> {
    if config.get("quantization").is_some_and(Value::is_object) {
        return Ok(None);
    }
    if let Some(Value::Object(object)) = config.get("quantization_config") {
        let path = sidecars.path("config.json").unwrap_or_default();
        return match object.get("quant_method") {
            None | Some(Value::Null) => Ok(None),
            Some(method) => Source { path, key: "quantization_config" }.method(method, object).map(Some),
        };
    }
    const BESIDE: &str = "hf_quant_config.json";
    let settings = sidecars.json(BESIDE, opening)?;
    match settings.as_ref().and_then(|settings| settings.get("quantization")?.as_object()) {
        Some(object) if object.get("quant_algo").is_some_and(|algo| !algo.is_null()) => {
            let path = sidecars.path(BESIDE).unwrap_or_default();
            Source { path, key: "quantization" }.modelopt(object).map(Some)
        }
        _ => Ok(None),
    }
}

/// Where an object of settings stands.
struct Source {
    path: PathBuf,
    key: &'static str,
}

impl Source {
    fn method(&self, method: &Value, object: &Object) -> Result<Method> {
        match method.as_str().map(str::to_ascii_lowercase).as_deref() {
            Some("mxfp4") => Ok(Method::Mxfp4),
            Some("mxfp8") => {
                let size = self.block_size(object)?.or(Some((1, QuantFormat::MXFP8.group_size())));
                Ok(Method::Mxfp8(Blocks { size, exponents: true }))
            }
            Some("modelopt") => match object.get("quantization") {
                Some(Value::Object(nested)) => self.modelopt(nested),
                _ => self.modelopt(object),
            },
            Some("compressed-tensors") => self.compressed_tensors(object).map(Method::CompressedTensors),
            Some("fp8") => self.fp8(object),
            Some("awq") => self.awq(object),
            Some("gptq") => self.gptq(object),
            Some("bitsandbytes") => Ok(Method::BitsAndBytes),
            // What it says are defaults: each module has its settings beside it.
            Some("hqq") => Ok(Method::Hqq),
            _ => Err(self.unsupported(format!("quant_method {method}"))),
        }
    }

    /// ModelOpt's settings; `quant_algo` of single layers if it is mixed.
    fn modelopt(&self, object: &Object) -> Result<Method> {
        let check = |object: &Object| match object.get("quant_algo").and_then(Value::as_str) {
            Some("NVFP4" | "W4A16_NVFP4") => match self.number(object, "group_size")? {
                None | Some(16) => Ok(()),
                Some(other) => Err(self.wrong(format!("`group_size` is {other}, expected 16 for NVFP4"))),
            },
            // The shape of scales says whose they are.
            Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => Ok(()),
            _ => {
                let algo = object.get("quant_algo").unwrap_or(&Value::Null);
                Err(self.unsupported(format!("quant_method \"modelopt\" with quant_algo {algo}")))
            }
        };
        match (object.get("quant_algo").and_then(Value::as_str), object.get("quantized_layers")) {
            (Some("MIXED_PRECISION"), Some(Value::Object(layers))) => {
                layers.values().try_for_each(|layer| check(layer.as_object().unwrap_or(&Object::new())))?;
            }
            _ => check(object)?,
        }
        Ok(Method::ModelOpt)
    }

    fn compressed_tensors(&self, object: &Object) -> Result<Vec<Scheme>> {
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

    fn fp8(&self, object: &Object) -> Result<Method> {
        for (key, read) in [("fmt", "e4m3"), ("expert_dtype", "fp8")] {
            match object.get(key) {
                None | Some(Value::Null) => {}
                Some(value) if value == read => {}
                Some(other) => {
                    return Err(self.unsupported(format!("quant_method \"fp8\" with {key} {other}")));
                }
            }
        }
        let exponents = match object.get("scale_fmt") {
            None | Some(Value::Null) => false,
            Some(format) if format == "ue8m0" => true,
            Some(format) if format == "float" => false,
            Some(other) => {
                return Err(self.wrong(format!("`scale_fmt` is {other}, expected \"ue8m0\" or \"float\"")))
            }
        };
        Ok(Method::Fp8(Blocks { size: self.block_size(object)?, exponents }))
    }

    fn awq(&self, object: &Object) -> Result<Method> {
        let version = object.get("version").or_else(|| object.get("format")).filter(|value| !value.is_null());
        let version = match version.map(|version| version.as_str().map(str::to_ascii_lowercase)) {
            None => AwqVersion::Gemm,
            Some(Some(name)) if name == "gemm" => AwqVersion::Gemm,
            Some(Some(name)) if name == "gemv" => AwqVersion::Gemv,
            Some(Some(name)) if name == "gemv_fast" => AwqVersion::GemvFast,
            Some(_) => {
                let version = version.unwrap_or(&Value::Null);
                return Err(self.unsupported(format!("quant_method \"awq\" with version {version}")));
            }
        };
        match self.number(object, "bits")? {
            None | Some(4) => {}
            Some(bits) => return Err(self.unsupported(format!("quant_method \"awq\" with {bits} bits"))),
        }
        let group_size = self.group_size(object)?;
        let zero_point = object.get("zero_point") != Some(&Value::Bool(false));
        Ok(Method::Awq(AwqConfig { version, group_size, zero_point }))
    }

    fn gptq(&self, object: &Object) -> Result<Method> {
        let unsupported = |key: &str, value: &Value| {
            Err(self.unsupported(format!("quant_method \"gptq\" with {key} {value}")))
        };
        let given = |key: &str| object.get(key).filter(|value| !value.is_null());
        if given("is_marlin_format").is_some_and(|value| value != false) {
            return unsupported("is_marlin_format", &Value::Bool(true));
        }
        let zeros_less_one = match ["checkpoint_format", "format"].map(|key| (key, given(key))) {
            [(_, None), (_, None)] => true,
            [(key, Some(format)), _] | [_, (key, Some(format))] => match format.as_str() {
                Some("gptq") => true,
                Some("gptq_v2") => false,
                _ => return unsupported(key, format),
            },
        };
        match given("pack_dtype") {
            None => {}
            Some(dtype) if dtype == "int32" => {}
            Some(other) => return unsupported("pack_dtype", other),
        }
        let bits = self.number(object, "bits")?;
        if let Some(bits) = bits.filter(|bits| !gptq::BITS.contains(bits)) {
            return unsupported("bits", &bits.into());
        }
        let group_size = self.group_size(object)?;
        let symmetric = object.get("sym") != Some(&Value::Bool(false));
        // Settings of single modules: the shapes of their tensors say the same.
        let differ =
            given("dynamic").is_some_and(|rules| rules.as_object().is_none_or(|rules| !rules.is_empty()));
        let (bits, group_size) = if differ { (None, None) } else { (bits, group_size) };
        let is_ordered = !differ && object.get("desc_act") == Some(&Value::Bool(true));
        Ok(Method::Gptq(GptqConfig { bits, group_size, symmetric, zeros_less_one, is_ordered }))
    }

    /// `group_size`; `None` for -1, AutoGPTQ's and AutoAWQ's word for one group, whatever K is.
    fn group_size(&self, object: &Object) -> Result<Option<usize>> {
        match object.get("group_size") {
            Some(Value::Number(number)) if number.as_i64() == Some(-1) => Ok(None),
            _ => self.number(object, "group_size"),
        }
    }

    /// `weight_block_size`: rows and columns.
    fn block_size(&self, object: &Object) -> Result<Option<(usize, usize)>> {
        match object.get("weight_block_size") {
            None | Some(Value::Null) => Ok(None),
            sides => self.sides("weight_block_size", sides).map(Some),
        }
    }

    /// Rows and columns of a block.
    fn sides(&self, name: &str, value: Option<&Value>) -> Result<(usize, usize)> {
        let sides = value.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let side = |value: &Value| {
            value.as_u64().and_then(|side| usize::try_from(side).ok()).filter(|side| *side > 0)
        };
        match sides {
            [rows, columns] => match (side(rows), side(columns)) {
                (Some(rows), Some(columns)) => Ok((rows, columns)),
                _ => {
                    Err(self.wrong(format!("`{name}` is [{rows}, {columns}], expected two positive numbers")))
                }
            },
            _ => Err(self.wrong(format!("`{name}` is not a list of two numbers"))),
        }
    }

    /// A positive whole number; `None` if absent or null.
    fn number(&self, object: &Object, name: &str) -> Result<Option<usize>> {
        match object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
                Some(number) if number > 0 => Ok(Some(number)),
                _ => Err(self.wrong(format!("`{name}` is {value}, expected a positive whole number"))),
            },
        }
    }

    fn wrong(&self, problem: String) -> Error {
        Error::file(&self.path, format!("`{}`: {problem}", self.key), REMEDY)
    }

    fn unsupported(&self, what: String) -> Error {
        Error::Unsupported { what: format!("{what} ({})", self.path.display()), remedy: OTHER.into() }
    }
}
