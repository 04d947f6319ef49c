//! `verify` of checkpoints of every family, whose layers may be rows of fused projections.

use super::common::{json_file, tensors, Source};
use super::families_of::{folders, open};
use candle_quant_tools::verify;

#[test]
fn models_whose_logits_are_right_pass() {
    let mut wrong = Vec::new();
    for (name, folder) in folders() {
        let report = verify::verify(&open(&folder).unwrap());
        if !report.passed(false) {
            wrong.push(format!("{name}: {report} {:?}", report.findings));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Rows of a fused projection have to be those of the model; what lies beside it is odd.
#[test]
fn fused_projections_of_other_shapes_are_found() {
    let (_, folder) = folders().into_iter().find(|(name, _)| name == "phi3/hf").unwrap();
    let mut config = json_file(folder.join("config.json"));
    let of = |config: &serde_json::Value, without: &str| {
        let mut source = Source::new().with_config(&config.to_string());
        for (name, (dtype, shape, bytes)) in tensors(&folder) {
            if !name.contains(without) && !["tokens", "logits_f32"].contains(&name.as_str()) {
                source = source.with_bytes(&name, &dtype, &shape, &bytes);
            }
        }
        verify::verify(&source.finish().open())
    };
    assert!(of(&config, "none of them").passed(true));
    let report = of(&config, "layers.1.mlp.gate_up_proj");
    let missing: Vec<_> = report.findings.iter().filter_map(|found| found.tensor.as_deref()).collect();
    let name = |projection: &str| format!("model.layers.1.mlp.{projection}.weight");
    assert_eq!(missing, [name("gate_proj"), name("up_proj")], "{report}");
    let inner = config["intermediate_size"].as_u64().unwrap();
    config["intermediate_size"] = (inner * 2).into();
    let report = of(&config, "none of them");
    let is_told = |projection: &str| {
        report.findings.iter().any(|found| found.tensor.as_deref() == Some(&name(projection)))
    };
    assert!(
        is_told("gate_proj") && is_told("up_proj") && is_told("down_proj"),
        "{report} {:?}",
        report.findings
    );
}
