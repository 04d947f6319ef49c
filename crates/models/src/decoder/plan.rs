//! All layers in one call.

use super::{Model, Scales};
use crate::layer::unplanned;
use crate::mixer::LayerCache;
use candle_core::{DType, Tensor};
use candle_quant::ops::SampleOptions;
use candle_quant::step::{DeviceStep, HeadBlock, StepBuilder, StepCaches, StepPlan, StepToken};
use candle_quant::{DeviceKvCache, Error, Result};

impl Model {
    /// The layers, or this rank's part of them, as a plan, if all are packed or dense, and of kinds that plans have.
    pub(super) fn planned(&self) -> Option<StepPlan> {
        let build = || -> Result<StepPlan> {
            let Some(norm) = self.norm.of_step() else { return Err(unplanned("a rank's part of a norm")) };
            let Scales { embedding, logits, softcap } = self.scales;
            let mut plan = StepBuilder::of_part(&self.embed_tokens, embedding)?;
            self.layers.iter().try_for_each(|layer| layer.plan(&mut plan, &self.turns))?;
            let (head, share) = self.lm_head.part();
            plan.head(HeadBlock { scale: logits, softcap, share, ..HeadBlock::new(norm, head) })
        };
        build().map_err(|error| log::debug!("the model runs layer by layer: {error}")).ok()
    }

    /// What all ranks have, or none of them: else those that do would wait for the others.
    ///
    /// # Errors
    /// If another rank fails.
    fn agreed<T>(&self, made: Result<T>) -> Result<Result<T>> {
        let Some(rank) = self.rank.as_ref().filter(|rank| !rank.device().is_cpu()) else { return Ok(made) };
        let refused = Tensor::new(&[u32::from(made.is_err())], rank.device())?;
        let refused = rank.all_reduce_sum(&refused)?.to_vec1::<u32>()?;
        Ok(match made {
            Ok(_) if refused != [0] => Err(unplanned("a part that another rank has")),
            made => made,
        })
    }

    /// The logits `[wanted, vocabulary]` of some of the tokens, by the plan.
    pub(super) fn run_plan(
        &mut self,
        ids: &Tensor,
        offset: usize,
        wanted: &[usize],
    ) -> candle_core::Result<Tensor> {
        self.check_ids(ids, offset)?;
        let plan = self.plan_of_text()?;
        if !matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
            let found = format!("{:?}", ids.dtype());
            return Err(Error::mismatch("ids", "dtype U8, U32 or I64", found).into());
        }
        let (batch, len) = ids.dims2()?;
        let flat = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let token = |(row, id): (usize, &i64)| match u32::try_from(*id) {
            Ok(id) => Ok(StepToken { id, sequence: row / len, position: offset + row % len }),
            Err(_) => Err(Error::mismatch("ids", "numbers of tokens", id.to_string())),
        };
        let tokens = flat.iter().enumerate().map(token).collect::<Result<Vec<_>>>()?;
        let (mut caches, mut states) = (Vec::new(), Vec::new());
        for layer in &mut self.layers {
            match layer.attention.cache_mut() {
                LayerCache::OnCpu(cache) => caches.push(cache),
                LayerCache::State(state) => states.push(state),
                LayerCache::OnDevice(_) => {}
            }
        }
        let of_states = states.first().map(|state| state.sequences());
        let cached = caches.first().map(|cache| cache.sequences()).or(of_states).unwrap_or(0);
        let run = match cached == 0 || cached == batch {
            true => plan.run(&tokens, StepCaches::new(caches, states), wanted),
            false => {
                Err(Error::mismatch("batch", format!("{cached} texts, as in the cache"), batch.to_string()))
            }
        };
        match run {
            Ok(logits) => logits.to_dtype(self.dtype),
            Err(error) => {
                self.clear_kv_cache();
                Err(error.into())
            }
        }
    }

    fn plan_of_text(&self) -> candle_core::Result<StepPlan> {
        match &self.plan {
            Some(plan) if self.is_long => Ok(plan.of_long_texts()),
            Some(plan) => Ok(plan.clone()),
            None => candle_core::bail!("the model has no plan"),
        }
    }

    /// The logits `[B, vocabulary]` of one token of each text by the plan's launches on a CUDA device. None, and then
    /// nothing has happened, if that is no such step: there are more tokens or no plan, adapters are active, or somebody is
    /// capturing the device's stream.
    pub(super) fn run_step(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Option<Tensor>> {
        let (batch, len) = ids.dims2()?;
        let is_step = len == 1 && (1..=StepPlan::MOST_SEQUENCES).contains(&batch);
        // Numbers that are too large for U32 would become others.
        if !is_step || !matches!(ids.dtype(), DType::U8 | DType::U32) || !self.has_steps()? {
            return Ok(None);
        }
        self.check_ids(ids, offset)?;
        let ids = ids.flatten_all()?.to_dtype(DType::U32)?;
        self.on_step(batch, |step, caches| step.run(&ids, caches))
    }

    /// The token drawn from the logits behind `id`, likewise.
    pub(crate) fn draw_step(
        &mut self,
        id: u32,
        offset: usize,
        options: &SampleOptions,
        (seed, step): (u64, u64),
    ) -> candle_core::Result<Option<u32>> {
        if !self.has_steps()? {
            return Ok(None);
        }
        self.check(1, offset)?;
        let drawn = self.on_step(1, |of_plan, caches| of_plan.next(&[id], caches, options, seed, step))?;
        Ok(drawn.and_then(|tokens| tokens.first().copied()))
    }

    fn has_steps(&mut self) -> Result<bool> {
        if self.device.is_cpu() || self.adapters.is_active() || self.adapters.is_observed() {
            return Ok(false);
        }
        if !self.has_agreed {
            let plan = self.plan.take().ok_or_else(|| unplanned("a part of this rank"));
            self.plan = self.agreed(plan)?.ok();
            self.has_agreed = true;
        }
        Ok(self.plan.is_some())
    }

    /// Where the plan turns out to be none for this device, layers go on without it.
    fn on_step<T>(
        &mut self,
        batch: usize,
        work: impl FnOnce(&mut DeviceStep, StepCaches<DeviceKvCache>) -> Result<T>,
    ) -> candle_core::Result<Option<T>> {
        let run = self.device_step(batch).and_then(|mut step| {
            let (mut caches, mut states) = (Vec::new(), Vec::new());
            for layer in &mut self.layers {
                match layer.attention.cache_mut() {
                    LayerCache::OnDevice(cache) => caches.push(cache),
                    LayerCache::State(state) => states.push(state),
                    LayerCache::OnCpu(_) => {}
                }
            }
            let result = match step.is_capturing()? {
                true => None,
                false => Some(work(&mut step, StepCaches::new(caches, states))),
            };
            self.steps.push((self.is_long, step));
            result.transpose()
        });
        match run {
            Ok(result) => Ok(result),
            Err(error @ Error::Unsupported { .. }) => {
                log::warn!("decode steps run layer by layer: {error}");
                (self.plan, self.steps) = (None, Vec::new());
                Ok(None)
            }
            Err(error) => {
                self.clear_kv_cache();
                Err(error.into())
            }
        }
    }

    /// Before tokens are appended to caches otherwise than by steps: these let go of memory that is about to be outgrown.
    pub(super) fn release_steps(&mut self, batch: usize, tokens: usize) {
        let mut caches = self.layers.iter_mut().map(|layer| layer.attention.cache_mut());
        let has_room = |cache| match cache {
            LayerCache::OnDevice(cache) => cache.has_room(batch, tokens),
            LayerCache::OnCpu(_) | LayerCache::State(_) => true,
        };
        if !self.steps.is_empty() && !caches.all(has_room) {
            self.steps.clear();
        }
    }

    /// The step for so many texts, taken out of those that there are, or a new one.
    fn device_step(&mut self, batch: usize) -> Result<DeviceStep> {
        let fits =
            |(is_long, step): &(bool, DeviceStep)| *is_long == self.is_long && step.sequences() == batch;
        match self.steps.iter().position(fits) {
            Some(index) => Ok(self.steps.swap_remove(index).1),
            // Another number of texts has other caches: what the others have captured is of no use any more.
            None => {
                self.steps.clear();
                let step = self.plan_of_text()?.on_device(batch, self.dtype);
                self.agreed(step)?
            }
        }
    }
}
