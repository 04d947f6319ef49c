//! The README's one line: a model written for candle_nn, and the same text under the other `use`.

use crate::common::{distance, open, reference};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::{Checkpoint, VarBuilder};
use serde::de::DeserializeOwned;

mod before {
    use candle_nn::{embedding, linear, linear_no_bias, Embedding, Linear, VarBuilder};

    include!("port/llama.rs");
}

mod after {
    use candle_quant::{embedding, linear, linear_no_bias, Embedding, Linear, VarBuilder};

    include!("port/llama.rs");
}

/// With biases and a head of its own; without biases; with tied heads.
const FIXTURES: [&str; 5] = [
    "llama-untied-bias-b4-g64-f16",
    "llama-untied-mxfp4",
    "qwen3-affine-b4-g64",
    "qwen3-mxfp8",
    "qwen3-nvfp4",
];

fn config<C: DeserializeOwned>(checkpoint: &Checkpoint) -> C {
    serde_json::from_value(checkpoint.config().clone()).unwrap()
}

fn builder(checkpoint: &Checkpoint) -> VarBuilder<'static> {
    VarBuilder::from_checkpoint(checkpoint, DType::F32, &Device::Cpu)
}

/// The model as it was written, on dequantized weights.
fn before(checkpoint: &Checkpoint) -> before::Model {
    before::Model::new(&config(checkpoint), builder(checkpoint).dense()).unwrap()
}

/// Every linear layer of the ported model, the head among them.
fn linears(model: &after::Model) -> Vec<&candle_quant::Linear> {
    let mut linears = vec![&model.lm_head];
    for after::Layer { self_attn, mlp, .. } in &model.layers {
        linears.extend([&self_attn.q_proj, &self_attn.k_proj, &self_attn.v_proj, &self_attn.o_proj]);
        linears.extend([&mlp.gate_proj, &mlp.up_proj, &mlp.down_proj]);
    }
    linears
}

#[test]
fn one_use_line_is_the_whole_port() {
    for name in FIXTURES {
        let checkpoint = open(name);
        let before = before(&checkpoint);
        let after = after::Model::new(&config(&checkpoint), builder(&checkpoint)).unwrap();

        let bias = config::<after::Config>(&checkpoint).attention_bias;
        assert!(after.embed_tokens.embeddings().quantized().is_some(), "{name}");
        assert!(linears(&after).iter().all(|linear| linear.weight().quantized().is_some()), "{name}");
        assert!(linears(&after)[1..].iter().all(|linear| linear.bias().is_some() == bias), "{name}");
        // `Debug` and, below, `Clone` are what the model derives.
        assert!(format!("{after:?}").contains("Quantized") && !format!("{before:?}").contains("Quantized"));

        let (tokens, mlx) = reference(name);
        let (expected, actual) = (tokens.apply(&before).unwrap(), tokens.apply(&after.clone()).unwrap());
        assert_eq!(actual.dims(), expected.dims());
        let to_before = distance(&actual, &expected);
        // Rounding in another order of sums, through all layers, and a margin of three for other processors.
        assert!(to_before.max < 3e-5 && to_before.rms < 4e-6, "{name}: {to_before:?}");
        assert_eq!(to_before.other_argmax, 0, "{name}");
        // That it is the model of the checkpoint, mlx-lm's logits say.
        let to_mlx = distance(&actual, &mlx);
        assert!(to_mlx.max <= 3e-4 && to_mlx.other_argmax == 0, "{name}: {to_mlx:?}");
    }
}

/// On dense tensors it remains the model that it was.
#[test]
fn a_ported_model_computes_dense_weights_as_before() {
    for name in FIXTURES {
        let checkpoint = open(name);
        let dequantized = builder(&checkpoint).dense();
        let named = |name: &str| (name.to_owned(), dequantized.get_unchecked(name).unwrap());
        let tensors = checkpoint.tensor_names().map(named).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let after = after::Model::new(&config(&checkpoint), vb).unwrap();
        assert!(linears(&after).iter().all(|linear| linear.weight().dense().is_some()), "{name}");
        let (tokens, _) = reference(name);
        let values = |model: &dyn Module| -> Vec<f32> {
            let logits: Tensor = model.forward(&tokens).unwrap();
            logits.flatten_all().unwrap().to_vec1().unwrap()
        };
        assert_eq!(values(&after), values(&before(&checkpoint)), "{name}");
    }
}
