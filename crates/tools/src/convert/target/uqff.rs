//! UQFF 1.2.0, the container of mistral.rs: layers in `.uqff` shards, all else in `residual.safetensors`, and a report
//! that lists the shards.

use super::experts::ExpertLayout;
use super::kind::{by_size, TargetKind};
use crate::convert::output::{Job, OutputFile, OutputTensor, Style};
use crate::convert::recipe::Role;
use candle_quant::checkpoint::{module_of, tensor_of, Checkpoint};
use candle_quant::format::{Bits, Quantizer};
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::MlxLm;
use safetensors::Dtype;
use serde_json::{json, Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// The file that names the shards.
pub(super) const REPORT: &str = "uqff_report.json";

const RESIDUAL: &str = "residual.safetensors";

/// The program's name, which files of earlier versions have too.
const PRODUCER: &str = "candle-quant";

/// Major, minor and patch.
const VERSION: [(&str, u32); 3] = [("major", 1), ("minor", 2), ("patch", 0)];

/// What `<module>.weight.format` says of layers that are not packed, of AFQ and of MXFP4.
const UNQUANT: u8 = 1;
const AFQ: u8 = 4;
const MXFP4: u8 = 6;

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
        is_known.then_some(()).ok_or("affine formats of 2, 3, 4, 6 and 8 bits, and mxfp4")
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
        top: Option<QuantFormat>,
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
            shards.push(shard(format!("{stem}-{index}.uqff"), jobs, others));
        }
        if !residual.is_empty() {
            shards.push(shard(RESIDUAL.to_owned(), residual, Vec::new()));
        }
        Ok(shards)
    }

    fn sidecars(&self, files: &[OutputFile], top: Option<QuantFormat>) -> Vec<(&'static str, String)> {
        vec![(REPORT, format!("{:#}\n", report(files, top)))]
    }
}

fn module(job: &Job) -> &str {
    module_of(&job.planned.name).unwrap_or(&job.planned.name)
}

fn has_floats(job: &Job) -> bool {
    job.outputs.first().is_some_and(|output| FLOATS.contains(&output.dtype))
}

/// Whether a tensor that is not packed is a layer all the same, which mistral.rs looks for among the layers.
fn is_unquant(job: &Job) -> bool {
    let planned = &job.planned;
    let of_a_layer = matches!(
        planned.role,
        Role::Embed | Role::LmHead | Role::Experts | Role::V | Role::Down | Role::Attn | Role::Mlp
    );
    let single_expert = planned.name.split('.').skip_while(|segment| *segment != "experts").nth(1);
    matches!(planned.shape.as_slice(), [_, _] | [_, _, _])
        && !planned.shape.contains(&0)
        && job.format().is_none()
        && (of_a_layer || planned.fallback.is_some() && planned.role == Role::Other)
        && planned.name.ends_with(".weight")
        && !single_expert.is_some_and(|segment| segment.bytes().all(|byte| byte.is_ascii_digit()))
        && has_floats(job)
}

/// mistral.rs' word for a format.
fn label(format: Option<QuantFormat>) -> String {
    let Some(format) = format else { return "unquant".to_owned() };
    let integers = format.element().uint().map(|bits| format!("afq{}", bits.get()));
    integers.unwrap_or_else(|| format.mode().to_owned())
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

/// What mistral.rs reads before it looks for shards.
fn report(files: &[OutputFile], top: Option<QuantFormat>) -> Value {
    let is_shard = |file: &&str| *file != RESIDUAL;
    let quant = label(top);
    let mut layers: BTreeMap<&str, &Job> = BTreeMap::new();
    for job in files.iter().filter(|shard| is_shard(&shard.file.as_str())).flat_map(|shard| &shard.jobs) {
        if job.outputs.iter().any(|output| output.value.is_some()) {
            layers.insert(module(job), job);
        }
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let (mut fallbacks, mut details) = (Vec::new(), Vec::new());
    for (module, job) in &layers {
        let stored = label(job.format());
        *counts.entry(stored.clone()).or_default() += 1;
        let shape = job.outputs.first().map(|output| output.dims.clone());
        let asked = job.asked().map_or_else(|| stored.clone(), |asked| label(Some(asked)));
        if let Some(reason) = &job.planned.fallback {
            let (from, to) = (&asked, &stored);
            fallbacks
                .push(json!({"module": module, "from": from, "to": to, "shape": shape, "reason": reason}));
        }
        details.push(json!({
            "module": module,
            "default_target": quant,
            "resolved_target": asked,
            "stored": stored,
            "shape": shape,
        }));
    }
    let mut output = Map::new();
    output.insert("quant".into(), quant.clone().into());
    output.insert("shards".into(), files.iter().map(|file| file.file.as_str()).filter(is_shard).collect());
    output.insert("layers".into(), layers.len().into());
    output.insert("actual_counts".into(), json!(counts));
    output.insert("fallback_count".into(), fallbacks.len().into());
    if !fallbacks.is_empty() {
        output.insert("fallbacks".into(), fallbacks.into());
    }
    output.insert("layer_details".into(), details.into());
    json!({
        "schema": 1,
        "generated_by": {"tool": format!("{PRODUCER} {}", env!("CARGO_PKG_VERSION"))},
        "uqff_version": version_text(),
        "outputs": [output],
    })
}
