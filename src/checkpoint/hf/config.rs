//! What `config.json`, or a file beside it, says of the quantization.
//!
//! | file | written by |
//! |---|---|
//! | `config.json`, `quantization_config` | all tools today |
//! | `hf_quant_config.json`, `quantization` | ModelOpt |
//! | `quantize_config.json` | AutoGPTQ, before the config had a place for it |
//! | `quant_config.json` | AutoAWQ, likewise, under names of its own |

use super::compressed::Scheme;
use super::fp8::Blocks;
use super::gptq;
use crate::checkpoint::file::{Opening, Tensors};
use crate::checkpoint::kind::QuantMethod;
use crate::checkpoint::sidecar::SidecarFiles;
use crate::{Error, QuantFormat, Result};
use serde_json::{Map, Value};
use std::path::PathBuf;

pub(super) type Object = Map<String, Value>;

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
    Marlin,
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

/// The method that a checkpoint of these tensors names, if it is not MLX's.
///
/// # Errors
/// If it is one that is not read.
pub(in crate::checkpoint) fn find_method(
    config: &Value,
    tensors: &Tensors,
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
            Some(method) => {
                Source { path, key: Some("quantization_config") }.method(method, object).map(Some)
            }
        };
    }
    const BESIDE: &str = "hf_quant_config.json";
    let settings = sidecars.json(BESIDE, opening)?;
    match settings.as_ref().and_then(|settings| settings.get("quantization")?.as_object()) {
        Some(object) if object.get("quant_algo").is_some_and(|algo| !algo.is_null()) => {
            let path = sidecars.path(BESIDE).unwrap_or_default();
            Source { path, key: Some("quantization") }.modelopt(object).map(Some)
        }
        _ => older_method(tensors, sidecars, opening),
    }
}

/// The method that AutoGPTQ or AutoAWQ name in a file of their own.
fn older_method(tensors: &Tensors, sidecars: &SidecarFiles, opening: &Opening) -> Result<Option<Method>> {
    // The file may have been left beside another form of the model: codes of theirs (or of Marlin) tell.
    let is_code = |name: &str| matches!(name.rsplit('.').next(), Some("qweight" | "B"));
    if !tensors.keys().any(is_code) {
        return Ok(None);
    }
    for name in ["quantize_config.json", "quant_config.json"] {
        if let Some(settings) = sidecars.json(name, opening)? {
            let source = Source { path: sidecars.path(name).unwrap_or_default(), key: None };
            return source.older(&settings).map(Some);
        }
    }
    Ok(None)
}

/// Where an object of settings stands.
pub(super) struct Source {
    path: PathBuf,
    /// `None` if it is all of the file.
    key: Option<&'static str>,
}

impl Source {
    /// The method of a file that need not name it: both tools have written both files, each with keys of its own.
    fn older(&self, settings: &Value) -> Result<Method> {
        let Value::Object(object) = settings else { return Err(self.wrong("not a JSON object".into())) };
        let has = |key: &str| object.contains_key(key);
        match object.get("quant_method").filter(|method| !method.is_null()) {
            Some(method) => self.method(method, object),
            None if has("w_bit") || has("q_group_size") || has("zero_point") => self.awq(object),
            None if has("bits") => self.gptq(object),
            None => Err(self.wrong("there is none of `quant_method`, `bits` and `w_bit` in it".into())),
        }
    }

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
            Some(Some(name)) if name == "marlin" => AwqVersion::Marlin,
            Some(_) => {
                let version = version.unwrap_or(&Value::Null);
                return Err(self.unsupported(format!("quant_method \"awq\" with version {version}")));
            }
        };
        // The older names of AutoAWQ's own file.
        let key = |name, older| if object.contains_key(older) { older } else { name };
        match self.number(object, key("bits", "w_bit"))? {
            None | Some(4) => {}
            Some(bits) => return Err(self.unsupported(format!("quant_method \"awq\" with {bits} bits"))),
        }
        let group_size = self.group_size(object, key("group_size", "q_group_size"))?;
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
        let group_size = self.group_size(object, "group_size")?;
        let symmetric = object.get("sym") != Some(&Value::Bool(false));
        // Settings of single modules: the shapes of their tensors say the same.
        let differ =
            given("dynamic").is_some_and(|rules| rules.as_object().is_none_or(|rules| !rules.is_empty()));
        let (bits, group_size) = if differ { (None, None) } else { (bits, group_size) };
        let is_ordered = !differ && object.get("desc_act") == Some(&Value::Bool(true));
        Ok(Method::Gptq(GptqConfig { bits, group_size, symmetric, zeros_less_one, is_ordered }))
    }

    /// The size of groups; `None` for -1, AutoGPTQ's and AutoAWQ's word for one group, whatever K is.
    fn group_size(&self, object: &Object, name: &str) -> Result<Option<usize>> {
        match object.get(name) {
            Some(Value::Number(number)) if number.as_i64() == Some(-1) => Ok(None),
            _ => self.number(object, name),
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
    pub(super) fn sides(&self, name: &str, value: Option<&Value>) -> Result<(usize, usize)> {
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
    pub(super) fn number(&self, object: &Object, name: &str) -> Result<Option<usize>> {
        match object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
                Some(number) if number > 0 => Ok(Some(number)),
                _ => Err(self.wrong(format!("`{name}` is {value}, expected a positive whole number"))),
            },
        }
    }

    pub(super) fn wrong(&self, problem: String) -> Error {
        let problem = match self.key {
            Some(key) => format!("`{key}`: {problem}"),
            None => problem,
        };
        Error::file(&self.path, problem, REMEDY)
    }

    pub(super) fn unsupported(&self, what: String) -> Error {
        Error::Unsupported { what: format!("{what} ({})", self.path.display()), remedy: OTHER.into() }
    }
}
