//! Tensors that change their names and shapes when they are packed: experts, which mlx-lm and mistral.rs keep in
//! stacks.
//!
//! mlx-lm stacks the experts of a dense checkpoint while it loads it, but packed ones have to be stacked already:
//! `experts.7.up_proj.weight` `[N, K]` becomes a part of `switch_mlp.up_proj.weight` `[E, N, K]`, and
//! `experts.gate_up_proj` `[E, 2N, K]` two such stacks. mistral.rs calls the module `experts`.

use super::arranged::Arranged;
use super::fused;
use crate::convert::output::{SourcePart, SourceTensor};
use crate::convert::target::ExpertLayout;
use candle_quant::checkpoint::Weight;
use candle_quant::Result;
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
    pub(super) fn one(name: String, weight: Weight) -> Self {
        Self { packed: vec![SourceTensor::whole(name, weight)], plain: Vec::new(), obstacle: None }
    }
}

/// The experts of one projection with their numbers; those of their biases have a projection of their own.
type Projection = Vec<(usize, String, Weight)>;

/// Why experts can't be stacked.
const UNLIKE: &str = "experts of different shapes or dtypes, or some are missing or twice there";

/// Groups the tensors of a checkpoint.
pub(super) fn group(mut tensors: Vec<(String, Weight)>, arranged: &Arranged) -> Result<Vec<TensorGroup>> {
    let experts = arranged.experts;
    let mut groups = arranged.linear.take(&mut tensors)?;
    groups.extend(arranged.heads.take(&mut tensors)?);
    let mut projections = BTreeMap::<String, Projection>::new();
    for (name, weight) in tensors {
        if let Some((index, stack)) = expert(&name, experts).filter(|_| arranged.takes(&weight)) {
            projections.entry(stack).or_default().push((index, name, weight));
        } else if let Some(group) = fused::group(&name, &weight, arranged)? {
            groups.push(group);
        } else if let Some(group) = arranged.group(&name, &weight)? {
            groups.push(group);
        } else {
            // mlx-lm has other names for some models: what it has written keeps its names.
            let renamed = restacked(&name, weight.dims(), experts).filter(|_| !arranged.is_done);
            groups.push(TensorGroup::one(renamed.unwrap_or(name), weight));
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
            group
                .plain
                .extend(experts.into_iter().map(|(_, name, weight)| SourceTensor::whole(name, weight)));
        }
        if group.obstacle.is_none() {
            group.plain = arranged.plain(group.plain);
        }
        groups.push(group);
    }
    for (_, name, weight) in projections.into_values().flatten() {
        groups.push(TensorGroup::one(name, weight));
    }
    Ok(groups)
}

/// Whether a weight is dense, of float numbers.
pub(super) fn is_float(weight: &Weight) -> bool {
    matches!(weight, Weight::Dense(dense) if dense.dtype().is_float())
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
        ExpertLayout::Stacks(_) => matches!(part, "weight" | "bias"),
        ExpertLayout::Renamed(_) => false,
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
    experts.stack(block, rest).filter(|_| known && experts != ExpertLayout::OfSource)
}

/// All experts of a projection as one tensor; `None` if they are not alike, or one is missing or twice there.
fn stacked(name: String, experts: &Projection) -> Option<SourceTensor> {
    let part = |weight: &Weight| SourcePart::of(weight.clone());
    let dtype = |weight: &Weight| part(weight).dense().map(candle_quant::checkpoint::DenseTensor::dtype);
    let (.., first) = experts.first()?;
    let alike = |(index, (number, _, weight)): (usize, &(usize, String, Weight))| {
        index == *number && weight.dims() == first.dims() && dtype(weight) == dtype(first)
    };
    let dims = [&[experts.len()], first.dims()].concat();
    let parts = experts.iter().map(|(.., weight)| part(weight)).collect();
    experts.iter().enumerate().all(alike).then_some(SourceTensor { name, dims, parts })
}
