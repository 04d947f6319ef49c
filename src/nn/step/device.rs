//! A plan on a CUDA device.

use super::{StepCaches, StepPlan};
use crate::backend::sample::{finite, Choice, Draw, SampleOptions};
use crate::backend::step::{CacheRows, GraphMode, StateRows, StepMemory, NO_POSITION};
use crate::{backend, DeltaNetState, DeviceKvCache, Error, Result};
use candle_core::{DType, Device, Tensor};
use std::fmt;

/// The steps of a [`StepPlan`] on a CUDA device, for one token of each of a number of sequences, or of some of them, each of its own
/// length.
///
/// A step is a list of launches, five for most layers, six for layers of experts, in which no kernel of candle's is. The first one runs them one by one;
/// they are then captured as a CUDA graph, which serves every position until a cache grows (of rings alone, tables of positions). Both give the same bits.
/// `CANDLE_QUANT_GRAPH=eager` never captures them, `=on` makes it an error where that is not possible (else a warning),
/// and `=off` refuses steps on devices altogether.
///
/// Of several ranks each has the steps of its part. All have to run the same ones in the same order, and wait for each other on their
/// devices; all receive all logits, and draw the same tokens.
pub struct DeviceStep {
    plan: StepPlan,
    launches: backend::StepLaunches,
    sequences: usize,
}

impl StepPlan {
    /// The most sequences of a step on a device: with more, weights that are dequantized for a dense product are faster.
    pub const MOST_SEQUENCES: usize = 16;

    /// The plan's steps on its CUDA device, for activations of `dtype` (F16, BF16 or F32), which caches of floats
    /// have, too.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the plan is not on a CUDA device, there is no kernel for the heads of a layer or for its experts
    /// (1024 at most, with SiLU or clamped gates, gate and up in one format), or
    /// `CANDLE_QUANT_GRAPH` is `off`; if it is something else that is not known, the dtype is another one, or there are no
    /// sequences or more than [`MOST_SEQUENCES`](Self::MOST_SEQUENCES).
    pub fn on_device(&self, sequences: usize, dtype: DType) -> Result<DeviceStep> {
        if !matches!(self.device, Device::Cuda(_)) {
            return Err(Error::Unsupported {
                what: format!("steps of a plan on {:?}", self.device.location()),
                remedy: "call StepPlan::run".to_string(),
            });
        }
        if !(1..=Self::MOST_SEQUENCES).contains(&sequences) {
            let expected = format!("1 to {}", Self::MOST_SEQUENCES);
            return Err(Error::mismatch("sequences of a step", expected, sequences.to_string()));
        }
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::mismatch("activations", "F32, F16 or BF16", format!("{dtype:?}")));
        }
        let mode = graph_mode(std::env::var("CANDLE_QUANT_GRAPH").ok().as_deref())?;
        let launches =
            backend::StepLaunches::new(&self.plan, (&self.device, dtype), sequences, self.is_long, mode)?;
        Ok(DeviceStep { plan: self.clone(), launches, sequences })
    }
}

fn graph_mode(value: Option<&str>) -> Result<GraphMode> {
    match value {
        None | Some("" | "auto") => Ok(GraphMode::Auto),
        Some("on") => Ok(GraphMode::On),
        Some("eager") => Ok(GraphMode::Eager),
        Some("off") => Err(Error::Unsupported {
            what: "a step plan on a CUDA device with CANDLE_QUANT_GRAPH=off".to_string(),
            remedy: "call the layers one by one, or unset it".to_string(),
        }),
        Some(other) => {
            Err(Error::mismatch("CANDLE_QUANT_GRAPH", "auto, on, eager or off", format!("`{other}`")))
        }
    }
}

impl DeviceStep {
    /// Runs a token of each sequence through all layers: their keys and values are appended to the caches, one for each
    /// attention block, and change the states, one for each block of linear attention. `ids` `[sequences]` are U32 on the device. Returns the logits `[sequences, outputs]`, of the dtype of
    /// activations. The row of an id outside of the vocabulary is NaN.
    ///
    /// # Errors
    /// If ids, caches or states do not fit the plan and each other, a cache is full ([`Error::OutOfCache`]), an adapter of a layer is
    /// active, somebody is capturing the device's stream, or the device fails. Nothing is appended then; but if the device fails, states of the
    /// active sequences are empty, as nobody knows whether they have changed.
    pub fn run<'a>(
        &mut self,
        ids: &Tensor,
        caches: impl Into<StepCaches<'a, DeviceKvCache>>,
    ) -> Result<Tensor> {
        self.run_some(ids, &vec![true; self.sequences], caches)
    }

    /// As [`run`](Self::run), of the sequences that are active. Nothing is appended to others, whose logits mean nothing.
    ///
    /// # Errors
    /// As those of it; if there is not a flag for each sequence, or none is active.
    pub fn run_some<'a>(
        &mut self,
        ids: &Tensor,
        active: &[bool],
        caches: impl Into<StepCaches<'a, DeviceKvCache>>,
    ) -> Result<Tensor> {
        let mut caches = caches.into();
        let device = &self.plan.device;
        if ids.dims() != [self.sequences] || ids.dtype() != DType::U32 || !ids.device().same_device(device) {
            let expected = format!("[{}] of U32 on {:?}", self.sequences, device.location());
            return Err(Error::mismatch("ids", expected, format!("{ids:?}")));
        }
        let (memory, positions) = self.room(&mut caches, active)?;
        let logits = self.launches.run(&ids.contiguous()?, &memory, &positions);
        let logits = self.unless_lost(logits, &mut caches, active)?;
        launched(&mut caches, active);
        Ok(logits)
    }

    /// Runs a token of each sequence through all layers, as [`run`](Self::run) does, and draws the next ones from their logits,
    /// as [`ops::sample`](crate::ops::sample) does, in the same graph, which also brings ids to the device and tokens back: one
    /// launch, for which this waits.
    ///
    /// # Errors
    /// As those of `run` and of `sample`; if an id is outside of the vocabulary. Logits without a meaning are noticed when the
    /// tokens `ids` have been appended.
    pub fn next<'a>(
        &mut self,
        ids: &[u32],
        caches: impl Into<StepCaches<'a, DeviceKvCache>>,
        options: &SampleOptions,
        seed: u64,
        step: u64,
    ) -> Result<Vec<u32>> {
        let ids: Vec<_> = ids.iter().copied().map(Some).collect();
        let tokens = self.next_some(&ids, caches, options, seed, step)?;
        Ok(tokens.into_iter().flatten().collect())
    }

    /// As [`next`](Self::next), of the sequences with an id: those without one get no token, and nothing is appended to them.
    ///
    /// # Errors
    /// As those of it; if no sequence has an id.
    pub fn next_some<'a>(
        &mut self,
        ids: &[Option<u32>],
        caches: impl Into<StepCaches<'a, DeviceKvCache>>,
        options: &SampleOptions,
        seed: u64,
        step: u64,
    ) -> Result<Vec<Option<u32>>> {
        options.validate()?;
        let vocabulary = self.plan.plan.vocabulary;
        if let Some(id) = ids.iter().flatten().find(|id| **id as usize >= vocabulary) {
            let expected = format!("each below {vocabulary}, the size of the vocabulary");
            return Err(Error::mismatch("ids", expected, id.to_string()));
        }
        let active: Vec<_> = ids.iter().map(Option::is_some).collect();
        let mut caches = caches.into();
        let (memory, positions) = self.room(&mut caches, &active)?;
        let choice = Choice::new(options, self.plan.outputs);
        let ids: Vec<_> = ids.iter().map(|id| id.unwrap_or(0)).collect();
        let tokens = self.launches.next(&ids, &memory, &positions, (&choice, Draw { seed, step }));
        let tokens = self.unless_lost(tokens, &mut caches, &active)?;
        launched(&mut caches, &active);
        let tokens = tokens.into_iter().zip(active).map(|(token, is_active)| is_active.then_some(token));
        let tokens: Vec<_> = tokens.collect();
        finite(tokens.iter().flatten().copied().collect())?;
        Ok(tokens)
    }

    /// Forgets the states of a step that failed among its launches: run once more, it would change them twice.
    fn unless_lost<T>(
        &self,
        result: candle_core::Result<T>,
        caches: &mut StepCaches<DeviceKvCache>,
        active: &[bool],
    ) -> Result<T> {
        if result.is_err() && self.launches.has_launched() {
            for (sequence, _) in active.iter().enumerate().filter(|(_, is_active)| **is_active) {
                for state in &mut caches.states {
                    let _is_always_possible = state.truncate(sequence, 0);
                }
            }
        }
        Ok(result?)
    }

    /// The caches' memory, with room for one more token of each active sequence, and where it will stand: of others nowhere.
    fn room(
        &mut self,
        caches: &mut StepCaches<DeviceKvCache>,
        active: &[bool],
    ) -> Result<(StepMemory, Vec<u32>)> {
        self.plan.check_caches(caches)?;
        if active.len() != self.sequences || !active.contains(&true) {
            let expected = format!("{}, one for each sequence, some of them active", self.sequences);
            let found = format!("{} for {}", active.iter().filter(|is| **is).count(), active.len());
            return Err(Error::mismatch("tokens of a step", expected, found));
        }
        if let Some(slot) = self.plan.adapters.iter().chain(&*self.plan.others).find(|slot| slot.is_active())
        {
            return Err(Error::Unsupported {
                what: format!("an adapter in a step plan on a CUDA device, at `{}`,", slot.module()),
                remedy: "switch it off, or call the layers one by one".to_string(),
            });
        }
        if self.is_capturing()? {
            return Err(Error::Unsupported {
                what: "a step of a plan in a capture of the device's stream".to_string(),
                remedy: "call the layers one by one in it".to_string(),
            });
        }
        let StepCaches { keys, states } = caches;
        let first = keys.first().map(|cache| cache.lens()).or(states.first().map(|state| state.lens()));
        // What is empty may have been of another batch.
        let lens = match first.filter(|lens| lens.iter().any(|len| *len > 0)) {
            Some(lens) => lens.to_vec(),
            None => vec![0; self.sequences],
        };
        if lens.len() != self.sequences {
            let (expected, found) = (self.sequences.to_string(), lens.len().to_string());
            return Err(Error::mismatch("sequences of a cache", expected, found));
        }
        let needed = lens.iter().zip(active).filter(|(_, is_active)| **is_active).map(|(len, _)| len + 1);
        let needed = needed.max().unwrap_or(0);
        if !keys.iter().all(|cache| cache.has_room_up_to(self.sequences, needed, 1)) {
            // What they have outgrown is not to stay beside what they get.
            self.launches.release();
        }
        let is_first = lens.iter().all(|len| *len == 0);
        let check = |what: &str, found: &[usize]| match found == lens
            || is_first && found.iter().all(|len| *len == 0)
        {
            true => Ok(()),
            false => {
                Err(Error::mismatch(what, format!("{lens:?} tokens, as the first"), format!("{found:?}")))
            }
        };
        let room = |cache: &mut DeviceKvCache| {
            check("cache", cache.lens())?;
            let is_ring = self.launches.keeps_ring(cache)?;
            let (rows, _) = cache.room_on(&self.plan.device, self.sequences, needed, is_ring.then_some(1))?;
            let config = cache.config();
            Ok(CacheRows { rows, window: config.window, is_chunked: config.is_chunked })
        };
        let room_of_state = |state: &mut DeltaNetState| {
            check("state", state.lens())?;
            if !state.device().same_device(&self.plan.device) {
                let expected = format!("on {:?}", self.plan.device.location());
                return Err(Error::mismatch(
                    "state",
                    expected,
                    format!("on {:?}", state.device().location()),
                ));
            }
            Ok(StateRows { config: *state.config(), numbers: state.numbers(self.sequences)? })
        };
        let memory = StepMemory {
            caches: keys.iter_mut().map(|cache| room(cache)).collect::<Result<_>>()?,
            states: states.iter_mut().map(|state| room_of_state(state)).collect::<Result<_>>()?,
        };
        let position = |(len, is_active): (&usize, &bool)| match is_active {
            true => u32::try_from(*len).map_err(|_| {
                Error::mismatch("tokens of a sequence", "a position of 32 bits", len.to_string())
            }),
            false => Ok(NO_POSITION),
        };
        Ok((memory, lens.iter().zip(active).map(position).collect::<Result<_>>()?))
    }

    /// Launches of a step, and what ranks exchange between them; none before the first one.
    pub fn launches(&self) -> Option<usize> {
        self.launches.launches()
    }

    /// Whether somebody is capturing the device's stream, so that no step can run.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(self.launches.is_capturing()?)
    }

    /// Whether the last step was a CUDA graph.
    pub fn is_captured(&self) -> bool {
        self.launches.is_captured()
    }

    /// How many sequences take part in a step.
    pub fn sequences(&self) -> usize {
        self.sequences
    }
}

/// A step has appended a token of each active sequence.
fn launched(caches: &mut StepCaches<DeviceKvCache>, active: &[bool]) {
    let is_active = |sequence: usize| active.get(sequence).copied().unwrap_or(false);
    caches.keys.iter_mut().for_each(|cache| cache.launched(is_active));
    for state in &mut caches.states {
        (0..active.len())
            .filter(|sequence| is_active(*sequence))
            .for_each(|sequence| state.extend(sequence, 1));
    }
}

impl fmt::Debug for DeviceStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (launches, is_captured) = (self.launches(), self.is_captured());
        f.debug_struct("DeviceStep")
            .field("sequences", &self.sequences)
            .field("launches", &launches)
            .field("is_captured", &is_captured)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_how_steps_run() {
        for (value, expected) in [
            (None, GraphMode::Auto),
            (Some(""), GraphMode::Auto),
            (Some("on"), GraphMode::On),
            (Some("eager"), GraphMode::Eager),
        ] {
            assert_eq!(graph_mode(value).unwrap(), expected);
        }
        let told = graph_mode(Some("off")).unwrap_err().to_string();
        assert!(told.contains("unset it"), "{told}");
        let told = graph_mode(Some("yes")).unwrap_err().to_string();
        assert!(told.contains("auto, on, eager or off") && told.contains("`yes`"), "{told}");
    }
}
