//! The rules on headers and models, by their numbers in the format's list, and what a strict reading refuses.

use crate::checkpoint::rejected;
use crate::writer::{Kind, Model};
use crate::{entry, fixture_bytes, hash, open, open_strictly, open_with, sum, u32_at, with};
use candle_core::{DType, Device};
use candle_quant::checkpoint::slm1::{ChecksumPolicy, Slm1Options, Verification};
use serde_json::Value;

const FILE: &str = "model.slm";

fn q8_0() -> Vec<u8> {
    fixture_bytes("q8_0")
}

fn u32_field(at: usize, value: u32) -> Vec<u8> {
    with(&q8_0(), at, &value.to_le_bytes())
}

fn u64_field(at: usize, value: u64) -> Vec<u8> {
    with(&q8_0(), at, &value.to_le_bytes())
}

#[test]
fn rule_1_short_files() {
    for length in [4, 5, 64, 107] {
        rejected(open(&q8_0()[..length]), &[FILE, &format!("{length} bytes are too few for an SLM1 file")]);
    }
    rejected(open(&[]), &[FILE, "0 bytes are too few for an SLM1 file"]);
    for length in (108..q8_0().len() - 63).step_by(61) {
        rejected(open(&q8_0()[..length]), &[FILE]);
    }
}

#[test]
fn rule_2_magic() {
    rejected(open(&with(&q8_0(), 0, b"SLM2")), &[FILE, "the magic number is", "expected SLM1"]);
}

#[test]
fn rule_3_version() {
    for version in [0, 2, u32::MAX] {
        rejected(
            open(&u32_field(4, version)),
            &[FILE, &format!("version {version} of SLM1"), "not supported"],
        );
    }
}

#[test]
fn rule_4_length_of_the_header() {
    for length in [0, 107, 8833, u32::MAX] {
        rejected(open(&u32_field(8, length)), &[FILE, &format!("the header claims {length} bytes")]);
    }
}

#[test]
fn rule_5_zero_sizes() {
    for (at, name) in [
        (20, "vocab_size"),
        (28, "hidden_size"),
        (32, "layer_count"),
        (36, "head_count"),
        (44, "head_dim"),
        (48, "ffn_size"),
        (52, "max_context"),
    ] {
        rejected(open(&u32_field(at, 0)), &[FILE, &format!("{name} is 0")]);
    }
}

#[test]
fn rule_6_key_value_heads() {
    rejected(open(&u32_field(40, 0)), &[FILE, "kv_head_count is 0"]);
    rejected(open(&u32_field(40, 3)), &[FILE, "kv_head_count is 3", "a divisor of the 2 heads"]);
    let three = with(&u32_field(36, 3), 40, &2u32.to_le_bytes());
    rejected(open(&three), &[FILE, "kv_head_count is 2", "a divisor of the 3 heads"]);
}

#[test]
fn rule_7_rotation_and_epsilon() {
    for value in [0., -1., f32::NAN, f32::INFINITY] {
        for (at, name) in [(56, "rope_theta"), (60, "rms_norm_epsilon")] {
            let bytes = with(&q8_0(), at, &value.to_le_bytes());
            rejected(open(&bytes), &[FILE, &format!("{name} is {value}"), "a finite number above zero"]);
        }
    }
}

#[test]
fn rules_8_and_9_checksum() {
    let zero = u64_field(100, 0);
    rejected(open(&zero), &[FILE, "the checksum is 0"]);
    let options = |checksum| Slm1Options { checksum, ..Slm1Options::default() };
    let ignored = open_with(&zero, &options(ChecksumPolicy::Ignore)).unwrap();
    assert_eq!(ignored.verification(), Verification::Unverified);
    let verify = options(ChecksumPolicy::Verify(sum));
    rejected(open_with(&zero, &verify), &["the checksum is 0"]);
    let expected = sum(&zero);
    let right = u64_field(100, expected);
    assert_eq!(open_with(&right, &verify).unwrap().verification(), Verification::Verified);
    for wrong in [with(&right, 8000, &[right[8000] ^ 1]), u64_field(100, expected + 1)] {
        rejected(open_with(&wrong, &verify), &[FILE, "the checksum is 0x", "expected 0x"]);
    }
    let strict = Slm1Options { strict: true, ..verify };
    assert_eq!(open_with(&right, &strict).unwrap().verification(), Verification::Verified);
}

#[test]
fn rule_10_tokenizer() {
    for (at, value) in [(64, u64::MAX), (72, u64::MAX), (72, 8832), (64, 8832)] {
        rejected(
            open(&u64_field(at, value)),
            &[FILE, "the tokenizer of", "beyond the 8832 bytes of the file"],
        );
    }
}

#[test]
fn rule_11_directory() {
    for value in [u64::MAX, 8832, 1 << 40] {
        rejected(
            open(&u64_field(80, value)),
            &[FILE, "the tensor directory of 768 bytes", "beyond the 8832"],
        );
    }
    rejected(open(&u32_field(88, u32::MAX)), &[FILE, "the tensor directory of 274877906880 bytes"]);
}

#[test]
fn rule_12_tensor_data() {
    for value in [8833, u64::MAX] {
        rejected(open(&u64_field(92, value)), &[FILE, "the tensor data", "beyond the 8832"]);
    }
    rejected(open(&u64_field(92, 961)), &[FILE, "the tensor data at 961", "no multiple of 64"]);
}

#[test]
fn rule_13_sections_inside_the_header() {
    for (at, name) in [(64, "tokenizer"), (80, "tensor directory"), (92, "tensor data")] {
        let parts = [FILE, name, "at 64 begins inside the header of 108 bytes"];
        rejected(open(&u64_field(at, 64)), &parts);
    }
    rejected(open(&u32_field(8, 120)), &[FILE, "the tokenizer at 108 begins inside the header of 120 bytes"]);
}

#[test]
fn rule_14_layers() {
    rejected(open(&u32_field(32, 2)), &[FILE, "2 layers need 20 tensors", "the directory has 12"]);
    rejected(open(&u32_field(32, u32::MAX)), &[FILE, "4294967295 layers need 38654705657 tensors"]);
}

#[test]
fn rule_15_heads() {
    rejected(open(&u32_field(44, 1 << 31)), &[FILE, "2 heads of 2147483648 elements"]);
    rejected(open(&u32_field(44, 3)), &[FILE, "head_dim is 3", "pairs"]);
}

/// As the file, with another name for a tensor.
fn renamed(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    with(bytes, entry(bytes, from), &hash(to).to_le_bytes())
}

#[test]
fn rule_34_required_tensors() {
    for name in ["tok_embeddings.weight", "norm.weight", "layers.0.w2.weight", "layers.0.attn_norm.weight"] {
        rejected(
            open(&renamed(&q8_0(), name, "other")),
            &[FILE, &format!("`{name}`"), "this tensor", "none"],
        );
    }
}

#[test]
fn rule_35_output_without_the_flag() {
    let parts = [FILE, "`output.weight`", "the flag of a tied output is not set"];
    rejected(open(&renamed(&q8_0(), "output.weight", "other")), &parts);
    let untied = with(&fixture_bytes("q4_0_tied"), 16, &[0]);
    rejected(open(&untied), &[FILE, "11 tensors, expected 12"]);
}

#[test]
fn rule_36_shapes() {
    let bytes = q8_0();
    let at = entry(&bytes, "layers.0.w1.weight");
    // [16, 8] as [8, 16]: as many bytes, another block.
    let dims = [8u32, 16].map(u32::to_le_bytes).concat();
    let transposed = with(&with(&bytes, at + 16, &dims), at + 56, &16u32.to_le_bytes());
    rejected(open(&transposed), &[FILE, "`layers.0.w1.weight`", "shape [16, 8]", "found [8, 16]"]);
    let other = u32_field(48, 32);
    rejected(open(&other), &[FILE, "expected shape [32, 8]", "found [16, 8]"]);
    let other = u32_field(44, 8);
    rejected(open(&other), &[FILE, "expected shape [16, 8]", "found [8, 8]"]);
}

#[test]
fn rule_37_tied_with_an_output_of_another_shape() {
    let tied = u32_field(16, 1);
    let file = open(&tied).unwrap();
    assert_eq!(file.checkpoint().config()["tie_word_embeddings"], true);
    let model = Model { hidden: 8, layers: 1, heads: 2, kv_heads: 2, head_dim: 4, ffn: 16, tied: true };
    let other = model.write(Kind::F32, &[("output.weight", &[520, 4])]).bytes;
    assert_eq!(u32_at(&other, entry(&other, "output.weight") + 16), 520);
    rejected(open(&other), &[FILE, "`output.weight`", "expected shape [260, 8]", "[520, 4]"]);
}

#[test]
fn rule_38_vocabulary_of_the_tokenizer() {
    // Behind the magic number and the version.
    let bytes = with(&q8_0(), 108 + 8, &261u32.to_le_bytes());
    rejected(open(&bytes), &[FILE, "the tokenizer has 261 tokens, the model 260"]);
    assert_eq!(open(&q8_0()).unwrap().checkpoint().config()["eos_token_id"], 257);
}

#[test]
fn rule_39_too_few_tensors() {
    // The last entry of the directory is that of w3; with the tie flag, 11 tensors are a model.
    rejected(open(&u32_field(88, 11)), &[FILE, "11 tensors, expected 12"]);
    rejected(open(&u32_field(88, 10)), &[FILE, "1 layers need 11 tensors", "the directory has 10"]);
}

/// Rule 40 asks that nothing that 64 bits can say is cut to what an address can: here, that it is refused.
#[test]
fn rule_40_numbers_beyond_addresses() {
    for at in [64, 72, 80, 92] {
        for value in [u64::MAX, 1 << 63, (1 << 32) + 1] {
            rejected(open(&u64_field(at, value)), &[FILE, "beyond the 8832 bytes of the file"]);
        }
    }
}

#[test]
fn strict_readings_refuse_what_lenient_ones_warn_of() {
    let bytes = q8_0();
    let wq = entry(&bytes, "layers.0.wq.weight");
    assert!(open_strictly(&bytes).is_ok());
    let mut longer = bytes.clone();
    longer.extend([0; 64]);
    let mut nonzero = bytes.clone();
    nonzero.push(1);
    let cases = [
        (u32_field(12, 2), "model type 2 is not known", true),
        (u32_field(16, 4), "flags 0x4 have bits that are not known", true),
        (with(&bytes, wq + 60, &[1]), "0 in the reserved field", false),
        (longer, "64 bytes behind the last tensor", false),
        (nonzero, "bytes behind the last tensor, expected less than 64 zeros", false),
    ];
    for (bytes, message, warns) in cases {
        rejected(open_strictly(&bytes), &[FILE, message]);
        let file = open(&bytes).unwrap();
        let warned = file.checkpoint().warnings().iter().any(|warning| warning.contains(message));
        assert_eq!(warned, warns, "{message}");
    }
    let grouped = fixture_bytes("q4_0_gqa_b32");
    rejected(open_strictly(&grouped), &[FILE, "kv_head_count is 2, expected the 4 of head_count"]);
    let wide = Model { hidden: 8, layers: 1, heads: 2, kv_heads: 2, head_dim: 8, ffn: 16, tied: false };
    let wide = wide.write(Kind::F32, &[]).bytes;
    rejected(open_strictly(&wide), &[FILE, "2 heads of 8 are not the hidden size 8"]);
    assert!(open(&wide).is_ok());
}

#[test]
fn small_vocabularies_are_odd() {
    let bytes = u32_field(20, 259);
    rejected(open_strictly(&bytes), &[FILE, "vocab_size is 259, expected at least 260"]);
    // And wrong in this file, whose embedding has 260 rows.
    rejected(open(&bytes), &[FILE, "expected shape [259, 8]"]);
}

#[test]
fn models_of_other_types_are_tensors_without_names() {
    let file = open(&u32_field(12, 7)).unwrap();
    let checkpoint = file.checkpoint();
    assert_eq!(checkpoint.config(), &Value::Null);
    assert_eq!(checkpoint.tensor_names().count(), 12);
    let name = format!("slm1.{:016x}", hash("norm.weight"));
    let norm = checkpoint.tensor(&name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    let named = open(&q8_0()).unwrap().checkpoint().dense("model.norm.weight").unwrap();
    let named = named.load(DType::F32, &Device::Cpu).unwrap();
    assert_eq!(norm.to_vec1::<f32>().unwrap(), named.to_vec1::<f32>().unwrap());
}

#[test]
fn tensors_beyond_the_model_are_reached_by_their_hashes() {
    let model = Model { hidden: 32, layers: 1, heads: 2, kv_heads: 2, head_dim: 16, ffn: 32, tied: false };
    let file = model.write(Kind::Q8, &[("extra", &[2, 3, 32]), ("matrix", &[4, 32])]);
    rejected(open_strictly(&file.bytes), &[FILE, "is not one of the model's"]);
    let opened = open(&file.bytes).unwrap();
    for name in ["extra", "matrix"] {
        let tensor = opened.checkpoint().tensor(&format!("slm1.{:016x}", hash(name)), None).unwrap();
        let tensor = tensor.to_dense(DType::F32, &Device::Cpu).unwrap();
        let (dims, values) = &file.values[name];
        assert_eq!(
            (tensor.dims(), tensor.flatten_all().unwrap().to_vec1().unwrap()),
            (&dims[..], values.clone())
        );
    }
}
