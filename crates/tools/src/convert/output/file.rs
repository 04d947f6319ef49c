//! One file of weights of the output.

use super::job::Job;
use super::tensor::{lay_out, OutputTensor, Style};
use serde_json::Value;
use std::cmp::Ordering;

/// What the metadata of a file says if codes and scales in it were searched for.
const SEARCH: &str = "candle_quant.search";

/// What it says if what columns lose is made up for by others.
const FEEDBACK: &str = "candle_quant.feedback";

/// What it says if columns of weights were scaled.
const SCALES: &str = "candle_quant.scales";

/// What metadata say of how weights were packed.
pub(in crate::convert) fn told_of(jobs: &[Job]) -> impl Iterator<Item = (&'static str, String)> {
    let by_columns = |job: &Job| job.packing().is_some_and(|packing| packing.columns.is_some());
    let measure = match jobs.iter().any(|job| job.is_searched() && by_columns(job)) {
        true => "squared error, columns weighted by statistics of what layers are given",
        false => "squared error",
    };
    let search = jobs.iter().any(Job::is_searched).then(|| (SEARCH, measure.to_owned()));
    let feedback = jobs.iter().find_map(|job| job.packing()?.feedback.clone());
    let feedback = feedback.map(|text| (FEEDBACK, format!("by a text with the digest {text}")));
    let how = "columns of weights multiplied, and what makes their inputs divided by the same (AWQ)";
    let scales = jobs.iter().any(|job| job.scaling.is_some()).then(|| (SCALES, how.to_owned()));
    [search, feedback, scales].into_iter().flatten()
}

/// One file of weights of the output.
#[derive(Clone, Debug)]
pub(in crate::convert) struct OutputFile {
    pub file: String,
    /// What a manifest calls it, if there is one.
    pub layer: String,
    pub jobs: Vec<Job>,
    /// Tensors of no job: what is known already.
    pub others: Vec<OutputTensor>,
    /// The beginning of the file.
    pub header: Vec<u8>,
    pub size: u64,
}

impl OutputFile {
    /// A file whose tensors lie in this order; those that are equal in it as they come.
    pub(in crate::convert) fn new(
        file: String,
        mut jobs: Vec<Job>,
        mut others: Vec<OutputTensor>,
        order: impl Fn(&OutputTensor, &OutputTensor) -> Ordering,
        mut metadata: Option<Value>,
        style: Style,
    ) -> Self {
        if let Some(Value::Object(entries)) = &mut metadata {
            entries.extend(told_of(&jobs).map(|(key, how)| (key.to_owned(), how.into())));
        }
        let of_jobs = jobs.iter_mut().flat_map(|job| &mut job.outputs);
        let mut outputs: Vec<_> = of_jobs.chain(&mut others).collect();
        outputs.sort_by(|a, b| order(a, b));
        let (header, size) = lay_out(&mut outputs, metadata, style);
        for job in &mut jobs {
            job.planned.file.clone_from(&file);
        }
        Self { file, layer: String::new(), jobs, others, header, size }
    }

    /// All its tensors.
    pub(in crate::convert) fn outputs(&self) -> impl Iterator<Item = &OutputTensor> {
        self.jobs.iter().flat_map(|job| &job.outputs).chain(&self.others)
    }
}
