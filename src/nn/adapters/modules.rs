//! Which slot a module of a file belongs to: experts have other names in other tools.

use super::{AdapterSlot, Adapters};
use std::ops::Range;

/// What of a slot's weight a module of a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// All of it.
    Whole,
    /// One expert of a stack.
    Expert(usize),
    /// All of a stack, of which the module has these rows, and the other rows belong to another slot.
    Rows(Range<usize>),
}

/// What blocks of experts are called: by Hugging Face and by mlx-lm.
const BLOCKS: [&str; 2] = ["experts", "switch_mlp"];

/// What projections of experts are called, and by Mixtral.
const PROJECTIONS: [[&str; 2]; 3] = [["gate_proj", "w1"], ["up_proj", "w3"], ["down_proj", "w2"]];

/// The slots that a module belongs to; none if there is none for it.
pub(super) fn slots_of(adapters: &Adapters, module: &str) -> Vec<(AdapterSlot, Place)> {
    if let Some(slot) = adapters.slot(module) {
        return vec![(slot, Place::Whole)];
    }
    let Some((path, projection)) = module.rsplit_once('.') else { return vec![] };
    if let Some((path, "experts")) = path.rsplit_once('.').and_then(|(path, _)| path.rsplit_once('.')) {
        let expert = module.rsplit('.').nth(1).and_then(|expert| expert.parse().ok());
        let slot = stack(adapters, path, projection);
        return match slot.zip(expert) {
            Some((slot, expert)) if slot.dims().first().is_some_and(|experts| expert < *experts) => {
                vec![(slot, Place::Expert(expert))]
            }
            _ => vec![],
        };
    }
    let Some((path, block)) = path.rsplit_once('.') else { return vec![] };
    if !BLOCKS.contains(&block) {
        return vec![];
    }
    if projection == "gate_up_proj" {
        let halves = stack(adapters, path, "gate_proj").zip(stack(adapters, path, "up_proj"));
        let Some((gate, up)) = halves else { return vec![] };
        let rows = |slot: &AdapterSlot| slot.dims().get(1).copied().unwrap_or_default();
        let (of_gate, of_up) = (rows(&gate), rows(&up));
        return vec![
            (gate, Place::Rows(0..of_gate)),
            (up, Place::Rows(of_gate..of_gate.saturating_add(of_up))),
        ];
    }
    stack(adapters, path, projection).map(|slot| (slot, Place::Whole)).into_iter().collect()
}

/// The slot of a stack of experts in the block at `path`, whatever it is called.
fn stack(adapters: &Adapters, path: &str, projection: &str) -> Option<AdapterSlot> {
    let names = PROJECTIONS.into_iter().find(|names| names.contains(&projection))?;
    let mut modules = BLOCKS.into_iter().flat_map(|block| names.map(|name| format!("{path}.{block}.{name}")));
    modules.find_map(|module| adapters.slot(&module)).filter(|slot| slot.dims().len() == 3)
}

/// The module of one expert, as Hugging Face has it.
pub(super) fn expert_module(module: &str, expert: usize) -> Option<String> {
    let (path, projection) = module.rsplit_once('.')?;
    let (path, _) = path.rsplit_once('.')?;
    Some(format!("{path}.experts.{expert}.{projection}"))
}

/// The module of a stack of experts, as mlx-lm has it.
pub(super) fn stack_module(module: &str) -> String {
    let named = module.rsplit_once('.').and_then(|(path, projection)| {
        let [name, _] = PROJECTIONS.into_iter().find(|[_, other]| *other == projection)?;
        let (path, _) = path.rsplit_once('.')?;
        Some(format!("{path}.switch_mlp.{name}"))
    });
    named.unwrap_or_else(|| module.to_owned())
}
