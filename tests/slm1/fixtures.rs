//! The fixtures: every tensor bit for bit, and the files that are wrong.

use crate::checkpoint::{rejected, warned};
use crate::{fixture, fixture_bytes, hash, open, open_strictly, sha256};
use candle_core::{DType, Device};
use candle_quant::checkpoint::slm1::{self, Slm1Options, TokenizerKind, Verification};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use candle_quant::QuantFormat;
use serde_json::{json, Value};
use std::fs;

const FIXTURES: [&str; 5] = ["f32", "q8_0", "q4_0", "q4_0_tied", "q4_0_gqa_b32"];

fn expected() -> Value {
    let path = fixture("f32").with_file_name("expected.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The name that models ask for.
pub fn model_name(name: &str) -> String {
    [
        ("tok_embeddings", "model.embed_tokens"),
        ("output", "lm_head"),
        ("layers.", "model.layers."),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("wq", "self_attn.q_proj"),
        ("wk", "self_attn.k_proj"),
        ("wv", "self_attn.v_proj"),
        ("wo", "self_attn.o_proj"),
        ("w1", "mlp.gate_proj"),
        ("w2", "mlp.down_proj"),
        ("w3", "mlp.up_proj"),
    ]
    .iter()
    .fold(
        if name == "norm.weight" { "model.norm.weight".into() } else { name.to_owned() },
        |name, (from, to)| name.replace(from, to),
    )
}

/// The values of a tensor in the order of the file: rows of queries and keys as pairs that are rotated together.
pub fn values_as_stored(checkpoint: &Checkpoint, name: &str, head_dim: usize) -> Vec<f32> {
    let tensor = checkpoint.tensor(&model_name(name), None).unwrap();
    let values =
        tensor.to_dense(DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    if !name.contains("wq") && !name.contains("wk") {
        return values;
    }
    let cols = tensor.dims()[1];
    let row = |row: usize| &values[row * cols..(row + 1) * cols];
    let stored = (0..values.len() / cols).flat_map(|index| {
        let (head, within) = (index / head_dim, index % head_dim);
        row(head * head_dim + within / 2 + within % 2 * head_dim / 2)
    });
    stored.copied().collect()
}

#[test]
fn every_tensor_has_the_values_of_the_writer() {
    let expected = expected();
    for name in FIXTURES {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        assert_eq!((checkpoint.kind(), checkpoint.kind().to_string()), (CheckpointKind::Slm1, "SLM1".into()));
        let tensors = expected[name].as_object().unwrap();
        assert_eq!(checkpoint.tensor_names().count(), tensors.len(), "{name}");
        let head_dim = checkpoint.config()["head_dim"].as_u64().unwrap() as usize;
        for (tensor, expected) in tensors {
            let weight = checkpoint.tensor(&model_name(tensor), None).unwrap();
            assert_eq!(json!(weight.dims()), expected["shape"], "{name} {tensor}");
            let values = values_as_stored(&checkpoint, tensor, head_dim);
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let sha256: String = sha256(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(sha256, expected["sha256"], "{name} {tensor}");
        }
    }
}

#[test]
fn blocks_of_32_stay_packed() {
    let checkpoint = Checkpoint::open(fixture("q4_0_gqa_b32")).unwrap();
    for module in checkpoint.modules() {
        match checkpoint.weight(&module, None).unwrap() {
            Weight::Packed(packed) => {
                assert_eq!(packed.format(), QuantFormat::symmetric(4, 32).unwrap(), "{module}");
                let tensor = packed.load(&Device::Cpu).unwrap();
                assert!(tensor.biases().is_none() && tensor.scales().dtype() == DType::F32);
                assert_eq!(tensor.size_in_bytes(), packed.size_in_bytes());
            }
            Weight::Dense(dense) => assert!(dense.dims().len() == 1 && module.contains("norm"), "{module}"),
            other => panic!("{other:?}"),
        }
    }
    // Others are dequantized, which is said once.
    let checkpoint = Checkpoint::open(fixture("q4_0")).unwrap();
    assert!(matches!(checkpoint.weight("lm_head", Some(8)).unwrap(), Weight::Dense(_)));
    let warnings = checkpoint.warnings();
    assert_eq!(
        warnings.iter().filter(|warning| warning.contains("dequantized when they are loaded")).count(),
        1
    );
}

#[test]
fn the_config_is_that_of_the_header() {
    let checkpoint = Checkpoint::open(fixture("q4_0_gqa_b32")).unwrap();
    assert_eq!(checkpoint.config_file(), fixture("q4_0_gqa_b32"));
    let config = checkpoint.config().clone();
    let expected = json!({
        "model_type": "llama", "vocab_size": 260, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "bos_token_id": 256, "eos_token_id": 257,
    });
    assert_eq!(config, expected);
    assert_eq!(Checkpoint::open(fixture("q4_0_tied")).unwrap().config()["tie_word_embeddings"], true);
}

#[test]
fn the_tokenizer_is_kept() {
    let file = slm1::open(fixture("q8_0"), &Slm1Options::default()).unwrap();
    assert_eq!(file.tokenizer_kind(), Some(TokenizerKind::Btok));
    assert_eq!(file.tokenizer_bytes(), &fixture_bytes("q8_0")[108..136]);
    let other = |magic: &[u8; 4]| open(&crate::with(&fixture_bytes("q8_0"), 108, magic)).unwrap();
    assert_eq!(other(b"BPE1").tokenizer_kind(), Some(TokenizerKind::Bpe1));
    assert_eq!(other(b"XYZ\0").tokenizer_kind(), Some(TokenizerKind::Unknown(*b"XYZ\0")));
    assert_eq!(other(b"XYZ\0").checkpoint().config()["eos_token_id"], Value::Null);
    let none = crate::with(&fixture_bytes("q8_0"), 72, &[0; 8]);
    assert_eq!(open(&none).unwrap().tokenizer_kind(), None);
}

#[test]
fn nothing_counts_as_verified_that_was_not() {
    let bytes = fixture_bytes("f32");
    let file = open(&bytes).unwrap();
    assert_eq!(file.verification(), Verification::Unverified);
    warned(file.checkpoint(), &["model.slm", "nothing was compared with the content", "not published"]);
    let file = open_strictly(&bytes).unwrap();
    assert_eq!(file.verification(), Verification::Verified);
    assert!(file.checkpoint().warnings().is_empty());
    rejected(
        crate::open_with(&bytes, &Slm1Options { strict: true, ..Slm1Options::default() }),
        &["model.slm", "nothing to verify the file with"],
    );
}

#[test]
fn wrong_files_are_refused() {
    let cases = [
        ("short_file", &["100 bytes are too few"][..]),
        ("version2", &["version 2 of SLM1", "not supported"]),
        ("checksum_zero", &["the checksum is 0"]),
        ("layer_count_bomb", &["4294967295 layers need 38654705657 tensors"]),
        ("tensor_count_max", &["the tensor directory of 274877906880 bytes", "beyond the 8832 bytes"]),
        ("dtype4", &["`layers.0.wq.weight`", "dtype 4"]),
        ("payload_past_eof", &["`layers.0.wq.weight`", "payload of 64 bytes", "offset 18446744073709551552"]),
        ("q4_block_odd", &["`layers.0.wq.weight`", "an even number of elements that divides 8", "found 3"]),
        ("duplicate_hash", &["`layers.0.wq.weight`", "each hash of a name once"]),
        ("scale_nan", &["`layers.0.wq.weight`", "finite scales above zero", "NaN"]),
    ];
    for (name, parts) in cases {
        rejected(Checkpoint::open(fixture(&format!("bad/{name}"))), parts);
    }
    assert_eq!(fs::read_dir(fixture("bad/dtype4").parent().unwrap()).unwrap().count(), cases.len());
}

#[test]
fn the_published_size_is_that_of_the_fixture() {
    assert_eq!(fixture_bytes("f32").len(), 20_352);
    assert_eq!(hash("tok_embeddings.weight"), 0x771ef68a9b91c762);
}
