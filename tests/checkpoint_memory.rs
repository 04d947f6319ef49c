//! Loading needs little more memory than the packed weights themselves.
#![cfg(target_os = "linux")]

use candle_core::quantized::QTensor;
use candle_core::Device;
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::QuantTensor;
use candle_quant_tools::verify;
use serde_json::json;
use std::{fs, path::Path};

#[path = "common/process.rs"]
mod process;
use process::{measured, peak, write_hole};

/// Name, N, K, all of four bits. One is much larger than the others, as embeddings are.
const WEIGHTS: [(&str, usize, usize); 4] =
    [("embedding", 65_536, 4096), ("a", 16_384, 4096), ("b", 4096, 16_384), ("c", 16_384, 4096)];

/// Bytes of a block of 32 elements.
const MXFP4_BLOCK: usize = 17;
const Q4_0_BLOCK: usize = 18;

#[test]
fn mlx_weights_need_little_more_than_their_size() {
    check("mlx_weights_need_little_more_than_their_size", load_everything, all, write_mlx);
}

#[test]
fn uqff_weights_need_little_more_than_their_size() {
    check("uqff_weights_need_little_more_than_their_size", load_everything, all, write_uqff);
}

#[test]
fn weights_of_modelopt_need_little_more_than_their_size() {
    check("weights_of_modelopt_need_little_more_than_their_size", load_everything, all, write_modelopt);
}

#[test]
fn weights_of_ollama_need_little_more_than_their_size() {
    check("weights_of_ollama_need_little_more_than_their_size", load_everything, all, write_ollama);
}

/// One weight at a time is in memory, and a piece of it dequantized.
#[test]
fn verifying_needs_little_more_than_the_largest_weight() {
    let (_, n, k) = WEIGHTS[0];
    let largest = |_| n * k * 9 / 16; // four bits, and 32 for each 64
    check("verifying_needs_little_more_than_the_largest_weight", verify_everything, largest, write_mlx);
}

/// candle copies blocks in one go, so that the pages of the file are there as long as the copy of a weight takes.
#[test]
fn gguf_weights_of_candle_need_the_largest_twice() {
    let (_, n, k) = WEIGHTS[0];
    let largest = n * k / 32 * Q4_0_BLOCK;
    let twice = |packed_size| packed_size + largest;
    let write = |dir: &Path| write_gguf(dir, 2, Q4_0_BLOCK);
    check("gguf_weights_of_candle_need_the_largest_twice", load_everything, twice, write);
}

#[test]
fn gguf_weights_that_are_rearranged_need_little_more_than_their_size() {
    let test = "gguf_weights_that_are_rearranged_need_little_more_than_their_size";
    check(test, load_everything, all, |dir| write_gguf(dir, 39, MXFP4_BLOCK));
}

/// All that is in the files.
fn all(packed_size: usize) -> usize {
    packed_size
}

/// Runs `test` once more in a process of its own, which does `work` on what `write` has written. `needed` tells the
/// bytes it needs from those in the files.
fn check(test: &str, work: fn(&Path), needed: impl Fn(usize) -> usize, write: impl Fn(&Path) -> usize) {
    if measured(work) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let packed_size = write(dir.path());
    assert!(packed_size > 230 << 20);

    let peak = peak(test, dir.path());
    let needed = needed(packed_size);
    assert!(peak > needed / 2, "the child loaded nothing: {peak} bytes");
    let limit = needed + needed / 10 + (64 << 20);
    assert!(peak <= limit, "peak resident set {peak} bytes, {needed} needed, limit {limit}");
    println!("peak {} MiB, needed {} MiB", peak >> 20, needed >> 20);
}

fn verify_everything(dir: &Path) {
    let report = verify::verify(&Checkpoint::open(dir).unwrap());
    assert!(report.passed(true) && report.tensors == WEIGHTS.len(), "{report}");
}

/// A weight in memory, kept there.
enum Loaded {
    Packed(#[allow(dead_code)] QuantTensor),
    Ggml(#[allow(dead_code)] QTensor),
}

/// Loads all weights and keeps them.
fn load_everything(dir: &Path) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let load = |module: &String| match checkpoint.weight(module, None).unwrap() {
        Weight::Packed(packed) => Loaded::Packed(packed.load(&Device::Cpu).unwrap()),
        Weight::Ggml(ggml) => Loaded::Ggml(ggml.load(&Device::Cpu).unwrap()),
        other => panic!("{other:?}"),
    };
    let modules = checkpoint.modules();
    let tensors: Vec<_> = modules.iter().map(load).collect();
    assert_eq!(tensors.len(), WEIGHTS.len());
}

/// A safetensors file of small tensors with these bytes, and of large ones of zeros: name, dtype, shape, size.
/// Returns the bytes of the large ones.
fn write_safetensors(
    path: &Path,
    small: &[(String, &str, Vec<u8>)],
    large: &[(String, &str, [usize; 2], usize)],
) -> usize {
    let (mut header, mut data) = (json!({}), Vec::new());
    for (name, dtype, bytes) in small {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header[name] = json!({"dtype": dtype, "shape": [], "data_offsets": [begin, data.len()]});
    }
    let mut end = data.len();
    for (name, dtype, shape, size) in large {
        header[name] = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]});
        end += size;
    }
    let header = header.to_string();
    let size = end - data.len();
    let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    write_hole(path, &head, size);
    size
}

fn write_mlx(dir: &Path) -> usize {
    let mut tensors = Vec::new();
    for (module, n, k) in WEIGHTS {
        tensors.push((format!("{module}.weight"), "U32", [n, k / 8], n * k / 2));
        for part in ["scales", "biases"] {
            tensors.push((format!("{module}.{part}"), "F16", [n, k / 64], n * k / 64 * 2));
        }
    }
    fs::write(dir.join("config.json"), r#"{"quantization":{"bits":4,"group_size":64}}"#).unwrap();
    write_safetensors(&dir.join("model.safetensors"), &[], &tensors)
}

fn write_uqff(dir: &Path) -> usize {
    let mut small = Vec::new();
    for (part, number) in [("major", 1u32), ("minor", 2), ("patch", 0)] {
        small.push((format!("uqff.version.{part}"), "U32", number.to_le_bytes().to_vec()));
    }
    let mut large = Vec::new();
    for (module, n, k) in WEIGHTS {
        small.push((format!("{module}.weight.format"), "U8", vec![6])); // MXFP4
        large.push((format!("{module}.weight"), "U8", [n, k / 2], n * k / 2));
        large.push((format!("{module}.weight.scales"), "U8", [n, k / 32], n * k / 32));
    }
    write_safetensors(&dir.join("model-0.uqff"), &small, &large)
}

/// NVFP4 as ModelOpt writes it.
fn write_modelopt(dir: &Path) -> usize {
    let (mut small, mut large) = (Vec::new(), Vec::new());
    for (module, n, k) in WEIGHTS {
        small.push((format!("{module}.weight_scale_2"), "F32", 1f32.to_le_bytes().to_vec()));
        large.push((format!("{module}.weight"), "U8", [n, k / 2], n * k / 2));
        large.push((format!("{module}.weight_scale"), "F8_E4M3", [n, k / 16], n * k / 16));
    }
    let config = r#"{"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4"}}"#;
    fs::write(dir.join("config.json"), config).unwrap();
    write_safetensors(&dir.join("model.safetensors"), &small, &large)
}

/// A store whose only manifest is that of `m:latest`, a blob for each weight.
fn write_ollama(dir: &Path) -> usize {
    let blobs = dir.join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let mut layers = Vec::new();
    let mut layer = |kind: &str, name: &str, write: &dyn Fn(&Path) -> usize| {
        // Names of blobs are only looked at when digests are verified.
        let digest = format!("{:064x}", layers.len());
        let path = blobs.join(format!("sha256-{digest}"));
        let size_of_weights = write(&path);
        layers.push(json!({
            "mediaType": format!("application/vnd.ollama.image.{kind}"),
            "digest": format!("sha256:{digest}"),
            "size": fs::metadata(&path).unwrap().len(),
            "name": name,
        }));
        size_of_weights
    };
    layer("json", "config.json", &|path| {
        fs::write(path, "{}").unwrap();
        0
    });
    let sizes = WEIGHTS.map(|(module, n, k)| {
        let name = format!("{module}.weight");
        layer("tensor", &name, &|path| {
            let packed = (name.clone(), "U32", [n, k / 8], n * k / 2); // MXFP4
            let scales = (format!("{name}.scale"), "U8", [n, k / 32], n * k / 32);
            write_safetensors(path, &[], &[packed, scales])
        })
    });
    let manifest = dir.join("manifests/registry.ollama.ai/library/m/latest");
    fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    let config = &layers[0];
    fs::write(manifest, json!({"schemaVersion": 2, "config": config, "layers": layers}).to_string()).unwrap();
    sizes.iter().sum()
}

/// A GGUF file of blocks of 32 elements, of the type with this number.
fn write_gguf(dir: &Path, type_id: u32, block: usize) -> usize {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut head = [b"GGUF", &3u32.to_le_bytes()[..]].concat();
    head.extend([WEIGHTS.len() as u64, 1].iter().flat_map(|count| count.to_le_bytes()));
    head.extend([text("general.architecture"), 8u32.to_le_bytes().to_vec(), text("other")].concat());
    let mut end = 0;
    for (module, n, k) in WEIGHTS {
        head.extend(text(&format!("{module}.weight")));
        head.extend(2u32.to_le_bytes());
        head.extend([k as u64, n as u64].iter().flat_map(|dim| dim.to_le_bytes()));
        head.extend(type_id.to_le_bytes());
        head.extend((end as u64).to_le_bytes());
        end += n * k / 32 * block; // a multiple of the alignment, 32
    }
    head.resize(head.len().next_multiple_of(32), 0);
    write_hole(&dir.join("model.gguf"), &head, end);
    end
}
