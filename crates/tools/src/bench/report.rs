//! What was measured, of what, where and how.

use super::matmuls::MatmulFigure;
use super::options::{BenchOptions, Text};
use super::spread::Spread;
use super::texts::Timing;
use super::{cpu_name, peak_resident};
use candle_core::Device;
use candle_quant::{instruction_set, ActivationPrecision, Checkpoint};
use candle_quant_models::Model;
use serde::Serialize;
use std::collections::BTreeMap;

/// What was measured of a model. Its JSON has these fields as keys, all of them always.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BenchReport {
    /// The version of these fields: it changes when one changes its meaning or goes.
    pub schema: u32,
    /// The version of candle-quant.
    pub version: String,
    /// What was run.
    pub model: BenchedModel,
    /// Where.
    pub machine: Machine,
    /// How.
    pub settings: Settings,
    /// From the open checkpoint to the model.
    pub load_seconds: f64,
    /// The most memory that the process has had resident when all texts were computed; none where the system does not say.
    pub peak_memory_bytes: Option<u64>,
    /// How fast memory is read, unless that was not measured.
    pub read_bandwidth: Option<ReadBandwidth>,
    /// Prompts.
    pub prefill: Vec<PrefillFigure>,
    /// Tokens one by one.
    pub decode: Vec<DecodeFigure>,
    /// Kinds of weights.
    pub matmuls: Vec<MatmulFigure>,
    /// Texts that are longer than the context.
    pub left_out: Vec<Text>,
    /// What else is to be said.
    pub notes: Vec<String>,
}

/// The model that was run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BenchedModel {
    /// Where it was opened.
    pub path: String,
    /// The kind of checkpoint.
    pub kind: String,
    /// What its config calls it.
    pub model_type: Option<String>,
    /// How many of its weights are in which format.
    pub formats: BTreeMap<String, usize>,
    /// Of all weights together, scales and biases included.
    pub bits_per_weight: f64,
    /// Their bytes.
    pub weight_bytes: u64,
}

/// The machine that it ran on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Machine {
    /// What the CPU calls itself.
    pub cpu: String,
    /// Threads that computed.
    pub threads: usize,
    /// Instructions that the kernels used.
    pub instruction_set: String,
    /// `cpu`, or `cuda`.
    pub device: String,
}

/// What decides about speed beside the model and the machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Settings {
    /// The dtype of activations.
    pub dtype: String,
    /// Their precision in integer matmuls.
    pub activations: String,
    /// How the KV cache holds keys.
    pub kv_cache_keys: String,
    /// How it holds values.
    pub kv_cache_values: String,
    /// The most tokens of a text.
    pub context: usize,
    /// Tokens of a prompt that were computed at once.
    pub prefill_chunk: usize,
    /// How often each was measured.
    pub repetitions: usize,
}

/// How fast all threads together read memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ReadBandwidth {
    /// The best round, with which shares are computed.
    pub bytes_per_second: f64,
    /// All rounds.
    pub rounds: Vec<f64>,
    /// How much memory was read in each.
    pub buffer_bytes: usize,
}

/// What a prompt took.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PrefillFigure {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// How many of them in a second.
    pub tokens_per_second: Spread,
    /// From the prompt to the logits from which its answer's first token is drawn.
    pub first_token_seconds: Spread,
    /// The time of each repetition.
    pub seconds: Vec<f64>,
}

/// What tokens took that came one by one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DecodeFigure {
    /// Tokens in the cache before.
    pub depth: usize,
    /// Tokens of a repetition.
    pub tokens: usize,
    /// How many in a second.
    pub tokens_per_second: Spread,
    /// The time of each repetition.
    pub seconds: Vec<f64>,
    /// Bytes of weights that a step reads.
    pub weight_bytes_per_step: u64,
    /// Bytes of keys and values that it reads, the mean of the steps.
    pub cache_bytes_per_step: u64,
    /// Both, in a second.
    pub bytes_per_second: f64,
    /// That by the bandwidth of memory, if it was measured: more than 1 is possible where a cache holds the weights.
    pub share_of_bandwidth: Option<f64>,
}

impl ReadBandwidth {
    pub(super) fn of(gigabytes: &[f64], buffer_bytes: usize) -> Option<Self> {
        let rounds: Vec<f64> = gigabytes.iter().map(|round| round * 1e9).collect();
        let bytes_per_second = rounds.iter().copied().reduce(f64::max)?;
        Some(Self { bytes_per_second, rounds, buffer_bytes })
    }
}

impl BenchReport {
    /// What is known when the texts are computed.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        model: &Model,
        options: &BenchOptions,
        load_seconds: f64,
    ) -> Self {
        let summary = model.summary();
        let (keys, values) = model.cache_formats();
        Self {
            schema: 1,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: BenchedModel {
                path: checkpoint.path().display().to_string(),
                kind: checkpoint.kind().to_string(),
                model_type: checkpoint.config()["model_type"].as_str().map(str::to_owned),
                formats: summary.formats().map(|(name, share)| (name.to_owned(), share.count)).collect(),
                bits_per_weight: summary.bits_per_weight(),
                weight_bytes: summary.size_in_bytes(),
            },
            machine: Machine {
                cpu: cpu_name(),
                threads: rayon::current_num_threads(),
                instruction_set: instruction_set().to_owned(),
                device: match model.device() {
                    Device::Cpu => "cpu",
                    Device::Cuda(_) => "cuda",
                    Device::Metal(_) => "metal",
                }
                .to_owned(),
            },
            settings: Settings {
                dtype: model.dtype().as_str().to_owned(),
                activations: ActivationPrecision::current().to_string(),
                kv_cache_keys: keys.to_string(),
                kv_cache_values: values.to_string(),
                context: model.context(),
                prefill_chunk: options.prefill_chunk,
                repetitions: options.repetitions,
            },
            load_seconds,
            peak_memory_bytes: peak_resident(),
            read_bandwidth: None,
            prefill: Vec::new(),
            decode: Vec::new(),
            matmuls: Vec::new(),
            left_out: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds what a text took.
    pub(super) fn add(&mut self, timing: Timing, model: &Model) {
        let (tokens_per_second, seconds) = (timing.tokens_per_second(), timing.seconds);
        match timing.text {
            Text::Prefill { tokens } => self.prefill.push(PrefillFigure {
                tokens,
                tokens_per_second,
                first_token_seconds: Spread::of(&seconds),
                seconds,
            }),
            Text::Decode { depth, tokens } => {
                let steps = (depth..depth.saturating_add(tokens)).map(|depth| model.step_bytes(depth));
                let (weights, caches): (Vec<_>, Vec<_>) =
                    steps.map(|step| (step.weights, step.cache)).unzip();
                let mean = |bytes: &[u64]| bytes.iter().sum::<u64>() / (bytes.len() as u64).max(1);
                let (weights, cache) = (mean(&weights), mean(&caches));
                let bytes_per_second = (weights + cache) as f64 * tokens_per_second.mean;
                let bandwidth = self.read_bandwidth.as_ref().map(|read| read.bytes_per_second);
                self.decode.push(DecodeFigure {
                    depth,
                    tokens,
                    tokens_per_second,
                    seconds,
                    weight_bytes_per_step: weights,
                    cache_bytes_per_step: cache,
                    bytes_per_second,
                    share_of_bandwidth: bandwidth.map(|bandwidth| bytes_per_second / bandwidth),
                });
            }
        }
    }
}
