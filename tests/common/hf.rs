//! Quantized checkpoints of other tools than MLX, and what their tensors have to be.
#![allow(dead_code)] // each test binary uses its own part

use super::checkpoint::{folder_of, header, raw_file};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::Result;
use serde_json::{json, Value};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// The fixtures, written by the tools themselves, with the format of their packed weights.
pub const FIXTURES: [(&str, &str); 46] = [
    ("awq-g64", "affine 4-bit g64"),
    ("awq-gemv-g64", "affine 4-bit g64"),
    ("awq-gemv_fast-g32", "affine 4-bit g32"),
    ("awq-marlin-g128", "symmetric 4-bit g128"),
    ("awq-rows", "affine 4-bit g128"),
    ("bnb-fp4", "fp4"),
    ("bnb-int8", "symmetric 8-bit g128"),
    ("bnb-nf4", "nf4"),
    ("bnb-nf4-b512", "nf4"),
    ("bnb-nf4-nested", "nf4"),
    ("ct-act-order-int4-g32", "symmetric 4-bit g32, act-order"),
    ("ct-act-order-int8-asym-g64", "affine 8-bit g64, act-order"),
    ("ct-fp8-block", "fp8 g64"),
    ("ct-fp8-channel", "fp8 g128"),
    ("ct-fp8-tensor", "fp8 g128"),
    ("ct-int4-asym-g64", "affine 4-bit g64"),
    ("ct-int4-g128-f32", "symmetric 4-bit g128"),
    ("ct-int4-g32", "symmetric 4-bit g32"),
    ("ct-int8-channel", "symmetric 8-bit g128"),
    ("ct-llmc-awq", "affine 4-bit g128"),
    ("ct-llmc-fp8-kv", "fp8 g128"),
    ("ct-llmc-gptq-order", "symmetric 4-bit g32, act-order"),
    ("ct-llmc-w4a8", "symmetric 8-bit g128"),
    ("ct-mxfp4", "mxfp4"),
    ("ct-nvfp4", "nvfp4"),
    ("ct-w8a8", "symmetric 8-bit g128"),
    ("fp8-128x128", "fp8 g128"),
    ("fp8-ue8m0-32x32", "mxfp8"),
    ("gptq-act-order-b4-g32", "affine 4-bit g32, act-order"),
    ("gptq-act-order-experts", "affine 4-bit g32, act-order"),
    ("gptq-act-order-v2-b3-g64", "affine 3-bit g64, act-order"),
    ("gptq-b2-g64", "affine 2-bit g64"),
    ("gptq-b3-g32", "affine 3-bit g32"),
    ("gptq-b4-g128", "affine 4-bit g128"),
    ("gptq-b8-channel", "affine 8-bit g128"),
    ("gptq-v2-b4-g32", "affine 4-bit g32"),
    ("hqq-b1-g32", "affine 1-bit g32"),
    ("hqq-b2-g64", "affine 2-bit g64"),
    ("hqq-b3-g32-axis0", "affine 3-bit g32, across rows"),
    ("hqq-b3-g64", "affine 3-bit g64"),
    ("hqq-b4-g64", "affine 4-bit g64"),
    ("hqq-b4-g64-axis0", "affine 4-bit g64, across rows"),
    ("hqq-b8-g128", "affine 8-bit g128"),
    ("modelopt-fp8", "fp8 g128"),
    ("modelopt-fp8-rows", "fp8 g128"),
    ("modelopt-nvfp4", "nvfp4"),
];

/// The folder of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/hf").join(name)
}

pub fn read_json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

/// The SHA-256 of a tensor's little-endian F32 bytes.
pub fn sha256(tensor: &Tensor) -> String {
    sha256_of(&values(tensor).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>())
}

pub fn sha256_of(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// All numbers of a tensor.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// One tensor of a file: name, dtype, shape, bytes.
pub type Entry = (String, &'static str, Vec<usize>, Vec<u8>);

pub fn entry(name: &str, dtype: &'static str, shape: &[usize], bytes: impl Into<Vec<u8>>) -> Entry {
    (name.into(), dtype, shape.to_vec(), bytes.into())
}

pub fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Entry {
    entry(name, "F32", shape, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

/// Bytes that look random and are not NaN in any 8-bit format.
pub fn noise(count: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 24) as u8
    };
    (0..count).map(|_| next()).map(|byte| if byte & 0x7f == 0x7f { byte ^ 1 } else { byte }).collect()
}

/// A `config.json` of this `quantization_config`, and a file of these tensors, with data at an odd offset.
pub fn files(quantization: &Value, entries: &[Entry]) -> [(&'static str, Vec<u8>); 2] {
    let config = json!({"quantization_config": quantization});
    let [config, model, _] = files_beside(None, &config, entries);
    [config, model]
}

/// This `config.json`, a file of these tensors, and a file of settings (or an empty one that nothing reads).
pub fn files_beside<'a>(
    settings: Option<(&'a str, &Value)>,
    config: &Value,
    entries: &[Entry],
) -> [(&'a str, Vec<u8>); 3] {
    let tensors: Vec<_> =
        entries.iter().map(|(name, dtype, shape, _)| (name.as_str(), *dtype, shape.as_slice())).collect();
    let (header, size) = header(&tensors);
    let data: Vec<u8> = entries.iter().flat_map(|(.., bytes)| bytes).copied().collect();
    assert_eq!(data.len(), size, "bytes of entries");
    let (name, settings) = settings.unwrap_or(("nothing", &Value::Null));
    [
        ("config.json", config.to_string().into_bytes()),
        ("model.safetensors", raw_file(&header, &data)),
        (name, settings.to_string().into_bytes()),
    ]
}

/// A directory with these [`files`].
pub fn folder(quantization: &Value, entries: &[Entry]) -> TempDir {
    folder_of(&files(quantization, entries).each_ref().map(|(name, bytes)| (*name, bytes.as_slice())))
}

pub fn open(quantization: &Value, entries: &[Entry]) -> Result<Checkpoint> {
    Checkpoint::open(folder(quantization, entries).path())
}

/// The weight of module `m`.
pub fn weight(quantization: &Value, entries: &[Entry]) -> Result<Weight> {
    open(quantization, entries)?.weight("m", None)
}

/// The format of the weight of module `m`, its shape and its numbers.
pub fn dequantized(quantization: &Value, entries: &[Entry]) -> (String, Vec<usize>, Vec<f32>) {
    let weight = weight(quantization, entries).unwrap();
    let tensor = weight.to_dense(DType::F32, &Device::Cpu).unwrap();
    assert_eq!(tensor.dims(), weight.dims());
    (weight.format_name(), weight.dims().to_vec(), values(&tensor))
}

/// `entries` with those of the same name replaced, and others added.
pub fn with(entries: &[Entry], changes: &[Entry]) -> Vec<Entry> {
    let kept = entries.iter().filter(|entry| !changes.iter().any(|change| change.0 == entry.0));
    kept.chain(changes).cloned().collect()
}

/// `entries` without the one of this name.
pub fn without(entries: &[Entry], name: &str) -> Vec<Entry> {
    let kept: Vec<_> = entries.iter().filter(|entry| entry.0 != name).cloned().collect();
    assert_eq!(kept.len() + 1, entries.len(), "{name}");
    kept
}

/// A layout with everything that it needs for module `m`, small and right.
pub struct Case {
    pub name: &'static str,
    pub quantization: Value,
    pub entries: Vec<Entry>,
}

/// compressed-tensors' settings for weights in one format.
pub fn compressed(format: &str, weights: Value) -> Value {
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
}

fn case(name: &'static str, quantization: Value, entries: Vec<Entry>) -> Case {
    Case { name, quantization, entries }
}

/// Every layout. N is 8 (64 in "marlin"), K 64 or 128.
pub fn cases() -> Vec<Case> {
    let halves = |count: usize| [0x00, 0x2c].repeat(count);
    vec![
        case(
            "gpt-oss",
            json!({"quant_method": "mxfp4"}),
            vec![
                entry("e.gate_up_proj_blocks", "U8", &[2, 8, 2, 16], noise(512, 1)),
                entry("e.gate_up_proj_scales", "U8", &[2, 8, 2], [120; 32]),
                entry("e.gate_up_proj_bias", "BF16", &[2, 8], noise(32, 3)),
                entry("m_blocks", "U8", &[2, 8, 2, 16], noise(512, 4)),
                entry("m_scales", "U8", &[2, 8, 2], [121; 32]),
                entry("m_bias", "BF16", &[2, 8], noise(32, 5)),
            ],
        ),
        case(
            "mxfp4 words",
            json!({"quant_method": "mxfp4"}),
            vec![
                entry("m.weight", "U32", &[8, 8], noise(256, 6)),
                entry("m.scales", "U8", &[8, 2], [122; 16]),
            ],
        ),
        case(
            "mxfp8",
            json!({"quant_method": "mxfp8"}),
            vec![
                entry("m.weight", "F8_E4M3", &[8, 64], noise(512, 7)),
                entry("m.weight_scale_inv", "U8", &[8, 2], noise(16, 8)),
            ],
        ),
        case(
            "modelopt",
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            vec![
                entry("m.weight", "U8", &[8, 32], noise(256, 9)),
                entry("m.weight_scale", "F8_E4M3", &[8, 4], noise(32, 10)),
                f32s("m.weight_scale_2", &[], &[0.37]),
                f32s("m.input_scale", &[], &[0.01]),
            ],
        ),
        case(
            "nvfp4-pack-quantized",
            compressed("nvfp4-pack-quantized", json!({"num_bits": 4, "type": "float", "group_size": 16})),
            vec![
                entry("m.weight_packed", "U8", &[8, 32], noise(256, 11)),
                entry("m.weight_scale", "F8_E4M3", &[8, 4], noise(32, 12)),
                f32s("m.weight_global_scale", &[1], &[1234.5]),
                f32s("m.input_global_scale", &[1], &[7.]),
            ],
        ),
        case(
            "mxfp4-pack-quantized",
            compressed("mxfp4-pack-quantized", json!({"num_bits": 4, "type": "float", "group_size": 32})),
            vec![
                entry("m.weight_packed", "U8", &[8, 32], noise(256, 13)),
                entry("m.weight_scale", "U8", &[8, 2], noise(16, 14)),
            ],
        ),
        case(
            "pack-quantized",
            compressed(
                "pack-quantized",
                json!({"num_bits": 4, "type": "int", "symmetric": true, "group_size": 64}),
            ),
            vec![
                entry("m.weight_packed", "I32", &[8, 16], noise(512, 15)),
                entry("m.weight_scale", "F16", &[8, 2], halves(16)),
                entry("m.weight_shape", "I64", &[2], [8u64, 128].map(u64::to_le_bytes).concat()),
            ],
        ),
        case(
            "pack-quantized zeros",
            compressed(
                "pack-quantized",
                json!({"num_bits": 8, "type": "int", "symmetric": false, "strategy": "group", "group_size": 64}),
            ),
            vec![
                entry("m.weight_packed", "I32", &[8, 32], noise(1024, 22)),
                entry("m.weight_scale", "F16", &[8, 2], halves(16)),
                entry("m.weight_zero_point", "I32", &[2, 2], noise(16, 23)),
                entry("m.weight_g_idx", "I32", &[128], order(128, 64)),
                entry("m.weight_shape", "I64", &[2], [8u64, 128].map(u64::to_le_bytes).concat()),
            ],
        ),
        case(
            "int-quantized",
            compressed("int-quantized", json!({"num_bits": 8, "type": "int", "strategy": "channel"})),
            vec![
                entry("m.weight", "I8", &[8, 128], noise(1024, 24)),
                entry("m.weight_scale", "F16", &[8, 1], halves(8)),
                f32s("m.input_scale", &[1], &[0.5]),
            ],
        ),
        case(
            "fp8 floats",
            json!({"quant_method": "fp8", "weight_block_size": [3, 48]}),
            vec![
                entry("m.weight", "F8_E4M3", &[8, 64], noise(512, 16)),
                f32s("m.weight_scale_inv", &[3, 2], &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
            ],
        ),
        case(
            "float-quantized",
            compressed("float-quantized", json!({"num_bits": 8, "type": "float", "strategy": "channel"})),
            vec![
                entry("m.weight", "F8_E4M3", &[8, 64], noise(512, 21)),
                entry("m.weight_scale", "BF16", &[8, 1], [0x00, 0x3c].repeat(8)),
            ],
        ),
        case(
            "modelopt fp8",
            json!({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
            vec![
                entry("m.weight", "F8_E4M3", &[8, 64], noise(512, 22)),
                f32s("m.weight_scale", &[8], &[0.1, -0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
                f32s("m.input_scale", &[], &[0.01]),
            ],
        ),
        case(
            "fp8 groups",
            json!({"quant_method": "fp8", "weight_block_size": [3, 64]}),
            vec![
                entry("m.weight", "F8_E4M3", &[8, 160], noise(1280, 20)),
                f32s("m.weight_scale_inv", &[3, 3], &[0.1, -0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]),
            ],
        ),
        case(
            "fp8 exponents",
            json!({"quant_method": "fp8", "weight_block_size": [3, 32], "scale_fmt": "ue8m0"}),
            vec![
                entry("m.weight", "F8_E4M3", &[8, 64], noise(512, 17)),
                entry("m.weight_scale_inv", "F8_E8M0", &[3, 2], [120, 121, 122, 123, 124, 125]),
            ],
        ),
        case(
            "awq",
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
            vec![
                entry("m.qweight", "I32", &[64, 1], noise(256, 18)),
                entry("m.qzeros", "I32", &[2, 1], noise(8, 19)),
                entry("m.scales", "F16", &[2, 8], halves(16)),
            ],
        ),
        case(
            "awq gemv",
            json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}),
            vec![
                entry("m.qweight", "I32", &[8, 16], noise(512, 31)),
                entry("m.qzeros", "I32", &[8, 2], noise(64, 32)),
                entry("m.scales", "F16", &[8, 16], halves(128)),
            ],
        ),
        case(
            "awq gemv_fast",
            json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv_fast"}),
            vec![
                entry("m.qweight", "I16", &[2, 128], noise(512, 33)),
                entry("m.qzeros", "F16", &[16, 8], halves(128)),
                entry("m.scales", "F16", &[16, 8], halves(128)),
            ],
        ),
        case(
            "awq marlin",
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "marlin", "zero_point": false}),
            vec![
                entry("m.qweight", "I32", &[4, 128], noise(2048, 36)),
                entry("m.scales", "F16", &[2, 64], halves(128)),
            ],
        ),
        case(
            "bitsandbytes 4",
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}),
            vec![
                entry("m.weight", "U8", &[512, 1], noise(512, 28)),
                entry("m.weight.absmax", "U8", &[8], noise(8, 29)),
                f32s("m.weight.quant_map", &[16], &NF4),
                f32s("m.weight.nested_absmax", &[4], &[0.1, 0.2, 0.3, 0.4]),
                f32s(
                    "m.weight.nested_quant_map",
                    &[256],
                    &(0..256).map(|i| i as f32 / 64. - 1.).collect::<Vec<_>>(),
                ),
                state(&json!({
                    "quant_type": "nf4", "blocksize": 128, "dtype": "bfloat16", "shape": [8, 128],
                    "nested_blocksize": 2, "nested_dtype": "float32", "nested_offset": 0.015625,
                })),
            ],
        ),
        case(
            "bitsandbytes 8",
            json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
            vec![
                entry("m.weight", "I8", &[8, 128], noise(1024, 30)),
                f32s("m.SCB", &[8], &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
                entry("m.weight_format", "U8", &[], [0]),
            ],
        ),
        case(
            "gptq",
            json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": false, "desc_act": false}),
            vec![
                entry("m.qweight", "I32", &[16, 8], noise(512, 20)),
                entry("m.qzeros", "I32", &[2, 1], noise(8, 21)),
                entry("m.scales", "F16", &[2, 8], halves(16)),
                entry("m.g_idx", "I32", &[128], order(128, 64)),
            ],
        ),
        case("hqq", json!({"quant_method": "hqq"}), hqq("4bit_u8", "U8", &[8, 64], 1, noise(512, 37))),
        case("hqq words", json!({"quant_method": "hqq"}), hqq("3bit_32", "I32", &[2, 64], 1, noise(512, 38))),
        case(
            "hqq across rows",
            json!({"quant_method": "hqq"}),
            hqq("2bit_u8", "U8", &[16, 16], 0, noise(256, 39)),
        ),
        case(
            "gptq act-order",
            json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": false, "desc_act": true}),
            vec![
                entry("m.qweight", "I32", &[16, 8], noise(512, 34)),
                entry("m.qzeros", "I32", &[2, 1], noise(8, 35)),
                entry("m.scales", "F16", &[2, 8], halves(16)),
                entry("m.g_idx", "I32", &[128], shuffled_order()),
            ],
        ),
        case(
            "pack-quantized act-order",
            compressed(
                "pack-quantized",
                json!({"num_bits": 4, "type": "int", "symmetric": true, "group_size": 64, "actorder": "group"}),
            ),
            vec![
                entry("m.weight_packed", "I32", &[8, 16], noise(512, 36)),
                entry("m.weight_scale", "F16", &[8, 2], halves(16)),
                entry("m.weight_g_idx", "I32", &[128], shuffled_order()),
                entry("m.weight_shape", "I64", &[2], [8u64, 128].map(u64::to_le_bytes).concat()),
            ],
        ),
    ]
}

/// bitsandbytes' values.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// What bitsandbytes says of a weight of NF4.
pub fn state(state: &Value) -> Entry {
    let bytes = state.to_string().into_bytes();
    entry("m.weight.quant_state.bitsandbytes__nf4", "U8", &[bytes.len()], bytes)
}

/// The group of each of so many columns.
pub fn order(columns: u32, group_size: u32) -> Vec<u8> {
    (0..columns).flat_map(|column| (column / group_size).to_le_bytes()).collect()
}

/// Eight rows of 128 elements in groups of 64, as hqq saves them.
fn hqq(packing: &str, dtype: &'static str, codes: &[usize], axis: i32, bytes: Vec<u8>) -> Vec<Entry> {
    let of_groups = if axis == 1 { [16, 1] } else { [1, 16] };
    let scales: Vec<u8> = (0..16).flat_map(|group| [group * 13, 0x2c]).collect();
    let zeros: Vec<u8> = (0..16).flat_map(|group| [group * 11, 0x3c + group % 4]).collect();
    vec![
        entry("m.W_q", dtype, codes, bytes),
        entry("m.scale", "F16", &of_groups, scales),
        entry("m.zero", "F16", &of_groups, zeros),
        entry("m.shape", "I64", &[2], [8u64, 128].map(u64::to_le_bytes).concat()),
        entry("m.axis", "I32", &[], axis.to_le_bytes()),
        entry("m.group_size", "I32", &[], 64i32.to_le_bytes()),
        entry("m.packing", "U8", &[packing.len()], packing.as_bytes()),
        entry("m.nbits", "I32", &[], 4i32.to_le_bytes()),
        entry("m.view_as_float", "U8", &[], [0]),
    ]
}

/// Two groups of 128 columns that lie in turn.
fn shuffled_order() -> Vec<u8> {
    (0..128u32).flat_map(|column| (column % 2).to_le_bytes()).collect()
}

/// The case of this name.
pub fn case_of(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}
