//! `candle-quant diff`: its numbers against f64, what counts as equal, and its exit codes.

use crate::common::fixture;
use crate::damage::{file_of, run, run_json, Copy, Stored};
use candle_core::{DType, Device};
use candle_quant::checkpoint::Weight;
use candle_quant::{Checkpoint, QuantFormat};
use serde_json::{json, Value};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const UP: &str = "model.layers.0.mlp.up_proj.weight";

/// All tensors of a checkpoint as f32, packed ones dequantized by the letter of their format.
fn dequantized(path: &Path) -> Vec<Stored> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let dense = |name: &str| {
        let weight = checkpoint.tensor(name, None).unwrap();
        let numbers = match &weight {
            Weight::Packed(weight) => crate::packed::reference(&weight.load(&Device::Cpu).unwrap()),
            Weight::Dense(tensor) => crate::packed::flat(&tensor.load(DType::F32, &Device::Cpu).unwrap()),
            other => panic!("{other:?}"),
        };
        Stored::f32(name, weight.dims(), &numbers)
    };
    checkpoint.tensor_names().map(dense).collect()
}

fn numbers(stored: &Stored) -> Vec<f32> {
    stored.bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Relative RMS and largest difference, in f64.
fn distances(a: &[f32], b: &[f32]) -> (f64, f64) {
    let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
    let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|number| number * number).sum::<f64>();
    let difference = squares(&mut differences.iter().copied());
    let reference = squares(&mut a.iter().copied().map(f64::from));
    ((difference / reference).sqrt(), differences.iter().fold(0., |max, d| d.abs().max(max)))
}

#[track_caller]
fn assert_close(found: &Value, expected: f64) {
    let found = found.as_f64().unwrap();
    assert!((found - expected).abs() <= 1e-12 * expected, "{found}, expected {expected}");
}

#[test]
fn dequantized_weights_are_equal_to_packed_ones() {
    for name in ["qwen3-affine-b3-g64", "llama-mixed-custom", "qwen3-nvfp4", "qwen3-mxfp8"] {
        let path = fixture(name);
        let (_folder, dense) = file_of(&dequantized(&path));
        let path = path.to_str().unwrap();
        for (a, b) in [(path, dense.as_str()), (dense.as_str(), path), (path, path)] {
            let (code, stdout, stderr) = run(&["diff", a, b]);
            assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
            assert!(stdout.starts_with("0 of ") && stdout.lines().count() == 1, "{stdout}");
        }
    }
}

#[test]
fn distances_are_those_of_f64_and_the_worst_comes_first() {
    let path = fixture("llama-mixed-custom");
    let original = dequantized(&path);
    let mut noisy = original.clone();
    // The last one is left alone.
    let count = noisy.len();
    for (index, tensor) in noisy.iter_mut().enumerate().take(count - 1) {
        let noise = crate::packed::numbers(numbers(tensor).len(), index as u64 + 1);
        let amount = 0.001 * (index + 1) as f32;
        let changed: Vec<f32> = numbers(tensor).iter().zip(noise).map(|(x, n)| x + amount * n * x).collect();
        *tensor = Stored::f32(&tensor.name, &[changed.len()], &changed);
        tensor.shape = original[index].shape.clone();
    }
    let (_folder, noisy_file) = file_of(&noisy);
    let args = ["diff", path.to_str().unwrap(), &noisy_file];
    let (code, report) = run_json(&[&args[..], &["--json"]].concat());
    assert_eq!((code, &report["equal"]), (1, &json!(false)));
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), count);
    let mut worst = f64::INFINITY;
    for tensor in tensors {
        let index = original.iter().position(|t| t.name == tensor["name"]).unwrap();
        let (relative_rms, max_abs) = distances(&numbers(&original[index]), &numbers(&noisy[index]));
        assert_close(&tensor["relative_rms"], relative_rms);
        assert_close(&tensor["max_abs"], max_abs);
        assert_eq!(tensor["equal"], json!(index == count - 1));
        assert!(relative_rms <= worst, "worst first");
        worst = relative_rms;
    }
    let (code, stdout, _) = run(&args);
    assert_eq!(code, 1);
    assert!(
        stdout.ends_with(&format!(
            "{} of {count} tensors differ; 100.00 % of all weights were compared\n",
            count - 1
        )),
        "{stdout}"
    );
    // A line of headings, the tensors that differ, the sum.
    assert_eq!(stdout.lines().count(), 1 + (count - 1).min(20) + 1, "{stdout}");

    let largest = tensors[0]["relative_rms"].as_f64().unwrap();
    let with = |tolerance: f64| run(&[&args[..], &["--tolerance", &tolerance.to_string()]].concat());
    assert_eq!(with(largest * 1.01).0, 0);
    let (code, stdout, _) = with(largest * 0.999_999);
    assert!(code == 1 && stdout.contains(&format!("1 of {count} tensors differ; ")), "{stdout}");
}

#[test]
fn one_flipped_bit_is_one_tensor() {
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    let code = copy.bytes_of(UP)[40];
    copy.patch(UP, 40, &[code ^ 0x80]); // the sign
    let path = fixture("qwen3-mxfp8");
    let (status, report) = run_json(&["diff", "--json", path.to_str().unwrap(), copy.path()]);
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!((status, &tensors[0]["name"]), (1, &json!(UP)));
    assert_eq!(tensors.iter().filter(|tensor| tensor["equal"] == json!(false)).count(), 1);
    let original = dequantized(&path);
    let original = numbers(original.iter().find(|tensor| tensor.name == UP).unwrap());
    let mut changed = original.clone();
    changed[40] = -changed[40];
    assert_ne!(changed[40], 0.0);
    let (relative_rms, max_abs) = distances(&original, &changed);
    assert_close(&tensors[0]["relative_rms"], relative_rms);
    assert_close(&tensors[0]["max_abs"], max_abs);
    assert_eq!((&tensors[0]["a"], &tensors[0]["b"]), (&json!("mxfp8"), &json!("mxfp8")));
}

#[test]
fn names_of_one_side_are_differences_unless_common() {
    let path = fixture("qwen3-mxfp8");
    let path = path.to_str().unwrap();
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.rewrite(|tensors| {
        tensors.retain(|tensor| tensor.name != "model.norm.weight");
        tensors.push(Stored::f32("extra", &[1], &[0.]));
    });
    let (code, stdout, _) = run(&["diff", path, copy.path()]);
    assert_eq!(code, 1);
    assert!(stdout.contains("extra  (only in the second)"), "{stdout}");
    assert!(stdout.contains("model.norm.weight  (only in the first)"), "{stdout}");
    assert!(stdout.ends_with("2 of 25 tensors differ; 99.98 % of all weights were compared\n"), "{stdout}");
    let (code, report) = run_json(&["diff", copy.path(), path, "--json"]);
    let first_two: Vec<_> = (0..2).map(|i| &report["tensors"][i]["outcome"]).collect();
    assert_eq!((code, first_two), (1, vec![&json!("only_in_a"), &json!("only_in_b")]));
    let (code, stdout, _) = run(&["diff", "--common", path, copy.path()]);
    assert_eq!(
        (code, stdout.as_str()),
        (0, "0 of 23 tensors differ; 99.98 % of all weights were compared\n")
    );
}

#[test]
fn shapes_that_differ_are_named() {
    let (_a, a) = file_of(&[Stored::f32("x", &[2, 3], &[1.; 6]), Stored::f32("y", &[1], &[2.])]);
    let (_b, b) = file_of(&[Stored::f32("x", &[3, 2], &[1.; 6]), Stored::f32("y", &[1], &[2.])]);
    let (code, stdout, _) = run(&["diff", &a, &b, "--tolerance", "9"]);
    assert!(code == 1 && stdout.contains("x  (shapes [2, 3], [3, 2])"), "{stdout}");
    assert!(stdout.contains("1 of 2 tensors differ; "), "{stdout}");
}

#[test]
fn numbers_that_are_not_finite_have_no_tolerance() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let (_a, a) = file_of(&[
        Stored::f32("same", &[4], &[nan, inf, -inf, 0.]),
        Stored::f32("x", &[5], &[3., nan, 1., inf, 4.]),
    ]);
    let (_b, b) = file_of(&[
        Stored::f32("same", &[4], &[-nan, inf, -inf, -0.]),
        Stored::f32("x", &[5], &[3., 1., inf, -inf, 2.]),
    ]);
    let (code, report) = run_json(&["diff", "--json", "--tolerance", "1000", &a, &b]);
    assert_eq!(code, 1);
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!((&tensors[0]["name"], &tensors[0]["not_finite"]), (&json!("x"), &json!(3)));
    // Of the pairs (3, 3) and (4, 2).
    assert_close(&tensors[0]["relative_rms"], (4f64 / 25.).sqrt());
    assert_close(&tensors[0]["max_abs"], 2.);
    assert_eq!((&tensors[1]["name"], &tensors[1]["equal"]), (&json!("same"), &json!(true)));
    let (_, stdout, _) = run(&["diff", &a, &b]);
    assert!(stdout.contains("3 NaN or infinite on one side"), "{stdout}");

    // Against zeros no ratio is finite.
    let (_zero, zero) = file_of(&[Stored::f32("x", &[2], &[0., 0.])]);
    let (_one, one) = file_of(&[Stored::f32("x", &[2], &[0., 1e-30])]);
    let (code, report) = run_json(&["diff", "--json", "--tolerance", "1000", &zero, &one]);
    assert_eq!((code, &report["tensors"][0]["relative_rms"]), (1, &Value::Null));
    assert_eq!(run(&["diff", &zero, &zero]).0, 0);
}

/// A packed weight `[E, N, K]` of affine codes with scale 0.5 and bias -1, and its numbers.
fn stack(bits: usize, group: usize, [e, n, k]: [usize; 3]) -> (Vec<Stored>, Vec<f32>) {
    let mut state = 1u64;
    let mut code = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as u8 & (u8::MAX >> (8 - bits))
    };
    let codes: Vec<u8> = (0..e * n * k).map(|_| code()).collect();
    let bytes = match bits {
        8 => codes.clone(),
        4 => codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect(),
        _ => unreachable!(),
    };
    let numbers = codes.iter().map(|&code| f32::from(code) * 0.5 - 1.).collect();
    let shape = |last: usize| if e == 1 { vec![n, last] } else { vec![e, n, last] };
    let groups = e * n * k / group;
    let tensors = vec![
        Stored::new("m.weight", "U32", &shape(k * bits / 32), bytes),
        Stored::new("m.scales", "BF16", &shape(k / group), [0x00, 0x3F].repeat(groups)),
        Stored::new("m.biases", "BF16", &shape(k / group), [0x80, 0xBF].repeat(groups)),
    ];
    (tensors, numbers)
}

fn checkpoint(tensors: &[Stored], config: Option<&str>) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("model.safetensors"), crate::damage::write(tensors)).unwrap();
    if let Some(config) = config {
        fs::write(folder.path().join("config.json"), config).unwrap();
    }
    folder
}

/// Stacks are compared matrix by matrix, matrices in pieces of 2^18 numbers.
#[test]
fn large_stacks_are_compared_whole() {
    let shape = [2, 300, 1024];
    let (tensors, numbers) = stack(4, 64, shape);
    let packed = checkpoint(&tensors, Some(r#"{"quantization": {"bits": 4, "group_size": 64}}"#));
    let packed = packed.path().to_str().unwrap();
    let (_folder, dense) = file_of(&[Stored::f32("m.weight", &shape, &numbers)]);
    assert_eq!(run(&["diff", packed, &dense]).0, 0);
    // The first and the last number, and the first of the second piece of the second matrix.
    for position in [0, (300 + 256) * 1024, 2 * 300 * 1024 - 1] {
        let mut changed = numbers.clone();
        changed[position] += 3.;
        let (_folder, other) = file_of(&[Stored::f32("m.weight", &shape, &changed)]);
        let (code, report) = run_json(&["diff", "--json", &other, packed]);
        let (relative_rms, _) = distances(&changed, &numbers);
        assert_eq!((code, &report["tensors"][0]["max_abs"]), (1, &json!(3.)));
        assert_close(&report["tensors"][0]["relative_rms"], relative_rms);
    }
}

#[test]
fn k_comes_from_the_other_side_where_no_config_tells() {
    // 8 bits in groups of 32 have the ratio of words to scales of 4 bits in groups of 64.
    let (tensors, numbers) = stack(8, 32, [1, 4, 128]);
    let (_folder, dense) = file_of(&[Stored::f32("m.weight", &[4, 128], &numbers)]);
    let misleading = r#"{"quantization": {"bits": 4, "group_size": 64}}"#;
    for config in [None, Some("{}"), Some(misleading)] {
        let packed = checkpoint(&tensors, config);
        let packed = packed.path().to_str().unwrap();
        for (a, b) in [(packed, dense.as_str()), (&dense, packed)] {
            let (code, stdout, stderr) = run(&["diff", a, b]);
            assert_eq!(
                (code, stdout.as_str()),
                (0, "0 of 1 tensors differ; 100.00 % of all weights were compared\n"),
                "{config:?}: {stderr}"
            );
        }
    }
    // Nothing tells: neither side can be read.
    let packed = checkpoint(&tensors, None);
    let packed = packed.path().to_str().unwrap();
    let (code, stdout, _) = run(&["diff", packed, packed]);
    assert!(code == 2 && stdout.contains("unreadable: ") && stdout.contains("input features"), "{stdout}");
}

/// The original and what `quantize` makes of it are apart by what the format costs.
#[test]
fn a_quantized_model_beside_its_original() {
    let assets = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("assets");
    let (original, quantized) = (assets.join("tiny-bf16"), assets.join("tiny"));
    let (code, report) =
        run_json(&["diff", "--json", original.to_str().unwrap(), quantized.to_str().unwrap()]);
    assert_eq!(code, 1);
    let worst = &report["tensors"][0];
    let name = worst["name"].as_str().unwrap();
    let weight = Checkpoint::open(&original).unwrap().dense(name).unwrap();
    let weight = weight.load(DType::F32, &Device::Cpu).unwrap();
    let format = QuantFormat::affine(4, 64).unwrap();
    assert_eq!((&worst["a"], &worst["b"]), (&json!("BF16"), &json!(format.to_string())));
    let weight = weight.to_dtype(DType::BF16).unwrap();
    let again = candle_quant::QuantTensor::quantize(&weight, format).unwrap();
    let (relative_rms, max_abs) = distances(&crate::packed::flat(&weight), &crate::packed::reference(&again));
    assert_close(&worst["relative_rms"], relative_rms);
    assert_close(&worst["max_abs"], max_abs);
}

#[test]
fn bad_input_is_exit_code_2() {
    let fine = fixture("qwen3-mxfp8");
    let fine = fine.to_str().unwrap();
    let truncated = Copy::of(&fixture("qwen3-mxfp8"));
    let path = truncated.file("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    for (a, b, part) in [
        (fine, "nothing-here", "nothing-here"),
        ("nothing-here", fine, "nothing-here"),
        (fine, truncated.path(), "model.safetensors"),
    ] {
        let (code, stdout, stderr) = run(&["diff", a, b]);
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (2, "", 1), "{stderr}");
        assert!(stderr.starts_with("candle-quant: ") && stderr.contains(part), "{stderr}");
    }
    let (_strange, strange) =
        file_of(&[Stored::new("x", "BOOL", &[1], vec![1]), Stored::f32("y", &[1], &[1.])]);
    let (code, stdout, _) = run(&["diff", "--all", &strange, &strange]);
    assert!(
        code == 2 && stdout.contains("x  (unreadable: ") && stdout.contains(" 0.0000e0  y  (F32)"),
        "{stdout}"
    );
    let (_other, other) = file_of(&[Stored::f32("z", &[1], &[1.])]);
    let (code, stdout, stderr) = run(&["diff", "--common", &strange, &other]);
    assert!(code == 2 && stdout.is_empty() && stderr.contains("no tensor in common"), "{stderr}");
    for tolerance in ["-1", "nan", "inf", "x"] {
        let (code, _, stderr) = run(&["diff", fine, fine, &format!("--tolerance={tolerance}")]);
        assert!(code == 2 && stderr.contains("expected a finite number"), "{stderr}");
    }
}

#[test]
fn the_worst_twenty_are_printed() {
    let all = |number: f32| -> Vec<_> {
        (0..25).map(|i| Stored::f32(&format!("x.{i}"), &[2], &[1., number * i as f32])).collect()
    };
    let ((_a, a), (_b, b)) = (file_of(&all(0.)), file_of(&all(1.)));
    let (_, stdout, _) = run(&["diff", &a, &b]);
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines.len(), 1 + 20 + 2, "{stdout}");
    assert!(lines[1].contains("2.4000e1") && lines[1].contains("x.24"), "{stdout}");
    assert_eq!(
        lines[21..],
        ["and 4 more; --all prints them", "24 of 25 tensors differ; 100.00 % of all weights were compared"]
    );
    assert_eq!(run(&["diff", "--all", &a, &b]).1.lines().count(), 1 + 25 + 1);
}

fn repository(path: &str) -> String {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path).to_str().unwrap().to_owned()
}

/// One by one, in one tensor, with rows for columns, alternating; and heads of latent attention.
#[test]
fn experts_are_compared_whatever_their_layout() {
    for family in [
        "families/qwen2_moe",
        "families/deepseek_v3",
        "families/granitemoe",
        "convert/layouts/gpt_oss",
        "convert/layouts/llama4",
    ] {
        let [a, b] = ["hf", "mlx-affine4"].map(|side| repository(&format!("{family}/{side}")));
        for (a, b) in [(&a, &b), (&b, &a)] {
            let (code, report) = run_json(&["diff", a, b, "--json"]);
            assert_eq!((code, &report["compared_share"]), (1, &json!(1.)), "{family}");
            for tensor in report["tensors"].as_array().unwrap() {
                assert_eq!(tensor["outcome"], "values", "{family}: {tensor}");
                assert!(tensor["relative_rms"].as_f64().unwrap() < 0.15, "{family}: {tensor}");
            }
        }
    }
}

#[test]
fn checkpoints_of_which_nothing_is_compared_are_not_equal_and_not_merely_different() {
    let (_a, a) = file_of(&[Stored::f32("x", &[2, 3], &[1.; 6])]);
    let (_b, b) = file_of(&[Stored::f32("y", &[2, 3], &[1.; 6])]);
    let (code, stdout, _) = run(&["diff", &a, &b]);
    assert_eq!(code, 2);
    assert!(stdout.ends_with("2 of 2 tensors differ; 0.00 % of all weights were compared\n"), "{stdout}");
}
