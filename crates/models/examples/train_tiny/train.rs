//! The training loop: fresh stories, AdamW, warm-up and cosine decay, clipped gradients.

use crate::model::{Config, Model, Positions};
use crate::stories::Stories;
use crate::tokenizer::{encode, end_of_text};
use anyhow::{anyhow, ensure, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use std::collections::HashSet;
use std::time::Instant;
use tokenizers::Tokenizer;

/// How long and how fast to train: one warm-up and decay of the learning rate.
#[derive(Debug, Clone)]
pub struct Schedule {
    pub steps: usize,
    pub batch: usize,
    pub context: usize,
    pub learning_rate: f64,
    pub seed: u64,
}

/// A batch is cut into this many equal parts that run on a thread each. It is a constant, not the number of
/// cores, because the order of summation, and so the trained weights, depend on it.
const SHARDS: usize = 2;
const MAX_GRAD_NORM: f64 = 1.0;

/// Rows of tokens that begin at the beginning of a story, as generation does; half of them with the
/// end-of-text token in front, which prompts may or may not have.
struct Rows<'a> {
    stories: Stories,
    held_out: &'a HashSet<&'a str>,
    tokenizer: &'a Tokenizer,
    end: u32,
    told: usize,
}

impl Rows<'_> {
    fn next(&mut self, len: usize) -> Result<Vec<u32>> {
        let mut row = Vec::with_capacity(2 * len);
        if self.told.is_multiple_of(2) {
            row.push(self.end);
        }
        self.told += 1;
        while row.len() < len {
            let story = self.stories.tell()?;
            if self.held_out.contains(story.as_str()) {
                continue;
            }
            row.extend(encode(self.tokenizer, &story)?);
            row.push(self.end);
        }
        row.truncate(len);
        Ok(row)
    }
}

/// Trains `vars` in place and rounds them to bf16, as they are saved.
pub fn train(
    cfg: &Config,
    vars: &VarMap,
    tokenizer: &Tokenizer,
    held_out: &[String],
    run: &Schedule,
) -> Result<()> {
    let device = Device::Cpu;
    ensure!(run.batch.is_multiple_of(SHARDS), "--batch must be a multiple of {SHARDS}");
    let model = Model::new(cfg, VarBuilder::from_varmap(vars, DType::F32, &device))?;
    let positions = Positions::new(cfg, run.context, &device)?;
    let mut all_vars: Vec<(String, Var)> = {
        let data = vars.data().lock().map_err(|_| anyhow!("poisoned lock"))?;
        data.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    };
    // A hash map's order differs from run to run, and the order of the norm's sum with it.
    all_vars.sort_by(|a, b| a.0.cmp(&b.0));
    let all_vars: Vec<Var> = all_vars.into_iter().map(|(_, var)| var).collect();
    let mut adam =
        AdamW::new(all_vars.clone(), ParamsAdamW { beta2: 0.98, weight_decay: 0.05, ..Default::default() })?;
    let held_out_set = held_out.iter().map(String::as_str).collect();
    let mut rows = Rows {
        stories: Stories::new(run.seed),
        held_out: &held_out_set,
        tokenizer,
        end: end_of_text(tokenizer)?,
        told: 0,
    };

    let start = Instant::now();
    for step in 0..run.steps {
        adam.set_learning_rate(learning_rate(run, step));
        let shards = (0..SHARDS)
            .map(|_| (0..run.batch / SHARDS).map(|_| rows.next(run.context + 1)).collect::<Result<Vec<_>>>())
            .collect::<Result<Vec<_>>>()?;
        let results = std::thread::scope(|scope| {
            let threads: Vec<_> =
                shards.iter().map(|shard| scope.spawn(|| gradients(&model, &positions, shard))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| anyhow!("a training thread panicked"))?)
                .collect::<Result<Vec<_>>>()
        })?;
        let loss = results.iter().map(|(loss, _)| loss).sum::<f32>() / SHARDS as f32;
        ensure!(loss.is_finite(), "the loss is {loss} at step {step}");
        let stores: Vec<GradStore> = results.into_iter().map(|(_, grads)| grads).collect();
        let (grads, norm) = average_and_clip(&all_vars, stores)?;
        adam.step(&grads)?;
        if step % 50 == 0 || step + 1 == run.steps {
            let seconds = start.elapsed().as_secs_f64();
            println!("step {step:5}  loss {loss:.4}  gradient norm {norm:.2}  {seconds:6.1} s");
        }
    }
    for var in all_vars {
        var.set(&var.to_dtype(DType::BF16)?.to_dtype(DType::F32)?)?;
    }
    Ok(())
}

fn learning_rate(run: &Schedule, step: usize) -> f64 {
    let warm_up = (run.steps / 20).max(1);
    if step < warm_up {
        return run.learning_rate * (step + 1) as f64 / warm_up as f64;
    }
    let done = (step - warm_up) as f64 / (run.steps - warm_up).max(1) as f64;
    let floor = 0.02;
    run.learning_rate * (floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()))
}

fn gradients(model: &Model, positions: &Positions, rows: &[Vec<u32>]) -> Result<(f32, GradStore)> {
    let len = rows[0].len() - 1;
    let tokens = Tensor::from_vec(rows.concat(), (rows.len(), len + 1), &Device::Cpu)?;
    let inputs = tokens.narrow(1, 0, len)?;
    let targets = tokens.narrow(1, 1, len)?.flatten_all()?;
    let logits = model.forward(&inputs.contiguous()?, positions)?.flatten_to(1)?;
    let loss = candle_nn::loss::cross_entropy(&logits, &targets)?;
    Ok((loss.to_scalar()?, loss.backward()?))
}

/// The mean of the shards' gradients, scaled down to norm [`MAX_GRAD_NORM`]; and the norm before that.
fn average_and_clip(vars: &[Var], stores: Vec<GradStore>) -> Result<(GradStore, f64)> {
    let share = 1.0 / stores.len() as f64;
    let mut stores = stores.into_iter();
    let mut total = stores.next().ok_or_else(|| anyhow!("no gradients"))?;
    for store in stores {
        for var in vars {
            if let (Some(a), Some(b)) = (total.get(var), store.get(var)) {
                let sum = (a + b)?;
                total.insert(var, sum);
            }
        }
    }
    let mut squares = 0.0;
    for var in vars {
        if let Some(grad) = total.get(var) {
            squares += f64::from(grad.sqr()?.sum_all()?.to_scalar::<f32>()?);
        }
    }
    let norm = squares.sqrt() * share;
    let scale = share * (MAX_GRAD_NORM / norm.max(MAX_GRAD_NORM));
    for var in vars {
        if let Some(grad) = total.get(var) {
            let scaled = (grad * scale)?;
            total.insert(var, scaled);
        }
    }
    Ok((total, norm))
}

/// Mean negative log-likelihood per token of the stories, each alone after the end-of-text token and with
/// its own end-of-text token counted.
pub fn held_out_loss(cfg: &Config, vars: &VarMap, tokenizer: &Tokenizer, stories: &[String]) -> Result<f64> {
    let device = Device::Cpu;
    let model = Model::new(cfg, VarBuilder::from_varmap(vars, DType::F32, &device))?;
    let end = end_of_text(tokenizer)?;
    let (mut sum, mut count) = (0.0, 0);
    for story in stories {
        let ids = [vec![end], encode(tokenizer, story)?, vec![end]].concat();
        let len = ids.len() - 1;
        let positions = Positions::new(cfg, len, &device)?;
        let inputs = Tensor::new(&ids[..len], &device)?.unsqueeze(0)?;
        let targets = Tensor::new(&ids[1..], &device)?;
        let logits = model.forward(&inputs, &positions)?.squeeze(0)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &targets)?.to_scalar::<f32>()?;
        sum += f64::from(loss) * len as f64;
        count += len;
    }
    ensure!(count > 0, "no held-out stories");
    Ok(sum / count as f64)
}
