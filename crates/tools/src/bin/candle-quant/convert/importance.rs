//! `--calibrate`, `--statistics`, `--imatrix`, `--feedback` and `--awq`: how much the columns of weights count.

use super::{check_writable, code, Options, Progress, BAD_INPUT, IO, USAGE};
use anyhow::bail;
use candle_quant::{Checkpoint, Error};
use candle_quant_tools::convert::{column_scales, ConvertOptions, ConvertPlan};
use candle_quant_tools::importance::{read_imatrix, CalibrationText, Collector, Statistics};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long what was found is kept in memory alone.
const UNSAVED: Duration = Duration::from_secs(20);

/// Refuses options that nothing would come of.
pub fn check(options: &Options) -> anyhow::Result<()> {
    let weighs = options.search || options.target_bpw.is_some();
    for (is_given, is_used, what) in [
        (options.imatrix.is_some(), weighs, "--imatrix is for --search and --target-bpw"),
        (
            options.calibrate.is_some(),
            weighs || options.feedback || options.awq || options.statistics.is_some(),
            "--calibrate is for --search, --target-bpw, --feedback and --awq, or to keep --statistics",
        ),
        (
            options.statistics.is_some(),
            weighs || options.calibrate.is_some(),
            "--statistics is for --search and --target-bpw, or for --calibrate to write",
        ),
        (
            options.imatrix.is_some() && options.calibrate.is_some(),
            options.feedback || options.awq,
            "--imatrix stands for what --calibrate finds: leave one of them out, or give --feedback or --awq",
        ),
    ] {
        if is_given && !is_used {
            bail!(what);
        }
    }
    Ok(())
}

/// Where what --awq finds is kept: beside the statistics, with `.awq` behind their name.
fn scales_beside(statistics: &Path) -> PathBuf {
    let mut name = statistics.as_os_str().to_owned();
    name.push(".awq");
    name.into()
}

/// The exit code of an error of a file of statistics, or of a text.
fn in_file(error: Error) -> (anyhow::Error, u8) {
    let code = code(&error);
    (error.into(), code)
}

/// The plan of what is to be done, to which statistics and the text of a calibration are added; with --awq after the model has
/// told by what columns are multiplied.
pub fn plan(
    options: &Options,
    source: &Checkpoint,
    conversion: &mut ConvertOptions,
    text: Option<&CalibrationText>,
) -> Result<ConvertPlan, (anyhow::Error, u8)> {
    let bad_input = |error: Error| (error.into(), BAD_INPUT);
    let plan = ConvertPlan::new(source, conversion).map_err(bad_input)?;
    let Some(text) = text.filter(|_| options.awq) else { return Ok(plan) };
    let kept = options.statistics.as_ref().map(|path| scales_beside(path));
    if let Some(path) = &kept {
        check_writable(path).map_err(|error| (error, IO))?;
    }
    let progress = Progress::new("inputs", options.quiet, options.json_progress);
    let is_planned = Cell::new(false);
    let scales = column_scales(&plan, text, kept.as_deref(), &|done, all| {
        if is_planned.replace(true) {
            progress.advance("scaling", 1);
            progress.finish_one("scaling");
        } else {
            progress.plan(all, all as u64);
            progress.skip(done, done as u64);
        }
    });
    progress.finish();
    conversion.scales = Some(Arc::new(scales.map_err(in_file)?));
    ConvertPlan::new(source, conversion).map_err(bad_input)
}

/// Adds statistics and the text of a calibration to what is to be done, and returns the text.
pub fn add(
    options: &Options,
    source: &Checkpoint,
    conversion: &mut ConvertOptions,
) -> Result<Option<Arc<CalibrationText>>, (anyhow::Error, u8)> {
    check(options).map_err(|error| (error, USAGE))?;
    let text = options.calibrate.as_ref().map(|path| CalibrationText::read(source, path));
    let text = text.transpose().map_err(in_file)?;
    // By feedback alone columns do not count differently: what they are given is seen when they are packed.
    let weighs = options.search || options.target_bpw.is_some() || options.statistics.is_some();
    let statistics = match (&options.imatrix, &text, &options.statistics) {
        (Some(path), ..) => Some(read_imatrix(source, path).map_err(in_file)?),
        (None, Some(text), kept) if weighs => Some(collect(options, source, text, kept.as_deref())?),
        (None, None, Some(path)) => Some(Statistics::read(source, path).map_err(in_file)?),
        (None, _, _) => None,
    };
    conversion.statistics = statistics.map(Arc::new);
    let text = text.map(Arc::new);
    conversion.feedback = text.clone().filter(|_| options.feedback);
    Ok(text)
}

/// Runs the model, or takes up what is in the file.
fn collect(
    options: &Options,
    source: &Checkpoint,
    text: &CalibrationText,
    kept: Option<&Path>,
) -> Result<Statistics, (anyhow::Error, u8)> {
    let bad_input = |error: Error| (error.into(), BAD_INPUT);
    if let Some(path) = kept {
        check_writable(path).map_err(|error| (error, IO))?;
    }
    let mut collector = Collector::new(source, text).map_err(bad_input)?;
    let is_done = kept.map(|path| collector.take_up(path)).transpose().map_err(in_file)?.unwrap_or(false);
    if is_done {
        return Ok(collector.statistics());
    }
    let progress = Progress::new("texts", options.quiet, options.json_progress);
    let (done, all) = collector.done();
    progress.plan(all, 4 * text.tokens() as u64);
    let bytes = |pieces: &[Vec<u32>]| pieces.iter().map(|piece| 4 * piece.len() as u64).sum();
    progress.skip(done, bytes(text.pieces().get(..done).unwrap_or_default()));
    let mut saved = Instant::now();
    for piece in text.pieces().iter().skip(done) {
        collector.advance().map_err(bad_input)?;
        progress.advance("calibrating", 4 * piece.len() as u64);
        progress.finish_one("calibrating");
        if let Some(path) = kept.filter(|_| saved.elapsed() > UNSAVED) {
            collector.write(path).map_err(in_file)?;
            saved = Instant::now();
        }
    }
    progress.finish();
    if let Some(path) = kept {
        collector.write(path).map_err(in_file)?;
    }
    Ok(collector.statistics())
}
