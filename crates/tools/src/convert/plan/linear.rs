//! Linear attention in the order of GGUF files, which becomes that of published models.

use super::experts::TensorGroup;
use crate::convert::output::{SourcePart, SourceTensor, View};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::{Error, Result};
use candle_quant_models::{Config, LinearAttentionConfig, SomeRows};
use std::collections::BTreeMap;

/// What the modules of a layer are in.
const LAYER: &str = ".linear_attn.";

/// The layers of a model of linear attention, if it is a known one.
pub(super) struct LinearOrder {
    config: Option<LinearAttentionConfig>,
    /// Whether single projections become the grouped ones that the published model has.
    groups: bool,
}

impl LinearOrder {
    /// `keeps_names` if single projections stay.
    pub(super) fn of(source: &Checkpoint, keeps_names: bool) -> Self {
        let config = Config::from_json(source.config()).ok().and_then(|config| config.linear);
        let groups = !keeps_names && config.as_ref().is_some_and(|linear| linear.is_grouped);
        Self { config, groups }
    }

    /// Takes the tensors out that change their order.
    pub(super) fn take(&self, tensors: &mut Vec<(String, Weight)>) -> Result<Vec<TensorGroup>> {
        let Some(linear) = &self.config else { return Ok(Vec::new()) };
        let mut groups = Vec::new();
        let is_single = |name: &str| {
            let parts = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"];
            let part = name.strip_suffix(".weight").and_then(|module| module.split_once(LAYER));
            part.filter(|(_, part)| self.groups && parts.contains(part)).map(|(layer, _)| layer.to_owned())
        };
        let mut layers = BTreeMap::<String, BTreeMap<String, Weight>>::new();
        for (name, weight) in std::mem::take(tensors) {
            if let Some(layer) = is_single(&name) {
                layers.entry(layer).or_default().insert(name, weight);
            } else if linear.tiled_output && name.ends_with(".linear_attn.out_proj.weight") {
                groups.push(of_tiles(name, weight, linear)?);
            } else {
                tensors.push((name, weight));
            }
        }
        for (layer, weights) in &layers {
            groups.extend(grouped(layer, weights, linear)?);
        }
        Ok(groups)
    }
}

fn of_tiles(name: String, weight: Weight, linear: &LinearAttentionConfig) -> Result<TensorGroup> {
    let columns = linear.value_heads.saturating_mul(linear.value_dim);
    let dims = weight.dims().to_vec();
    if !matches!(*dims, [_, k] if k == columns) {
        let expected = format!("{columns} columns, as the config says");
        return Err(Error::mismatch(format!("`{name}`"), expected, format!("{dims:?}")));
    }
    let view = View::OfTiles { keys: linear.key_heads, size: linear.value_dim };
    let parts = vec![SourcePart::Viewed(vec![weight], view)];
    Ok(TensorGroup { packed: vec![SourceTensor { name, dims, parts }], plain: Vec::new(), obstacle: None })
}

/// The grouped projections of a layer, made of its single ones.
fn grouped(
    layer: &str,
    weights: &BTreeMap<String, Weight>,
    linear: &LinearAttentionConfig,
) -> Result<Vec<TensorGroup>> {
    let named = |module: &str| format!("{layer}{LAYER}{module}.weight");
    let (channels, values) = (linear.channels(), linear.value_heads);
    // Before anything is made for each head, of which configs may state any number.
    let rows = [
        ("in_proj_qkv", channels),
        ("in_proj_z", values.saturating_mul(linear.value_dim)),
        ("in_proj_b", values),
        ("in_proj_a", values),
    ];
    let mut k = None;
    for (module, rows) in rows {
        let name = named(module);
        let dims = weights.get(&name).map(Weight::dims);
        match dims {
            Some(&[found, columns]) if found == rows && k.is_none_or(|k| k == columns) => k = Some(columns),
            _ => {
                let columns = k.map_or_else(|| "K".to_owned(), |k| k.to_string());
                let found = dims.map_or_else(|| "none".to_owned(), |dims| format!("{dims:?}"));
                return Err(Error::mismatch(format!("`{name}`"), format!("[{rows}, {columns}]"), found));
            }
        }
    }
    let of = |(module, parts): (&str, Vec<SomeRows>)| {
        let part = |(part, rows): &SomeRows| match weights.get(&named(part)) {
            Some(weight) => Ok(SourcePart::of(weight.narrow(0, rows.clone())?)),
            None => Err(Error::mismatch(named(part), "a tensor", "none")),
        };
        let rows = parts.iter().map(|(_, rows)| rows.len()).sum();
        let dims = vec![rows, k.unwrap_or(0)];
        let parts = parts.iter().map(part).collect::<Result<_>>()?;
        let packed = vec![SourceTensor { name: named(module), dims, parts }];
        Ok(TensorGroup { packed, plain: Vec::new(), obstacle: None })
    };
    linear.grouped_rows().into_iter().map(of).collect()
}
