//! A training step holds the inputs of all layers, what one layer makes of its own, and the adapters; no more with depth.

use candle_core::{DType, Device};
use candle_quant::nn::LoraConfig;
use candle_quant::{QuantFormat, VarBuilder};
use candle_quant_models::train::{finetune, Dataset, Options, Sequence};
use candle_quant_models::{Config, Model};
use serde_json::json;
use std::ops::ControlFlow;

#[path = "../../../tests/common/allocations.rs"]
mod allocations;
#[path = "../../../tests/common/packed.rs"]
mod packed;
use allocations::{peak_of, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HIDDEN: usize = 256;
const INNER: usize = 512;
const VOCABULARY: usize = 512;
/// Two texts of 128 tokens, of each of which 127 count.
const TOKENS: usize = 2 * 127;
const RANK: usize = 4;

/// The outputs and inputs of a layer's projections: q, k, v, o, gate, up, down.
const PROJECTIONS: [(usize, usize); 7] = [
    (HIDDEN, HIDDEN),
    (HIDDEN / 2, HIDDEN),
    (HIDDEN / 2, HIDDEN),
    (HIDDEN, HIDDEN),
    (INNER, HIDDEN),
    (INNER, HIDDEN),
    (HIDDEN, INNER),
];

/// Packed in 4 bits.
fn model(layers: usize) -> Model {
    let config = json!({"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": true});
    let mut weights = std::collections::HashMap::new();
    let mut add = |name: String, dims: &[usize]| {
        let weight = (packed::tensor(dims, weights.len() as u64 + 1) * 0.05).unwrap();
        weights.insert(name, if dims.len() == 1 { weight.ones_like().unwrap() } else { weight });
    };
    add("model.embed_tokens.weight".into(), &[VOCABULARY, HIDDEN]);
    add("model.norm.weight".into(), &[HIDDEN]);
    for layer in 0..layers {
        let names =
            ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"];
        for (name, (n, k)) in names.into_iter().zip(PROJECTIONS) {
            add(format!("model.layers.{layer}.{name}_proj.weight"), &[n, k]);
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("model.layers.{layer}.{norm}.weight"), &[HIDDEN]);
        }
    }
    let vb = candle_nn::VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let vb = VarBuilder::from(vb).quantize_to(QuantFormat::affine(4, 64).unwrap());
    Model::new(&Config::from_json(&config).unwrap(), vb).unwrap()
}

/// The most that three steps allocate beyond the model.
fn peak(layers: usize) -> usize {
    let model = model(layers);
    let text = |seed| Sequence::new((0..128u32).map(|i| (i * i + seed) % 512).collect::<Vec<_>>());
    let data = Dataset { training: vec![text(1), text(2)], held_out: vec![] };
    let lora = LoraConfig { rank: RANK, alpha: 8., rs_lora: false, dora: false };
    let options = Options { lora, steps: 3, batch: 2, ..Default::default() };
    peak_of(|| finetune(&model, &data, &options, |_| ControlFlow::Continue(())).unwrap()).1
}

/// Bytes that a layer adds: its input, and its adapters with gradients, two moments, and their next values.
fn of_a_layer() -> usize {
    let adapters: usize = PROJECTIONS.iter().map(|(n, k)| RANK * (n + k)).sum();
    4 * (TOKENS * HIDDEN + 4 * adapters)
}

#[test]
fn a_step_holds_one_layer_and_the_inputs_of_all() {
    // What threads keep for themselves is there before.
    peak(1);
    let peaks = [2, 10].map(peak);
    let inputs_and_adapters = [2, 10].map(|layers| layers * of_a_layer());
    println!("{peaks:?} bytes, of which inputs and adapters {inputs_and_adapters:?}");
    // Each projection's input and output, what its adapter adds before and after it is scaled, their sum, and what is made of
    // that; and a gradient for each of these.
    let activations = 4 * TOKENS * PROJECTIONS.iter().map(|(n, k)| 10 * n + 2 * k).sum::<usize>();
    let logits = 6 * 4 * TOKENS * VOCABULARY;
    // Of these, what threads compute with: sometimes more of them at once, sometimes fewer.
    let rest = 4 << 20;
    for (peak, growing) in peaks.iter().zip(inputs_and_adapters) {
        let bound = growing + activations.max(logits) + rest;
        assert!(*peak <= bound, "{peak} bytes, {bound} expected at most");
    }
    let growth = peaks[1] - peaks[0];
    let expected = 8 * of_a_layer();
    assert!(growth <= expected + rest, "8 layers more take {growth} bytes, {expected} expected");
}
