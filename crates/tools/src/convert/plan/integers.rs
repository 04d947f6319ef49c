//! Jobs of integer codes whose scales have zeros, whatever says so in the source: zeros, biases, or that codes are symmetric.

use crate::convert::output::{file_dtype, Encoding, Job, SourceTensor, Work};
use crate::convert::recipe::{FileType, Role, Spec};
use crate::convert::target::{slm1_parts, Target};
use candle_core::{DType, Tensor};
use candle_quant::checkpoint::{CheckpointKind, IntegerGroups, PackedWeight};
use candle_quant::format::{GgmlType, Scale, Slm1Type};
use candle_quant::{QuantFormat, Result};
use safetensors::Dtype;

impl Job {
    /// A weight of integers in files that have the middle code or a zero of each group in place of biases; `None` if its numbers are
    /// others.
    pub(super) fn integers(
        source: &SourceTensor,
        role: Role,
        packed: &PackedWeight,
        target: Target,
        stored: CheckpointKind,
    ) -> Result<Option<Self>> {
        let format = packed.format();
        let is_asked = match target {
            Target::Gguf | Target::Slm1 => true,
            // Symmetric codes are what they are without a look at the numbers.
            Target::HuggingFace => format.has_biases() && target.has(format),
            Target::Mlx | Target::Dense | Target::Uqff | Target::Ollama => false,
        };
        let is_integer = format.element().uint().is_some() && format.scale() == Scale::Float;
        let groups = if is_asked && is_integer { packed.integer_groups()? } else { None };
        let Some(groups) = groups else { return Ok(None) };
        let job = match target {
            Target::Gguf => Self::in_blocks(source, packed, &groups)?,
            Target::Slm1 => Self::signed(source, packed, &groups, stored)?,
            Target::HuggingFace => Self::with_zeros(source, packed, &groups, target)?,
            Target::Mlx | Target::Dense | Target::Uqff | Target::Ollama => None,
        };
        Ok(job.map(|job| job.packed_already(role)))
    }

    /// Q4_0, Q5_0 or Q8_0, whose blocks have a scale each and no zeros.
    fn in_blocks(
        source: &SourceTensor,
        packed: &PackedWeight,
        groups: &IntegerGroups,
    ) -> Result<Option<Self>> {
        let format = QuantFormat::symmetric_opt(packed.format().bits(), 32);
        let Some(kind) = format.and_then(GgmlType::of) else { return Ok(None) };
        if groups.zeros.is_some() || half_scales(groups)?.is_none() {
            return Ok(None);
        }
        let outputs = Target::Gguf.kind().packed(&source.name, &source.dims, kind.format(), Dtype::U8)?;
        let work = Work::Repack(vec![packed.clone()], kind.format(), Encoding::Blocks(kind));
        Ok(Some(Self::new(source, kind.name().to_lowercase(), work, outputs)))
    }

    /// Symmetric codes as signed ones: of 8 bits those of SLM1 files alone, which have a scale for each row.
    fn signed(
        source: &SourceTensor,
        packed: &PackedWeight,
        groups: &IntegerGroups,
        stored: CheckpointKind,
    ) -> Result<Option<Self>> {
        let format = packed.format();
        let [.., k] = source.dims.as_slice() else { return Ok(None) };
        let (kind, block) = match format.bits() {
            4 => (Slm1Type::Q4_0, format.group_size()),
            8 if stored == CheckpointKind::Slm1 => (Slm1Type::Q8_0, *k),
            _ => return Ok(None),
        };
        if groups.zeros.is_some() {
            return Ok(None);
        }
        let outputs = slm1_parts(&source.name, &source.dims, kind, block)?;
        let work = Work::Repack(vec![packed.clone()], format, Encoding::Signed(kind));
        Ok(Some(Self::new(source, kind.name().to_owned(), work, outputs)))
    }

    /// A linear layer as compressed-tensors has it: symmetric, or with zeros that are codes.
    fn with_zeros(
        source: &SourceTensor,
        packed: &PackedWeight,
        groups: &IntegerGroups,
        target: Target,
    ) -> Result<Option<Self>> {
        let (format, scales) = (packed.format(), file_dtype(groups.scales.dtype())?);
        let (name, dims) = (source.name.as_str(), source.dims.as_slice());
        if groups.zeros.is_none() {
            let outputs = target.kind().packed(name, dims, format, scales)?;
            let work = Work::Repack(vec![packed.clone()], format, Encoding::Parts);
            return Ok(Some(Self::new(source, format.to_string(), work, outputs)));
        }
        let outputs = target.kind().with_zeros(name, dims, format, scales)?;
        Ok(outputs.map(|outputs| {
            let spec = Spec::Type(FileType::WithZeros(format));
            let work = Work::Repack(vec![packed.clone()], format, Encoding::WithZeros);
            Self::new(source, spec.to_string(), work, outputs)
        }))
    }
}

/// The scales in F16, if it holds all of them.
pub(in crate::convert) fn half_scales(groups: &IntegerGroups) -> Result<Option<Tensor>> {
    let halves = groups.scales.to_dtype(DType::F16)?;
    let differs = halves.to_dtype(DType::F32)?.ne(&groups.scales.to_dtype(DType::F32)?)?;
    let count = differs.to_dtype(DType::U32)?.sum_all()?.to_scalar::<u32>()?;
    Ok((count == 0).then_some(halves))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn scales_of_16_bits_are_f16_numbers_or_not() {
        for (scale, is_held) in
            [(0.0078125f32, true), (65280., true), (1e-30, false), (1e30, false), (f32::NAN, false)]
        {
            let scales = Tensor::new(&[[0.5, scale]], &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
            let halves = half_scales(
                &IntegerGroups::of(QuantFormat::symmetric(4, 32).unwrap(), &scales, None).unwrap().unwrap(),
            );
            assert_eq!(halves.unwrap().is_some(), is_held, "{scale}");
        }
    }
}
