//! One tensor of the output: where its numbers come from, and what is done to them.

use super::experts::{Form, Part};
use super::kind::PACKED_ALREADY;
use super::plan::PlannedTensor;
use super::repack::WIDE_MXFP4;
use super::shard::Output;
use super::{Options, Role, Spec, Target};
use crate::checkpoint::{module_of, tensor_of, DenseTensor, PackedWeight, Weight};
use crate::format::Quantizer;
use crate::{Error, QuantFormat, Result};
use candle_core::DType;
use safetensors::Dtype;

/// Elements that a thread works on at a time, unless one row has more.
const BLOCK: usize = 1 << 18;

/// What is said of a weight, after its format, whose codes and scales were searched for.
const SEARCHED: &str = ", searched";

/// One tensor of the output; a packed weight is one.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub planned: PlannedTensor,
    pub work: Work,
    pub outputs: Vec<Output>,
    /// What the rule says that it becomes.
    pub spec: Spec,
    /// Whether it consists of tensors of other names.
    pub is_stacked: bool,
}

/// What is done.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// For each tensor of the output, the tensors whose bytes it consists of.
    Copy(Vec<Vec<DenseTensor>>, Option<QuantFormat>),
    /// Numbers are converted to a dtype.
    Cast(Vec<Part>, DType),
    /// Numbers are rounded to a dtype and packed.
    Pack(Vec<Part>, Packing),
    /// Codes are brought into another layout, or into a format that holds them exactly.
    Repack(PackedWeight, QuantFormat),
}

/// How numbers are packed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    /// What they are rounded to before.
    pub dtype: DType,
    pub format: QuantFormat,
    pub quantizer: Quantizer,
    /// Whether what the quantizer leaves is improved.
    pub search: bool,
}

/// The dtype of numbers in the source.
pub(super) fn stored_dtype(form: &Form) -> Option<DType> {
    match form.parts.first()? {
        Part::Stored(dense) => Some(dense.dtype()),
        Part::Encoded(Weight::Dense(dense)) => Some(dense.dtype()),
        Part::Encoded(_) => None,
    }
}

impl Job {
    fn new(form: &Form, to: String, work: Work, outputs: Vec<Output>) -> Self {
        let bytes_of = |part: &Part| match part {
            Part::Stored(dense) => dense.size_in_bytes() as u64,
            Part::Encoded(weight) => weight.size_in_bytes() as u64,
        };
        let from = match form.parts.first() {
            Some(Part::Stored(dense)) => format!("{:?}", dense.dtype()),
            Some(Part::Encoded(weight)) => weight.format_name(),
            None => String::new(),
        };
        let planned = PlannedTensor {
            name: form.name.clone(),
            shape: form.dims.clone(),
            role: Role::Other,
            rule: String::new(),
            from,
            to,
            source_bytes: form.parts.iter().map(bytes_of).sum(),
            bytes: outputs.iter().map(|output| output.bytes).sum(),
            fallback: None,
            file: String::new(),
        };
        let other_name = |part: &Part| matches!(part, Part::Stored(dense) if dense.name() != form.name);
        let is_stacked = form.parts.first().is_some_and(other_name);
        Self { planned, work, outputs, spec: Spec::Keep, is_stacked }
    }

    /// A tensor of plain numbers, of another dtype if one is given.
    pub(super) fn plain(form: &Form, dtype: Option<DType>) -> Result<Self> {
        let source = stored_dtype(form);
        let dtype = dtype.or(source).unwrap_or(DType::BF16);
        let output = Output::new(form.name.clone(), file_dtype(dtype)?, form.dims.clone())?;
        let stored = |part: &Part| match part {
            Part::Stored(dense) => Some(dense.clone()),
            Part::Encoded(_) => None,
        };
        let runs: Option<Vec<_>> = form.parts.iter().map(stored).collect();
        let work = match runs {
            Some(runs) if source == Some(dtype) => Work::Copy(vec![runs], None),
            _ => Work::Cast(form.parts.clone(), dtype),
        };
        Ok(Self::new(form, format!("{dtype:?}"), work, vec![output]))
    }

    /// A weight that is packed, by numbers of `dtype`.
    pub(super) fn pack(form: &Form, format: QuantFormat, dtype: DType, options: &Options) -> Result<Self> {
        let scales = match format.scale().is_byte() {
            false => file_dtype(dtype)?,
            true => Dtype::U8,
        };
        let (kind, search) = (options.target.kind(), options.search);
        let outputs = kind.packed(&form.name, &form.dims, format, scales)?;
        let packing = Packing { dtype, format, quantizer: kind.quantizer(format), search };
        let to = format!("{format}{}", if search { SEARCHED } else { "" });
        Ok(Self::new(form, to, Work::Pack(form.parts.clone(), packing), outputs))
    }

    /// A weight that is packed already.
    pub(super) fn pass_through(form: &Form, role: Role, weight: &Weight, target: Target) -> Result<Self> {
        let kind = target.kind();
        let impossible = |why: &str| Error::Unsupported {
            what: format!("`{}`, {}{why}, as it is in {}", form.name, weight.format_name(), kind.name()),
            remedy: "requantize or dequantize it".into(),
        };
        let Weight::Packed(packed) = weight else {
            return Err(impossible(""));
        };
        // Where biases say what the midpoint of symmetric codes says, they are written.
        let format = packed.format().with_biases();
        target.check(&form.name, PACKED_ALREADY, format)?;
        let outputs = |scales| kind.packed(&form.name, packed.dims(), format, scales);
        let (work, outputs) = match packed.as_mlx()? {
            Some(parts) => {
                let part = |name| parts.iter().find_map(|(part, dense)| (*part == name).then_some(dense));
                let scales = part("scales").map(|scales| file_dtype(scales.dtype())).transpose()?;
                let mut outputs = outputs(scales.unwrap_or(Dtype::U8))?;
                if let (Some(biases), Some(output)) = (part("biases"), outputs.get_mut(2)) {
                    *output =
                        Output::new(output.name.clone(), file_dtype(biases.dtype())?, output.dims.clone())?;
                }
                if let Some(scale) = part("global_scale") {
                    if !kind.has_global_scales() {
                        return Err(impossible(" with a global scale"));
                    }
                    let name = tensor_of(module_of(&form.name).unwrap_or(&form.name), "global_scale");
                    outputs.push(Output::new(name, file_dtype(scale.dtype())?, scale.dims().to_vec())?);
                }
                let sources = parts.into_iter().map(|(_, dense)| vec![dense]).collect();
                (Work::Copy(sources, Some(format)), outputs)
            }
            None => {
                let (scales, obstacle) = match format.scale().is_byte() {
                    false => (packed.affine_scales()?, " with scales whose products with codes are rounded"),
                    true => (
                        Some(Dtype::U8).filter(|_| !packed.has_multiplier()),
                        " with a multiplier of its scales",
                    ),
                };
                (Work::Repack(packed.clone(), format), outputs(scales.ok_or_else(|| impossible(obstacle))?)?)
            }
        };
        let mut job = Self::new(form, format.to_string(), work, outputs);
        job.planned.role = role;
        job.planned.rule = PACKED_ALREADY.into();
        Ok(job)
    }

    /// A weight in a wider format that holds it exactly, if that is what it is to become.
    pub(super) fn widen(
        form: &Form,
        role: Role,
        (spec, rule): (Spec, &str),
        packed: &PackedWeight,
        scales: DType,
        target: Target,
    ) -> Result<Option<Self>> {
        if packed.format() != QuantFormat::MXFP4
            || spec != Spec::Packed(WIDE_MXFP4)
            || packed.has_multiplier()
        {
            return Ok(None);
        }
        target.check(&form.name, rule, WIDE_MXFP4)?;
        let outputs = target.kind().packed(&form.name, packed.dims(), WIDE_MXFP4, file_dtype(scales)?)?;
        let work = Work::Repack(packed.clone(), WIDE_MXFP4);
        let mut job = Self::new(form, WIDE_MXFP4.to_string(), work, outputs);
        job.spec = spec;
        job.planned.role = role;
        job.planned.rule = rule.to_owned();
        Ok(Some(job))
    }

    /// Whether its codes and scales are searched for.
    pub(super) fn is_searched(&self) -> bool {
        matches!(&self.work, Work::Pack(_, packing) if packing.search)
    }

    /// The format of the output, if it is packed.
    pub(super) fn format(&self) -> Option<QuantFormat> {
        match &self.work {
            Work::Copy(_, format) => *format,
            Work::Cast(..) => None,
            Work::Pack(_, packing) => Some(packing.format),
            Work::Repack(_, format) => Some(*format),
        }
    }

    /// The format that was asked for, if it is not that of the output.
    pub(super) fn asked(&self) -> Option<QuantFormat> {
        match (self.spec, &self.planned.fallback) {
            (Spec::Packed(format), Some(_)) => Some(format),
            _ => None,
        }
    }

    /// Elements of a row.
    pub(super) fn k(&self) -> usize {
        self.planned.shape.last().copied().unwrap_or(1).max(1)
    }

    /// Rows that a thread works on at a time.
    pub(super) fn block_rows(&self) -> usize {
        (BLOCK / self.k()).max(1)
    }

    /// About the memory that a thread needs for one block.
    pub(super) fn block_bytes(&self) -> u64 {
        // Numbers as they are stored and as f32, decoded ones, and codes before and after packing.
        (self.block_rows() as u64).saturating_mul(self.k() as u64).saturating_mul(16)
    }

    /// The memory for a weight that has to be loaded as a whole.
    pub(super) fn whole_bytes(&self) -> u64 {
        let whole = |part: &Part| match part {
            Part::Stored(_) => 0,
            Part::Encoded(weight) => (weight.size_in_bytes() as u64).saturating_mul(2),
        };
        match &self.work {
            Work::Copy(..) => 0,
            Work::Cast(parts, _) | Work::Pack(parts, ..) => parts.iter().map(whole).max().unwrap_or(0),
            Work::Repack(packed, _) => {
                // Once read and once loaded; then a matrix as numbers and as bytes.
                let whole = packed.size_in_bytes() as u64;
                let stack = packed.dims().iter().rev().skip(2).product::<usize>().max(1) as u64;
                whole.saturating_mul(2).saturating_add((whole / stack).saturating_mul(3))
            }
        }
    }
}

/// The dtype as files call it.
fn file_dtype(dtype: DType) -> Result<Dtype> {
    Ok(match dtype {
        DType::U8 => Dtype::U8,
        DType::U32 => Dtype::U32,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        other => {
            return Err(Error::Unsupported {
                what: format!("writing {other:?}"),
                remedy: "convert the tensor to F16, BF16 or F32".into(),
            })
        }
    })
}
