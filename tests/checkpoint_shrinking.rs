//! Files that shrink while they are opened, or are read without a mapping: an error at most, never the end of the process.

use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{self, Checkpoint, Reads};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Opens the copy of `source` in a directory of its own again and again while it is cut to every length and made
/// whole again, in the middle of an opening or between two.
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
    let start = Instant::now();
    assert!(open(&path), "{path:?}");
    let one_opening = start.elapsed();

    let (attempts, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            let mut rng = StdRng::seed_from_u64(1);
            // Leaves the file as it is for zero to two openings, which makes some of them happen with it whole and
            // some with it cut, however the threads are scheduled; then for part of one.
            let mut pause = || {
                let until = attempts.load(Ordering::Relaxed) + rng.random_range(0..=2);
                while attempts.load(Ordering::Relaxed) < until && !done.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                let part = one_opening.mul_f64(rng.random_range(0. ..1.));
                let start = Instant::now();
                while start.elapsed() < part {
                    std::hint::spin_loop();
                }
            };
            let mut lengths = StdRng::seed_from_u64(2);
            while !done.load(Ordering::Relaxed) {
                file.set_len(lengths.random_range(0..whole.len() as u64)).unwrap();
                pause();
                fs::write(&path, &whole).unwrap();
                pause();
            }
        });
        let (mut opened, mut refused) = (0, 0);
        while opened < 500 || refused < 500 {
            match open(&path) {
                true => opened += 1,
                false => refused += 1,
            }
            attempts.fetch_add(1, Ordering::Relaxed);
        }
        done.store(true, Ordering::Relaxed);
    });
    fs::write(&path, &whole).unwrap();
    assert!(Checkpoint::open(&path).is_ok(), "{path:?}");
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path)
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
    survives(&write_gguf(dir.path()));
}

fn write_gguf(dir: &Path) -> PathBuf {
    let path = dir.join("model.gguf");
    let weight = Tensor::ones((64, 256), DType::F32, &Device::Cpu).unwrap();
    let blocks = QTensor::quantize(&weight, GgmlDType::Q4K).unwrap();
    let names: Vec<_> = (0..40).map(|layer| format!("blk.{layer}.ffn_down.weight")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), &blocks)).collect();
    let architecture = gguf_file::Value::String("qwen3".into());
    let heads = gguf_file::Value::U32(4);
    let metadata = [("general.architecture", &architecture), ("qwen3.attention.head_count", &heads)];
    gguf_file::write(&mut File::create(&path).unwrap(), &metadata, &tensors).unwrap();
    path
}

/// The numbers of every tensor, or the error of the first that can't be read.
fn numbers(checkpoint: &Checkpoint) -> candle_quant::Result<Vec<Vec<f32>>> {
    let load = |name| {
        let dense = checkpoint.tensor(name, None)?.to_dense(DType::F32, &Device::Cpu)?;
        Ok(dense.flatten_all()?.to_vec1()?)
    };
    checkpoint.tensor_names().map(load).collect()
}

#[test]
fn positioned_reads_give_the_same_numbers_and_an_error_when_files_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = write_gguf(dir.path());
    let fixtures =
        ["mlx/qwen3-mxfp8/model.safetensors", "uqff/f8q8/f8q8-0.uqff", "slm1/q8_0.slm"].map(fixture);
    for source in fixtures.iter().chain([&gguf]) {
        let copies = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(source.parent().unwrap()).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                fs::copy(entry.path(), copies.path().join(entry.file_name())).unwrap();
            }
        }
        let path = copies.path().join(source.file_name().unwrap());
        let options = checkpoint::OpenOptions { reads: Reads::Positioned, ..Default::default() };
        let positioned = Checkpoint::open_with(&path, options).unwrap();
        let expected = numbers(&Checkpoint::open(&path).unwrap()).unwrap();
        assert!(numbers(&positioned).unwrap() == expected, "{path:?}");
        let size = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(size / 3).unwrap();
        let error = numbers(&positioned).unwrap_err().to_string();
        let found = format!("a file cut after it was opened: {} of {size} bytes are left", size / 3);
        for part in [path.to_str().unwrap(), "`: expected all its bytes", &found] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
