//! UQFF 1.2.0, the container of mistral.rs: layers in `.uqff` shards, all else in `residual.safetensors`, and a report
//! that lists the shards.

use super::exact::Exact;
use super::experts::ExpertLayout;
use super::kind::{by_size, TargetKind};
use super::uqff_entries::{count, family, of_ggml, of_stored, of_whole, AFQ, MXFP4, UNQUANT};
use super::uqff_report::report;
use crate::convert::output::{Job, OutputFile, OutputTensor, SourcePart, Style, Work};
use crate::convert::recipe::{of_experts, rows, Fallback, FileType, Role, Spec};
use candle_core::DType;
use candle_quant::checkpoint::{module_of, tensor_of, Checkpoint, StoredForm};
use candle_quant::format::{Bits, GgmlType, Quantizer, UqffType};
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::MlxLm;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::collections::BTreeSet;

/// The file that names the shards.
pub(super) const REPORT: &str = "uqff_report.json";

pub(super) const RESIDUAL: &str = "residual.safetensors";

/// The program's name, which files of earlier versions have too.
pub(super) const PRODUCER: &str = "candle-quant";

/// Major, minor and patch.
const VERSION: [(&str, u32); 3] = [("major", 1), ("minor", 2), ("patch", 0)];

/// The numbers of GGML's types that a reader of these files knows.
const GGML_TYPES: [u32; 12] = [2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The dtypes of numbers that layers may have.
const FLOATS: [Dtype; 3] = [Dtype::F16, Dtype::BF16, Dtype::F32];

/// A model of mistral.rs.
#[derive(Debug)]
pub(super) struct Uqff;

impl TargetKind for Uqff {
    fn name(&self) -> &'static str {
        "UQFF"
    }

    fn recipe(&self) -> &'static str {
        "mistralrs"
    }

    fn check(&self, format: QuantFormat) -> std::result::Result<(), &'static str> {
        let is_known = match format.element().uint() {
            Some(bits) => !matches!(bits, Bits::One | Bits::Five),
            None => format == QuantFormat::MXFP4,
        };
        let is_known = is_known || self.blocks(format).is_some();
        is_known.then_some(()).ok_or(
            "affine formats of 2, 3, 4, 6 and 8 bits, mxfp4, q4_0 to q8_0, q2_k to q6_k, hqq4, hqq8, fp8 and f8q8",
        )
    }

    fn blocks(&self, format: QuantFormat) -> Option<GgmlType> {
        // Small floats are types of their own, or none.
        GgmlType::of(format).filter(|kind| !matches!(kind, GgmlType::Mxfp4 | GgmlType::Nvfp4))
    }

    fn has_type(&self, of_files: FileType) -> bool {
        matches!(of_files, FileType::Ggml(_) | FileType::Uqff(_))
    }

    fn of_type(&self, name: &str, dims: &[usize], of_files: FileType) -> Result<Vec<OutputTensor>> {
        match of_files {
            FileType::Ggml(kind) => of_ggml(name, dims, kind.id(), kind.size_in_bytes(count(dims))),
            FileType::Uqff(kind) => of_whole(name, dims, kind),
            FileType::Slm1(_) | FileType::Fp8(_) | FileType::WithZeros(_) => {
                Err(Error::mismatch(name, "a type of mistral.rs", of_files.name()))
            }
        }
    }

    fn of_blocks(
        &self,
        name: &str,
        dims: &[usize],
        id: u32,
        bytes: u64,
    ) -> Result<Option<Vec<OutputTensor>>> {
        match GGML_TYPES.contains(&id) && matches!(dims, [_, _] | [_, _, _]) {
            true => of_ggml(name, dims, id, bytes).map(Some),
            false => Ok(None),
        }
    }

    /// Experts that are not in one tensor are no layers there.
    fn of_stored(&self, name: &str, dims: &[usize], form: &StoredForm) -> Result<Option<Exact>> {
        if is_single_expert(name) {
            return Ok(None);
        }
        of_stored(name, dims, form)
    }

    /// As of all kinds; experts that are not in one tensor are no layers there.
    fn obstacle(&self, spec: Spec, name: &str, dims: &[usize]) -> Option<String> {
        match spec {
            Spec::Packed(format) => {
                rows(dims, self.blocks(format).map_or(format.group_size(), |kind| kind.block().0))
            }
            Spec::Type(FileType::Uqff(kind)) if is_single_expert(name) => Some(of_experts(kind)),
            Spec::Type(of_files) => of_files.obstacle(dims),
            Spec::Cast(_) | Spec::Keep => None,
        }
    }

    /// What mistral.rs does where rows are no whole super-blocks.
    fn instead(&self, spec: Spec, fallback: Fallback) -> Vec<Spec> {
        let others = match spec {
            Spec::Packed(format) => match self.blocks(format) {
                Some(GgmlType::Q2K | GgmlType::Q3K) => &[GgmlType::Q4_0][..],
                Some(GgmlType::Q4K) => &[GgmlType::Q4_1],
                Some(GgmlType::Q5K) => &[GgmlType::Q5_0],
                Some(GgmlType::Q6K) => &[GgmlType::Q5_1],
                None if fallback == Fallback::Fit => {
                    return format.smaller_groups().map(Spec::Packed).collect()
                }
                Some(_) | None => &[],
            },
            Spec::Type(_) | Spec::Cast(_) | Spec::Keep => &[],
        };
        others.iter().copied().map(Spec::ggml).collect()
    }

    /// That of mistral.rs where it loses no more than MLX's: with 2 and 3 bits, and in MXFP4 whose larger numbers it
    /// clips, it does.
    fn quantizer(&self, format: QuantFormat) -> Quantizer {
        match format.element().uint() {
            Some(bits) if bits >= Bits::Four => Quantizer::Afq,
            Some(_) | None => Quantizer::Mlx,
        }
    }

    fn experts(&self, _: &MlxLm) -> ExpertLayout {
        ExpertLayout::Stacks("experts")
    }

    fn leaves_out_tied_heads(&self) -> bool {
        true
    }

    fn packed(
        &self,
        name: &str,
        dims: &[usize],
        format: QuantFormat,
        scales: Dtype,
    ) -> Result<Vec<OutputTensor>> {
        if let Some(kind) = self.blocks(format) {
            return of_ggml(name, dims, kind.id(), kind.size_in_bytes(count(dims)));
        }
        let module = module_of(name).unwrap_or(name);
        let mut outputs = OutputTensor::packed(dims, format, scales, |part| match part {
            "weight" => tensor_of(module, part),
            _ => tensor_of(module, &format!("weight.{part}")),
        })?;
        let byte = |part: &str, byte: usize| {
            OutputTensor::scalar(tensor_of(module, part), Dtype::U8, &[u8::try_from(byte).unwrap_or(u8::MAX)])
        };
        match format.element().uint() {
            Some(bits) => {
                outputs.push(byte("weight.bits", bits.get()));
                outputs.push(byte("weight.group_size", format.group_size()));
                outputs.push(family(module, AFQ));
            }
            None => {
                // Words as the bytes that they are.
                if let Some(codes) = outputs.first_mut() {
                    codes.dtype = Dtype::U8;
                    codes.dims.iter_mut().last().into_iter().for_each(|columns| *columns *= 4);
                }
                outputs.push(family(module, MXFP4));
            }
        }
        Ok(outputs)
    }

    fn files(
        &self,
        _: &Checkpoint,
        jobs: Vec<Job>,
        top: Option<Spec>,
        max_size: u64,
    ) -> Result<Vec<OutputFile>> {
        let is_layer = |job: &Job| job.format().is_some() || is_unquant(job);
        let modules: BTreeSet<_> =
            jobs.iter().filter(|job| is_layer(job)).map(|job| module(job).to_owned()).collect();
        let is_bias = |job: &Job| {
            let layer = job.planned.name.strip_suffix(".bias");
            layer.is_some_and(|layer| modules.contains(layer)) && has_floats(job)
        };
        let (mut layers, residual): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|job| is_layer(job) || is_bias(job));
        if layers.is_empty() {
            return Err(Error::Unsupported {
                what: "a UQFF model without any linear layer or embedding".into(),
                remedy: "write --to mlx, or --dequantize it".into(),
            });
        }
        let wide: BTreeSet<_> =
            layers.iter().filter(|job| has_wide_bias(job)).map(|job| module(job).to_owned()).collect();
        for job in layers.iter_mut().filter(|job| job.format().is_none()) {
            if job.planned.name.strip_suffix(".bias").is_some_and(|layer| wide.contains(layer)) {
                widen(job);
            }
        }
        for job in layers.iter_mut().filter(|job| is_unquant(job)) {
            let format = family(module(job), UNQUANT);
            job.planned.bytes += format.bytes;
            job.outputs.push(format);
        }
        let stem = label(top);
        // As the safetensors crate orders them.
        let order =
            |a: &OutputTensor, b: &OutputTensor| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name));
        let shard =
            |file, jobs, others| OutputFile::new(file, jobs, others, order, Some(metadata()), Style::Common);
        let mut shards = Vec::new();
        for (index, jobs) in by_size(layers, max_size).into_iter().enumerate() {
            let others = if index == 0 { version() } else { Vec::new() };
            let file = shard(format!("{stem}-{index}.uqff"), jobs, others);
            shards.push(OutputFile { layer: stem.clone(), ..file });
        }
        if !residual.is_empty() {
            shards.push(shard(RESIDUAL.to_owned(), residual, Vec::new()));
        }
        Ok(shards)
    }

    /// Shards of another type beside the first, which have the same residual.
    fn join(&self, files: &mut Vec<OutputFile>, others: Vec<OutputFile>) -> Result<()> {
        let (residual, shards): (Vec<_>, Vec<_>) = others.into_iter().partition(|file| file.file == RESIDUAL);
        if let Some(twice) = shards.iter().find(|shard| files.iter().any(|file| file.file == shard.file)) {
            let expected = "formats whose files have names of their own";
            return Err(Error::mismatch("several formats", expected, format!("`{}` twice", twice.file)));
        }
        let known: Vec<_> = files.iter().filter(|file| file.file == RESIDUAL).collect();
        if !known.iter().map(|file| &file.header).eq(residual.iter().map(|file| &file.header)) {
            return Err(Error::mismatch(
                "several formats",
                format!("formats that leave the same tensors to {RESIDUAL}, which all of them share"),
                "others; convert them into a folder each",
            ));
        }
        let end = files.len() - known.len();
        files.splice(end..end, shards);
        Ok(())
    }

    fn sidecars(&self, files: &[OutputFile]) -> Vec<(&'static str, String)> {
        vec![(REPORT, format!("{:#}\n", report(files, &version_text())))]
    }
}

/// Whether mistral.rs has the bias of a layer in F32, whatever the dtype of the model.
fn has_wide_bias(job: &Job) -> bool {
    match job.becomes() {
        Some(Spec::Packed(format)) => Uqff.blocks(format).is_some(),
        Some(Spec::Type(of_files)) => of_files != FileType::Uqff(UqffType::Fp8),
        Some(Spec::Cast(_) | Spec::Keep) | None => false,
    }
}

/// Writes numbers in F32.
fn widen(job: &mut Job) {
    let parts = match &job.work {
        Work::Copy(runs, None) => runs.iter().flatten().cloned().map(SourcePart::Stored).collect(),
        Work::Cast(parts, _) => parts.clone(),
        Work::Copy(..) | Work::Pack(..) | Work::Repack(..) | Work::Blocks(..) => return,
    };
    let Some(output) = job.outputs.first_mut().filter(|output| output.dtype != Dtype::F32) else { return };
    (output.dtype, output.bytes) = (Dtype::F32, count(&output.dims).saturating_mul(4));
    job.planned.bytes = output.bytes;
    job.planned.to = format!("{:?}", DType::F32);
    job.work = Work::Cast(parts, DType::F32);
}

pub(super) fn module(job: &Job) -> &str {
    module_of(&job.planned.name).unwrap_or(&job.planned.name)
}

fn has_floats(job: &Job) -> bool {
    job.outputs.first().is_some_and(|output| FLOATS.contains(&output.dtype))
}

fn is_single_expert(name: &str) -> bool {
    let segment = name.split('.').skip_while(|segment| *segment != "experts").nth(1);
    segment.is_some_and(|segment| segment.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether a tensor that is not packed is a layer all the same, which mistral.rs looks for among the layers.
fn is_unquant(job: &Job) -> bool {
    let planned = &job.planned;
    let of_a_layer = matches!(
        planned.role,
        Role::Embed | Role::LmHead | Role::Experts | Role::V | Role::Down | Role::Attn | Role::Mlp
    );
    matches!(planned.shape.as_slice(), [_, _] | [_, _, _])
        && !planned.shape.contains(&0)
        && job.format().is_none()
        && (of_a_layer || planned.fallback.is_some() && planned.role == Role::Other)
        && planned.name.ends_with(".weight")
        && !is_single_expert(&planned.name)
        && has_floats(job)
}

/// mistral.rs' word for what something becomes.
pub(super) fn label(spec: Option<Spec>) -> String {
    let format = match spec {
        Some(Spec::Packed(format)) => format,
        Some(Spec::Type(of_files)) => return of_files.name(),
        Some(Spec::Cast(_) | Spec::Keep) | None => return "unquant".to_owned(),
    };
    if let Some(kind) = Uqff.blocks(format) {
        return kind.name().to_lowercase().replace("_k", "k");
    }
    let integers = format.element().uint().map(|bits| format!("afq{}", bits.get()));
    integers.unwrap_or_else(|| format.mode().to_owned())
}

/// The type of a job, in its words.
pub(super) fn stored(job: &Job) -> String {
    match &job.work {
        Work::Blocks(blocks) => blocks.type_name().to_lowercase().replace("_k", "k"),
        Work::Copy(..) | Work::Cast(..) | Work::Pack(..) | Work::Repack(..) => label(job.becomes()),
    }
}

fn version() -> Vec<OutputTensor> {
    let part = |(part, number): (&str, u32)| {
        OutputTensor::scalar(format!("uqff.version.{part}"), Dtype::U32, &number.to_le_bytes())
    };
    VERSION.map(part).into()
}

fn version_text() -> String {
    VERSION.map(|(_, number)| number.to_string()).join(".")
}

fn metadata() -> Value {
    json!({
        "uqff.producer": PRODUCER,
        "uqff.producer.version": env!("CARGO_PKG_VERSION"),
        "uqff.version": version_text(),
    })
}
