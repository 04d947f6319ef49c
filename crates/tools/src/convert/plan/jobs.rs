//! Makes the job of each tensor of the output.

use crate::convert::options::ConvertOptions;
use crate::convert::output::{
    file_dtype, Columns, Encoding, Job, OutputTensor, Packing, SourcePart, SourceTensor, TensorPlan, View,
    Work, WIDE_MXFP4,
};
use crate::convert::recipe::{FileType, Role, Spec};
use crate::convert::target::{Target, PACKED_ALREADY};
use candle_core::DType;
use candle_quant::checkpoint::{module_of, tensor_of, CheckpointKind, MlxForm, PackedWeight, Weight};
use candle_quant::format::Scale;
use candle_quant::{Error, QuantFormat, Result};
use safetensors::Dtype;
use std::sync::Arc;

/// What is said of a weight, after its format, whose codes and scales were searched for.
const SEARCHED: &str = ", searched";

/// What is said if columns count by statistics, and if they make up for what others lose.
const BY_STATISTICS: &str = " by statistics";
const WITH_FEEDBACK: &str = ", with feedback";

/// Why symmetric codes do not become those of a format with biases.
const ROUNDED: &str = " with scales whose products with codes are rounded";

/// Why weights whose scales are multiplied stay no weights of MLX.
const MULTIPLIED: &str = " with a multiplier of its scales";

/// The dtype of numbers in the source.
pub(super) fn stored_dtype(source: &SourceTensor) -> Option<DType> {
    Some(source.parts.first()?.dense()?.dtype())
}

impl Job {
    pub(super) fn new(source: &SourceTensor, to: String, work: Work, outputs: Vec<OutputTensor>) -> Self {
        let from = source.parts.first().map(SourcePart::format_name).unwrap_or_default();
        let planned = TensorPlan {
            name: source.name.clone(),
            shape: source.dims.clone(),
            role: Role::Other,
            rule: String::new(),
            from,
            to,
            source_bytes: source.parts.iter().map(SourcePart::size_in_bytes).sum(),
            bytes: outputs.iter().map(|output| output.bytes).sum(),
            fallback: None,
            file: String::new(),
        };
        let other_name = |part: &SourcePart| match part {
            SourcePart::Stored(dense) => dense.name() != source.name,
            SourcePart::Viewed(..) => true,
            SourcePart::Encoded(_) => source.parts.len() > 1,
        };
        let is_stacked = source.parts.first().is_some_and(other_name);
        Self { planned, work, outputs, spec: Spec::Keep, is_stacked, order: None, scaling: None }
    }

    /// A tensor of dense elements, of another dtype if one is given.
    pub(super) fn plain(source: &SourceTensor, dtype: Option<DType>) -> Result<Self> {
        let stored_as = stored_dtype(source);
        let dtype = dtype.or(stored_as).unwrap_or(DType::BF16);
        let output = OutputTensor::new(source.name.clone(), file_dtype(dtype)?, source.dims.clone())?;
        let stored = |part: &SourcePart| match part {
            SourcePart::Stored(dense) => Some(dense.clone()),
            SourcePart::Encoded(_) | SourcePart::Viewed(..) => None,
        };
        let runs: Option<Vec<_>> = source.parts.iter().map(stored).collect();
        let work = match runs {
            Some(runs) if runs.iter().all(|run| run.dtype() == dtype) => Work::Copy(vec![runs], None),
            _ => Work::Cast(source.parts.clone(), dtype),
        };
        Ok(Self::new(source, format!("{dtype:?}"), work, vec![output]))
    }

    /// A weight that is packed, by numbers of `dtype`.
    pub(super) fn pack(
        source: &SourceTensor,
        spec: Spec,
        dtype: DType,
        options: &ConvertOptions,
        (columns, feedback): (Option<Columns>, Option<Arc<str>>),
    ) -> Result<Self> {
        let (kind, search) = (options.target.kind(), options.search);
        let (format, encoding) = match spec {
            Spec::Packed(format) => (format, kind.blocks(format).map_or(Encoding::Parts, Encoding::Blocks)),
            Spec::Type(FileType::Ggml(of_ggml)) => (of_ggml.format(), Encoding::Blocks(of_ggml)),
            Spec::Type(FileType::Uqff(of_uqff)) => (of_uqff.format(), Encoding::Whole(of_uqff)),
            Spec::Type(FileType::Slm1(of_slm1)) => (of_slm1.format(), Encoding::Signed(of_slm1)),
            Spec::Type(FileType::Fp8(_) | FileType::WithZeros(_)) | Spec::Cast(_) | Spec::Keep => {
                let expected = "a format to be packed in";
                return Err(Error::mismatch(format!("`{}`", source.name), expected, spec.to_string()));
            }
        };
        let scales = match format.scale().is_byte() {
            false => file_dtype(dtype)?,
            true => Dtype::U8,
        };
        if search && format.has_biases() && !kind.has_biases() {
            return Err(Error::Unsupported {
                what: format!("a search for scales and biases of `{}` in {}", source.name, kind.name()),
                remedy: "leave out --search: the middle code is zero there".into(),
            });
        }
        let outputs = match spec {
            Spec::Type(of_files) => kind.of_type(&source.name, &source.dims, of_files)?,
            Spec::Packed(_) | Spec::Cast(_) | Spec::Keep => {
                kind.packed(&source.name, &source.dims, format, scales)?
            }
        };
        let refused = match encoding {
            Encoding::Parts => None,
            Encoding::Blocks(_) => feedback.is_some().then_some("feedback"),
            Encoding::Signed(_) | Encoding::Whole(_) | Encoding::WithZeros => {
                (columns.is_some() || feedback.is_some()).then_some("statistics of a text")
            }
        };
        if let Some(refused) = refused {
            return Err(Error::Unsupported {
                what: format!("{refused} for `{}` as {spec}", source.name),
                remedy: "leave out --calibrate and --feedback, or convert to another kind".into(),
            });
        }
        let mut to = match encoding {
            Encoding::Parts => format.to_string(),
            Encoding::Blocks(_) | Encoding::Signed(_) | Encoding::Whole(_) | Encoding::WithZeros => {
                spec.to_string()
            }
        };
        for (is_so, words) in [
            (search, SEARCHED),
            (search && columns.is_some(), BY_STATISTICS),
            (feedback.is_some(), WITH_FEEDBACK),
        ] {
            to.push_str(if is_so { words } else { "" });
        }
        let quantizer = kind.quantizer(format);
        let packing = Packing { dtype, format, quantizer, search, encoding, columns, feedback };
        Ok(Self::new(source, to, Work::Pack(source.parts.clone(), packing), outputs))
    }

    /// A weight that is packed already.
    pub(super) fn pass_through(
        source: &SourceTensor,
        role: Role,
        weight: &Weight,
        target: Target,
        stored: CheckpointKind,
    ) -> Result<Self> {
        let kind = target.kind();
        let impossible = |why: &str| Error::Unsupported {
            what: format!("`{}`, {}{why}, as it is in {}", source.name, weight.format_name(), kind.name()),
            remedy: "requantize or dequantize it".into(),
        };
        let Weight::Packed(packed) = weight else {
            return Err(impossible(""));
        };
        if let Some(job) = Self::integers(source, role, packed, target, stored)? {
            return Ok(job);
        }
        if let (Some(blocks), Target::Gguf) = (kind.blocks(packed.format()), target) {
            // Scales are bytes, which a number beside the blocks may multiply.
            let (fits, is_multiplied) = match (packed.mlx_form()?, blocks.format().scale().is_byte()) {
                (MlxForm::Rearranged(_) | MlxForm::WithoutBiases(_), true) => (true, false),
                (MlxForm::Stored(parts), true) => {
                    (true, parts.iter().any(|(part, _)| *part == "global_scale"))
                }
                (MlxForm::Multiplied, true) => (true, true),
                // What F16 holds is an integer job already.
                (MlxForm::Impossible(_) | _, _) => (false, false),
            };
            if !fits || packed.format().scale() == Scale::SuperBlock {
                return Err(impossible(" with scales that are no F16 numbers"));
            }
            let mut outputs = kind.packed(&source.name, &source.dims, packed.format(), Dtype::U8)?;
            if is_multiplied {
                let matrices = match source.dims.as_slice() {
                    [matrices, _, _] => *matrices,
                    _ => 1,
                };
                let name = tensor_of(module_of(&source.name).unwrap_or(&source.name), "scale");
                outputs.push(OutputTensor::new(name, Dtype::F32, vec![matrices])?);
            }
            let encoding = Encoding::Blocks(blocks);
            let work = Work::Repack(vec![packed.clone()], packed.format(), encoding);
            let mut job = Self::new(source, blocks.name().to_lowercase(), work, outputs);
            job.planned.role = role;
            job.planned.rule = PACKED_ALREADY.into();
            return Ok(job);
        }
        if target == Target::Slm1 {
            return Err(impossible(""));
        }
        // Where biases say what the midpoint of symmetric codes says, they are written.
        let format = packed.format().with_biases();
        target.check(&source.name, PACKED_ALREADY, format)?;
        if packed.format().has_biases() && !kind.has_biases() {
            return Err(impossible(
                " with biases that are no zeros of groups, of which compressed-tensors has no form",
            ));
        }
        let outputs = |scales| kind.packed(&source.name, &source.dims, format, scales);
        let (work, outputs) = match packed.mlx_form()? {
            MlxForm::Stored(parts) => {
                let part = |name| parts.iter().find_map(|(part, dense)| (*part == name).then_some(dense));
                let scales = part("scales").map(|scales| file_dtype(scales.dtype())).transpose()?;
                let mut outputs = outputs(scales.unwrap_or(Dtype::U8))?;
                if let (Some(biases), Some(output)) = (part("biases"), outputs.get_mut(2)) {
                    *output = OutputTensor::new(
                        output.name.clone(),
                        file_dtype(biases.dtype())?,
                        output.dims.clone(),
                    )?;
                }
                if let Some(scale) = part("global_scale") {
                    if !kind.has_global_scales() {
                        return Err(impossible(" with a global scale"));
                    }
                    let name = tensor_of(module_of(&source.name).unwrap_or(&source.name), "global_scale");
                    outputs.push(OutputTensor::new(name, file_dtype(scale.dtype())?, scale.dims().to_vec())?);
                }
                let sources = parts.into_iter().map(|(_, dense)| vec![dense]).collect();
                (Work::Copy(sources, Some(Spec::Packed(format))), outputs)
            }
            MlxForm::WithoutBiases(_) if kind.has_biases() => return Err(impossible(ROUNDED)),
            MlxForm::Rearranged(scales) | MlxForm::WithoutBiases(scales) => {
                (Work::Repack(vec![packed.clone()], format, Encoding::Parts), outputs(file_dtype(scales)?)?)
            }
            MlxForm::Multiplied => return Err(impossible(MULTIPLIED)),
            MlxForm::Impossible(why) => return Err(impossible(why)),
            _ => return Err(impossible("")),
        };
        let mut job = Self::new(source, format.to_string(), work, outputs);
        job.planned.role = role;
        job.planned.rule = PACKED_ALREADY.into();
        Ok(job)
    }

    /// Weights in one format whose scales are bytes, their rows in turn; `None` if they are no such.
    pub(super) fn in_turn(source: &SourceTensor, role: Role, target: Target) -> Result<Option<Self>> {
        let [SourcePart::Viewed(weights, View::AlternatingRows)] = source.parts.as_slice() else {
            return Ok(None);
        };
        let packed = |weight: &Weight| match weight {
            Weight::Packed(packed) if packed.format().scale() == Scale::E8m0 => Some(packed.clone()),
            Weight::Packed(_) | Weight::Ggml(_) | Weight::Dense(_) | _ => None,
        };
        let Some(weights) = weights.iter().map(packed).collect::<Option<Vec<_>>>() else { return Ok(None) };
        let Some(format) = weights.first().map(PackedWeight::format) else { return Ok(None) };
        if weights.iter().any(|weight| weight.format() != format) {
            return Ok(None);
        }
        target.check(&source.name, PACKED_ALREADY, format)?;
        let outputs = target.kind().packed(&source.name, &source.dims, format, Dtype::U8)?;
        let encoding = target.kind().blocks(format).map_or(Encoding::Parts, Encoding::Blocks);
        let work = Work::Repack(weights, format, encoding);
        let mut job = Self::new(source, format.to_string(), work, outputs);
        job.planned.role = role;
        job.planned.rule = PACKED_ALREADY.into();
        Ok(Some(job))
    }

    /// A weight in a wider format that holds it exactly, if that is what it is to become.
    pub(super) fn widen(
        source: &SourceTensor,
        role: Role,
        (spec, rule): (Spec, &str),
        packed: &PackedWeight,
        scales: DType,
        target: Target,
    ) -> Result<Option<Self>> {
        if packed.format() != QuantFormat::MXFP4
            || spec != Spec::Packed(WIDE_MXFP4)
            || matches!(packed.mlx_form()?, MlxForm::Multiplied | MlxForm::Impossible(_))
        {
            return Ok(None);
        }
        target.check(&source.name, rule, WIDE_MXFP4)?;
        let outputs = target.kind().packed(&source.name, packed.dims(), WIDE_MXFP4, file_dtype(scales)?)?;
        let work = Work::Repack(vec![packed.clone()], WIDE_MXFP4, Encoding::Parts);
        let mut job = Self::new(source, WIDE_MXFP4.to_string(), work, outputs);
        job.spec = spec;
        job.planned.role = role;
        job.planned.rule = rule.to_owned();
        Ok(Some(job))
    }
}
