//! MLX checkpoints, and plain numbers in the same files.

use super::{by_size, Experts, Kind};
use crate::checkpoint::{module_of, tensor_of};
use crate::convert::job::Job;
use crate::convert::plan::{Plan, Shard};
use crate::convert::shard::{Output, Style};
use crate::convert::Options;
use crate::{QuantFormat, Result};
use safetensors::Dtype;
use serde_json::{json, Map};

/// The file that says where each tensor is.
pub(in crate::convert) const INDEX: &str = "model.safetensors.index.json";

/// An MLX checkpoint.
#[derive(Debug)]
pub(super) struct Mlx;

/// Plain numbers under the names of the source.
#[derive(Debug)]
pub(super) struct Dense;

impl Kind for Mlx {
    fn name(&self) -> &'static str {
        "an MLX checkpoint"
    }

    fn experts(&self) -> Experts {
        Experts::Stacks("switch_mlp")
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

    fn packed(&self, name: &str, dims: &[usize], format: QuantFormat, scales: Dtype) -> Result<Vec<Output>> {
        let module = module_of(name).unwrap_or(name);
        Output::packed(dims, format, scales, |part| tensor_of(module, part))
    }

    fn shards(&self, jobs: Vec<Job>, _: Option<QuantFormat>, options: &Options) -> Result<Vec<Shard>> {
        Ok(shards(jobs, options, "mlx"))
    }

    fn companions(&self, plan: &Plan) -> Vec<(&'static str, String)> {
        vec![(INDEX, index_json(plan))]
    }
}

impl Kind for Dense {
    fn name(&self) -> &'static str {
        "plain numbers"
    }

    fn check(&self, _: QuantFormat) -> std::result::Result<(), &'static str> {
        Err("no packed weights")
    }

    fn experts(&self) -> Experts {
        Experts::Untouched
    }

    fn packed(&self, name: &str, dims: &[usize], format: QuantFormat, scales: Dtype) -> Result<Vec<Output>> {
        Mlx.packed(name, dims, format, scales)
    }

    fn shards(&self, jobs: Vec<Job>, _: Option<QuantFormat>, options: &Options) -> Result<Vec<Shard>> {
        Ok(shards(jobs, options, "pt"))
    }

    fn companions(&self, plan: &Plan) -> Vec<(&'static str, String)> {
        vec![(INDEX, index_json(plan))]
    }
}

/// `format` is what the metadata of files says.
fn shards(jobs: Vec<Job>, options: &Options, format: &str) -> Vec<Shard> {
    let files = by_size(jobs, options.max_shard_size);
    let count = files.len();
    let shard = |(index, jobs)| {
        let file = match count {
            1 => "model.safetensors".into(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        // Wider numbers first, so that all of them are aligned.
        let order = |a: &Output, b: &Output| b.dtype.bitsize().cmp(&a.dtype.bitsize());
        Shard::new(file, jobs, Vec::new(), order, Some(json!({ "format": format })), Style::Common)
    };
    files.into_iter().enumerate().map(shard).collect()
}

fn index_json(plan: &Plan) -> String {
    let mut map: Map<_, _> = Map::new();
    for shard in &plan.shards {
        for output in shard.outputs() {
            map.insert(output.name.clone(), shard.file.clone().into());
        }
    }
    let parameters: u64 =
        plan.tensors().map(|tensor| tensor.shape.iter().map(|dim| *dim as u64).product::<u64>()).sum();
    let metadata = json!({"total_size": plan.bytes(), "total_parameters": parameters});
    format!("{:#}\n", json!({"metadata": metadata, "weight_map": map}))
}
