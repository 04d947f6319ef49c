//! UQFF 1.2.0, the container of mistral.rs: layers in `.uqff` shards, all else in `residual.safetensors`, and a report
//! that lists the shards.

use super::experts::ExpertLayout;
use super::kind::{by_size, TargetKind};
use super::uqff_report::report;
use crate::convert::output::{Job, OutputFile, OutputTensor, SourcePart, Style, Work};
use crate::convert::recipe::{of_experts, rows, Fallback, FileType, Role, Spec};
use candle_core::DType;
use candle_quant::checkpoint::{module_of, tensor_of, Checkpoint};
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

/// What `<module>.weight.format` says of blocks of GGML's types, of layers that are not packed, and of the types of mistral.rs.
const GGML: u8 = 0;
const UNQUANT: u8 = 1;
const HQQ: u8 = 2;
const FP8: u8 = 3;
const AFQ: u8 = 4;
const F8Q8: u8 = 5;
const MXFP4: u8 = 6;

/// The number of F8_E4M3 in mistral.rs' table of dtypes.
const F8_E4M3: u32 = 9;

/// Elements of a group of HQQ, and how often mistral.rs moves zeros.
const HQQ_GROUP: u32 = 64;
const HQQ_STEPS: u32 = 10;

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
            FileType::Slm1(kind) => Err(Error::mismatch(name, "a type of mistral.rs", kind.name())),
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

fn count(dims: &[usize]) -> u64 {
    dims.iter().fold(1u64, |all, dim| all.saturating_mul(*dim as u64))
}

/// An entry of the shape of a weight.
fn shape(module: &str, dims: &[usize]) -> Result<OutputTensor> {
    let sizes = dims.iter().map(|dim| u32::try_from(*dim).map(u32::to_le_bytes));
    let Ok(sizes) = sizes.collect::<std::result::Result<Vec<_>, _>>() else {
        return Err(Error::mismatch(format!("`{module}.weight`"), "sizes of 32 bits", format!("{dims:?}")));
    };
    Ok(OutputTensor::known(tensor_of(module, "weight.shape"), Dtype::U32, vec![dims.len()], &sizes.concat()))
}

fn number(module: &str, part: &str, number: u32) -> OutputTensor {
    OutputTensor::scalar(tensor_of(module, part), Dtype::U32, &number.to_le_bytes())
}

/// The tensors of a weight in blocks of a type of GGML.
fn of_ggml(name: &str, dims: &[usize], id: u32, bytes: u64) -> Result<Vec<OutputTensor>> {
    let module = module_of(name).unwrap_or(name);
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    Ok(vec![
        OutputTensor::new(tensor_of(module, "weight"), Dtype::U8, vec![size])?,
        number(module, "weight.dtype", id),
        shape(module, dims)?,
        family(module, GGML),
    ])
}

/// The tensors of a type that is made of a whole matrix: those that are not known yet come first, in the order in which it is
/// quantized.
fn of_whole(name: &str, dims: &[usize], kind: UqffType) -> Result<Vec<OutputTensor>> {
    let module = module_of(name).unwrap_or(name);
    let part = |part: &str| tensor_of(module, part);
    let elements = usize::try_from(count(dims)).unwrap_or(usize::MAX);
    let byte = |name: &str, byte: u8| OutputTensor::scalar(part(name), Dtype::U8, &[byte]);
    let hqq = |bits: u8| {
        let groups = elements / HQQ_GROUP as usize;
        let of_group = HQQ_GROUP as usize * usize::from(bits) / 8;
        Ok(vec![
            OutputTensor::new(part("weight"), Dtype::U8, vec![of_group, groups])?,
            OutputTensor::new(part("weight.scales"), Dtype::F32, vec![1, groups])?,
            OutputTensor::new(part("weight.zeros"), Dtype::F32, vec![1, groups])?,
            shape(module, dims)?,
            byte("weight.bits", bits),
            number(module, "weight.group_size", HQQ_GROUP),
            byte("weight.axis", 0),
            number(module, "weight.optimization_steps", HQQ_STEPS),
            byte("weight.round_zeros", 0),
            byte("weight.channel_wise", 1),
            family(module, HQQ),
        ])
    };
    match kind {
        UqffType::Hqq4 => hqq(4),
        UqffType::Hqq8 => hqq(8),
        UqffType::Fp8 => Ok(vec![
            OutputTensor::new(part("weight"), Dtype::F8_E4M3, dims.to_vec())?,
            OutputTensor::new(part("weight.dequant_w_scale"), Dtype::F32, Vec::new())?,
            OutputTensor::new(part("weight.dequant_x_scale"), Dtype::F32, Vec::new())?,
            OutputTensor::new(part("weight.quant_scale"), Dtype::F32, Vec::new())?,
            number(module, "weight.dtype", F8_E4M3),
            family(module, FP8),
        ]),
        UqffType::F8q8 => {
            let blocks = elements.div_ceil(32);
            let too_large =
                || Error::mismatch(format!("`{name}`"), "2^32 blocks at most", blocks.to_string());
            Ok(vec![
                OutputTensor::new(part("weight"), Dtype::U8, vec![blocks.saturating_mul(33)])?,
                number(module, "weight.num_blocks", u32::try_from(blocks).map_err(|_| too_large())?),
                shape(module, dims)?,
                family(module, F8Q8),
            ])
        }
        other => Err(Error::mismatch(format!("`{name}`"), "a type of UQFF files", other.name())),
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
        Work::Blocks(weight) => {
            let name = weight.type_in_gguf().map(|(name, _)| name.to_lowercase().replace("_k", "k"));
            name.unwrap_or_else(|| label(job.becomes()))
        }
        Work::Copy(..) | Work::Cast(..) | Work::Pack(..) | Work::Repack(..) => label(job.becomes()),
    }
}

fn family(module: &str, number: u8) -> OutputTensor {
    OutputTensor::scalar(tensor_of(module, "weight.format"), Dtype::U8, &[number])
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
