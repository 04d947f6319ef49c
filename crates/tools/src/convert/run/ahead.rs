//! How the columns of weights make up for each other, found for some weights ahead.

use crate::convert::output::Job;
use crate::importance::{Feedback, OfMatrices};
use candle_quant::Result;
use std::collections::BTreeMap;

/// What is found for the next weights of a file, in their order.
pub(super) struct Ahead<'a> {
    feedback: &'a Feedback,
    left: Vec<&'a Job>,
    found: BTreeMap<String, Option<OfMatrices>>,
}

impl<'a> Ahead<'a> {
    pub fn new(feedback: &'a Feedback, jobs: &'a [Job]) -> Self {
        let left = jobs.iter().filter(|job| job.has_feedback()).rev().collect();
        Self { feedback, left, found: BTreeMap::new() }
    }

    /// What is found for a weight; none if it asks for nothing, or the model has no such layer.
    pub fn of(&mut self, job: &Job) -> Result<Option<OfMatrices>> {
        if !job.has_feedback() {
            return Ok(None);
        }
        let name = &job.planned.name;
        if !self.found.contains_key(name) {
            self.run()?;
        }
        Ok(self.found.remove(name).flatten())
    }

    fn run(&mut self) -> Result<()> {
        let (mut next, mut bytes) = (Vec::new(), 0u64);
        while let Some(job) = self.left.last() {
            bytes = bytes.saturating_add(Feedback::bytes(&job.planned.shape));
            if bytes > Feedback::MOST_BYTES && !next.is_empty() {
                break;
            }
            next.push((job.planned.name.as_str(), job.planned.shape.as_slice()));
            self.left.pop();
        }
        let found = self.feedback.of(&next)?;
        self.found.extend(next.into_iter().map(|(name, _)| name.to_owned()).zip(found));
        Ok(())
    }
}
