//! What each kind of output does in its own way. Planning, writing, resuming and measuring are the same for all.

mod mlx;
pub(super) mod ollama;
mod uqff;

use super::job::Job;
use super::plan::{Plan, Shard};
use super::quality::WrittenFile;
use super::shard::Output;
use super::{importer, Options, Target};
use crate::format::Quantizer;
use crate::{Error, QuantFormat, Result};
use safetensors::Dtype;
use std::fmt::Debug;

pub(super) use mlx::INDEX;
pub(super) use uqff::REPORT;

/// One kind of output.
pub(super) trait Kind: Debug + Sync {
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

    /// What computes the codes.
    fn quantizer(&self, _: QuantFormat) -> Quantizer {
        Quantizer::Mlx
    }

    /// What becomes of the experts of the source.
    fn experts(&self) -> Experts;

    /// Whether the head of a model whose embedding is its head is left out.
    fn leaves_out_tied_heads(&self) -> bool {
        false
    }

    /// Whether a file beside the weights of the source is copied, of those that are copied at all.
    fn copies(&self, _name: &str) -> bool {
        true
    }

    /// What a finished file is called in the output.
    fn published(&self, file: &WrittenFile) -> String {
        file.file.clone()
    }

    /// Whether config.json says how the weights are quantized.
    fn describes_formats(&self) -> bool {
        false
    }

    /// Whether there is no output without a config.json.
    fn needs_config(&self) -> bool {
        false
    }

    /// Whether weights may have a global scale, which is MLX's.
    fn has_global_scales(&self) -> bool {
        false
    }

    /// The tensors of a packed weight: codes, scales, biases if the format has them, and then what is known already.
    fn packed(&self, name: &str, dims: &[usize], format: QuantFormat, scales: Dtype) -> Result<Vec<Output>>;

    /// The files of weights, with what lies where in them.
    fn shards(&self, jobs: Vec<Job>, top: Option<QuantFormat>, options: &Options) -> Result<Vec<Shard>>;

    /// The files that describe the weights, beside config.json.
    fn companions(&self, plan: &Plan) -> Vec<(&'static str, String)>;
}

/// The rule of tensors that are written as they are.
pub(super) const PACKED_ALREADY: &str = "packed already";

/// What becomes of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Experts {
    /// One stack for each projection, in a module of this name. Gate and up projections are split.
    Stacks(&'static str),
    /// Single ones become stacks under their names, as Ollama has them; stacks stay what they are.
    OfSource,
    /// What they are.
    Untouched,
}

impl Experts {
    /// The path of the stack of a projection; `None` if experts are not stacked.
    pub(super) fn stack(self, block: &str, projection: &str) -> Option<String> {
        match self {
            Self::Stacks(module) => Some(format!("{block}.{module}.{projection}")),
            Self::OfSource => {
                let known = [".mlp", ".moe", ".mixer"].iter().any(|end| block.ends_with(end));
                known.then(|| format!("{block}.experts.{projection}"))
            }
            Self::Untouched => None,
        }
    }

    /// Whether a weight of this name may be a stack of experts.
    pub(super) fn is_stack(self, name: &str) -> bool {
        match self {
            Self::Stacks(module) => name.contains(&format!(".{module}.")),
            Self::OfSource => importer::is_expert(name),
            Self::Untouched => false,
        }
    }

    /// Whether a parameter of this name is packed as if it were the weight of a module.
    pub(super) fn is_module(self, name: &str) -> bool {
        name.ends_with("weight") || self == Self::OfSource && self.is_stack(name)
    }
}

impl Target {
    pub(super) fn kind(self) -> &'static dyn Kind {
        match self {
            Self::Mlx => &mlx::Mlx,
            Self::Dense => &mlx::Dense,
            Self::Uqff => &uqff::Uqff,
            Self::Ollama => &ollama::Ollama,
        }
    }

    /// Refuses a format that this kind of output has no type for; `why` says where it comes from.
    pub(super) fn check(self, tensor: &str, why: &str, format: QuantFormat) -> Result<()> {
        let kind = self.kind();
        kind.check(format).map_err(|formats| Error::Unsupported {
            what: format!("`{tensor}` as {format} ({why}) in {}, which has {formats},", kind.name()),
            remedy: match why {
                PACKED_ALREADY => "requantize or dequantize it".into(),
                _ => "give it one of these formats".into(),
            },
        })
    }
}

/// Fills files up to the size that is asked for. The tensors of a packed weight stay together.
fn by_size(jobs: Vec<Job>, limit: u64) -> Vec<Vec<Job>> {
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
