//! Files that shrink while they are opened: an error at most, never the end of the process.

use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::Checkpoint;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Opens the copy of `source` in `dir` again and again while it is cut to every length, and made whole.
///
/// What is read through a mapping beyond the end of its file kills the process.
fn survives(source: &Path) {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(source.parent().unwrap()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    let path = dir.path().join(source.file_name().unwrap());
    let whole = fs::read(&path).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            let mut seed = 1u64;
            while !done.load(Ordering::Relaxed) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                file.set_len((seed >> 33) % whole.len() as u64).unwrap();
                std::thread::yield_now();
                fs::write(&path, &whole).unwrap();
            }
        });
        // Until both have happened often.
        let (mut opened, mut refused) = (0, 0);
        let start = Instant::now();
        while opened < 50 || refused < 50 {
            match open(&path) {
                true => opened += 1,
                false => refused += 1,
            }
            if start.elapsed() > Duration::from_secs(60) {
                done.store(true, Ordering::Relaxed);
                panic!("{path:?}: opened {opened} times, refused {refused} times");
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    fs::write(&path, &whole).unwrap();
    assert!(Checkpoint::open(&path).is_ok(), "{path:?}");
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

/// Opens it, if it can be opened, and asks for all that can be told without reading weights.
fn open(path: &Path) -> bool {
    let Ok(checkpoint) = Checkpoint::open(path) else { return false };
    for name in checkpoint.tensor_names() {
        let _ = checkpoint.tensor(name, None);
    }
    true
}

#[test]
fn safetensors() {
    survives(&fixture("mlx/qwen3-mxfp8/model.safetensors"));
}

#[test]
fn uqff() {
    survives(&fixture("uqff/f8q8/f8q8-0.uqff"));
}

#[test]
fn slm1() {
    survives(&fixture("slm1/q8_0.slm"));
}

#[test]
fn gguf() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let weight = Tensor::ones((64, 256), DType::F32, &Device::Cpu).unwrap();
    let blocks = QTensor::quantize(&weight, GgmlDType::Q4K).unwrap();
    let names: Vec<_> = (0..40).map(|layer| format!("blk.{layer}.ffn_down.weight")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), &blocks)).collect();
    let architecture = gguf_file::Value::String("qwen3".into());
    let heads = gguf_file::Value::U32(4);
    let metadata = [("general.architecture", &architecture), ("qwen3.attention.head_count", &heads)];
    gguf_file::write(&mut File::create(&path).unwrap(), &metadata, &tensors).unwrap();
    survives(&path);
}
