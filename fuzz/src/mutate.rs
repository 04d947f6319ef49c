//! Changes that get past the first check: of numbers in JSON, of lengths, of single bytes.

use crate::Bundle;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Numbers at which arithmetic goes wrong.
const NUMBERS: [u64; 22] = [
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    31,
    32,
    33,
    64,
    127,
    128,
    255,
    256,
    65_535,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    1 << 62,
    i64::MAX as u64,
    u64::MAX,
];

/// Words that mean something to one reader or another.
const WORDS: [&str; 28] = [
    "null",
    "true",
    "-1",
    "1e300",
    "[]",
    "{}",
    "\"\"",
    "\"U32\"",
    "\"U8\"",
    "\"BF16\"",
    "\"F8_E4M3\"",
    "\"I64\"",
    "\"BOOL\"",
    "\"affine\"",
    "\"mxfp4\"",
    "\"nvfp4\"",
    "\"mxfp8\"",
    "weight",
    "scales",
    "biases",
    "global_scale",
    "model.layers.0.",
    "shape",
    "data_offsets",
    "../",
    "thesis.txt",
    "\"vocab\"",
    "{% for x in messages %}",
];

/// Types of the same width, which may stand for each other without a gap in the file.
const DTYPES: [&[&str]; 3] =
    [&["U32", "I32", "F32"], &["BF16", "F16", "I16"], &["U8", "F8_E4M3", "F8_E8M0", "I8", "BOOL"]];

/// Changes one to four things.
pub fn mutate(bundle: &mut Bundle, seed: u64) {
    let rng = &mut StdRng::seed_from_u64(seed);
    for _ in 0..[1, 1, 2, 4][rng.random_range(0..4)] {
        let count = bundle.files.len();
        if count == 0 {
            return;
        }
        let index = rng.random_range(0..count);
        if rng.random_ratio(1, 40) {
            mutate_files(bundle, index, rng);
        } else {
            let (name, content) = &mut bundle.files[index];
            match name.ends_with(".safetensors") || name.ends_with(".uqff") || is_safetensors(content) {
                true if rng.random_ratio(3, 4) => mutate_header(content, rng),
                _ => mutate_bytes(content, rng),
            }
        }
    }
}

/// A file is lost, comes twice, or has another's content or name.
fn mutate_files(bundle: &mut Bundle, index: usize, rng: &mut StdRng) {
    let other = rng.random_range(0..bundle.files.len());
    match rng.random_range(0..3) {
        0 => drop(bundle.files.remove(index)),
        1 => bundle.files[index].1 = bundle.files[other].1.clone(),
        _ => bundle.files[index].0 = bundle.files[other].0.clone(),
    }
}

fn is_safetensors(content: &[u8]) -> bool {
    content.get(8) == Some(&b'{') && header_length(content).is_some()
}

fn header_length(content: &[u8]) -> Option<usize> {
    let length = usize::try_from(u64::from_le_bytes(*content.first_chunk::<8>()?)).ok()?;
    (length <= content.len() - 8).then_some(length)
}

/// Changes the JSON in front of the data, and mostly keeps the length true.
fn mutate_header(content: &mut Vec<u8>, rng: &mut StdRng) {
    let Some(length) = header_length(content) else {
        return mutate_bytes(content, rng);
    };
    let mut header = content[8..8 + length].to_vec();
    if rng.random() {
        mutate_types(&mut header, rng);
    } else {
        mutate_text(&mut header, rng);
    }
    let data = content.split_off(8 + length);
    if rng.random_ratio(19, 20) {
        content[..8].copy_from_slice(&(header.len() as u64).to_le_bytes());
    }
    content.truncate(8);
    content.extend(header);
    content.extend(data);
}

/// Changes dtype, shape or name of a tensor such that its bytes are where they were.
fn mutate_types(header: &mut Vec<u8>, rng: &mut StdRng) {
    let Ok(text) = std::str::from_utf8(header) else {
        return mutate_bytes(header, rng);
    };
    let find = |part: &str, rng: &mut StdRng| {
        let starts: Vec<usize> = text.match_indices(part).map(|(start, _)| start).collect();
        (!starts.is_empty()).then(|| starts[rng.random_range(0..starts.len())])
    };
    let (start, length, new) = match rng.random_range(0..3) {
        0 => {
            let group = DTYPES[rng.random_range(0..DTYPES.len())];
            let mut any = || group[rng.random_range(0..group.len())];
            let (old, new) = (format!("\"{}\"", any()), format!("\"{}\"", any()));
            (find(&old, rng), old.len(), new)
        }
        1 => {
            const PARTS: [&str; 6] = [".weight", ".scales", ".biases", ".bias", "_proj", "norm"];
            let mut any = || PARTS[rng.random_range(0..PARTS.len())];
            let (old, new) = (any(), any().to_owned());
            (find(old, rng), old.len(), new)
        }
        _ => {
            let start = find("\"shape\":", rng).and_then(|at| Some(at + text[at..].find('[')? + 1));
            let dims = start.and_then(|start| text[start..].split(']').next()).unwrap_or_default();
            let mut new: Vec<u64> = dims.split(',').filter_map(|dim| dim.trim().parse().ok()).collect();
            match rng.random_range(0..3) {
                0 => new.push(1),
                1 if new.len() > 1 => {
                    let last = new.pop().unwrap_or(1);
                    let at = rng.random_range(0..new.len());
                    new[at] = new[at].wrapping_mul(last);
                }
                _ if !new.is_empty() => {
                    let (from, to) = (rng.random_range(0..new.len()), rng.random_range(0..new.len()));
                    if new[from].is_multiple_of(2) {
                        new[from] /= 2;
                        new[to] = new[to].wrapping_mul(2);
                    }
                }
                _ => {}
            }
            let new = new.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            (start, dims.len(), new)
        }
    };
    if let Some(start) = start {
        header.splice(start..start + length, new.into_bytes());
    }
}

/// Replaces a number or a word, or copies a part elsewhere.
fn mutate_text(text: &mut Vec<u8>, rng: &mut StdRng) {
    let starts: Vec<usize> = (0..text.len())
        .filter(|&i| text[i].is_ascii_digit() && (i == 0 || !text[i - 1].is_ascii_digit()))
        .collect();
    match rng.random_range(0..4) {
        0 | 1 if !starts.is_empty() => {
            let start = starts[rng.random_range(0..starts.len())];
            let digits = text[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            let old = std::str::from_utf8(&text[start..start + digits]).ok().and_then(|old| old.parse().ok());
            let number = match (rng.random_range(0..4), old) {
                (0, Some(old)) => u64::wrapping_add(old, 1),
                (1, Some(old)) => u64::wrapping_mul(old, 2),
                (2, Some(old)) => old / 2,
                _ => NUMBERS[rng.random_range(0..NUMBERS.len())],
            };
            text.splice(start..start + digits, number.to_string().into_bytes());
        }
        2 => {
            let at = rng.random_range(0..=text.len());
            let word = WORDS[rng.random_range(0..WORDS.len())].as_bytes();
            let end = (at + word.len()).min(text.len());
            text.splice(at..end, word.iter().copied());
        }
        _ => mutate_bytes(text, rng),
    }
}

/// Changes bytes or numbers in little-endian order, copies, cuts or repeats.
fn mutate_bytes(bytes: &mut Vec<u8>, rng: &mut StdRng) {
    let length = bytes.len();
    if length == 0 {
        bytes.push(rng.random());
        return;
    }
    // Headers are at the front: half of all changes are in the first kilobytes.
    let reach = if rng.random() { length } else { length.min(2048) };
    let at = rng.random_range(0..reach);
    match rng.random_range(0..8) {
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes[at] = rng.random(),
        2 | 3 => {
            let number = NUMBERS[rng.random_range(0..NUMBERS.len())].to_le_bytes();
            let width = [1, 2, 4, 8][rng.random_range(0..4)].min(length - at);
            bytes[at..at + width].copy_from_slice(&number[..width]);
        }
        4 => {
            let from = rng.random_range(0..reach);
            let width = rng.random_range(1..=64).min(length - at.max(from));
            bytes.copy_within(from..from + width, at);
        }
        5 => bytes.truncate(at),
        6 => drop(bytes.drain(at..(at + rng.random_range(1..=16)).min(length))),
        _ => {
            let part: Vec<u8> = bytes[at..(at + rng.random_range(1..=64)).min(length)].to_vec();
            bytes.splice(at..at, part);
        }
    }
}
