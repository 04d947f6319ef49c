//! Quantized checkpoints that other tools than MLX write: safetensors, and a `quant_method` in the config.
//!
//! | `quant_method` | a weight's tensors | becomes |
//! |---|---|---|
//! | `mxfp4` (gpt-oss) | `X_blocks`, `X_scales` | MXFP4 |
//! | `mxfp4`, `mxfp8` | `weight` U32, `scales` U8; `weight` F8_E4M3, `weight_scale_inv` U8 | MXFP4, MXFP8 |
//! | `modelopt` | `weight` U8, `weight_scale`, `weight_scale_2` | NVFP4 |
//! | `modelopt` | `weight` F8_E4M3, `weight_scale` | FP8 |
//! | `compressed-tensors` | `weight_packed`, `weight_scale`, `weight_global_scale` | NVFP4, MXFP4 |
//! | `compressed-tensors` | `weight_packed` or `weight` I8, `weight_scale`, `weight_zero_point` | symmetric and affine 2 to 6, 8-bit |
//! | `fp8` | `weight` F8_E4M3, `weight_scale_inv` E8M0 | MXFP8 |
//! | `fp8` | `weight` F8_E4M3, `weight_scale_inv` of floats | FP8 |
//! | `awq` ("gemm", "gemv", "gemv_fast") | `qweight`, `qzeros`, `scales` | affine 4-bit |
//! | `bitsandbytes` | `weight` with `weight.absmax` and others; `weight` I8 with `SCB` | NF4, FP4; symmetric 8-bit |
//! | `gptq` | `qweight`, `qzeros`, `scales`, `g_idx` | affine 2, 3, 4, 8-bit |
//! | `hqq` | `W_q`, `scale`, `zero`, settings | affine 1, 2, 3, 4, 8-bit, along K or across rows |
//!
//! Tensors decide which modules are quantized: lists of excluded modules hold patterns over names that the
//! tools do not agree upon, and a module that they name has no scales.

mod awq;
mod awq_gemv;
mod awq_marlin;
mod bitsandbytes;
mod column_order;
mod compressed;
mod compressed_config;
mod config;
mod filled_rows;
mod flat_blocks;
mod fp8;
mod gpt_oss;
mod gptq;
mod groups;
mod hqq;
mod index;
mod integers;
mod modelopt;
mod module;

pub(super) use config::{find_method, Method};

use super::container::{check_in_features, Container, Opened};
use super::file::{Tensors, Warnings};
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::weight::{tensor_of, DenseTensor, Weight};
use crate::{Error, QuantFormat, Result};
use index::{Index, IndexEntry, Packing};
use module::Module;
use serde_json::Value;
use std::path::Path;

struct HfCheckpoint {
    tensors: Tensors,
    index: Index,
    method: Method,
    warnings: Warnings,
}

/// A checkpoint of these tensors, quantized by `method`.
pub(super) fn open(
    tensors: Tensors,
    method: Method,
    sidecars: SidecarFiles,
    config: Value,
    warnings: &Warnings,
) -> Result<Opened> {
    let index = index::of(&tensors, &method, warnings)?;
    let is_quantized = index.values().any(|entry| matches!(entry, IndexEntry::Quantized { .. }));
    let kind = match is_quantized {
        true => CheckpointKind::HuggingFace(method.name()),
        false => CheckpointKind::Dense,
    };
    let container = HfCheckpoint { tensors, index, method, warnings: warnings.clone() };
    Ok(Opened::new(kind, config, sidecars, container))
}

impl HfCheckpoint {
    /// The quantized weight whose most important tensor is `lead`.
    fn quantized(&self, lead: &str, packing: Packing) -> Result<Weight> {
        let (path, separator) = packing.module_of(lead);
        let module = Module { tensors: &self.tensors, path, separator };
        match (packing, &self.method) {
            (Packing::Blocks(half), _) => gpt_oss::weight(&module, half),
            (Packing::Words, Method::Mxfp4) => module::words(&module, QuantFormat::MXFP4),
            (Packing::Words, Method::Mxfp8(_)) => module::words(&module, QuantFormat::MXFP8),
            (Packing::Awq, Method::Awq(config)) => awq::weight(&module, config),
            (Packing::BitsAndBytes, _) => bitsandbytes::weight(&module, &self.warnings),
            (Packing::Hqq, _) => hqq::weight(&module, &self.warnings),
            (Packing::Gptq, Method::Gptq(config)) => gptq::weight(&module, config),
            (Packing::CompressedTensors, Method::CompressedTensors(schemes)) => {
                compressed::weight(&module, schemes, &self.warnings)
            }
            (Packing::ModelOpt, _) => modelopt::weight(&module, &self.warnings),
            (Packing::Float8, Method::Mxfp8(blocks) | Method::Fp8(blocks)) => {
                fp8::weight(&module, *blocks, &self.warnings)
            }
            (packing, method) => Err(Error::Unsupported {
                what: format!("`{lead}`: {packing:?} in a checkpoint of {}", method.name()),
                remedy: "fetch or convert the file again".into(),
            }),
        }
    }
}

impl Container for HfCheckpoint {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.index.keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>> {
        let name = tensor_of(module, "weight");
        let weight = match self.index.get(&name) {
            Some(IndexEntry::Quantized { lead, packing }) => self.quantized(lead, *packing)?,
            _ => match self.dense(&name)? {
                Some(dense) if dense.dtype().is_float() => return Ok(Some(Weight::Dense(dense))),
                None => return Ok(None),
                Some(dense) => {
                    return Err(Error::tensor(
                        self.file_of(&name).unwrap_or(Path::new("")),
                        name,
                        "a float weight, as there are no scales beside it",
                        format!("{:?}", dense.dtype()),
                        "fetch or convert the file again",
                    ));
                }
            },
        };
        check_in_features(self.file_of(&name).unwrap_or(Path::new("")), &name, weight.dims(), in_features)?;
        Ok(Some(weight))
    }

    fn dense(&self, name: &str) -> Result<Option<DenseTensor>> {
        match self.index.get(name) {
            None => Ok(None),
            Some(IndexEntry::Same) => {
                self.tensors.get(name).map(|stored| DenseTensor::new(name, stored)).transpose()
            }
            Some(IndexEntry::Stored { stored, half }) => {
                let dense = |stored| match half {
                    None => DenseTensor::new(name, stored),
                    Some(half) => gpt_oss::half_of(name, stored, *half),
                };
                self.tensors.get(stored).map(dense).transpose()
            }
            Some(IndexEntry::Quantized { lead, packing }) => match self.quantized(lead, *packing)? {
                Weight::Dense(dense) => Ok(Some(dense)),
                Weight::Packed(_) | Weight::Irregular(_) | Weight::Ggml(_) => Err(Error::tensor(
                    self.file_of(name).unwrap_or(Path::new("")),
                    name,
                    "a dense tensor",
                    "a packed weight",
                    "load the module's weight instead",
                )),
            },
        }
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        let stored: &str = match self.index.get(name)? {
            IndexEntry::Same => name,
            IndexEntry::Stored { stored, .. } | IndexEntry::Quantized { lead: stored, .. } => stored,
        };
        self.tensors.get(stored).map(super::file::StoredTensor::path)
    }
}
