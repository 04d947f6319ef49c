//! Checkpoints of Hugging Face's transformers. Names and layouts are those of the table of architectures; packed weights are
//! those of compressed-tensors 0.20.
//!
//! | format | `format` | tensors |
//! |---|---|---|
//! | affine 4 and 8 bit | `pack-quantized`, symmetric | `weight_packed`, `weight_scale`, `weight_shape` |
//! | the same, packed already and with zeros | `pack-quantized`, not symmetric | and `weight_zero_point` |
//! | MXFP4 | `mxfp4-pack-quantized` | `weight_packed`, `weight_scale` |
//! | MXFP8 | `mxfp8-quantized` | `weight`, `weight_scale` |
//! | MXFP4, experts of families that are published so | quant_method `mxfp4` | `_blocks`, `_scales` |
//! | FP8 with float scales, copied | `float-quantized`, a scale for a tensor, a row or a block | `weight`, `weight_scale` |
//! | NF4 and FP4 of bitsandbytes, copied | quant_method `bitsandbytes` | all of its own |
//! | NVFP4 | `nvfp4-pack-quantized` | `weight_packed`, `weight_scale`, `weight_global_scale`, which is 1 |

use super::exact::Exact;
use super::experts::ExpertLayout;
use super::kind::TargetKind;
use super::mlx::files;
use crate::convert::output::{file_dtype, Job, OutputFile, OutputTensor};
use crate::convert::recipe::{FileType, Fp8Scales, Spec};
use candle_quant::checkpoint::{
    module_of, tensor_of, Checkpoint, DenseTensor, StoredForm, StoredFourBits, StoredFp8,
};
use candle_quant::format::Quantizer;
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::{MlxLm, EXPERT_BLOCKS};
use safetensors::Dtype;
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};

/// A checkpoint of transformers.
#[derive(Debug)]
pub(super) struct HuggingFace;

impl TargetKind for HuggingFace {
    fn name(&self) -> &'static str {
        "a Hugging Face checkpoint"
    }

    fn recipe(&self) -> &'static str {
        "llmcompressor"
    }

    fn check(&self, format: QuantFormat) -> std::result::Result<(), &'static str> {
        scheme(Spec::Packed(format)).map(drop).ok_or("affine formats of 4 and 8 bits, mxfp4, mxfp8 and nvfp4")
    }

    fn quantizer(&self, format: QuantFormat) -> Quantizer {
        match format.has_biases() {
            true => Quantizer::Midpoint,
            false => Quantizer::Mlx,
        }
    }

    // The plan has renamed experts already.
    fn experts(&self, family: &MlxLm) -> ExpertLayout {
        ExpertLayout::Renamed(family.stack)
    }

    fn has_biases(&self) -> bool {
        false
    }

    fn leaves_out_tied_heads(&self) -> bool {
        true
    }

    fn needs_config(&self) -> bool {
        true
    }

    fn packed(
        &self,
        name: &str,
        dims: &[usize],
        format: QuantFormat,
        scales: Dtype,
    ) -> Result<Vec<OutputTensor>> {
        let module = module_of(name).unwrap_or(name);
        let blocks = name.strip_suffix(EXPERT_BLOCKS);
        let part = |part: &str| tensor_of(module, part);
        let [codes, scales, ..] = &mut *OutputTensor::packed(dims, format, scales, part)? else {
            return Ok(Vec::new());
        };
        let named = |tensor: &OutputTensor, name: &str| OutputTensor { name: part(name), ..tensor.clone() };
        // Words as the bytes that they are.
        let bytes = |dtype| {
            let mut dims = codes.dims.clone();
            dims.iter_mut().last().into_iter().for_each(|columns| *columns = columns.saturating_mul(4));
            OutputTensor { dtype, dims, ..codes.clone() }
        };
        Ok(match (format, dims) {
            (QuantFormat::MXFP4, _) if blocks.is_some() => {
                let mut codes = bytes(Dtype::U8);
                // Of each row the blocks, of which each has 16 bytes.
                if let Some(columns) = codes.dims.pop() {
                    codes.dims.extend([columns / 16, 16]);
                }
                let stem = blocks.unwrap_or_default();
                let scales = OutputTensor { name: format!("{stem}_scales"), ..scales.clone() };
                vec![OutputTensor { name: name.to_owned(), ..codes }, scales]
            }
            (QuantFormat::MXFP4, _) => {
                vec![named(&bytes(Dtype::U8), "weight_packed"), named(scales, "weight_scale")]
            }
            (QuantFormat::MXFP8, _) => vec![bytes(Dtype::F8_E4M3), named(scales, "weight_scale")],
            (QuantFormat::NVFP4, _) => {
                let scales = OutputTensor { dtype: Dtype::F8_E4M3, ..named(scales, "weight_scale") };
                let one = OutputTensor::known(
                    part("weight_global_scale"),
                    Dtype::F32,
                    vec![1],
                    &1f32.to_le_bytes(),
                );
                vec![named(&bytes(Dtype::U8), "weight_packed"), scales, one]
            }
            (_, &[n, k]) => {
                let codes = OutputTensor { dtype: Dtype::I32, ..named(codes, "weight_packed") };
                let shape: Vec<_> = [n, k].into_iter().flat_map(|size| (size as u64).to_le_bytes()).collect();
                let shape = OutputTensor::known(part("weight_shape"), Dtype::I64, vec![2], &shape);
                vec![codes, named(scales, "weight_scale"), shape]
            }
            _ => Vec::new(),
        })
    }

    fn with_zeros(
        &self,
        name: &str,
        dims: &[usize],
        format: QuantFormat,
        scales: Dtype,
    ) -> Result<Option<Vec<OutputTensor>>> {
        let &[n, k] = dims else { return Ok(None) };
        let mut outputs = self.packed(name, dims, format, scales)?;
        let zeros = tensor_of(module_of(name).unwrap_or(name), "weight_zero_point");
        let words = n.saturating_mul(format.bits()).div_ceil(32);
        let zeros = OutputTensor::new(zeros, Dtype::I32, vec![words, format.groups_per_row(k)?])?;
        outputs.insert(outputs.len().min(2), zeros);
        Ok(Some(outputs))
    }

    fn of_stored(&self, name: &str, dims: &[usize], form: &StoredForm) -> Result<Option<Exact>> {
        if let StoredForm::FourBits(form) = form {
            return four_bits(name, form).map(Some);
        }
        let (StoredForm::Fp8(StoredFp8 { codes, scales, tile, .. }), &[n, k]) = (form, dims) else {
            return Ok(None);
        };
        let part = |part: &str| tensor_of(module_of(name).unwrap_or(name), part);
        let (of_scales, shape) = match *tile {
            [rows, columns] if rows >= n && columns >= k => (Fp8Scales::Tensor, vec![1]),
            [1, columns] if columns >= k => (Fp8Scales::Rows, vec![n, 1]),
            [rows, columns] => (Fp8Scales::Blocks(rows, columns), scales.dims().to_vec()),
        };
        let outputs = vec![
            OutputTensor::new(part("weight"), Dtype::F8_E4M3, vec![n, k])?,
            OutputTensor::new(part("weight_scale"), file_dtype(scales.dtype())?, shape)?,
        ];
        let (spec, copied) = (Spec::Type(FileType::Fp8(of_scales)), vec![codes.clone(), scales.clone()]);
        Ok(Some(Exact { spec, outputs, copied }))
    }

    fn files(
        &self,
        _: &Checkpoint,
        jobs: Vec<Job>,
        _: Option<Spec>,
        max_size: u64,
    ) -> Result<Vec<OutputFile>> {
        Ok(files(jobs, max_size, "pt"))
    }
}

/// A weight of bitsandbytes, all of whose tensors are copied.
fn four_bits(name: &str, form: &StoredFourBits) -> Result<Exact> {
    let module = module_of(name).unwrap_or(name);
    let output = |(part, dense): &(&str, DenseTensor)| {
        OutputTensor::new(tensor_of(module, part), file_dtype(dense.dtype())?, dense.dims().to_vec())
    };
    let outputs = form.parts.iter().map(output).collect::<Result<Vec<_>>>()?;
    let copied = form.parts.iter().map(|(_, dense)| dense.clone()).collect();
    Ok(Exact { spec: Spec::Packed(form.format), outputs, copied })
}

/// What compressed-tensors calls a format, and what it says of the weights.
fn scheme(spec: Spec) -> Option<(&'static str, Value)> {
    let weights = |kind: &str,
                   bits: usize,
                   strategy: &str,
                   group_size: Option<usize>,
                   scales: Option<&str>| {
        json!({"num_bits": bits, "type": kind, "symmetric": true, "group_size": group_size, "strategy": strategy,
            "block_structure": null, "dynamic": false, "actorder": null, "scale_dtype": scales, "zp_dtype": null,
            "observer": null, "observer_kwargs": {}})
    };
    let format = match spec {
        Spec::Packed(format) => format,
        Spec::Type(FileType::Fp8(scales)) => {
            let of = |strategy: &str| weights("float", 8, strategy, None, None);
            let mut described = match scales {
                Fp8Scales::Tensor => of("tensor"),
                Fp8Scales::Rows => of("channel"),
                Fp8Scales::Blocks(..) => of("block"),
            };
            if let (Fp8Scales::Blocks(rows, columns), Some(fields)) = (scales, described.as_object_mut()) {
                fields.insert("block_structure".into(), json!([rows, columns]));
            }
            return Some(("float-quantized", described));
        }
        Spec::Type(FileType::WithZeros(format)) => {
            let (name, mut described) = scheme(Spec::Packed(format))?;
            if let Some(fields) = described.as_object_mut() {
                fields.insert("symmetric".into(), false.into());
                fields.insert("zp_dtype".into(), "torch.int8".into());
            }
            return Some((name, described));
        }
        Spec::Type(_) | Spec::Cast(_) | Spec::Keep => return None,
    };
    let (bits, group_size) = (format.bits(), format.group_size());
    let weights = |kind: &str, strategy: &str, scales: Option<&str>| {
        weights(kind, bits, strategy, Some(group_size), scales)
    };
    let bytes = Some("torch.uint8");
    Some(match format {
        QuantFormat::MXFP4 => ("mxfp4-pack-quantized", weights("float", "group", bytes)),
        QuantFormat::MXFP8 => ("mxfp8-quantized", weights("float", "group", bytes)),
        QuantFormat::NVFP4 => {
            ("nvfp4-pack-quantized", weights("float", "tensor_group", Some("torch.float8_e4m3fn")))
        }
        _ if format.has_biases() && matches!(bits, 4 | 8) => {
            ("pack-quantized", weights("int", "group", None))
        }
        _ => return None,
    })
}

/// The `quantization_config` of experts in MXFP4, as openai/gpt-oss-20b has it.
pub(in crate::convert) fn mxfp4_config() -> Value {
    let dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"];
    json!({"quant_method": "mxfp4", "modules_to_not_convert": dense})
}

/// Whether files have a format in the form of bitsandbytes. Of one model transformers reads all or nothing so.
fn is_of_bitsandbytes(format: QuantFormat) -> bool {
    matches!(format, QuantFormat::NF4 | QuantFormat::FP4)
}

/// The first weight of bitsandbytes, if any.
///
/// # Errors
/// If another one is packed otherwise.
pub(in crate::convert) fn of_bitsandbytes<'a>(
    jobs: impl Iterator<Item = &'a Job>,
) -> Result<Option<(&'a Job, QuantFormat)>> {
    let packed: Vec<_> = jobs.filter_map(|job| Some((job, job.format()?))).collect();
    let of = |is_one: bool| packed.iter().find(|(_, format)| is_of_bitsandbytes(*format) == is_one).copied();
    let Some(first) = of(true) else { return Ok(None) };
    match of(false) {
        None => Ok(Some(first)),
        Some((other, format)) => Err(Error::Unsupported {
            what: format!(
                "`{}` as {format} in a Hugging Face checkpoint beside `{}`, {} of bitsandbytes,",
                other.planned.name, first.0.planned.name, first.1
            ),
            remedy: "keep it dense, or requantize or dequantize all".into(),
        }),
    }
}

/// The `quantization_config` of weights of bitsandbytes, as transformers writes it; every weight says more of itself.
pub(in crate::convert) fn bitsandbytes_config(
    format: QuantFormat,
    parts: &[OutputTensor],
    dense: Vec<String>,
) -> Value {
    let is_nested = parts.iter().any(|part| part.name.ends_with(".nested_absmax"));
    let floats = [(Dtype::F16, "float16"), (Dtype::BF16, "bfloat16"), (Dtype::F32, "float32")];
    let storage = parts.first().and_then(|codes| floats.iter().find(|(dtype, _)| *dtype == codes.dtype));
    let storage = storage.map_or("uint8", |(_, name)| *name);
    json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": dense, "llm_int8_enable_fp32_cpu_offload": false, "llm_int8_has_fp16_weight": false,
        "bnb_4bit_quant_type": format.mode(), "bnb_4bit_use_double_quant": is_nested, "bnb_4bit_quant_storage": storage,
        "bnb_4bit_compute_dtype": "bfloat16"})
}

/// The `quantization_config` of packed modules, of which most have the format `top`. `dense` are matrices that are not
/// packed.
pub(in crate::convert) fn quantization_config(
    top: Spec,
    packed: &BTreeMap<String, Spec>,
    dense: Vec<String>,
) -> Value {
    let mut groups = BTreeMap::<String, (Spec, Vec<&str>)>::new();
    for (module, spec) in packed.iter().filter(|(_, spec)| **spec != top) {
        groups.entry(spec.to_string()).or_insert((*spec, Vec::new())).1.push(module);
    }
    let (mut names, mut described) = (BTreeSet::new(), serde_json::Map::new());
    let all = std::iter::once((top, vec!["Linear"])).chain(groups.into_values());
    for (index, (spec, targets)) in all.enumerate() {
        let Some((name, weights)) = scheme(spec) else { continue };
        names.insert(name);
        let group = json!({"targets": targets, "weights": weights, "input_activations": null,
            "output_activations": null, "format": name});
        described.insert(format!("group_{index}"), group);
    }
    let format = match (names.len(), names.first()) {
        (1, Some(one)) => *one,
        _ => "mixed-precision",
    };
    json!({"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": described, "ignore": dense, "kv_cache_scheme": null, "global_compression_ratio": null})
}
