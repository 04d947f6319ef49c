//! Experts: every layout of their weights, every way of computing them, and models that have them.

use crate::common::{distance, open, reference};
use crate::packed::{bits, flat, refused, tensor};
use crate::writer::File;
use candle_core::{DType, Device, Tensor, Var, D};
use candle_nn::Activation;
use candle_quant::checkpoint::{GgmlKernels, OpenOptions, Weight};
use candle_quant::nn::{experts, ExpertStack, Experts, ExpertsConfig, Gating};
use candle_quant::{Checkpoint, LayerWeight, QuantFormat, QuantTensor, VarBuilder};
use candle_quant_models::{Config, Model, RopeScaling};
use std::collections::HashMap;

const EXPERTS: usize = 5;
const HIDDEN: usize = 64;
const INNER: usize = 96;
const FORMAT: QuantFormat = QuantFormat::affine_opt(4, 32).unwrap();
const CLAMPED: Gating = Gating::Clamped { alpha: 1.702, limit: 1.5 };

/// Gate, up and down of all experts as dense tensors, and their biases.
struct Dense {
    weights: [Tensor; 3],
    biases: [Tensor; 3],
}

impl Dense {
    fn new() -> Self {
        let dims = [[EXPERTS, INNER, HIDDEN], [EXPERTS, INNER, HIDDEN], [EXPERTS, HIDDEN, INNER]];
        let number = |dims: &[usize], seed| (tensor(dims, seed) * 0.2).unwrap();
        Self {
            weights: [0, 1, 2].map(|i| number(&dims[i], 10 + i as u64)),
            biases: [0, 1, 2].map(|i| number(&dims[i][..2], 20 + i as u64)),
        }
    }

    /// The same experts, packed.
    fn packed(&self, format: QuantFormat, gating: Gating, bias: bool) -> Experts {
        let stack = |i: usize| {
            let weight = QuantTensor::quantize(&self.weights[i], format).unwrap();
            ExpertStack::from_quant(weight, bias.then(|| self.biases[i].clone())).unwrap()
        };
        Experts::new(stack(0), stack(1), stack(2), gating).unwrap()
    }
}

/// The sum over the chosen experts of one token, in f64, from the definition.
fn expected(
    weights: &[Vec<f32>; 3],
    biases: Option<&[Vec<f32>; 3]>,
    gating: Gating,
    x: &[f32],
    chosen: &[(u32, f32)],
) -> Vec<f64> {
    let project = |which: usize, expert: usize, n: usize, x: &[f64]| -> Vec<f64> {
        let k = x.len();
        (0..n)
            .map(|row| {
                let weights = &weights[which][(expert * n + row) * k..][..k];
                let bias = biases.map_or(0., |biases| f64::from(biases[which][expert * n + row]));
                weights.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>() + bias
            })
            .collect()
    };
    let sigmoid = |x: f64| 1. / (1. + (-x).exp());
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let mut sum = vec![0.; HIDDEN];
    for &(expert, weight) in chosen {
        let gate = project(0, expert as usize, INNER, &x);
        let up = project(1, expert as usize, INNER, &x);
        let inner: Vec<f64> = gate
            .into_iter()
            .zip(up)
            .map(|(g, u)| match gating {
                Gating::Clamped { alpha, limit } => {
                    let g = g.min(limit);
                    g * sigmoid(alpha * g) * (u.clamp(-limit, limit) + 1.)
                }
                _ => g * sigmoid(g) * u,
            })
            .collect();
        let output = project(2, expert as usize, HIDDEN, &inner);
        sum.iter_mut().zip(output).for_each(|(sum, output)| *sum += f64::from(weight) * output);
    }
    sum
}

/// Experts and routing_weights of `tokens` tokens, two for each, none of them expert 2.
fn routes(tokens: usize) -> (Tensor, Tensor) {
    let ids: Vec<u32> =
        (0..tokens as u32).flat_map(|t| [[0, 1, 3, 4][t as usize % 4], [4, 3, 0][t as usize % 3]]).collect();
    let routing_weights: Vec<f32> = (0..2 * tokens).map(|i| 0.1 + (i % 7) as f32 * 0.13).collect();
    let tensor = |dims| (Tensor::from_vec(ids, dims, &Device::Cpu).unwrap(), dims);
    let (ids, dims) = tensor((1, tokens, 2));
    (ids, Tensor::from_vec(routing_weights, dims, &Device::Cpu).unwrap())
}

#[test]
fn sums_agree_with_f64() {
    let dense = Dense::new();
    for format in [FORMAT, QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::MXFP8] {
        for (gating, bias) in [(Gating::Plain(Activation::Silu), false), (CLAMPED, true)] {
            let experts = dense.packed(format, gating, bias);
            let dequantized = |i: usize| {
                flat(
                    &QuantTensor::quantize(&dense.weights[i], format)
                        .unwrap()
                        .dequantize(DType::F32)
                        .unwrap(),
                )
            };
            let weights = [0, 1, 2].map(dequantized);
            let biases = [0, 1, 2].map(|i| flat(&dense.biases[i]));
            for tokens in [1, 2, 37] {
                let (x, (ids, routing_weights)) = (tensor(&[1, tokens, HIDDEN], 30), routes(tokens));
                let y = flat(&experts.forward(&x, &ids, &routing_weights).unwrap());
                let ids: Vec<u32> = ids.flatten_all().unwrap().to_vec1().unwrap();
                let chosen: Vec<_> = ids.into_iter().zip(flat(&routing_weights)).collect();
                let parts = flat(&x).into_iter().collect::<Vec<_>>();
                let expected: Vec<f64> = parts
                    .chunks(HIDDEN)
                    .zip(chosen.chunks(2))
                    .flat_map(|(x, chosen)| expected(&weights, bias.then_some(&biases), gating, x, chosen))
                    .collect();
                let error = crate::packed::relative_error(&y, &expected);
                assert!(error < 2e-6, "{format} {gating:?} {tokens}: {error:e}");
            }
        }
    }
}

/// A decode step gives a token the same bits whatever the other sequences of the batch are.
#[test]
fn a_decode_step_does_not_depend_on_the_batch() {
    let experts = Dense::new().packed(FORMAT, CLAMPED, true);
    let x = tensor(&[9, 1, HIDDEN], 40);
    let (ids, routing_weights) = routes(9);
    let (ids, routing_weights) =
        (ids.reshape((9, 1, 2)).unwrap(), routing_weights.reshape((9, 1, 2)).unwrap());
    for dtype in [DType::F32, DType::BF16] {
        let x = x.to_dtype(dtype).unwrap();
        let all = experts.forward(&x, &ids, &routing_weights).unwrap();
        assert_eq!((all.dims(), all.dtype()), (&[9, 1, HIDDEN][..], dtype));
        for row in 0..9 {
            let one = |tensor: &Tensor| tensor.narrow(0, row, 1).unwrap();
            let alone = experts.forward(&one(&x), &one(&ids), &one(&routing_weights)).unwrap();
            assert_eq!(bits(&alone), bits(&one(&all)), "{row}");
        }
    }
}

/// Gradients of x, of the routing weights and of all biases, against differences; on the way there the sums are those
/// without gradients.
#[test]
fn gradients_reach_every_operand() {
    for tokens in [1, 9] {
        let (ids, routing_weights) = routes(tokens);
        let [gate, up, down] = Dense::new().biases;
        let operands = [tensor(&[1, tokens, HIDDEN], 50), routing_weights, gate, up, down];
        let outputs = |[x, routing_weights, biases @ ..]: [Tensor; 5]| {
            let experts =
                Dense { biases, ..Dense::new() }.packed(FORMAT, Gating::Plain(Activation::Silu), true);
            experts.forward(&x, &ids, &routing_weights).unwrap()
        };
        let sum =
            |operands: [Tensor; 5]| -> f64 { flat(&outputs(operands)).into_iter().map(f64::from).sum() };
        let plain: Vec<f64> = flat(&outputs(operands.clone())).into_iter().map(f64::from).collect();
        for place in 0..operands.len() {
            let with = |operand: &Tensor| {
                let mut operands = operands.clone();
                operands[place] = operand.clone();
                operands
            };
            let variable = Var::from_tensor(&operands[place]).unwrap();
            let y = outputs(with(&variable));
            assert!(crate::packed::relative_error(&flat(&y), &plain) < 1e-6);

            let gradients = y.sum_all().unwrap().backward().unwrap();
            let gradient = flat(gradients.get(&variable).expect("a gradient"));
            let direction = tensor(variable.dims(), 51);
            let along: f64 =
                gradient.iter().zip(flat(&direction)).map(|(g, d)| f64::from(*g) * f64::from(d)).sum();
            const STEP: f64 = 1e-2;
            let at = |step: f64| sum(with(&(&operands[place] + (&direction * step).unwrap()).unwrap()));
            let difference = (at(STEP) - at(-STEP)) / (2. * STEP);
            let bound = 1e-2 * along.abs().max(1.);
            assert!((along - difference).abs() < bound, "{place}, {tokens}: {along}, {difference}");
        }
    }
}

#[test]
fn wrong_input_is_refused() {
    let dense = Dense::new();
    let experts = dense.packed(FORMAT, CLAMPED, true);
    let x = tensor(&[1, 2, HIDDEN], 50);
    let (ids, routing_weights) = routes(2);
    let bad = Tensor::new(&[[[0u32, 5], [1, 2]]], &Device::Cpu).unwrap();
    let told = refused(experts.forward(&x, &bad, &routing_weights));
    assert!(told.contains("each below 5") && told.contains("found 5"), "{told}");
    let told = refused(experts.forward(&x.narrow(1, 0, 1).unwrap(), &ids, &routing_weights));
    assert!(told.contains("do not fit"), "{told}");
    let none = experts.forward(
        &x.narrow(1, 0, 0).unwrap(),
        &ids.narrow(1, 0, 0).unwrap(),
        &routing_weights.narrow(1, 0, 0).unwrap(),
    );
    assert_eq!(none.unwrap().dims(), [1, 0, HIDDEN]);

    let stack = |i: usize| QuantTensor::quantize(&dense.weights[i], FORMAT).unwrap();
    let short = ExpertStack::from_quant(stack(0).narrow(0, 0, 3).unwrap(), None).unwrap();
    let whole = |i| ExpertStack::from_quant(stack(i), None).unwrap();
    let told = Experts::new(short, whole(1), whole(2), CLAMPED).unwrap_err().to_string();
    assert!(told.contains("as many experts each") && told.contains("[3, 5, 5]"), "{told}");
    let bias = Some(dense.biases[2].clone());
    let told = ExpertStack::from_quant(stack(0), bias).unwrap_err().to_string();
    assert!(told.contains("biases of experts") && told.contains("[5, 96]"), "{told}");
    let told = ExpertStack::from_each(Vec::new(), None).unwrap_err().to_string();
    assert!(told.contains("one weight [N, K] for each"), "{told}");
}

/// The same experts under the names of every tool give the same bits.
#[test]
fn every_layout_of_names_is_found() {
    let dense = Dense::new();
    let config = ExpertsConfig {
        experts: EXPERTS,
        hidden_size: HIDDEN,
        intermediate_size: INNER,
        bias: true,
        gating: Gating::Plain(Activation::Silu),
    };
    let (x, (ids, routing_weights)) = (tensor(&[1, 3, HIDDEN], 60), routes(3));
    let names = ["gate_proj", "up_proj", "down_proj"];
    let mut layouts: Vec<HashMap<String, Tensor>> = Vec::new();
    for block in ["switch_mlp", "experts"] {
        let tensors = names.iter().enumerate().flat_map(|(i, name)| {
            let path = format!("{block}.{name}");
            [
                (format!("{path}.weight"), dense.weights[i].clone()),
                (format!("{path}.bias"), dense.biases[i].clone()),
            ]
        });
        layouts.push(tensors.collect());
    }
    for names in [names, ["w1", "w3", "w2"]] {
        let tensors = names.iter().enumerate().flat_map(|(i, name)| {
            let (weights, biases) = (&dense.weights[i], &dense.biases[i]);
            (0..EXPERTS).flat_map(move |expert| {
                let path = format!("experts.{expert}.{name}");
                [
                    (format!("{path}.weight"), weights.get(expert).unwrap()),
                    (format!("{path}.bias"), biases.get(expert).unwrap()),
                ]
            })
        });
        layouts.push(tensors.collect());
    }
    let both = |parts: &[Tensor; 3]| Tensor::cat(&parts[..2], 1).unwrap();
    layouts.push(HashMap::from([
        ("experts.gate_up_proj.weight".to_string(), both(&dense.weights)),
        ("experts.gate_up_proj.bias".to_string(), both(&dense.biases)),
        ("experts.down_proj.weight".to_string(), dense.weights[2].clone()),
        ("experts.down_proj.bias".to_string(), dense.biases[2].clone()),
    ]));
    // In files of gpt-oss the rows of this one may alternate.
    let vb = candle_nn::VarBuilder::from_tensors(layouts[4].clone(), DType::F32, &Device::Cpu);
    let told = refused(experts(&ExpertsConfig { gating: CLAMPED, ..config }, VarBuilder::from(vb)));
    assert!(told.contains("experts.gate_up_proj") && told.contains("may alternate"), "{told}");
    let mut outputs = Vec::new();
    for tensors in layouts {
        let vb = candle_nn::VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
        let dense = experts(&config, VarBuilder::from(vb)).unwrap();
        // And from a file, where the reader may say it otherwise.
        let dir = tempfile::tempdir().unwrap();
        candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let stored =
            experts(&config, VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu)).unwrap();
        for experts in [dense, stored] {
            outputs.push(bits(&experts.forward(&x, &ids, &routing_weights).unwrap()));
        }
    }
    assert_eq!(outputs.len(), 10);
    assert!(outputs.iter().all(|output| *output == outputs[0]));
}

/// Experts quantized one by one are a stack, and the stack's parts are theirs.
#[test]
fn single_weights_are_stacked() {
    for format in [FORMAT, QuantFormat::NVFP4] {
        // So large that NVFP4 needs a global scale for each.
        let singles: Vec<_> = (0..3)
            .map(|i| QuantTensor::quantize(&(tensor(&[8, 64], 70 + i) * 1e4).unwrap(), format).unwrap())
            .collect();
        let stack = QuantTensor::stack(&singles.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(stack.dims(), [3, 8, 64]);
        let dequantized = stack.dequantize(DType::F32).unwrap();
        for (i, single) in singles.iter().enumerate() {
            assert_eq!(bits(&dequantized.get(i).unwrap()), bits(&single.dequantize(DType::F32).unwrap()));
        }
        let other = QuantTensor::quantize(&tensor(&[8, 128], 80), format).unwrap();
        let told = QuantTensor::stack(&[&singles[0], &other]).unwrap_err().to_string();
        assert!(told.contains("throughout"), "{told}");
        let each: Vec<LayerWeight> = singles.into_iter().map(LayerWeight::from).collect();
        ExpertStack::from_each(each, None).unwrap();
    }
}

/// How many projections are one packed stack, as they say of themselves.
fn stacks_in(experts: &Experts) -> usize {
    format!("{experts:?}").matches("weights: Stack(").count()
}

/// Stacks of a GGML type are stacks of the kernels that gather experts, and no activations are rounded. candle's own tensors, if they
/// are asked for, are matrices, each of its own blocks.
#[test]
fn stacks_of_ggml_types_are_loaded_as_stacks() {
    use candle_core::quantized::{GgmlDType, QTensor};
    // Rows of whole blocks of the types with 256 elements to a block.
    let (hidden, inner) = (256, 512);
    let names = ["gate_proj", "up_proj", "down_proj"];
    let dims = [[EXPERTS, inner, hidden], [EXPERTS, inner, hidden], [EXPERTS, hidden, inner]];
    // IQ4_XS (23), which candle does not know: a scale as F16, and codes that may be anything.
    let of_bytes = |count: usize| {
        let block = |block: usize| {
            let mut bytes: Vec<u8> = (0..136).map(|at| (block * 137 + at * 89 + at / 7) as u8).collect();
            bytes[..2].copy_from_slice(&half::f16::from_f32(1e-4).to_le_bytes());
            bytes
        };
        (0..count / 256).flat_map(block).collect::<Vec<u8>>()
    };
    for (type_id, dtype) in [(8, Some(GgmlDType::Q8_0)), (12, Some(GgmlDType::Q4K)), (23, None)] {
        let of_candle = dtype.map(|dtype| {
            [0, 1, 2]
                .map(|i| QTensor::quantize(&(tensor(&dims[i], 10 + i as u64) * 0.2).unwrap(), dtype).unwrap())
        });
        let mut file = File::of("qwen3moe").u32("qwen3moe.attention.head_count", 2);
        for (i, dims) in dims.iter().enumerate() {
            let blocks = match &of_candle {
                Some(stacks) => stacks[i].data().unwrap().to_vec(),
                None => of_bytes(dims.iter().product()),
            };
            let name = format!("blk.0.ffn_{}_exps.weight", ["gate", "up", "down"][i]);
            file = file.tensor(crate::writer::tensor(&name, &dims.map(|dim| dim as u64), type_id, blocks));
        }
        let folder = crate::writer::write(&file.bytes());
        let checkpoint = Checkpoint::open(crate::writer::path(&folder)).unwrap();
        let block = "model.layers.0.mlp";
        let mut dequantized = HashMap::new();
        for (i, name) in names.into_iter().enumerate() {
            let weight = checkpoint.weight(&format!("{block}.experts.{name}"), None).unwrap();
            let whole = weight.to_dense(DType::F32, &Device::Cpu).unwrap();
            if let Some(stacks) = &of_candle {
                let Weight::Ggml(stack) = weight else {
                    panic!("{name} is not in blocks");
                };
                assert_eq!(bits(&whole), bits(&stacks[i].dequantize(&Device::Cpu).unwrap()), "{name}");
                let matrices = stack.load_matrices(&Device::Cpu).unwrap();
                assert_eq!(matrices.len(), EXPERTS);
                for (expert, matrix) in matrices.iter().enumerate() {
                    let expected = whole.get(expert).unwrap();
                    let matrix = matrix.dequantize(&Device::Cpu).unwrap();
                    assert_eq!(bits(&matrix), bits(&expected), "{name} {expert}");
                }
            }
            dequantized.insert(format!("experts.{name}.weight"), whole);
        }
        let config = ExpertsConfig {
            experts: EXPERTS,
            hidden_size: hidden,
            intermediate_size: inner,
            bias: false,
            gating: Gating::Plain(Activation::Silu),
        };
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu).pp(block);
        let (x, (ids, routing_weights)) = (tensor(&[1, 6, hidden], 90), routes(6));
        let packed = experts(&config, vb).unwrap();
        assert_eq!(stacks_in(&packed), 3, "type {type_id}");
        let y = packed.forward(&x, &ids, &routing_weights).unwrap();
        // What candle does not know is this crate's in any case.
        let options = OpenOptions { ggml: GgmlKernels::Candle, ..OpenOptions::default() };
        let of_candle = Checkpoint::open_with(checkpoint.path(), options).unwrap();
        let vb = VarBuilder::from_checkpoint(&of_candle, DType::F32, &Device::Cpu).pp(block);
        let expected = if dtype.is_some() { 0 } else { 3 };
        assert_eq!(stacks_in(&experts(&config, vb).unwrap()), expected, "type {type_id}");
        let vb = candle_nn::VarBuilder::from_tensors(dequantized, DType::F32, &Device::Cpu);
        let dense = experts(&config, VarBuilder::from(vb)).unwrap();
        let exact: Vec<f64> =
            flat(&dense.forward(&x, &ids, &routing_weights).unwrap()).into_iter().map(f64::from).collect();
        // Both sum in F32, each in its own order.
        let error = crate::packed::relative_error(&flat(&y), &exact);
        assert!(error < 3e-6, "type {type_id}: {error:e}");
    }
}

const MODELS: [&str; 3] = ["qwen3moe-affine-b4-g64", "qwen3moe-nvfp4-global_scale", "gptoss-mxfp4-mlxlm"];

#[test]
fn models_agree_with_mlx_lm() {
    for name in MODELS {
        let (tokens, expected) = reference(name);
        let checkpoint = open(name);
        let mut config = Config::from_json(checkpoint.config()).unwrap();
        if let RopeScaling::Yarn { truncate, .. } = &mut config.rope.scaling {
            // mlx-lm 0.32.2 does not read this key of gpt-oss's config, and rounds. transformers reads it.
            assert!(!*truncate);
            *truncate = true;
        }
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        let mut model = Model::new(&config, vb).unwrap();
        let logits = model.forward(&tokens, 0).unwrap();
        let far = distance(&logits, &expected);
        assert!(far.max <= 3e-4 && far.other_argmax == 0, "{name}: {far:?}");

        // Token by token, and in pieces, the same text.
        for piece in [1, 7] {
            model.clear_kv_cache();
            let total = tokens.dim(1).unwrap();
            let parts: Vec<_> = (0..total)
                .step_by(piece)
                .map(|at| {
                    let ids = tokens.narrow(1, at, piece.min(total - at)).unwrap();
                    model.forward(&ids, at).unwrap()
                })
                .collect();
            let far = distance(&Tensor::cat(&parts, 1).unwrap(), &expected);
            assert!(far.max <= 3e-4 && far.other_argmax == 0, "{name} by {piece}: {far:?}");
        }
    }
}

/// Mixtral from random numbers, experts one by one as Hugging Face has them, against its definition in
/// candle-transformers.
#[test]
fn mixtral_agrees_with_candle_transformers() {
    use candle_transformers::models::mixtral;
    let json = serde_json::json!({
        "model_type": "mixtral", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 4096,
        "num_experts_per_tok": 2, "num_local_experts": 4, "use_flash_attn": false,
    });
    let mut tensors = HashMap::new();
    let mut put = |name: String, dims: &[usize], scale: f64| {
        let seed = 100 + tensors.len() as u64;
        let offset = if dims.len() == 1 { 1. } else { 0. };
        tensors.insert(name, (tensor(dims, seed) * scale).and_then(|t| t + offset).unwrap());
    };
    put("model.embed_tokens.weight".into(), &[96, 64], 1.);
    put("lm_head.weight".into(), &[96, 64], 0.3);
    put("model.norm.weight".into(), &[64], 0.1);
    for layer in 0..2 {
        let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
        put(at("input_layernorm"), &[64], 0.1);
        put(at("post_attention_layernorm"), &[64], 0.1);
        for (name, n) in [("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)] {
            put(at(&format!("self_attn.{name}")), &[n, 64], 0.2);
        }
        put(at("block_sparse_moe.gate"), &[4, 64], 0.5);
        for expert in 0..4 {
            let of = |name: &str| at(&format!("block_sparse_moe.experts.{expert}.{name}"));
            put(of("w1"), &[96, 64], 0.2);
            put(of("w2"), &[64, 96], 0.2);
            put(of("w3"), &[96, 64], 0.2);
        }
    }
    let vb = || candle_nn::VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
    let theirs: mixtral::Config = serde_json::from_value(json.clone()).unwrap();
    let mut theirs = mixtral::Model::new(&theirs, vb()).unwrap();
    let mut ours = Model::new(&Config::from_json(&json).unwrap(), vb().into()).unwrap();
    let ids = Tensor::new(&[[3u32, 17, 95, 0, 42, 42, 8, 61]], &Device::Cpu).unwrap();
    let last = theirs.forward(&ids, 0).unwrap().narrow(D::Minus2, 0, 1).unwrap();
    let ours = ours.forward_last(&ids, 0).unwrap();
    let far = distance(&ours, &last.reshape(ours.shape()).unwrap());
    assert!(far.max <= 3e-4 && far.other_argmax == 0, "{far:?}");
}
