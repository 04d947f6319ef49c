//! Whole models of every type of blocks that is read: what they compute is what their elements do.

use crate::blocks::packed;
use crate::common::distance;
use crate::models::ids;
use crate::packed::{flat, reference};
use crate::random_blocks::matrix;
use crate::source::{gguf_name, tiny, Source};
use crate::writer::{f32_tensor, File};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::block_types;
use candle_quant::Checkpoint;
use candle_quant_models::Model;
use rand::rngs::StdRng;
use rand::SeedableRng;

/// The logits of a prompt, and of tokens one at a time: kernels for many rows of x, and those for one.
fn logits(checkpoint: &Checkpoint) -> Tensor {
    const PROMPT: usize = 40;
    let mut model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    let ids = ids();
    let mut logits = vec![model.forward(&ids.narrow(1, 0, PROMPT).unwrap(), 0).unwrap()];
    for token in PROMPT..ids.dim(1).unwrap() {
        logits.push(model.forward(&ids.narrow(1, token, 1).unwrap(), token).unwrap());
    }
    Tensor::cat(&logits, 1).unwrap().squeeze(0).unwrap()
}

/// The bundled model with matrices of random blocks.
fn file(source: &Source, of: (u32, &'static str, usize, usize)) -> File {
    let mut file = File::of("qwen3")
        .u32("qwen3.embedding_length", 256)
        .u32("qwen3.feed_forward_length", 512)
        .u32("qwen3.block_count", 3)
        .u32("qwen3.attention.head_count", 4)
        .u32("qwen3.attention.head_count_kv", 2)
        .u32("qwen3.attention.key_length", 64)
        .u32("qwen3.attention.value_length", 64)
        .u32("qwen3.context_length", 512)
        .f32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
        .f32("qwen3.rope.freq_base", 10000.)
        .u32("tokenizer.ggml.eos_token_id", 0);
    let mut random = StdRng::seed_from_u64(u64::from(of.0));
    for (name, tensor) in &source.tensors {
        let name = gguf_name(name, "qwen3");
        file = file.tensor(match tensor.dims() {
            [count] => f32_tensor(&name, &[*count as u64], &flat(tensor)),
            dims => matrix(&name, dims, of, &mut random),
        });
    }
    file
}

#[test]
fn models_of_every_type_compute_what_their_elements_do() {
    let source = tiny();
    let blocks: Vec<_> = block_types().into_iter().filter(|(.., elements, _)| *elements > 1).collect();
    assert!(blocks.len() >= 26, "{blocks:?}");
    for of in blocks {
        let name = of.1;
        let gguf = file(&source, of).open().unwrap();
        assert!(gguf.warnings().is_empty(), "{name}: {:?}", gguf.warnings());
        // Read by the letter of the format, in which tests/gguf/blocks.rs and values.rs look at single weights.
        let elements = |(tensor, dense): (&String, &Tensor)| {
            let Some(module) = tensor.strip_suffix(".weight").filter(|_| dense.rank() == 2) else {
                return (tensor.clone(), dense.clone());
            };
            let weight = packed(gguf.weight(module, None).unwrap()).load(&Device::Cpu).unwrap();
            let elements = reference(&weight);
            let squares = elements.iter().map(|element| element * element).sum::<f32>();
            let size = (squares / elements.len() as f32).sqrt();
            assert!((0.02..0.1).contains(&size), "{name}: {tensor} has weights of {size}");
            (tensor.clone(), Tensor::from_vec(elements, dense.dims(), &Device::Cpu).unwrap())
        };
        let tensors = source.tensors.iter().map(elements).collect();
        let (_dir, expected) = Source { config: source.config.clone(), tensors }.safetensors();
        let distance = distance(&logits(&gguf), &logits(&expected));
        assert!(distance.max < 3e-4, "{name}: {distance:?}");
    }
}
