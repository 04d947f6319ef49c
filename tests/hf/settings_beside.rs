//! Settings in files of their own beside a config that has none: `quantize_config.json` of AutoGPTQ, `quant_config.json` of AutoAWQ.

use crate::checkpoint::{folder_of, rejected};
use crate::hf::{case_of, dequantized, entry, files_beside, with, Entry};
use candle_core::{DType, Device};
use candle_quant::checkpoint::Checkpoint;
use candle_quant::Result;
use serde_json::{json, Value};

const OF_GPTQ: &str = "quantize_config.json";
const OF_AWQ: &str = "quant_config.json";

/// What AutoGPTQ wrote of the case "gptq".
fn gptq() -> Value {
    json!({
        "bits": 4, "group_size": 64, "damp_percent": 0.01, "desc_act": false, "sym": false, "true_sequential": true,
        "model_name_or_path": null, "model_file_base_name": null,
    })
}

/// What AutoAWQ wrote of the case "awq".
fn awq() -> Value {
    json!({"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
}

fn open(name: &str, settings: &Value, entries: &[Entry]) -> Result<Checkpoint> {
    let files = files_beside(Some((name, settings)), &json!({}), entries);
    Checkpoint::open(folder_of(&files.each_ref().map(|(name, bytes)| (*name, bytes.as_slice()))).path())
}

#[test]
fn they_are_read_as_those_of_the_config() {
    for (case, settings, files) in [
        ("gptq", gptq(), [OF_GPTQ, OF_AWQ]),
        ("awq", awq(), [OF_AWQ, OF_GPTQ]),
        ("gptq", json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}), [OF_GPTQ, OF_AWQ]),
        ("awq", json!({"quant_method": "awq", "bits": 4, "group_size": 32}), [OF_AWQ, OF_GPTQ]),
        (
            "awq gemv",
            json!({"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMV"}),
            [OF_AWQ, OF_GPTQ],
        ),
    ] {
        let case = case_of(case);
        let (format, dims, expected) = dequantized(&case.quantization, &case.entries);
        for file in files {
            let checkpoint = open(file, &settings, &case.entries).unwrap();
            let method = case.quantization["quant_method"].as_str().unwrap();
            assert_eq!(checkpoint.kind().to_string(), format!("Hugging Face {method}"), "{file}");
            let weight = checkpoint.weight("m", None).unwrap();
            assert_eq!((weight.format_name(), weight.dims()), (format.clone(), &dims[..]));
            let numbers = weight.to_dense(DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap();
            assert!(numbers.to_vec1::<f32>().unwrap() == expected, "{file} {settings}");
        }
    }
}

/// The config comes first, and what it does not say is not said of dense weights either.
#[test]
fn they_are_read_where_they_are_meant() {
    let kind = |quantization: &Value, settings: &Value, entries: &[Entry]| {
        let files = files_beside(Some((OF_GPTQ, settings)), quantization, entries);
        let dir = folder_of(&files.each_ref().map(|(name, bytes)| (*name, bytes.as_slice())));
        Checkpoint::open(dir.path()).map(|checkpoint| checkpoint.kind().to_string())
    };
    let marlin = json!({"bits": 4, "is_marlin_format": true});
    let case = case_of("gptq");
    assert_eq!(
        kind(&json!({"quantization_config": case.quantization}), &marlin, &case.entries).unwrap(),
        "Hugging Face gptq"
    );
    let dense = [entry("m.weight", "BF16", &[2, 2], [0; 8])];
    assert_eq!(kind(&json!({}), &marlin, &dense).unwrap(), "dense safetensors");
    let nothing = json!({"quantization_config": null});
    assert_eq!(kind(&nothing, &gptq(), &case.entries).unwrap(), "Hugging Face gptq");
}

#[test]
fn what_they_say_has_to_be_right() {
    let entries = case_of("gptq").entries;
    let marlin = [
        entry("m.B", "I32", &[8, 16], [0; 512]),
        entry("m.s", "F16", &[2, 8], [0; 32]),
        entry("m.workspace", "I32", &[16], [0; 64]),
    ];
    for (key, value, entries) in [
        ("checkpoint_format", json!("marlin"), &marlin[..]),
        ("is_marlin_format", json!(true), &marlin),
        ("checkpoint_format", json!("marlin"), &entries),
        ("quant_method", json!("marlin"), &marlin),
        ("bits", json!(5), &entries),
    ] {
        let mut settings = gptq();
        settings[key] = value.clone();
        rejected(open(OF_GPTQ, &settings, entries), &[OF_GPTQ, &format!("{key} {value}"), "not supported"]);
    }
    for (settings, problem) in [
        (json!([]), "not a JSON object"),
        (json!(null), "not a JSON object"),
        (json!({}), "none of `quant_method`, `bits` and `w_bit`"),
        (json!({"bits": "4"}), "`bits` is \"4\", expected a positive whole number"),
        (json!({"bits": 4, "group_size": 0}), "`group_size` is 0"),
    ] {
        rejected(open(OF_GPTQ, &settings, &entries), &[OF_GPTQ, problem]);
    }
    let entries = case_of("awq").entries;
    for (key, value, problem) in [
        ("w_bit", json!(8), "\"awq\" with 8 bits"),
        ("w_bit", json!(null), ""),
        ("q_group_size", json!(1.5), "`q_group_size` is 1.5, expected a positive whole number"),
        ("version", json!("llm-awq"), "version \"llm-awq\""),
    ] {
        let mut settings = awq();
        settings[key] = value;
        let result = open(OF_AWQ, &settings, &entries);
        match problem {
            "" => drop(result.unwrap()),
            _ => rejected(result, &[OF_AWQ, problem]),
        }
    }
    let wrong = with(&entries, &[entry("m.scales", "F16", &[1, 8], [0; 16])]);
    let result = open(OF_AWQ, &awq(), &wrong).unwrap().weight("m", None);
    rejected(result, &["model.safetensors", "`m.scales`", "one row for each 32 of K = 64"]);
    let mut files = files_beside(Some((OF_AWQ, &awq())), &json!({}), &entries);
    files[2].1 = b"{".to_vec();
    let dir = folder_of(&files.each_ref().map(|(name, bytes)| (*name, bytes.as_slice())));
    rejected(Checkpoint::open(dir.path()), &[OF_AWQ]);
}
