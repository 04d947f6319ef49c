//! Fine-tuning on packed weights: low-rank adapters learn, the weights stay as they are (Dettmers et al. 2023, QLoRA).
//!
//! [`finetune`] does all of it: adapters, batches, AdamW, schedule, perplexity of held-out texts, saving and resuming.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_quant::Checkpoint;
//! use candle_quant_models::train::{finetune, Dataset, Options, Schedule, Sequence};
//! use candle_quant_models::Model;
//! use std::ops::ControlFlow;
//!
//! # fn main() -> candle_quant::Result<()> {
//! let model = Model::load(&Checkpoint::open("assets/tiny")?, DType::F32, &Device::Cpu)?;
//! let texts = [[7u32, 20, 33, 46, 59], [9, 22, 35, 48, 61]];
//! let data = Dataset { training: texts.map(Sequence::new).to_vec(), held_out: vec![] };
//! let schedule = Schedule { learning_rate: 1e-2, warm_up: 1, ..Default::default() };
//! let options = Options { steps: 4, batch: 2, schedule, ..Default::default() };
//! let report = finetune(&model, &data, &options, |progress| {
//!     println!("{} of {}: loss {:.3}", progress.step, progress.steps, progress.loss);
//!     ControlFlow::Continue(())
//! })?;
//! assert!(report.losses[3] < report.losses[0]);
//! // The model has the adapter now: it applies until it is switched off.
//! assert!(model.adapters().is_active());
//! # Ok(())
//! # }
//! ```
//!
//! What a step holds in memory: the packed weights; the input of each segment of layers, of one layer each unless
//! [`Options::layers_per_segment`] says otherwise; what one segment makes of it, with gradients; logits of a few tokens; the
//! adapters with their gradients and two moments. So it grows with depth by inputs and adapters alone.
//!
//! On the CPU the same seed gives the same numbers on any number of threads.
//!
//! Those who write their own loop take [`add_adapter`], [`gradients`], and an optimizer: [`AdamW`], whose state can be saved, or
//! any of candle_nn's.

mod adamw;
mod adapter;
mod batches;
mod data;
mod finetune;
mod gradients;
mod options;
mod perplexity;
mod schedule;
mod state;

pub use adamw::AdamW;
pub use adapter::{add_adapter, variables, Variable};
pub use data::{Dataset, Sequence};
pub use finetune::{finetune, Progress, Report};
pub use gradients::{gradients, Gradients};
pub use options::{Options, SaveOptions};
pub use perplexity::perplexity;
pub use schedule::Schedule;
