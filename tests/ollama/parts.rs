//! Parts of packed weights that do not fit each other (R9 to R13), and global scales. Each message names model, layer,
//! digest and tensor.

use crate::checkpoint::{rejected, Tensor};
use crate::ollama::{bits, blob_of, stated, weight, Model, INT4, MXFP4, MXFP8, NVFP4};
use candle_quant::checkpoint::Weight;
use candle_quant::Result;
use serde_json::{json, Value};

/// Asserts that the weight is refused, with K and without, and that the message names the place.
#[track_caller]
fn refused(metadata: &Value, tensors: &[Tensor], parts: &[&str]) {
    let digest = Model::of(&json!({}), metadata, tensors).digest();
    for k in [None, Some(128)] {
        rejected(weight(metadata, tensors, k), parts);
        let place = format!("(layer `m.weight` of model `m:latest`, sha256:{digest})");
        rejected(weight(metadata, tensors, k), &["`m.weight`", &place]);
    }
}

/// R9
#[test]
fn parts_are_complete() {
    let metadata = stated("int4", "64");
    refused(&metadata, &INT4[..1], &["expected scales beside U32 words, found none"]);
    refused(&metadata, &[INT4[0], INT4[2]], &["expected scales beside U32 words, found none"]);
    refused(&metadata, &INT4[..2], &["expected biases beside float scales", "BF16 scales alone"]);
    for bias in ["U8", "BF16"] {
        refused(
            &Value::Null,
            &[NVFP4[0], NVFP4[1], ("m.weight.bias", bias, &[8, 8])],
            &["no biases beside scales that are bytes"],
        );
    }
    let dense = Model::of(&json!({}), &metadata, &INT4[..1]).open().unwrap();
    rejected(dense.dense("m.weight"), &["scales beside U32 words"]);
}

/// R10
#[test]
fn shapes_agree() {
    let with = |scale: (&'static str, &'static [usize]), bias: (&'static str, &'static [usize])| {
        [INT4[0], ("m.weight.scale", scale.0, scale.1), ("m.weight.bias", bias.0, bias.1)]
    };
    let metadata = stated("int4", "64");
    for dims in [&[7, 2][..], &[1, 8, 2], &[2]] {
        refused(&metadata, &with(("BF16", dims), ("BF16", dims)), &["the same leading dimensions"]);
    }
    refused(&metadata, &with(("BF16", &[8, 2]), ("BF16", &[8, 4])), &["the same shape of scales and biases"]);
    refused(&metadata, &with(("BF16", &[8, 2]), ("F64", &[8, 2])), &["biases in F16, BF16 or F32", "F64"]);
    refused(&metadata, &with(("F64", &[8, 2]), ("F64", &[8, 2])), &["scales in F16, BF16, F32 or U8", "F64"]);
    refused(&metadata, &with(("BF16", &[8, 3]), ("BF16", &[8, 3])), &["shapes of an affine format"]);
    refused(&metadata, &with(("BF16", &[8, 0]), ("BF16", &[8, 0])), &["none of them zero"]);
    refused(&metadata, &with(("BF16", &[]), ("BF16", &[])), &["two or more dimensions"]);
    refused(&Value::Null, &[("m.weight", "U8", &[8, 66]), NVFP4[1]], &["whole 32-bit words"]);
}

/// R11
#[test]
fn byte_scales_have_a_known_ratio() {
    for words in [1, 3, 5, 16, 32].map(|ratio| [8, 8 * ratio]) {
        let tensors: [Tensor; 2] = [("m.weight", "U32", &words), NVFP4[1]];
        refused(
            &Value::Null,
            &tensors,
            &["2 (nvfp4), 4 (mxfp4) or 8 (mxfp8) words for each scale", "scales U8 [8, 8]"],
        );
    }
}

/// R12
#[test]
fn metadata_of_byte_scales_is_true() {
    for (tensors, metadata) in [
        (NVFP4, stated("int4", "16")),
        (NVFP4, stated("fp4", "16")),
        (NVFP4, stated("mxfp4", "32")),
        (NVFP4, stated("nvfp4", "32")),
        (MXFP4, stated("nvfp4", "16")),
        (MXFP8, stated("fp8", "32")),
        (MXFP8, json!({"group_size": "64"})),
    ] {
        refused(&metadata, &tensors, &["expected metadata of", metadata["group_size"].as_str().unwrap()]);
    }
}

/// A stack of two experts in nvfp4, with a global scale of these numbers.
fn with_global(dtype: &str, dims: &[usize], numbers: &[f32]) -> Result<Vec<u32>> {
    let stack: [Tensor; 3] = [
        ("m.weight", "U32", &[2, 8, 16]),
        ("m.weight.scale", "U8", &[2, 8, 8]),
        ("m.weight.global_scale", dtype, dims),
    ];
    let mut blob = blob_of(&stated("nvfp4", "16"), &stack);
    let begin = blob.len() - 4 * numbers.len();
    for (to, number) in blob[begin..].chunks_exact_mut(4).zip(numbers) {
        to.copy_from_slice(&number.to_le_bytes());
    }
    let mut model = Model::new(&json!({}));
    model.add("tensor", Some("m.weight"), &blob);
    match model.open()?.weight("m", Some(128))? {
        Weight::Packed(packed) => Ok(bits(&packed)),
        other => panic!("{other:?}"),
    }
}

/// 4.2, R13: a plain multiplier, of one weight or of each expert.
#[test]
fn global_scales_multiply() {
    let times = |factors: [f32; 2]| -> Vec<u32> {
        let one = with_global("F32", &[1], &[1.0]).unwrap();
        let half = one.len() / 2;
        let scaled = |(i, bits): (usize, u32)| (f32::from_bits(bits) * factors[i / half]).to_bits();
        one.into_iter().enumerate().map(scaled).collect()
    };
    assert!(times([1., 1.]).iter().any(|bits| f32::from_bits(*bits).abs() > 1.));
    for dims in [&[][..], &[1], &[1, 1, 1]] {
        assert_eq!(with_global("F32", dims, &[0.25]).unwrap(), times([0.25, 0.25]));
    }
    for dims in [&[2][..], &[2, 1, 1]] {
        assert_eq!(with_global("F32", dims, &[0.5, 4.0]).unwrap(), times([0.5, 4.0]));
    }
}

/// R13
#[test]
fn global_scales_are_sound() {
    let place = ["`m.weight`", "layer `m.weight` of model `m:latest`, sha256:"];
    for (dtype, dims) in [("F32", &[3][..]), ("F32", &[0]), ("F32", &[2, 8]), ("BF16", &[2]), ("U32", &[1])] {
        let result = with_global(dtype, dims, &[]);
        rejected(
            result,
            &["expected a global scale in F32, one value or one for each expert", place[0], place[1]],
        );
    }
    for number in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        rejected(
            with_global("F32", &[], &[number]),
            &["expected a global scale above zero", place[0], place[1]],
        );
        rejected(with_global("F32", &[2], &[1.0, number]), &["expected a global scale above zero"]);
    }
    let global =
        |format: [Tensor<'static>; 2]| [format[0], format[1], ("m.weight.global_scale", "F32", &[][..])];
    refused(&Value::Null, &global(MXFP4), &["a global scale", "on nvfp4", "on mxfp4"]);
    let foreign = [NVFP4[0], NVFP4[1], ("m.global_scale", "F32", &[][..])];
    rejected(weight(&Value::Null, &foreign, None), &["`m.global_scale`", "`m.weight.global_scale`", "MLX"]);
}
