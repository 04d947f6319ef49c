//! The whole of a fine-tuning.

use super::adapter::freeze;
use super::batches::Order;
use super::data::{digest, prepared};
use super::gradients::{gradients, Gradients};
use super::perplexity::of_prepared;
use super::{add_adapter, state, variables, AdamW, Dataset, Options, SaveOptions, Sequence, Variable};
use crate::Model;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device};
use candle_nn::Optimizer;
use candle_quant::checkpoint::AdapterFormat;
use candle_quant::{Error, Result};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Where a training stands after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Progress {
    /// The step, of which the first is 1.
    pub step: usize,
    /// How many there are to be.
    pub steps: usize,
    /// Cross entropy before the step, the mean over its tokens.
    pub loss: f64,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The norm of all gradients together, before it was cut off.
    pub gradient_norm: f64,
    /// Tokens of the step that count.
    pub tokens: usize,
    /// How long the step took, without looks at held-out texts.
    pub duration: Duration,
    /// The perplexity of held-out texts, if it was taken after this step.
    pub held_out: Option<f64>,
}

/// What came of a training.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The loss of each step that was made, those before a resumed one not included.
    pub losses: Vec<f64>,
    /// Steps in all, those before a resumed one included.
    pub steps: usize,
    /// Tokens that counted, in the steps that were made.
    pub tokens: usize,
    /// How long these steps took.
    pub duration: Duration,
    /// The perplexity of held-out texts before the first of these steps, if there are such texts.
    pub held_out_before: Option<f64>,
    /// The same after the last.
    pub held_out_after: Option<f64>,
    /// Whether the callback stopped it.
    pub is_stopped: bool,
}

/// Fine-tunes an adapter, a new one unless the model has it, on a model that stays as it is. The model has it, active and
/// without variables, in the end.
///
/// `progress` is told of each step, and may stop the training; what was learned until then is saved, if anything is. Sequences
/// that are longer than the context are split. All other adapters that are switched on take part, and do not learn.
///
/// Resumed, it goes on from the bits where it was saved, and ends with those of a training that was never interrupted, if
/// `options` are the same. Seed, batch, accumulation, adapter and data have to be; more steps or another schedule are allowed.
///
/// # Errors
/// If there is nothing to learn from, a token is outside of the vocabulary, options are senseless, a target matches no module,
/// the loss is no number, or a state can't be written, read, or belongs to another training.
pub fn finetune(
    model: &Model,
    data: &Dataset,
    options: &Options,
    mut progress: impl FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Report> {
    options.validate()?;
    let context = options.context.unwrap_or(model.context()).min(model.context());
    let training = prepared(model, &data.training, context)?;
    let held_out = match data.held_out.is_empty() {
        true => Vec::new(),
        false => prepared(model, &data.held_out, context)?,
    };
    let held_out = HeldOut { model, sequences: held_out, batch: options.batch };
    let mut run = Run::new(model, training, options)?;
    let mut report = Report {
        losses: Vec::new(),
        steps: run.optimizer.steps(),
        tokens: 0,
        duration: Duration::ZERO,
        held_out_before: held_out.perplexity()?,
        held_out_after: None,
        is_stopped: false,
    };
    report.held_out_after = report.held_out_before;
    while run.optimizer.steps() < options.steps && !report.is_stopped {
        let mut now = run.step()?;
        report.losses.push(now.loss);
        report.steps = now.step;
        report.tokens += now.tokens;
        report.duration += now.duration;
        let is_last = now.step == options.steps;
        if is_last || is_due(now.step, options.held_out_every) {
            now.held_out = held_out.perplexity()?;
        }
        report.is_stopped = progress(&now).is_break();
        if report.is_stopped && now.held_out.is_none() {
            now.held_out = held_out.perplexity()?;
        }
        report.held_out_after = now.held_out.or(report.held_out_after);
        if let Some(SaveOptions { folder, every }) = &options.save {
            if is_last || report.is_stopped || is_due(now.step, *every) {
                model.adapters().save(&options.adapter, folder, AdapterFormat::Peft)?;
                state::write(folder, &run.variables, &run.optimizer, options, &run.data)?;
            }
        }
    }
    freeze(model, &options.adapter)?;
    Ok(report)
}

fn is_due(step: usize, every: Option<usize>) -> bool {
    every.is_some_and(|every| step.is_multiple_of(every))
}

/// Texts that are not learned from.
struct HeldOut<'a> {
    model: &'a Model,
    sequences: Vec<Sequence>,
    batch: usize,
}

impl HeldOut<'_> {
    fn perplexity(&self) -> Result<Option<f64>> {
        let perplexity = || of_prepared(self.model, &self.sequences, self.batch);
        (!self.sequences.is_empty()).then(perplexity).transpose()
    }
}

/// A training on its way.
struct Run<'a> {
    model: &'a Model,
    options: &'a Options,
    training: Vec<Sequence>,
    /// What tells the sequences from others.
    data: String,
    order: Order,
    variables: Vec<Variable>,
    optimizer: AdamW,
}

impl<'a> Run<'a> {
    fn new(model: &'a Model, training: Vec<Sequence>, options: &'a Options) -> Result<Self> {
        let Options { adapter, lora, targets, seed, .. } = options;
        let variables = match model.adapters().slots().iter().any(|slot| slot.get(adapter).is_some()) {
            true => variables(model, adapter)?,
            false => add_adapter(model, adapter, lora, targets, *seed)?,
        };
        model.adapters().set_active(adapter, true);
        let vars = variables.iter().map(|variable| variable.var.clone()).collect();
        let mut optimizer = AdamW::new(vars, options.adamw.clone())?;
        let data = digest(&training);
        if let Some(folder) = &options.resume {
            state::read(folder, &variables, &mut optimizer, options, &data)?;
        }
        let order = Order::new(*seed, training.len());
        Ok(Self { model, options, training, data, order, variables, optimizer })
    }

    fn step(&mut self) -> Result<Progress> {
        let start = Instant::now();
        let Options { steps, batch, accumulation, layers_per_segment, schedule, clip, .. } = self.options;
        let done = self.optimizer.steps();
        let count = batch.saturating_mul(*accumulation);
        let indices = self.order.take(done.saturating_mul(count), count);
        let sequences: Vec<_> =
            indices.into_iter().filter_map(|index| self.training.get(index)).cloned().collect();
        let Gradients { loss, tokens, mut store } =
            gradients(self.model, &self.variables, &sequences, *batch, *layers_per_segment)?;
        let gradient_norm = norm(&self.variables, &store)?;
        if !loss.is_finite() || !gradient_norm.is_finite() {
            let expected = "finite numbers: a lower learning rate may help";
            let found = format!("{loss}, with gradients of norm {gradient_norm}");
            return Err(Error::mismatch(format!("loss of step {}", done + 1), expected, found));
        }
        if let Some(clip) = clip.filter(|clip| *clip < gradient_norm) {
            scale(&self.variables, &mut store, clip / gradient_norm)?;
        }
        let learning_rate = schedule.rate(done, *steps);
        self.optimizer.set_learning_rate(learning_rate);
        self.optimizer.step(&store)?;
        Ok(Progress {
            step: done + 1,
            steps: *steps,
            loss,
            learning_rate,
            gradient_norm,
            tokens,
            duration: start.elapsed(),
            held_out: None,
        })
    }
}

/// The norm of all gradients together.
fn norm(variables: &[Variable], store: &GradStore) -> Result<f64> {
    let mut squares = 0.;
    for gradient in variables.iter().filter_map(|variable| store.get(&variable.var)) {
        let squared = gradient.sqr()?.sum_all()?.to_device(&Device::Cpu)?;
        squares += squared.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    }
    Ok(squares.sqrt())
}

fn scale(variables: &[Variable], store: &mut GradStore, factor: f64) -> Result<()> {
    for Variable { var, .. } in variables {
        if let Some(gradient) = store.remove(var) {
            store.insert(var, (gradient * factor)?);
        }
    }
    Ok(())
}
