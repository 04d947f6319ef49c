//! Damaged UQFF files load or are refused by an error of this crate that names a file; nothing panics.

use crate::checkpoint::{folder_of, raw_file};
use crate::uqff::{entry, f32s, file, layer, u32, u32s, u8, version, with, Entry, FAMILIES};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::{Error, Linear, Result};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{json, Value};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// Cases of each of the two kinds of damage.
const CASES: u32 = 12_000;

/// A layer of every family, and those whose groups run across rows or whose rows are filled up to whole groups; with its rows.
fn layers() -> Vec<(Vec<Entry>, usize)> {
    let ones = |count: usize| vec![0x11; count];
    let of_groups = |part: &str| f32s(&format!("m.weight.{part}"), &[1, 32], &[0.5; 32]);
    let hqq = vec![
        entry("m.weight", "U8", &[8, 32], ones(256)),
        of_groups("scales"),
        of_groups("zeros"),
        u32s("m.weight.shape", &[8, 64]),
        u32("m.weight.group_size", 16),
    ];
    let mut words = hqq.clone();
    words[0] = entry("m.weight", "I32", &[2, 32], ones(256));
    words.push(u8("m.weight.bits", 3));
    let f8q8 = vec![
        entry("m.weight", "U8", &[99], ones(99)),
        u32("m.weight.num_blocks", 3),
        u32s("m.weight.shape", &[2, 48]),
    ];
    let fp8 = vec![entry("m.weight", "F8_E4M3", &[2, 40], ones(80))];
    let irregular = [("HQQ", hqq, 8), ("HQQ", words, 8), ("F8Q8", f8q8, 2), ("FP8", fp8, 2)];
    let irregular = irregular.map(|(family, changes, rows)| (with(&layer(family), &changes), rows));
    FAMILIES.map(|family| (layer(family), 2)).into_iter().chain(irregular).collect()
}

/// A model of these layers, each with a bias, in two shards.
static SHARDS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    let mut entries: Vec<Entry> = version([1, 2, 0]);
    for (index, (layer, rows)) in layers().into_iter().enumerate() {
        let (dtype, bytes) = [("F8_E4M3", rows), ("BF16", 2 * rows)][index % 2];
        let bias = entry("m.bias", dtype, &[rows], vec![0x30; bytes]);
        let named =
            |(name, dtype, shape, bytes): Entry| (format!("{index}{}", &name[1..]), dtype, shape, bytes);
        entries.extend(layer.into_iter().chain([bias]).map(named));
    }
    let second = entries.split_off(entries.len() / 2);
    [file(&entries), file(&second)]
});

static CONFIG: &[u8] = br#"{"model_type":"qwen3"}"#;

/// Opens whatever is in `dir`, asks for all of it, and multiplies by what only its own kernels know.
fn open_and_load_everything(dir: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(dir)?;
    for module in checkpoint.modules() {
        let weight = checkpoint.weight(&module, None)?;
        let loaded = weight.load(&Device::Cpu)?;
        assert_eq!(loaded.dims(), weight.dims());
        assert_eq!(loaded.to_dense(DType::F32)?.dims(), weight.dims());
        let (Weight::Irregular(_), &[n, k]) = (&weight, weight.dims()) else {
            continue;
        };
        let x = Tensor::ones((2, k), DType::F32, &Device::Cpu)?;
        assert_eq!(Linear::new(loaded, None).forward(&x)?.dims(), [2, n]);
    }
    for name in checkpoint.tensor_names().filter(|name| !name.ends_with(".weight")) {
        checkpoint.dense(name)?.load(DType::F32, &Device::Cpu)?;
    }
    Ok(())
}

fn check(files: &[Vec<u8>; 2]) -> std::result::Result<(), TestCaseError> {
    // In memory where that is at hand: thousands of files on a disk take minutes.
    let memory = Path::new("/dev/shm");
    let dir = match memory.is_dir() {
        true => tempfile::tempdir_in(memory)?,
        false => tempfile::tempdir()?,
    };
    for (name, bytes) in [("x-0.uqff", &files[0][..]), ("x-1.uqff", &files[1]), ("config.json", CONFIG)] {
        fs::write(dir.path().join(name), bytes)?;
    }
    if let Err(error) = open_and_load_everything(dir.path()) {
        let unchecked = matches!(error, Error::Candle(_) | Error::Mismatch { .. });
        prop_assert!(!unchecked, "unchecked before use: {error}");
        prop_assert!(error.to_string().contains(dir.path().to_str().unwrap()), "no file named: {error}");
    }
    Ok(())
}

#[test]
fn undamaged_it_loads() {
    let dir = folder_of(&[("x-0.uqff", &SHARDS[0]), ("x-1.uqff", &SHARDS[1])]);
    open_and_load_everything(dir.path()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensor_names().count(), 22);
    // Each kind of weight is among what is damaged.
    let formats: Vec<_> =
        (0..11).map(|index| checkpoint.weight(&index.to_string(), None).unwrap().format_name()).collect();
    assert_eq!(
        formats,
        [
            "ggml Q8_0",
            "BF16",
            "F32",
            "mxfp8",
            "affine 4-bit g64",
            "symmetric 8-bit g32",
            "mxfp4",
            "affine 4-bit g16, across rows",
            "affine 3-bit g16, across rows",
            "symmetric 8-bit g32, filled",
            "fp8 g64, filled"
        ]
    );
}

fn settings() -> ProptestConfig {
    ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() }
}

/// A number that a header or a scalar may claim.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..70,
        Just(4096),
        Just(u64::from(u32::MAX)),
        Just(1 << 32),
        Just(u64::MAX / 2),
        Just(u64::MAX),
        any::<u64>()
    ]
}

proptest! {
    #![proptest_config(settings())]

    /// Bytes changed, put in, taken out, cut off.
    #[test]
    fn bytes_may_be_anything(
        which in 0usize..2,
        edits in prop::collection::vec((any::<Index>(), any::<u8>(), 0usize..5), 1..4),
    ) {
        let mut files = SHARDS.clone();
        let bytes = &mut files[which];
        for (at, value, kind) in edits {
            let at = at.index(bytes.len().max(1));
            match kind {
                _ if at >= bytes.len() => bytes.push(value),
                0 => bytes[at] = value,
                1 | 2 => bytes[at] ^= 1 << (value % 8),
                3 => bytes.insert(at, value),
                _ if value < 32 => bytes.truncate(at),
                _ => drop(bytes.remove(at)),
            }
        }
        check(&files)?;
    }

    /// Headers that are valid JSON and lie; entries whose bytes are other numbers.
    #[test]
    fn entries_may_claim_anything(
        which in 0usize..2,
        edits in prop::collection::vec((any::<Index>(), 0usize..8, number(), any::<Index>()), 1..3),
    ) {
        let mut files = SHARDS.clone();
        let length = u64::from_le_bytes(files[which][..8].try_into().unwrap()) as usize;
        let mut header: serde_json::Map<String, Value> =
            serde_json::from_slice(&files[which][8..8 + length]).unwrap();
        let mut data = files[which][8 + length..].to_vec();
        for (entry, kind, number, other) in edits {
            let names: Vec<String> = header.keys().filter(|name| *name != "__metadata__").cloned().collect();
            let name = &names[entry.index(names.len())];
            let info = &mut header[name];
            let [begin, end] = ["0", "1"].map(|i| info["data_offsets"][i.parse::<usize>().unwrap()].as_u64().unwrap());
            match kind {
                // Other numbers in an entry: scalars, shapes, the first of other data.
                0..=2 => {
                    let bytes = data.get_mut(begin as usize..end as usize).unwrap_or_default();
                    bytes.iter_mut().zip(number.to_le_bytes().into_iter().cycle()).for_each(|(to, from)| *to = from);
                }
                3 => {
                    let dtypes = ["U8", "I8", "F8_E4M3", "F8_E8M0", "BOOL", "U16", "BF16", "F16", "U32", "F32", "I64", "F4"];
                    info["dtype"] = dtypes[other.index(dtypes.len())].into();
                }
                // A shape of as many elements, or of any.
                4 => {
                    let shape = info["shape"].as_array().unwrap().clone();
                    let count: u64 = shape.iter().map(|dim| dim.as_u64().unwrap_or(1)).fold(1, u64::wrapping_mul);
                    info["shape"] = [json!([count]), json!([1, count]), json!([count, 1]), json!([2, count / 2]),
                        json!([1, 1, count]), json!([]), json!([number]), json!([number, count])][other.index(8)].clone();
                }
                5 => info["data_offsets"] = [json!([number, end]), json!([begin, number]), json!([end, begin])][other.index(3)].clone(),
                6 => drop(header.remove(name)),
                _ => {
                    let info = header.remove(name).unwrap();
                    let (key, suffix) = name.split_at(1); // all names are longer
                    let renamed = [format!("{}{suffix}", number % 10), format!("{key}.weight.format"), format!("{key}.bias"),
                        name.replace("weight", "bias"), "weight".to_owned()][other.index(5)].clone();
                    header.insert(renamed, info);
                }
            }
        }
        files[which] = raw_file(&Value::Object(header).to_string(), &data);
        check(&files)?;
    }
}
