//! How the columns of weights make up for each other, found for some weights ahead.

use crate::convert::output::Job;
use crate::importance::{Feedback, OfMatrices, ToFeed};
use candle_quant::{Error, Result};
use std::collections::BTreeMap;

/// What is found for the next weights of a file, in their order.
pub(super) struct Ahead<'a> {
    feedback: &'a Feedback,
    left: Vec<&'a Job>,
    found: BTreeMap<String, OfMatrices>,
}

impl<'a> Ahead<'a> {
    pub fn new(feedback: &'a Feedback, jobs: &'a [Job]) -> Self {
        let left = jobs.iter().filter(|job| job.has_feedback()).rev().collect();
        Self { feedback, left, found: BTreeMap::new() }
    }

    /// What is found for a weight; nothing if it asks for nothing.
    pub fn of(&mut self, job: &Job) -> Result<OfMatrices> {
        if !job.has_feedback() {
            return Ok(OfMatrices::new());
        }
        let name = &job.planned.name;
        if !self.found.contains_key(name) {
            self.run()?;
        }
        let found = self.found.remove(name).filter(|found| !found.is_empty());
        found.ok_or_else(|| {
            Error::mismatch(format!("`{name}`"), "a layer of the model that is given something", "none")
        })
    }

    fn run(&mut self) -> Result<()> {
        let (mut next, mut bytes) = (Vec::new(), 0u64);
        while let Some(job) = self.left.last() {
            bytes = bytes.saturating_add(Feedback::bytes(&job.planned.shape));
            if bytes > Feedback::MOST_BYTES && !next.is_empty() {
                break;
            }
            let (name, dims) = (job.planned.name.as_str(), job.planned.shape.as_slice());
            next.push(ToFeed { name, dims, scales: job.column_scales() });
            self.left.pop();
        }
        let found = self.feedback.of(&next)?;
        self.found.extend(next.into_iter().map(|weight| weight.name.to_owned()).zip(found));
        Ok(())
    }
}
