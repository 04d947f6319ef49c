//! Carries a plan out, file by file.

use super::journal::Finished;
use super::plan::Plan;
use super::quality::{Quality, Report, WrittenFile};
use super::shard::ShardFile;
use super::staging::{write_synced, Staging};
use super::writer::Writer;
use crate::generate::stored_tokenizer;
use crate::{Error, Result};
use std::fs;
use std::path::Path;

/// The file of a tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// How a plan is carried out.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Take up an interrupted conversion with the same plan.
    pub resume: bool,
    /// Replace an output of an earlier conversion. It stays until the new one is complete.
    pub overwrite: bool,
    /// Accept NaN and infinities. In packed tensors they become zero.
    pub allow_nonfinite: bool,
    /// The largest relative RMS error of a tensor with which the output is made.
    pub max_relative_rms: Option<f64>,
}

/// What happens during a conversion.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A file was finished by the conversion that is resumed.
    Skipped {
        /// Bytes of its tensors in the source.
        bytes: u64,
        /// How many tensors it has.
        tensors: usize,
    },
    /// A part of a tensor is written.
    Advanced {
        /// The tensor.
        tensor: &'a str,
        /// Bytes of the part in the source.
        bytes: u64,
    },
    /// A tensor is written.
    Finished {
        /// The tensor.
        tensor: &'a str,
    },
    /// All is written, and it is still to be decided whether it becomes the output.
    Measured {
        /// What was lost.
        report: &'a Report,
    },
}

/// Carries a plan out. `progress` is called from several threads.
///
/// The output appears under its name when it is complete. Until then it is in `OUT.partial`, which stays there if
/// the conversion fails or the process is killed, for [`RunOptions::resume`]. The bytes of the output do not depend
/// on the number of threads, nor on [`Options::device`](super::Options::device), which may be another one when a
/// conversion is resumed.
///
/// # Errors
/// If the output exists (and may not be replaced) or can't be written, if the disk has no room for it, if the source
/// can't be read or has numbers that are not finite, or if the loss is larger than
/// [`RunOptions::max_relative_rms`].
pub fn run(
    plan: &Plan,
    out: impl AsRef<Path>,
    options: &RunOptions,
    progress: &(dyn Fn(Event) + Sync),
) -> Result<Report> {
    let mut staging = Staging::open(plan, out.as_ref(), options)?;
    if !staging.is_published {
        for shard in &plan.shards {
            if staging.has(&shard.file) {
                let bytes = shard.jobs.iter().map(|job| job.planned.source_bytes).sum();
                progress(Event::Skipped { bytes, tensors: shard.jobs.len() });
                continue;
            }
            let file = ShardFile::create(staging.path(&shard.file), &shard.header, shard.size)?;
            for (output, value) in
                shard.outputs().filter_map(|output| output.value.as_ref().map(|value| (output, value)))
            {
                file.write(output.offset, value)?;
            }
            let tensors = Writer { shard, device: &plan.device, progress }.write(file)?;
            if !options.allow_nonfinite {
                check_finite(plan, &tensors)?;
            }
            staging.finish(&shard.file, tensors)?;
        }
        write_companions(plan, &staging)?;
    }
    let report = report(plan, &staging.journal.finished);
    if !options.allow_nonfinite {
        check_finite(plan, &report.tensors)?;
    }
    progress(Event::Measured { report: &report });
    check_quality(&report, options)?;
    staging.publish(plan, options.overwrite)?;
    Ok(report)
}

/// What a plan loses: everything is computed, and nothing written.
///
/// # Errors
/// If the source can't be read, or has numbers that are not finite.
pub fn measure(plan: &Plan, progress: &(dyn Fn(Event) + Sync)) -> Result<Report> {
    let mut tensors = Vec::new();
    for shard in &plan.shards {
        tensors.extend(Writer { shard, device: &plan.device, progress }.write(ShardFile::nowhere())?);
    }
    check_finite(plan, &tensors)?;
    let file = WrittenFile { file: String::new(), sha256: String::new() };
    let mut report = report(plan, &[Finished { file, tensors }]);
    report.files.clear();
    Ok(report)
}

fn report(plan: &Plan, finished: &[Finished]) -> Report {
    let mut tensors: Vec<_> = finished.iter().flat_map(|entry| entry.tensors.clone()).collect();
    tensors.sort_by(|a, b| b.relative_rms.total_cmp(&a.relative_rms));
    let file = |entry: &Finished| WrittenFile {
        file: plan.target.kind().published(&entry.file),
        sha256: entry.file.sha256.clone(),
    };
    Report {
        source_bytes: plan.source_bytes(),
        bytes: plan.bytes(),
        bits_per_weight: plan.bits_per_weight(),
        files: finished.iter().map(file).collect(),
        tensors,
    }
}

fn check_finite(plan: &Plan, tensors: &[Quality]) -> Result<()> {
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

fn check_quality(report: &Report, options: &RunOptions) -> Result<()> {
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

fn write_companions(plan: &Plan, staging: &Staging) -> Result<()> {
    if let Some(config) = plan.config_json()? {
        write_synced(&staging.path("config.json"), config.as_bytes())?;
    }
    for (name, text) in plan.target.kind().companions(plan) {
        write_synced(&staging.path(name), text.as_bytes())?;
    }
    let copied = plan.copied_files()?;
    for (name, path) in &copied {
        let bytes = fs::read(path).map_err(|error| Error::Io { path: path.clone(), error })?;
        write_synced(&staging.path(name), &bytes)?;
    }
    if !copied.iter().any(|(name, _)| name == TOKENIZER) {
        // That there is none that can be read is among the plan's notes.
        let text = stored_tokenizer(&plan.source)
            .ok()
            .flatten()
            .and_then(|tokenizer| tokenizer.to_string(false).ok());
        if let Some(text) = text {
            write_synced(&staging.path(TOKENIZER), text.as_bytes())?;
        }
    }
    Ok(())
}
