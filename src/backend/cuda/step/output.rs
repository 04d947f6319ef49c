//! What becomes of the output of a block: at once a part of the hidden state, or behind what ranks sum, and a norm.

use super::super::bindings::CqFinish;
use super::super::gemv_call::PLAIN;
use super::builder::{Builder, Places};
use super::projections::{Source, Target};
use super::{Entry, Exchange};
use crate::backend::step::{Out, Projection};
use candle_core::Result;

/// Where a block leaves its output, by what it multiplies it, and what it adds to it.
pub(super) struct OutputAt {
    pub(super) y: u64,
    pub(super) residual: u64,
    pub(super) factor: f32,
}

impl OutputAt {
    /// At once in the hidden state, unless something comes before.
    pub(super) fn new(out: &Out, places: &Places) -> Self {
        match out.norm.is_some() || out.is_part {
            true => Self { y: places.output, residual: 0, factor: 1. },
            false => Self { y: places.hidden, residual: places.hidden, factor: out.scale },
        }
    }
}

impl Builder<'_> {
    /// `hidden += out(projection of x)`.
    pub(super) fn add(&mut self, projection: &Projection, x: u64, out: &Out, places: &Places) -> Result<()> {
        let source = Source { x, k: projection.k, norm: None };
        let OutputAt { y, residual, factor } = OutputAt::new(out, places);
        let target = Target { y: &[y], gated: false, finish: CqFinish { factor, ..PLAIN }, residual };
        self.project(&[projection], source, target, places)?;
        self.finish(out, places)
    }

    /// What is left to do after an output, where that is not added to the hidden state at once.
    pub(super) fn finish(&mut self, out: &Out, places: &Places) -> Result<()> {
        let (output, hidden, width) = (places.output, places.hidden, self.plan.hidden);
        if out.is_part {
            self.sum(output);
        }
        match &out.norm {
            Some(norm) => self.norm(norm, (self.sequences, width), (output, hidden), (out.scale, hidden)),
            None if out.is_part => {
                let finish = CqFinish { factor: out.scale, ..PLAIN };
                let target = Target { y: &[hidden], gated: false, finish, residual: hidden };
                self.elementwise(output, 0, width, target)
            }
            None => Ok(()),
        }
    }

    /// Replaces rows as wide as the hidden state by their sums over all ranks.
    pub(super) fn sum(&mut self, address: u64) {
        let count = self.sequences * self.plan.hidden;
        self.entries.push(Entry::Exchange(Exchange::Sum { address, count, dtype: self.dtype }));
    }
}
