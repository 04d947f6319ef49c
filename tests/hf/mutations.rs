//! Damaged checkpoints of every layout: whatever the file and the config say, opening and loading end in
//! numbers or in one of the crate's own errors.

use crate::hf::{case_of, compressed, entry, f32s, noise, state, Case, Entry};
use candle_core::{DType, Device};
use candle_quant::checkpoint::Checkpoint;
use candle_quant::{Error, Result};
use serde_json::{json, Value};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// For each layout.
const MUTATIONS: usize = 2_100;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % bound
    }

    fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

const DTYPES: [(&str, usize); 13] = [
    ("U8", 1),
    ("I8", 1),
    ("BOOL", 1),
    ("F8_E4M3", 1),
    ("F8_E8M0", 1),
    ("F16", 2),
    ("BF16", 2),
    ("I16", 2),
    ("U32", 4),
    ("I32", 4),
    ("F32", 4),
    ("I64", 8),
    ("F64", 8),
];

const NAMES: [&str; 33] = [
    "weight",
    "scales",
    "biases",
    "bias",
    "qweight",
    "qzeros",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4",
    "SCB",
    "W_q",
    "zero",
    "axis",
    "nbits",
    "group_size",
    "pre_quant_scale",
    "scale",
    "global_scale",
    "gate_up_proj_blocks",
    "gate_up_proj_scales",
    "gate_up_proj_bias",
    "input_scale",
];

fn size_of(dtype: &str) -> usize {
    DTYPES.iter().find(|(name, _)| *name == dtype).unwrap().1
}

/// Makes the data as long as dtype and shape say.
fn resize(entry: &mut Entry) {
    let count: usize = entry.2.iter().product();
    let old = entry.3.clone();
    entry.3 =
        old.iter().copied().cycle().take(if old.is_empty() { 0 } else { count * size_of(entry.1) }).collect();
    entry.3.resize(count * size_of(entry.1), 1);
}

/// Changes what the file says of its tensors; it stays a valid file.
fn change_tensors(entries: &mut Vec<Entry>, random: &mut Random) {
    let index = random.below(entries.len());
    match random.below(8) {
        0 => {
            entries.remove(index);
        }
        1 => {
            let module = entries[index].0.split(['.', '_']).next().unwrap().to_owned();
            let name = format!("{module}{}{}", random.of(&[".", "_", ""]), random.of(&NAMES));
            if entries.iter().all(|entry| entry.0 != name) {
                let mut entry = entries[index].clone();
                entry.0 = name;
                if random.below(2) == 0 {
                    entries.remove(index);
                }
                entries.push(entry);
            }
        }
        2 | 3 => {
            let entry = &mut entries[index];
            entry.1 = random.of(&DTYPES).0;
            resize(entry);
        }
        4 => {
            // The same bytes by another name.
            let entry = &mut entries[index];
            let size = size_of(entry.1);
            let same: Vec<_> = DTYPES.iter().filter(|dtype| dtype.1 == size).collect();
            entry.1 = random.of(&same).0;
        }
        kind => {
            let entry = &mut entries[index];
            let place = random.below(entry.2.len() + 1);
            match (kind, entry.2.get_mut(place)) {
                (5, Some(dim)) => *dim = *random.of(&[0, 1, 2, 3, 7, 8, 16, 31, 32, 64, 65, 128]),
                (6, Some(_)) => {
                    entry.2.remove(place);
                }
                (7, Some(_)) => entry.2.reverse(),
                _ => entry.2.insert(place, *random.of(&[0, 1, 2, 16])),
            }
            resize(entry);
        }
    }
}

/// Every place in a JSON value.
fn places(value: &Value, path: &str, all: &mut Vec<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            all.push(format!("{path}/{key}"));
            places(value, &format!("{path}/{key}"), all);
        }),
        Value::Array(array) => array.iter().enumerate().for_each(|(index, value)| {
            all.push(format!("{path}/{index}"));
            places(value, &format!("{path}/{index}"), all);
        }),
        _ => {}
    }
}

/// Replaces one value of the settings.
fn change_settings(settings: &mut Value, random: &mut Random) {
    let mut all = vec!["/scale_fmt".to_owned(), "/weight_block_size".to_owned(), "/quantization".to_owned()];
    places(settings, "", &mut all);
    let most = u64::MAX;
    let values = json!([
        [null, true, false, 0, 1, 2, 3, 4, 8, 16, 32, 64, 128, -1, 1.5, 1e300, most],
        ["", "int", "float", "ue8m0", "gemm", "awq", "fp8", "mxfp4", "mxfp8", "modelopt", "NVFP4"],
        ["compressed-tensors", "MIXED_PRECISION", "pack-quantized", "nvfp4-pack-quantized"],
        [[], [1], [1, 32], [128, 128], [0, 0], [most, most], {}, {"weights": {}}, {"quant_algo": "NVFP4"}],
    ]);
    let values: Vec<&Value> =
        values.as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap()).collect();
    let value = (*random.of(&values)).clone();
    let path = random.of(&all).clone();
    let (parent, key) = path.rsplit_once('/').unwrap();
    match settings.pointer_mut(parent) {
        Some(Value::Object(object)) => {
            object.insert(key.to_owned(), value);
        }
        Some(Value::Array(array)) => array[key.parse::<usize>().unwrap()] = value,
        _ => unreachable!("{path}"),
    }
}

fn change_bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    // Mostly in the header, where bytes have a meaning.
    let end = if random.below(4) == 0 { bytes.len() } else { bytes.len().min(300) };
    let at = random.below(end);
    match random.below(5) {
        0 => bytes.truncate(at),
        1 => bytes[at] ^= 1 << random.below(8),
        2 => bytes[at] = b'0' + random.below(10) as u8,
        3 => bytes[at] = random.below(256) as u8,
        _ => {
            bytes.remove(at);
        }
    }
}

/// Loads everything; how many loads gave numbers and how many an error.
fn load_all(dir: &Path, errors: &mut BTreeSet<String>) -> (usize, usize) {
    let mut counts = (0, 0);
    let mut count = |result: Result<()>| match result {
        Ok(()) => counts.0 += 1,
        Err(error) => {
            assert!(!matches!(error, Error::Candle(_)), "{error}");
            let message = error.to_string();
            assert!(message.contains(".json") || message.contains(".safetensors"), "{message}");
            counts.1 += 1;
            errors.insert(message.replace(&dir.display().to_string(), ""));
        }
    };
    let checkpoint = match Checkpoint::open(dir) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            count(Err(error));
            return counts;
        }
    };
    for name in checkpoint.tensor_names() {
        for k in [None, Some(64)] {
            count(checkpoint.tensor(name, k).and_then(|tensor| {
                let dequantized = tensor.to_dense(DType::F32, &Device::Cpu)?;
                assert_eq!(dequantized.dims(), tensor.dims(), "{name}");
                Ok(())
            }));
        }
        count(checkpoint.dense(name).and_then(|dense| {
            assert_eq!(dense.load(dense.dtype(), &Device::Cpu)?.dims(), dense.dims(), "{name}");
            Ok(())
        }));
    }
    counts
}

/// Counts of [`load_all`] over all mutations of a layout.
fn mutate(case: &Case, beside: Option<&str>, seed: u64, errors: &mut BTreeSet<String>) -> (usize, usize) {
    let (mut random, mut totals, dir) = (Random(seed), (0, 0), tempfile::tempdir().unwrap());
    for index in 0..MUTATIONS {
        let (mut entries, mut quantization) = (case.entries.clone(), case.quantization.clone());
        if index % 3 != 1 {
            for _ in 0..=random.below(2) {
                if !entries.is_empty() {
                    change_tensors(&mut entries, &mut random);
                }
            }
        } else {
            change_settings(&mut quantization, &mut random);
        }
        let mut files = match beside {
            None => crate::hf::files(&quantization, &entries).to_vec(),
            Some(name) => crate::hf::files_beside(Some((name, &quantization)), &json!({}), &entries).to_vec(),
        };
        if index % 6 == 2 {
            let changed = random.below(files.len());
            change_bytes(&mut files[changed].1, &mut random);
        }
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        let counts = load_all(dir.path(), errors);
        totals = (totals.0 + counts.0, totals.1 + counts.1);
    }
    totals
}

/// Rows that are no whole groups, and one scale for all.
fn narrow_rows() -> [Case; 5] {
    let with = |name: &str, changes: &[Entry]| {
        let case = case_of(name);
        Case { entries: crate::hf::with(&case.entries, changes), ..case }
    };
    let blocks = |shape: [usize; 2]| {
        let changes = [
            entry("m.weight.absmax", "U8", &[16], noise(16, 29)),
            f32s("m.weight.nested_absmax", &[8], &[0.5; 8]),
            state(&json!({
                "quant_type": "nf4", "blocksize": 64, "shape": shape, "nested_blocksize": 2, "nested_offset": 0.5,
            })),
        ];
        with("bitsandbytes 4", &changes)
    };
    let bytes = entry("m.weight", "I8", &[8, 20], noise(160, 30));
    let one =
        [entry("m.weight_scale", "F16", &[1], [0, 0x2c]), entry("m.weight_zero_point", "I8", &[1], [0])];
    let mut tensor = with("int-quantized", &one);
    tensor.quantization =
        compressed("int-quantized", json!({"num_bits": 8, "type": "int", "strategy": "tensor"}));
    [
        blocks([64, 16]),
        blocks([128, 8]),
        with("bitsandbytes 8", std::slice::from_ref(&bytes)),
        with("int-quantized", &[bytes]),
        tensor,
    ]
}

#[test]
fn damage_is_an_error_or_numbers() {
    let mut cases: Vec<_> = crate::hf::cases().into_iter().map(|case| (case, None)).collect();
    assert!(MUTATIONS * cases.len() >= 20_000);
    // Settings in files of AutoGPTQ's and AutoAWQ's own.
    let mut awq = case_of("awq");
    awq.quantization = json!({"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM"});
    let mut gptq = case_of("gptq");
    gptq.quantization.as_object_mut().unwrap().remove("quant_method");
    cases.extend([(awq, Some("quant_config.json")), (gptq, Some("quantize_config.json"))]);
    cases.extend(narrow_rows().map(|case| (case, None)));
    std::thread::scope(|scope| {
        for ((case, beside), seed) in cases.iter().zip(1..) {
            scope.spawn(move || {
                let mut errors = BTreeSet::new();
                let (loaded, refused) = mutate(case, *beside, seed, &mut errors);
                assert!(loaded > MUTATIONS / 5, "{}: {loaded} loaded", case.name);
                assert!(refused > MUTATIONS / 2, "{}: {refused} refused", case.name);
                assert!(errors.len() > 100, "{}: {} errors", case.name, errors.len());
            });
        }
    });
}
