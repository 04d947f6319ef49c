//! The loss and its gradients, with the activations of one segment of layers in memory.

use super::batches::Batch;
use super::{Sequence, Variable};
use crate::differentiable::of_one;
use crate::rope::Positions;
use crate::Model;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var, D};
use candle_quant::{Error, Result};
use std::ops::Range;

/// Logits that exist at once, 16 MiB in f32.
const LOGITS: usize = 1 << 22;

/// What a backward pass gives.
#[derive(Debug)]
pub struct Gradients {
    /// Cross entropy, the mean over all tokens that count.
    pub loss: f64,
    /// Tokens that count.
    pub tokens: usize,
    /// The gradient of the loss for each variable that it depends on.
    pub store: GradStore,
}

/// The loss of the next tokens of some sequences, and the gradients of variables in adapters, as
/// [`forward_whole`](Model::forward_whole) and one backward pass would give them.
///
/// Every `batch` sequences go through the model together. Layers are computed twice, `layers_per_segment` at a time: first
/// for their outputs alone, then from the last to the first with gradients (Chen et al. 2016). Logits are made for the tokens
/// that count, some at a time.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{AdamW, Optimizer, ParamsAdamW};
/// use candle_quant::nn::LoraConfig;
/// use candle_quant::Checkpoint;
/// use candle_quant_models::train::{add_adapter, gradients, Sequence};
/// use candle_quant_models::Model;
///
/// # fn main() -> candle_quant::Result<()> {
/// let model = Model::load(&Checkpoint::open("assets/tiny")?, DType::F32, &Device::Cpu)?;
/// let lora = LoraConfig { rank: 4, alpha: 8., rs_lora: false, dora: false };
/// let variables = add_adapter(&model, "style", &lora, &["q_proj", "v_proj"], 7)?;
/// let vars = variables.iter().map(|variable| variable.var.clone()).collect();
/// let mut optimizer = AdamW::new(vars, ParamsAdamW::default())?;
/// let text = [Sequence::new([7u32, 20, 33, 46])];
/// for _ in 0..2 {
///     let found = gradients(&model, &variables, &text, 1, 1)?;
///     optimizer.step(&found.store)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// If no token counts, a sequence is longer than the context, a token is outside of the vocabulary, or the model is a part of
/// one.
pub fn gradients(
    model: &Model,
    variables: &[Variable],
    sequences: &[Sequence],
    batch: usize,
    layers_per_segment: usize,
) -> Result<Gradients> {
    let sequences: Vec<_> = sequences.iter().filter(|sequence| sequence.counted() > 0).collect();
    let tokens: usize = sequences.iter().map(|sequence| sequence.counted()).sum();
    if tokens == 0 {
        return Err(Error::mismatch("sequences", "a token that counts", "none"));
    }
    let mut sums = Sums { variables, store: empty_store()?, loss: 0. };
    for sequences in sequences.chunks(batch.max(1)) {
        let batch = Batch::new(sequences, model.device())?;
        Pass::new(model, &batch, layers_per_segment)?.backward(&batch, tokens, &mut sums)?;
    }
    Ok(Gradients { loss: sums.loss / tokens as f64, tokens, store: sums.store })
}

/// The sum of the cross entropies of all tokens of a batch that count, without gradients.
pub(super) fn loss_sum(model: &Model, batch: &Batch) -> Result<f64> {
    let positions = model.positions(&batch.ids)?;
    let mut x = model.embed(&batch.ids)?;
    for layer in 0..model.layer_count() {
        x = model.run_segment(layer..layer + 1, &x, &positions)?.detach();
    }
    let mut sum = 0.;
    for (x, targets) in predictions(model, &x, batch)? {
        let logits = model.head(&x)?.detach().to_dtype(DType::F32)?;
        sum += CrossEntropy::new(&logits, &targets)?.sum()?;
    }
    Ok(sum)
}

/// What was added up so far.
struct Sums<'a> {
    variables: &'a [Variable],
    store: GradStore,
    loss: f64,
}

impl Sums<'_> {
    fn add(&mut self, from: &GradStore) -> Result<()> {
        for Variable { var, .. } in self.variables {
            let Some(more) = from.get(var) else { continue };
            let sum = match self.store.get(var) {
                Some(sum) => (sum + more)?,
                None => more.clone(),
            };
            self.store.insert(var, sum.detach());
        }
        Ok(())
    }
}

/// A forward pass that keeps the inputs of segments.
struct Pass<'a> {
    model: &'a Model,
    positions: Positions,
    /// Those that variables are in or before, with their inputs.
    segments: Vec<(Range<usize>, Tensor)>,
    output: Tensor,
}

impl<'a> Pass<'a> {
    fn new(model: &'a Model, batch: &Batch, layers_per_segment: usize) -> Result<Self> {
        let positions = model.positions(&batch.ids)?;
        let mut x = model.embed(&batch.ids)?.detach();
        let (layers, step) = (model.layer_count(), layers_per_segment.max(1));
        let mut segments = Vec::new();
        for start in (0..layers).step_by(step) {
            let segment = start..start.saturating_add(step).min(layers);
            let output = model.run_segment(segment.clone(), &x, &positions)?;
            if output.track_op() || !segments.is_empty() {
                segments.push((segment, x));
            }
            x = output.detach();
        }
        Ok(Self { model, positions, segments, output: x })
    }

    fn backward(self, batch: &Batch, tokens: usize, sums: &mut Sums) -> Result<()> {
        let mut of_output = self.head(batch, tokens, sums)?;
        let mut segments = self.segments;
        while let Some((segment, input)) = segments.pop() {
            // Nothing below the first segment learns.
            let is_first = segments.is_empty();
            let (x, var) = match is_first {
                true => (input, None),
                false => {
                    let var = Var::from_tensor(&input)?;
                    drop(input);
                    (var.as_tensor().clone(), Some(var))
                }
            };
            let output = self.model.run_segment(segment, &x, &self.positions)?;
            let mut store = backward_from(&output, of_output)?;
            drop(output);
            sums.add(&store)?;
            let Some(var) = var else { break };
            of_output = match store.remove(&var) {
                Some(gradient) => gradient.detach(),
                None => var.as_detached_tensor().zeros_like()?,
            };
        }
        Ok(())
    }

    /// Adds the loss and the gradients of the head; returns the gradient of the last layer's output.
    fn head(&self, batch: &Batch, tokens: usize, sums: &mut Sums) -> Result<Tensor> {
        let mut parts = Vec::new();
        for (x, targets) in predictions(self.model, &self.output, batch)? {
            let x = Var::from_tensor(&x)?;
            let logits = self.model.head(x.as_tensor())?;
            let entropy = CrossEntropy::new(&logits.detach().to_dtype(DType::F32)?, &targets)?;
            sums.loss += entropy.sum()?;
            let of_logits = entropy.gradient(1. / tokens as f64)?.to_dtype(logits.dtype())?;
            let mut store = backward_from(&logits, of_logits)?;
            sums.add(&store)?;
            parts.push(match store.remove(&x) {
                Some(gradient) => gradient.detach(),
                None => x.as_detached_tensor().zeros_like()?,
            });
        }
        let rows = Tensor::new(batch.rows.as_slice(), self.output.device())?;
        let flat = self.output.flatten_to(1)?.zeros_like()?;
        Ok(flat.index_add(&rows, &Tensor::cat(&parts, 0)?, 0)?.reshape(self.output.shape())?)
    }
}

/// What the last layer has made of the tokens before those that count, `[rows, hidden]`, and these, so many at a time that
/// their logits take little memory.
fn predictions(model: &Model, output: &Tensor, batch: &Batch) -> Result<Vec<(Tensor, Tensor)>> {
    let count = (LOGITS / model.vocabulary().max(1)).max(1);
    let flat = output.flatten_to(1)?;
    let part = |(rows, targets): (&[u32], &[u32])| {
        let rows = flat.index_select(&Tensor::new(rows, output.device())?, 0)?;
        Ok((rows, Tensor::new(targets, output.device())?))
    };
    batch.rows.chunks(count).zip(batch.targets.chunks(count)).map(part).collect()
}

/// The negative logarithms of the probabilities of targets.
struct CrossEntropy {
    /// `[rows, vocabulary]`: e to the logits above their maximum.
    powers: Tensor,
    /// `[rows, 1]`.
    sums: Tensor,
    /// `[rows, 1]`.
    targets: Tensor,
    /// `[rows, 1]`: how far the target's logit is below the maximum.
    below: Tensor,
}

impl CrossEntropy {
    /// `logits` are `[rows, vocabulary]` in f32, `targets` `[rows]`.
    fn new(logits: &Tensor, targets: &Tensor) -> Result<Self> {
        let targets = targets.unsqueeze(1)?;
        let above = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?;
        let below = above.gather(&targets, D::Minus1)?;
        let powers = above.exp()?;
        let sums = powers.sum_keepdim(D::Minus1)?;
        Ok(Self { powers, sums, targets, below })
    }

    /// The sum over all rows.
    fn sum(&self) -> Result<f64> {
        let entropies = (self.sums.log()? - &self.below)?.flatten_all()?.to_device(&Device::Cpu)?;
        Ok(entropies.to_vec1::<f32>()?.into_iter().map(f64::from).sum())
    }

    /// The gradient of the sum for the logits, times `factor`.
    fn gradient(self, factor: f64) -> Result<Tensor> {
        let Self { powers, sums, targets, .. } = self;
        let probabilities = powers.broadcast_div(&(sums * factor.recip())?)?;
        drop(powers);
        let minus = (targets.ones_like()?.to_dtype(DType::F32)? * -factor)?;
        Ok(probabilities.scatter_add(&targets, &minus, D::Minus1)?)
    }
}

/// The gradients of all variables that `output` depends on, for its own.
fn backward_from(output: &Tensor, gradient: Tensor) -> Result<GradStore> {
    let end = Tensor::zeros((), output.dtype(), output.device())?;
    Ok(of_one(output, end, move |_, _, _| Ok(gradient.clone()))?.backward()?)
}

/// A store without gradients of variables.
fn empty_store() -> Result<GradStore> {
    Ok(Tensor::zeros((), DType::F32, &Device::Cpu)?.backward()?)
}
