//! `ConvertOptions::search`: what it saves of a model, and that the output says so.

use super::common::{bundled, convert, files, json_file, tensors};
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use candle_quant_tools::verify::verify;
use std::fs;
use std::path::Path;

fn options(format: &str) -> ConvertOptions {
    let mut options = ConvertOptions::mlx(Recipe::named("uniform", format.parse().unwrap()).unwrap());
    options.search = true;
    options
}

#[test]
fn every_weight_of_a_model_loses_less() {
    let source = bundled("tiny-bf16");
    // The part of the squared error that is saved, at least.
    for (format, saved) in [("3", 0.22), ("4", 0.17), ("mxfp4", 0.08), ("nvfp4", 0.25), ("mxfp8", 0.)] {
        let mut options = options(format);
        let searched = convert::measure(&ConvertPlan::new(&source, &options).unwrap(), &|_| ()).unwrap();
        options.search = false;
        let plain = convert::measure(&ConvertPlan::new(&source, &options).unwrap(), &|_| ()).unwrap();
        assert_eq!(plain.tensors.len(), 22);
        let (mut before, mut after) = (0., 0.);
        for tensor in &plain.tensors {
            let other = searched.tensors.iter().find(|other| other.name == tensor.name).unwrap();
            assert!(other.relative_rms <= tensor.relative_rms, "{format}, {}", tensor.name);
            before += tensor.relative_rms.powi(2);
            after += other.relative_rms.powi(2);
        }
        assert!(after <= before * (1. - saved), "{format}: {}", 1. - after / before);
    }
}

#[test]
fn a_searched_output_says_so_and_is_read_like_any_other() {
    let source = bundled("tiny-bf16");
    let mut options = options("4");
    let plan = ConvertPlan::new(&source, &options).unwrap();
    let packed: Vec<_> = plan.tensors().filter(|tensor| tensor.to.starts_with("affine")).collect();
    assert_eq!(packed.len(), 22);
    assert!(packed.iter().all(|tensor| tensor.to == "affine 4-bit g64, searched"));
    assert!(plan.tensors().filter(|tensor| tensor.shape.len() < 2).all(|tensor| tensor.to == "BF16"));
    let searched = convert(&source, &options);
    options.search = false;
    let plain = convert(&source, &options);
    let metadata = |folder: &Path| {
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        header["__metadata__"].clone()
    };
    let expected = serde_json::json!({"format": "mlx", "candle_quant.search": "squared error"});
    assert_eq!(metadata(&searched.path()), expected);
    assert_eq!(metadata(&plain.path()), serde_json::json!({"format": "mlx"}));
    // All else is the same, but for the codes and scales.
    let (a, b) = (files(searched.path()), files(plain.path()));
    let same = |name: &&String| a.get(*name) == b.get(*name);
    assert_eq!(
        b.keys().filter(|name| !same(name)).collect::<Vec<_>>(),
        ["candle-quant.json", "model.safetensors"]
    );
    let (a, b) = (tensors(searched.path()), tensors(plain.path()));
    assert_eq!(a.len(), b.len());
    for (name, (dtype, shape, bytes)) in &a {
        assert_eq!((dtype, shape), (&b[name].0, &b[name].1), "{name}");
        assert_eq!(*bytes == b[name].2, shape.len() < 2, "{name}");
    }
    assert!(verify(&Checkpoint::open(searched.path()).unwrap()).passed(true));
}

#[test]
fn a_search_is_not_taken_up_without_it() {
    let source = bundled("tiny-bf16");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut run = RunOptions { max_relative_rms: Some(0.01), ..RunOptions::default() };
    let searched = ConvertPlan::new(&source, &options("4")).unwrap();
    convert::convert(&searched, &out, &run, &|_| ()).unwrap_err();
    run = RunOptions { resume: true, ..RunOptions::default() };
    let mut without = options("4");
    without.search = false;
    let plain = ConvertPlan::new(&source, &without).unwrap();
    let error = convert::convert(&plain, &out, &run, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("begun with other options"), "{error}");
    let report = convert::convert(&searched, &out, &run, &|_| ()).unwrap();
    assert!(report.tensors.iter().all(|tensor| tensor.to.ends_with(", searched")));
}

#[test]
fn other_programs_get_searched_weights_too() {
    let source = bundled("tiny-bf16");
    for (mut options, file) in [
        (
            ConvertOptions::uqff(Recipe::named("mistralrs", "4".parse().unwrap()).unwrap()),
            Some("afq4-0.uqff"),
        ),
        (
            ConvertOptions::ollama(Recipe::named("ollama", "nvfp4".parse().unwrap()).unwrap(), "tiny")
                .unwrap(),
            None,
        ),
    ] {
        let plain = convert::measure(&ConvertPlan::new(&source, &options).unwrap(), &|_| ()).unwrap();
        options.search = true;
        let out = convert(&source, &options);
        let worst = |report: &convert::ConvertReport| report.tensors.first().unwrap().relative_rms;
        let searched = convert::measure(&ConvertPlan::new(&source, &options).unwrap(), &|_| ()).unwrap();
        assert!(worst(&searched) < worst(&plain));
        if let Some(file) = file {
            let opened = Checkpoint::open(out.path()).unwrap();
            assert!(opened.tensor_names().count() > 0);
            let text = fs::read(out.path().join(file)).unwrap();
            assert!(text.windows(20).any(|part| part == b"candle_quant.search\""));
            assert_eq!(json_file(out.path().join("uqff_report.json"))["outputs"][0]["quant"], "afq4");
        }
    }
}
