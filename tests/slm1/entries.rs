//! The rules on tensors, by their numbers in the format's list.

use crate::checkpoint::rejected;
use crate::{entry, fixture_bytes, open, open_strictly, u64_at, with};
use candle_quant::checkpoint::slm1::Slm1;
use candle_quant::Result;

const FILE: &str = "model.slm";
const WQ: &str = "layers.0.wq.weight";

/// Opens a fixture with other bytes in the entry of a tensor.
fn patched(fixture: &str, tensor: &str, at: usize, patch: &[u8]) -> Result<Slm1> {
    let bytes = fixture_bytes(fixture);
    open(&with(&bytes, entry(&bytes, tensor) + at, patch))
}

/// Of the tensor wq, [8, 8].
#[track_caller]
fn refused(fixture: &str, at: usize, patch: &[u8], parts: &[&str]) {
    rejected(patched(fixture, WQ, at, patch), &[&[FILE, "`layers.0.wq.weight`"], parts].concat());
}

fn u32s<const N: usize>(numbers: [u32; N]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

#[test]
fn rule_16_duplicates() {
    let bytes = fixture_bytes("q8_0");
    let other = bytes[entry(&bytes, WQ)..][..8].to_vec();
    rejected(
        patched("q8_0", "layers.0.wv.weight", 0, &other),
        &[FILE, "`layers.0.wq.weight`", "each hash", "twice"],
    );
}

#[test]
fn rule_17_dtypes() {
    for dtype in [0, 4, u32::MAX] {
        refused(
            "q8_0",
            8,
            &u32s([dtype]),
            &["dtype 1 (f32), 2 (q8_0) or 3 (q4_0)", &format!("dtype {dtype}")],
        );
    }
}

#[test]
fn rule_18_ranks() {
    for rank in [0, 5, u32::MAX] {
        refused("q8_0", 12, &u32s([rank]), &["a rank of 1 to 4", &format!("found {rank}")]);
    }
}

#[test]
fn rule_19_zero_dimensions() {
    refused("q8_0", 16, &u32s([0]), &["dimensions of one and more", "[0, 8]"]);
    refused("q8_0", 20, &u32s([0]), &["dimensions of one and more", "[8, 0]"]);
}

#[test]
fn rule_20_unused_dimensions() {
    refused("q8_0", 24, &u32s([2]), &["0 or 1 behind the 2 dimensions", "[8, 8, 2, 0]"]);
    refused("q8_0", 28, &u32s([8]), &["0 or 1 behind the 2 dimensions"]);
    assert!(patched("q8_0", WQ, 24, &u32s([1, 1])).is_ok());
}

#[test]
fn rule_21_sizes_that_overflow() {
    refused("q8_0", 12, &u32s([4, u32::MAX, u32::MAX, u32::MAX, u32::MAX]), &["a size that fits 64 bits"]);
    refused("f32", 12, &u32s([2, 1 << 31, 1 << 31, 0, 0]), &["a size that fits 64 bits"]);
}

#[test]
fn rule_22_payloads_beyond_the_end() {
    for offset in [8832, 8832 - 63, u64::MAX, u64::MAX - 63, 1 << 40] {
        refused(
            "q8_0",
            32,
            &offset.to_le_bytes(),
            &["payload of 64 bytes", "8832", &format!("offset {offset}")],
        );
    }
}

#[test]
fn rule_23_payloads_before_the_data() {
    let data = u64_at(&fixture_bytes("q8_0"), 92);
    for offset in [0, 128, data - 64] {
        refused(
            "q8_0",
            32,
            &offset.to_le_bytes(),
            &["payload of 64 bytes from", &format!("offset {offset}")],
        );
    }
}

#[test]
fn rule_24_lengths() {
    for (fixture, right) in [("f32", 256), ("q8_0", 64), ("q4_0", 32)] {
        for length in [0, right - 1, right + 1, u64::MAX] {
            let parts = [&format!("{right} bytes for its shape")[..], &format!("found {length}")];
            refused(fixture, 40, &length.to_le_bytes(), &parts);
        }
    }
}

#[test]
fn rule_25_blocks_of_8_bit_rows() {
    for block in [0, 4, 16, u32::MAX] {
        refused("q8_0", 56, &u32s([block]), &["blocks of whole rows, 8", &format!("found {block}")]);
    }
}

#[test]
fn rule_26_blocks_of_4_bit_rows() {
    for block in [0, 1, 3, 6, 16, u32::MAX] {
        let parts = ["blocks of an even number of elements that divides 8", &format!("found {block}")];
        refused("q4_0", 56, &u32s([block]), &parts);
    }
    // Of f32 tensors it is ignored.
    assert!(patched("f32", WQ, 56, &u32s([3])).is_ok());
}

#[test]
fn rule_27_odd_rows() {
    refused("q4_0", 20, &u32s([7]), &["an even number of 4-bit elements", "found 7"]);
}

#[test]
fn rule_28_missing_scales() {
    for fixture in ["q8_0", "q4_0"] {
        refused(fixture, 48, &[0; 8], &["an array of scales", "its offset is 0"]);
    }
    assert!(patched("f32", WQ, 48, &[9; 8]).is_ok());
}

#[test]
fn rule_29_scales_beyond_the_end() {
    // 8 scales: the first of them inside.
    for offset in [8832 - 4, 8832 - 28, 8832, u64::MAX - 3] {
        refused(
            "q8_0",
            48,
            &offset.to_le_bytes(),
            &["scales of 32 bytes", "8832", &format!("offset {offset}")],
        );
    }
}

#[test]
fn rule_30_scales_in_header_or_directory() {
    for offset in [4, 64, 192, 512] {
        refused(
            "q8_0",
            48,
            &u64::to_le_bytes(offset),
            &["scales of 32 bytes from", &format!("offset {offset}")],
        );
    }
}

#[test]
fn rule_31_overlaps() {
    let bytes = fixture_bytes("q8_0");
    let at = |name: &str, field: usize| u64_at(&bytes, entry(&bytes, name) + field);
    let wk = "layers.0.wk.weight";
    let overlap = |tensor: &str, field, value: u64| patched("q8_0", tensor, field, &value.to_le_bytes());
    // Payload and payload, payload and scales, scales and scales.
    rejected(overlap(wk, 32, at(WQ, 32)), &[FILE, "wq.weight`", "wk.weight`", "overlap"]);
    rejected(
        overlap(wk, 32, at(WQ, 48)),
        &[FILE, "the scales of `layers.0.wq.weight`", "wk.weight`", "overlap"],
    );
    rejected(
        overlap(wk, 48, at(WQ, 48) + 4),
        &[FILE, "the scales of `layers.0.wk.weight`", "overlap the scales"],
    );
    // Sections: the tokenizer on the directory, the directory behind it on the data.
    let tokenizer = with(&bytes, 72, &100u64.to_le_bytes());
    rejected(open(&tokenizer), &[FILE, "the tensor directory at 192..960 overlap the tokenizer at 108..208"]);
    let data = with(&bytes, 92, &128u64.to_le_bytes());
    let inside = with(&data, entry(&data, WQ) + 32, &192u64.to_le_bytes());
    rejected(open(&inside), &[FILE, "`layers.0.wq.weight`", "overlap", "the tensor directory"]);
}

#[test]
fn rule_32_scales_are_positive() {
    for fixture in ["q8_0", "q4_0"] {
        let bytes = fixture_bytes(fixture);
        let last = u64_at(&bytes, entry(&bytes, WQ) + 48) as usize + 28;
        for value in [f32::NAN, f32::INFINITY, 0., -0., -1.] {
            let parts = [FILE, "`layers.0.wq.weight`", "finite scales above zero", &format!("found {value}")];
            rejected(open(&with(&bytes, last, &value.to_le_bytes())), &parts);
        }
    }
}

#[test]
fn rule_33_values_are_finite_if_read_strictly() {
    let bytes = fixture_bytes("f32");
    let at = u64_at(&bytes, entry(&bytes, WQ) + 32) as usize + 252;
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let bytes = with(&bytes, at, &value.to_le_bytes());
        rejected(
            open_strictly(&bytes),
            &[FILE, "`layers.0.wq.weight`", "finite values", &format!("found {value}")],
        );
        assert!(open(&bytes).is_ok());
    }
}

#[test]
fn places_are_aligned_if_read_strictly() {
    let file = crate::writer::Model {
        hidden: 8,
        layers: 1,
        heads: 2,
        kv_heads: 2,
        head_dim: 4,
        ffn: 16,
        tied: false,
    };
    let bytes = file.write(crate::writer::Kind::Q8, &[]).bytes;
    assert!(open_strictly(&bytes).is_ok());
    let at = entry(&bytes, "layers.0.wk.weight");
    // Before and behind what is moved there is padding; scales have to stay scales.
    for (field, size, by, message) in
        [(32, 64, -4, "begins at no multiple of 64"), (48, 32, 2, "begin at no multiple of 4")]
    {
        let from = u64_at(&bytes, at + field) as usize;
        let to = from.checked_add_signed(by).unwrap();
        let moved =
            with(&with(&bytes, to, &bytes[from..from + size]), at + field, &(to as u64).to_le_bytes());
        rejected(open_strictly(&moved), &[FILE, "`layers.0.wk.weight`", message]);
        let warnings = open(&moved).unwrap().checkpoint().warnings();
        assert!(warnings.iter().any(|warning| warning.contains(message)), "{warnings:?}");
    }
    let directory = with(&bytes, 80, &(u64_at(&bytes, 80) - 8).to_le_bytes());
    rejected(open_strictly(&directory), &[FILE, "the tensor directory at 184 begins at no multiple of 64"]);
}
