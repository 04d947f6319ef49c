//! Whole models: what a GGUF file computes is what the same model computes from safetensors.

use crate::checkpoint::rejected;
use crate::common::distance;
use crate::source::{llama, tiny, Source};
use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{GgmlKernels, OpenOptions};
use candle_quant::parallel::{run, ExpertSplit};
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::generate::stop_tokens;
use candle_quant_models::{Config, Model};
use serde_json::{json, Value};
use std::fs;

pub fn ids() -> Tensor {
    let ids: Vec<u32> = (0..48).map(|i| i * 7 % 96).collect();
    Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

pub fn logits(checkpoint: &Checkpoint) -> Tensor {
    let mut model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    model.forward(&ids(), 0).unwrap().squeeze(0).unwrap()
}

/// The logits of a model over several ranks.
pub fn logits_over(checkpoint: &Checkpoint, ranks: usize, how: ExpertSplit) -> Tensor {
    let checkpoint = checkpoint.clone();
    let logits = run(&vec![Device::Cpu; ranks], move |rank| {
        let config = Config::from_json(checkpoint.config())?;
        let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32).split_experts(how);
        Ok(Model::new(&config, vb)?.forward(&ids(), 0)?.squeeze(0)?)
    });
    logits.unwrap().remove(0)
}

/// Rows of queries and keys, which the file has in another order, are sliced in that of the model.
#[test]
fn ranks_compute_what_one_does() {
    for source in [llama(Value::Null), tiny()] {
        let (_dir, gguf) = source.gguf(GgmlDType::F16, &[]);
        for ranks in [2, 3, 4] {
            let distance = distance(&logits_over(&gguf, ranks, ExpertSplit::Inside), &logits(&gguf));
            assert!(distance.max < 3e-4, "{ranks}: {distance:?}");
        }
        let (_dir, gguf) = source.gguf(GgmlDType::Q8_0, &[]);
        for ranks in [2, 3, 4] {
            let distance = distance(&logits_over(&gguf, ranks, ExpertSplit::Inside), &logits(&gguf));
            assert!(distance.max < 3e-4, "{ranks}: {distance:?}");
        }
    }
}

pub fn config(checkpoint: &Checkpoint) -> Config {
    Config::from_json(checkpoint.config()).unwrap()
}

#[test]
fn plain_models_compute_what_safetensors_do() {
    use GgmlDType::{BF16, F16, F32};
    for (source, dtypes) in [(llama(Value::Null), [F32, F16]), (tiny(), [F32, BF16])] {
        let (_dir, expected) = source.safetensors();
        for dtype in dtypes {
            let (_dir, gguf) = source.gguf(dtype, &[]);
            assert!(gguf.warnings().is_empty());
            assert_eq!(config(&gguf), config(&expected));
            assert_eq!(stop_tokens(&gguf).unwrap(), stop_tokens(&expected).unwrap());
            let names = |checkpoint: &Checkpoint| -> Vec<_> {
                checkpoint.tensor_names().map(str::to_owned).collect()
            };
            assert_eq!(names(&gguf), names(&expected));
            let distance = distance(&logits(&gguf), &logits(&expected));
            assert!(distance.max < 3e-4, "{dtype:?}: {distance:?}");
        }
    }
}

/// Against the same weights as dense elements. If candle is asked for the products, it rounds activations to 8 bits, one scale for 32 (K types: 256) of them: an error of up to 1/254 of the largest one in each product. Measured here: 0.023 to 0.029
/// standard deviations (root mean square), 0.21 at most.
#[test]
fn quantized_models_compute_what_their_elements_do() {
    use GgmlDType::{Q2K, Q3K, Q4K, Q4_0, Q4_1, Q5K, Q5_0, Q5_1, Q6K, Q8_0};
    let source = tiny();
    for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let (_dir, gguf) = source.gguf(dtype, &[]);
        let rounded = |tensor: &Tensor| match tensor.rank() {
            1 => tensor.clone(),
            _ => QTensor::quantize(tensor, dtype).unwrap().dequantize(&Device::Cpu).unwrap(),
        };
        let tensors = source.tensors.iter().map(|(name, tensor)| (name.clone(), rounded(tensor))).collect();
        let (_dir, expected) = Source { config: source.config.clone(), tensors }.safetensors();
        let expected = logits(&expected);
        let exact = distance(&logits(&gguf), &expected);
        assert!(exact.max < 3e-4, "{dtype:?}: {exact:?}");
        let candle = OpenOptions { ggml: GgmlKernels::Candle, ..OpenOptions::default() };
        let rounded = distance(&logits(&Checkpoint::open_with(gguf.path(), candle).unwrap()), &expected);
        assert!(rounded.rms < 0.04 && rounded.max < 0.3, "{dtype:?}: {rounded:?}");
        assert!(rounded.rms > 1e-3, "{dtype:?}: candle did not compute this");
    }
}

/// The divisors that llama.cpp's converter writes for llama 3.1, by its own rule.
fn divisors(factor: f64, theta: f64, head_dim: usize) -> Vec<f32> {
    let (low, high, original) = (1., 4., 8192.);
    let divisor = |pair: usize| {
        let wavelength = std::f64::consts::TAU * theta.powf(2. * pair as f64 / head_dim as f64);
        if wavelength < original / high {
            1.
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1. / ((1. - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|pair| divisor(pair) as f32).collect()
}

#[test]
fn divisors_of_frequencies_are_the_scaling_of_llama_3() {
    for factor in [8., 32.] {
        let scaling = json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let source = llama(scaling.clone());
        let divisors = Tensor::new(divisors(factor, 500_000., 32), &Device::Cpu).unwrap();
        let (_dir, gguf) = source.gguf(GgmlDType::F32, &[("rope_freqs.weight", divisors)]);
        assert_eq!(gguf.config()["rope_scaling"], scaling);
        let (_dir, expected) = source.safetensors();
        assert_eq!(config(&gguf), config(&expected));
        assert!(gguf.tensor_names().all(|name| !name.contains("rope")));
        let distance = distance(&logits(&gguf), &logits(&expected));
        assert!(distance.max < 3e-4, "{distance:?}");
    }
    // Without a division there is no scaling.
    let ones = Tensor::ones(16, DType::F32, &Device::Cpu).unwrap();
    let (_dir, gguf) = llama(Value::Null).gguf(GgmlDType::F32, &[("rope_freqs.weight", ones)]);
    assert_eq!(gguf.config()["rope_scaling"], Value::Null);
}

#[test]
fn divisors_of_no_known_scaling_are_refused() {
    let mut odd = divisors(8., 500_000., 32);
    odd[9] *= 1.01;
    for divisors in [odd, vec![1.; 15], vec![f32::NAN; 16]] {
        let divisors = Tensor::new(divisors, &Device::Cpu).unwrap();
        let source = llama(Value::Null);
        let dir = tempfile::tempdir().unwrap();
        let tensor = QTensor::quantize(&divisors, GgmlDType::F32).unwrap();
        let metadata = source.metadata();
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let mut file = fs::File::create(dir.path().join("model.gguf")).unwrap();
        gguf_file::write(&mut file, &metadata, &[("rope_freqs.weight", &tensor)]).unwrap();
        rejected(Checkpoint::open(dir.path()), &["model.gguf", "`rope_freqs.weight`", "llama 3's scaling"]);
    }
}
