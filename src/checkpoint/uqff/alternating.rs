//! Experts whose gate and up projections are one layer with rows of both in turn.
//!
//! mistral.rs keeps the rows as they were published, in whatever family it writes them: of each pair of outputs the first is the
//! gate's (mistralrs-core/src/models/gpt_oss.rs). Models see what MLX makes of it, `gate_proj` and `up_proj`.

use super::entries::{Entries, LayerEntry};
use super::families;
use super::layer::Layer;
use crate::checkpoint::family_layouts::FusedExperts;
use crate::checkpoint::weight::tensor_of;
use crate::Result;
use serde_json::Value;

const FUSED: &str = "gate_up_proj";
const PARTS: [&str; 2] = ["gate_proj", "up_proj"];

/// The numbers in `weight.format` of the families that have stacks of experts: GGML, Unquant, AFQ and MXFP4.
const OF_STACKS: [u8; 4] = [0, 1, 4, 6];

/// Makes two layers of each whose rows alternate, if the model is one that has such.
pub(super) fn separated(mut entries: Entries, config: &Value) -> Result<Entries> {
    if !FusedExperts::of(config).is_some_and(FusedExperts::alternates) {
        return Ok(entries);
    }
    let blocks = entries.keys().filter_map(|name| name.strip_suffix(".gate_up_proj.weight.format"));
    let blocks: Vec<String> = blocks.map(str::to_owned).collect();
    for block in blocks {
        let key = tensor_of(&block, FUSED);
        let parts = halves(&entries, &block, &key)?;
        entries.retain(|name, _| suffix_of(name, &key).is_none());
        entries.extend(parts);
    }
    Ok(entries)
}

/// The entries of both projections.
fn halves(entries: &Entries, block: &str, key: &str) -> Result<Vec<(String, LayerEntry)>> {
    let layer = Layer::find(entries, key)?;
    let (weight, _) = families::weight(&layer)?;
    families::bias(&layer, weight.dims())?;
    let (experts, rows) = match (layer.format, weight.dims()) {
        (Some(format), &[experts, rows, _]) if OF_STACKS.contains(&format) && rows.is_multiple_of(2) => {
            (experts, rows)
        }
        (_, dims) => {
            let expected = "a stack [E, N, K] of experts with gate and up rows in turn";
            return Err(layer.wrong("weight", expected, format!("{dims:?}")));
        }
    };
    let mut parts = Vec::new();
    for (first, part) in PARTS.into_iter().enumerate() {
        let key_of_part = tensor_of(block, part);
        for (name, entry) in entries {
            let Some(suffix) = suffix_of(name, key) else { continue };
            let part_name = tensor_of(&key_of_part, suffix);
            if entries.contains_key(&part_name) {
                return Err(layer.wrong(suffix, "both projections here", format!("`{part_name}` beside it")));
            }
            let mut entry = entry.clone();
            match suffix {
                "weight" | "weight.scales" | "weight.biases" | "bias" => {
                    let row = entry.tensor.size_in_bytes() / experts.saturating_mul(rows).max(1);
                    let stored = entry.tensor.every_second(&[experts, rows, row], 1, first)?;
                    // A bias is a number for each row, and not a row of one.
                    let number = stored.as_numbers(stored.dtype(), &[experts, rows / 2]);
                    entry.tensor = number.filter(|_| suffix == "bias").unwrap_or(stored);
                }
                "weight.shape" => {
                    // Of three numbers, as the weight has three dimensions, and half of a U32.
                    let half = u32::try_from(rows / 2).unwrap_or(u32::MAX).to_le_bytes();
                    if let Some(bytes) = entry.value.get_mut(4..8) {
                        bytes.copy_from_slice(&half);
                    }
                }
                _ => {}
            }
            parts.push((part_name, entry));
        }
    }
    Ok(parts)
}

/// What follows the key of a layer in the name of an entry.
fn suffix_of<'a>(name: &'a str, key: &str) -> Option<&'a str> {
    name.strip_prefix(key)?.strip_prefix('.')
}
