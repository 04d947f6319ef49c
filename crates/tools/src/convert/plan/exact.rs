//! Jobs of weights whose codes and scales are copied: the files of the output have what those of the source have.

use crate::convert::output::{file_dtype, Job, OutputTensor, SourceTensor, Work};
use crate::convert::recipe::{FileType, Role, Spec};
use crate::convert::target::{Exact, Target, PACKED_ALREADY};
use candle_quant::checkpoint::{DenseTensor, StoredBlocks, StoredForm, Weight};
use candle_quant::format::UqffType;
use candle_quant::Result;
use safetensors::Dtype;

/// Larger entries of UQFF files are copied; others are written beside what says where all lie.
const MOST_KNOWN_BYTES: usize = 12;

impl Job {
    /// A weight as the source has it, if the output has a place for that.
    pub(super) fn exact(
        source: &SourceTensor,
        role: Role,
        weight: &Weight,
        target: Target,
    ) -> Result<Option<Self>> {
        let Some(form) = weight.stored_form() else { return Ok(None) };
        let job = match &form {
            StoredForm::Blocks(blocks) => Self::blocks(source, blocks, target)?,
            StoredForm::Fp8(_) | StoredForm::Hqq(_) | StoredForm::FourBits(_) | _ => {
                target.kind().of_stored(&source.name, &source.dims, &form)?.map(|exact| {
                    let Exact { spec, outputs, copied } = exact;
                    let runs = copied.into_iter().map(|run| vec![run]).collect();
                    Self::new(source, spec.to_string(), Work::Copy(runs, Some(spec)), outputs)
                })
            }
        };
        Ok(job.map(|job| job.packed_already(role)))
    }

    /// Blocks of a type of GGML, as they are.
    fn blocks(source: &SourceTensor, blocks: &StoredBlocks, target: Target) -> Result<Option<Self>> {
        let (id, bytes) = (blocks.type_id(), blocks.size_in_bytes() as u64);
        let outputs = target.kind().of_blocks(&source.name, &source.dims, id, bytes)?;
        let work = || Work::Blocks(blocks.clone());
        Ok(outputs.map(|outputs| Self::new(source, blocks.type_name().to_lowercase(), work(), outputs)))
    }

    pub(super) fn packed_already(mut self, role: Role) -> Self {
        self.planned.role = role;
        self.planned.rule = PACKED_ALREADY.into();
        self
    }

    /// A weight in a type of mistral.rs that is made of a whole matrix: all that its file says of it.
    pub(super) fn of_uqff(
        source: &SourceTensor,
        role: Role,
        (kind, entries): (UqffType, Vec<DenseTensor>),
    ) -> Result<Self> {
        let output = |entry: &DenseTensor| {
            let is_e4m3 = kind == UqffType::Fp8 && entry.name() == source.name;
            let dtype = if is_e4m3 { Dtype::F8_E4M3 } else { file_dtype(entry.dtype())? };
            let (name, dims) = (entry.name().to_owned(), entry.dims().to_vec());
            if entry.size_in_bytes() > MOST_KNOWN_BYTES {
                return OutputTensor::new(name, dtype, dims);
            }
            let mut bytes = Vec::new();
            entry.for_each_chunk(|chunk| bytes.extend_from_slice(chunk))?;
            Ok(OutputTensor::known(name, dtype, dims, &bytes))
        };
        let outputs = entries.iter().map(output).collect::<Result<Vec<_>>>()?;
        let pairs = outputs.into_iter().zip(entries);
        let (known, copied): (Vec<_>, Vec<_>) = pairs.partition(|(output, _)| output.value.is_some());
        let (mut outputs, runs): (Vec<_>, Vec<_>) =
            copied.into_iter().map(|(output, entry)| (output, vec![entry])).unzip();
        outputs.extend(known.into_iter().map(|(output, _)| output));
        let spec = Spec::Type(FileType::Uqff(kind));
        let job = Self::new(source, spec.to_string(), Work::Copy(runs, Some(spec)), outputs);
        Ok(job.packed_already(role))
    }
}
