//! `uqff_report.json`, which mistral.rs reads before it looks for shards.

use super::uqff::{label, module, stored, PRODUCER, RESIDUAL};
use crate::convert::output::{Job, OutputFile};
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;

/// The report of all files, those of each type apart.
pub(super) fn report(files: &[OutputFile], version: &str) -> Value {
    let mut types: Vec<&str> = Vec::new();
    for file in files.iter().filter(|file| file.file != RESIDUAL) {
        if !types.contains(&file.layer.as_str()) {
            types.push(&file.layer);
        }
    }
    let outputs = types.into_iter().map(|quant| {
        let shards: Vec<_> =
            files.iter().filter(|file| file.file != RESIDUAL && file.layer == quant).collect();
        output(quant, &shards)
    });
    json!({
        "schema": 1,
        "generated_by": {"tool": format!("{PRODUCER} {}", env!("CARGO_PKG_VERSION"))},
        "uqff_version": version,
        "outputs": outputs.collect::<Vec<_>>(),
    })
}

/// What the shards of one type are made of.
fn output(quant: &str, shards: &[&OutputFile]) -> Value {
    let mut layers: BTreeMap<&str, &Job> = BTreeMap::new();
    for job in shards.iter().flat_map(|shard| &shard.jobs) {
        if job.outputs.iter().any(|output| output.value.is_some()) {
            layers.insert(module(job), job);
        }
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let (mut fallbacks, mut details) = (Vec::new(), Vec::new());
    for (module, job) in &layers {
        let stored = stored(job);
        *counts.entry(stored.clone()).or_default() += 1;
        // That of the weight where it is an entry, and else that of the codes.
        let has_shape = job.outputs.iter().any(|output| output.name.ends_with(".weight.shape"));
        let shape = match has_shape {
            true => Some(job.planned.shape.clone()),
            false => job.outputs.first().map(|output| output.dims.clone()),
        };
        let asked = job.asked().map_or_else(|| stored.clone(), |asked| label(Some(asked)));
        if let Some(reason) = &job.planned.fallback {
            let (from, to) = (&asked, &stored);
            fallbacks
                .push(json!({"module": module, "from": from, "to": to, "shape": shape, "reason": reason}));
        }
        details.push(json!({
            "module": module,
            "default_target": quant,
            "resolved_target": asked,
            "stored": stored,
            "shape": shape,
        }));
    }
    let mut output = Map::new();
    output.insert("quant".into(), quant.into());
    output.insert("shards".into(), shards.iter().map(|file| file.file.as_str()).collect());
    output.insert("layers".into(), layers.len().into());
    output.insert("actual_counts".into(), json!(counts));
    output.insert("fallback_count".into(), fallbacks.len().into());
    if !fallbacks.is_empty() {
        output.insert("fallbacks".into(), fallbacks.into());
    }
    output.insert("layer_details".into(), details.into());
    output.into()
}
