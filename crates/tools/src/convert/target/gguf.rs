//! GGUF files of version 3, as llama.cpp reads them: one file with metadata, tokenizer and weights.

use super::experts::ExpertLayout;
use super::kind::TargetKind;
use crate::convert::gguf::{notes, Description, GgufModel, Shapes};
use crate::convert::output::{told_of, HeadOrder, Job, OutputFile, OutputTensor, Work};
use crate::convert::recipe::{Fallback, FileType, Role, Spec};
use candle_core::DType;
use candle_quant::checkpoint::{Checkpoint, GgufValue};
use candle_quant::format::{GgmlType, Scale};
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::MlxLm;
use safetensors::Dtype;
use std::collections::BTreeMap;

const FILE: &str = "model.gguf";

/// Tensors begin at multiples of it.
const ALIGNMENT: usize = 32;

/// A GGUF file.
#[derive(Debug)]
pub(super) struct Gguf;

impl TargetKind for Gguf {
    fn name(&self) -> &'static str {
        "a GGUF file"
    }

    fn check(&self, format: QuantFormat) -> std::result::Result<(), &'static str> {
        GgmlType::of(format)
            .map(drop)
            .ok_or("q4_0 to q8_0, q2_k to q6_k, mxfp4 and nvfp4, and of MLX's affine formats none exactly")
    }

    fn blocks(&self, format: QuantFormat) -> Option<GgmlType> {
        GgmlType::of(format)
    }

    fn has_type(&self, of_files: FileType) -> bool {
        matches!(of_files, FileType::Ggml(_))
    }

    fn of_type(&self, name: &str, dims: &[usize], of_files: FileType) -> Result<Vec<OutputTensor>> {
        match of_files {
            FileType::Ggml(kind) => Ok(vec![of_kind(name, dims, kind)?]),
            FileType::Uqff(_) | FileType::Slm1(_) | FileType::Fp8(_) | FileType::WithZeros(_) => {
                Err(Error::mismatch(name, "a type of GGML", of_files.name()))
            }
        }
    }

    fn of_blocks(&self, name: &str, dims: &[usize], _: u32, bytes: u64) -> Result<Option<Vec<OutputTensor>>> {
        Ok(Some(vec![blocks(name, dims, bytes)?]))
    }

    /// Rows that are no whole super-blocks become Q8_0.
    fn instead(&self, spec: Spec, fallback: Fallback) -> Vec<Spec> {
        let kind = spec.format().and_then(GgmlType::of);
        match (kind.map(|kind| kind.format().scale()), fallback) {
            (Some(Scale::SuperBlock), Fallback::Fit) => vec![Spec::ggml(GgmlType::Q8_0)],
            (Some(_) | None, _) => Vec::new(),
        }
    }

    fn experts(&self, _: &MlxLm) -> ExpertLayout {
        ExpertLayout::Stacks("experts")
    }

    fn leaves_out_tied_heads(&self) -> bool {
        true
    }

    fn has_config(&self) -> bool {
        false
    }

    /// Vectors, biases of stacks and routers are numbers of 32 bits, as llama.cpp computes with them.
    fn plain_dtype(&self, name: &str, dims: &[usize], role: Role) -> Option<DType> {
        let is_wide =
            dims.len() < 2 || name.ends_with("bias") || role == Role::Router || name.ends_with("norm.weight");
        is_wide.then_some(DType::F32)
    }

    fn packed(&self, name: &str, dims: &[usize], format: QuantFormat, _: Dtype) -> Result<Vec<OutputTensor>> {
        match GgmlType::of(format) {
            Some(kind) => Ok(vec![of_kind(name, dims, kind)?]),
            None => Err(Error::mismatch(name, "a type of GGML", format.to_string())),
        }
    }

    fn files(
        &self,
        source: &Checkpoint,
        mut jobs: Vec<Job>,
        top: Option<Spec>,
        _: u64,
    ) -> Result<Vec<OutputFile>> {
        let model = GgufModel::of(source)?;
        let shapes = jobs.iter().map(|job| (job.planned.name.clone(), job.planned.shape.clone()));
        let Description { mut values, factors } = model.describe(source, &shapes.collect::<Shapes>())?;
        for job in &mut jobs {
            rename(job, &model, source)?;
        }
        let others: Vec<_> = factors
            .iter()
            .map(|(name, factors)| {
                let bytes: Vec<_> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
                OutputTensor::known((*name).to_owned(), Dtype::F32, vec![factors.len()], &bytes)
            })
            .collect();
        values.insert("general.file_type".into(), GgufValue::U32(file_type(top, &jobs)));
        values.insert("general.quantization_version".into(), GgufValue::U32(2));
        values.extend(told_of(&jobs).map(|(key, how)| (key.to_owned(), GgufValue::Text(how))));
        file(jobs, others, &values).map(|file| vec![file])
    }

    fn notes(&self, source: &Checkpoint) -> Vec<String> {
        notes(source)
    }

    fn sidecars(&self, _: &[OutputFile]) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

fn of_kind(name: &str, dims: &[usize], kind: GgmlType) -> Result<OutputTensor> {
    match dims.iter().try_fold(1u64, |all, dim| all.checked_mul(*dim as u64)) {
        Some(elements) => blocks(name, dims, kind.size_in_bytes(elements)),
        None => Err(Error::mismatch(name, "a tensor that fits 64 bits", format!("{dims:?}"))),
    }
}

/// A tensor of so many bytes, of which the shape says how many numbers they are.
fn blocks(name: &str, dims: &[usize], bytes: u64) -> Result<OutputTensor> {
    Ok(OutputTensor { bytes, ..OutputTensor::new(name.to_owned(), Dtype::U8, dims.to_vec())? })
}

/// Gives a tensor the name, and the order of rows, that it has in files.
fn rename(job: &mut Job, model: &GgufModel, source: &Checkpoint) -> Result<()> {
    let name = job.planned.name.clone();
    let Some(written) = model.name_of(&name) else {
        return Err(Error::Unsupported {
            what: format!("{}: `{name}` in a GGUF file, which has no name for it,", source.path().display()),
            remedy: "convert to another kind".into(),
        });
    };
    // What multiplies the scales of blocks is a tensor beside them.
    let module = written.strip_suffix(".weight").unwrap_or(&written);
    if job.outputs.len() > 1 && module == "token_embd" {
        return Err(Error::Unsupported {
            what: format!(
                "`{name}` with a multiplier of its scales in a GGUF file, which has none of an embedding,"
            ),
            remedy: "requantize or dequantize it".into(),
        });
    }
    let names = [written.clone(), format!("{module}.scale")];
    for (output, name) in job.outputs.iter_mut().zip(names) {
        output.name = name;
    }
    let Some(heads) = model.paired_heads(&name) else { return Ok(()) };
    let rows = job.planned.shape.first().copied().unwrap_or(0);
    match rows.checked_div(heads) {
        Some(size) if size % 2 == 0 && size.saturating_mul(heads) == rows => {
            job.order_heads(HeadOrder { size });
            Ok(())
        }
        _ => {
            let expected = format!("rows that make {heads} heads of an even number each");
            Err(Error::mismatch(format!("`{name}`"), expected, format!("{:?}", job.planned.shape)))
        }
    }
}

/// The numbers of the types of a job's tensors, if files have them.
fn types_of(job: &Job) -> impl Iterator<Item = Option<u32>> + '_ {
    let beside = job.outputs.iter().skip(1).map(|output| dense_type(output.dtype));
    std::iter::once(type_of(job)).chain(beside)
}

/// The number of the type of a weight, if files have it.
fn type_of(job: &Job) -> Option<u32> {
    match &job.work {
        Work::Blocks(blocks) => Some(blocks.type_id()),
        Work::Copy(..) | Work::Cast(..) | Work::Pack(..) | Work::Repack(..) => match job.becomes() {
            Some(spec) => ggml_type(spec).map(GgmlType::id),
            None => dense_type(job.outputs.first()?.dtype),
        },
    }
}

#[allow(clippy::wildcard_enum_match_arm, reason = "GGUF has no others")]
fn dense_type(dtype: Dtype) -> Option<u32> {
    Some(match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::BF16 => 30,
        Dtype::F64 => 28,
        _ => return None,
    })
}

fn ggml_type(spec: Spec) -> Option<GgmlType> {
    match spec {
        Spec::Packed(format) => GgmlType::of(format),
        Spec::Type(FileType::Ggml(kind)) => Some(kind),
        Spec::Type(FileType::Uqff(_) | FileType::Slm1(_) | FileType::Fp8(_) | FileType::WithZeros(_))
        | Spec::Cast(_)
        | Spec::Keep => None,
    }
}

/// llama.cpp's number of what most of a file is.
fn file_type(top: Option<Spec>, jobs: &[Job]) -> u32 {
    match top.and_then(ggml_type) {
        Some(GgmlType::Q4_0) => 2,
        Some(GgmlType::Q4_1) => 3,
        Some(GgmlType::Q8_0) => 7,
        Some(GgmlType::Q5_0) => 8,
        Some(GgmlType::Q5_1) => 9,
        Some(GgmlType::Q2K) => 10,
        Some(GgmlType::Q3K) => 11,
        Some(GgmlType::Q4K) => 14,
        Some(GgmlType::Q5K) => 16,
        Some(GgmlType::Q6K) => 18,
        Some(GgmlType::Mxfp4) => 38,
        Some(GgmlType::Nvfp4) => 39,
        Some(_) | None => {
            let matrices = jobs.iter().filter(|job| job.planned.shape.len() > 1);
            match matrices.filter_map(type_of).max() {
                Some(30) => 32,
                Some(1) => 1,
                Some(0) | None => 0,
                Some(_) => 1024,
            }
        }
    }
}

/// The file: the header, and where each tensor lies.
fn file(
    mut jobs: Vec<Job>,
    mut others: Vec<OutputTensor>,
    values: &BTreeMap<String, GgufValue>,
) -> Result<OutputFile> {
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    let of_jobs = jobs.iter().map(|job| job.outputs.len()).sum::<usize>();
    header.extend((of_jobs as u64 + others.len() as u64).to_le_bytes());
    header.extend((values.len() as u64).to_le_bytes());
    for (key, value) in values {
        GgufValue::append_text(key, &mut header);
        value.append(&mut header);
    }
    let of_others = others.iter().map(|other| dense_type(other.dtype));
    let types: Vec<_> = jobs.iter().flat_map(types_of).chain(of_others).collect();
    let of_jobs = jobs.iter_mut().flat_map(|job| &mut job.outputs);
    let mut end = 0u64;
    let mut outputs: Vec<_> = of_jobs.chain(&mut others).collect();
    for (output, kind) in outputs.iter_mut().zip(types) {
        let Some(kind) = kind else {
            return Err(Error::Unsupported {
                what: format!("`{}` of {:?} in a GGUF file", output.name, output.dtype),
                remedy: "give a --dtype, f16, bf16 or f32".into(),
            });
        };
        GgufValue::append_text(&output.name, &mut header);
        // A number alone is a vector of one.
        let dims = if output.dims.is_empty() { vec![1] } else { output.dims.clone() };
        header.extend((dims.len() as u32).to_le_bytes());
        dims.iter().rev().for_each(|dim| header.extend((*dim as u64).to_le_bytes()));
        header.extend(kind.to_le_bytes());
        header.extend(end.to_le_bytes());
        output.offset = end;
        end = end.saturating_add(output.bytes).next_multiple_of(ALIGNMENT as u64);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
    let start = header.len() as u64;
    for output in outputs {
        output.offset += start;
    }
    for job in &mut jobs {
        job.planned.file = FILE.to_owned();
    }
    let size = start.saturating_add(end);
    Ok(OutputFile { file: FILE.to_owned(), layer: String::new(), jobs, others, header, size })
}
