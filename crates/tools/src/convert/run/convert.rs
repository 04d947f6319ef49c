//! Carries a plan out, file by file.

use super::event::ConvertEvent;
use super::journal::Finished;
use super::options::RunOptions;
use super::quality::{ConvertReport, Quality, WrittenFile};
use super::shard_file::ShardFile;
use super::sidecars::write_sidecars;
use super::unfinished::Unfinished;
use super::writer::{Writer, Written};
use crate::convert::plan::ConvertPlan;
use candle_quant::{Error, Result};
use std::path::Path;

/// Carries a plan out. `progress` is called from several threads.
///
/// The output appears under its name when it is complete. Until then it is in `OUT.partial`, which stays there if
/// the conversion fails or the process is killed. The next one with the same plan goes on with what is finished there,
/// if the source has still the bytes that it was made of; one with another plan begins anew. The bytes of the output do
/// not depend on that, on the number of threads, nor on
/// [`ConvertOptions::device`](crate::convert::ConvertOptions::device).
///
/// A source that shrinks meanwhile is an error if it was opened with
/// [`Reads::Positioned`](candle_quant::checkpoint::Reads::Positioned).
///
/// # Errors
/// If the output exists (and may not be replaced) or can't be written, if another process writes it, if the disk has no
/// room for it, if the source can't be read or has numbers that are not finite, or if the loss is larger than
/// [`RunOptions::max_relative_rms`].
pub fn convert(
    plan: &ConvertPlan,
    out: impl AsRef<Path>,
    options: &RunOptions,
    progress: &(dyn Fn(ConvertEvent) + Sync),
) -> Result<ConvertReport> {
    let mut unfinished = Unfinished::open(plan, out.as_ref(), options)?;
    if !unfinished.is_published {
        for file in &plan.files {
            let feedback = plan.feedback.as_ref();
            let writer = Writer { file, device: &plan.device, feedback, progress };
            if unfinished.is_finished(&writer)? {
                let bytes = file.jobs.iter().map(|job| job.planned.source_bytes).sum();
                progress(ConvertEvent::Skipped { bytes, tensors: file.jobs.len() });
                continue;
            }
            let written = ShardFile::create(unfinished.path(&file.file), &file.header, file.size)?;
            for (output, value) in
                file.outputs().filter_map(|output| output.value.as_ref().map(|value| (output, value)))
            {
                written.write(output.offset, value)?;
            }
            let Written { source, tensors } = writer.write(written)?;
            if !options.allow_nonfinite {
                check_finite(plan, &tensors)?;
            }
            unfinished.finish(&file.file, source, tensors)?;
        }
        write_sidecars(plan, &unfinished.model())?;
    }
    let report = report(plan, &unfinished.journal.finished);
    if !options.allow_nonfinite {
        check_finite(plan, &report.tensors)?;
    }
    progress(ConvertEvent::Measured { report: &report });
    check_quality(&report, options)?;
    unfinished.publish(plan, options.overwrite)?;
    Ok(report)
}

/// What a plan loses: everything is computed, and nothing written.
///
/// # Errors
/// If the source can't be read, or has numbers that are not finite.
pub fn measure(plan: &ConvertPlan, progress: &(dyn Fn(ConvertEvent) + Sync)) -> Result<ConvertReport> {
    let mut tensors = Vec::new();
    for file in &plan.files {
        let writer = Writer { file, device: &plan.device, feedback: plan.feedback.as_ref(), progress };
        tensors.extend(writer.write(ShardFile::nowhere())?.tensors);
    }
    check_finite(plan, &tensors)?;
    let file = WrittenFile { file: String::new(), sha256: String::new() };
    let mut report = report(plan, &[Finished { file, source: String::new(), tensors }]);
    report.files.clear();
    Ok(report)
}

fn report(plan: &ConvertPlan, finished: &[Finished]) -> ConvertReport {
    let mut tensors: Vec<_> = finished.iter().flat_map(|entry| entry.tensors.clone()).collect();
    tensors.sort_by(|a, b| b.relative_rms.total_cmp(&a.relative_rms));
    let file = |entry: &Finished| WrittenFile {
        file: plan.target.kind().published(&entry.file.file, &entry.file.sha256),
        sha256: entry.file.sha256.clone(),
    };
    ConvertReport {
        source_bytes: plan.source_bytes(),
        bytes: plan.bytes(),
        bits_per_weight: plan.bits_per_weight(),
        dense_share: plan.dense_share(),
        files: finished.iter().map(file).collect(),
        tensors,
    }
}

fn check_finite(plan: &ConvertPlan, tensors: &[Quality]) -> Result<()> {
    let bad: Vec<_> = tensors.iter().filter(|tensor| tensor.non_finite() > 0).collect();
    let Some(first) = bad.first() else {
        return Ok(());
    };
    let others = match bad.len() {
        1 => String::new(),
        count => format!("; {} more tensors have such numbers", count - 1),
    };
    Err(Error::tensor(
        plan.source.path(),
        &first.name,
        "finite numbers",
        format!("{}{others}", first.describe_non_finite()),
        "fetch the file again, or accept them (--allow-nonfinite): packed they become zero",
    ))
}

fn check_quality(report: &ConvertReport, options: &RunOptions) -> Result<()> {
    let Some(limit) = options.max_relative_rms else {
        return Ok(());
    };
    let worse = report.tensors.iter().filter(|tensor| tensor.relative_rms > limit).count();
    match report.tensors.first() {
        Some(worst) if worse > 0 => Err(Error::Quality {
            tensor: worst.name.clone(),
            format: worst.to.clone(),
            relative_rms: worst.relative_rms,
            limit,
            worse,
        }),
        _ => Ok(()),
    }
}
