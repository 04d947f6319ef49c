//! What is measured with models that are loaded: decode, prefill, forwards, batches.

use crate::contenders::Contender;
use crate::files::Files;
use crate::options::{Library, Options, Part};
use crate::report::{Case, Report};
use anyhow::Result;
use std::time::Instant;

/// Up to here a context is filled anew for every round; a longer one grows a little by the steps of the rounds.
const SHORT: usize = 64;
/// The context of forwards and batches.
const BEFORE: usize = 16;
/// Prompts longer than this have at most three rounds.
const LONG: usize = 1024;

pub fn measure(options: &Options, files: &Files, bandwidth: &[f64], report: &mut Report) -> Result<()> {
    let mut contenders = Contender::all(options, files)?;
    if options.wants(Part::Prefill) {
        prefill(options, files, &mut contenders, report)?;
    }
    if options.wants(Part::Forward) {
        forwards(options, files, &mut contenders, report)?;
    }
    if options.wants(Part::Batch) {
        batches(options, files, &mut contenders, report)?;
    }
    if options.wants(Part::Decode) {
        decode(options, files, bandwidth, &mut contenders, report)?;
    }
    Ok(())
}

/// Measures in turns; `value` makes a figure of seconds.
fn rounds(
    (case, unit, rounds): (Case, &'static str, u32),
    contenders: &mut [Contender],
    report: &mut Report,
    value: impl Fn(f64) -> f64,
    mut measure: impl FnMut(&mut Contender) -> Result<f64>,
) -> Result<()> {
    report.begin(&case, unit, rounds)?;
    let mut values = vec![Vec::new(); contenders.len()];
    for _ in 0..rounds {
        report.wait()?;
        for (contender, values) in contenders.iter_mut().zip(&mut values) {
            let value = value(measure(contender)?);
            report.round(&case, contender.library.name(), value)?;
            values.push(value);
        }
        report.end_round()?;
    }
    for (contender, values) in contenders.iter().zip(&values) {
        report.write(case.figure(contender.library.name(), unit, values))?;
    }
    Ok(())
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

fn prefill(
    options: &Options,
    files: &Files,
    contenders: &mut [Contender],
    report: &mut Report,
) -> Result<()> {
    for &prompt in &options.prompts {
        let count = if prompt > LONG { options.rounds.min(3) } else { options.rounds };
        let case = Case::new("prefill", files, prompt);
        let rate = |seconds| prompt as f64 / seconds;
        rounds((case, "tokens/s", count), contenders, report, rate, |contender| {
            contender.clear();
            seconds(|| contender.prefill(prompt))
        })?;
    }
    Ok(())
}

fn decode(
    options: &Options,
    files: &Files,
    bandwidth: &[f64],
    contenders: &mut [Contender],
    report: &mut Report,
) -> Result<()> {
    let steps = f64::from(options.steps);
    // A floor is what the best round of reading allows.
    let bytes_per_s = bandwidth.iter().copied().fold(0., f64::max) * 1e9;
    for &context in &options.contexts {
        for contender in contenders.iter_mut() {
            contender.reach(context)?;
            contender.forward_last(1, 1)?;
        }
        let case = Case::new("decode", files, context);
        let floor = bytes_per_s / (files.bytes + files.shape.cache_bytes(context)) as f64;
        report.write(case.figure("byte floor", "tokens/s", &[floor]))?;
        rounds(
            (case, "tokens/s", options.rounds),
            contenders,
            report,
            |s| steps / s,
            |contender| {
                if context <= SHORT {
                    contender.reach(context)?;
                }
                seconds(|| (0..options.steps).try_for_each(|_| contender.forward_last(1, 1)))
            },
        )?;
    }
    Ok(())
}

/// Forwards of a round.
fn few(options: &Options) -> u32 {
    options.steps.div_ceil(4)
}

fn forwards(
    options: &Options,
    files: &Files,
    contenders: &mut [Contender],
    report: &mut Report,
) -> Result<()> {
    let count = few(options);
    for &tokens in &options.tokens {
        let case = Case::new("forward", files, tokens);
        let milliseconds = |seconds: f64| seconds * 1e3 / f64::from(count);
        rounds((case, "ms", options.rounds), contenders, report, milliseconds, |contender| {
            contender.clear();
            contender.reach(BEFORE)?;
            seconds(|| (0..count).try_for_each(|_| contender.forward(tokens)))
        })?;
    }
    Ok(())
}

fn batches(
    options: &Options,
    files: &Files,
    contenders: &mut [Contender],
    report: &mut Report,
) -> Result<()> {
    let count = few(options);
    for contender in contenders.iter_mut().filter(|contender| contender.library == Library::CandleQuant) {
        for &batch in &options.tokens {
            let case = Case::new("batch", files, batch);
            let milliseconds = |seconds: f64| seconds * 1e3 / f64::from(count);
            let alone = std::slice::from_mut(contender);
            rounds((case, "ms", options.rounds), alone, report, milliseconds, |contender| {
                contender.clear();
                contender.forward_last(batch, BEFORE)?;
                seconds(|| (0..count).try_for_each(|_| contender.forward_last(batch, 1)))
            })?;
        }
        // The cache has the shape of a batch.
        contender.clear();
    }
    Ok(())
}
