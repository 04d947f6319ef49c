//! How a model is loaded: the options that all commands share which run one.

use super::adapters::{AdapterOptions, OpenAdapters};
use super::quantize::{Formats, QuantizeOptions};
use super::{device, names};
use anyhow::Result;
use candle_core::{DType, Device};
use candle_quant::checkpoint::{GgmlKernels, OpenOptions};
use candle_quant::{ActivationPrecision, Checkpoint, KvFormat, VarBuilder};
use candle_quant_models::{CacheOptions, Config, Model, ModelOptions};
use std::path::Path;

// Named as those of candle's examples. (A doc comment here would replace that of the command.)
#[derive(clap::Args, Debug)]
pub struct LoadOptions {
    #[command(flatten)]
    quantize: QuantizeOptions,
    /// Run on the CPU even if there is a GPU.
    #[arg(long)]
    pub cpu: bool,
    /// Precision of activations: f32, f16 or bf16 [default: f32 on the CPU, else bf16].
    #[arg(long, value_parser = parse_dtype)]
    dtype: Option<DType>,
    /// Digits of activations in integer matmuls on the CPU: exact, 16 or 8 bits; fewer take less time
    /// [default: exact, or what CANDLE_QUANT_ACTIVATIONS says].
    #[arg(long)]
    activations: Option<ActivationPrecision>,
    /// How the KV cache holds keys and values: f32, f16, bf16, 8bit or 4bit, one for both or KEYS,VALUES [default: as
    /// activations]. On a GPU as activations, or 8bit and 4bit.
    #[arg(long, value_name = "FORMAT[,FORMAT]", value_parser = parse_cache)]
    kv_cache: Option<(KvFormat, KvFormat)>,
    /// The most tokens of a text, be it more or less than the model is made for [default: what its config states].
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// What computes with weights in blocks of GGML's types: own kernels, or candle, which rounds activations to 8 bits.
    #[arg(long, value_enum, default_value_t = Ggml::Own)]
    ggml: Ggml,
    #[command(flatten)]
    adapters: AdapterOptions,
}

/// [`GgmlKernels`] on the command line.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
pub enum Ggml {
    Own,
    Candle,
}

/// A checkpoint with the choices that a user made of how its model is loaded.
#[derive(Clone)]
pub struct Loader {
    pub checkpoint: Checkpoint,
    pub formats: Formats,
    pub dtype: DType,
    pub options: ModelOptions,
    adapters: OpenAdapters,
}

impl LoadOptions {
    /// The checkpoint at a path, or of a name.
    pub fn open(&self, path: &Path) -> candle_quant::Result<Checkpoint> {
        let ggml = match self.ggml {
            Ggml::Own => GgmlKernels::Own,
            Ggml::Candle => GgmlKernels::Candle,
        };
        names::open_with(path, OpenOptions { ggml, ..OpenOptions::default() })
    }

    /// The choices for a checkpoint, all of whose parts are on the CPU or on GPUs. The precision of activations is set for
    /// the whole program.
    pub fn loader(&self, checkpoint: Checkpoint, on_cpu: bool) -> Result<Loader> {
        if let Some(activations) = self.activations {
            activations.set();
        }
        let (keys, values) = self.kv_cache.unzip();
        let (checkpoint, formats) = self.quantize.apply(checkpoint)?;
        Ok(Loader {
            checkpoint,
            formats,
            dtype: self.dtype.unwrap_or(if on_cpu { DType::F32 } else { DType::BF16 }),
            options: ModelOptions {
                cache: CacheOptions { keys, values, ..Default::default() },
                context: self.context,
            },
            adapters: self.adapters.open()?,
        })
    }

    /// The first GPU, or the CPU.
    pub fn device(&self) -> Device {
        device::first(self.cpu)
    }
}

impl Loader {
    /// The whole model.
    pub fn load(&self, device: &Device) -> candle_quant::Result<Model> {
        self.load_from(VarBuilder::from_checkpoint(&self.checkpoint, self.dtype, device))
    }

    /// What of the model a builder has, which is of the same checkpoint.
    pub fn load_from(&self, vb: VarBuilder) -> candle_quant::Result<Model> {
        let config = Config::from_checkpoint(&self.checkpoint)?;
        let model = Model::with_options(&config, self.formats.apply(vb), self.options)?;
        self.adapters.add_to(&model)?;
        Ok(model)
    }
}

/// Formats of keys and values.
pub fn parse_cache(text: &str) -> candle_quant::Result<(KvFormat, KvFormat)> {
    match text.split_once(',') {
        Some((keys, values)) => Ok((keys.parse()?, values.parse()?)),
        None => text.parse().map(|both| (both, both)),
    }
}

/// The precisions activations can have.
pub fn parse_dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        _ => Err("expected f32, f16 or bf16".to_string()),
    }
}
