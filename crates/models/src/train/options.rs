//! How to fine-tune.

use super::Schedule;
use candle_nn::ParamsAdamW;
use candle_quant::nn::LoraConfig;
use candle_quant::{Error, Result};
use std::path::PathBuf;

/// How [`finetune`](super::finetune) learns.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the adapter. If the model has one of that name already, it learns on, and `lora` and `targets` do not
    /// matter.
    pub adapter: String,
    /// The shape of a new adapter.
    pub lora: LoraConfig,
    /// The modules of a new adapter, as [`add_adapter`](super::add_adapter) takes them.
    pub targets: Vec<String>,
    /// Steps of the optimizer, those before a resumed one included.
    pub steps: usize,
    /// Sequences that go through the model together.
    pub batch: usize,
    /// Batches of a step, one after another: their gradients are added up, as if they were one.
    pub accumulation: usize,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// The other parameters of AdamW; its `lr` does not matter.
    pub adamw: ParamsAdamW,
    /// The largest norm of all gradients together; larger ones are scaled down.
    pub clip: Option<f64>,
    /// Decides A of a new adapter and the order of sequences.
    pub seed: u64,
    /// The most tokens that the model sees at once; longer sequences are split. As many as the model is made for without it.
    pub context: Option<usize>,
    /// Layers whose activations are computed again together in a backward pass: more need more memory, and no less time.
    pub layers_per_segment: usize,
    /// Steps between looks at the held-out perplexity; without it, it is taken before the first and after the last.
    pub held_out_every: Option<usize>,
    /// Where to save; nowhere without it.
    pub save: Option<SaveOptions>,
    /// A folder of [`SaveOptions`], to go on from what is saved there.
    pub resume: Option<PathBuf>,
}

/// Where and when to save what resumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveOptions {
    /// The folder. It gets the adapter, and `training_state.safetensors`, which is all that [`Options::resume`] needs.
    pub folder: PathBuf,
    /// Steps between; without it after the last one alone, and where the progress callback stops.
    pub every: Option<usize>,
}

impl Default for Options {
    /// 100 steps of 8 sequences, rank 8 in all linear layers but the output head.
    fn default() -> Self {
        Self {
            adapter: "default".to_string(),
            lora: LoraConfig { rank: 8, alpha: 16., rs_lora: false, dora: false },
            targets: vec!["all-linear".to_string()],
            steps: 100,
            batch: 8,
            accumulation: 1,
            schedule: Schedule::default(),
            // Adapters are small already.
            adamw: ParamsAdamW { weight_decay: 0., ..ParamsAdamW::default() },
            clip: Some(1.),
            seed: 0,
            context: None,
            layers_per_segment: 1,
            held_out_every: None,
            save: None,
            resume: None,
        }
    }
}

impl Options {
    pub(super) fn validate(&self) -> Result<()> {
        self.schedule.validate()?;
        let every = [self.held_out_every, self.save.as_ref().and_then(|save| save.every), self.context];
        let counts = [self.steps, self.batch, self.accumulation, self.layers_per_segment];
        if counts.into_iter().chain(every.into_iter().flatten()).any(|count| count == 0) {
            let expected = "at least one step, sequence, batch, layer and token";
            return Err(Error::mismatch("options of training", expected, format!("{self:?}")));
        }
        match self.clip {
            Some(clip) if clip.is_nan() || clip <= 0. => {
                Err(Error::mismatch("`clip`", "a norm above 0, or none", clip.to_string()))
            }
            _ => Ok(()),
        }
    }
}
