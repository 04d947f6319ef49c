//! MLX checkpoints, and dense elements in the same files.

use super::experts::ExpertLayout;
use super::kind::{by_size, TargetKind};
use crate::convert::output::{Job, OutputFile, OutputTensor, Style};
use crate::convert::recipe::Spec;
use candle_quant::checkpoint::Checkpoint;
use candle_quant::{QuantFormat, Result};
use candle_quant_models::MlxLm;
use serde_json::{json, Map};

/// The file that says where each tensor is.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// An MLX checkpoint.
#[derive(Debug)]
pub(super) struct Mlx;

/// Dense elements under the names of the source.
#[derive(Debug)]
pub(super) struct Dense;

impl TargetKind for Mlx {
    fn name(&self) -> &'static str {
        "an MLX checkpoint"
    }

    fn experts(&self, family: &MlxLm) -> ExpertLayout {
        ExpertLayout::Stacks(family.stack)
    }

    fn leaves_out_tied_heads(&self) -> bool {
        true
    }

    fn describes_formats(&self) -> bool {
        true
    }

    fn has_global_scales(&self) -> bool {
        true
    }

    fn files(
        &self,
        _: &Checkpoint,
        jobs: Vec<Job>,
        _: Option<Spec>,
        max_size: u64,
    ) -> Result<Vec<OutputFile>> {
        Ok(files(jobs, max_size, "mlx"))
    }
}

impl TargetKind for Dense {
    fn name(&self) -> &'static str {
        "dense elements"
    }

    fn check(&self, _: QuantFormat) -> std::result::Result<(), &'static str> {
        Err("no packed weights")
    }

    // As stacks have no published names, those of a program that has them.
    fn experts(&self, family: &MlxLm) -> ExpertLayout {
        ExpertLayout::Renamed(family.stack)
    }

    fn files(
        &self,
        _: &Checkpoint,
        jobs: Vec<Job>,
        _: Option<Spec>,
        max_size: u64,
    ) -> Result<Vec<OutputFile>> {
        Ok(files(jobs, max_size, "pt"))
    }
}

/// `format` is what the metadata of files says.
pub(super) fn files(jobs: Vec<Job>, max_size: u64, format: &str) -> Vec<OutputFile> {
    let files = by_size(jobs, max_size);
    let count = files.len();
    let file = |(index, jobs)| {
        let file = match count {
            1 => "model.safetensors".into(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        // Wider numbers first, so that all of them are aligned.
        let order = |a: &OutputTensor, b: &OutputTensor| b.dtype.bitsize().cmp(&a.dtype.bitsize());
        OutputFile::new(file, jobs, Vec::new(), order, Some(json!({ "format": format })), Style::Common)
    };
    files.into_iter().enumerate().map(file).collect()
}

pub(super) fn index_json(files: &[OutputFile]) -> String {
    let mut map: Map<_, _> = Map::new();
    for file in files {
        for output in file.outputs() {
            map.insert(output.name.clone(), file.file.clone().into());
        }
    }
    let tensors = || files.iter().flat_map(|file| &file.jobs).map(|job| &job.planned);
    let parameters: u64 =
        tensors().map(|tensor| tensor.shape.iter().map(|dim| *dim as u64).product::<u64>()).sum();
    let size: u64 = tensors().map(|tensor| tensor.bytes).sum();
    let metadata = json!({"total_size": size, "total_parameters": parameters});
    format!("{:#}\n", json!({"metadata": metadata, "weight_map": map}))
}
