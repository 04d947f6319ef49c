//! Decode steps on a CUDA device, one token of one sequence each: plans of the layouts of real models, whose packed weights
//! are random, so that no file is needed.
//!
//! Lines of JSON go to the standard output, a table to the standard error. Steps are a CUDA graph, or launched kernel by
//! kernel with `CANDLE_QUANT_GRAPH=eager`; `=on` makes it an error where they cannot be a graph.
//!
//! ```sh
//! cargo bench --bench decode_steps --features cuda -- --only Qwen3 --bandwidth 4300 >steps.jsonl
//! ```

use anyhow::{ensure, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, RmsNorm};
use candle_quant::format::Scale;
use candle_quant::nn::{Embedding, ExpertStack, Experts, Gating, Linear};
use candle_quant::ops::{prefill_attention, AttentionOptions, SampleOptions};
use candle_quant::step::{
    AttentionBlock, ExpertsBlock, FeedForwardBlock, HeadBlock, StepBuilder, StepPlan, Turn,
};
use candle_quant::{DeviceKvCache, KvCacheConfig, KvFormat, QuantFormat, QuantTensor};
use clap::Parser;
use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use std::time::{Duration, Instant};

/// Matrices are repetitions of so many random words, and of so many equal scales: fewer than each has of its own in real
/// layouts, lest they share memory.
const WORDS: usize = 1 << 18;
const SCALES: usize = 1 << 14;
/// The first step launches, the second captures.
const STEPS_UNTIL_SETTLED: usize = 3;
const SAMPLING: SampleOptions = SampleOptions { temperature: 0.8, ..SampleOptions::GREEDY };
const AFFINE: QuantFormat = QuantFormat::affine_opt(4, 64).unwrap();

const LAYOUTS: [Layout; 6] = [
    LLAMA_3_8B,
    QWEN3_4B,
    Layout { name: "Llama-3-8B", format: Some(QuantFormat::MXFP4), ..LLAMA_3_8B },
    QWEN3_30B_A3B,
    GPT_OSS_20B,
    // As published.
    Layout { format: None, ..GPT_OSS_20B },
];
const LLAMA_3_8B: Layout = Layout {
    name: "Llama-3-8B",
    format: Some(AFFINE),
    layers: 32,
    hidden: 4096,
    inner: 14336,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocabulary: 128_256,
    theta: 5e5,
    has_head_norms: false,
    is_tied: false,
    experts: None,
};
const QWEN3_4B: Layout = Layout {
    name: "Qwen3-4B",
    layers: 36,
    hidden: 2560,
    inner: 9728,
    vocabulary: 151_936,
    theta: 1e6,
    has_head_norms: true,
    is_tied: true,
    ..LLAMA_3_8B
};

const QWEN3_30B_A3B: Layout = Layout {
    name: "Qwen3-30B-A3B",
    layers: 48,
    hidden: 2048,
    inner: 768,
    kv_heads: 4,
    is_tied: false,
    experts: Some(ExpertLayout {
        count: 128,
        top_k: 8,
        format: AFFINE,
        gating: Gating::Plain(Activation::Silu),
    }),
    ..QWEN3_4B
};
/// Without biases and windows. Attention and head are packed, as mlx-lm packs them; experts are as published.
const GPT_OSS_20B: Layout = Layout {
    name: "gpt-oss-20b",
    layers: 24,
    hidden: 2880,
    inner: 2880,
    heads: 64,
    head_dim: 64,
    vocabulary: 201_088,
    theta: 15e4,
    experts: Some(ExpertLayout {
        count: 32,
        top_k: 4,
        format: QuantFormat::MXFP4,
        gating: Gating::Clamped { alpha: 1.702, limit: 7. },
    }),
    ..LLAMA_3_8B
};

/// Times decode steps of real layouts with random weights.
#[derive(Parser)]
struct Options {
    /// Only layouts whose name contains one of these.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// So many layers, not all of a layout.
    #[arg(long)]
    layers: Option<usize>,
    /// Tokens before those that are timed.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 4096, 32768])]
    contexts: Vec<usize>,
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Of a round.
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Stop after this many seconds.
    #[arg(long, default_value_t = 240)]
    seconds: u64,
    /// GB/s that can be read: shares of the least time for a step's bytes are told.
    #[arg(long)]
    bandwidth: Option<f64>,
    /// Small layers, short contexts, few steps: only whether it runs.
    #[arg(long)]
    tiny: bool,
    #[arg(long, hide = true)]
    bench: bool, // cargo bench says so
}

#[derive(Clone, Copy)]
struct Layout {
    name: &'static str,
    /// Of all weights but those of experts and routers; none: dense, in bf16.
    format: Option<QuantFormat>,
    layers: usize,
    hidden: usize,
    inner: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocabulary: usize,
    theta: f32,
    /// Whether queries and keys are normalized.
    has_head_norms: bool,
    /// Whether the head is the embedding table.
    is_tied: bool,
    /// In every layer.
    experts: Option<ExpertLayout>,
}

#[derive(Clone, Copy)]
struct ExpertLayout {
    count: usize,
    top_k: usize,
    format: QuantFormat,
    gating: Gating,
}

fn main() -> Result<()> {
    let mut options = Options::parse();
    if options.tiny {
        options = Options { layers: Some(2), contexts: vec![16, 64], rounds: 1, steps: 1, ..options };
    }
    // A cache forgets what is behind a context, and keeps the memory.
    options.contexts.sort_unstable_by(|one, other| other.cmp(one));
    let deadline = Instant::now() + Duration::from_secs(options.seconds);
    let device = Device::new_cuda(0)?;
    let name = device.as_cuda_device()?.cuda_stream().context().name()?;
    println!("{}", json!({"kind": "device", "name": name}));
    eprintln!("| layout | context | steps as | tokens/s (least to greatest) | us a step | launches | MB | GB/s | of the floor |");
    eprintln!("|---|---|---|---|---|---|---|---|---|");
    let all = LAYOUTS.map(|layout| (layout.label(&options), layout.with(&options)));
    let is_wanted =
        |label: &str| options.only.is_empty() || options.only.iter().any(|part| label.contains(part));
    let wanted: Vec<_> = all.into_iter().filter(|(label, _)| is_wanted(label)).collect();
    ensure!(!wanted.is_empty(), "--only leaves no layout");
    let mut failed = 0;
    if let Err(error) = attend_to_prompts(&options, &device) {
        failed += 1;
        eprintln!("attention of prompts: {error}");
        println!("{}", json!({"kind": "failure", "name": "attention of prompts", "note": error.to_string()}));
    }
    for (label, layout) in wanted {
        if let Err(error) = measure(&layout, &label, &options, deadline, &device) {
            failed += 1;
            eprintln!("{label}: {error}");
            println!("{}", json!({"kind": "failure", "name": label, "note": error.to_string()}));
        }
    }
    ensure!(failed == 0, "{failed} measurements were not made to the end");
    Ok(())
}

/// Attention of the last tokens of a prompt of Llama-3-8B to all of it, and that their keys are appended, at the longest contexts.
fn attend_to_prompts(options: &Options, device: &Device) -> Result<()> {
    let Layout { heads, kv_heads, head_dim, .. } = LLAMA_3_8B;
    let (tokens, contexts) = if options.tiny { (20, vec![64]) } else { (512, vec![512, 8192, 32768]) };
    let config = KvCacheConfig {
        keys: KvFormat::Bf16,
        values: KvFormat::Bf16,
        ..KvCacheConfig::new(kv_heads, head_dim)
    };
    let options_of_attention =
        AttentionOptions { scale: 1. / (head_dim as f32).sqrt(), ..AttentionOptions::default() };
    let random = |tokens, heads| -> Result<Tensor> {
        let numbers = Tensor::randn(0f32, 1., (1, tokens, heads, head_dim), &Device::Cpu)?;
        Ok(numbers.to_dtype(DType::BF16)?.to_device(device)?)
    };
    let (q, k) = (random(tokens, heads)?, random(tokens, kv_heads)?);
    for context in contexts {
        let mut cache = DeviceKvCache::new(config)?;
        let before = random(context, kv_heads)?;
        cache.append(&before, &before)?;
        let first = context - tokens;
        let mut round = || -> Result<f64> {
            let start = Instant::now();
            for _ in 0..options.steps {
                ensure!(cache.truncate(first), "what the tokens see is gone");
                let y = prefill_attention(&q, &k, &k, &mut cache, options_of_attention)?;
                ensure!(y.is_some(), "no kernel on this device");
            }
            device.synchronize()?;
            Ok(start.elapsed().as_secs_f64() / options.steps as f64)
        };
        round()?;
        let mut seconds = (0..options.rounds.max(1)).map(|_| round()).collect::<Result<Vec<_>>>()?;
        seconds.sort_unstable_by(f64::total_cmp);
        let seconds = seconds[seconds.len() / 2];
        // Two products of as many elements for each token and each key that it sees.
        let seen = tokens * first + tokens * (tokens + 1) / 2;
        let tflops = 4e-12 * (heads * head_dim * seen) as f64 / seconds;
        eprintln!(
            "attention of the last {tokens} of {context} tokens: {:.1} us, {tflops:.0} TFLOP/s",
            seconds * 1e6
        );
        println!(
            "{}",
            json!({"kind": "prefill attention", "name": "Llama-3-8B bf16", "m": tokens, "context": context, "us": seconds * 1e6,
                   "tflops": tflops})
        );
    }
    Ok(())
}

/// Steps of a layout at all contexts, until the time is up.
fn measure(
    layout: &Layout,
    label: &str,
    options: &Options,
    deadline: Instant,
    device: &Device,
) -> Result<()> {
    let most = options.contexts.first().copied().unwrap_or_default();
    let steps = options.steps.max(STEPS_UNTIL_SETTLED);
    let (plan, weights) = layout.plan(device)?;
    let mut caches = layout.caches(most + steps, device)?;
    let mut step = plan.on_device(1, DType::BF16)?;
    for context in options.contexts.iter().copied() {
        ensure!(Instant::now() < deadline, "the time was up before context {context}; --seconds gives more");
        let mut token = 1;
        let mut round = || -> Result<f64> {
            ensure!(caches.iter_mut().all(|cache| cache.truncate(context)), "what the tokens see is gone");
            let start = Instant::now();
            for index in 0..steps {
                token = step.next(&[token], &mut caches, &SAMPLING, 1, index as u64)?[0];
            }
            Ok(steps as f64 / start.elapsed().as_secs_f64())
        };
        round()?;
        let mut speeds = (0..options.rounds.max(1)).map(|_| round()).collect::<Result<Vec<_>>>()?;
        speeds.sort_unstable_by(f64::total_cmp);
        let (least, speed, greatest) = (speeds[0], speeds[speeds.len() / 2], speeds[speeds.len() - 1]);

        let us = 1e6 / speed;
        let bytes = weights + layout.cache_bytes(context);
        let gb_per_s = bytes as f64 / us / 1e3;
        let mode = if step.is_captured() { "graph" } else { "eager" };
        let launches = step.launches();
        let of_floor = options.bandwidth.map(|read| format!("{:.0} %", 100. * gb_per_s / read));
        eprintln!(
            "| {label} | {context} | {mode} | {speed:.1} ({least:.1} to {greatest:.1}) | {us:.1} | {} | {:.0} | {gb_per_s:.0} | {} |",
            launches.unwrap_or_default(),
            bytes as f64 / 1e6,
            of_floor.unwrap_or_default(),
        );
        let record = json!({
            "kind": "decode step", "library": "candle-quant", "name": label, "dtype": "bf16", "context": context, "mode": mode,
            "tokens_per_s": speed, "least": least, "greatest": greatest, "us": us, "launches": launches, "bytes": bytes,
            "gb_per_s": gb_per_s,
        });
        println!("{record}");
    }
    Ok(())
}

impl Layout {
    /// As the options want it.
    fn with(self, options: &Options) -> Self {
        let layers = options.layers.unwrap_or(self.layers);
        if !options.tiny {
            return Self { layers, ..self };
        }
        let (hidden, inner, heads, kv_heads, head_dim, vocabulary) = (256, 512, 4, 2, 64, 640);
        let experts = self.experts.map(|experts| ExpertLayout { count: 6, top_k: 2, ..experts });
        Self { layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, experts, ..self }
    }

    /// Another one if it is not whole.
    fn label(&self, options: &Options) -> String {
        let format = self.format.map_or("bf16".to_string(), |format| format.to_string());
        let name = format!("{} {format}", self.name);
        match (options.tiny, options.layers) {
            (true, _) => format!("tiny {name}"),
            (false, None) => name,
            (false, Some(layers)) => format!("{name}, {layers} layers"),
        }
    }

    /// The plan, and how many bytes of weights a step reads.
    fn plan(&self, device: &Device) -> Result<(StepPlan, usize)> {
        let &Self { hidden, inner, head_dim, .. } = self;
        let random = RandomMatrices::new(self.format, device)?;
        let of_routers = RandomNumbers::new(device)?;
        let (mut bytes, mut of_experts) = (0, 0);
        let mut linear = |n, k| -> Result<Linear> {
            let (linear, size) = random.linear(n, k)?;
            bytes += size;
            Ok(linear)
        };
        let norm = |size: usize| -> Result<RmsNorm> {
            Ok(RmsNorm::new(Tensor::ones(size, DType::F32, &Device::Cpu)?, 1e-5))
        };
        let (table, table_bytes) = random.table(self.vocabulary, hidden)?;
        let head = if self.is_tied { table.as_linear() } else { linear(self.vocabulary, hidden)? };
        let of_pair = |pair: usize| self.theta.powf(-2. * pair as f32 / head_dim as f32);
        let turn = Turn { inverse_frequencies: (0..head_dim / 2).map(of_pair).collect(), ..Turn::default() };
        let (of_hidden, of_head) = (norm(hidden)?, norm(head_dim)?);
        let head_norm = self.has_head_norms.then(|| (&of_head).into());
        let (queries, keys) = (self.heads * head_dim, self.kv_heads * head_dim);
        let mut plan = StepBuilder::new(&table, 1.)?;
        for _ in 0..self.layers {
            let [q, k, v] = [linear(queries, hidden)?, linear(keys, hidden)?, linear(keys, hidden)?];
            let o = linear(hidden, queries)?;
            plan.attention(AttentionBlock {
                norm: Some((&of_hidden).into()),
                q_norm: head_norm,
                k_norm: head_norm,
                turn: Some(&turn),
                ..AttentionBlock::new([&q, &k, &v, &o], head_dim)
            })?;
            if let Some(ExpertLayout { count, top_k, format, gating }) = self.experts {
                let random = RandomPacked::new(format, device)?;
                let mut stack = |n, k| -> Result<ExpertStack> {
                    let stack = random.stack(count, n, k)?;
                    of_experts += stack.size_in_bytes() * top_k / count;
                    Ok(ExpertStack::from_quant(stack, None)?)
                };
                let (gate, up) = (stack(inner, hidden)?, stack(inner, hidden)?);
                let experts = Experts::new(gate, up, stack(hidden, inner)?, gating)?;
                let norm = Some((&of_hidden).into());
                // Of any numbers: which experts a token uses does not matter, only that other hidden states use others.
                let router = Linear::new(of_routers.matrix(count, hidden)?, None);
                of_experts += count * hidden * DType::BF16.size_in_bytes();
                plan.experts(ExpertsBlock { norm, ..ExpertsBlock::new(&router, top_k, &experts) })?;
                continue;
            }
            let (gate, up, down) = (linear(inner, hidden)?, linear(inner, hidden)?, linear(hidden, inner)?);
            plan.feed_forward(FeedForwardBlock {
                norm: Some((&of_hidden).into()),
                ..FeedForwardBlock::new(Some(&gate), &up, &down)
            })?;
        }
        let plan = plan.head(HeadBlock::new(&of_hidden, &head))?;
        Ok((plan, bytes + of_experts + if self.is_tied { table_bytes } else { 0 }))
    }

    /// Caches that hold so many tokens.
    fn caches(&self, tokens: usize, device: &Device) -> Result<Vec<DeviceKvCache>> {
        let format = KvFormat::Bf16;
        let config = KvCacheConfig {
            keys: format,
            values: format,
            ..KvCacheConfig::new(self.kv_heads, self.head_dim)
        };
        // In the order that caches have, which is not copied into it first.
        let zeros = Tensor::zeros((1, self.kv_heads, tokens, self.head_dim), DType::BF16, device)?;
        let zeros = zeros.transpose(1, 2)?;
        let cache = |_| {
            let mut cache = DeviceKvCache::new(config)?;
            cache.append(&zeros, &zeros)?;
            Ok(cache)
        };
        (0..self.layers).map(cache).collect()
    }

    /// What a step reads of caches with so many tokens.
    fn cache_bytes(&self, tokens: usize) -> usize {
        self.layers * 2 * self.kv_heads * self.head_dim * tokens * DType::BF16.size_in_bytes()
    }
}

/// Matrices of random numbers, packed or dense.
enum RandomMatrices {
    Packed(RandomPacked),
    Dense(RandomNumbers),
}

impl RandomMatrices {
    fn new(format: Option<QuantFormat>, device: &Device) -> Result<Self> {
        Ok(match format {
            Some(format) => Self::Packed(RandomPacked::new(format, device)?),
            None => Self::Dense(RandomNumbers::new(device)?),
        })
    }

    /// A projection, and its bytes.
    fn linear(&self, n: usize, k: usize) -> Result<(Linear, usize)> {
        Ok(match self {
            Self::Packed(random) => {
                let weight = random.matrix(n, k)?;
                let size = weight.size_in_bytes();
                (Linear::from_quant(weight, None), size)
            }
            Self::Dense(random) => (Linear::new(random.matrix(n, k)?, None), 2 * n * k),
        })
    }

    /// An embedding table, and its bytes.
    fn table(&self, n: usize, k: usize) -> Result<(Embedding, usize)> {
        Ok(match self {
            Self::Packed(random) => {
                let weight = random.matrix(n, k)?;
                let size = weight.size_in_bytes();
                (Embedding::from_quant(weight, DType::BF16)?, size)
            }
            Self::Dense(random) => (Embedding::new(random.matrix(n, k)?, k), 2 * n * k),
        })
    }
}

/// Matrices of small numbers in bf16.
struct RandomNumbers(Tensor);

impl RandomNumbers {
    fn new(device: &Device) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(2);
        let numbers: Vec<bf16> = (0..WORDS).map(|_| bf16::from_f32(rng.random_range(-0.05..0.05))).collect();
        Ok(Self(Tensor::new(numbers, device)?))
    }

    fn matrix(&self, n: usize, k: usize) -> Result<Tensor> {
        repeated(&self.0, &[n, k])
    }
}

/// Matrices of random codes, with scales that keep what they give small.
struct RandomPacked {
    format: QuantFormat,
    codes: Tensor,
    scales: Tensor,
    biases: Option<Tensor>,
}

impl RandomPacked {
    fn new(format: QuantFormat, device: &Device) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(1);
        let codes: Vec<u32> = (0..WORDS).map(|_| rng.random()).collect();
        let floats = |value: f32| Tensor::new(vec![bf16::from_f32(value); SCALES], device);
        let (scales, biases) = match format.scale() {
            Scale::Float => (floats(0.004)?, Some(floats(-7.5 * 0.004)?)),
            Scale::E8m0 => (Tensor::new(vec![120u8; SCALES], device)?, None), // 2^-7
            other => anyhow::bail!("no layout has scales of {other:?}"),
        };
        Ok(Self { format, codes: Tensor::new(codes, device)?, scales, biases })
    }

    fn matrix(&self, n: usize, k: usize) -> Result<QuantTensor> {
        self.packed(&[n], k)
    }

    fn stack(&self, experts: usize, n: usize, k: usize) -> Result<QuantTensor> {
        self.packed(&[experts, n], k)
    }

    fn packed(&self, rows: &[usize], k: usize) -> Result<QuantTensor> {
        let (words, groups) = (self.format.words_per_row(k)?, self.format.groups_per_row(k)?);
        let of = |piece: &Tensor, columns| repeated(piece, &[rows, &[columns]].concat());
        let biases = self.biases.as_ref().map(|biases| of(biases, groups)).transpose()?;
        let (codes, scales) = (of(&self.codes, words)?, of(&self.scales, groups)?);
        Ok(QuantTensor::new(self.format, codes, scales, biases, None)?)
    }
}

fn repeated(piece: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let (count, size) = (dims.iter().product::<usize>(), piece.elem_count());
    let mut parts = vec![piece.clone(); count / size];
    parts.push(piece.narrow(0, 0, count % size)?);
    Ok(Tensor::cat(&parts, 0)?.reshape(dims)?)
}
