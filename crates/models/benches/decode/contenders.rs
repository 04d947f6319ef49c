//! This crate's model and candle's, behind one face.

use crate::files::Files;
use crate::options::{Library, Options};
use anyhow::{bail, Result};
use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Tensor};
use candle_quant::Checkpoint;
use candle_quant_models::Model;
use candle_transformers::models::quantized_qwen3::ModelWeights;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// A loaded model, and how many tokens its cache has.
pub struct Contender {
    pub library: Library,
    model: Loaded,
    device: Device,
    cached: usize,
    chunk: usize,
}

enum Loaded {
    Ours(Box<Model>),
    Candle(Box<ModelWeights>),
}

impl Library {
    pub fn name(self) -> &'static str {
        match self {
            Self::CandleQuant => "candle-quant",
            Self::Candle => "candle",
        }
    }
}

impl Contender {
    /// Those that are asked for.
    pub fn all(options: &Options, files: &Files) -> Result<Vec<Self>> {
        let wanted = [Library::CandleQuant, Library::Candle].into_iter().filter(|l| options.library(*l));
        wanted.map(|library| Self::load(library, files.path(library), options.chunk)).collect()
    }

    /// Loads a checkpoint of this crate's, or a GGUF file.
    pub fn load(library: Library, path: &Path, chunk: usize) -> Result<Self> {
        let device = Device::Cpu;
        let model = match library {
            Library::CandleQuant => {
                Loaded::Ours(Box::new(Model::load(&Checkpoint::open(path)?, DType::F32, &device)?))
            }
            Library::Candle => {
                let mut reader = BufReader::new(File::open(path)?);
                let content = gguf_file::Content::read(&mut reader)?;
                Loaded::Candle(Box::new(ModelWeights::from_gguf(content, &mut reader, &device)?))
            }
        };
        Ok(Self { library, model, device, cached: 0, chunk })
    }

    pub fn clear(&mut self) {
        match &mut self.model {
            Loaded::Ours(model) => model.clear_kv_cache(),
            Loaded::Candle(model) => model.clear_kv_cache(),
        }
        self.cached = 0;
    }

    /// Computes the next tokens of each of `batch` texts, with the logits of the last one of each.
    pub fn forward_last(&mut self, batch: usize, tokens: usize) -> Result<()> {
        self.forward_at(batch, tokens, self.cached, false)
    }

    /// The same with the logits of all tokens; candle's model has those of the last one alone.
    pub fn forward(&mut self, tokens: usize) -> Result<()> {
        self.forward_at(1, tokens, self.cached, true)
    }

    fn forward_at(&mut self, batch: usize, tokens: usize, offset: usize, all: bool) -> Result<()> {
        // Any tokens, other ones in every forward.
        let ids = (0..batch * tokens).map(|at| ((at * 31 + self.cached * 7) % 256) as u32).collect();
        let ids = Tensor::from_vec(ids, (batch, tokens), &self.device)?;
        let logits = match &mut self.model {
            Loaded::Ours(model) if all => {
                model.forward(&ids, offset)?.narrow(1, tokens - 1, 1)?.squeeze(1)?
            }
            Loaded::Ours(model) => model.forward_last(&ids, offset)?,
            Loaded::Candle(model) => model.forward(&ids, offset)?,
        };
        self.cached += tokens;
        // A step is over when its result is there. Numbers that are none would be slower, or faster.
        if !logits.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?.iter().all(|logit| logit.is_finite()) {
            bail!("{}: logits that are not finite", self.library.name());
        }
        Ok(())
    }

    /// Computes a prompt, as `generate` does.
    pub fn prefill(&mut self, prompt: usize) -> Result<()> {
        self.chunks(prompt, true)
    }

    /// Makes the cache `context` tokens long, by the quickest way that leaves one of that size.
    pub fn reach(&mut self, context: usize) -> Result<()> {
        if self.cached > context {
            self.clear();
        }
        self.chunks(context - self.cached, matches!(self.model, Loaded::Ours(_)))
    }

    /// Computes tokens in chunks; each sees those before it, or else itself alone.
    fn chunks(&mut self, tokens: usize, all_are_seen: bool) -> Result<()> {
        let end = self.cached + tokens;
        while self.cached < end {
            let offset = if all_are_seen { self.cached } else { 0 };
            self.forward_at(1, self.chunk.min(end - self.cached), offset, false)?;
        }
        Ok(())
    }
}
