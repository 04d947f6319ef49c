//! Tensors that change their names and shapes when they are packed: experts, which mlx-lm and mistral.rs keep in
//! stacks.
//!
//! mlx-lm stacks the experts of a dense checkpoint while it loads it, but packed ones have to be stacked already:
//! `experts.7.up_proj.weight` `[N, K]` becomes a part of `switch_mlp.up_proj.weight` `[E, N, K]`, and
//! `experts.gate_up_proj` `[E, 2N, K]` two such stacks. mistral.rs calls the module `experts`.

use crate::convert::output::{SourcePart, SourceTensor};
use crate::convert::target::{ExpertLayout, Target};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, DenseTensor, Weight};
use candle_quant::Result;
use serde_json::Value;
use std::collections::BTreeMap;

/// Tensors of the source that are one or more tensors of the output.
#[derive(Debug)]
pub(super) struct TensorGroup {
    /// What they are if one of them is packed.
    pub packed: Vec<SourceTensor>,
    /// What they are if none is: themselves; empty if that is the same.
    pub plain: Vec<SourceTensor>,
    /// Why they can't be packed.
    pub obstacle: Option<&'static str>,
}

impl TensorGroup {
    fn one(name: String, weight: Weight) -> Self {
        Self { packed: vec![SourceTensor::whole(name, weight)], plain: Vec::new(), obstacle: None }
    }
}

/// The experts of one projection with their numbers; those of their biases have a projection of their own.
type Projection = Vec<(usize, String, DenseTensor)>;

/// Why experts can't be stacked.
const UNLIKE: &str = "experts of different shapes or dtypes, or some are missing or twice there";

/// Groups the tensors of a checkpoint.
pub(super) fn group(
    tensors: Vec<(String, Weight)>,
    source: &Checkpoint,
    target: Target,
) -> Result<Vec<TensorGroup>> {
    let (config, experts) = (source.config(), target.kind().experts());
    // mlx-lm has other names for some models: what it has written keeps its names, and gpt-oss has the common ones.
    let is_named =
        model_type(config) == "gpt_oss" || (target, source.kind()) == (Target::Mlx, CheckpointKind::Mlx);
    let (mut groups, mut projections) = (Vec::new(), BTreeMap::<String, Projection>::new());
    for (name, weight) in tensors {
        match (weight, expert(&name, experts)) {
            (Weight::Dense(dense), Some((index, stack))) if dense.is_stored() && dense.dtype().is_float() => {
                projections.entry(stack).or_default().push((index, name, dense));
            }
            (Weight::Dense(dense), _) if dense.is_stored() && is_fused(&name, dense.dims(), experts) => {
                groups.push(fused(name, &dense, config, experts)?);
            }
            (weight, _) => {
                let renamed = restacked(&name, weight.dims(), experts).filter(|_| !is_named);
                groups.push(TensorGroup::one(renamed.unwrap_or(name), weight));
            }
        }
    }
    projections.values_mut().for_each(|experts| experts.sort_by_key(|(index, ..)| *index));
    // A bias follows its weight.
    let stacks: Vec<_> = projections.keys().filter(|stack| stack.ends_with(".weight")).cloned().collect();
    for stack in stacks {
        let bias = stack.strip_suffix("weight").map(|module| format!("{module}bias")).unwrap_or_default();
        let experts = [stack, bias].into_iter().filter_map(|name| projections.remove_entry(&name));
        let mut group = TensorGroup { packed: Vec::new(), plain: Vec::new(), obstacle: None };
        for (name, experts) in experts {
            match stacked(name, &experts) {
                Some(form) => group.packed.push(form),
                None => group.obstacle = Some(UNLIKE),
            }
            let whole =
                |(_, name, dense): (_, _, DenseTensor)| SourceTensor::whole(name, Weight::Dense(dense));
            group.plain.extend(experts.into_iter().map(whole));
        }
        groups.push(group);
    }
    for (_, name, dense) in projections.into_values().flatten() {
        groups.push(TensorGroup::one(name, Weight::Dense(dense)));
    }
    Ok(groups)
}

/// What a model is called in its config.
fn model_type(config: &Value) -> &str {
    let text = config.get("text_config").unwrap_or(config);
    text.get("model_type").and_then(Value::as_str).unwrap_or_default()
}

/// The number of the expert that a tensor belongs to, and the name of the stack that it is a part of.
fn expert(name: &str, experts: ExpertLayout) -> Option<(usize, String)> {
    let (block, rest) = name.split_once(".experts.")?;
    let [index, source, part] = rest.split('.').collect::<Vec<_>>().try_into().ok()?;
    let projection = match source {
        "w1" => "gate_proj",
        "w2" => "down_proj",
        "w3" => "up_proj",
        "gate_proj" | "down_proj" | "up_proj" => source,
        _ => return None,
    };
    let known = match experts {
        // Only weights, under the names that they have.
        ExpertLayout::OfSource => part == "weight" && projection == source,
        ExpertLayout::Stacks(_) | ExpertLayout::Untouched => matches!(part, "weight" | "bias"),
    };
    let stack = experts.stack(block, projection).filter(|_| known)?;
    Some((index.parse().ok()?, format!("{stack}.{part}")))
}

/// The name of a stack of experts, or of their biases, in the output.
fn restacked(name: &str, dims: &[usize], experts: ExpertLayout) -> Option<String> {
    let (block, rest) = [".experts.", ".switch_mlp."].iter().find_map(|module| name.split_once(module))?;
    let known = match rest.split_once('.')? {
        ("gate_proj" | "down_proj" | "up_proj", "weight") => dims.len() == 3,
        ("gate_proj" | "down_proj" | "up_proj", "bias") => dims.len() == 2,
        _ => false,
    };
    experts.stack(block, rest).filter(|_| known && matches!(experts, ExpertLayout::Stacks(_)))
}

/// All experts of a projection as one tensor; `None` if they are not alike, or one is missing or twice there.
fn stacked(name: String, experts: &Projection) -> Option<SourceTensor> {
    let (.., first) = experts.first()?;
    let alike = |(index, (number, _, dense)): (usize, &(usize, String, DenseTensor))| {
        index == *number && dense.dims() == first.dims() && dense.dtype() == first.dtype()
    };
    let dims = [&[experts.len()], first.dims()].concat();
    let parts = experts.iter().map(|(.., dense)| SourcePart::Stored(dense.clone())).collect();
    experts.iter().enumerate().all(alike).then_some(SourceTensor { name, dims, parts })
}

/// Whether a tensor has a projection of all experts, or gate and up projection together.
fn is_fused(name: &str, dims: &[usize], experts: ExpertLayout) -> bool {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    matches!(experts, ExpertLayout::Stacks(_))
        && dims.len() == 3
        && [".experts.gate_up_proj", ".experts.down_proj"].iter().any(|end| module.ends_with(end))
}

/// Stacks of a projection, or of gate and up projections one after another, as transformers has them. That of some
/// models has rows for columns, or rows that alternate: what is not certain to be otherwise is not packed.
fn fused(name: String, dense: &DenseTensor, config: &Value, layout: ExpertLayout) -> Result<TensorGroup> {
    let plain = vec![SourceTensor::whole(name.clone(), Weight::Dense(dense.clone()))];
    let text = config.get("text_config").unwrap_or(config);
    let hidden = text.get("hidden_size").and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
    let module = name.strip_suffix(".weight").unwrap_or(&name);
    let &[experts, n, k] = dense.dims() else {
        return Ok(TensorGroup { packed: plain, plain: Vec::new(), obstacle: None });
    };
    let gate_up = module.strip_suffix(".experts.gate_up_proj");
    let certain = match gate_up {
        Some(_) => hidden == Some(k) && n != k && n.is_multiple_of(2),
        None => hidden == Some(n) && n != k,
    };
    if !certain || model_type(config) == "gpt_oss" {
        let obstacle = Some("experts whose rows may be columns, or alternate");
        return Ok(TensorGroup { packed: plain, plain: Vec::new(), obstacle });
    }
    let stack = |block: &str, projection: &str| {
        layout.stack(block, projection).map_or_else(|| name.clone(), |module| format!("{module}.weight"))
    };
    let Some(block) = gate_up else {
        let block = module.strip_suffix(".experts.down_proj").unwrap_or(module);
        let down = SourceTensor::whole(stack(block, "down_proj"), Weight::Dense(dense.clone()));
        return Ok(TensorGroup { packed: vec![down], plain, obstacle: None });
    };
    let rows = n / 2;
    let half = |projection: &str, first: usize| -> Result<SourceTensor> {
        let run = |expert: usize| {
            let start = (expert * n + first) * k;
            Ok(SourcePart::Stored(dense.elements(start..start + rows * k)?))
        };
        let parts = (0..experts).map(run).collect::<Result<_>>()?;
        Ok(SourceTensor { name: stack(block, projection), dims: vec![experts, rows, k], parts })
    };
    Ok(TensorGroup { packed: vec![half("gate_proj", 0)?, half("up_proj", rows)?], plain, obstacle: None })
}
