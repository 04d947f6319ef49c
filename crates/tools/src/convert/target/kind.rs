//! What each kind of output does in its own way. Planning, writing, resuming and measuring are the same for all.

use super::exact::Exact;
use super::experts::ExpertLayout;
use super::mlx::{index_json, INDEX};
use crate::convert::output::{Job, OutputFile, OutputTensor};
use crate::convert::recipe::{rows, Fallback, FileType, Role, Spec};
use candle_core::DType;
use candle_quant::checkpoint::{module_of, tensor_of, Checkpoint, StoredForm};
use candle_quant::format::{GgmlType, Quantizer};
use candle_quant::{Error, QuantFormat, Result};
use candle_quant_models::MlxLm;
use safetensors::Dtype;
use std::fmt::Debug;

/// One kind of output.
pub(in crate::convert) trait TargetKind: Debug + Sync {
    /// What it is called in errors.
    fn name(&self) -> &'static str;

    /// The recipe that is meant by a format alone.
    fn recipe(&self) -> &'static str {
        "safe"
    }

    /// Whether it has this format, and `Err` of the formats that it has if not.
    fn check(&self, _: QuantFormat) -> std::result::Result<(), &'static str> {
        Ok(())
    }

    /// The type of GGML in whose blocks a format is written, if it is; else codes, scales and biases are tensors.
    fn blocks(&self, _: QuantFormat) -> Option<GgmlType> {
        None
    }

    /// What is written where this is asked for: a type of its own with the name of another.
    fn meant(&self, spec: Spec) -> Spec {
        spec
    }

    /// Whether it has this type of files.
    fn has_type(&self, _: FileType) -> bool {
        false
    }

    /// The tensors of a weight that is such a type.
    fn of_type(&self, name: &str, _dims: &[usize], of_files: FileType) -> Result<Vec<OutputTensor>> {
        Err(Error::Unsupported {
            what: format!("`{name}` as {} in {}", of_files.name(), self.name()),
            remedy: "give it another format".into(),
        })
    }

    /// The tensors of a weight in blocks of a type of GGML, if such weights are written as they are; `id` is the number of the
    /// type.
    fn of_blocks(
        &self,
        _name: &str,
        _dims: &[usize],
        _id: u32,
        _bytes: u64,
    ) -> Result<Option<Vec<OutputTensor>>> {
        Ok(None)
    }

    /// A weight whose codes and scales lie so in the source, if it has the same here.
    fn of_stored(&self, _name: &str, _dims: &[usize], _form: &StoredForm) -> Result<Option<Exact>> {
        Ok(None)
    }

    /// Why a tensor of this name and shape can't become this, if so.
    fn obstacle(&self, spec: Spec, _name: &str, dims: &[usize]) -> Option<String> {
        match spec {
            Spec::Packed(format) => {
                rows(dims, self.blocks(format).map_or(format.group_size(), |kind| kind.block().0))
            }
            Spec::Type(of_files) => of_files.obstacle(dims),
            Spec::Cast(_) | Spec::Keep => None,
        }
    }

    /// What something becomes where rows are no whole groups of it, the first that fits.
    fn instead(&self, spec: Spec, fallback: Fallback) -> Vec<Spec> {
        match (spec, fallback) {
            (Spec::Packed(format), Fallback::Fit) => format.smaller_groups().map(Spec::Packed).collect(),
            (Spec::Packed(_) | Spec::Type(_) | Spec::Cast(_) | Spec::Keep, _) => Vec::new(),
        }
    }

    /// The dtype of a tensor that is not packed, if it is always the same.
    fn plain_dtype(&self, _name: &str, _dims: &[usize], _role: Role) -> Option<DType> {
        None
    }

    /// Whether there is a config.json in the output.
    fn has_config(&self) -> bool {
        true
    }

    /// What computes the codes.
    fn quantizer(&self, _: QuantFormat) -> Quantizer {
        Quantizer::Mlx
    }

    /// What becomes of the experts of a model of this family.
    fn experts(&self, family: &MlxLm) -> ExpertLayout;

    /// Whether a tied `lm_head` is omitted.
    fn leaves_out_tied_heads(&self) -> bool {
        false
    }

    /// Whether a file beside the weights of the source is copied, of those that are copied at all.
    fn copies(&self, _name: &str) -> bool {
        true
    }

    /// What a finished file is called in the output.
    fn published(&self, file: &str, _sha256: &str) -> String {
        file.to_owned()
    }

    /// Whether config.json says how the weights are quantized.
    fn describes_formats(&self) -> bool {
        false
    }

    /// Whether there is no output without a config.json.
    fn needs_config(&self) -> bool {
        false
    }

    /// Whether the biases of affine formats are numbers of any size.
    fn has_biases(&self) -> bool {
        true
    }

    /// Whether weights may have a global scale, which is MLX's.
    fn has_global_scales(&self) -> bool {
        false
    }

    /// The tensors of a packed weight: codes, scales, biases if the format has them, and then what is known already.
    /// They have MLX's names, unless the kind has others.
    fn packed(
        &self,
        name: &str,
        dims: &[usize],
        format: QuantFormat,
        scales: Dtype,
    ) -> Result<Vec<OutputTensor>> {
        let module = module_of(name).unwrap_or(name);
        OutputTensor::packed(dims, format, scales, |part| tensor_of(module, part))
    }

    /// The tensors of a weight whose groups have codes for zeros, if it has such: codes, scales, zeros, and then what is known
    /// already.
    fn with_zeros(
        &self,
        _name: &str,
        _dims: &[usize],
        _format: QuantFormat,
        _scales: Dtype,
    ) -> Result<Option<Vec<OutputTensor>>> {
        Ok(None)
    }

    /// What is odd about a model of this kind of this source.
    fn notes(&self, _: &Checkpoint) -> Vec<String> {
        Vec::new()
    }

    /// The files of weights, with what lies where in them. `source` is what they are made of, `top` is what the checkpoint as a whole is; no file
    /// exceeds `max_size` bytes, unless one weight does.
    fn files(
        &self,
        source: &Checkpoint,
        jobs: Vec<Job>,
        top: Option<Spec>,
        max_size: u64,
    ) -> Result<Vec<OutputFile>>;

    /// Adds the files of the same model in another form to those of `files`.
    fn join(&self, _files: &mut Vec<OutputFile>, _others: Vec<OutputFile>) -> Result<()> {
        Err(Error::Unsupported {
            what: format!("several forms of a model in {}", self.name()),
            remedy: "give one format; UQFF models may have several".into(),
        })
    }

    /// The files that describe the weights, beside config.json: an index of the tensors.
    fn sidecars(&self, files: &[OutputFile]) -> Vec<(&'static str, String)> {
        vec![(INDEX, index_json(files))]
    }
}

/// Fills files up to the size that is asked for. The tensors of a packed weight stay together.
pub(super) fn by_size(jobs: Vec<Job>, limit: u64) -> Vec<Vec<Job>> {
    let mut files: Vec<(u64, Vec<Job>)> = Vec::new();
    for job in jobs {
        let bytes = job.planned.bytes;
        match files.last_mut() {
            Some((size, jobs)) if size.saturating_add(bytes) <= limit => {
                *size += bytes;
                jobs.push(job);
            }
            _ => files.push((bytes, vec![job])),
        }
    }
    files.into_iter().map(|(_, jobs)| jobs).collect()
}
