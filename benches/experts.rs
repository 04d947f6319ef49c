//! Mixtures of experts on the CPU: formats of this crate beside a loop over experts in dense f32 and candle's own
//! layer, in one run.
//!
//! `cargo bench --bench experts` prints criterion's statistics and, at the end, two tables: median times, with errors,
//! relative RMS against f64 on the same quantized weights; and two ratios that are to be near 1.
//! `CANDLE_QUANT_BENCH_OUT=FILE` and filters work as for the bench `matmul`.
//!
//! There are as many layers as make 128 experts (Qwen) or 32 (Mixtral) in all, of the same weights whatever E is.
//! Each call is one of the next layer, with another random choice: it finds its experts as cold with E = 8 as with
//! E = 128, and what grows with E is what is done for experts that nobody chose. Of the same layers:
//!
//! * `dense loop`: candle's f32 `matmul` with the decoded weights of each chosen expert;
//! * `candle`: its Qwen3-MoE, whose layer is private, as models of one layer, one attention head of 8 elements, and a
//!   vocabulary of 128. They route by themselves. (What candle has of fused or quantized experts does not run on CPUs.)
//! * `one expert`: the `Linear` layers of a packed expert, applied to as many rows as all chosen experts together.

mod common;

use candle_core::{DType, Device, IndexOp, Module, Result, Tensor, D};
use candle_nn::Activation;
use candle_nn::{ops::silu, VarBuilder};
use candle_quant::nn::{ExpertStack, Experts, Gating, Linear};
use candle_quant::{QuantFormat, QuantTensor};
use candle_transformers::models::qwen3_moe;
use common::Bench;
use rand::rngs::StdRng;
use rand::seq::index;
use rand::{RngExt, SeedableRng};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

struct Shape {
    model: &'static str,
    hidden: usize,
    inner: usize,
    /// Of all layers.
    experts: usize,
    /// Experts of a token, and the numbers of which they are chosen.
    choices: &'static [(usize, &'static [usize])],
}

const SHAPES: [Shape; 2] = [
    Shape {
        model: "Qwen3-30B-A3B",
        hidden: 2048,
        inner: 768,
        experts: 128,
        choices: &[(2, &[8, 32, 128]), (4, &[8, 32, 128]), (8, &[128])],
    },
    Shape { model: "Mixtral / 4", hidden: 1024, inner: 3584, experts: 32, choices: &[(2, &[8])] },
];

const FORMATS: [QuantFormat; 3] =
    [QuantFormat::affine_opt(4, 64).unwrap(), QuantFormat::MXFP4, QuantFormat::NVFP4];

/// Sequences, and tokens of each.
type Tokens = (usize, usize);
const DECODE: Tokens = (1, 1);
const DECODE_MANY: Tokens = (8, 1);
const PREFILL: Tokens = (1, 512);

/// Experts that differ; the others are copies of them, elsewhere in memory.
const DIFFERENT: usize = 8;
/// A prime, so that every layer meets every choice, and enough for every expert to be chosen.
const CALLS: usize = 509;
const VOCABULARY: usize = 128;
const CHECKED_TOKENS: usize = 2;
const DENSE_LOOP: &str = "dense loop";

/// What a layer is called with.
struct Call {
    /// `[sequences, length, hidden]`.
    x: Tensor,
    /// Each token of `x` as often as it chooses an expert.
    rows: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    /// For a model, `[sequences, length]`.
    words: Tensor,
}

fn calls((sequences, length): Tokens, hidden: usize, top_k: usize, experts: usize) -> Result<Vec<Call>> {
    let mut rng = StdRng::seed_from_u64(1);
    let x = Tensor::randn(0f32, 1., (sequences, length, hidden), &Device::Cpu)?;
    let rows = x.repeat((1, top_k, 1))?;
    let routing_weights = Tensor::rand(0.1f32, 1., (sequences, length, top_k), &Device::Cpu)?;
    let routing_weights = routing_weights.broadcast_div(&routing_weights.sum_keepdim(D::Minus1)?)?;
    let tokens = sequences * length;
    let mut call = |_| {
        let ids = (0..tokens).flat_map(|_| index::sample(&mut rng, experts, top_k));
        let ids =
            Tensor::from_iter(ids.map(|id| id as u32), &Device::Cpu)?.reshape(routing_weights.shape())?;
        let words = (0..tokens).map(|_| rng.random_range(0..VOCABULARY as u32));
        let words = Tensor::from_iter(words, &Device::Cpu)?.reshape((sequences, length))?;
        Ok(Call { x: x.clone(), rows: rows.clone(), ids, routing_weights: routing_weights.clone(), words })
    };
    (0..CALLS).map(&mut call).collect()
}

type Layer = Box<dyn Fn(&Call) -> Result<Tensor>>;
type Decoded = dyn Fn(usize) -> Result<[Tensor; 3]>;

/// One way to compute.
struct Contender {
    name: String,
    bits_per_weight: f64,
    /// The layer of some of all experts, of which a token uses `top_k`.
    layer: Box<dyn Fn(Range<usize>, usize) -> Result<Layer>>,
    /// Gate, up and down of an expert, decoded, if errors are to be computed.
    decoded: Option<Box<Decoded>>,
    /// Whether it is of one expert, whatever E is.
    one_expert: bool,
}

/// Gate, up and down `[experts, N, K]`.
fn packed(shape: &Shape, format: QuantFormat) -> Result<[QuantTensor; 3]> {
    let stack = |n, k| -> Result<QuantTensor> {
        let expert = |_| -> Result<QuantTensor> {
            let weights = Tensor::randn(0f32, 0.02, (n, k), &Device::Cpu)?.to_dtype(DType::BF16)?;
            Ok(QuantTensor::quantize(&weights, format)?)
        };
        let different = (0..DIFFERENT).map(expert).collect::<Result<Vec<_>>>()?;
        let all: Vec<_> = different.iter().cycle().take(shape.experts).collect();
        Ok(QuantTensor::stack(&all)?)
    };
    let Shape { hidden, inner, .. } = *shape;
    Ok([stack(inner, hidden)?, stack(inner, hidden)?, stack(hidden, inner)?])
}

/// Calls a fallible function for gate, up and down.
fn each<S, T>(of: &[S; 3], call: impl Fn(&S) -> Result<T>) -> Result<[T; 3]> {
    let [gate, up, down] = of;
    Ok([call(gate)?, call(up)?, call(down)?])
}

fn contenders(shape: &Shape) -> Result<Vec<Contender>> {
    let stacks = FORMATS.into_iter().map(|format| packed(shape, format)).collect::<Result<Vec<_>>>()?;
    let decoded = each(&stacks[0], |stack| Ok(stack.dequantize(DType::F32)?))?;
    let mut all = vec![dense_loop(decoded.clone()), candle_model(decoded)];
    all.extend(stacks.into_iter().flat_map(|stacks| [one_expert(stacks.clone()), of_this_crate(stacks)]));
    Ok(all)
}

fn of_this_crate(stacks: [QuantTensor; 3]) -> Contender {
    let of_layer = stacks.clone();
    Contender {
        name: stacks[0].format().to_string(),
        bits_per_weight: stacks[0].bits_per_weight(),
        layer: Box::new(move |experts, _| {
            let part = |stack: &QuantTensor| {
                Ok(ExpertStack::from_quant(stack.narrow(0, experts.start, experts.len())?, None)?)
            };
            let [gate, up, down] = each(&of_layer, part)?;
            let block = Experts::new(gate, up, down, Gating::Plain(Activation::Silu))?;
            Ok(Box::new(move |call: &Call| block.forward(&call.x, &call.ids, &call.routing_weights)))
        }),
        decoded: Some(Box::new(move |expert| {
            each(&stacks, |stack| stack.narrow(0, expert, 1)?.dequantize(DType::F32)?.squeeze(0))
        })),
        one_expert: false,
    }
}

fn name_of_one(format: QuantFormat) -> String {
    format!("one expert, {format}")
}

fn one_expert(stacks: [QuantTensor; 3]) -> Contender {
    Contender {
        name: name_of_one(stacks[0].format()),
        bits_per_weight: stacks[0].bits_per_weight(),
        layer: Box::new(move |experts, _| {
            let linear = |stack: &QuantTensor| {
                let matrix = |part: &Tensor| part.i(experts.start);
                let global_scale = stack.global_scale().map(matrix).transpose()?;
                let (packed, scales) = (matrix(stack.packed())?, matrix(stack.scales())?);
                let biases = stack.biases().map(matrix).transpose()?;
                let weight = QuantTensor::new(stack.format(), packed, scales, biases, global_scale)?;
                Ok(Linear::new(weight, None))
            };
            let [gate, up, down] = each(&stacks, linear)?;
            Ok(Box::new(move |call: &Call| {
                let (gate, up) = (gate.forward(&call.rows)?, up.forward(&call.rows)?);
                down.forward(&(silu(&gate)? * up)?)
            }))
        }),
        decoded: None,
        one_expert: true,
    }
}

fn dense_loop(stacks: [Tensor; 3]) -> Contender {
    let of_layer = stacks.clone();
    Contender {
        name: DENSE_LOOP.to_string(),
        bits_per_weight: 32.,
        layer: Box::new(move |experts, top_k| {
            let [gate, up, down] =
                each(&of_layer, |stack| stack.narrow(0, experts.start, experts.len())?.transpose(1, 2))?;
            let experts = experts.len();
            Ok(Box::new(move |call: &Call| {
                let x = call.x.flatten_to(1)?;
                let mut pairs = vec![(vec![], vec![]); experts];
                let chosen = call.ids.flatten_all()?.to_vec1::<u32>()?;
                let routing_weights = call.routing_weights.flatten_all()?.to_vec1::<f32>()?;
                for (pair, (expert, weight)) in chosen.into_iter().zip(routing_weights).enumerate() {
                    let (tokens, routing_weights) = &mut pairs[expert as usize];
                    tokens.push((pair / top_k) as u32);
                    routing_weights.push(weight);
                }
                let mut sum = x.zeros_like()?;
                for (expert, (tokens, routing_weights)) in pairs.into_iter().enumerate() {
                    if tokens.is_empty() {
                        continue;
                    }
                    let routing_weights = Tensor::from_vec(routing_weights, (tokens.len(), 1), &Device::Cpu)?;
                    let tokens = Tensor::new(tokens, &Device::Cpu)?;
                    let x = x.index_select(&tokens, 0)?;
                    let joined = (silu(&x.matmul(&gate.i(expert)?)?)? * x.matmul(&up.i(expert)?)?)?;
                    let output = joined.matmul(&down.i(expert)?)?.broadcast_mul(&routing_weights)?;
                    sum = sum.index_add(&tokens, &output, 0)?;
                }
                Ok(sum)
            }))
        }),
        decoded: Some(Box::new(move |expert| each(&stacks, |stack| stack.i(expert)))),
        one_expert: false,
    }
}

fn candle_model(stacks: [Tensor; 3]) -> Contender {
    const HEAD: usize = 8;
    Contender {
        name: "candle".to_string(),
        bits_per_weight: 32.,
        layer: Box::new(move |experts, top_k| {
            let [_, inner, hidden] = *stacks[0].dims() else { unreachable!("[experts, N, K]") };
            let config = qwen3_moe::Config {
                vocab_size: VOCABULARY,
                hidden_size: hidden,
                intermediate_size: inner,
                num_hidden_layers: 1,
                num_attention_heads: 1,
                head_dim: HEAD,
                attention_bias: false,
                num_key_value_heads: 1,
                max_position_embeddings: PREFILL.1,
                sliding_window: None,
                max_window_layers: 0,
                tie_word_embeddings: true,
                rope_theta: 1e6,
                rms_norm_eps: 1e-6,
                use_sliding_window: false,
                hidden_act: candle_nn::Activation::Silu,
                decoder_sparse_step: 1,
                moe_intermediate_size: inner,
                num_experts_per_tok: top_k,
                num_experts: experts.len(),
                norm_topk_prob: true,
            };
            let layer = "model.layers.0";
            let mut tensors = HashMap::new();
            for (name, dims) in [
                ("self_attn.q_proj", vec![HEAD, hidden]),
                ("self_attn.k_proj", vec![HEAD, hidden]),
                ("self_attn.v_proj", vec![HEAD, hidden]),
                ("self_attn.o_proj", vec![hidden, HEAD]),
                ("self_attn.q_norm", vec![HEAD]),
                ("self_attn.k_norm", vec![HEAD]),
                ("input_layernorm", vec![hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("mlp.gate", vec![experts.len(), hidden]),
            ] {
                let weight = Tensor::randn(0f32, 1., dims, &Device::Cpu)?;
                tensors.insert(format!("{layer}.{name}.weight"), weight);
            }
            let embeddings = Tensor::randn(0f32, 1., (VOCABULARY, hidden), &Device::Cpu)?;
            tensors.insert("model.embed_tokens.weight".to_string(), embeddings);
            tensors.insert("model.norm.weight".to_string(), Tensor::ones(hidden, DType::F32, &Device::Cpu)?);
            for (of_layer, expert) in experts.enumerate() {
                for (stack, name) in stacks.iter().zip(["gate_proj", "up_proj", "down_proj"]) {
                    tensors.insert(format!("{layer}.mlp.experts.{of_layer}.{name}.weight"), stack.i(expert)?);
                }
            }
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
            let model = RefCell::new(qwen3_moe::ModelForCausalLM::new(&config, vb)?);
            Ok(Box::new(move |call: &Call| {
                let mut model = model.borrow_mut();
                model.clear_kv_cache();
                model.forward(&call.words, 0)
            }))
        }),
        decoded: None,
        one_expert: false,
    }
}

/// Relative RMS against f64, on some tokens.
fn error(layer: &Layer, decoded: &Decoded, call: &Call) -> Result<f64> {
    let hidden = call.x.dim(D::Minus1)?;
    let in_f64 = |tensor: &Tensor| tensor.to_dtype(DType::F64);
    let x = in_f64(&call.x.reshape(((), hidden))?)?;
    let product = in_f64(&layer(call)?.reshape(((), hidden))?)?;
    let (ids, routing_weights) =
        (call.ids.flatten_to(1)?.to_vec2::<u32>()?, in_f64(&call.routing_weights.flatten_to(1)?)?);
    let (mut error, mut size) = (0., 0.);
    for (token, (ids, routing_weights)) in
        ids.iter().zip(routing_weights.to_vec2::<f64>()?).enumerate().take(CHECKED_TOKENS)
    {
        let x = x.narrow(0, token, 1)?;
        let mut want = x.zeros_like()?;
        for (expert, weight) in ids.iter().zip(routing_weights) {
            let [gate, up, down] = each(&decoded(*expert as usize)?, |matrix| in_f64(matrix)?.t())?;
            let joined = (silu(&x.matmul(&gate)?)? * x.matmul(&up)?)?;
            want = (want + (joined.matmul(&down)? * weight)?)?;
        }
        let squares = |tensor: &Tensor| tensor.sqr()?.sum_all()?.to_scalar::<f64>();
        error += squares(&(product.narrow(0, token, 1)? - &want)?)?;
        size += squares(&want)?;
    }
    Ok((error / size).sqrt())
}

fn ratio(time: Option<&f64>, over: Option<&f64>) -> Option<String> {
    Some(format!("{:.2}", time? / over?))
}

fn main() -> Result<()> {
    let columns =
        ["model", "tokens", "top-k", "weights", "E", "bits per weight", "ms", "dense loop / this", "error"];
    let mut bench = Bench::new(&columns, Duration::from_secs(1));
    let mut times = HashMap::new();
    for shape in &SHAPES {
        let (model, contenders) = (shape.model, contenders(shape)?);
        let cases = |tokens| shape.choices.iter().map(move |(top_k, counts)| (tokens, *top_k, *counts));
        for (tokens, top_k, counts) in [DECODE, DECODE_MANY, PREFILL].into_iter().flat_map(cases) {
            for contender in contenders.iter().filter(|contender| !contender.one_expert || tokens == PREFILL)
            {
                let counts = if contender.one_expert { &[1] } else { counts };
                for &experts in counts {
                    let Contender { name, bits_per_weight, .. } = contender;
                    // A single expert looks at no ids.
                    let calls = calls(tokens, shape.hidden, top_k, experts.max(top_k))?;
                    let layer = |i| (contender.layer)(i * experts..(i + 1) * experts, top_k);
                    let layers = (0..shape.experts / experts).map(layer).collect::<Result<Vec<_>>>()?;
                    let (sequences, length) = tokens;
                    let id = format!("{model}/{sequences}x{length}/top-{top_k}/{name}/E={experts}");
                    let mut number = 0;
                    let time = bench.time(&id, || {
                        number += 1;
                        layers[number % layers.len()](&calls[number % CALLS])
                    });
                    let Some(ms) = time else { continue };
                    times.insert((model, tokens, top_k, name.clone(), experts), ms);
                    let dense = times.get(&(model, tokens, top_k, DENSE_LOOP.to_string(), experts));
                    let error = match &contender.decoded {
                        Some(decoded) => format!("{:.1e}", error(&layers[0], decoded, &calls[0])?),
                        None => String::new(),
                    };
                    bench.row(&[
                        model.to_string(),
                        format!("{sequences} x {length}"),
                        top_k.to_string(),
                        name.clone(),
                        experts.to_string(),
                        format!("{bits_per_weight:.2}"),
                        format!("{ms:.3}"),
                        ratio(dense, Some(&ms)).unwrap_or_default(),
                        error,
                    ]);
                }
            }
        }
    }
    bench.heading(&[
        "model",
        "top-k",
        "weights",
        "one token: E = 128 / E = 8",
        "512 tokens: E = 8 / one expert",
    ]);
    for shape in &SHAPES {
        for (top_k, format) in shape.choices.iter().flat_map(|(k, _)| FORMATS.map(|format| (*k, format))) {
            let time = |tokens, name, experts| times.get(&(shape.model, tokens, top_k, name, experts));
            let name = format.to_string();
            let decode = ratio(time(DECODE, name.clone(), 128), time(DECODE, name.clone(), 8));
            let prefill = ratio(time(PREFILL, name.clone(), 8), time(PREFILL, name_of_one(format), 1));
            if decode.is_some() || prefill.is_some() {
                let [decode, prefill] = [decode, prefill].map(Option::unwrap_or_default);
                bench.row(&[shape.model.to_string(), top_k.to_string(), name, decode, prefill]);
            }
        }
    }
    bench.finish()
}
