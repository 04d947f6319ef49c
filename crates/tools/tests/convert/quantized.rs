//! Sources that are packed already: passed through, packed anew, dequantized.

use super::common::{bundled, convert, json_file, tensors, Source};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::{QuantFormat, QuantTensor};
use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe};
use candle_quant_tools::verify;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

fn fixture(path: &str) -> Checkpoint {
    Checkpoint::open(PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path))
        .unwrap()
}

fn safe(format: &str) -> ConvertOptions {
    ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))
}

fn dequantized(checkpoint: &Checkpoint, name: &str, dtype: DType) -> Tensor {
    let model = candle_quant_models::Config::from_json(checkpoint.config()).ok();
    let k = model.and_then(|model| model.in_features(name.strip_suffix(".weight").unwrap_or(name)));
    checkpoint.tensor(name, k).unwrap().to_dense(dtype, &Device::Cpu).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let numbers = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    numbers.into_iter().map(f32::to_bits).collect()
}

#[test]
fn packed_weights_pass_through_byte_for_byte() {
    for name in [
        "mlx/llama-mixed-custom",
        "mlx/llama-mixed_3_6",
        "mlx/llama-untied-bias-b4-g64-f16",
        "mlx/llama-untied-mxfp4",
        "mlx/qwen3-affine-b1-g64",
        "mlx/qwen3-affine-b4-g64-sharded",
        "mlx/qwen3-nvfp4",
        "mlx/qwen3-mxfp8",
        "mlx/gptoss-mxfp4-mlxlm",
    ] {
        let source = fixture(name);
        let out = convert(&source, &safe("keep"));
        let mut expected = tensors(source.path());
        expected.retain(|name, _| !["tokens", "hidden_embed_f32", "logits_f32"].contains(&name.as_str()));
        assert!(tensors(out.path()) == expected, "{name}");
        let report = verify::verify(&Checkpoint::open(out.path()).unwrap());
        assert!(report.passed(true), "{name}: {:?}", report.findings);
    }
}

#[test]
fn other_containers_pass_through_as_mlx() {
    for (name, packed) in [
        ("mlx/gptoss-mxfp4-hf", 6),
        ("hf/ct-mxfp4", 6),
        ("hf/fp8-ue8m0-32x32", 7),
        ("uqff/afq4", 9),
        ("uqff/mxfp4", 9),
    ] {
        let source = fixture(name);
        let out = convert(&source, &safe("keep"));
        let written = Checkpoint::open(out.path()).unwrap();
        let mut count = 0;
        for tensor in source.tensor_names() {
            let (a, b) = (source.tensor(tensor, None), written.tensor(tensor, None));
            let (Ok(a), Ok(b)) = (&a, &b) else { panic!("{name} {tensor}: {a:?} {b:?}") };
            assert_eq!(a.format_name(), b.format_name(), "{name} {tensor}");
            count += usize::from(matches!(b, Weight::Packed(_)));
            let dequantize = |weight: &Weight| bits(&weight.to_dense(DType::F32, &Device::Cpu).unwrap());
            assert!(dequantize(a) == dequantize(b), "{name} {tensor}");
        }
        assert_eq!(count, packed, "{name}");
        assert!(json_file(out.path().join("config.json"))["quantization_config"]
            .get("quant_method")
            .is_none());
    }
}

/// `sanitized.json` is what mlx-lm makes of the same file.
#[test]
fn gpt_oss_as_published_becomes_what_mlx_lm_makes_of_it() {
    let source = fixture("mlx/gptoss-mxfp4-hf");
    let out = convert(&source, &safe("keep"));
    let expected = json_file(source.path().join("sanitized.json"));
    let found: serde_json::Map<_, _> = tensors(out.path())
        .into_iter()
        .map(|(name, (dtype, shape, bytes))| {
            let dtype = match dtype.as_str() {
                "BF16" => "bfloat16",
                "U32" => "uint32",
                "U8" => "uint8",
                other => panic!("{other}"),
            };
            let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            (name, json!({"dtype": dtype, "shape": shape, "sha256": sha256}))
        })
        .collect();
    assert_eq!(serde_json::Value::from(found), expected);
}

#[test]
fn formats_that_mlx_has_not_are_a_choice() {
    for (name, format) in [
        ("uqff/q4k", "ggml Q6K"),
        ("hf/ct-nvfp4", "nvfp4"),
        ("uqff/fp8", "mxfp8"),
        ("hf/ct-int4-g128-f32", "symmetric 4-bit g128"),
    ] {
        let error = ConvertPlan::new(&fixture(name), &safe("4")).unwrap_err().to_string();
        assert!(error.contains(format) && error.contains("requantize or dequantize it"), "{name}: {error}");
    }
}

#[test]
fn requantized_weights_are_those_of_the_decoded_numbers() {
    for name in [
        "uqff/q4k",
        "hf/awq-g64",
        "hf/ct-nvfp4",
        "hf/gptq-act-order-b4-g32",
        "hf/hqq-b4-g64-axis0",
        "mlx/llama-mixed-custom",
        "mlx/gptoss-mxfp4-mlxlm",
    ] {
        let source = fixture(name);
        let recipe = Recipe::named("uniform", "8:g32".parse().unwrap());
        let mut options = ConvertOptions::mlx(recipe.unwrap());
        options.requantize = true;
        let out = convert(&source, &options);
        let written = Checkpoint::open(out.path()).unwrap();
        let dtype = match source.config().get("torch_dtype").and_then(|dtype| dtype.as_str()) {
            Some("float16") => DType::F16,
            Some("float32") => DType::F32,
            _ => DType::BF16,
        };
        let mut packed = 0;
        for tensor in source.tensor_names() {
            let Ok(Weight::Packed(weight)) = written.tensor(tensor, None) else { continue };
            if !weight.format().has_biases() {
                continue;
            }
            let was_packed = !matches!(source.tensor(tensor, None), Ok(Weight::Dense(_)));
            let numbers = dequantized(&source, tensor, DType::F32);
            let dtype = if was_packed { dtype } else { source.dense(tensor).unwrap().dtype() };
            let expected = QuantTensor::quantize(&numbers.to_dtype(dtype).unwrap(), weight.format()).unwrap();
            let found = weight.load(&Device::Cpu).unwrap();
            assert_eq!(found.scales().dtype(), dtype);
            let dequantize = |tensor: &QuantTensor| bits(&tensor.dequantize(DType::F32).unwrap());
            assert!(dequantize(&found) == dequantize(&expected), "{name} {tensor}");
            packed += 1;
        }
        assert!(packed > 5, "{name}: {packed}");
    }
    // A rule that keeps a weight keeps its bytes.
    let source = bundled("tiny");
    let mut options = safe("keep");
    options.requantize = true;
    assert!(tensors(convert(&source, &options).path()) == tensors(source.path()));
}

#[test]
fn dequantized_checkpoints_are_dense() {
    for name in
        ["uqff/q4k", "slm1/q4_0_gqa_b32.slm", "hf/awq-g64", "mlx/llama-mixed-custom", "mlx/gptoss-mxfp4-hf"]
    {
        let source = fixture(name);
        for dtype in [DType::F32, DType::BF16] {
            let mut options = ConvertOptions::dense();
            options.dtype = Some(dtype);
            let out = convert(&source, &options);
            let written = Checkpoint::open(out.path()).unwrap();
            assert_eq!(written.kind().to_string(), "dense safetensors", "{name}");
            let names: Vec<_> = written.tensor_names().collect();
            assert_eq!(names, source.tensor_names().collect::<Vec<_>>(), "{name}");
            for tensor in names {
                let dense = written.dense(tensor).unwrap();
                assert_eq!(dense.dtype(), dtype, "{name} {tensor}");
                let found = dense.load(DType::F32, &Device::Cpu).unwrap();
                assert_eq!(
                    bits(&found),
                    bits(&dequantized(&source, tensor, DType::F32).to_dtype(dtype).unwrap()),
                    "{name} {tensor}"
                );
            }
            let config = json_file(out.path().join("config.json"));
            assert!(config.get("quantization").is_none() && config.get("quantization_config").is_none());
        }
    }
}

#[test]
fn one_packed_weight_among_dense_ones_stays_as_it_is() {
    let source = bundled("tiny");
    // All matrices of the source are packed with 4 bits; what is asked for is for those that are not.
    let plan = ConvertPlan::new(&source, &safe("8")).unwrap();
    for tensor in plan.tensors().filter(|tensor| tensor.shape.len() > 1) {
        assert_eq!((tensor.to.as_str(), tensor.rule.as_str()), ("affine 4-bit g64", "packed already"));
    }
    let mixed = Source::new()
        .with_config(r#"{"quantization": {"bits": 8, "group_size": 32}}"#)
        .with_bytes("a.weight", "U32", &[16, 16], &[17; 16 * 16 * 4])
        .with("a.scales", &[16, 2], &[0.5; 32])
        .with("a.biases", &[16, 2], &[-1.; 32])
        .random("b.weight", &[32, 64])
        .finish();
    let out = convert(&mixed.open(), &safe("4"));
    let config = json_file(out.path().join("config.json"));
    assert_eq!(config["quantization"]["bits"], 4);
    assert_eq!(config["quantization"]["a"]["bits"], 8);
    let written = Checkpoint::open(out.path()).unwrap();
    let Weight::Packed(a) = written.weight("a", None).unwrap() else { panic!() };
    assert_eq!(a.format(), QuantFormat::affine(8, 32).unwrap());
    assert_eq!(tensors(out.path())["a.weight"].2, [17; 16 * 16 * 4]);
}
