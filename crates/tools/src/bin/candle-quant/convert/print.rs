//! Plans and reports, for people and as JSON.

use candle_quant_tools::convert::{ConvertPlan, ConvertReport, Spec};
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// Tensors that are shown of a report.
const WORST: usize = 10;

pub fn plan(out: &mut impl Write, plan: &ConvertPlan, available: Option<u64>) -> io::Result<()> {
    for tensor in plan.tensors() {
        let note = tensor.fallback.as_ref().map_or_else(String::new, |reason| format!("  [{reason}]"));
        writeln!(
            out,
            "{}  {:?}  {}  {} -> {}  {} bytes  ({}){note}",
            tensor.name, tensor.shape, tensor.role, tensor.from, tensor.to, tensor.bytes, tensor.rule
        )?;
    }
    summary(out, plan)?;
    if let Some(available) = available {
        let verdict = if available < plan.disk_bytes() { ", which is too little" } else { "" };
        writeln!(out, "available there: {}{verdict}", megabytes(available))?;
    }
    writeln!(out, "peak memory: about {}", megabytes(plan.peak_memory()))?;
    for note in plan.notes() {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}

fn summary(out: &mut impl Write, plan: &ConvertPlan) -> io::Result<()> {
    let (from, to) = (plan.source_bytes(), plan.bytes());
    let share = if from == 0 { 100. } else { to as f64 * 100. / from as f64 };
    let tensors = plan.tensors().count();
    writeln!(
        out,
        "{tensors} tensors, {} -> {} ({share:.1} %), {:.3} bits per weight, {:.2} % of the weights are dense",
        megabytes(from),
        megabytes(to),
        plan.bits_per_weight(),
        plan.dense_share() * 100.
    )?;
    let files = match plan.files().count() {
        1 => "1 file".to_owned(),
        count => format!("{count} files"),
    };
    writeln!(out, "{files} of weights, {} on the disk", megabytes(plan.disk_bytes()))?;
    for (reason, count) in fallbacks(plan) {
        writeln!(out, "fall-back: {count} x {reason}")?;
    }
    Ok(())
}

/// How many tensors fall back, by what they become and why.
fn fallbacks(plan: &ConvertPlan) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for tensor in plan.tensors() {
        if let Some(reason) = &tensor.fallback {
            *counts.entry(format!("{}: {reason}", tensor.to)).or_default() += 1;
        }
    }
    counts
}

pub fn plan_json(plan: &ConvertPlan, available: Option<u64>) -> Value {
    let files = plan.files().map(|(file, bytes)| json!({"file": file, "bytes": bytes}));
    json!({
        "tensors": plan.tensors().collect::<Vec<_>>(),
        "files": files.collect::<Vec<_>>(),
        "source_bytes": plan.source_bytes(),
        "bytes": plan.bytes(),
        "disk_bytes": plan.disk_bytes(),
        "available_bytes": available,
        "bits_per_weight": plan.bits_per_weight(),
        "dense_share": plan.dense_share(),
        "peak_memory": plan.peak_memory(),
        "fallbacks": plan.fallbacks(),
        "notes": plan.notes(),
    })
}

pub fn report(
    out: &mut impl Write,
    plan: &ConvertPlan,
    report: &ConvertReport,
    path: &Path,
) -> io::Result<()> {
    if !report.tensors.is_empty() {
        writeln!(
            out,
            "{:>9} {:>8} {:>11} {:>11} {:>9}  worst",
            "rel. RMS", "SQNR dB", "largest", "1 - cosine", "saturated"
        )?;
    }
    for tensor in report.tensors.iter().take(WORST) {
        let number = |value: Option<f64>, digits: usize| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        writeln!(
            out,
            "{:>9.5} {:>8} {:>11.3e} {:>11} {:>9}  {} ({})",
            tensor.relative_rms,
            number(tensor.sqnr_db, 2),
            tensor.max_abs,
            tensor.cosine.map_or("-".to_owned(), |cosine| format!("{:.2e}", 1. - cosine)),
            tensor.saturated,
            tensor.name,
            tensor.to
        )?;
        if tensor.nan + tensor.infinite + tensor.overflowing > 0 {
            writeln!(
                out,
                "          {} NaN, {} infinite, {} too large",
                tensor.nan, tensor.infinite, tensor.overflowing
            )?;
        }
    }
    summary(out, plan)?;
    for note in plan.notes() {
        writeln!(out, "note: {note}")?;
    }
    writeln!(out, "{}", path.display())
}

pub fn comparison(out: &mut impl Write, reports: &[(Spec, ConvertReport)]) -> io::Result<()> {
    writeln!(out, "{:>14} {:>12} {:>9} {:>9} {:>9}  worst", "format", "size", "bits", "median", "largest")?;
    for (format, report) in reports {
        let error = |index: usize| report.tensors.get(index).map_or(0., |tensor| tensor.relative_rms);
        writeln!(
            out,
            "{:>14} {:>12} {:>9.3} {:>9.5} {:>9.5}  {}",
            format.to_string(),
            megabytes(report.bytes),
            report.bits_per_weight,
            error(report.tensors.len() / 2),
            error(0),
            report.tensors.first().map_or("-", |tensor| tensor.name.as_str())
        )?;
    }
    Ok(())
}

pub fn comparison_json(reports: &[(Spec, ConvertReport)]) -> Value {
    reports.iter().map(|(format, report)| json!({"format": format.to_string(), "report": report})).collect()
}

fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}
