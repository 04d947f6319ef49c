//! What a GGUF file may look like: one test for each rule.

use crate::checkpoint::{rejected, warned};
use crate::writer::{f32_tensor, open, tensor, File, ARRAY, TEXT, U32};
use candle_core::{DType, Device};
use candle_quant::checkpoint::CheckpointKind;

const FILE: &str = "model.gguf";

fn norm() -> crate::writer::Tensor {
    f32_tensor("output_norm.weight", &[8], &[1.; 8])
}

#[test]
fn versions_2_and_3_are_read() {
    for version in [2, 3] {
        let file = File { version, ..File::llama().tensor(norm()) };
        assert_eq!(file.open().unwrap().kind(), CheckpointKind::Gguf);
    }
    for (version, parts) in
        [(1, "GGUF version 1"), (4, "GGUF version 4"), (3u32.swap_bytes(), "a big-endian GGUF file")]
    {
        let file = File { version, ..File::llama() };
        rejected(file.open(), &[FILE, parts, "not supported", "versions 2 and 3 are read"]);
    }
}

#[test]
fn truncated_files_are_refused() {
    let bytes = File::llama().tensor(norm()).bytes();
    for length in 4..bytes.len() {
        rejected(open(&bytes[..length]), &[FILE, "damaged or incomplete"]);
    }
    assert!(open(&bytes).is_ok());
    rejected(
        open(&bytes[..bytes.len() - 1]),
        &["`output_norm.weight`", "expected 32 bytes of F32 [8] within"],
    );
    rejected(open(&bytes[..3]), &[FILE, "too few for a safetensors file"]);
}

#[test]
fn counts_have_to_fit_the_file() {
    for (at, what) in [(8, "tensors"), (16, "values")] {
        for count in [u64::MAX, 1 << 60, 1 << 32, 1000] {
            let mut bytes = File::llama().tensor(norm()).bytes();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            rejected(open(&bytes), &[FILE, &format!("{count} {what} do not fit")]);
        }
    }
    for count in [u64::MAX, 1 << 61, 1 << 40] {
        for item in [0, U32, TEXT, 12] {
            let file = File::llama().array("a", item, count, &[]);
            rejected(file.open(), &[FILE, &format!("{count} elements of `a` do not fit")]);
        }
        let file = File::llama().value("a", TEXT, count.to_le_bytes().to_vec());
        rejected(file.open(), &[FILE, &format!("{count} bytes of the value of `a` do not fit")]);
    }
}

#[test]
fn strings_are_utf_8() {
    let invalid = [&2u64.to_le_bytes()[..], &[0xC3, 0x28]].concat();
    rejected(
        File::llama().value("a", TEXT, invalid.clone()).open(),
        &[FILE, "the value of `a` is not UTF-8"],
    );
    rejected(File::llama().array("a", TEXT, 1, &invalid).open(), &[FILE, "an element of `a` is not UTF-8"]);
    let mut file = File::llama();
    file.values.push((vec![0xFF], U32, vec![0; 4]));
    rejected(file.open(), &[FILE, "a key is not UTF-8"]);
    let mut bytes = File::of("qwen3").u32("qwen3.attention.head_count", 1).tensor(norm()).bytes();
    let at = bytes.windows(6).position(|window| window == b"output").unwrap();
    bytes[at] = 0xFF;
    rejected(open(&bytes), &[FILE, "a tensor's name is not UTF-8"]);
}

#[test]
fn arrays_are_flat() {
    let inner = [&U32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    rejected(File::llama().array("a", ARRAY, 1, &inner).open(), &[FILE, "`a` is an array of arrays"]);
}

#[test]
fn values_are_of_known_types() {
    rejected(File::llama().value("a", 13, vec![0; 8]).open(), &[FILE, "`a` has a value of unknown type 13"]);
    rejected(File::llama().array("a", 99, 0, &[]).open(), &[FILE, "`a` is an array of unknown type 99"]);
    rejected(File::llama().bool("a", 2).open(), &[FILE, "`a` is a bool of value", "2"]);
    for (kind, size) in
        [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (7, 1), (10, 8), (11, 8), (12, 8)]
    {
        let file = File::llama().value("a", kind, vec![0; size]).array("b", kind, 3, &vec![0; 3 * size]);
        assert!(file.tensor(norm()).open().is_ok(), "{kind}");
    }
}

#[test]
fn keys_and_names_come_once() {
    rejected(File::llama().u32("a", 1).u32("a", 1).open(), &[FILE, "the key `a` comes twice"]);
    let file = File::llama().tensor(norm()).tensor(norm());
    rejected(file.open(), &[FILE, "`output_norm.weight`", "each name once"]);
    // Two names for one thing.
    let file = File::llama()
        .tensor(f32_tensor("blk.0.attn_out.weight", &[2, 2], &[0.; 4]))
        .tensor(f32_tensor("blk.0.attn_output.weight", &[2, 2], &[0.; 4]));
    let parts =
        [FILE, "`blk.0.attn_output.weight`", "one tensor for `model.layers.0.self_attn.o_proj.weight`"];
    rejected(file.open(), &parts);
}

#[test]
fn dimensions_are_one_to_four_and_positive() {
    for (dims, found) in [(&[][..], "found 0"), (&[1; 5], "found 5"), (&[u64::MAX; 9], "found 9")] {
        let file = File::llama().tensor(tensor("x", dims, 0, vec![0; 64]));
        rejected(file.open(), &[FILE, "`x`", "one to four dimensions", found]);
    }
    for dims in [&[0][..], &[4, 0], &[0, 4]] {
        let file = File::llama().tensor(tensor("x", dims, 0, vec![0; 64]));
        rejected(file.open(), &[FILE, "`x`", "dimensions of one and more", &format!("{dims:?}")]);
    }
    for dims in [&[u64::MAX, 2][..], &[1 << 33, 1 << 33], &[1 << 62], &[1 << 30, 1 << 30, 1 << 30, 1 << 30]] {
        let file = File::llama().tensor(tensor("x", dims, 0, vec![0; 64]));
        rejected(file.open(), &[FILE, "`x`", "a size that fits 64 bits"]);
    }
}

#[test]
fn rows_are_whole_blocks() {
    for (type_id, elements, name) in
        [(2, 32, "Q4_0"), (12, 256, "Q4_K"), (39, 32, "MXFP4"), (40, 64, "NVFP4")]
    {
        let file = File::llama().tensor(tensor("x", &[2, elements / 2], type_id, vec![0; 4096]));
        rejected(file.open(), &[FILE, "`x`", &format!("rows of whole blocks of {elements}"), name]);
    }
}

#[test]
fn offsets_are_aligned_inside_and_apart() {
    let at = |offset| File::llama().tensor(crate::writer::Tensor { offset: Some(offset), ..norm() });
    for offset in [1, 8, 31] {
        rejected(
            at(offset).open(),
            &[FILE, "`output_norm.weight`", "a multiple of 32", &format!("found {offset}")],
        );
    }
    for offset in [32, 1 << 40, u64::MAX - 31] {
        rejected(
            at(offset).open(),
            &[FILE, "`output_norm.weight`", "within the", &format!("offset {offset}")],
        );
    }
    let overlapping = |offset| {
        let second = f32_tensor("y", &[16], &[0.; 16]);
        let first = f32_tensor("x", &[16], &[0.; 16]);
        File::llama().tensor(first).tensor(crate::writer::Tensor { offset: Some(offset), ..second }).open()
    };
    for offset in [0, 32] {
        rejected(overlapping(offset), &[FILE, "`y`", "behind those of `x`", "overlap"]);
    }
    assert!(overlapping(64).is_ok());
}

#[test]
fn alignment_is_a_power_of_two() {
    for alignment in [0, 3, 48] {
        let file = File::llama().u32("general.alignment", alignment).tensor(norm());
        rejected(file.open(), &[FILE, "`general.alignment` is", "a power of two"]);
    }
    rejected(File::llama().text("general.alignment", "32").open(), &["`general.alignment` is \"32\""]);
    for alignment in [8, 32, 256] {
        let file = File::llama().u32("general.alignment", alignment).tensor(norm()).tensor(f32_tensor(
            "y",
            &[1],
            &[3.],
        ));
        let checkpoint = File { alignment: alignment.into(), ..file }.open().unwrap();
        let y = checkpoint.dense("y").unwrap().load(DType::F32, &Device::Cpu).unwrap();
        assert_eq!(y.to_vec1::<f32>().unwrap(), [3.]);
    }
}

#[test]
fn sizes_are_sizes_and_the_same_in_all_layers() {
    let with = |key: &str, kind, bytes: &[u8]| {
        let mut file = File::llama();
        file.values.retain(|(name, _, _)| name != key.as_bytes());
        file.value(key, kind, bytes.to_vec()).open()
    };
    let key = "llama.embedding_length";
    rejected(with(key, 6, &[0; 4]), &[FILE, "`llama.embedding_length` is 0, expected a whole number"]);
    rejected(with(key, 5, &(-1i32).to_le_bytes()), &["`llama.embedding_length` is -1", "of 32 bits"]);
    rejected(with(key, 10, &[0xFF; 8]), &["`llama.embedding_length` is 18446744073709551615"]);
    let array = |values: &[i32]| {
        let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        [&5u32.to_le_bytes()[..], &(values.len() as u64 / 4).to_le_bytes(), &values].concat()
    };
    let key = "llama.attention.head_count_kv";
    assert_eq!(with(key, ARRAY, &array(&[2, 2])).unwrap().config()["num_key_value_heads"], 2);
    rejected(with(key, ARRAY, &array(&[2, 1])), &["head_count_kv` that differs from layer to layer"]);
    rejected(with(key, ARRAY, &array(&[])), &["head_count_kv` is an array of 0 elements"]);
    rejected(with("general.architecture", U32, &[0; 4]), &["`general.architecture` is 0", "a string"]);
    let mut headless = File::llama();
    headless.values.remove(1);
    rejected(headless.open(), &[FILE, "`llama.attention.head_count` is missing"]);
    rejected(
        File::llama().u32("llama.attention.key_length", 32).u32("llama.attention.value_length", 16).open(),
        &[FILE, "keys of 32 and values of 16"],
    );
}

#[test]
fn rows_of_queries_divide_into_heads() {
    for rows in [3, 6] {
        let file =
            File::llama().tensor(f32_tensor("blk.0.attn_q.weight", &[rows, 1], &vec![0.; rows as usize]));
        rejected(file.open(), &[FILE, "`blk.0.attn_q.weight`", "2 heads of an even number"]);
    }
    // Of a type that nobody knows, rows are not counted.
    let file = File::llama().tensor(tensor("blk.0.attn_q.weight", &[1 << 60, 1], 77, vec![]));
    rejected(file.open().unwrap().weight("model.layers.0.self_attn.q_proj", None), &["of type 77"]);
}

#[test]
fn unknown_architectures_keep_their_names() {
    let file = File::of("mamba").tensor(norm());
    let checkpoint = file.open().unwrap();
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["output_norm.weight"]);
    assert_eq!(checkpoint.config()["model_type"], "mamba");
    warned(&checkpoint, &[FILE, "`mamba` is not known"]);
    let mixtral = File::llama().u32("llama.expert_count", 8).open().unwrap();
    assert_eq!(mixtral.config()["model_type"], "mixtral");
    let mistral = File::llama().u32("llama.attention.sliding_window", 64).open().unwrap();
    assert_eq!(
        (&mistral.config()["model_type"], &mistral.config()["sliding_window"]),
        (&"mistral".into(), &64.into())
    );
}

#[test]
fn other_scalings_of_frequencies_reach_the_config() {
    let scaling = |file: File| file.open().unwrap().config()["rope_scaling"].clone();
    let linear = File::llama().text("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 2.);
    assert_eq!(scaling(linear), serde_json::json!({"rope_type": "linear", "factor": 2.0}));
    let old = File::llama().f32("llama.rope.scale_linear", 4.);
    assert_eq!(scaling(old), serde_json::json!({"rope_type": "linear", "factor": 4.0}));
    let yarn = File::llama().text("llama.rope.scaling.type", "yarn").f32("llama.rope.scaling.factor", 4.);
    assert_eq!(scaling(yarn)["rope_type"], "yarn");
    let partial = File::llama().u32("llama.rope.dimension_count", 16).open().unwrap();
    assert_eq!(partial.config()["partial_rotary_factor"], 0.5);
    let wrong = File::llama().text("llama.rope.scaling.factor", "much").open();
    rejected(wrong, &["`llama.rope.scaling.factor` is \"much\"", "a finite number"]);
}

#[test]
fn weights_are_checked_against_the_model() {
    let checkpoint =
        File::llama().tensor(tensor("output.weight", &[2, 64], 8, vec![0; 4 * 34])).open().unwrap();
    rejected(
        checkpoint.weight("lm_head", Some(32)),
        &[FILE, "`lm_head.weight`", "32 input features", "[2, 64]"],
    );
    rejected(checkpoint.dense("lm_head.weight"), &[FILE, "`lm_head.weight`", "a dense tensor", "Q8_0"]);
    rejected(checkpoint.weight("model.norm", None), &[FILE, "`model.norm.weight`", "found none"]);
    assert_eq!(checkpoint.config()["tie_word_embeddings"], false);
}
