//! Every checkpoint among the fixtures: the logits are those of the CPU.

use crate::common::{bundled, distance};
use crate::device;
use candle_core::{DType, Device, Tensor};
use candle_quant::ops::SampleOptions;
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::generate::CausalLm;
use candle_quant_models::{Config, Model};
use std::path::{Path, PathBuf};

const LEN: usize = 14;

fn fixtures(kind: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(kind)
}

/// In one piece, and in chunks and tokens after what is in the cache, of which others were taken back.
fn logits(model: &mut Model, tokens: &Tensor) -> [Tensor; 2] {
    let whole = model.forward(tokens, 0).unwrap();
    model.clear_kv_cache();
    let (mut pieces, mut offset) = (Vec::new(), 0);
    for len in [5, 1, 1, 4, 3] {
        model.forward(&tokens.narrow(1, 0, 2).unwrap(), offset).unwrap();
        assert_eq!(model.truncate_kv_cache(offset), offset);
        pieces.push(model.forward(&tokens.narrow(1, offset, len).unwrap(), offset).unwrap());
        offset += len;
    }
    assert_eq!(model.cached_tokens(), LEN);
    [whole, Tensor::cat(&pieces, 1).unwrap()]
}

/// The median of the root-mean-square distances of tokens.
fn median_distance(logits: &Tensor, expected: &Tensor) -> f64 {
    let of = |t: &Tensor, i| t.narrow(1, i, 1).unwrap();
    let mut distances: Vec<_> = (0..LEN).map(|i| distance(&of(logits, i), &of(expected, i)).rms).collect();
    distances.sort_by(f64::total_cmp);
    distances[LEN / 2]
}

fn check(name: &str, checkpoint: &Checkpoint, device: &Device) {
    let config = Config::from_json(checkpoint.config()).unwrap();
    let ids: Vec<u32> = (0..LEN).map(|i| ((i * 37 + 5) % config.vocab_size) as u32).collect();
    let tokens = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let there = tokens.to_device(device).unwrap();
    let cpu = VarBuilder::from_checkpoint(checkpoint, DType::F32, &Device::Cpu);
    let expected = Model::new(&config, cpu).unwrap().forward(&tokens, 0).unwrap();

    let mut model = Model::load(checkpoint, DType::F32, device).unwrap();
    for logits in logits(&mut model, &there) {
        let distance = distance(&logits, &expected);
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
    }

    // What rounding makes of it on the CPU, and four times that: attention rounds its scores, too, on a device. Of the median
    // token: rounding sends some to other experts.
    let rounded = Model::load(checkpoint, DType::BF16, &Device::Cpu).unwrap().forward(&tokens, 0).unwrap();
    // A plan on the CPU rounds the cache and the logits alone, layers on a device whatever they hand on.
    let bound = 4. * median_distance(&rounded, &expected);
    let mut model = Model::load(checkpoint, DType::BF16, device).unwrap();
    for logits in logits(&mut model, &there) {
        assert_eq!(logits.dtype(), DType::BF16);
        let distance = median_distance(&logits, &expected);
        assert!(distance <= bound, "{name} BF16: {distance} of {bound}");
    }
}

fn check_all(kind: &str, names: &[&str]) {
    let Some(device) = device() else { return };
    for name in names {
        check(&format!("{kind}/{name}"), &Checkpoint::open(fixtures(kind).join(name)).unwrap(), &device);
    }
}

#[test]
fn of_mlx() {
    check_all("mlx", &crate::common::FIXTURES);
}

#[test]
fn of_mlx_with_experts() {
    check_all(
        "mlx",
        &["gptoss-mxfp4-hf", "gptoss-mxfp4-mlxlm", "qwen3moe-affine-b4-g64", "qwen3moe-nvfp4-global_scale"],
    );
}

/// What its publisher left in BF16 is part of steps, too.
#[test]
fn gpt_oss_as_published_decodes_in_one_launch() {
    let Some(device) = device() else { return };
    let checkpoint = Checkpoint::open(fixtures("mlx").join("gptoss-mxfp4-hf")).unwrap();
    // Its heads are too small for the attention of 16 bits.
    let mut model = Model::load(&checkpoint, DType::F32, &device).unwrap();
    for (offset, id) in [3, 5, 7].into_iter().enumerate() {
        let drawn = model.next_token(id, offset, &SampleOptions::GREEDY, (1, offset as u64)).unwrap();
        assert!(drawn.is_some(), "token {offset}");
    }
}

/// All of them: each stores weights in its own way.
#[test]
fn of_hugging_face() {
    let Some(device) = device() else { return };
    for entry in std::fs::read_dir(fixtures("hf")).unwrap() {
        let path = entry.unwrap().path();
        check(&path.display().to_string(), &Checkpoint::open(&path).unwrap(), &device);
    }
}

#[test]
fn of_uqff() {
    check_all(
        "uqff",
        &[
            "afq4",
            "afq8",
            "f8q8",
            "fp8",
            "frommlx6",
            "hqq4",
            "moe_afq4",
            "mxfp4",
            "odd_afq4",
            "q4k",
            "q8_0",
            "qwen2_afq4",
            "v0816_afq4",
            "v090_q4k",
        ],
    );
}

#[test]
fn of_slm1() {
    check_all("slm1", &["f32.slm", "q4_0.slm", "q4_0_gqa_b32.slm", "q4_0_tied.slm", "q8_0.slm"]);
}

#[test]
fn of_ollama() {
    let Some(device) = device() else { return };
    let mut count = 0;
    for store in ["current", "v0.16", "v0.21"] {
        let models = fixtures("ollama").join(store).join("manifests/registry.ollama.ai/library/tiny-moe");
        for model in std::fs::read_dir(models).unwrap() {
            let path = model.unwrap().path();
            check(&path.display().to_string(), &Checkpoint::open(&path).unwrap(), &device);
            count += 1;
        }
    }
    assert_eq!(count, 4);
}

#[test]
fn bundled_ones() {
    let Some(device) = device() else { return };
    for name in ["tiny", "tiny-bf16"] {
        check(name, &bundled(name), &device);
    }
}
