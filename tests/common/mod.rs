//! What the integration tests share: fixtures and how far two tensors are apart.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::{DType, Device, Tensor, D};
use candle_quant::Checkpoint;
use std::path::{Path, PathBuf};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::Tokenizer;

/// The fixture checkpoints: written by mlx-lm, with its logits.
pub const FIXTURES: [&str; 15] = [
    "llama-mixed-custom",
    "llama-mixed_3_6",
    "llama-untied-bias-b4-g64-f16",
    "llama-untied-mxfp4",
    "qwen3-affine-b1-g64",
    "qwen3-affine-b2-g32",
    "qwen3-affine-b3-g64",
    "qwen3-affine-b4-g32-legacy-config",
    "qwen3-affine-b4-g64",
    "qwen3-affine-b4-g64-sharded",
    "qwen3-affine-b5-g128",
    "qwen3-affine-b6-g32",
    "qwen3-affine-b8-g128",
    "qwen3-mxfp8",
    "qwen3-nvfp4",
];

/// The folder of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/mlx").join(name)
}

/// A fixture checkpoint.
pub fn open(name: &str) -> Checkpoint {
    Checkpoint::open(fixture(name)).unwrap()
}

/// A bundled model: `tiny` or `tiny-bf16`.
pub fn bundled(name: &str) -> Checkpoint {
    Checkpoint::open(PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("assets").join(name)).unwrap()
}

/// The reference prompt `[1, T]` of a fixture and mlx-lm's f32 logits `[T, vocabulary]`.
pub fn reference(name: &str) -> (Tensor, Tensor) {
    reference_in(&fixture(name).join("refs.safetensors"))
}

/// As [`reference`], from any file.
pub fn reference_in(path: &Path) -> (Tensor, Tensor) {
    let refs = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let tokens = refs["tokens"].to_dtype(DType::U32).unwrap().unsqueeze(0).unwrap();
    (tokens, refs["logits_f32"].clone())
}

/// How far `actual` is from `expected`, in units of the standard deviation of `expected`.
#[derive(Debug)]
pub struct Distance {
    pub max: f64,
    pub rms: f64,
    /// Rows whose largest element stands elsewhere.
    pub other_argmax: usize,
}

/// The distance of two tensors of the same shape, after flattening to rows.
pub fn distance(actual: &Tensor, expected: &Tensor) -> Distance {
    assert_eq!(actual.elem_count(), expected.elem_count());
    let rows = |t: &Tensor| {
        let t = t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        t.flatten_to(t.rank() - 2).unwrap()
    };
    let (actual, expected) = (rows(actual), rows(expected));
    let argmax = |t: &Tensor| t.argmax(D::Minus1).unwrap().to_vec1::<u32>().unwrap();
    let other_argmax = argmax(&actual).iter().zip(argmax(&expected)).filter(|(a, b)| **a != *b).count();
    let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (actual, expected) = (values(&actual), values(&expected));
    let count = expected.len() as f64;
    let mean = expected.iter().sum::<f64>() / count;
    let std = (expected.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / count).sqrt();
    let errors = || actual.iter().zip(&expected).map(|(a, e)| (a - e).abs() / std);
    assert!(errors().all(f64::is_finite), "not finite");
    Distance {
        max: errors().fold(0., f64::max),
        rms: (errors().map(|error| error.powi(2)).sum::<f64>() / count).sqrt(),
        other_argmax,
    }
}

/// One token for each byte.
pub fn byte_tokenizer() -> Tokenizer {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab: Vec<(String, u32)> = alphabet.iter().map(char::to_string).zip(0..).collect();
    let vocab: [_; 256] = vocab.try_into().unwrap();
    let bpe = BPE::builder().vocab_and_merges(vocab, vec![]);
    let mut tokenizer = Tokenizer::new(bpe.build().unwrap());
    let byte_level = ByteLevel::default().add_prefix_space(false);
    tokenizer.with_pre_tokenizer(Some(byte_level)).with_decoder(Some(byte_level));
    tokenizer
}
