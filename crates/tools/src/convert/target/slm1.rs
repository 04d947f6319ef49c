//! SLM1 files: one file with header, tokenizer and weights of a decoder of the llama family.

use super::experts::ExpertLayout;
use super::kind::TargetKind;
use crate::convert::gguf::difference_of_models;
use crate::convert::output::{HeadOrder, Job, OutputFile, OutputTensor};
use crate::convert::recipe::{FileType, Role, Spec};
use candle_core::DType;
use candle_quant::checkpoint::slm1::{Slm1Entry, Slm1Layout, Slm1Model};
use candle_quant::checkpoint::{module_of, tensor_of, Checkpoint, CheckpointKind};
use candle_quant::format::{GgmlType, Slm1Type};
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::{Config, MlxLm};
use safetensors::Dtype;
use std::collections::BTreeMap;

const FILE: &str = "model.slm";

/// What is said of every output.
const UNVERIFIED: &str = "the checksum of an SLM1 file has no published algorithm: a placeholder stands for it, and the program of \
                          the format refuses the file until somebody computes it";
const NO_TOKENIZER: &str =
    "the SLM1 file has no tokenizer section, which is published in part: the files of a tokenizer are copied";

/// An SLM1 file.
#[derive(Debug)]
pub(super) struct Slm1;

impl TargetKind for Slm1 {
    fn name(&self) -> &'static str {
        "an SLM1 file"
    }

    fn check(&self, format: QuantFormat) -> std::result::Result<(), &'static str> {
        match GgmlType::of(format) {
            Some(GgmlType::Q4_0 | GgmlType::Q8_0) => Ok(()),
            Some(_) | None => Err("q4_0 and q8_0"),
        }
    }

    fn meant(&self, spec: Spec) -> Spec {
        match spec.format().and_then(GgmlType::of) {
            Some(GgmlType::Q4_0) => Spec::Type(FileType::Slm1(Slm1Type::Q4_0)),
            Some(GgmlType::Q8_0) => Spec::Type(FileType::Slm1(Slm1Type::Q8_0)),
            Some(_) | None => spec,
        }
    }

    fn has_type(&self, of_files: FileType) -> bool {
        matches!(of_files, FileType::Slm1(_))
    }

    fn of_type(&self, name: &str, dims: &[usize], of_files: FileType) -> Result<Vec<OutputTensor>> {
        match of_files {
            FileType::Slm1(kind) => parts(name, dims, kind, kind.block(dims.last().copied().unwrap_or(0))),
            FileType::Ggml(_) | FileType::Uqff(_) | FileType::Fp8(_) | FileType::WithZeros(_) => {
                Err(Error::mismatch(name, "a type of SLM1 files", of_files.name()))
            }
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

    /// There are no other numbers.
    fn plain_dtype(&self, _: &str, _: &[usize], _: Role) -> Option<DType> {
        Some(DType::F32)
    }

    fn notes(&self, source: &Checkpoint) -> Vec<String> {
        let missing = (source.kind() != CheckpointKind::Slm1).then_some(NO_TOKENIZER);
        std::iter::once(UNVERIFIED).chain(missing).map(str::to_owned).collect()
    }

    fn files(&self, source: &Checkpoint, jobs: Vec<Job>, _: Option<Spec>, _: u64) -> Result<Vec<OutputFile>> {
        let is_tied = jobs.iter().all(|job| job.planned.name != "lm_head.weight");
        let model = model_of(source, is_tied, jobs.len())?;
        let mut by_name: BTreeMap<_, _> =
            jobs.into_iter().map(|job| (job.planned.name.clone(), job)).collect();
        let (mut jobs, mut entries) = (Vec::new(), Vec::new());
        for tensor in model.tensors() {
            let Some(mut job) = by_name.remove(&tensor.model_name) else {
                if tensor.required {
                    let problem = format!("no tensor `{}`, which SLM1 files have", tensor.model_name);
                    return Err(Error::file(
                        source.path(),
                        problem,
                        "give a whole model of the llama family",
                    ));
                }
                continue;
            };
            if job.planned.shape != tensor.dims {
                let (expected, found) = (format!("{:?}", tensor.dims), format!("{:?}", job.planned.shape));
                return Err(Error::mismatch(
                    format!("the shape of `{}`", tensor.model_name),
                    expected,
                    found,
                ));
            }
            if tensor.heads.is_some() {
                job.order_heads(HeadOrder { size: model.head_dim as usize });
            }
            let signed = job.outputs.get(1).zip(job.becomes()).and_then(|(scales, spec)| {
                let elements = tensor.dims.iter().product::<usize>();
                match spec {
                    Spec::Type(FileType::Slm1(kind)) => {
                        Some((kind, elements / scales.dims.iter().product::<usize>().max(1)))
                    }
                    Spec::Type(
                        FileType::Ggml(_) | FileType::Uqff(_) | FileType::Fp8(_) | FileType::WithZeros(_),
                    )
                    | Spec::Packed(_)
                    | Spec::Cast(_)
                    | Spec::Keep => None,
                }
            });
            entries.push(Slm1Entry { name: tensor.name, dims: tensor.dims, signed });
            jobs.push(job);
        }
        if let Some(other) = by_name.keys().next() {
            return Err(Error::Unsupported {
                what: format!(
                    "{}: `{other}` in an SLM1 file, which has no such tensor,",
                    source.path().display()
                ),
                remedy: "convert to another kind".into(),
            });
        }
        let tokenizer = source.slm1_tokenizer().cloned().unwrap_or_default();
        let Slm1Layout { front, places, size } = Slm1Layout::new(&model, &tokenizer, &entries)?;
        for (job, place) in jobs.iter_mut().zip(places) {
            for (output, offset) in job.outputs.iter_mut().zip([place.payload, place.scales]) {
                output.offset = offset;
            }
            job.planned.file = FILE.to_owned();
        }
        let file = FILE.to_owned();
        Ok(vec![OutputFile { file, layer: String::new(), jobs, others: Vec::new(), header: front, size }])
    }

    fn sidecars(&self, _: &[OutputFile]) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

/// Codes and scales of a weight whose rows are blocks with a scale each.
pub(in crate::convert) fn parts(
    name: &str,
    dims: &[usize],
    kind: Slm1Type,
    block: usize,
) -> Result<Vec<OutputTensor>> {
    let mut groups = dims.to_vec();
    groups.iter_mut().last().into_iter().for_each(|k| *k /= block.max(1));
    let mut codes = OutputTensor::new(name.to_owned(), Dtype::U8, dims.to_vec())?;
    codes.bytes = codes.bytes / 8 * kind.bits() as u64;
    let scales = tensor_of(module_of(name).unwrap_or(name), "scales");
    Ok(vec![codes, OutputTensor::new(scales, Dtype::F32, groups)?])
}

/// What a file says of the model of a checkpoint.
///
/// # Errors
/// If a reader of the file would take it for another one.
fn model_of(source: &Checkpoint, is_tied: bool, tensors: usize) -> Result<Slm1Model> {
    let config = Config::from_json(source.config())?;
    // Which is noticed before anything is made for each layer.
    if config.num_hidden_layers > tensors {
        let (expected, found) = (
            format!("tensors of {} layers, as the config says", config.num_hidden_layers),
            tensors.to_string(),
        );
        return Err(Error::mismatch(source.path().display().to_string(), expected, found));
    }
    let size = |what: &str, number: usize| {
        u32::try_from(number).map_err(|_| Error::mismatch(what, "a number of 32 bits", number.to_string()))
    };
    let model = Slm1Model {
        is_tied,
        vocab_size: size("vocab_size", config.vocab_size)?,
        hidden_size: size("hidden_size", config.hidden_size)?,
        layer_count: size("num_hidden_layers", config.num_hidden_layers)?,
        head_count: size("num_attention_heads", config.num_attention_heads)?,
        kv_head_count: size("num_key_value_heads", config.num_key_value_heads)?,
        head_dim: size("head_dim", config.head_dim)?,
        ffn_size: size("intermediate_size", config.intermediate_size)?,
        max_context: size("max_position_embeddings", config.max_position_embeddings)?,
        rope_theta: config.rope.theta as f32,
        rms_norm_epsilon: config.norm_eps as f32,
    };
    match difference_of_models(&config, &Config::from_json(&model.config(None))?) {
        None => Ok(model),
        Some((ours, theirs)) => Err(Error::Unsupported {
            what: format!(
                "{}: a model of `{ours}` in an SLM1 file, which means `{theirs}`,",
                source.path().display()
            ),
            remedy: "convert to another kind".into(),
        }),
    }
}
