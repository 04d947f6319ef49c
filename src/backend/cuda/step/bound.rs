//! Launches on memory of their own, as they run: one by one, or captured as a graph.

use super::builder::Places;
use super::graph::Graph;
use super::launches::Entry;
use super::pinned::Pinned;
use crate::backend::sample::Choice;
use crate::backend::step::{GraphMode, StepMemory};
use crate::distributed::{Rank, StreamCollective};
use crate::Error;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// Launches with all memory that they use.
pub(super) struct Bound {
    /// What a step is given, and what it gives. The first to be dropped, which waits for all that uses the rest.
    pub(super) host: Pinned,
    /// To the logits.
    pub(super) entries: Vec<Entry>,
    pub(super) places: Places,
    /// What becomes of logits, in the order in which it was asked for, the last one last.
    pub(super) ends: Vec<End>,
    pub(super) memory: StepMemory,
    /// Positions for which tables have rows.
    pub(super) turn_rows: usize,
    pub(super) _constants: Tensor,
    pub(super) _work: Tensor,
    /// This one of several. The last to be dropped: graphs hold what it exchanges.
    pub(super) rank: Option<Rank>,
}

/// So many ends are kept: as many requests with other ways of drawing may alternate.
const MOST_ENDS: usize = 4;

/// A way for a step to end, and the graph of all of it.
pub(super) struct End {
    /// How tokens are drawn; without it logits are what is asked for. With it, the step begins and ends with a copy.
    choice: Option<Choice>,
    pub(super) draws: Vec<Entry>,
    pub(super) graph: Option<Graph>,
    state: State,
    /// Captures that somebody ended.
    ended: u32,
}

/// After a capture that somebody ended so many steps go by until the next one, at most.
const MOST_STEPS_UNTIL_CAPTURE: u32 = 1024;

/// How far launches are on their way to a graph.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// They have not run yet.
    New,
    /// They have run one by one, which loads all kernels. So many steps run until they are captured.
    HaveRun { until_capture: u32 },
    /// They are captured, or cannot be.
    Settled,
}

impl Bound {
    /// Whether these are the caches and states, and there may be tokens up to a position.
    pub(super) fn is_for(&self, memory: &StepMemory, end: usize) -> bool {
        let ids = |memory: &StepMemory| {
            let caches = memory.caches.iter().map(|cache| cache.rows.memory.id());
            let states = memory.states.iter().map(|state| state.numbers.id());
            caches.chain(states).collect::<Vec<_>>()
        };
        ids(&self.memory) == ids(memory) && end <= self.turn_rows
    }

    /// Runs a step that ends so.
    pub(super) fn run(
        &mut self,
        choice: Option<&Choice>,
        (stream, mode): (&Arc<CudaStream>, GraphMode),
    ) -> Result<()> {
        let known = self.ends.iter().position(|end| end.choice.as_ref() == choice);
        let mut end = match known {
            Some(index) => self.ends.remove(index),
            None => {
                if self.ends.len() == MOST_ENDS {
                    self.ends.remove(0);
                }
                let draws = choice.map_or(Ok(Vec::new()), |choice| self.places.draws(choice))?;
                End { choice: choice.copied(), draws, graph: None, state: State::New, ended: 0 }
            }
        };
        let run = match &self.rank {
            None => self.run_to(&mut end, (stream, mode), None),
            Some(rank) => self.run_of_rank(rank, &mut end, (stream, mode)),
        };
        self.ends.push(end);
        run
    }

    /// No rank ends the group while this submits what uses it.
    fn run_of_rank(
        &self,
        rank: &Rank,
        end: &mut End,
        (stream, mode): (&Arc<CudaStream>, GraphMode),
    ) -> Result<()> {
        let run = rank.in_streams(&mut |ranks| Ok(self.run_to(end, (stream, mode), Some(ranks))?));
        Ok(run.unwrap_or_else(|| Err(Error::mismatch("ranks", "some that exchange in streams", "others")))?)
    }

    /// Whether a rank has failed meanwhile: what there is then means nothing.
    pub(super) fn check_ranks(&self) -> Result<()> {
        let failed = self.rank.as_ref().and_then(|rank| rank.in_streams(&mut |_| Ok(())));
        Ok(failed.unwrap_or(Ok(()))?)
    }

    fn run_to(
        &self,
        end: &mut End,
        (stream, mode): (&Arc<CudaStream>, GraphMode),
        ranks: Option<&dyn StreamCollective>,
    ) -> Result<()> {
        if end.state == (State::HaveRun { until_capture: 0 }) && mode != GraphMode::Eager {
            self.capture(end, (stream, mode), ranks)?;
        }
        if let Some(graph) = &mut end.graph {
            // SAFETY: as for `submit`.
            return unsafe { graph.launch(stream) };
        }
        self.submit(end, stream, ranks)?;
        end.state = match end.state {
            State::New => State::HaveRun { until_capture: 0 },
            State::HaveRun { until_capture } => {
                State::HaveRun { until_capture: until_capture.saturating_sub(1) }
            }
            State::Settled => State::Settled,
        };
        Ok(())
    }

    fn capture(
        &self,
        end: &mut End,
        (stream, mode): (&Arc<CudaStream>, GraphMode),
        ranks: Option<&dyn StreamCollective>,
    ) -> Result<()> {
        end.state = State::Settled;
        match Graph::capture(stream, self.host.done(), |own| self.submit(end, own, ranks)) {
            Ok(Some(graph)) => {
                let launches = self.entries.len() + end.draws.len();
                log::info!("decode steps are a CUDA graph of {launches} launches");
                end.graph = Some(graph);
            }
            Ok(None) => {
                let until_capture = (1 << end.ended.min(31)).min(MOST_STEPS_UNTIL_CAPTURE);
                log::debug!(
                    "something else ended the capture of a decode step: {until_capture} steps to the next"
                );
                (end.state, end.ended) = (State::HaveRun { until_capture }, end.ended + 1);
            }
            Err(error) if mode == GraphMode::On => return Err(error.context("capturing a decode step")),
            Err(error) => {
                log::warn!("decode steps are launched kernel by kernel, not as a CUDA graph: {error}");
            }
        }
        Ok(())
    }

    fn submit(&self, end: &End, stream: &CudaStream, ranks: Option<&dyn StreamCollective>) -> Result<()> {
        let copies = end.choice.is_some();
        let (host, output) = (self.host.address(), self.places.input_bytes);
        if copies {
            // SAFETY: seed, step, positions and ids, one behind the other here as there; the host does not touch its memory
            // until it has waited for the step.
            let copied = unsafe {
                sys::cuMemcpyHtoDAsync_v2(self.places.draw, host.cast(), output, stream.cu_stream())
            };
            copied.result().w()?;
        }
        self.entries.iter().chain(&end.draws).try_for_each(|entry| {
            // SAFETY: all addresses are those of memory that this holds, of the plan's weights, which it holds, and of the
            // caches; shapes were checked when the plan was built, and cannot change. Positions are within the caches.
            unsafe { entry.submit(stream, ranks) }
        })?;
        if copies {
            let bytes = self.places.sequences * size_of::<u32>();
            // SAFETY: as above; what is given out lies behind what is given in.
            let copied = unsafe {
                sys::cuMemcpyDtoHAsync_v2(host.add(output).cast(), self.places.ids, bytes, stream.cu_stream())
            };
            copied.result().w()?;
        }
        Ok(())
    }
}
